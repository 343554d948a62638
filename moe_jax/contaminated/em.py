"""EM and its SQUAREM acceleration."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from moe_jax.contaminated.layout import Family
from moe_jax.contaminated.likelihood import Rows, RowTerms, row_terms, split
from moe_jax.contaminated.limits import Limits, Path, clip, penalty, start_path
from moe_jax.contaminated.linalg import gram, solve_positive

# Shares of an M-step that are tried in turn until the objective does not fall.
_SHARES = (1.0, 0.5, 0.2, 0.05)
# A fall smaller than this times (1 + |objective|) is rounding.
ROUNDING = 1e-10
# EM has converged when no parameter moves by more, relative to 1 + |parameter|.
_STEP_TOLERANCE = 1e-9


class _State(NamedTuple):
    path: Path
    terms: RowTerms
    share: Array
    gain: Array
    is_stuck: Array


def run_em(
    family: Family,
    theta: Float[Array, " p"],
    rows: Rows,
    limits: Limits,
    max_iter: int,
    min_gain: float = 0.0,
) -> Path:
    """Iterates the EM map from theta; the objective never falls.

    An M-step that would lower it by more than rounding is shortened, and given up at a twentieth.

    Args:
        min_gain: also stops, without calling it convergence, once an iteration raises the mean of
            the objective over rows by less.
    """
    theta = clip(theta, limits)
    terms = row_terms(family, theta, rows)
    total = jnp.sum(rows.weight)
    path = start_path(theta, _value(theta, terms, rows, limits), max_iter)
    shares = jnp.array(_SHARES)

    def goes_on(state: _State) -> Array:
        # Without a least gain, a gain that rounding makes negative is no reason to stop.
        is_slow = (min_gain > 0) & (state.gain < min_gain * total)
        done = state.path.converged | state.is_stuck | is_slow
        return (state.path.count < max_iter) & ~done

    def iterate(state: _State) -> _State:
        path = state.path
        target = em_map(family, path.theta, state.terms, rows, limits)
        theta = clip(path.theta + shares[state.share] * (target - path.theta), limits)
        terms = row_terms(family, theta, rows)
        value = _value(theta, terms, rows, limits)
        is_better = value >= path.value - ROUNDING * (1 + jnp.abs(path.value))
        moved = jnp.max(jnp.abs(theta - path.theta) / (1 + jnp.abs(path.theta)), initial=0.0)
        count = path.count + 1
        kept = Path(theta, value, path.trace, count, (moved < _STEP_TOLERANCE) & (state.share == 0))
        kept, terms = jax.tree.map(
            lambda new, old: jnp.where(is_better, new, old),
            (kept, terms),
            (path._replace(count=count), state.terms),
        )
        kept = kept._replace(trace=kept.trace.at[count].set(kept.value))
        share = jnp.where(is_better, 0, state.share + 1)
        gain = jnp.where(is_better, value - path.value, jnp.inf)
        return _State(kept, terms, share, gain, share >= len(_SHARES))

    zero = jnp.zeros((), jnp.int32)
    state = _State(path, terms, zero, jnp.array(jnp.inf), jnp.zeros((), jnp.bool_))
    return jax.lax.while_loop(goes_on, iterate, state).path


def run_squarem(
    family: Family, theta: Float[Array, " p"], rows: Rows, limits: Limits, max_iter: int
) -> Path:
    """EM with squared extrapolation; one iteration is a cycle of three EM maps.

    From theta0, theta1 = M(theta0) and theta2 = M(theta1), with r = theta1 - theta0 and
    v = theta2 - theta1 - r, the extrapolation is theta0 - 2 a r + a^2 v, a = -max(1, |r|/|v|), and
    one EM map steadies it. theta2 stands where that lowers the objective. Varadhan and Roland 2008.
    """

    def em(theta: Array) -> tuple[Array, Array]:
        terms = row_terms(family, theta, rows)
        target = clip(em_map(family, theta, terms, rows, limits), limits)
        return target, _value(theta, terms, rows, limits)

    def value_at(theta: Array) -> Array:
        return _value(theta, row_terms(family, theta, rows), rows, limits)

    def goes_on(path: Path) -> Array:
        return (path.count < max_iter) & ~path.converged

    def iterate(path: Path) -> Path:
        theta0 = path.theta
        theta1, _ = em(theta0)
        theta2, _ = em(theta1)
        r, v = theta1 - theta0, (theta2 - theta1) - (theta1 - theta0)
        length = jnp.linalg.norm(r) / jnp.maximum(jnp.linalg.norm(v), jnp.finfo(jnp.float64).tiny)
        a = -jnp.maximum(1.0, length)
        leap, _ = em(clip(theta0 - 2 * a * r + jnp.square(a) * v, limits))
        candidates = jnp.stack([leap, theta2, theta0])
        # theta2 stands where the leap is no better; theta0 where even the M-steps overshot.
        values = jnp.append(jax.vmap(value_at)(candidates[:2]), path.value)
        slack = ROUNDING * (1 + jnp.abs(path.value))
        is_good = jnp.isfinite(values) & (values >= path.value - slack)
        is_good = is_good.at[0].set(is_good[0] & ~(values[0] < values[1]))
        chosen = jnp.argmax(is_good)
        moved = jnp.max(jnp.abs(r) / (1 + jnp.abs(theta0)), initial=0.0)
        count = path.count + 1
        trace = path.trace.at[count].set(values[chosen])
        return Path(candidates[chosen], values[chosen], trace, count, moved < _STEP_TOLERANCE)

    theta = clip(theta, limits)
    return jax.lax.while_loop(goes_on, iterate, start_path(theta, value_at(theta), max_iter))


def em_map(
    family: Family, theta: Float[Array, " p"], terms: RowTerms, rows: Rows, limits: Limits
) -> Float[Array, " p"]:
    """One M-step from the responsibilities of an E-step, within no bounds.

    The gate takes one Newton step, the expert what its `m_step` says; other entries than
    the free ones stay.
    """
    gammas, phis = split(family, theta, rows)
    free_gates, free_experts = split(family, limits.free, rows)
    new_gates = gammas + _gate_step(family, gammas, terms, rows, limits)
    new_experts = jnp.stack(
        [
            family.expert.m_step(
                phis[j],
                rows.expert_design,
                rows.response,
                rows.weight * terms.responsibility[j],
                free_experts[j],
            )
            for j in range(family.n_prompts)
        ]
    )
    new = jnp.concatenate([new_gates, new_experts], axis=1).reshape(-1)
    # An expert that no row supports keeps its parameters instead of becoming 0/0.
    return jnp.where(limits.free & jnp.isfinite(new), new, theta)


def _gate_step(
    family: Family, gammas: Array, terms: RowTerms, rows: Rows, limits: Limits
) -> Float[Array, "J g"]:
    """Newton step of sum_i weight_i (sum_j r_j a_j - log(1 + sum_j exp a_j)) less the prior."""
    prompts = range(family.n_prompts)
    jacobians = [family.gate.jacobian(gammas[j], rows.gate_design) for j in prompts]
    excess = rows.weight[None, :] * (terms.responsibility - terms.gate)
    prior, _ = split(family, limits.prior, rows)
    free, _ = split(family, limits.free, rows)
    force = jnp.stack([excess[j] @ jacobians[j] for j in prompts]) - prior * gammas
    blocks = [
        [
            gram(
                jacobians[j],
                rows.weight * terms.gate[j] * ((1.0 if j == k else 0.0) - terms.gate[k]),
                jacobians[k],
            )
            for k in prompts
        ]
        for j in prompts
    ]
    matrix = jnp.block(blocks) + jnp.diag(prior.reshape(-1))
    return solve_positive(matrix, force.reshape(-1), free.reshape(-1)).reshape(gammas.shape)


def _value(theta: Array, terms: RowTerms, rows: Rows, limits: Limits) -> Array:
    return rows.weight @ terms.loglik - penalty(theta, limits)
