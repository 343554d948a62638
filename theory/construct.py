"""Mixtures of experts that approximate a function on a manifold, with every weight written down.

`chart_moe` cuts the manifold into charts and gives each an expert that interpolates the target in
the chart's coordinates, after theorem 4.8 and corollary 4.9 of Wang and E, "On the Expressive Power
of Mixture-of-Experts for Structured Complex Tasks" (arXiv 2505.24205). Two gates:

- `voronoi`: 2 <c_i, x> - |c_i|^2, an affine gate that sends x to its nearest centre. Charts of a
  fine enough net need no more (derived here: within the reach the tangent projection is a chart).
- `partition`: the paper's. A dense first layer (identical experts) passes x on and appends an
  approximation of a partition of unity; the next gate reads the last E coordinates.

For d = 1 the experts are one layer of the library. For d = 2 they have two hidden layers and are
written as two: the first also emits the one-hot code of its choice, which the second's gate reads.
"""

import dataclasses
from collections.abc import Callable

import numpy as np
from jaxtyping import Array, Float, Int, Key

from theory.atlas import Atlas, Charts, chart_coordinates, check_contained, preimages
from theory.checks import as_numbers, check_count
from theory.experts import (
    grid_lines,
    hat_weights,
    interpolate_interval,
    interpolate_square,
    spline_slopes,
    triangle,
)
from theory.network import Answer, Network, apply_network, moe_layer
from theory.partition import Partition, partition_of_unity

Target = Callable[[np.ndarray], np.ndarray]
"""From points in the manifold's own coordinates, [points, k], to values, [points, outputs]."""

GATES = ("voronoi", "partition")


@dataclasses.dataclass(frozen=True)
class ChartMoE:
    """A construction and what is needed to check it.

    Attributes:
        network: explicit layers.
        atlas: charts, one an expert.
        values: float64[charts, (m+1)^d, outputs], the target at the nodes; NaN where a corner of a
            box holds no point of the manifold.
        num_segments: m for d = 1, n for d = 2: mesh intervals across a chart's box.
    """

    network: Network
    atlas: Charts
    values: np.ndarray
    num_segments: int

    @property
    def width(self) -> int:
        """Neurons of the expert's widest layer that interpolate: m, or (n + 1)^2."""
        return self.num_segments if self.atlas.dim == 1 else (self.num_segments + 1) ** 2


def chart_moe(
    key: Key[Array, ""],
    atlas: Atlas,
    target: Target,
    num_segments: int,
    *,
    gate: str = "voronoi",
    partition_width: int | None = None,
) -> ChartMoE:
    """The mixture that interpolates `target` on every chart.

    Args:
        key: draws the random features of the partition of unity.
        atlas: charts, d = 1 or 2.
        target: in the manifold's own coordinates.
        num_segments: mesh intervals across a box, at least 1 (d = 1) or 3 (d = 2).
        gate: one of `GATES`.
        partition_width: neurons of the fitted partition of unity; by default 16 E.

    Raises:
        ValueError: if an argument is out of range, or the target gives something that is not
            finite.
    """
    dim = atlas.manifold.dim
    if dim not in (1, 2):
        raise ValueError(f"{atlas.manifold.name} has dimension {dim}; expected 1 or 2")
    check_segments(num_segments, dim)
    if gate not in GATES:
        raise ValueError(f"gate={gate!r} is not one of {GATES}")
    partition = None
    if gate == "partition":
        width = 16 * atlas.num_charts if partition_width is None else partition_width
        check_count("partition_width", width)
        partition = partition_of_unity(key, atlas, width)
        # The charts now serve the whole balls of the partition, not the Voronoi cells alone.
        radius = np.full_like(atlas.low, partition.radius)
        atlas = dataclasses.replace(atlas, low=-radius, high=radius)
    values = nodal_values(atlas, target, num_segments)
    network = assemble(atlas, values, num_segments, partition)
    return ChartMoE(network, atlas, values, num_segments)


