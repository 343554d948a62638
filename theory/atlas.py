"""Linear charts of a manifold: centres, tangent projections, and the boxes that hold the cells.

Chart i maps x to u = T_i^T (x - c_i), T_i an orthonormal basis of the tangent space at c_i. It is
used on the Voronoi cell of c_i: within the reach of the manifold the projection is one-to-one there
(Niyogi, Smale and Weinberger 2008), so an affine gate over a fine enough net of centres routes to a
valid chart in one layer, without a partition of unity.
"""

import dataclasses

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key
from scipy import spatial

from theory.checks import check_count, check_indices, check_points
from theory.manifolds import Manifold

MIN_COSINE = 0.05
"""Least singular value of T_i^T T(x) that still counts as one-to-one."""

MIN_PER_CHART = 50
"""Least number of sample points a chart, from which the size of cells is read."""

NUM_CHECKED = 2_000
"""Points of the sample on which a new atlas is checked."""

NUM_SPREAD = 20_000
"""Points of the sample among which centres are chosen."""


@dataclasses.dataclass(frozen=True)
class Charts:
    """Linear charts on boxes.

    Attributes:
        centers: float64[charts, D], c_i.
        tangents: float64[charts, D, d], T_i.
        low, high: float64[charts, d], corners of the box in chart coordinates that holds the cell.
    """

    centers: np.ndarray
    tangents: np.ndarray
    low: np.ndarray
    high: np.ndarray

    @property
    def num_charts(self) -> int:
        """E."""
        return self.centers.shape[0]

    @property
    def dim(self) -> int:
        """Dimension of the charts, d."""
        return self.low.shape[1]


@dataclasses.dataclass(frozen=True)
class Atlas(Charts):
    """Charts of a known manifold.

    Attributes:
        manifold: what they cover.
        center_params: float64[charts, p].
    """

    manifold: Manifold
    center_params: np.ndarray


def voronoi_atlas(
    key: Key[Array, ""],
    manifold: Manifold,
    num_charts: int | None = None,
    *,
    center_params: Float[np.ndarray, "charts p"] | None = None,
    num_sample: int = 100_000,
) -> Atlas:
    """Charts on the Voronoi cells of evenly spread centres, or of given ones.

    The boxes hold the cells of a sample, padded by an estimate of the sample's fill distance.

    Args:
        key: draws the sample.
        manifold: what to cover. The atlas is computed in its own coordinates and then moved by the
            frame, so that it is the same in every dimension D.
        num_charts: E, if no centres are given.
        center_params: parameters of the centres.
        num_sample: points that size the cells, at least 50 a chart.

    Raises:
        ValueError: if neither or both of the two are given, centres are not finite, not of the
            manifold's parameters or not different, a cell holds no point of the sample, or a cell
            is so large that its chart is not one-to-one on it, see `check_charts`.
    """
    if (num_charts is None) == (center_params is None):
        raise ValueError("expected one of num_charts and center_params")
    check_count("num_sample", num_sample, MIN_PER_CHART)
    sample_key, probe_key = jax.random.split(key)
    params = manifold.sample_params(sample_key, num_sample)
    sample = manifold.native(params)
    if center_params is None:
        assert num_charts is not None
        most = min(num_sample, NUM_SPREAD)
        check_count("num_charts", num_charts, 1, most)
        center_params = params[spread_points(sample[:most], num_charts)]
    center_params = check_points("center_params", center_params, params.shape[1])
    if num_sample < MIN_PER_CHART * len(center_params):
        raise ValueError(
            f"num_sample={num_sample} is below {MIN_PER_CHART} for each of "
            f"{len(center_params)} charts"
        )
    with np.errstate(all="ignore"):
        centers = manifold.native(center_params)
    check_points("points of center_params", centers)
    if len(np.unique(centers.round(12), axis=0)) < len(centers):
        raise ValueError(f"center_params {center_params.shape} hold the same point twice")
    tangents = tangent_bases(manifold, center_params)
    chart = nearest(sample, centers)
    counts = np.bincount(chart, minlength=len(centers))
    if not counts.all():
        raise ValueError(
            f"chart {counts.argmin()} of {len(centers)} holds none of num_sample={num_sample} "
            "points: its centre is too near to others"
        )
    coords = np.einsum("nk,nkd->nd", sample - centers[chart], tangents[chart])
    probe = manifold.native(manifold.sample_params(probe_key, num_sample))
    # A cell may reach past its outermost sample point by a whole gap; a probe sees half of one.
    # Many points, for a box much larger than its cell needs nodes where the manifold has folded.
    padding = 2 * spatial.cKDTree(sample).query(probe)[0].max()
    num = len(centers)
    low = np.full((num, manifold.dim), np.inf)
    high = -low
    np.minimum.at(low, chart, coords)
    np.maximum.at(high, chart, coords)
    atlas = Atlas(
        manifold=manifold,
        center_params=center_params,
        centers=centers @ manifold.frame.T,
        tangents=np.einsum("Dk,ekd->eDd", manifold.frame, tangents),
        low=low - padding,
        high=high + padding,
    )
    check_charts(atlas, params[:NUM_CHECKED], chart[:NUM_CHECKED])
    return atlas


