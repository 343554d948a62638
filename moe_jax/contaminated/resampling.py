"""Inference without a normal approximation: profile likelihood and parametric bootstrap."""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Bool, Float, PRNGKeyArray
from scipy.optimize import linear_sum_assignment

from moe_jax.contaminated.estimate import estimate_many
from moe_jax.contaminated.fit import fit_many, make_settings, padded
from moe_jax.contaminated.frozen import mean_variance
from moe_jax.contaminated.inference import normal_quantile
from moe_jax.contaminated.layout import fixed_vector
from moe_jax.contaminated.problem import Problem, Settings
from moe_jax.contaminated.result import FitResult

# How often a default grid that ends before the interval does is made twice as wide.
_WIDENINGS = 3


class Profile(NamedTuple):
    """The objective maximised over all parameters but one.

    Attributes:
        name: of the parameter that is held.
        values: at which it is held, ascending [g].
        objective: maximum of log-likelihood and log-prior there [g].
        theta: where it is reached [g, p].
        converged: whether the search for it was [g].
        interval: the values whose deviance 2 (max - objective) is below the chi-squared quantile of
            one degree of freedom; infinite where the grid ends before that [2].
        gain: by how much the grid exceeds the fit's objective; far above 0, the fit is no maximum.
    """

    name: str
    values: Float[np.ndarray, " g"]
    objective: Float[np.ndarray, " g"]
    theta: Float[np.ndarray, "g p"]
    converged: Bool[np.ndarray, " g"]
    interval: Float[np.ndarray, " 2"]
    gain: float


def profile(
    result: FitResult,
    name: str,
    *,
    values: ArrayLike | None = None,
    num: int = 21,
    width: float = 4.0,
    level: float = 0.95,
    max_iter: int = 200,
) -> Profile:
    """Profile likelihood of one parameter, all grid points at once.

    Every point starts from the fit, moved along the observed information's prediction and not, then
    once more from its two neighbours' optima.

    Args:
        result: a fit.
        name: one of `result.names`, such as "tau" or "eta[0]".
        values: at which the parameter is held; by default `num` values, `width` standard errors to
            both sides, wider if the interval does not end there.
        level: of the interval.

    Raises:
        ValueError: if the name is unknown, the parameter is fixed, or the gate's intercept is asked
            for under a prior on the gate, which is a prior on another parametrisation.
    """
    if name not in result.names:
        raise ValueError(f"name={name!r}, expected one of {result.names}")
    index = result.names.index(name)
    fixed = fixed_vector(result.model.family, result.model.fixed, result.x.shape[1])
    if not np.isnan(fixed[index]):
        raise ValueError(f"name={name!r} is fixed at {fixed[index]:g}: it has no profile")
    base = name.partition("[")[0]
    if base == "tau" and result.model.gate_prior_scale is not None:
        raise ValueError("name='tau' has no profile while gate_prior_scale is set")
    normal_quantile(level)
    if values is not None:
        grid = np.unique(np.asarray(values, np.float64))
        if not (grid.size and np.all(np.isfinite(grid))):
            raise ValueError(f"values={grid.tolist()}, expected one or more finite numbers")
        return _profile(result, name, index, fixed, grid, level, max_iter)
    if num < 3 or not width > 0:
        raise ValueError(f"num={num} and width={width}, expected at least 3 and a positive number")
    step = width * _spread(result, index)
    for _ in range(_WIDENINGS + 1):
        grid = result.theta[index] + step * np.linspace(-1.0, 1.0, num)
        found = _profile(result, name, index, fixed, grid, level, max_iter)
        if np.all(np.isfinite(found.interval)):
            break
        step *= 2.0
    return found


def _spread(result: FitResult, index: int) -> float:
    """Standard error of an entry; given the others where the information is singular."""
    error = float(np.sqrt(result.cov()[index, index]))
    if np.isfinite(error) and error > 0:
        return error
    curvature = result.information[index, index]
    return 1.0 / np.sqrt(curvature) if curvature > 0 else 1.0


