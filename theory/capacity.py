"""How much a class of functions can fit: random labels, Rademacher values, degrees of freedom."""

import math
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jaxtyping import Array, Float, Key

from theory.checks import (
    as_numbers,
    check_count,
    check_finite,
    check_number,
    check_points,
    check_positive,
)
from theory.manifolds import draw_uniform

Fit = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""From inputs [points, D] and labels [points] to the fitted values [points]."""


def empirical_capacity(
    key: Key[Array, ""],
    fit: Fit,
    draw: Callable[[Array, int], np.ndarray],
    sizes: Sequence[int],
    *,
    tolerance: float = 1e-3,
) -> int:
    """Largest of the sizes at which random labels, uniform in [-1, 1], are fitted to `tolerance`.

    Args:
        key: draws inputs and labels.
        fit: the class, see `Fit`.
        draw: (key, number) -> inputs.
        sizes: increasing; the search stops at the first that is not fitted.
        tolerance: root mean squared error that counts as fitted.

    Returns:
        The size, or 0.

    Raises:
        ValueError: if the sizes do not increase, the tolerance is not positive, or the fit does not
            give a value a label.
    """
    check_positive("tolerance", tolerance)
    sizes = [check_count("sizes", size) for size in np.ravel(np.asarray(sizes, object))]
    if sizes != sorted(set(sizes)) or not sizes:
        raise ValueError(f"sizes={tuple(sizes)} must be positive and increase")
    fitted = 0
    for index, size in enumerate(sizes):
        input_key, label_key = jax.random.split(jax.random.fold_in(key, index))
        labels = draw_uniform(label_key, (size,), -1.0, 1.0)
        error = _fitted(fit, draw(input_key, size), labels) - labels
        if not np.sqrt(np.mean(error**2)) <= tolerance:
            break
        fitted = size
    return fitted


def rademacher_value(
    key: Key[Array, ""], fit: Fit, x: Float[np.ndarray, "points D"], num_draws: int = 20
) -> float:
    """Mean over random signs s of sum_i s_i f(x_i) / n, f the class's fit to s.

    1 where any signs are fitted; 0 for a constant 0. It estimates the Rademacher complexity from
    below, as far as `fit` finds the best function.

    Raises:
        ValueError: if there is no point or no draw, or the fit does not give a value a point.
    """
    x = check_points("x", x)
    check_count("num_draws", num_draws)
    signs = np.where(draw_uniform(key, (num_draws, len(x)), -1.0, 1.0) < 0, -1.0, 1.0)
    values = [_fitted(fit, x, s) for s in signs]
    check_finite("fit", np.array(values))
    return float(np.mean([s @ each / len(x) for s, each in zip(signs, values, strict=True)]))


def degrees_of_freedom(features: Float[np.ndarray, "points features"], ridge: float) -> float:
    """Trace of the ridge regression's hat matrix, sum_i s_i / (s_i + ridge), s of Phi^T Phi.

    Raises:
        ValueError: if a feature or the ridge is not finite, or the ridge is negative.
    """
    features = check_points("features", features)
    ridge = check_number("ridge", ridge, 0.0)
    s = np.linalg.svd(features, compute_uv=False) ** 2
    s = s[s > 1e-12 * s.max(initial=0.0)]
    return float(np.sum(s / (s + ridge)))


def pseudo_dimension_sketch(num_parameters: int, num_layers: int, expert_depth: int) -> float:
    """P l L log P, the order of a top-1 piecewise-linear mixture's pseudo-dimension.

    A sketch after Warren's bound, up to constants; not proved here. P counts all parameters, not
    the active ones: an expert that no point uses still lets the gate choose.

    Raises:
        ValueError: if a count is below 1.
    """
    check_count("num_parameters", num_parameters)
    check_count("num_layers", num_layers)
    check_count("expert_depth", expert_depth)
    return num_parameters * expert_depth * num_layers * math.log(max(num_parameters, 2))


def _fitted(fit: Fit, x: np.ndarray, labels: np.ndarray) -> np.ndarray:
    values = as_numbers("fit", fit(x, labels))
    if values.shape != labels.shape:
        raise ValueError(f"fit gives {values.shape} for labels {labels.shape}")
    return values
