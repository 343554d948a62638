"""One estimation as a pure function of arrays: compiled once a shape, mapped over data sets."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from moe_jax.contaminated import likelihood
from moe_jax.contaminated.compilation import QUICK_ROWS, QUICK_ROWS_OF_MANY, jit
from moe_jax.contaminated.em import run_em, run_squarem
from moe_jax.contaminated.expert import Units
from moe_jax.contaminated.gates import Columns
from moe_jax.contaminated.layout import Family, coordinates
from moe_jax.contaminated.likelihood import (
    LOWEST_LOG_DENSITY,
    Moments,
    Rows,
    make_rows,
    row_terms,
    split,
)
from moe_jax.contaminated.limits import Limits, Path, clip, movable, objective_moments
from moe_jax.contaminated.linalg import scaled, unit_scale
from moe_jax.contaminated.location_scale import DF_BOUNDS
from moe_jax.contaminated.newton import run_lbfgs, run_newton
from moe_jax.contaminated.problem import Ends, Estimate, Plan, Problem, Settings, Values
from moe_jax.contaminated.starts import random_starts, tail_starts
from moe_jax.contaminated.status import MAX_GATE_NORM, MAX_LOGIT, MIN_EIGENVALUE, Flags

METHODS = ("em+newton", "em", "squarem", "newton", "lbfgs")
# Starts agree whose log-likelihoods are this close to the best.
AGREEMENT = 0.01
# EM hands over to Newton once an iteration raises the mean log-likelihood by less.
_HANDOVER_GAIN = 1e-5
# Divides a constant column: what is left of it squares to 0, so that its coefficient stays.
_CONSTANT_SCALE = 1e200
_VARIANCE_RATIO = 100.0


def estimate(
    plan: Plan,
    problem: Problem,
    settings: Settings,
    key: PRNGKeyArray,
    same_as: Values | None = None,
) -> Estimate:
    """Fits from every start and describes the best; see `ContaminatedMoE.fit`.

    With `same_as` [s] a start whose number is not its own entry is not followed: it takes the
    result of the earlier start that the entry names.
    """
    starts = len(settings.given) + plan.n_tail + plan.n_random
    is_quick = len(problem.y) * starts <= QUICK_ROWS
    function = _estimate_quickly if is_quick else _estimate_well
    return function(plan, problem, settings, key, same_as)


def estimate_many(
    plan: Plan, axes: tuple[Problem, Settings], problem: Problem, settings: Settings, keys: Array
) -> Estimate:
    """`estimate` mapped over the leading axes that `axes` names."""
    starts = np.shape(settings.given)[-2] + plan.n_tail + plan.n_random
    is_quick = len(keys) * np.shape(problem.y)[-1] * starts <= QUICK_ROWS_OF_MANY
    function = _estimate_many_quickly if is_quick else _estimate_many_well
    return function(plan, axes, problem, settings, keys)


def _estimate_many(
    plan: Plan, axes: tuple[Problem, Settings], problem: Problem, settings: Settings, keys: Array
) -> Estimate:
    return jax.vmap(partial(_estimate, plan), in_axes=(*axes, 0))(problem, settings, keys)


def _prepare(
    plan: Plan, problem: Problem, settings: Settings
) -> tuple[Rows, Limits, tuple[Columns, Units], Array]:
    """Standardised rows, their limits, the units, and the log of the response's."""
    family = plan.family
    columns, units = _scaling(plan, problem)
    rows = make_rows(
        family,
        problem.x,
        problem.y,
        problem.log_frozen,
        problem.weight,
        columns=columns,
        units=units,
    )
    # A density of the standardised response is larger by its scale.
    log_unit = _log_unit(family, units)
    log_frozen = jnp.maximum(rows.log_frozen + log_unit, LOWEST_LOG_DENSITY)
    rows = rows._replace(log_frozen=log_frozen)
    limits = _limits(plan, problem, settings, columns, units)
    return rows, limits, (columns, units), log_unit


def _estimate(
    plan: Plan,
    problem: Problem,
    settings: Settings,
    key: PRNGKeyArray,
    same_as: Array | None = None,
) -> Estimate:
    rows, limits, (columns, units), log_unit = _prepare(plan, problem, settings)
    thetas = _starts(plan, problem, settings, rows, limits, (columns, units), key)

    def run(theta: Array) -> tuple[Path, Path, Moments]:
        return _run(plan, theta, rows, limits, settings.tol)

    if same_as is not None:
        paths = _run_distinct(run, thetas, same_as)
    else:
        paths = jax.lax.map(run, thetas) if plan.sequential else jax.vmap(run)(thetas)
    values = paths[1].value - jnp.sum(rows.weight) * log_unit
    best = jnp.argmax(jnp.where(jnp.isfinite(values), values, -jnp.inf))
    em_path, path, moments = jax.tree.map(lambda a: a[best], paths)
    return _describe(
        plan,
        problem,
        settings,
        rows,
        limits,
        (columns, units),
        em_path,
        path,
        moments,
        values,
        paths,
    )


