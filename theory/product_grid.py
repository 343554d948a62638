"""E^L pieces from L E experts: a deep mixture on the cube [0, E]^L, exact.

The target is f(x) = (f_1(x_1), .., f_L(x_L)); f_l is piecewise linear on each unit interval and
jumps between them, so f has E^L independent-looking pieces. Layer l gates on coordinate l by the
upper envelope of lines

    g_i(t) = i t - i (i - 1) / 2,  i = 1..E,

whose cells are exactly the unit intervals, and its expert i replaces x_l by f_{l,i}(x_l) and passes
the others on, z = relu(z) - relu(-z). L layers do, where theorem 5.2 of arXiv 2505.24205 uses 2 L;
after theorem 5.3, derived here.

One layer: with an affine gate and continuous experts of any width every cell is convex. A cell that
holds points on both sides of a face of the grid is crossed by it, and errs by half the jump there.
So fewer than E^L experts (C(N, k) selected sets for top-k gates) leave a sup error of at least half
the least jump. This says nothing about L2 error, nor about nonlinear gates.
"""

import dataclasses
import math

import jax
import numpy as np
from jaxtyping import Array, Float, Int, Key

from theory.checks import check_count, check_number, check_points
from theory.manifolds import draw_uniform
from theory.network import Network, moe_layer

MAX_PIECES = 2**63


@dataclasses.dataclass(frozen=True)
class ProductGrid:
    """A target on [0, E]^L; a face between two cubes belongs to the one below.

    Attributes:
        values: float64[L, E, segments + 1], f_l at the equidistant knots of each unit interval,
            from within the interval.
    """

    values: np.ndarray

    @property
    def num_layers(self) -> int:
        """L."""
        return self.values.shape[0]

    @property
    def num_cells(self) -> int:
        """E, intervals of an axis."""
        return self.values.shape[1]

    @property
    def jumps(self) -> Float[np.ndarray, "L faces"]:
        """Heights of the jumps: entry (l, i) is that across x_l = i + 1."""
        return np.abs(self.values[:, 1:, 0] - self.values[:, :-1, -1])

    def __call__(self, x: Float[np.ndarray, "points L"]) -> Float[np.ndarray, "points L"]:
        """Returns f.

        Raises:
            ValueError: for points of another dimension or outside the cube.
        """
        cell = self.cells(x)
        segments = self.values.shape[2] - 1
        t = (x - cell) * segments
        left = np.clip(np.floor(t).astype(int), 0, segments - 1)
        axis = np.arange(self.num_layers)[None, :]
        low, high = self.values[axis, cell, left], self.values[axis, cell, left + 1]
        return low + (t - left) * (high - low)

    def cells(self, x: Float[np.ndarray, "points L"]) -> Int[np.ndarray, "points L"]:
        """Index of the unit interval on each axis.

        Raises:
            ValueError: for points of another dimension or outside the cube.
        """
        if np.ndim(x) != 2 or np.shape(x)[1] != self.num_layers:
            raise ValueError(f"x {np.shape(x)} disagrees with num_layers={self.num_layers}")
        x = check_points("x", x, least=0)
        outside = ((x < 0) | (x > self.num_cells)).any(axis=1)
        if outside.any():
            raise ValueError(
                f"x holds {x[outside][0]}, which is outside [0, {self.num_cells}]^{self.num_layers}"
            )
        return np.clip(np.ceil(x).astype(int) - 1, 0, self.num_cells - 1)


def product_grid(
    key: Key[Array, ""],
    num_cells: int,
    num_layers: int,
    *,
    num_segments: int = 4,
    min_jump: float = 1.0,
) -> ProductGrid:
    """Random piecewise-linear functions with a jump of at least `min_jump` at every face.

    Raises:
        ValueError: if a count is below 1, the jump negative or not finite, or there are 2^63 pieces
            or more.
    """
    check_count("num_segments", num_segments)
    min_jump = check_number("min_jump", min_jump, 0.0)
    check_pieces(num_cells, num_layers)
    value_key, jump_key = jax.random.split(key)
    values = draw_uniform(value_key, (num_layers, num_cells, num_segments + 1), -1.0, 1.0)
    extra = draw_uniform(jump_key, (num_layers, num_cells), 0.0, 0.5)
    for i in range(1, num_cells):
        # Up and down in turn, so that the values stay bounded.
        start = values[:, i - 1, -1] + (-1) ** i * (min_jump + extra[:, i])
        values[:, i] += (start - values[:, i, 0])[:, None]
    return ProductGrid(values)


