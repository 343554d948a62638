"""Explicit ReLU experts that are the piecewise-linear interpolant of their nodal values.

On an interval with knots t_0 < .. < t_m:

    y(t) = v_0 + sum_k a_k relu(t - t_k),  k = 0..m-1,

a_0 the first slope and a_k the change of slope at t_k: m neurons, and one for the constant. Error
at most h^2 / 8 max |g''|.

On a square with (n+1)^2 nodes, cut into triangles by the lines u = u_j, v = v_k and u - v = const,
in mesh units, the hat of the node at (j, k) is

    hat = relu(1 - (|u - j| + |v - k| + |(u - v) - (j - k)|) / 2),

and inside the square |z - j| = 2 relu(z - j) - relu(z - z_0) + (j - z_0): 4 n + 3 neurons serve all
the nodes' absolute values, and one neuron a node follows. The identity fails outside the square
(z < z_0), where the answers would be wrong by more the finer the mesh: `check_contained` first.

Derived from Courant's element; the paper's experts are only shown to exist.
"""

import numpy as np
from jaxtyping import Float


def spline_slopes(
    values: Float[np.ndarray, "knots outputs"], spacing: float
) -> Float[np.ndarray, "segments outputs"]:
    """First slope and changes of slope, a_k, of the interpolant on equidistant knots."""
    slopes = np.diff(values, axis=0) / spacing
    return np.diff(slopes, axis=0, prepend=np.zeros_like(slopes[:1]))


def interpolate_interval(
    values: Float[np.ndarray, "knots outputs"], t: Float[np.ndarray, " points"]
) -> Float[np.ndarray, "points outputs"]:
    """Linear interpolation at t in mesh units, in [0, m]."""
    left = np.clip(np.floor(t).astype(int), 0, len(values) - 2)
    rest = (t - left)[:, None]
    return (1 - rest) * values[left] + rest * values[left + 1]


def interpolate_square(
    values: Float[np.ndarray, "nodes nodes outputs"], uv: Float[np.ndarray, "points 2"]
) -> Float[np.ndarray, "points outputs"]:
    """Linear interpolation on the triangles at (u, v) in mesh units, in [0, n]^2.

    NaN where a vertex of the point's triangle is NaN.
    """
    nodes, weights = triangle(uv, len(values) - 1)
    return sum(weights[:, i, None] * values[nodes[:, i, 0], nodes[:, i, 1]] for i in range(3))


def triangle(
    uv: Float[np.ndarray, "points 2"], num_segments: int
) -> tuple[np.ndarray, Float[np.ndarray, "points 3"]]:
    """Nodes int[points, 3, 2] and barycentric weights of the triangle around each point."""
    corner = np.clip(np.floor(uv).astype(int), 0, num_segments - 1)
    a, b = (uv - corner).T
    below = a >= b
    middle = corner + np.where(below[:, None], [[1, 0]], [[0, 1]])
    nodes = np.stack([corner, middle, corner + 1], axis=1)
    weights = np.stack([1 - np.maximum(a, b), np.abs(a - b), np.minimum(a, b)], axis=1)
    return nodes, weights


def grid_lines(num_segments: int) -> tuple[np.ndarray, Float[np.ndarray, " lines"]]:
    """The 4 n + 3 first-layer neurons relu(direction . (u, v) - offset), in mesh units.

    Returns:
        Directions [lines, 2] and offsets: n + 1 lines in u, n + 1 in v, 2 n + 1 in u - v.
    """
    n = num_segments
    directions = np.repeat([[1.0, 0.0], [0.0, 1.0], [1.0, -1.0]], [n + 1, n + 1, 2 * n + 1], axis=0)
    offsets = np.concatenate([np.arange(n + 1), np.arange(n + 1), np.arange(-n, n + 1)])
    return directions, offsets.astype(float)


def hat_weights(num_segments: int) -> tuple[np.ndarray, Float[np.ndarray, " nodes"]]:
    """Second-layer weights of the hats on the `grid_lines` neurons.

    Returns:
        [lines, (n+1)^2] and biases, nodes in the order (j, k) -> j (n + 1) + k.
    """
    n = num_segments
    num_nodes = (n + 1) ** 2
    j, k = np.divmod(np.arange(num_nodes), n + 1)
    weights = np.zeros((4 * n + 3, num_nodes))
    bias = np.ones(num_nodes)
    node = np.arange(num_nodes)
    for first, place in ((0, j), (n + 1, k), (2 * n + 2, j - k + n)):
        # -|z - z_j| / 2 = -relu(z - z_j) + relu(z - z_0) / 2 - (z_j - z_0) / 2, in steps from z_0.
        weights[first, node] += 0.5
        weights[first + place, node] -= 1.0
        bias -= 0.5 * place
    return weights, bias
