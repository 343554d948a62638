"""Functions to approximate: in a manifold's own coordinates [points, k] -> [points, outputs]."""

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Array, Float, Key

from theory.checks import as_numbers, check_count, check_number, check_points
from theory.manifolds import draw_normal

Target = Callable[[np.ndarray], np.ndarray]


def waves(first: float = 5.0, second: float = 3.0) -> Target:
    """sin(a x_1) + cos(b x_2), analytic. a = 5, b = 3 is the paper's function on the circle."""
    return lambda x: np.sin(first * x[:, :1]) + np.cos(second * x[:, 1:2])


def kinks(
    directions: Float[np.ndarray, "k outputs"], exponent: float, offset: float = 0.3
) -> Target:
    """|<u, x> - offset|^exponent, one output for each column u.

    Exponent 1 is Lipschitz with a kink, an exponent below 1 Hoelder of that order.

    Raises:
        ValueError: if the exponent is not in (0, 1], the offset not finite or directions are not
            columns of finite numbers.
    """
    directions = check_points("directions", directions)
    if not 0 < check_number("exponent", exponent) <= 1:
        raise ValueError(f"exponent={exponent} is not in (0, 1]")
    offset = check_number("offset", offset)
    return lambda x: np.abs(x @ directions - offset) ** exponent


def circle_directions(num: int) -> Float[np.ndarray, "2 num"]:
    """Directions whose kinks fall on `num` places relative to the knots of a chart.

    Raises:
        ValueError: if num is below 1.
    """
    check_count("num", num)
    angle = 2 * np.pi * (np.arange(num) + 0.5 * (np.sqrt(5) - 1) * np.arange(num)) / num
    return np.stack([np.cos(angle), np.sin(angle)])


def random_directions(key: Key[Array, ""], dim: int, num: int) -> Float[np.ndarray, "dim num"]:
    """Unit vectors, uniform.

    Raises:
        ValueError: if dim or num is below 1.
    """
    check_count("dim", dim)
    check_count("num", num)
    raw = draw_normal(key, (dim, num))
    return raw / np.linalg.norm(raw, axis=0)


def ring_index(
    x: Float[np.ndarray, "points 2"], radii: Sequence[float]
) -> Float[np.ndarray, "points"]:
    """Number of the radii that a point's distance from 0 reaches, as a float: 0 for the disc.

    Raises:
        ValueError: unless points are finite and in the plane, and radii positive and increasing.
    """
    x = check_points("x", x, 2, least=0)
    bounds = check_radii(radii)
    distance = np.linalg.norm(x, axis=1)
    return np.sum(distance[:, None] >= bounds[None, :], axis=1).astype(float)


def check_radii(radii: Sequence[float]) -> Float[np.ndarray, " radii"]:
    """Returns the radii as an array.

    Raises:
        ValueError: unless there is one at least and they are finite, positive and increase.
    """
    array = as_numbers("radii", radii)
    is_good = array.ndim == 1 and len(array) and np.all(np.isfinite(array))
    if not is_good or array[0] <= 0 or np.any(np.diff(array) <= 0):
        shown = f"={tuple(array.tolist())}" if array.ndim == 1 else f" {array.shape}"
        raise ValueError(f"radii{shown} must be finite, positive and increase")
    return array
