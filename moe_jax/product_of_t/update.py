"""One iteration of the fit: samples of q, scores of the target, a quadratic programme."""

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from moe_jax.product_of_t.diagnostics import pareto_smooth
from moe_jax.product_of_t.experts import Experts, expert_scores
from moe_jax.product_of_t.quadratic_programme import solve_bounded
from moe_jax.product_of_t.samplers import dirichlet_draws, effective_sample_size, gibbs_step
from moe_jax.product_of_t.settings import FitSettings
from moe_jax.product_of_t.targets import LogDensity, whitened_scores

# Beyond this distance, in whitened standard deviations, samples have run away.
_RUNAWAY = 1e6


class Whitening(NamedTuple):
    """z = loc + scale x, x the coordinates of the fit.

    Attributes:
        loc: centre.
        scale: lower triangular.
    """

    loc: Float[Array, " dim"]
    scale: Float[Array, "dim dim"]


class State(NamedTuple):
    """What passes from one iteration to the next.

    Attributes:
        exponents: alpha_t.
        points: the chains' states, in whitened coordinates.
    """

    exponents: Float[Array, " experts"]
    points: Float[Array, "batch dim"]


class Record(NamedTuple):
    """Diagnostics of an iteration, as in `diagnostics.History`; `runaway` flags absurd samples."""

    fisher_divergence: Array
    ess: Array
    num_active: Array
    exponent_sum: Array
    pareto_k: Array
    num_nonfinite: Array
    kkt_residual: Array
    runaway: Array


def matching_programme(
    scores: Float[Array, "experts dim batch"],
    target_scores: Float[Array, "batch dim"],
    weights: Float[Array, " batch"],
) -> tuple[Float[Array, "experts experts"], Float[Array, " experts"]]:
    """G and h of the weighted Fisher divergence, alpha' G alpha - 2 h' alpha + constant.

    G_kl = sum_b W_b <S_bk, S_bl> and h_k = sum_b W_b <S_bk, g_b>, with S_bk the gradient of
    -log D_k at z_b and g_b the target's score there.
    """
    roots = jnp.sqrt(weights)
    rows = (scores * roots[None, None]).reshape(scores.shape[0], -1)
    return rows @ rows.T, rows @ (target_scores * roots[:, None]).T.reshape(-1)


def update(
    key: Key[Array, ""],
    log_density: LogDensity,
    settings: FitSettings,
    experts: Experts,
    whitening: Whitening,
    state: State,
    iteration: int,
    others: Float[Array, "others dim"] | Float[np.ndarray, "others dim"] | None = None,
) -> tuple[State, Record]:
    """alpha_t+1 = argmin of the weighted Fisher divergence at q_t's samples plus a proximal term.

    With weights W_b, target scores g_b and expert scores S_b,
        sum_b W_b |g_b - S_b' alpha|^2 + R(alpha, alpha_t) / eta_t
    over alpha >= 0 with sum over positive definite experts >= (D + least_freedom) / 2.

    Three compiled calls, of which only that of the target has to be compiled for a new target: a
    sweep, the target's scores, and all the rest. `others` are samples beside the chains', of any
    density of the same support: the divergence is then that under the mixture of both, and where
    the target is in the family the minimiser is the same.

    Reference: arXiv 2510.21598, section 3; `FitSettings` says where we depart from it.
    """
    points = state.points
    log_weights = None
    if settings.sampler == "dirichlet":
        draws = dirichlet_draws(
            jax.random.fold_in(key, iteration), experts, state.exponents, points.shape[0]
        )
        points, log_weights = draws.values, draws.log_weights
    else:
        for sweep in range(settings.sweeps):
            count = np.int32(iteration * settings.sweeps + sweep)
            points = gibbs_step(key, count, experts, state.exponents, points)
    chains = points.shape[0]
    if others is not None:
        points = jnp.concatenate([points, others])
    values, scores, finite = whitened_scores(log_density, *whitening, points)
    rate = settings.learning_rate
    if settings.schedule == "decreasing":
        rate = rate / (iteration + 1.0)
    return _solve(
        settings_of_update(settings),
        chains,
        experts,
        State(state.exponents, points),
        log_weights,
        (values, scores, finite),
        np.float64(rate),
    )