def check_segments(num_segments: int, dim: int) -> int:
    """Raises ValueError unless a mesh of so many intervals exists: 1, or 3 for dim = 2."""
    least = 1 if dim == 1 else 3
    try:
        return check_count("num_segments", num_segments, least)
    except ValueError as error:
        raise ValueError(f"{error} for d={dim}") from None


def nodal_values(
    atlas: Atlas, target: Target, num_segments: int
) -> Float[np.ndarray, "charts nodes outputs"]:
    """The target at the mesh nodes of every chart's box; NaN where no point lies over a node.

    Raises:
        ValueError: unless the target gives a row of finite numbers a point.
    """
    check_count("num_segments", num_segments)
    dim, num_charts = atlas.manifold.dim, atlas.num_charts
    steps = np.arange(num_segments + 1) / num_segments
    unit = np.stack(np.meshgrid(*[steps] * dim, indexing="ij"), axis=-1).reshape(-1, dim)
    coords = atlas.low[:, None] + unit[None] * (atlas.high - atlas.low)[:, None]
    chart = np.repeat(np.arange(num_charts), len(unit))
    params, is_found = preimages(atlas, chart, coords.reshape(-1, dim))
    values = as_numbers("target", target(atlas.manifold.native(params[is_found])))
    if values.ndim != 2 or len(values) != is_found.sum() or not values.shape[1]:
        raise ValueError(f"target gives {values.shape} for {is_found.sum()} points; expected rows")
    if not np.all(np.isfinite(values)):
        bad = np.size(values) - np.isfinite(values).sum()
        raise ValueError(f"target is not finite in {bad} of {values.size} values at the mesh nodes")
    full = np.full((len(chart), values.shape[1]), np.nan)
    full[is_found] = values
    return full.reshape(num_charts, len(unit), -1)


def answer(
    build: ChartMoE,
    x: Float[np.ndarray, "points D"],
    *,
    batch_size: int = 8192,
    implementation: str | None = None,
) -> Answer:
    """What the network says, once every point is known to lie in the mesh of its chart.

    The selection is that of the experts' layer, [points, 1].

    Args:
        build: construction.
        x: points.
        batch_size: see `apply_network`.
        implementation: see `apply_network`: for few points and narrow experts `dense`, which
            multiplies every point by every expert, starts in a fraction of the time.

    Raises:
        ValueError: if a point's chart does not contain it, or has no value at a node it needs; or
            as `apply_network`.
    """
    result = apply_network(build.network, x, batch_size=batch_size, implementation=implementation)
    x = np.asarray(x, np.float64)
    chart = result.selection[:, -1]
    check_contained(build.atlas, x, chart)
    reference = reference_interpolant(build, x, chart)
    is_unknown = np.isnan(reference).any(axis=1)
    if is_unknown.any():
        raise ValueError(
            f"chart {chart[is_unknown][0]} does not contain its data: {is_unknown.sum()} of "
            f"{len(x)} points need a node over which the manifold has no point"
        )
    return Answer(result.y, chart[:, None])


def reference_interpolant(
    build: ChartMoE, x: Float[np.ndarray, "points D"], chart: Int[np.ndarray, " points"]
) -> Float[np.ndarray, "points outputs"]:
    """The interpolant itself, by barycentric coordinates, for points with known charts."""
    mesh = _mesh_coordinates(build, x, chart)
    out = np.empty((len(x), build.values.shape[2]))
    side = build.num_segments + 1
    for i in np.unique(chart):
        member = chart == i
        if mesh.shape[1] == 1:
            out[member] = interpolate_interval(build.values[i], mesh[member, 0])
        else:
            out[member] = interpolate_square(build.values[i].reshape(side, side, -1), mesh[member])
    return out