def _profile(
    result: FitResult,
    name: str,
    index: int,
    fixed: np.ndarray,
    grid: np.ndarray,
    level: float,
    max_iter: int,
) -> Profile:
    held = np.tile(fixed, (len(grid), 1))
    held[:, index] = grid
    plain = np.tile(result.theta, (len(grid), 1))
    plain[:, index] = grid
    # To second order the others follow in proportion to their covariance with the one that moves.
    cov = result.cov()
    slope = np.zeros_like(result.theta)
    if np.all(np.isfinite(cov[:, index])) and cov[index, index] > 0:
        slope = cov[:, index] / cov[index, index]
    predicted = result.theta + (grid - result.theta[index])[:, None] * slope
    best = _refit(result, name, held, np.stack([predicted, plain], axis=1), max_iter)
    left, right = np.roll(best[1], 1, axis=0), np.roll(best[1], -1, axis=0)
    left[0], right[-1] = best[1][0], best[1][-1]
    again = _refit(result, name, held, np.stack([left, right], axis=1), max_iter)
    is_better = again[0] > best[0]
    objective = np.where(is_better, again[0], best[0])
    theta = np.where(is_better[:, None], again[1], best[1])
    converged = np.where(is_better, again[2], best[2])
    gain = float(np.max(objective) - result.trace[-1])
    top = max(result.trace[-1], float(np.max(objective)))
    interval = _deviance_interval(grid, objective, result.theta[index], top, level)
    return Profile(name, grid, objective, theta, converged, interval, gain)