def _run_distinct(run: Callable[[Array], Any], thetas: Array, same_as: Array) -> Any:
    """Stacked run(theta), copied from an earlier start where `same_as` names one."""
    shapes = jax.eval_shape(run, thetas[0])
    done = jax.tree.map(lambda a: jnp.zeros((len(thetas), *a.shape), a.dtype), shapes)

    def one(done: Any, k: Array) -> tuple[Any, None]:
        earlier = jax.tree.map(lambda a: a[same_as[k]], done)
        found = jax.lax.cond(same_as[k] < k, lambda: earlier, lambda: run(thetas[k]))
        return jax.tree.map(lambda a, b: a.at[k].set(b), done, found), None

    return jax.lax.scan(one, done, jnp.arange(len(thetas), dtype=jnp.int32))[0]


def _follow_starts(plan: Plan, problem: Problem, settings: Settings, key: PRNGKeyArray) -> Ends:
    """Where every start leads, without describing it."""
    rows, limits, scaling, _ = _prepare(plan, problem, settings)
    thetas = _starts(plan, problem, settings, rows, limits, scaling, key)

    def follow(theta: Array) -> Ends:
        em_path, path, _ = _run(plan, theta, rows, limits, settings.tol)
        r = row_terms(plan.family, path.theta, rows).responsibility
        return Ends(
            _map_blocks(plan.family, "to_user", path.theta, rows, scaling),
            path.theta,
            path.value,
            jnp.min(r @ rows.weight),
            em_path.count + path.count,
            path.converged,
        )

    return jax.vmap(follow)(thetas)


def _place_starts(
    plan: Plan, problem: Problem, settings: Settings, key: PRNGKeyArray
) -> Float[Array, "s p"]:
    """All starts in the user's units."""
    rows, limits, scaling, _ = _prepare(plan, problem, settings)
    thetas = _starts(plan, problem, settings, rows, limits, scaling, key)
    return jnp.stack([_map_blocks(plan.family, "to_user", t, rows, scaling) for t in thetas])


_estimate_quickly = jit(_estimate, static="plan", quick=True)
_estimate_well = jit(_estimate, static="plan", quick=False)
_estimate_many_quickly = jit(_estimate_many, static=("plan", "axes"), quick=True)
_estimate_many_well = jit(_estimate_many, static=("plan", "axes"), quick=False)
follow_starts = jit(_follow_starts, static="plan", quick=False)
place_starts = jit(_place_starts, static="plan", quick=False)


def _run(
    plan: Plan, theta: Array, rows: Rows, limits: Limits, tol: Array
) -> tuple[Path, Path, Moments]:
    """The path of EM before Newton, the method's own path and the moments at its end."""
    family = plan.family
    em_steps = plan.em_steps if plan.method == "em+newton" else 0
    em_path = run_em(family, theta, rows, limits, em_steps, _HANDOVER_GAIN)
    theta = em_path.theta
    if plan.method in ("em+newton", "newton"):
        return em_path, *run_newton(family, theta, rows, limits, plan.max_iter, tol)
    run = {"em": run_em, "squarem": run_squarem, "lbfgs": run_lbfgs}[plan.method]
    path = run(family, theta, rows, limits, plan.max_iter)
    return em_path, path, objective_moments(family, path.theta, rows, limits)


def _scaling(plan: Plan, problem: Problem) -> tuple[Columns, Units]:
    """Weighted means and standard deviations, or root mean squares where nothing may be centred."""
    weight = problem.weight / jnp.sum(problem.weight)

    def affine(values: Array, centre: bool) -> tuple[Array, Array]:
        mean = weight @ values if centre else jnp.zeros(values.shape[1:])
        shifted = values - jnp.broadcast_to(mean, values.shape)
        scale = jnp.sqrt(weight @ jnp.square(shifted))
        is_constant = scale <= 1e-13 * jnp.abs(mean)
        return mean, jnp.where(is_constant, _CONSTANT_SCALE, scale)

    columns = Columns(*affine(problem.x, plan.centre_gate))
    mean, scale = affine(problem.x, plan.centre_expert)
    y_mean, y_scale = affine(problem.y, plan.centre_expert)
    y_scale = jnp.where(y_scale == _CONSTANT_SCALE, 1.0, y_scale)
    return columns, Units(mean, scale, y_mean, y_scale)


