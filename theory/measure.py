"""Errors of a family of constructions on the same points, compiled once."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Float, Key

from theory.atlas import Atlas
from theory.checks import check_count
from theory.construct import ChartMoE, Target, answer, chart_moe, nodal_values, pad_network


class Errors(NamedTuple):
    """Errors of one construction.

    Attributes:
        sup: float64[outputs], largest on the points.
        rmse: float64[outputs], root mean square over the points.
    """

    sup: np.ndarray
    rmse: np.ndarray


def chart_errors(
    key: Key[Array, ""],
    atlas: Atlas,
    target: Target,
    segments: Sequence[int],
    params: Float[np.ndarray, "points p"],
    *,
    gate: str = "voronoi",
    share_compilation: bool = True,
) -> list[Errors]:
    """Builds a mixture for each mesh and measures it at the points of `params`.

    Args:
        key: see `chart_moe`.
        atlas: charts.
        target: in the manifold's own coordinates.
        segments: mesh intervals across a box, one construction each.
        params: parameters of the points.
        gate: see `chart_moe`.
        share_compilation: pad all networks to the widest, which compiles once and computes more.

    Raises:
        ValueError: as `chart_moe` and `answer`.
    """
    x = atlas.manifold.embed(params)
    y = target(atlas.manifold.native(params))
    builds = [chart_moe(key, atlas, target, num, gate=gate) for num in segments]
    if share_compilation:
        builds = pad_alike(builds)
    errors = []
    for build in builds:
        gap = np.abs(answer(build, x).y - y)
        errors.append(Errors(gap.max(axis=0), np.sqrt(np.mean(gap**2, axis=0))))
    return errors


def pad_alike(builds: Sequence[ChartMoE]) -> list[ChartMoE]:
    """The same constructions with idle neurons, so that all have the shapes of the largest."""
    model_dim = max(build.network.model_dim for build in builds)
    hidden = tuple(
        max(layer.hidden_dim for layer in layers)
        for layers in zip(*(build.network.layers for build in builds), strict=True)
    )
    return [
        dataclasses.replace(build, network=pad_network(build.network, model_dim, hidden))
        for build in builds
    ]


def interval_bound(
    atlas: Atlas, target: Target, num_segments: int, *, num_fine: int = 4096
) -> float:
    """h^2 / 8 max |g''| of a smooth target on one-dimensional charts, the interpolant's error.

    g'' from second differences on `num_fine` intervals a chart; over the boxes, which are a little
    larger than the cells.

    Raises:
        ValueError: unless charts have dimension 1, there is a segment and 2 fine intervals.
    """
    if atlas.dim != 1:
        raise ValueError(f"charts have dimension {atlas.dim}; expected 1")
    check_count("num_segments", num_segments)
    check_count("num_fine", num_fine, 2)
    fine = nodal_values(atlas, target, num_fine)
    spacing = (atlas.high - atlas.low) / num_fine
    curvature = np.abs(np.diff(fine, n=2, axis=1)) / spacing[:, :, None] ** 2
    width = (atlas.high - atlas.low) / num_segments
    return float(np.max(width[:, :, None] ** 2 / 8 * curvature))
