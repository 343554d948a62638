"""States at observations, and the flow from them to any time.

With neighbouring anchors t_i <= tau < t_{i+1} and w = (t_{i+1} - tau) / (t_{i+1} - t_i),

    z(tau) = w Flow(z_i; pi_i, tau - t_i) + (1 - w) Flow(z_{i+1}; pi_{i+1}, tau - t_{i+1}),

the second term running time backwards: continuous everywhere, equal to z_i at t_i, and equivariant,
since a sum of equivariant maps is. Before the first and after the last anchor one term remains.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from moe_jax.symmetries.config import LatentMoSConfig
from moe_jax.symmetries.context import last_index, next_index
from moe_jax.symmetries.generators import PlaneRates, Rates, flow, mean_flow
from moe_jax.symmetries.mixing import mix_rates, mixture_flow, read_out

MAX_SPAN = 1e6
"""Longest time, in rescaled units, over which a state is moved; float32 knows no phase past it."""


class Level(NamedTuple):
    """States of one level at its anchors.

    Attributes:
        z: [rows, times, latent], of meaning where `is_anchor`.
        gate: [rows, times, experts].
        is_anchor: bool[rows, times].
    """

    z: Array
    gate: Array
    is_anchor: Array


class Neighbours(NamedTuple):
    """The two anchors of every query, the one before first.

    Attributes:
        place: int32[rows, queries, 2], index of the anchor.
        weight: [rows, queries, 2]; both 0 in a row without anchors.
        span: [rows, queries, 2], time from the anchor to the query, clipped to `MAX_SPAN`.
        outside: [rows, queries], distance to the nearest anchor where the query lies beyond all.
    """

    place: Array
    weight: Array
    span: Array
    outside: Array


def locate(
    search_times: Float[Array, "rows times"],
    is_anchor: Bool[Array, "rows times"],
    query: Float[Array, "rows queries"],
    *,
    anchors: str = "local",
) -> Neighbours:
    """Finds each query's anchors and their weights; queries in any order, repeats allowed.

    Args:
        search_times: non-decreasing, +inf in padding.
        is_anchor: which times have a state; never in padding.
        query: finite.
        anchors: `local`, `last` (the one before, or the first for earlier queries) or `initial`.
    """
    size = search_times.shape[1]
    count = jnp.sum(search_times[:, None, :] <= query[:, :, None], axis=-1, dtype=jnp.int32)
    before = jnp.pad(last_index(is_anchor), ((0, 0), (1, 0)), constant_values=-1)
    after = jnp.pad(next_index(is_anchor), ((0, 0), (0, 1)), constant_values=size)
    first = jnp.broadcast_to(after[:, :1], count.shape)
    last = jnp.broadcast_to(before[:, -1:], count.shape)
    before = jnp.take_along_axis(before, count, axis=1)
    after = jnp.take_along_axis(after, count, axis=1)
    if anchors == "initial":
        before, after = jnp.where(first < size, first, -1), jnp.full_like(after, size)
    if anchors == "last":
        after = jnp.where(before >= 0, size, after)
    has_before, has_after = before >= 0, after < size
    index = jnp.stack([jnp.maximum(before, 0), jnp.minimum(after, size - 1)], axis=-1)
    # An index that stands for no anchor may point into padding.
    finite_times = jnp.where(jnp.isfinite(search_times), search_times, 0.0)
    at = _gather(finite_times[..., None], index)[..., 0]
    span = jnp.clip(query[..., None] - at, -MAX_SPAN, MAX_SPAN)
    gap = at[..., 1] - at[..., 0]
    fraction = jnp.where(gap > 0, (at[..., 1] - query) / jnp.where(gap > 0, gap, 1.0), 1.0)
    is_between = has_before & has_after
    w_before = jnp.where(is_between, fraction, has_before.astype(query.dtype))
    w_after = jnp.where(is_between, 1.0 - fraction, has_after.astype(query.dtype))
    ends = jnp.stack([jnp.minimum(first, size - 1), jnp.maximum(last, 0)], axis=-1)
    ends = _gather(finite_times[..., None], ends)[..., 0]
    outside = jnp.maximum(jnp.maximum(ends[..., 0] - query, query - ends[..., 1]), 0.0)
    return Neighbours(
        place=index,
        weight=jnp.stack([w_before, w_after], axis=-1),
        span=span,
        outside=outside,
    )


def evaluate(
    rates: Rates,
    level: Level,
    neighbours: Neighbours,
    config: LatentMoSConfig,
    length: Float[Array, ""] | None = None,
) -> Float[Array, "rows queries latent"]:
    """A level's latent at every query, as the decoder sees it.

    With a `length`, for plane rates under `algebra` mixing, it is the mean over [query, query +
    length] of the flow from each anchor, blended with the query's weights.
    """
    z = _gather(level.z, neighbours.place)
    skew = config.generator == "so"
    if config.mixing == "algebra" and (isinstance(rates, PlaneRates) or config.experts > 1):
        # Mixed once an anchor rather than once a query.
        mixed = jax.tree.map(
            lambda leaf: _gather(leaf, neighbours.place), mix_rates(rates, level.gate)
        )
        moved = flow(mixed, z, neighbours.span, skew=skew)
        if length is not None:
            moved = mean_flow(mixed, moved, jnp.broadcast_to(length, moved.shape[:-1]))
    else:
        gate = _gather(level.gate, neighbours.place)
        moved = mixture_flow(rates, z, gate, neighbours.span, mixing=config.mixing, skew=skew)
        moved = read_out(moved, gate, mixing=config.mixing)
    return jnp.sum(neighbours.weight[..., None] * moved, axis=2)


def level_anchors(
    is_anchor: Bool[Array, "rows times"], stride: int, *, causal: bool = False
) -> Bool[Array, "rows times"]:
    """Every stride-th anchor, counted from the last one, or from the first where causal.

    Counted from the last, the newest observation is an anchor on every level; which ones are then
    depends on how many follow, so that a causal model counts from the first.
    """
    ones = is_anchor.astype(jnp.int32)
    count = jax.lax.cumsum(ones, axis=1, reverse=not causal)
    return is_anchor & ((count - 1) % stride == 0)


def segment_means(
    h: Float[Array, "rows times hidden"],
    is_fine: Bool[Array, "rows times"],
    is_coarse: Bool[Array, "rows times"],
) -> Float[Array, "rows times hidden"]:
    """Mean of h over the fine anchors since the coarse anchor before, at each coarse anchor."""
    total = jnp.cumsum(jnp.where(is_fine[..., None], h, 0.0), axis=1)
    count = jnp.cumsum(is_fine.astype(h.dtype), axis=1)[..., None]
    before = jnp.pad(last_index(is_coarse)[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    has_before = (before >= 0)[..., None]
    before = jnp.maximum(before, 0)[..., None]

    def since(sums: Array) -> Array:
        index = jnp.broadcast_to(before, sums.shape)
        return sums - jnp.where(has_before, jnp.take_along_axis(sums, index, axis=1), 0.0)

    return since(total) / jnp.maximum(since(count), 1.0)


def _gather(leaf: Array, index: Int[Array, "rows queries 2"]) -> Array:
    """Entries [rows, queries, 2, ...] of an array [rows, times, ...]."""
    return jax.vmap(lambda row, at: row[at])(leaf, index)