def _log_unit(family: Family, units: Units) -> Array:
    """Log of the response's unit in the standardised density."""
    if not family.expert.standardises or family.expert.labels:
        return jnp.zeros(())
    return jnp.log(units.y_scale)


def _limits(
    plan: Plan, problem: Problem, settings: Settings, columns: Columns, units: Units
) -> Limits:
    family, d = plan.family, problem.x.shape[1]
    p = family.size(d)
    lower, upper = jnp.full(p, -jnp.inf), jnp.full(p, jnp.inf)
    is_log_nu, is_log_df = (jnp.array(coordinates(family, k, d)) for k in ("log_nu", "log_df"))
    low, high = nu_range(problem, settings)
    shift = 2 * _log_unit(family, units)
    lower = jnp.where(is_log_nu, jnp.log(low) - shift, lower)
    upper = jnp.where(is_log_nu, jnp.log(high) - shift, upper)
    lower = jnp.where(is_log_df, math.log(DF_BOUNDS[0]), lower)
    upper = jnp.where(is_log_df, math.log(DF_BOUNDS[1]), upper)
    gate_names = {name for name, _ in family.gate.layout(d)}
    is_gate = sum(
        (jnp.array(coordinates(family, k, d)) for k in gate_names), jnp.zeros(p, jnp.bool_)
    )
    prior = jnp.where(is_gate, 1.0 / jnp.square(settings.gate_prior_scale), 0.0)
    return Limits(jnp.isnan(settings.fixed), lower, upper, prior)


def nu_range(problem: Problem, settings: Settings) -> tuple[Array, Array]:
    """Bounds of the variances: the user's, or a hundredfold around y's and the frozen model's."""
    weight = problem.weight / jnp.sum(problem.weight)
    spread = weight @ jnp.square(problem.y - weight @ problem.y)
    known = jnp.where(jnp.isnan(problem.frozen_variance), spread, problem.frozen_variance)
    # A constant y leaves the frozen model's variance, or nothing better than 1.
    spread = jnp.where(spread > 0, spread, jnp.where(known > 0, known, 1.0))
    known = jnp.where(known > 0, known, spread)
    low = jnp.minimum(spread, known) / _VARIANCE_RATIO
    high = jnp.maximum(spread, known) * _VARIANCE_RATIO
    given = settings.nu_bounds
    return jnp.where(jnp.isnan(given[0]), low, given[0]), jnp.where(
        jnp.isnan(given[1]), high, given[1]
    )


def _starts(
    plan: Plan,
    problem: Problem,
    settings: Settings,
    rows: Rows,
    limits: Limits,
    scaling: tuple[Columns, Units],
    key: PRNGKeyArray,
) -> Float[Array, "s p"]:
    """All starts in standardised units, with the fixed entries at their values."""
    family, d = plan.family, problem.x.shape[1]
    weight = rows.weight / jnp.sum(rows.weight)
    spread = weight @ jnp.square(rows.response - weight @ rows.response)
    log_spread = jnp.log(jnp.where(spread > 0, spread, 1.0))
    initial = jnp.where(jnp.array(coordinates(family, "log_nu", d)), log_spread, settings.initial)
    # In user units the fixed entries have their values; nothing they depend on is then centred.
    fixed = _map_blocks(
        family, "from_user", jnp.where(limits.free, 0.0, settings.fixed), rows, scaling
    )
    initial = clip(jnp.where(limits.free, initial, fixed), limits)
    given = [
        jnp.where(limits.free, _map_blocks(family, "from_user", start, rows, scaling), fixed)[None]
        for start in settings.given
    ]
    tail = [tail_starts(family, initial, rows, limits, plan.n_tail)] if plan.n_tail else []
    n = plan.n_random
    random = [random_starts(key, family, initial, rows, limits, n)] if n else []
    return jnp.concatenate([*given, *tail, *random])


def _map_blocks(
    family: Family, method: str, theta: Array, rows: Rows, scaling: tuple[Columns, Units]
) -> Float[Array, " p"]:
    """Parameters of all prompts through the gate's and the expert's `to_user` or `from_user`."""
    gammas, phis = split(family, theta, rows)
    columns, units = scaling
    gate, expert = getattr(family.gate, method), getattr(family.expert, method)
    blocks = [
        jnp.concatenate([gate(g, columns), expert(f, units)])
        for g, f in zip(gammas, phis, strict=True)
    ]
    return jnp.concatenate(blocks)