def check_pieces(num_cells: int, num_layers: int) -> None:
    """Raises ValueError if E^L is 2^63 or more, past which pieces have no int64 number.

    Also if either is not a whole number of at least 1.
    """
    num_cells = check_count("num_cells", num_cells)
    num_layers = check_count("num_layers", num_layers)
    # From 2 cells on 64 layers are too many; the power itself could take for ever.
    if num_cells > 1 and num_layers > 63:
        num_layers = 63
    if num_cells**num_layers >= MAX_PIECES:
        raise ValueError(
            f"num_cells={num_cells} to the power num_layers={num_layers} is not below 2^63"
        )


def product_grid_moe(target: ProductGrid) -> Network:
    """The L layers of E experts, 2 (L - 1) + segments + 1 neurons each, that equal the target.

    On the faces too, where gates tie and the expert of the lower number answers. Within a few
    roundings of a face, about E 1e-16, the neighbour across it may answer. Outside the cube the
    outermost pieces go on.
    """
    num_layers, num_cells, num_knots = target.values.shape
    segments = num_knots - 1
    model_dim = num_layers + 1
    num_hidden = 2 * (num_layers - 1) + segments + 1
    index = np.arange(1, num_cells + 1)
    slopes = np.diff(target.values, axis=2) * segments
    changes = np.diff(slopes, axis=2, prepend=0.0)
    layers = []
    for axis in range(num_layers):
        kernel = np.zeros((model_dim, num_cells))
        kernel[0] = -index * (index - 1) / 2
        kernel[1 + axis] = index
        others = [1 + other for other in range(num_layers) if other != axis]
        up = np.zeros((num_cells, model_dim, num_hidden))
        down = np.zeros((num_cells, num_hidden, model_dim))
        for place, other in enumerate(others):
            up[:, other, 2 * place], up[:, other, 2 * place + 1] = 1.0, -1.0
            down[:, 2 * place, other], down[:, 2 * place + 1, other] = 1.0, -1.0
        first = 2 * len(others)
        up[:, 1 + axis, first : first + segments] = 1.0
        up[:, 0, first : first + segments] = -(
            (index - 1)[:, None] + np.arange(segments)[None, :] / segments
        )
        up[:, 0, -1] = 1.0
        down[:, first : first + segments, 1 + axis] = changes[axis]
        down[:, -1, 1 + axis] = target.values[axis, :, 0]
        down[:, -1, 0] = 1.0
        layers.append(moe_layer(kernel, up, down))
    modules, params = zip(*layers, strict=True)
    return Network(modules, params, num_layers, num_layers)


def one_layer_gate(num_cells: int, num_layers: int) -> Float[np.ndarray, "lifted pieces"]:
    """The separable affine gate of E^L experts whose cells are the cubes.

    g_{i_1..i_L}(x) = sum_l (i_l x_l - i_l (i_l - 1) / 2), as a kernel on (1, x).
    """
    check_pieces(num_cells, num_layers)
    grids = np.meshgrid(*[np.arange(1, num_cells + 1)] * num_layers, indexing="ij")
    index = np.stack([grid.ravel() for grid in grids])
    return np.concatenate([-np.sum(index * (index - 1) / 2, axis=0)[None, :], index]).astype(float)


