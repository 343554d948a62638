"""What a fit starts from: whitening, experts, exponents and chains; and a new choice of experts."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from moe_jax.product_of_t import placement, warmup
from moe_jax.product_of_t.experts import (
    Experts,
    join_experts,
    log_factors_at,
    transform_experts,
)
from moe_jax.product_of_t.samplers import conditional_parameters, gibbs_step
from moe_jax.product_of_t.settings import FitSettings
from moe_jax.product_of_t.targets import LogDensity, Target, generator_of, values_at
from moe_jax.product_of_t.update import Whitening

_CANDIDATES_PER_EXPERT = 40
_MIN_CANDIDATES = 1000
_BOUND_DRAWS = 500
_KEPT_EXPONENT = 1e-4
# From the centres of experts, and of draws to choose new centres from.
_SWEEPS = 12


class Evaluations(NamedTuple):
    """What a fit asked of its target.

    Attributes:
        score: gradients of log p, each with the value of log p.
        log_density: values of log p alone.
        hessian: Hessians.
        dim: D.
    """

    score: int
    log_density: int
    hessian: int
    dim: int

    @property
    def total_scores(self) -> int:
        """Gradients, with D of them for a Hessian; values of log p alone are not in it."""
        return self.score + self.dim * self.hessian

    def plus(self, *, score: int = 0, log_density: int = 0, hessian: int = 0) -> "Evaluations":
        """These and so many more."""
        return Evaluations(
            self.score + score, self.log_density + log_density, self.hessian + hessian, self.dim
        )


class Preparation(NamedTuple):
    """Where a round starts.

    Attributes:
        whitening: coordinates of the fit.
        experts: in whitened coordinates.
        exponents: alpha_0.
        points: states of the chains.
        evaluations: of the target so far.
        candidates: draws of a broad proposal; None where the experts are given.
    """

    whitening: Whitening
    experts: Experts
    exponents: Float[Array, " experts"]
    points: Float[Array, "batch dim"]
    evaluations: Evaluations
    candidates: warmup.Candidates | None = None


def prepare(key: Key[Array, ""], target: Target, settings: FitSettings) -> Preparation:
    """Finds where the target is, whitens it and chooses the experts of the first round."""
    dim = target.starts.shape[-1]
    keys = jax.random.split(key, 5)
    log_density = target.log_density
    anchors = warmup.find_anchors(log_density, target.starts)
    used = Evaluations(anchors.scores, 0, anchors.hessians, dim)
    loc, scale = anchors.loc, anchors.scale
    best = 0
    if settings.match_iterations:
        batch, steps = settings.batch_size, settings.match_iterations
        matched = warmup.batch_and_match(keys[0], log_density, loc[0], scale[0], batch, steps)
        loc = np.concatenate([loc, matched[0][None]])
        scale = np.concatenate([scale, matched[1][None]])
        bounds = [
            warmup.evidence_bound(keys[1], log_density, *anchor, _BOUND_DRAWS)
            for anchor in zip(loc, scale, strict=True)
        ]
        best = int(np.argmax(bounds))
        used = used.plus(score=batch * steps, log_density=_BOUND_DRAWS * len(bounds))

    count = max(_MIN_CANDIDATES, _CANDIDATES_PER_EXPERT * settings.local_experts)
    candidates = warmup.draw_candidates(keys[2], log_density, loc, scale, count)
    used = used.plus(log_density=count)
    centre, root = np.zeros(dim), np.eye(dim)
    if settings.whiten:
        centre, root = warmup.tempered_moments(candidates) or (loc[best], scale[best])
    whitening = Whitening(jnp.asarray(centre), jnp.asarray(root))

    parts = [placement.ladder(dim)] if settings.ladder else []
    if settings.local_experts:
        modes = loc[: max(anchors.num_modes, 1)]
        if settings.placement == "jitter":
            points = placement.jittered_points(
                keys[3], modes, scale[: len(modes)], settings.local_experts
            )
        else:
            # Each mode once with every scale, then the draws.
            modes = np.repeat(modes, len(settings.local_scales), axis=0)
            modes = modes[: settings.local_experts // 2]
            rest = settings.local_experts - modes.shape[0]
            drawn = placement.choose_points(keys[3], candidates.points, candidates.log_ratios, rest)
            points = np.concatenate([modes, drawn])
        points = np.linalg.solve(root, (points - centre).T).T
        parts.append(placement.local_experts(log_density, whitening, points, settings.local_scales))
        used = used.plus(hessian=settings.local_experts)
    if not parts:
        raise ValueError("ladder=False and local_experts=0: no positive definite expert is left")
    if settings.coordinate_experts:
        parts.append(placement.coordinate_experts(root))
    experts = join_experts(*parts)
    exponents = jnp.asarray(placement.first_exponents(experts, dim))
    others = int(settings.target_share * settings.batch_size)
    chains = _start_chains(keys[4], experts, exponents, settings.batch_size - others)
    return Preparation(whitening, experts, exponents, chains, used, candidates)


def prepare_given(
    key: Key[Array, ""],
    experts: Experts,
    exponents: Float[Array, " experts"],
    settings: FitSettings,
) -> Preparation:
    """Starts from given experts, whitened, if at all, by z | E[w] of the product they form.

    That makes the fit equivariant: an affine map of target and experts leaves the exponents.
    """
    dim = experts.dim
    whitening = Whitening(jnp.asarray(np.zeros(dim)), jnp.asarray(np.eye(dim)))
    if settings.whiten:
        share = (exponents / jnp.sum(exponents))[None]
        centre, cholesky, spread, _ = map(
            np.asarray, jax.jit(conditional_parameters)(experts, exponents, share)
        )
        # A scale matrix; the covariance may be infinite.
        freedom = 2.0 * float(np.sum(exponents)) - dim
        covariance = np.linalg.inv(cholesky[0] @ cholesky[0].T) * spread[0] / freedom
        root = np.linalg.cholesky(covariance)
        whitening = Whitening(jnp.asarray(centre[0]), jnp.asarray(root))
        inverse = np.linalg.inv(root)
        experts = transform_experts(experts, -inverse @ centre[0], inverse)
    points = _start_chains(key, experts, exponents, settings.batch_size)
    return Preparation(whitening, experts, exponents, points, Evaluations(0, 0, 0, dim))


def refresh(
    key: Key[Array, ""],
    log_density: LogDensity,
    settings: FitSettings,
    before: Preparation,
) -> Preparation:
    """Local experts without a share give way to new ones, where p exceeds q.

    Centres are draws of q taken with probabilities by the square root of p / q; the new exponents
    are 0. The number of experts stays, so that nothing is compiled again.
    """
    experts, exponents = before.experts, np.asarray(before.exponents)
    num_ladder = len(placement.ladder(1).full_loc) if settings.ladder else 0
    num_full = experts.full_loc.shape[0]
    order = num_ladder + np.argsort(-exponents[num_ladder:num_full], kind="stable")
    kept = order[exponents[order] > _KEPT_EXPONENT][: (3 * settings.local_experts) // 4]
    kept = np.concatenate([np.arange(num_ladder), kept])
    count = num_full - len(kept)

    gibbs_key, choice_key = jax.random.split(key)
    states: list[Array] = []
    for index in range(_SWEEPS):
        last = states[-1] if states else before.points
        states.append(gibbs_step(gibbs_key, np.int32(index), experts, before.exponents, last))
    points = np.concatenate([np.asarray(state) for state in states])
    values = values_at(
        log_density,
        np.asarray(before.whitening.loc) + points @ np.asarray(before.whitening.scale).T,
    )
    ratios = values + log_factors_at(experts, points) @ exponents
    ratios = np.where(np.isfinite(ratios), ratios, -np.inf)
    centres = placement.choose_points(choice_key, points, ratios, count)
    fresh = placement.local_experts(log_density, before.whitening, centres, settings.local_scales)

    def renew(old: Array, new: Array) -> Array:
        return jnp.asarray(np.concatenate([np.asarray(old)[kept], np.asarray(new)]))

    experts = dataclasses.replace(
        experts,
        full_loc=renew(experts.full_loc, fresh.full_loc),
        full_precision=renew(experts.full_precision, fresh.full_precision),
    )
    following = np.concatenate([exponents[kept], np.zeros(count), exponents[num_full:]])
    used = before.evaluations.plus(log_density=len(points), hessian=count)
    return before._replace(
        experts=experts,
        exponents=jnp.asarray(following),
        points=states[-1],
        evaluations=used,
    )


def _start_chains(key: Array, experts: Experts, exponents: Array, count: int) -> Array:
    """States after some sweeps from the centres of positive definite experts, drawn at random."""
    pick_key, gibbs_key = jax.random.split(key)
    full = np.flatnonzero(np.asarray(experts.is_full_rank))
    pick = generator_of(pick_key).choice(full, size=count)
    points = jnp.asarray(np.asarray(experts.loc)[pick])
    for index in range(_SWEEPS):
        points = gibbs_step(gibbs_key, np.int32(index), experts, exponents, points)
    return points
