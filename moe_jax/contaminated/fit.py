"""Maximum likelihood for one data set, or for many at once."""

import dataclasses
import math
import numbers
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import PRNGKeyArray

from moe_jax.contaminated.compilation import lengthen, padded_size
from moe_jax.contaminated.data import (
    check_data,
    check_labels,
    check_log_frozen,
    check_weight,
    fill_absent,
    frozen_log_prob,
    real_numbers,
)
from moe_jax.contaminated.estimate import METHODS, estimate, estimate_many
from moe_jax.contaminated.frozen import mean_variance
from moe_jax.contaminated.inference import covariance
from moe_jax.contaminated.layout import Family, fixed_vector, flatten, unflatten
from moe_jax.contaminated.model import ContaminatedMoE
from moe_jax.contaminated.problem import Estimate, Plan, Problem, Settings
from moe_jax.contaminated.result import FitResult, make_result
from moe_jax.contaminated.screening import Screening, screen_starts
from moe_jax.contaminated.starts import TAILS
from moe_jax.contaminated.status import STATUSES

Starts = str | Mapping[str, Any] | Sequence[Mapping[str, Any]]
# Starts run together while their rows are no more than this, else one after the other.
_TOGETHER_ROWS = 100_000


def fit(
    model: ContaminatedMoE,
    x: ArrayLike,
    y: ArrayLike,
    *,
    key: PRNGKeyArray | None = None,
    starts: Starts = "tail",
    n_starts: int | None = None,
    method: str = "em+newton",
    max_iter: int = 200,
    tol: float = 1e-13,
    em_steps: int = 20,
    sample_weight: ArrayLike | None = None,
    mask: ArrayLike | None = None,
) -> FitResult:
    """Maximises the likelihood of a contaminated mixture from several starts and keeps the best.

    Args:
        model: what to fit.
        x: covariates [n, d].
        y: responses [n]; labels 0..K-1 of a classifier.
        key: needed by random starts.
        starts: "tail" takes rows that the frozen model explains badly, in up to 4 ways;
            "tail+random" adds experts fitted to random subsets of rows, as many by default;
            parameters, or a list of them, are starts themselves.
        n_starts: how many, tail starts first.
        method: "em+newton" is EM until it slows down, at most `em_steps` iterations, and then
            Newton on the exact observed information; "em", "squarem", "newton" and "lbfgs" are
            themselves.
        max_iter: most iterations of the method.
        tol: Newton stops when gradient.step < tol on the mean log-likelihood.
        em_steps: see `method`.
        sample_weight: of the rows [n]; a weight of 2 counts as two rows.
        mask: rows that count [n]; the others may hold anything.

    Returns:
        The best optimum with its status: read `status` and `message` before the rest.

    Raises:
        ValueError: if the data or an option are not what is said above, or the frozen log-density
            is NaN or +inf at a row that counts.
    """
    x, y = real_numbers(x, "x"), real_numbers(y, "y")
    weight = check_weight(sample_weight, mask, np.shape(y))
    if np.ndim(x) == 2 and np.shape(y) == np.shape(x)[:1]:
        x, y = fill_absent(weight, x, y)
    x, y = check_data(x, y, model.expert)
    log_frozen = frozen_log_prob(model.frozen, x, y)
    check_log_frozen(log_frozen, weight)
    plan = make_plan(model, x.shape[1], starts, n_starts, method, max_iter, em_steps, key)
    key = jax.random.key(0) if key is None else key
    problem = Problem(x, y, log_frozen, weight, np.float64(mean_variance(model.frozen, x)))
    with jax.enable_x64(True):
        settings = make_settings(model, x.shape[1], starts, tol)
        is_large = len(y) * max(plan.n_tail + plan.n_random, 1) > _TOGETHER_ROWS
        screening = screen_starts(plan, problem, settings, key) if is_large else None
        if screening is not None:
            found = _refine(plan, problem, settings, key, screening)
        else:
            plan = dataclasses.replace(plan, sequential=is_large)
            found = estimate(plan, padded(problem), settings, key)
    return make_result(model, plan, problem, jax.tree.map(np.asarray, found), screening)


