"""Three gates for a disc and rings around it: quadratic, two-layer, and affine with polygons.

The target is constant on each ring and jumps on circles of given radii. Gates score

    g_k(s) = s k - sum_{j <= k} b_j,  k = 0..K,

lines in s whose upper envelope changes at s = b_1 < .. < b_K. With s = |x|^2 the cuts are exact.
A layer of 2 h neurons before the gate makes s piecewise linear in x_1 and x_2 and misroutes a
share of order h^-2. Without one, an affine gate has convex cells: one for the disc and N a ring,
sectors between regular N-gons, misroute a share of order N^-2. Derived here; the constructions are
weights of the library's layers, the experts constants.
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from theory.checks import check_count, check_points, check_positive
from theory.network import Network, moe_layer
from theory.targets import check_radii


def quadratic_gate(radii: Sequence[float]) -> Network:
    """K + 1 experts behind a gate that is linear in |x|^2: takes (x_1, x_2, |x|^2) and is exact.

    Raises:
        ValueError: unless radii are finite, positive and increase.
    """
    breaks = _breaks(radii)
    model_dim = 4
    kernel = np.zeros((model_dim, len(radii) + 1))
    kernel[0] = -np.concatenate([[0.0], np.cumsum(breaks)])
    kernel[3] = np.arange(len(radii) + 1)
    experts = _constants(np.arange(len(radii) + 1.0), model_dim)
    layer, params = moe_layer(kernel, *experts)
    return Network((layer,), (params,), 3, 1)


def with_square(x: Float[np.ndarray, "points 2"]) -> Float[np.ndarray, "points 3"]:
    """(x_1, x_2, |x|^2).

    Raises:
        ValueError: unless points are finite and in the plane.
    """
    x = check_points("x", x, 2, least=0)
    return np.concatenate([x, np.sum(x**2, axis=1, keepdims=True)], axis=1)


def two_layer_gate(radii: Sequence[float], num_segments: int, half_width: float = 1.0) -> Network:
    """K + 1 experts behind a layer of 2 h neurons that interpolates x_1^2 + x_2^2.

    Args:
        radii: of the circles, increasing.
        num_segments: h, equal intervals of [-half_width, half_width] on each axis.
        half_width: of the square that is served.

    Raises:
        ValueError: unless radii are finite, positive and increase, the half width is positive and
            there are at least 2 segments.
    """
    check_count("num_segments", num_segments, 2)
    half_width = check_positive("half_width", half_width)
    breaks = _breaks(radii)
    num_experts, model_dim = len(radii) + 1, 4
    spacing = 2 * half_width / num_segments
    knots = -half_width + spacing * np.arange(num_segments)
    # Chords of t^2 lie above it by spacing^2 / 6 on average: taken off, on both axes.
    slopes = np.diff(np.append(knots, half_width) ** 2) / spacing
    changes = np.diff(slopes, prepend=0.0)
    num_hidden = 2 * num_segments + 1
    up = np.zeros((1, model_dim, num_hidden))
    up[0, 1, :num_segments] = up[0, 2, num_segments:-1] = 1.0
    up[0, 0, :-1] = -np.tile(knots, 2)
    up[0, 0, -1] = 1.0
    down = np.zeros((1, num_hidden, model_dim))
    down[0, :-1, 3] = np.tile(changes, 2)
    down[0, -1, 3] = 2 * (half_width**2 - spacing**2 / 6)
    down[0, -1, 0] = 1.0
    kernel = np.zeros((model_dim, num_experts))
    kernel[0] = -np.concatenate([[0.0], np.cumsum(breaks)])
    kernel[3] = np.arange(num_experts)
    square = moe_layer(np.zeros((model_dim, 1)), up, down)
    ring = moe_layer(kernel, *_constants(np.arange(num_experts, dtype=float), model_dim))
    return Network((square[0], ring[0]), (square[1], ring[1]), 2, 1)


def affine_gate(radii: Sequence[float], num_sides: int) -> Network:
    """1 + K N experts behind an affine gate: sectors between regular N-gons.

    Sector j of ring k scores k p_j(x) - sum_{i <= k} a_i, p_j(x) = <(cos t_j, sin t_j), x>; a_i is
    the inradius of the N-gon whose area is that of the circle of radius r_i.

    Raises:
        ValueError: unless radii are finite, positive and increase, and there are 3 sides.
    """
    check_count("num_sides", num_sides, 3)
    _breaks(radii)
    area = num_sides * np.tan(np.pi / num_sides) / np.pi
    inradii = np.asarray(radii) / np.sqrt(area)
    angle = 2 * np.pi * np.arange(num_sides) / num_sides
    model_dim = 3
    ring = np.repeat(np.arange(1, len(radii) + 1), num_sides)
    side = np.tile(np.stack([np.cos(angle), np.sin(angle)]), len(radii))
    kernel = np.zeros((model_dim, 1 + len(ring)))
    kernel[0, 1:] = -np.cumsum(inradii)[ring - 1]
    kernel[1:, 1:] = side * ring
    values = np.concatenate([[0.0], ring])
    layer, params = moe_layer(kernel, *_constants(values, model_dim))
    return Network((layer,), (params,), 2, 1)


def _breaks(radii: Sequence[float]) -> np.ndarray:
    return check_radii(radii) ** 2


def _constants(values: np.ndarray, model_dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Experts of one neuron that answer a constant each."""
    up = np.zeros((len(values), model_dim, 1))
    up[:, 0, 0] = 1.0
    down = np.zeros((len(values), 1, model_dim))
    down[:, 0, 1] = values
    return up, down