def used_nodes(build: ChartMoE, x: np.ndarray, chart: np.ndarray) -> int:
    """Distinct nodes (chart, j, k) that the triangles around the points touch; d = 2."""
    nodes, _ = triangle(_mesh_coordinates(build, x, chart), build.num_segments)
    owner = np.broadcast_to(chart[:, None, None], (*nodes.shape[:2], 1))
    return len(np.unique(np.concatenate([owner, nodes], axis=2).reshape(-1, 3), axis=0))


def _mesh_coordinates(build: ChartMoE, x: np.ndarray, chart: np.ndarray) -> np.ndarray:
    coords = chart_coordinates(build.atlas, x, chart)
    low, high = build.atlas.low[chart], build.atlas.high[chart]
    return (coords - low) / (high - low) * build.num_segments


def assemble(
    atlas: Charts,
    values: Float[np.ndarray, "charts nodes outputs"],
    num_segments: int,
    partition: Partition | None = None,
) -> Network:
    """The layers whose experts interpolate `values` on their charts' meshes; NaN counts as 0.

    The gate is Voronoi, or reads the partition of unity if there is one.
    """
    num_charts, ambient_dim = atlas.centers.shape
    num_outputs = values.shape[2]
    dim = atlas.dim
    num_lines = 4 * num_segments + 3 if dim == 2 else 0
    body = max(ambient_dim, num_outputs, num_lines)
    needs_code = partition is not None or dim == 2
    model_dim = 1 + body + (num_charts if needs_code else 0)
    code = np.zeros((model_dim, num_charts))
    if needs_code:
        code[-num_charts:] = np.eye(num_charts)
    layers = []
    if partition is None:
        gate = np.zeros((model_dim, num_charts))
        gate[0] = -np.sum(atlas.centers**2, axis=1)
        gate[1 : 1 + ambient_dim] = 2 * atlas.centers.T
    else:
        layers.append(_partition_layer(partition, ambient_dim, num_charts, model_dim))
        gate = code
    # Mesh coordinates (T^T (x - c) - low) / h as weights on (1, x).
    spacing = (atlas.high - atlas.low) / num_segments
    to_mesh = np.zeros((num_charts, model_dim, dim))
    to_mesh[:, 1 : 1 + ambient_dim] = atlas.tangents / spacing[:, None]
    offset = np.einsum("eD,eDd->ed", atlas.centers, atlas.tangents) + atlas.low
    to_mesh[:, 0] = -offset / spacing
    known = np.nan_to_num(values)
    if dim == 1:
        layers.append(_spline_layer(gate, to_mesh[:, :, 0], known))
    else:
        layers += _hat_layers(gate, to_mesh, known, num_segments, code)
    modules, params = zip(*layers, strict=True)
    return Network(modules, params, ambient_dim, num_outputs)


def _spline_layer(gate: np.ndarray, to_mesh: np.ndarray, values: np.ndarray) -> tuple:
    num_charts, num_knots, num_outputs = values.shape
    model_dim = gate.shape[0]
    m = num_knots - 1
    up = np.zeros((num_charts, model_dim, m + 1))
    up[:, :, :m] = to_mesh[:, :, None]
    up[:, 0, :m] -= np.arange(m)
    up[:, 0, m] = 1.0
    down = np.zeros((num_charts, m + 1, model_dim))
    for i in range(num_charts):
        down[i, :m, 1 : 1 + num_outputs] = spline_slopes(values[i], 1.0)
        down[i, m, 1 : 1 + num_outputs] = values[i, 0]
    return moe_layer(gate, up, down)


