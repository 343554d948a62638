"""Linear regions of a network of mixtures: exact along a segment, a lower bound on a grid."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from theory.checks import check_count, check_points
from theory.network import Network, lift

_TOLERANCE = 1e-11


@dataclasses.dataclass(frozen=True)
class SegmentRegions:
    """Where a network changes along x(t) = a + t (b - a), t in (0, 1).

    Attributes:
        kinks: float64, places at which the answer's slope changes and no gate does.
        gate_jumps: float64, places at which some layer changes its expert.
        num_pieces: affine pieces, separated by kinks and by those gate jumps at which value or
            slope changes.
    """

    kinks: np.ndarray
    gate_jumps: np.ndarray
    num_pieces: int


def linear_regions_on_segment(
    network: Network,
    start: Float[np.ndarray, " _"],
    end: Float[np.ndarray, " _"],
    *,
    max_events: int = 100_000,
) -> SegmentRegions:
    """Walks from breakpoint to breakpoint: the next zero of a pre-activation or gate difference.

    Between breakpoints every token is affine in t, so the next one is the least root of finitely
    many linear equations. Roots within 1e-11 of each other are one.

    Raises:
        ValueError: if a point does not fit the network, the two agree, or there are more than
            `max_events` events.
    """
    for name, point in (("start", start), ("end", end)):
        if np.shape(point) != (network.input_dim,):
            raise ValueError(
                f"{name} {np.shape(point)} disagrees with input_dim={network.input_dim}"
            )
        check_points(name, np.reshape(point, (1, -1)))
    check_count("max_events", max_events)
    if np.array_equal(start, end):
        raise ValueError("start and end are the same point")
    origin, far = lift(np.stack([start, end]), network.model_dim)
    direction = far - origin
    kinks: list[float] = []
    jumps: list[float] = []
    num_pieces, t = 1, 0.0
    value, slope, selected, following = _affine_at(network, origin, direction, t)
    for _ in range(max_events):
        if following >= 1.0 - _TOLERANCE:
            return SegmentRegions(np.array(kinks), np.array(jumps), num_pieces)
        before = value + (following - t) * slope, slope, selected
        t = following
        value, slope, selected, following = _affine_at(network, origin, direction, t)
        scale = 1.0 + np.abs(before[0]).max() + np.abs(before[1]).max() + np.abs(slope).max()
        bends = np.abs(slope - before[1]).max() > 1e-9 * scale
        breaks = bends or np.abs(value - before[0]).max() > 1e-9 * scale
        num_pieces += bool(breaks)
        if selected != before[2]:
            jumps.append(t)
        elif breaks:
            kinks.append(t)
    raise ValueError(f"more than max_events={max_events} events on the segment")


def grid_patterns(
    network: Network, points: Float[np.ndarray, "points D"]
) -> Int[np.ndarray, " points"]:
    """Number of the activation and routing pattern at each point, in order of appearance.

    The count of distinct ones is a lower bound on the regions that the points' hull meets.

    Raises:
        ValueError: if there is no point, or points are not finite or not of the network's
            dimension.
    """
    if np.ndim(points) != 2 or np.shape(points)[1] != network.input_dim:
        raise ValueError(f"points {np.shape(points)} do not fit input_dim={network.input_dim}")
    tokens = lift(points, network.model_dim)
    parts = []
    for variables in network.params:
        kernel, up, down = _matrices(variables)
        choice = np.argmax(tokens @ kernel, axis=1)
        out = np.empty_like(tokens)
        active = np.empty((len(tokens), up.shape[2]), bool)
        for e in np.unique(choice):
            member = choice == e
            before = tokens[member] @ up[e]
            active[member] = before > 0
            out[member] = np.maximum(before, 0.0) @ down[e]
        parts += [choice[:, None], active]
        tokens = out
    pattern = np.concatenate(parts, axis=1)
    _, first, inverse = np.unique(pattern, axis=0, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[inverse.reshape(-1)]


def region_bound(width: int, dim: int) -> int:
    """Most regions into which `width` hyperplanes cut R^dim: sum_{j <= dim} C(width, j).

    Raises:
        ValueError: if either is negative.
    """
    check_count("width", width, 0)
    check_count("dim", dim, 0)
    return sum(math.comb(width, j) for j in range(min(dim, width) + 1))


def selected_set_bound(num_experts: int, num_selected: int) -> int:
    """Most cells of a top-k gate: C(N, k) selected sets.

    Raises:
        ValueError: if there is no expert, or k is not in [1, N].
    """
    check_count("num_experts", num_experts)
    check_count("num_selected", num_selected, 1, num_experts)
    return math.comb(num_experts, num_selected)


def _affine_at(
    network: Network, origin: np.ndarray, direction: np.ndarray, t: float
) -> tuple[np.ndarray, np.ndarray, tuple[int, ...], float]:
    """Answer, its slope and the experts just after t, and the next t at which a sign changes."""
    value, slope = origin + t * direction, direction
    following, selected = math.inf, []
    for variables in network.params:
        kernel, up, down = _matrices(variables)
        logits, rise = value @ kernel, slope @ kernel
        # Just after t the steepest of those tied is the largest.
        tied = np.flatnonzero(logits >= logits.max() - _TOLERANCE * (1 + np.abs(logits).max()))
        best = int(tied[np.argmax(rise[tied])])
        gap, closing = logits[best] - logits, rise - rise[best]
        following = min(following, _next(t, gap, closing))
        selected.append(best)
        before, change = value @ up[best], slope @ up[best]
        near = np.abs(before) <= _TOLERANCE * (1 + np.abs(value).max() * np.abs(up[best]).max())
        is_on = np.where(near, change > 0, before > 0)
        distance = np.where(near, 0.0, np.abs(before))
        following = min(following, _next(t, distance, np.where(is_on, -change, change)))
        value = np.where(is_on, before, 0.0) @ down[best]
        slope = np.where(is_on, change, 0.0) @ down[best]
    outputs = slice(1, 1 + network.output_dim)
    return value[outputs], slope[outputs], tuple(selected), following


def _next(t: float, distance: np.ndarray, closing: np.ndarray) -> float:
    """First time after t at which one of the distances, closing at constant speed, is 0."""
    moving = closing > 1e-13 * (1 + np.abs(closing).max())
    times = t + np.maximum(distance[moving], 0.0) / closing[moving]
    return float(np.min(times[times > t + _TOLERANCE], initial=math.inf))


def _matrices(variables: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    experts = variables["params"]["experts"]
    return variables["params"]["router"]["gate"]["kernel"], experts["up"], experts["down"]