def padded(problem: Problem) -> Problem:
    """The problem with rows of weight 0 up to a size that many problems share."""
    n = np.shape(problem.y)[-1]
    missing = padded_size(n) - n
    if not missing:
        return problem
    x, y, log_frozen = (
        lengthen(np.asarray(array), missing, axis)
        for array, axis in ((problem.x, -2), (problem.y, -1), (problem.log_frozen, -1))
    )
    widths = [(0, 0)] * (np.ndim(problem.weight) - 1) + [(0, missing)]
    return Problem(x, y, log_frozen, np.pad(problem.weight, widths), problem.frozen_variance)


def _refine(
    plan: Plan, problem: Problem, settings: Settings, key: PRNGKeyArray, screening: Screening
) -> Estimate:
    """Follows on all rows the starts that a sample led to different ends."""
    given = dataclasses.replace(plan, n_tail=0, n_random=0, sequential=True)
    settings = settings._replace(given=screening.given)
    return estimate(given, problem, settings, key, screening.same_as)


class BatchFit(NamedTuple):
    """Fits of many data sets, each field with a leading axis R.

    Attributes:
        params: by name.
        theta: the same, flat [R, p].
        loglik: [R].
        status: of every fit.
        converged: [R].
        iterations: of the best start, EM's and the method's [R].
        n_agree: starts within 0.01 of the best log-likelihood [R].
        information: observed information in the user's units [R, p, p].
        cov: its inverse, NaN where it is singular [R, p, p].
        max_gradient: of the mean log-likelihood in standardised units [R].
    """

    params: dict[str, np.ndarray]
    theta: np.ndarray
    loglik: np.ndarray
    status: tuple[str, ...]
    converged: np.ndarray
    iterations: np.ndarray
    n_agree: np.ndarray
    information: np.ndarray
    cov: np.ndarray
    max_gradient: np.ndarray


