"""Checks of what callers pass, in one line each; types are only checked in the tests."""

from typing import Any

import numpy as np

LARGEST_COUNT = 2**63 - 1

LARGEST = 1e150
"""Squares of larger numbers are infinite."""


def check_points(
    name: str,
    points: Any,
    dim: int | None = None,
    *,
    least: int = 1,
    finite: bool = True,
    largest: float = LARGEST,
) -> np.ndarray:
    """Returns the rows as float64.

    Raises:
        ValueError: unless there are `least` rows of numbers, of `dim` entries if it is given, and
            all are finite and no larger than `largest`.
    """
    array = as_numbers(name, points)
    if array.ndim != 2 or (dim is not None and array.shape[1] != dim):
        raise ValueError(
            f"{name} {array.shape} are not rows of {'numbers' if dim is None else f'{dim} numbers'}"
        )
    if len(array) < least or array.shape[1] < 1:
        raise ValueError(f"{name} {array.shape} must hold at least {least} rows of 1 entry or more")
    if finite:
        check_finite(name, array, largest)
    return array


def check_finite(name: str, array: np.ndarray, largest: float = LARGEST) -> None:
    """Raises ValueError if an entry is NaN, infinite or larger than `largest` in size."""
    bad = np.size(array) - np.count_nonzero(np.isfinite(array))
    if bad:
        raise ValueError(f"{name} {array.shape} must be finite; {bad} entries are not")
    if array.size and np.abs(array).max() > largest:
        raise ValueError(
            f"{name} {array.shape} hold {np.abs(array).max():.3g}; expected at most {largest:g}"
        )


def check_indices(name: str, index: Any, length: int, bound: int | None = None) -> np.ndarray:
    """Returns one index a point.

    Raises:
        ValueError: unless they are `length` whole numbers from 0, below `bound` if it is given.
    """
    array = np.asarray(index)
    if array.shape != (length,) or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(
            f"{name} {array.dtype}{array.shape} are not {length} whole numbers, one a point"
        )
    if array.size and (array.min() < 0 or (bound is not None and array.max() >= bound)):
        raise ValueError(
            f"{name} hold {array.min()} to {array.max()}; expected at least 0"
            + ("" if bound is None else f" and below {bound}")
        )
    return array


def check_count(name: str, value: Any, least: int = 1, most: int | None = None) -> int:
    """Returns a whole number.

    Raises:
        ValueError: unless it is one, at least `least` and at most `most`, if that is given.
    """
    is_whole = isinstance(value, int | np.integer) and not isinstance(value, bool | np.bool_)
    if not is_whole:
        shown = f"={value!r}" if np.ndim(value) == 0 else f" {np.shape(value)}"
        raise ValueError(f"{name}{shown} must be a whole number")
    if value < least or value > (LARGEST_COUNT if most is None else most):
        if value > LARGEST_COUNT:
            raise ValueError(f"{name} has {len(str(value))} digits; expected below 2^63")
        bound = f"must be at least {least}" if most is None else f"is not in [{least}, {most}]"
        raise ValueError(f"{name}={value} {bound}")
    return int(value)


def check_positive(name: str, value: Any) -> float:
    """Returns a number.

    Raises:
        ValueError: unless it is one, positive and at most 1e150.
    """
    number = check_number(name, value)
    if not 0 < number <= LARGEST:
        raise ValueError(f"{name}={number} must be positive and at most {LARGEST:g}")
    return number


def check_number(name: str, value: Any, least: float = -np.inf) -> float:
    """Returns a number.

    Raises:
        ValueError: unless it is one, finite and at least `least`.
    """
    number = as_numbers(name, value)
    if number.shape:
        raise ValueError(f"{name} {number.shape} must be a number")
    if not np.isfinite(number) or number < least:
        bound = "" if least == -np.inf else f" and at least {least:g}"
        raise ValueError(f"{name}={number} must be finite{bound}")
    return float(number)


def as_numbers(name: str, values: Any) -> np.ndarray:
    """Returns an array of float64.

    Raises:
        ValueError: if they are not real numbers.
    """
    try:
        array = np.asarray(values)
    except ValueError:
        array = np.empty(0, object)
    if not (np.issubdtype(array.dtype, np.integer) or np.issubdtype(array.dtype, np.floating)):
        raise ValueError(f"{name} must hold real numbers, not {array.dtype}")
    return array.astype(np.float64)