def _hat_layers(
    gate: np.ndarray, to_mesh: np.ndarray, values: np.ndarray, num_segments: int, code: np.ndarray
) -> list[tuple]:
    num_charts, num_nodes, num_outputs = values.shape
    model_dim = gate.shape[0]
    directions, offsets = grid_lines(num_segments)
    num_lines = len(offsets)
    up = np.zeros((num_charts, model_dim, num_lines + 1))
    up[:, :, :num_lines] = to_mesh @ directions.T
    up[:, 0, :num_lines] -= offsets
    up[:, 0, num_lines] = 1.0
    down = np.zeros((num_charts, num_lines + 1, model_dim))
    down[:, :num_lines, 1 : 1 + num_lines] = np.eye(num_lines)
    down[:, num_lines, 0] = 1.0
    down[:, num_lines] += code.T
    weights, bias = hat_weights(num_segments)
    up_nodes = np.zeros((num_charts, model_dim, num_nodes))
    up_nodes[:, 1 : 1 + num_lines] = weights
    up_nodes[:, 0] = bias
    down_nodes = np.zeros((num_charts, num_nodes, model_dim))
    down_nodes[:, :, 1 : 1 + num_outputs] = values
    return [moe_layer(gate, up, down), moe_layer(code, up_nodes, down_nodes)]


def _partition_layer(
    partition: Partition, ambient_dim: int, num_charts: int, model_dim: int
) -> tuple:
    """The dense layer (1, x) -> (1, x, rho): E identical experts behind a gate of zeros."""
    width = partition.weights.shape[1]
    num_hidden = width + 2 * ambient_dim + 1
    up = np.zeros((model_dim, num_hidden))
    up[0, :width] = partition.bias
    up[1 : 1 + ambient_dim, :width] = partition.weights
    up[1 : 1 + ambient_dim, width:-1] = np.concatenate(
        [np.eye(ambient_dim), -np.eye(ambient_dim)], axis=1
    )
    up[0, -1] = 1.0
    down = np.zeros((num_hidden, model_dim))
    down[:width, -num_charts:] = partition.out
    # x = relu(x) - relu(-x).
    passed = np.concatenate([np.eye(ambient_dim), -np.eye(ambient_dim)])
    down[width:-1, 1 : 1 + ambient_dim] = passed
    down[width:-1, -num_charts:] = passed @ partition.linear
    down[-1, 0] = 1.0
    down[-1, -num_charts:] = partition.constant
    copies = (num_charts, 1, 1)
    return moe_layer(np.zeros((model_dim, num_charts)), np.tile(up, copies), np.tile(down, copies))


def pad_network(network: Network, model_dim: int, hidden_dims: tuple[int, ...]) -> Network:
    """The same network with idle coordinates and neurons, so that several share a compilation.

    The last coordinates, which may hold a code, stay the last; coordinates are added before them.

    Raises:
        ValueError: if it would have to shrink, or hidden widths are not one a layer.
    """
    check_count("model_dim", model_dim)
    hidden_dims = tuple(check_count("hidden_dims", size) for size in np.ravel(hidden_dims).tolist())
    if len(hidden_dims) != len(network.layers):
        raise ValueError(f"hidden_dims={hidden_dims} disagree with {len(network.layers)} layers")
    padded = []
    for variables, hidden_dim in zip(network.params, hidden_dims, strict=True):
        kernel = variables["params"]["router"]["gate"]["kernel"]
        experts = variables["params"]["experts"]
        old_model, num_experts = kernel.shape
        more = (model_dim - old_model, hidden_dim - experts["up"].shape[2])
        if min(more) < 0:
            raise ValueError(
                f"model_dim={model_dim} and hidden_dim={hidden_dim} are below the network's own"
            )
        at = max(old_model - num_experts, 1)
        blank = np.zeros((num_experts, more[0], experts["up"].shape[2]))

        def widen(matrix: np.ndarray, blank: np.ndarray, at: int = at) -> np.ndarray:
            return np.concatenate([matrix[..., :at, :], blank, matrix[..., at:, :]], axis=-2)

        up = np.pad(widen(experts["up"], blank), ((0, 0), (0, 0), (0, more[1])))
        down = np.swapaxes(widen(np.swapaxes(experts["down"], 1, 2), blank), 1, 2)
        down = np.pad(down, ((0, 0), (0, more[1]), (0, 0)))
        padded.append(moe_layer(widen(kernel, blank[0, :, :1] * np.zeros(num_experts)), up, down))
    modules, params = zip(*padded, strict=True)
    return dataclasses.replace(network, layers=modules, params=params)
