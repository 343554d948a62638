"""A mixture built from data without gradients: k-means gate, local PCA charts, ridge at the nodes.

Cells are Voronoi cells of k-means centres, an affine gate. Each cell's chart is its first d
principal directions; its expert interpolates nodal values fitted by ridge regression around the
cell's own linear fit, so that nodes without data continue it instead of falling to 0.

The result is a `Network` of the library's layers: its `params` are a starting point for training
(the gate knows the cells, the experts' first layers the tangent spaces).
"""

import jax
import numpy as np
from jaxtyping import Array, Float, Int, Key

from theory.atlas import Charts, chart_coordinates, nearest
from theory.checks import check_count, check_number, check_points, check_positive
from theory.construct import ChartMoE, assemble, check_segments
from theory.experts import triangle


def fit_charts(
    key: Key[Array, ""],
    x: Float[np.ndarray, "points D"],
    y: Float[np.ndarray, "_ outputs"],
    *,
    dim: int,
    num_charts: int,
    num_segments: int,
    ridge: float = 1e-3,
    margin: float = 0.1,
) -> ChartMoE:
    """Builds the mixture from observations.

    Args:
        key: starts k-means.
        x: inputs.
        y: what is observed there.
        dim: d of the charts, 1 or 2.
        num_charts: E.
        num_segments: mesh intervals across a chart's box, at least 1 (d = 1) or 3 (d = 2).
        ridge: penalty on the squared deviation of nodal values from the cell's linear fit.
        margin: padding of the boxes on each side, in parts of their extent. Points outside a box
            get wrong answers.

    Raises:
        ValueError: if shapes disagree, something is not finite, d is not 1 or 2 or above D, an
            option is out of range, or a cell has too few points or extends in fewer than d
            directions.
    """
    x, y = check_points("x", x), check_points("y", y)
    if len(x) != len(y):
        raise ValueError(f"x {x.shape} and y {y.shape} disagree")
    if check_count("dim", dim) > min(2, x.shape[1]):
        raise ValueError(f"dim={dim} is not 1 or 2, or exceeds D={x.shape[1]}")
    check_segments(num_segments, dim)
    ridge = check_positive("ridge", ridge)
    margin = check_number("margin", margin, 0.0)
    check_count("num_charts", num_charts, 1, len(x))
    centers, cell = k_means(key, x, num_charts)
    counts = np.bincount(cell, minlength=num_charts)
    if counts.min() <= dim + 1:
        raise ValueError(
            f"cell {counts.argmin()} of num_charts={num_charts} has {counts.min()} points; "
            f"expected more than {dim + 1}"
        )
    tangents = np.stack([_principal(x[cell == i], dim) for i in range(num_charts)])
    zero = np.zeros((num_charts, dim))
    coords = chart_coordinates(Charts(centers, tangents, zero, zero), x, cell)
    low = np.stack([coords[cell == i].min(axis=0) for i in range(num_charts)])
    high = np.stack([coords[cell == i].max(axis=0) for i in range(num_charts)])
    flat = (high - low).min(axis=1)
    if not np.all(flat > 1e-9 * np.abs(coords).max()):
        raise ValueError(
            f"cell {flat.argmin()} of num_charts={num_charts} extends in fewer than dim={dim} "
            "directions"
        )
    pad = margin * (high - low)
    charts = Charts(centers, tangents, low - pad, high + pad)
    mesh = (coords - charts.low[cell]) / (charts.high - charts.low)[cell] * num_segments
    values = np.stack(
        [_nodes(mesh[cell == i], y[cell == i], num_segments, ridge) for i in range(num_charts)]
    )
    return ChartMoE(assemble(charts, values, num_segments), charts, values, num_segments)


def k_means(
    key: Key[Array, ""],
    x: Float[np.ndarray, "points D"],
    num: int,
    *,
    num_iterations: int = 50,
) -> tuple[Float[np.ndarray, "num D"], Int[np.ndarray, " points"]]:
    """Lloyd's algorithm from k-means++ centres; returns centres and each point's cell.

    Raises:
        ValueError: if there are fewer than num different points, or something is not finite.
    """
    x = check_points("x", x)
    check_count("num", num, 1, len(x))
    check_count("num_iterations", num_iterations, 0)
    rng = np.random.default_rng(int(jax.random.randint(key, (), 0, 2**31 - 1)))
    centers = x[rng.integers(len(x), size=1)]
    distance = np.sum((x - centers[0]) ** 2, axis=1)
    for _ in range(num - 1):
        if not distance.any():
            raise ValueError(f"x {x.shape} has fewer than num={num} different points")
        pick = rng.choice(len(x), p=distance / distance.sum())
        centers = np.concatenate([centers, x[pick][None]])
        distance = np.minimum(distance, np.sum((x - x[pick]) ** 2, axis=1))
    cell = nearest(x, centers)
    for _ in range(num_iterations):
        counts = np.bincount(cell, minlength=num)
        sums = np.zeros_like(centers)
        np.add.at(sums, cell, x)
        # An empty cell keeps its centre.
        centers = np.where(counts[:, None] > 0, sums / np.maximum(counts, 1)[:, None], centers)
        previous, cell = cell, nearest(x, centers)
        if np.array_equal(previous, cell):
            break
    return centers, cell


def node_features(
    mesh: Float[np.ndarray, "points d"], num_segments: int
) -> Float[np.ndarray, "points nodes"]:
    """Interpolation weights of every node at points in mesh units, in [0, segments]^d.

    Raises:
        ValueError: if points are not finite, or outside the mesh.
    """
    mesh = check_points("mesh", mesh, least=0)
    check_count("num_segments", num_segments)
    if mesh.shape[1] > 2 or np.any((mesh < -1e-9) | (mesh > num_segments + 1e-9)):
        raise ValueError(f"mesh {mesh.shape} leaves [0, {num_segments}]^d, d = 1 or 2")
    dim = mesh.shape[1]
    side = num_segments + 1
    features = np.zeros((len(mesh), side**dim))
    row = np.arange(len(mesh))
    if dim == 1:
        left = np.clip(np.floor(mesh[:, 0]).astype(int), 0, num_segments - 1)
        rest = mesh[:, 0] - left
        features[row, left], features[row, left + 1] = 1 - rest, rest
        return features
    nodes, weights = triangle(mesh, num_segments)
    for i in range(3):
        features[row, nodes[:, i, 0] * side + nodes[:, i, 1]] = weights[:, i]
    return features


def _nodes(mesh: np.ndarray, y: np.ndarray, num_segments: int, ridge: float) -> np.ndarray:
    dim = mesh.shape[1]
    affine = np.concatenate([np.ones((len(mesh), 1)), mesh], axis=1)
    plane, *_ = np.linalg.lstsq(affine, y, rcond=None)
    steps = np.arange(num_segments + 1.0)
    node = np.stack(np.meshgrid(*[steps] * dim, indexing="ij"), axis=-1).reshape(-1, dim)
    flat = np.concatenate([np.ones((len(node), 1)), node], axis=1) @ plane
    features = node_features(mesh, num_segments)
    gram = features.T @ features + ridge * np.eye(features.shape[1])
    return flat + np.linalg.solve(gram, features.T @ (y - affine @ plane))


def _principal(x: np.ndarray, dim: int) -> np.ndarray:
    _, _, right = np.linalg.svd(x - x.mean(axis=0), full_matrices=False)
    return right[:dim].T