def fit_many(
    model: ContaminatedMoE,
    xs: ArrayLike,
    ys: ArrayLike,
    *,
    mask: ArrayLike | None = None,
    key: PRNGKeyArray | None = None,
    starts: Starts = "tail",
    n_starts: int | None = None,
    method: str = "em+newton",
    max_iter: int = 200,
    tol: float = 1e-13,
    em_steps: int = 20,
    sample_weight: ArrayLike | None = None,
    chunk_rows: int = 200_000,
    log_frozen: ArrayLike | None = None,
) -> BatchFit:
    """`fit` of R data sets of n rows, vmapped; shorter ones are padded and masked.

    A data set whose frozen log-density is not finite does not stop the others: it gets the status
    "nonfinite_frozen" and NaN.

    Args:
        xs: covariates [R, n, d], or [n, d] shared by all.
        ys: responses [R, n].
        mask: rows that count [R, n].
        sample_weight: of the rows [R, n].
        chunk_rows: rows that are worked on at once; smaller takes less memory.
        log_frozen: log f0 at the data [R, n], if it is known already.

    The other arguments are those of `fit`; starting parameters are shared by all data sets.
    """
    xs, ys = real_numbers(xs, "xs"), real_numbers(ys, "ys")
    if ys.ndim != 2 or xs.ndim not in (2, 3) or xs.shape[-2] != ys.shape[1] or not ys.size:
        raise ValueError(
            f"xs has shape {xs.shape} and ys {ys.shape}, expected [R, n, d] or [n, d] and [R, n]"
        )
    if xs.ndim == 3 and len(xs) != len(ys):
        raise ValueError(f"xs has {len(xs)} data sets and ys has {len(ys)}: they must be the same")
    weight = check_weight(sample_weight, mask, ys.shape)
    is_shared = xs.ndim == 2 and bool(np.all(weight > 0))
    xs = xs if is_shared else np.broadcast_to(xs, (*ys.shape, xs.shape[-1]))
    d, count = xs.shape[-1], len(ys)
    plan = make_plan(model, d, starts, n_starts, method, max_iter, em_steps, key)
    chunk = max(1, min(count, chunk_rows // ys.shape[1]))
    with jax.enable_x64(True):
        settings = make_settings(model, d, starts, tol)
    keys = jax.random.split(jax.random.key(0) if key is None else key, count)
    axes = (
        Problem(None if is_shared else 0, 0, 0, 0, None if is_shared else 0),
        Settings(*[None] * 6),
    )
    found = []
    for start in range(0, count, chunk):
        # The last chunk is filled up with its first data set: one compiled shape.
        index = np.arange(start, start + chunk)
        index = np.where(index < count, index, start)
        known = None if log_frozen is None else np.asarray(log_frozen, np.float64)[index]
        data = xs if is_shared else xs[index]
        problem = padded(_problems(model, data, ys[index], weight[index], known))
        with jax.enable_x64(True):
            part = estimate_many(plan, axes, problem, settings, keys[index])
        found.append(jax.tree.map(partial(_head, count - start), part))
    return _batch(model.family, d, jax.tree.map(lambda *a: np.concatenate(a), *found))


def make_plan(
    model: ContaminatedMoE,
    d: int,
    starts: Starts,
    n_starts: int | None,
    method: str,
    max_iter: int,
    em_steps: int,
    key: PRNGKeyArray | None,
) -> Plan:
    """The compiled part of the options, checked."""
    if method not in METHODS:
        raise ValueError(f"method={method!r}, expected one of {METHODS}")
    counts = {"max_iter": max_iter, "em_steps": em_steps, "n_starts": n_starts or 1}
    for name, count in counts.items():
        if not isinstance(count, numbers.Integral):
            raise ValueError(f"{name}={count!r}, expected an integer")
    if max_iter < 1 or em_steps < 0:
        raise ValueError(f"max_iter={max_iter} and em_steps={em_steps}, expected at least 1 and 0")
    if n_starts is not None and n_starts < 1:
        raise ValueError(f"n_starts={n_starts}, expected at least 1")
    if starts is None:
        raise ValueError("starts=None, expected 'tail', 'tail+random' or parameters")
    if starts == "tail" and (n_starts or 1) > len(TAILS):
        raise ValueError(
            f"n_starts={n_starts} of starts='tail', at most {len(TAILS)}: see 'tail+random'"
        )
    n_tail, n_random = 0, 0
    if starts == "tail":
        n_tail = min(n_starts or len(TAILS), len(TAILS))
    elif starts == "tail+random":
        total = n_starts or 2 * len(TAILS)
        n_tail = min(total, len(TAILS))
        n_random = total - n_tail
    elif isinstance(starts, str):
        raise ValueError(f"starts={starts!r}, expected 'tail', 'tail+random' or parameters")
    if n_random and key is None:
        raise ValueError("key=None, but random starts need a jax.random.key")
    is_fixed = ~np.isnan(fixed_vector(model.family, model.fixed, d))
    gate_fixed, expert_fixed = (is_fixed & part for part in split_names(model.family, d))
    return Plan(
        model.family,
        method,
        n_tail,
        n_random,
        max_iter,
        em_steps,
        # A fixed parameter stays where it is only if no shift of x or y moves it.
        centre_gate=not gate_fixed.any(),
        centre_expert=model.expert.intercept_name is not None and not expert_fixed.any(),
    )


def split_names(family: Family, d: int) -> tuple[np.ndarray, np.ndarray]:
    """Entries of the flat vector that belong to the gate and to the expert."""
    gate = sum(math.prod(shape) for _, shape in family.gate.layout(d))
    one = np.arange(family.size(d) // family.n_prompts) < gate
    is_gate = np.tile(one, family.n_prompts)
    return is_gate, ~is_gate


def make_settings(model: ContaminatedMoE, d: int, starts: Starts, tol: float) -> Settings:
    """The numbers of the options; call it where float64 is enabled."""
    if not tol > 0:
        raise ValueError(f"tol={tol}, expected a positive number")
    family = model.family
    one = np.concatenate([np.asarray(family.gate.initial(d)), np.asarray(family.expert.initial(d))])
    given: list[Any] = []
    if not isinstance(starts, str):
        given = [starts] if isinstance(starts, Mapping) else list(starts)
        if not given:
            raise ValueError("starts=[], expected at least one set of parameters")
    thetas = [np.asarray(flatten(family, params, d)) for params in given]
    bad = [i for i, t in enumerate(thetas) if not np.all(np.isfinite(t))]
    if bad:
        raise ValueError(f"starts {bad} are not finite")
    return Settings(
        initial=np.tile(one, family.n_prompts),
        given=np.stack(thetas) if thetas else np.zeros((0, family.size(d))),
        fixed=fixed_vector(family, model.fixed, d),
        nu_bounds=np.array(model.nu_bounds or (math.nan, math.nan), np.float64),
        gate_prior_scale=np.float64(model.gate_prior_scale or math.inf),
        tol=np.float64(tol),
    )


def _problems(
    model: ContaminatedMoE,
    xs: np.ndarray,
    ys: np.ndarray,
    weight: np.ndarray,
    log_frozen: np.ndarray | None,
) -> Problem:
    """The arrays of a chunk of data sets; x of shape [n, d] is shared."""
    if xs.ndim == 2:
        x, y = xs, ys
        for row in ys:
            check_data(xs, row, model.expert)
        if log_frozen is None:
            log_frozen = np.stack([frozen_log_prob(model.frozen, xs, row) for row in ys])
        return Problem(x, y, log_frozen, weight, np.float64(mean_variance(model.frozen, xs)))
    filled = [fill_absent(w, x, y) for w, x, y in zip(weight, xs, ys, strict=True)]
    x, y = np.stack([f[0] for f in filled]), np.stack([f[1] for f in filled])
    flat_x, flat_y = check_data(x.reshape(-1, x.shape[-1]), y.reshape(-1), model.expert)
    check_labels(flat_y, model.expert)
    if log_frozen is None:
        log_frozen = frozen_log_prob(model.frozen, flat_x, flat_y).reshape(y.shape)
    variances = np.array([mean_variance(model.frozen, one) for one in x])
    return Problem(x, y, log_frozen, weight, variances)


def _head(length: int, array: Any) -> np.ndarray:
    return np.asarray(array)[:length]


def _batch(family: Family, d: int, found: Estimate) -> BatchFit:
    """Host-side summary of estimates with a leading axis."""
    back = found.from_user
    # In pairs: a constant column's enormous unit must meet its zeros before it meets itself.
    information = np.swapaxes(back, 1, 2) @ found.information @ back
    cov = np.stack(
        [
            slope @ covariance(j, outer, movable) @ slope.T
            for slope, j, outer, movable in zip(
                found.to_user, found.information, found.outer_product, found.movable, strict=True
            )
        ]
    )
    order = np.stack([getattr(found.flags, name) for name in STATUSES])
    status = tuple(STATUSES[i] for i in np.argmax(order, axis=0))
    bad = found.flags.nonfinite_frozen
    theta = np.where(bad[:, None], np.nan, found.theta)
    return BatchFit(
        params=unflatten(family, theta, d),
        theta=theta,
        loglik=np.where(bad, np.nan, found.loglik),
        status=status,
        converged=found.converged & ~bad,
        iterations=found.em_iterations + found.iterations,
        n_agree=found.n_agree,
        information=information,
        cov=cov,
        max_gradient=np.max(np.abs(found.gradient), axis=1),
    )
