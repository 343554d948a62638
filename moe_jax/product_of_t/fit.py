"""Fitting a product of t-experts to a density by matching scores."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key
from scipy.special import logsumexp

from moe_jax.product_of_t.diagnostics import History, pareto_smooth, trust_warnings
from moe_jax.product_of_t.experts import Experts, log_factors_at, transform_experts
from moe_jax.product_of_t.model import LogNormalizer, ProductOfT, log_mean_weight
from moe_jax.product_of_t.pool import Pool, moment_gaps, pool_draws
from moe_jax.product_of_t.preparation import (
    Evaluations,
    Preparation,
    prepare,
    prepare_given,
    refresh,
)
from moe_jax.product_of_t.samplers import (
    WeightedDraws,
    annealed_gibbs,
    effective_sample_size,
)
from moe_jax.product_of_t.settings import SAFEGUARDED, FitSettings
from moe_jax.product_of_t.targets import (
    LogDensity,
    Target,
    generator_of,
    target_of_function,
    target_of_model,
    values_at,
)
from moe_jax.product_of_t.update import State, update
from moe_jax.product_of_t.warmup import tempered_weights

# Exponents below this share of their sum do not change the density within its error.
_PRUNED = 1e-8
# Steps of annealing for the final draws, and more of them where its weights are worth less than
# this share of the draws.
_ANNEALING, _MAX_ANNEALING, _GOOD_SHARE = 64, 1024, 0.3


@chex.dataclass(frozen=True)
class FitResult:
    """A fitted product and what is known of it; arrays are numpy's, float64, in z of the target.

    Attributes:
        distribution: q with its normaliser, without the experts of no weight. Its arrays are
            float64; JAX computes with them in float32 unless 64 bits are enabled.
        draws: draws of q, for a numpyro model in its unconstrained coordinates.
        log_density: log p at the draws, up to the target's constant.
        log_q: log q at the draws.
        log_weights: normalised Pareto-smoothed logarithms of p / q at the draws.
        constrained_draws: the draws as sites of the numpyro model; None for a log density.
        pool_sites: likewise of the pool's values.
        pareto_k: k-hat of p / q at the draws.
        log_evidence: log of the mean of p / q.
        pool: the target's moments and evidence from the draws and the preparation's candidates
            together (`pool`); what to use where q and it disagree.
        normalizer_ess: effective share of the draws behind log C.
        history: diagnostics of every iteration.
        evaluations: counts of what was asked of the target.
        warnings: why the answer may be wrong; also raised as UserWarnings.
        trusted: whether there is no such reason.
        whitening_loc: loc of x = scale^-1 (z - loc), the coordinates of the fit.
        whitening_scale: scale, lower triangular.
    """

    distribution: ProductOfT
    draws: np.ndarray
    log_density: np.ndarray
    log_q: np.ndarray
    log_weights: np.ndarray
    constrained_draws: dict[str, np.ndarray] | None
    pool_sites: dict[str, np.ndarray] | None
    pareto_k: float
    log_evidence: float
    pool: Pool
    normalizer_ess: float
    history: History
    evaluations: Evaluations
    warnings: tuple[str, ...]
    trusted: bool
    whitening_loc: np.ndarray
    whitening_scale: np.ndarray

    def arviz_posterior(self) -> dict[str, np.ndarray]:
        """Draws of q as one chain, (1, draws, ...), for `arviz.from_dict({"posterior": ...})`."""
        sites = {"z": self.draws} if self.constrained_draws is None else self.constrained_draws
        return {name: value[None] for name, value in sites.items()}

    def resampled_posterior(
        self, key: Key[Array, ""], num_draws: int = 1000
    ) -> dict[str, np.ndarray]:
        """Draws of the target as one chain: the pool's, taken as often as their weights say.

        As good as `pool.pareto_k` and `pool.ess` say, which the draws' own number does not.
        """
        sites = {"z": self.pool.values} if self.pool_sites is None else self.pool_sites
        edges = np.cumsum(np.exp(np.maximum(self.pool.log_weights, -700.0)))
        rng = generator_of(key)
        grid = (np.arange(num_draws) + rng.uniform()) / num_draws * edges[-1]
        # Systematic resampling leaves them in order.
        index = rng.permutation(np.minimum(np.searchsorted(edges, grid), len(edges) - 1))
        return {name: value[index][None] for name, value in sites.items()}


def fit_product_of_t(
    key: Key[Array, ""],
    target: Callable[..., Any],
    dim: int | None = None,
    *,
    model_args: tuple = (),
    model_kwargs: dict[str, Any] | None = None,
    experts: Experts | None = None,
    exponents: Float[Array, " experts"] | Float[np.ndarray, " experts"] | None = None,
    starts: Float[Array, "starts dim"] | Float[np.ndarray, "starts dim"] | None = None,
    settings: FitSettings = SAFEGUARDED,
    callback: Callable[[int, dict[str, float]], None] | None = None,
) -> FitResult:
    """Fits q to a target by minimising the regularised Fisher divergence, an iteration at a time.

    Everything runs in float64. The step is compiled once for all iterations and rounds.

    Args:
        key: for all draws.
        target: log density of a vector up to a constant, with `dim` or `starts`; or, with neither,
            a numpyro model of continuous latent sites, fitted in its unconstrained coordinates.
        dim: D.
        model_args: positional arguments of the model.
        model_kwargs: keyword arguments of the model.
        experts: experts in the coordinates of the target, used as they are; by default they are
            chosen and refreshed (`placement`, `preparation`).
        exponents: where the given experts' exponents start.
        starts: points to seek modes from, by default uniform in (-2, 2)^D.
        settings: `settings.SAFEGUARDED`, `settings.PAPER`, or others.
        callback: called after every iteration with its number, from 0, and the diagnostics of
            `diagnostics.History`.

    Raises:
        ValueError: if the target returns no scalar, is finite nowhere we look, or has discrete
            latent sites; if `experts`, `exponents` or `starts` do not fit it.

    Reference: Cai, Gower, Blei, Saul 2025 (arXiv 2510.21598), algorithm of section 3, with the
        changes that `FitSettings` names.
    """
    with jax.enable_x64(True):
        # A key that was made in another mode of precision serves in this one.
        target_key, prepare_key, run_key, end_key = jax.random.split(key, 4)
        if dim is None and starts is None:
            made = target_of_model(target_key, target, model_args, model_kwargs or {})
        else:
            if model_args or model_kwargs:
                raise ValueError("model_args and model_kwargs: expected none with a log density")
            first = None if starts is None else np.asarray(starts)
            made = target_of_function(target_key, target, dim, first)
        start = _prepare(prepare_key, made, experts, exponents, settings)
        end, history = _run(run_key, made.log_density, start, settings, experts is None, callback)
        result = _finish(end_key, made, end, history, settings)
    for sentence in result.warnings:
        warnings.warn(sentence, UserWarning, stacklevel=2)
    return result


def _prepare(
    key: Array,
    target: Target,
    experts: Experts | None,
    exponents: Any,
    settings: FitSettings,
) -> Preparation:
    if experts is None:
        if exponents is not None:
            raise ValueError("exponents are given without experts: expected both, or experts only")
        return prepare(key, target, settings)
    dim = target.starts.shape[-1]
    if experts.dim != dim:
        raise ValueError(f"experts of dimension {experts.dim}: expected the target's, {dim}")
    experts = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf, np.float64)), experts)
    full = np.asarray(experts.is_full_rank)
    if not np.any(full):
        raise ValueError("experts: expected at least one whose precision is positive definite")
    if exponents is None:
        exponents = full * (0.5 * (dim + 5.0) / np.sum(full))
    exponents = np.asarray(exponents, np.float64)
    # Checks the exponents.
    ProductOfT(experts, exponents)
    return prepare_given(key, experts, jnp.asarray(exponents), settings)


def _run(
    key: Array,
    log_density: LogDensity,
    start: Preparation,
    settings: FitSettings,
    is_refreshed: bool,
    callback: Callable[[int, dict[str, float]], None] | None,
) -> tuple[Preparation, dict[str, np.ndarray]]:
    """All rounds; the last exponents are averages if the settings say so."""
    key, refresh_root = jax.random.split(key)
    rows: list[dict[str, Any]] = []
    for number in range(settings.rounds):
        if number and is_refreshed and settings.local_experts:
            refresh_key = jax.random.fold_in(refresh_root, number)
            start = refresh(refresh_key, log_density, settings, start)
        state = State(start.exponents, start.points)
        round_key = jax.random.fold_in(key, number)
        others = _other_samples(
            jax.random.fold_in(refresh_root, settings.rounds + number), start, settings
        )
        path = []
        for index in range(settings.iterations):
            state, record = update(
                round_key,
                log_density,
                settings,
                start.experts,
                start.whitening,
                state,
                index,
                None if others is None else others[index],
            )
            start = start._replace(evaluations=start.evaluations.plus(score=settings.batch_size))
            row = {name: np.asarray(value).item() for name, value in record._asdict().items()}
            if row["num_nonfinite"] == settings.batch_size:
                raise ValueError(
                    f"target or its gradient is not finite at all {settings.batch_size} samples of "
                    f"iteration {len(rows)}"
                )
            row |= {"round": number, "score_evaluations": start.evaluations.total_scores}
            if callback is not None:
                callback(len(rows), row)
            path.append(np.asarray(state.exponents))
            rows.append(row | {"exponents": path[-1]})
        last = path[-1]
        if settings.average:
            last = np.mean(path[len(path) // 2 :], axis=0)
        start = start._replace(exponents=jnp.asarray(last), points=state.points)
    return start, {name: np.asarray([row[name] for row in rows]) for name in rows[0]}


def _other_samples(key: Array, start: Preparation, settings: FitSettings) -> np.ndarray | None:
    """Candidates drawn by their tempered weights, whitened, [iterations, others, dim]."""
    count = settings.batch_size - start.points.shape[0]
    if not count or start.candidates is None:
        return None
    _, weights = tempered_weights(start.candidates)
    if not np.any(weights):
        return None
    points, shape = start.candidates.points, (settings.iterations, count)
    pick = generator_of(key).choice(len(points), shape, p=weights)
    loc, scale = np.asarray(start.whitening.loc), np.asarray(start.whitening.scale)
    return np.linalg.solve(scale, (points - loc).T).T[pick]


def _finish(
    key: Array,
    target: Target,
    end: Preparation,
    history: dict[str, np.ndarray],
    settings: FitSettings,
) -> FitResult:
    """Draws, normaliser, importance weights, and what they say."""
    exponents = np.asarray(end.exponents)
    exponents = np.where(exponents > _PRUNED * np.sum(exponents), exponents, 0.0)
    points, annealed, steps = _draw(key, end.experts, jnp.asarray(exponents), settings.num_draws)
    loc, scale = np.asarray(end.whitening.loc), np.asarray(end.whitening.scale)
    normalizer = log_mean_weight(annealed)
    log_stretch = np.sum(np.log(np.abs(np.diagonal(scale))))
    normalizer = LogNormalizer(normalizer.value + log_stretch, *normalizer[1:])
    draws = loc + points @ scale.T
    values = values_at(target.log_density, draws)
    used = end.evaluations.plus(log_density=settings.num_draws)
    log_q = -(log_factors_at(end.experts, points) @ exponents) - float(normalizer.value)
    ratios = np.where(np.isfinite(values), values - log_q, -np.inf)
    log_weights, pareto_k = pareto_smooth(jnp.asarray(ratios))
    ess = effective_sample_size(log_weights)
    log_evidence = float(logsumexp(ratios)) - math.log(len(ratios))
    pool = _pool(end, exponents, float(normalizer.value), draws, values, log_q)
    mean_gap, deviation_gap = moment_gaps(draws, pool)
    runaway = history.pop("runaway")
    reasons = trust_warnings(
        pareto_k=float(pareto_k),
        pool_pareto_k=pool.pareto_k,
        ess=float(ess),
        num_draws=settings.num_draws,
        degrees_of_freedom=2.0 * float(np.sum(exponents)) - len(loc),
        normalizer_error=float(normalizer.standard_error),
        mean_gap=mean_gap,
        deviation_gap=deviation_gap,
        num_nonfinite=int(np.sum(history["num_nonfinite"])),
        num_runaway=int(np.sum(runaway)),
    )
    sites = None if target.constrain is None else target.constrain(pool.values)
    constrained = None
    if sites is not None:
        constrained = {name: value[: len(draws)] for name, value in sites.items()}
    return FitResult(
        distribution=_in_target_coordinates(end, exponents, normalizer, steps),
        draws=draws,
        log_density=values,
        log_q=log_q,
        log_weights=np.asarray(log_weights),
        constrained_draws=constrained,
        pool_sites=sites,
        pareto_k=float(pareto_k),
        log_evidence=log_evidence,
        pool=pool,
        normalizer_ess=float(normalizer.ess),
        history=History(**history),
        evaluations=used,
        warnings=reasons,
        trusted=not reasons,
        whitening_loc=loc,
        whitening_scale=scale,
    )


def _pool(
    end: Preparation,
    exponents: np.ndarray,
    log_normalizer: float,
    draws: np.ndarray,
    values: np.ndarray,
    log_q: np.ndarray,
) -> Pool:
    if end.candidates is None:
        return pool_draws(draws, values, log_q, None, len(draws))
    candidates = end.candidates
    loc, scale = np.asarray(end.whitening.loc), np.asarray(end.whitening.scale)
    white = np.linalg.solve(scale, (candidates.points - loc).T).T
    log_q_there = -(log_factors_at(end.experts, white) @ exponents) - log_normalizer
    points = np.concatenate([draws, candidates.points])
    return pool_draws(
        points,
        np.concatenate([values, candidates.log_density]),
        np.concatenate([log_q, log_q_there]),
        candidates.proposal.log_prob(points),
        len(draws),
    )


def _draw(
    key: Array, experts: Experts, exponents: Array, num_draws: int
) -> tuple[np.ndarray, WeightedDraws, int]:
    """Draws of q, the annealed ones behind them, and the number of steps: more where ESS is low."""
    steps = _ANNEALING
    while True:
        points, annealed = annealed_gibbs(key, experts, exponents, num_draws, steps)
        share = float(annealed.ess) / annealed.values.shape[0]
        if share >= _GOOD_SHARE or steps >= _MAX_ANNEALING:
            return np.asarray(points), annealed, steps
        steps *= 4


def _in_target_coordinates(
    end: Preparation, exponents: np.ndarray, normalizer: LogNormalizer, steps: int
) -> ProductOfT:
    """Q as a product in z, with numpy's arrays, which keep their digits outside this precision."""
    num_full = end.experts.full_loc.shape[0]
    full = np.flatnonzero(exponents[:num_full] > 0)
    factored = np.flatnonzero(exponents[num_full:] > 0)
    every = jax.tree.map(np.asarray, end.experts)
    experts = Experts(
        full_loc=jnp.asarray(every.full_loc[full]),
        full_precision=jnp.asarray(every.full_precision[full]),
        factored_loc=jnp.asarray(every.factored_loc[factored]),
        factored_factor=jnp.asarray(every.factored_factor[factored]),
        factored_diagonal=jnp.asarray(every.factored_diagonal[factored]),
    )
    experts = transform_experts(experts, end.whitening.loc, end.whitening.scale)
    return ProductOfT(
        jax.tree.map(np.asarray, experts),
        exponents[np.concatenate([full, num_full + factored])],
        log_normalizer=np.asarray(normalizer.value),
        log_normalizer_error=np.asarray(normalizer.standard_error),
        warmup_sweeps=steps,
    )