def _describe(
    plan: Plan,
    problem: Problem,
    settings: Settings,
    rows: Rows,
    limits: Limits,
    scaling: tuple[Columns, Units],
    em_path: Path,
    path: Path,
    moments: Moments,
    values: Array,
    paths: tuple[Path, Path, Moments],
) -> Estimate:
    family = plan.family
    total = jnp.sum(rows.weight)
    to_user = partial(_map_blocks, family, "to_user", rows=rows, scaling=scaling)
    from_user = partial(_map_blocks, family, "from_user", rows=rows, scaling=scaling)
    is_movable = movable(path.theta, moments.score, limits)
    terms = row_terms(family, path.theta, rows)
    flags, facts = _flags(
        plan, problem, settings, path, moments, is_movable, terms, rows, limits, scaling
    )
    theta = jnp.where(limits.free, to_user(path.theta), settings.fixed)
    return Estimate(
        theta=theta,
        loglik=rows.weight @ terms.loglik - total * _log_unit(family, scaling[1]),
        gradient=jnp.where(is_movable, moments.score, 0.0) / total,
        information=moments.information,
        outer_product=likelihood.outer_product(family, path.theta, rows),
        to_user=jax.jacfwd(to_user)(path.theta),
        from_user=jax.jacfwd(from_user)(path.theta),
        movable=is_movable,
        flags=flags,
        converged=path.converged,
        em_trace=em_path.trace - total * _log_unit(family, scaling[1]),
        trace=path.trace - total * _log_unit(family, scaling[1]),
        em_iterations=em_path.count,
        iterations=path.count,
        start_values=values,
        start_iterations=paths[0].count + paths[1].count,
        start_converged=paths[1].converged,
        n_agree=jnp.sum(jnp.max(values) - values <= AGREEMENT, dtype=jnp.int32),
        facts=facts,
    )


def _flags(
    plan: Plan,
    problem: Problem,
    settings: Settings,
    path: Path,
    moments: Moments,
    is_movable: Array,
    terms: likelihood.RowTerms,
    rows: Rows,
    limits: Limits,
    scaling: tuple[Columns, Units],
) -> tuple[Flags, dict[str, Array]]:
    family, d = plan.family, problem.x.shape[1]
    total = jnp.sum(rows.weight)
    gammas, _ = split(family, path.theta, rows)
    present = rows.weight > 0
    logits = jnp.stack([family.gate.logit(g, rows.gate_design) for g in gammas])
    logit = jnp.max(jnp.where(present[None, :], jnp.abs(logits), 0.0))
    norm = (
        jnp.max(jnp.linalg.norm(gammas[:, :-1], axis=1)) if gammas.shape[1] > 1 else jnp.zeros(())
    )
    gate = jnp.min(terms.gate @ rows.weight)
    frozen = rows.weight @ (1 - jnp.sum(terms.gate, axis=0))
    effective = jnp.min(terms.responsibility @ rows.weight)
    location = family.expert.location_size(d)
    eigenvalue = least_eigenvalue(moments.information, is_movable)
    is_log_nu = jnp.array(coordinates(family, "log_nu", d))
    at_bound = (
        is_log_nu & limits.free & ((path.theta <= limits.lower) | (path.theta >= limits.upper))
    )
    low, high = nu_range(problem, settings)
    bad = (jnp.isnan(problem.log_frozen) | (problem.log_frozen == jnp.inf)) & present
    flags = Flags(
        nonfinite_frozen=jnp.any(bad),
        no_contamination=gate < 1,
        all_contamination=frozen < 1,
        empty_expert=effective < location + 1,
        gate_separated=(norm > MAX_GATE_NORM)
        | (logit > MAX_LOGIT)
        # The search stops on its way out once the likelihood is flat.
        | ((logit > 0.5 * MAX_LOGIT) & ~(eigenvalue >= MIN_EIGENVALUE)),
        variance_floor=jnp.any(at_bound),
        flat_information=~(eigenvalue >= MIN_EIGENVALUE),
        max_iter=~path.converged,
        ok=jnp.ones((), jnp.bool_),
    )
    facts = {
        "gate": gate,
        "total": total,
        "frozen": frozen,
        "effective": effective,
        "location": jnp.asarray(location),
        "norm": norm,
        "logit": logit,
        "low": low,
        "high": high,
        "eigenvalue": eigenvalue,
        "iterations": path.count,
    }
    return flags, facts


def least_eigenvalue(information: Float[Array, "p p"], is_movable: Array) -> Float[Array, ""]:
    """Least eigenvalue of the movable entries' information at unit diagonal; 0 if not curved."""
    scale = unit_scale(jnp.where(is_movable, jnp.diagonal(information), 0.0))
    correlation = scaled(information, scale) + jnp.diag(jnp.where(is_movable, 0.0, 1.0))
    return jnp.linalg.eigvalsh(correlation)[0]
