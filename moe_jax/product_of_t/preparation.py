"""What a fit starts from: whitening, experts, exponents and chains; and a new choice of experts."""

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from moe_jax.product_of_t import placement, warmup
from moe_jax.product_of_t.experts import Experts, join_experts, log_factors, transform_experts
from moe_jax.product_of_t.samplers import conditional_parameters, gibbs
from moe_jax.product_of_t.settings import FitSettings
from moe_jax.product_of_t.targets import LogDensity, Target
from moe_jax.product_of_t.update import Whitening

_CANDIDATES_PER_EXPERT = 40
_MIN_CANDIDATES = 1000
_BOUND_DRAWS = 500
# Below this power of p / proposal, the tempered moments say more of the proposal than of p.
_TRUSTED_POWER = 0.3
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
    """

    whitening: Whitening
    experts: Experts
    exponents: Float[Array, " experts"]
    points: Float[Array, "batch dim"]
    evaluations: Evaluations


def prepare(key: Key[Array, ""], target: Target, settings: FitSettings) -> Preparation:
    """Finds where the target is, whitens it and chooses the experts of the first round."""
    dim = target.starts.shape[-1]
    keys = jax.random.split(key, 5)
    log_density = target.log_density
    anchors = warmup.find_anchors(log_density, target.starts)
    used = Evaluations(anchors.scores, 0, anchors.hessians, dim)
    loc, scale = jnp.asarray(anchors.loc), jnp.asarray(anchors.scale)
    best = 0
    if settings.match_iterations:
        batch, steps = settings.match_batch_size, settings.match_iterations
        locs, scales = warmup.batch_and_match(keys[0], log_density, loc[0], scale[0], batch, steps)
        loc = jnp.concatenate([loc, locs[-1:]])
        scale = jnp.concatenate([scale, scales[-1:]])
        bounds = [
            float(warmup.evidence_bound(keys[1], log_density, *anchor, _BOUND_DRAWS))
            for anchor in zip(loc, scale, strict=True)
        ]
        best = int(np.argmax(bounds))
        used = used.plus(score=batch * steps, log_density=_BOUND_DRAWS * len(bounds))

    count = max(_MIN_CANDIDATES, _CANDIDATES_PER_EXPERT * settings.local_experts)
    candidates = warmup.draw_candidates(keys[2], log_density, loc, scale, count)
    used = used.plus(log_density=count)
    whitening = Whitening(jnp.zeros(dim), jnp.eye(dim))
    if settings.whiten:
        whitening = _whitening(candidates, Whitening(loc[best], scale[best]))

    parts = [placement.ladder(dim)] if settings.ladder else []
    if settings.local_experts:
        modes = loc[: max(anchors.num_modes, 1)]
        if settings.placement == "jitter":
            num_modes = modes.shape[0]
            points = placement.jittered_points(
                keys[3], modes, scale[:num_modes], settings.local_experts
            )
        else:
            # Each mode once with every scale, then the draws.
            modes = jnp.repeat(modes, len(settings.local_scales), axis=0)
            modes = modes[: settings.local_experts // 2]
            rest = settings.local_experts - modes.shape[0]
            drawn = placement.choose_points(keys[3], *candidates, rest)
            points = jnp.concatenate([modes, drawn])
        points = _to_white(whitening, points)
        parts.append(placement.local_experts(log_density, whitening, points, settings.local_scales))
        used = used.plus(hessian=settings.local_experts)
    if not parts:
        raise ValueError("ladder=False and local_experts=0: no positive definite expert is left")
    if settings.coordinate_experts:
        parts.append(placement.coordinate_experts(np.asarray(whitening.scale)))
    experts = join_experts(*parts)
    exponents = jnp.asarray(placement.first_exponents(experts, dim))
    points = _start_chains(keys[4], experts, exponents, settings.batch_size)
    return Preparation(whitening, experts, exponents, points, used)


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
    whitening = Whitening(jnp.zeros(dim), jnp.eye(dim))
    if settings.whiten:
        share = (exponents / jnp.sum(exponents))[None]
        centre, cholesky, spread, _ = conditional_parameters(experts, exponents, share)
        covariance = jnp.linalg.inv(cholesky[0] @ cholesky[0].T) * spread[0]
        # A scale matrix; the covariance may be infinite.
        covariance = covariance / (2.0 * jnp.sum(exponents) - dim)
        whitening = Whitening(centre[0], jnp.linalg.cholesky(covariance))
        experts = inverse_transform(experts, whitening)
    points = _start_chains(key, experts, exponents, settings.batch_size)
    return Preparation(whitening, experts, exponents, points, Evaluations(0, 0, 0, dim))


def inverse_transform(experts: Experts, whitening: Whitening) -> Experts:
    """Experts of z as experts of x, z = loc + scale x."""
    inverse = jnp.linalg.inv(whitening.scale)
    return transform_experts(experts, -inverse @ whitening.loc, inverse)


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
    states = gibbs(gibbs_key, experts, before.exponents, before.points, _SWEEPS)
    points = states.reshape(-1, experts.dim)
    ratios = _log_ratios(log_density, before.whitening, experts, before.exponents, points)
    centres = placement.choose_points(choice_key, points, ratios, settings.local_experts)
    # As many as there are local slots, whatever is kept, for the sake of static shapes.
    fresh = placement.local_experts(log_density, before.whitening, centres, settings.local_scales)
    experts = dataclasses.replace(
        experts,
        full_loc=jnp.concatenate([experts.full_loc[kept], fresh.full_loc[:count]]),
        full_precision=jnp.concatenate(
            [experts.full_precision[kept], fresh.full_precision[:count]]
        ),
    )
    following = np.concatenate([exponents[kept], np.zeros(count), exponents[num_full:]])
    used = before.evaluations.plus(log_density=points.shape[0], hessian=count)
    return before._replace(
        experts=experts,
        exponents=jnp.asarray(following),
        points=states[-1],
        evaluations=used,
    )


@partial(jax.jit, static_argnums=0)
def _log_ratios(
    log_density: LogDensity,
    whitening: Whitening,
    experts: Experts,
    exponents: Array,
    points: Array,
) -> Array:
    values = jax.vmap(log_density)(whitening.loc[None] + points @ whitening.scale.T)
    log_q = -(log_factors(experts, points) @ exponents)
    return jnp.where(jnp.isfinite(values), values - log_q, -jnp.inf)


@jax.jit
def _whitening(candidates: warmup.Candidates, anchor: Whitening) -> Whitening:
    """Moments of the candidates under tempered weights, or the anchor where those are poor."""
    dim = anchor.loc.shape[0]
    least = max(100.0, 10.0 * dim)
    power = warmup.temper(candidates.log_ratios, least)
    weights = jax.nn.softmax(
        jnp.where(jnp.isfinite(candidates.log_ratios), power * candidates.log_ratios, -jnp.inf)
    )
    loc = weights @ candidates.points
    offset = _to_white(anchor, candidates.points) - _to_white(anchor, loc[None])
    covariance = (offset * weights[:, None]).T @ offset
    scale = anchor.scale @ jnp.linalg.cholesky(covariance)
    trusted = (power >= _TRUSTED_POWER) & jnp.all(jnp.isfinite(scale))
    return Whitening(jnp.where(trusted, loc, anchor.loc), jnp.where(trusted, scale, anchor.scale))


@jax.jit
def _to_white(whitening: Whitening, points: Array) -> Array:
    offset = (points - whitening.loc[None]).T
    return jax.scipy.linalg.solve_triangular(whitening.scale, offset, lower=True).T


def _start_chains(key: Array, experts: Experts, exponents: Array, count: int) -> Array:
    """States after some sweeps from the centres of positive definite experts, drawn at random."""
    pick_key, gibbs_key = jax.random.split(key)
    pick = jax.random.categorical(pick_key, jnp.log(experts.is_full_rank), shape=(count,))
    # `refresh` calls the same compiled function.
    return gibbs(gibbs_key, experts, exponents, experts.loc[pick], _SWEEPS)[-1]