@partial(jax.jit, static_argnums=(0, 1))
def _solve(
    settings: FitSettings,
    chains: int,
    experts: Experts,
    state: State,
    log_weights: Array | None,
    evaluated: tuple[Array, Array, Array],
    rate: Array,
) -> tuple[State, Record]:
    """The programme at the samples of `state` with their log weights, all equal if None."""
    dim = experts.dim
    exponents, points = state
    values, target_scores, finite = evaluated
    safe_points = jnp.where(finite[:, None], points, 0.0)
    scores, log_d = expert_scores(experts, safe_points)
    log_ratios = jnp.where(finite, values + log_d @ exponents, -jnp.inf)

    if log_weights is None:
        log_weights = jnp.zeros(points.shape[0], points.dtype)
    log_weights = jnp.where(finite, log_weights, -jnp.inf)
    if settings.score_clip is not None:
        squares = jnp.sum(target_scores**2, axis=-1)
        log_weights = log_weights - jnp.log1p(squares / (settings.score_clip * dim))
    weights = jax.nn.softmax(log_weights)
    weights = jnp.where(finite, weights, 0.0)

    gram, linear = matching_programme(scores, target_scores, weights)
    misfit = target_scores - jnp.tensordot(exponents, scores, axes=1).T
    own = weights[:chains] / jnp.maximum(jnp.sum(weights[:chains]), 1e-300)
    fisher_divergence = own @ jnp.sum(misfit[:chains] ** 2, axis=-1)
    if settings.value_weight:
        extra_gram, extra_linear = _value_programme(log_d, values, weights)
        gram = gram + settings.value_weight * extra_gram
        linear = linear + settings.value_weight * extra_linear

    metric = jnp.diagonal(gram) if settings.proximal == "diagonal" else jnp.ones_like(linear)
    solution = solve_bounded(
        gram + jnp.diag(metric / rate),
        linear + metric * exponents / rate,
        experts.is_full_rank,
        jnp.asarray(0.5 * (dim + settings.least_freedom), gram.dtype),
        exponents,
    )
    # Without a usable sample there is nothing to learn from.
    learned = jnp.any(finite) & jnp.all(jnp.isfinite(solution.value))
    following = jnp.where(learned, solution.value, exponents)
    total = jnp.sum(following)
    record = Record(
        fisher_divergence=fisher_divergence,
        ess=effective_sample_size(log_weights),
        num_active=jnp.sum(following > 1e-6 * total),
        exponent_sum=total,
        pareto_k=pareto_smooth(log_ratios[:chains])[1],
        num_nonfinite=jnp.sum(~finite),
        kkt_residual=solution.residual,
        runaway=jnp.median(jnp.max(jnp.abs(points), axis=-1)) > _RUNAWAY,
    )
    return State(following, safe_points[:chains]), record


def _value_programme(log_d: Array, values: Array, weights: Array) -> tuple[Array, Array]:
    """G and h of the weighted variance of log p - log q, log q = -sum_k alpha_k log D_k - log C."""
    centred = -(log_d - (weights @ log_d)[None])
    usable = jnp.where(weights > 0, values, 0.0)
    target = usable - weights @ usable
    weighted = centred * weights[:, None]
    return weighted.T @ centred, weighted.T @ target


def settings_of_update(settings: FitSettings) -> FitSettings:
    """The settings, those that `_solve` does not read at defaults, to share compilations."""
    default = FitSettings()
    unread = (
        "rounds", "iterations", "batch_size", "sampler", "sweeps", "learning_rate", "schedule",
        "average", "whiten", "target_share", "placement", "local_experts", "local_scales", "ladder",
        "coordinate_experts", "match_iterations", "num_draws",
    )  # fmt: skip
    return dataclasses.replace(settings, **{name: getattr(default, name) for name in unread})