def one_layer_floor(
    kernel: Float[np.ndarray, "lifted experts"],
    target: ProductGrid,
    x: Float[np.ndarray, "points L"],
    *,
    num_selected: int = 1,
) -> float:
    """Sup error that no continuous experts behind this affine gate can go below.

    Half the largest jump at a face that two of the points with the same selected set lie on
    different sides of. A lower bound: more points may show more, and 0 says that these show none.
    Points within 1e-9 of a tie are left out, for they lie on the border of their cell; but experts
    with the same scores everywhere have no border between them, and the first of them is chosen.

    Args:
        kernel: gate on (1, x).
        target: the function.
        x: points at which to ask the gate; at least one in each cube shows the theorem's bound.
        num_selected: K of the gate.

    Raises:
        ValueError: if the shapes disagree, something is not finite, a point is outside the cube,
            K exceeds the experts, or every point lies on a border.
    """
    kernel = check_points("kernel", kernel)
    x = check_points("x", x, target.num_layers)
    num_layers, num_experts = target.num_layers, kernel.shape[1]
    if kernel.shape[0] != num_layers + 1:
        raise ValueError(f"kernel {kernel.shape} disagrees with num_layers={num_layers}")
    check_count("num_selected", num_selected)
    if num_selected > num_experts:
        raise ValueError(f"num_selected={num_selected} is not in [1, num_experts={num_experts}]")
    logits = kernel[0] + x @ kernel[1:]
    order = np.argsort(-logits, axis=1, kind="stable")
    chosen = np.sort(order[:, :num_selected], axis=1)
    inside = ~_on_border(kernel, logits, chosen)
    if not inside.any():
        raise ValueError(f"kernel {kernel.shape} ties at each of the {len(x)} points x")
    chosen, cell = chosen[inside], target.cells(x)[inside]
    floor = 0.0
    _, group = np.unique(chosen, axis=0, return_inverse=True)
    group = group.reshape(-1)
    num_groups = int(group.max()) + 1
    low = np.full((num_groups, num_layers), target.num_cells)
    high = np.zeros((num_groups, num_layers), int)
    np.minimum.at(low, group, cell)
    np.maximum.at(high, group, cell)
    for face in range(target.num_cells - 1):
        crossed = ((low <= face) & (high > face)).any(axis=0)
        floor = max(floor, float(np.max(target.jumps[:, face], where=crossed, initial=0.0)) / 2)
    return floor


def _on_border(kernel: np.ndarray, logits: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Whether an expert left out ties with one chosen whose scores differ elsewhere."""
    _, kind = np.unique(kernel, axis=1, return_inverse=True)
    kind = np.broadcast_to(kind.reshape(-1), logits.shape)
    is_chosen = np.zeros(logits.shape, bool)
    np.put_along_axis(is_chosen, chosen, True, axis=1)
    least = np.where(is_chosen, logits, np.inf).min(axis=1, keepdims=True)
    near = np.abs(logits - least) <= 1e-9 * np.maximum(1.0, np.abs(least))
    lowest = np.where(near, kind, kernel.shape[1]).min(axis=1)
    highest = np.where(near, kind, -1).max(axis=1)
    return (near & ~is_chosen).any(axis=1) & (lowest != highest)


def least_experts(num_cells: int, num_layers: int, num_selected: int = 1) -> int:
    """Least N with C(N, k) >= E^L: fewer experts in one layer cannot be exact.

    Raises:
        ValueError: if num_selected is less than 1, or see `check_pieces`.
    """
    check_pieces(num_cells, num_layers)
    check_count("num_selected", num_selected)
    pieces = num_cells**num_layers
    # C(N, k) >= N - k + 1, so that no more than this is needed.
    low, high = num_selected, pieces + num_selected - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (
            (low, middle) if math.comb(middle, num_selected) >= pieces else (middle + 1, high)
        )
    return low


def cube_points(
    key: Key[Array, ""], num_cells: int, num_layers: int, per_cube: int
) -> Float[np.ndarray, "points L"]:
    """The same number of uniform points in the interior of each cube.

    Raises:
        ValueError: if per_cube is less than 1, or see `check_pieces`.
    """
    check_pieces(num_cells, num_layers)
    check_count("per_cube", per_cube)
    grids = np.meshgrid(*[np.arange(num_cells)] * num_layers, indexing="ij")
    corner = np.stack([grid.ravel() for grid in grids], axis=1)
    inner = draw_uniform(key, (len(corner), per_cube, num_layers), 1e-6, 1 - 1e-6)
    return (corner[:, None, :] + inner).reshape(-1, num_layers)
