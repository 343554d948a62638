"""Covariances, Wald tests and the delta method from an information matrix."""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import ndtri
from jax.scipy.stats import chi2
from jaxtyping import Bool, Float

from moe_jax.contaminated.layout import Family, unflatten

Kind = Literal["observed", "opg", "sandwich"]


class Wald(NamedTuple):
    """Statistic, degrees of freedom and p-value of a Wald test."""

    statistic: float
    df: int
    p_value: float


class Derived(NamedTuple):
    """Estimate, standard error and interval of a function of the parameters, shaped alike."""

    value: np.ndarray
    standard_error: np.ndarray
    low: np.ndarray
    high: np.ndarray


def covariance(
    information: Float[np.ndarray, "p p"],
    outer_product: Float[np.ndarray, "p p"],
    movable: Bool[np.ndarray, " p"],
    kind: Kind = "observed",
) -> Float[np.ndarray, "p p"]:
    """Covariance of the movable entries, 0 for the others.

    With J the observed information and G the sum of g g^T over the rows' scores: J^-1 (observed),
    G^-1 (opg), J^-1 G J^-1 (sandwich), which also holds when the model is wrong. NaN where the
    matrix to invert is not safely positive definite; never a pseudo-inverse.

    Raises:
        ValueError: if the kind is unknown.
    """
    if kind not in ("observed", "opg", "sandwich"):
        raise ValueError(f"kind={kind!r}, expected 'observed', 'opg' or 'sandwich'")
    inside = np.ix_(movable, movable)
    inverse = positive_inverse((outer_product if kind == "opg" else information)[inside])
    if kind == "sandwich":
        inverse = inverse @ outer_product[inside] @ inverse
    full = np.zeros_like(information)
    full[inside] = inverse
    return full


def positive_inverse(
    matrix: Float[np.ndarray, "k k"], floor: float = 1e-8
) -> Float[np.ndarray, "k k"]:
    """Inverse of a positive definite matrix; NaN if it has an eigenvalue below `floor`.

    The eigenvalues are those after scaling to a unit diagonal.
    """
    diagonal = np.diagonal(matrix)
    if not len(matrix):
        return matrix
    if not (np.all(np.isfinite(matrix)) and np.all(diagonal > 0)):
        return np.full_like(matrix, np.nan)
    scale = 1.0 / np.sqrt(diagonal)
    values, vectors = np.linalg.eigh(matrix * scale[:, None] * scale[None, :])
    if values[0] < floor:
        return np.full_like(matrix, np.nan)
    root = scale[:, None] * vectors / np.sqrt(values)
    return root @ root.T


def normal_quantile(level: float) -> float:
    """Half-width, in standard errors, of a two-sided interval.

    Raises:
        ValueError: if the level is not between 0 and 1.
    """
    if not 0 < level < 1:
        raise ValueError(f"level={level}, expected a number in (0, 1)")
    with jax.enable_x64(True):
        return float(ndtri(jnp.asarray(0.5 + 0.5 * level)))


def chi2_tail(statistic: float, df: int) -> float:
    """P(chi-squared >= statistic)."""
    with jax.enable_x64(True):
        tail = chi2.sf(jnp.asarray(statistic, jnp.float64), df)
    return float(tail) if math.isfinite(statistic) else math.nan


def wald_test(theta: np.ndarray, values: np.ndarray, cov: np.ndarray) -> Wald:
    """Tests that theta has `values`, NaN for entries that the hypothesis leaves open.

    Raises:
        ValueError: if it leaves all of them open.
    """
    tested = ~np.isnan(values)
    if not tested.any():
        raise ValueError("the hypothesis names no value")
    difference = (theta - values)[tested]
    sub = cov[np.ix_(tested, tested)]
    inverse = positive_inverse(sub, floor=1e-12)
    statistic = float(difference @ inverse @ difference)
    return Wald(statistic, int(tested.sum()), chi2_tail(statistic, int(tested.sum())))


def delta_method(
    function: Callable[[dict[str, Any]], Any],
    family: Family,
    theta: np.ndarray,
    cov: np.ndarray,
    d: int,
    level: float = 0.95,
) -> Derived:
    """Value of function(params) with the standard error sqrt(diag(D cov D^T)), D its derivatives.

    Entries that the function does not depend on do not matter, even where their variance is NaN.
    """
    with jax.enable_x64(True):

        def flat(t: Any) -> Any:
            return jnp.asarray(function(unflatten(family, t, d)))

        point = jnp.asarray(theta)
        value = np.asarray(flat(point))
        slope = np.asarray(jax.jacfwd(flat)(point)).reshape(value.size, theta.size)
    variance = [row[row != 0] @ cov[np.ix_(row != 0, row != 0)] @ row[row != 0] for row in slope]
    error = np.sqrt(np.asarray(variance, np.float64)).reshape(value.shape)
    half = normal_quantile(level) * error
    return Derived(value, error, value - half, value + half)