def _refit(
    result: FitResult, name: str, held: np.ndarray, starts: np.ndarray, max_iter: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Objective, parameters and convergence for held values [g, p] from starts [g, s, p]."""
    model, d = result.model, result.x.shape[1]
    base = name.partition("[")[0]
    plan = dataclasses.replace(
        result.plan,
        method="newton",
        n_tail=0,
        n_random=0,
        max_iter=max_iter,
        # Shifts of x and y move the intercepts only.
        centre_gate=result.plan.centre_gate and base not in ("tau", "gate"),
        centre_expert=result.plan.centre_expert and base != model.expert.intercept_name,
        sequential=len(result.y) * len(held) > 200_000,
    )
    with jax.enable_x64(True):
        settings = make_settings(model, d, result.params, 1e-13)
        settings = settings._replace(given=jnp.asarray(starts), fixed=jnp.asarray(held))
        variance = np.float64(mean_variance(model.frozen, result.x))
        data = Problem(result.x, result.y, result.log_frozen, result.weight, variance)
        problem = padded(data)
        shared: list[Any] = [None] * 5
        mapped: list[Any] = [0 if k in ("given", "fixed") else None for k in Settings._fields]
        axes = Problem(*shared), Settings(*mapped)
        keys = jax.random.split(jax.random.key(0), len(held))
        found = estimate_many(plan, axes, problem, settings, keys)
    objective = np.max(np.asarray(found.start_values), axis=1)
    return objective, np.asarray(found.theta), np.asarray(found.converged)


def _deviance_interval(
    grid: np.ndarray, objective: np.ndarray, centre: float, top: float, level: float
) -> Float[np.ndarray, " 2"]:
    """Ends of the interval, by the signed root of the deviance, which is nearly linear."""
    quantile = normal_quantile(level)
    root = np.sqrt(np.maximum(2.0 * (top - objective), 0.0))
    ends = np.array([-np.inf, np.inf])
    for side, sign in ((0, -1.0), (1, 1.0)):
        is_own = sign * (grid - centre) > 0
        value = np.concatenate([[centre], grid[is_own][:: int(sign)]])
        height = np.concatenate([[0.0], root[is_own][:: int(sign)]])
        past = np.flatnonzero(height >= quantile)
        if len(past):
            k = past[0]
            share = (quantile - height[k - 1]) / (height[k] - height[k - 1])
            ends[side] = value[k - 1] + share * (value[k] - value[k - 1])
    return ends


class Bootstrap(NamedTuple):
    """Estimates from data simulated at a fit.

    Attributes:
        theta: of every replicate, its prompts matched to the fit's [b, p].
        loglik: of every replicate [b].
        status: of every replicate.
        converged: of every replicate [b].
        estimate: the fit's own parameters [p].
        names: of the entries.
    """

    theta: Float[np.ndarray, "b p"]
    loglik: Float[np.ndarray, " b"]
    status: tuple[str, ...]
    converged: Bool[np.ndarray, " b"]
    estimate: Float[np.ndarray, " p"]
    names: tuple[str, ...]

    def standard_errors(self) -> Float[np.ndarray, " p"]:
        """Standard deviations over the replicates."""
        return np.nanstd(self.theta, axis=0, ddof=1)

    def confint(
        self, level: float = 0.95, kind: Literal["percentile", "basic"] = "percentile"
    ) -> Float[np.ndarray, "p 2"]:
        """Quantiles of the replicates, or twice the estimate less the opposite ones ("basic")."""
        normal_quantile(level)
        tails = np.nanquantile(self.theta, [0.5 - 0.5 * level, 0.5 + 0.5 * level], axis=0).T
        return tails if kind == "percentile" else 2.0 * self.estimate[:, None] - tails[:, ::-1]


def bootstrap(
    key: PRNGKeyArray, result: FitResult, *, n_boot: int = 199, **options: Any
) -> Bootstrap:
    """Parametric bootstrap: refits data drawn at the estimates, started there.

    The frozen model never changes, so its label cannot switch. Prompts can; those of a replicate
    are matched to the fit's by the assignment of least squared distance in standard errors.

    Args:
        key: of the draws.
        result: a fit; its x is kept.
        n_boot: number of replicates.
        **options: of `fit_many`.

    Raises:
        ValueError: if n_boot < 2, or a row's weight is neither 0 nor 1: it is not one draw.
    """
    if n_boot < 2:
        raise ValueError(f"n_boot={n_boot}, expected at least 2")
    if not np.all((result.weight == 0) | (result.weight == 1)):
        raise ValueError("sample_weight other than 0 and 1: repeat rows instead of weighting them")
    keys = jax.random.split(key, n_boot)
    ys = np.stack([result.model.sample(k, result.params, result.x) for k in keys])
    mask = np.broadcast_to(result.weight > 0, ys.shape)
    options = {"starts": result.params} | options
    many = fit_many(result.model, result.x, ys, mask=mask, **options)
    theta = match_prompts(many.theta, result.theta, _errors(result), result.model.n_prompts)
    return Bootstrap(theta, many.loglik, many.status, many.converged, result.theta, result.names)


def _errors(result: FitResult) -> Float[np.ndarray, " p"]:
    """Standard errors, the estimates' own size where there are none."""
    errors = result.standard_errors()
    return np.where(errors > 0, errors, 1.0 + np.abs(result.theta))


def match_prompts(
    thetas: Float[np.ndarray, "b p"],
    reference: Float[np.ndarray, " p"],
    errors: Float[np.ndarray, " p"],
    n_prompts: int,
) -> Float[np.ndarray, "b p"]:
    """Permutes the prompts' blocks to lie as near as possible to those of the reference."""
    if n_prompts == 1:
        return thetas
    blocks = thetas.reshape(len(thetas), n_prompts, -1)
    target, scale = (a.reshape(n_prompts, -1) for a in (reference, errors))
    # A pooled scale: a distance must not depend on which prompt it is measured from.
    scale = np.sqrt(np.mean(np.square(scale), axis=0))
    distance = (blocks[:, None, :, :] - target[None, :, None, :]) / scale
    cost = np.nan_to_num(np.sum(np.square(distance), axis=-1), nan=0.0, posinf=1e300)
    order = np.stack([linear_sum_assignment(c)[1] for c in cost])
    return np.take_along_axis(blocks, order[:, :, None], axis=1).reshape(thetas.shape)