def check_charts(
    atlas: Atlas, params: Float[np.ndarray, "points p"], chart: Int[np.ndarray, " points"]
) -> None:
    """Raises ValueError unless every chart contains the points given to it, one-to-one.

    That is: the coordinates of each point lie in the chart's box, the manifold does not fold back
    there, and the point found from the coordinates is the point itself.
    """
    manifold = atlas.manifold
    x = manifold.embed(params)
    check_contained(atlas, x, chart)
    own = manifold.frame.T @ atlas.tangents
    cosine = np.linalg.svd(
        np.einsum("nkd,nkb->ndb", own[chart], tangent_bases(manifold, params)), compute_uv=False
    )[:, -1]
    coords = chart_coordinates(atlas, x, chart)
    found, is_found = preimages(atlas, chart, coords)
    distance = np.linalg.norm(manifold.native(found) - manifold.native(params), axis=1)
    bad = (cosine < MIN_COSINE) | ~is_found | ~(distance < 1e-6)
    if bad.any():
        raise ValueError(
            f"chart {chart[bad][0]} of num_charts={atlas.num_charts} does not contain its data "
            f"one-to-one: {bad.sum()} of {len(bad)} points of {manifold.name}; take more charts"
        )


def check_contained(
    atlas: Charts, x: Float[np.ndarray, "points D"], chart: Int[np.ndarray, " points"]
) -> None:
    """Raises ValueError if a point lies outside the box of its chart, or shapes disagree."""
    coords = chart_coordinates(atlas, x, chart)
    excess = np.maximum(atlas.low[chart] - coords, coords - atlas.high[chart]).max(axis=1)
    if not np.all(excess <= 0):
        worst = int(np.argmax(excess))
        raise ValueError(
            f"chart {chart[worst]} does not contain its data: {np.sum(excess > 0)} of {len(x)} "
            f"points leave their chart's box, by up to {excess[worst]:.3g}"
        )


def chart_coordinates(
    atlas: Charts, x: Float[np.ndarray, "points D"], chart: Int[np.ndarray, " points"]
) -> Float[np.ndarray, "points d"]:
    """T_i^T (x - c_i) of each point in its chart i.

    Raises:
        ValueError: if the points are not finite or of another dimension, or a chart does not exist.
    """
    if np.ndim(x) != 2 or np.shape(x)[1] != atlas.centers.shape[1]:
        raise ValueError(f"x {np.shape(x)} does not fit an atlas in D={atlas.centers.shape[1]}")
    x = check_points("x", x, least=0)
    chart = check_indices("chart", chart, len(x), atlas.num_charts)
    coords = np.empty((len(x), atlas.dim))
    for i in np.unique(chart):
        member = chart == i
        coords[member] = (x[member] - atlas.centers[i]) @ atlas.tangents[i]
    return coords


def preimages(
    atlas: Atlas,
    chart: Int[np.ndarray, " points"],
    coords: Float[np.ndarray, "points d"],
    *,
    num_stages: int = 6,
) -> tuple[Float[np.ndarray, "points p"], Bool[np.ndarray, " points"]]:
    """Parameters whose points have the given chart coordinates, by Newton's method from the centre.

    The coordinates grow from 0 in stages, so that the root is the one connected to the centre.
    Redundant parameters take the least step.

    Returns:
        The parameters, and whether the equations hold to 1e-11; a box's corners may hold no point.

    Raises:
        ValueError: unless there is a chart and a row of d finite coordinates a point.
    """
    check_count("num_stages", num_stages)
    manifold = atlas.manifold
    coords = check_points("coords", coords, atlas.dim, least=0)
    chart = check_indices("chart", chart, len(coords), atlas.num_charts)
    centers = atlas.centers[chart] @ manifold.frame
    tangents = (manifold.frame.T @ atlas.tangents)[chart]
    params = atlas.center_params[chart].copy()
    residual = np.zeros_like(coords)
    # Where there is no root the iteration wanders; the result says so.
    with np.errstate(all="ignore"):
        for stage in range(1, num_stages + 1):
            for _ in range(8 if stage == num_stages else 2):
                residual = (
                    np.einsum("nk,nkd->nd", manifold.native(params) - centers, tangents)
                    - coords * stage / num_stages
                )
                slope = np.einsum("nkd,nkp->ndp", tangents, manifold.jacobian(params))
                gram = np.einsum("ndp,nep->nde", slope, slope)
                # A singular system is one that has no root here.
                gram += 1e-14 * np.eye(gram.shape[1])
                step = np.linalg.solve(gram, residual[:, :, None])
                step = np.einsum("ndp,nd->np", slope, step[:, :, 0])
                length = np.linalg.norm(step, axis=1, keepdims=True)
                params -= step * np.minimum(1.0, 1.0 / np.maximum(length, 1e-300))
        residual = np.einsum("nk,nkd->nd", manifold.native(params) - centers, tangents) - coords
    return params, np.abs(residual).max(axis=1) < 1e-11


