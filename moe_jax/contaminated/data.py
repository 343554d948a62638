"""What users hand in, checked once and made into the arrays of an estimation."""

from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Float

from moe_jax.contaminated.expert import Expert

# Of values whose squares are still summed without overflow.
_LARGEST = 1e100


def check_covariates(x: ArrayLike) -> Float[np.ndarray, "n d"]:
    """X as float64.

    Raises:
        ValueError: if it is not a matrix of finite numbers.
    """
    array = real_numbers(x, "x")
    if array.ndim != 2:
        remedy = ": x[:, None] is one covariate" if array.ndim == 1 else ""
        raise ValueError(f"x has shape {array.shape}, expected [rows, covariates]{remedy}")
    _check_finite(array, "x")
    return array


def check_data(x: ArrayLike, y: ArrayLike, expert: Expert) -> tuple[np.ndarray, np.ndarray]:
    """X and y as float64; integers are accepted.

    Raises:
        ValueError: if there are no rows, their numbers differ, a value is not finite or a label is
            out of range.
    """
    x, y = check_covariates(x), real_numbers(y, "y")
    if y.ndim != 1:
        raise ValueError(f"y has shape {y.shape}, expected [rows]")
    if len(x) != len(y):
        raise ValueError(f"x has {len(x)} rows and y has {len(y)}: they must be the same rows")
    if not len(y):
        raise ValueError("x and y have no rows")
    _check_finite(y, "y")
    check_labels(y, expert)
    return x, y


def real_numbers(values: Any, name: str) -> np.ndarray:
    """Values as float64; integers, booleans and Python's own numbers are accepted.

    Raises:
        ValueError: if they are anything else.
    """
    if np.ma.is_masked(values):
        raise ValueError(f"{name} is a masked array: give the mask of its rows as mask=")
    try:
        array = np.asarray(values)
        # Objects may be numbers, as in a column of a data frame that once held others.
        array = array.astype(np.float64) if array.dtype == object else array
    except (TypeError, ValueError):
        raise ValueError(
            f"{name} holds other things than numbers, or rows of unequal length"
        ) from None
    if array.dtype.kind not in "biuf" and array.dtype.name != "bfloat16":
        raise ValueError(f"{name} has dtype {array.dtype}, expected real numbers")
    return array.astype(np.float64)


def check_labels(y: np.ndarray, expert: Expert) -> None:
    """Raises ValueError if the expert is a classifier and y holds anything but its labels."""
    if expert.labels is None:
        return
    bad = (y != np.round(y)) | (y < 0) | (y >= expert.labels)
    if np.any(bad):
        raise ValueError(
            f"y={y[bad].flat[0]:g} at row {_rows(bad)}: expected labels in 0..{expert.labels - 1}"
        )


def check_weight(
    sample_weight: ArrayLike | None, mask: ArrayLike | None, shape: tuple[int, ...]
) -> Float[np.ndarray, "..."]:
    """Weights of the rows, 0 where masked out.

    Raises:
        ValueError: if a shape is wrong, a weight negative or not finite, or none is positive.
    """
    weight = (
        np.ones(shape) if sample_weight is None else real_numbers(sample_weight, "sample_weight")
    )
    keep = np.ones(shape, bool) if mask is None else np.asarray(mask)
    for name, array in (("sample_weight", weight), ("mask", keep)):
        if array.shape != shape:
            raise ValueError(f"{name} has shape {array.shape}, expected {shape}")
    if keep.dtype != bool:
        raise ValueError(f"mask has dtype {keep.dtype}, expected bool")
    if not np.all((weight >= 0) & (weight < np.inf)):
        raise ValueError(
            f"sample_weight={np.min(weight)} to {np.max(weight)}, expected values in [0, inf)"
        )
    weight = np.where(keep, weight, 0.0)
    if weight.size and not np.all(np.sum(weight, axis=-1) > 0):
        raise ValueError("mask and sample_weight leave no row with a positive weight")
    return weight


def frozen_log_prob(frozen: Any, x: np.ndarray, y: np.ndarray) -> Float[np.ndarray, " n"]:
    """Log f0(y_i | x_i) as float64, whatever it holds.

    Raises:
        ValueError: if there is not one value a row.
    """
    with jax.enable_x64(True):
        values = np.asarray(frozen.log_prob(x, y)).astype(np.float64)
    if values.shape != y.shape:
        raise ValueError(
            f"frozen.log_prob returns shape {values.shape} for {len(y)} rows, expected ({len(y)},)"
        )
    return values


def check_log_frozen(log_frozen: np.ndarray, weight: np.ndarray) -> None:
    """Raises ValueError, naming rows, where a frozen log-density that counts is NaN or +inf.

    -inf is allowed: the frozen model rules the row out.
    """
    for bad, value in ((np.isnan(log_frozen), "NaN"), (log_frozen == np.inf, "+inf")):
        if np.any(bad & (weight > 0)):
            raise ValueError(
                f"the frozen log-density is {value} at rows {_rows(bad & (weight > 0))}"
            )


def fill_absent(weight: np.ndarray, *arrays: np.ndarray) -> list[np.ndarray]:
    """Arrays [n, ...] whose rows of weight 0 repeat the first row that counts.

    Absent rows may hold anything, even NaN, which a weight of 0 would not remove.
    """
    present = weight > 0
    if np.all(present):
        return list(arrays)
    rows = np.where(present, np.arange(len(weight)), np.argmax(present))
    return [a[rows] for a in arrays]


def _check_finite(array: np.ndarray, name: str) -> None:
    finite = np.isfinite(array)
    for bad, what in ((~finite, "not finite"), (np.abs(array) > _LARGEST, "beyond 1e100 in size")):
        if np.any(bad):
            bad_rows = bad if array.ndim == 1 else np.any(bad, axis=1)
            raise ValueError(f"{name} is {what} at rows {_rows(bad_rows)}")


def _rows(bad: np.ndarray, most: int = 5) -> str:
    """Numbers of the first rows that are True."""
    rows = np.flatnonzero(bad)
    return ", ".join(str(r) for r in rows[:most]) + (
        f" and {len(rows) - most} more" if len(rows) > most else ""
    )