def tangent_bases(
    manifold: Manifold, params: Float[np.ndarray, "points p"]
) -> Float[np.ndarray, "points k d"]:
    """Orthonormal bases of the tangent spaces, in the manifold's own coordinates.

    Raises:
        ValueError: as `Manifold.embed`.
    """
    manifold.embed(params)
    params = np.asarray(params, np.float64)
    left, _, _ = np.linalg.svd(manifold.jacobian(params), full_matrices=False)
    return left[:, :, : manifold.dim]


def spread_points(
    sample: Float[np.ndarray, "points k"], num: int, *, num_iterations: int = 30
) -> Int[np.ndarray, " num"]:
    """Indices of evenly spread points of a sample.

    Farthest points first, each the farthest from those before it; then Lloyd's iterations, which
    move each to the sample point nearest to its cell's mean and make the largest cells smaller.

    Raises:
        ValueError: if the sample has fewer than num different points, or is not finite.
    """
    sample = check_points("sample", sample)
    check_count("num", num, 1, len(sample))
    chosen = [0]
    distance = np.sum((sample - sample[0]) ** 2, axis=1)
    for _ in range(num - 1):
        chosen.append(int(np.argmax(distance)))
        if distance[chosen[-1]] == 0:
            raise ValueError(f"sample {sample.shape} has fewer than num={num} different points")
        distance = np.minimum(distance, np.sum((sample - sample[chosen[-1]]) ** 2, axis=1))
    index = np.array(chosen)
    tree = spatial.cKDTree(sample)
    for _ in range(num_iterations):
        _, cell = spatial.cKDTree(sample[index]).query(sample)
        sums = np.stack([np.bincount(cell, column, num) for column in sample.T], axis=1)
        moved = tree.query(sums / np.bincount(cell, minlength=num)[:, None])[1]
        if np.array_equal(moved, index):
            break
        index = moved
    return index


def nearest(
    x: Float[np.ndarray, "points k"], centers: Float[np.ndarray, "centers k"]
) -> Int[np.ndarray, " points"]:
    """Index of each point's nearest centre.

    Raises:
        ValueError: if shapes disagree or something is not finite.
    """
    centers = check_points("centers", centers)
    x = check_points("x", x, centers.shape[1], least=0)
    return np.argmax(2 * x @ centers.T - np.sum(centers**2, axis=1)[None, :], axis=1)


def regular_centers(name: str, num: int = 0) -> Float[np.ndarray, "charts p"]:
    """Parameters of evenly spread centres.

    Args:
        name: `circle` (num equal arcs), or on the sphere `octahedron` (6), `icosahedron` (12) or
            `fibonacci` (num).
        num: number of centres, where the name leaves it open.

    Raises:
        ValueError: for another name, or a number below 1 where it is needed.
    """
    if name in ("circle", "fibonacci"):
        check_count("num", num)
    if name == "circle":
        return 2 * np.pi * np.arange(num)[:, None] / num
    if name == "octahedron":
        return np.concatenate([np.eye(3), -np.eye(3)])
    if name == "icosahedron":
        golden = (1 + np.sqrt(5)) / 2
        pairs = np.array([[a, b] for a in (-1.0, 1.0) for b in (-golden, golden)])
        zero = np.zeros((4, 1))
        planes = np.concatenate([zero, pairs], axis=1)
        return np.concatenate([np.roll(planes, shift, axis=1) for shift in range(3)])
    if name == "fibonacci":
        step = np.arange(num) + 0.5
        height, angle = 1 - 2 * step / num, np.pi * (1 + np.sqrt(5)) * step
        radius = np.sqrt(1 - height**2)
        return np.stack([radius * np.cos(angle), radius * np.sin(angle), height], axis=1)
    raise ValueError(f"name={name!r} is not circle, octahedron, icosahedron or fibonacci")
