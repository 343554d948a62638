"""Where the estimators start, not knowing the truth: rows that the frozen model explains badly."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from moe_jax.contaminated.em import em_map
from moe_jax.contaminated.layout import Family
from moe_jax.contaminated.likelihood import Rows, row_terms
from moe_jax.contaminated.limits import Limits, clip

# Shares of rows, the worst under the frozen model, that a tail start gives to the prompts.
TAILS = (0.5, 0.3, 0.15, 0.05)
_SURE, _UNSURE = 0.95, 0.05
# M-steps from fixed responsibilities: one is exact for a linear Gaussian expert, others need a few.
_M_STEPS = 3


def tail_starts(
    family: Family, initial: Float[Array, " p"], rows: Rows, limits: Limits, n: int
) -> Float[Array, "n p"]:
    """The first n tail starts, n <= 4.

    The responsibility is 0.95 on the share q of rows with the lowest frozen log-density and 0.05
    elsewhere, for q = 0.5, 0.3, 0.15, 0.05. Several prompts share the tail by the size of y.
    """
    order = jnp.argsort(rows.log_frozen)
    reached = jnp.cumsum(rows.weight[order]) / jnp.sum(rows.weight)

    def start(q: Array) -> Array:
        # The first row past the share is the last of the tail; ties with it belong to it too.
        last = jnp.minimum(jnp.searchsorted(reached, q), order.size - 1)
        in_tail = rows.log_frozen <= rows.log_frozen[order[last]]
        return _from_responsibilities(family, initial, _shared(family, in_tail, rows), rows, limits)

    return jax.lax.map(start, jnp.array(TAILS[:n]))


def random_starts(
    key: PRNGKeyArray,
    family: Family,
    initial: Float[Array, " p"],
    rows: Rows,
    limits: Limits,
    n: int,
) -> Float[Array, "n p"]:
    """Experts fitted to random subsets of rows, four rows a parameter, with a flat gate."""
    size = initial.size // family.n_prompts
    count = min(4 * size, rows.response.size)

    def start(key: Array) -> Array:
        chances = jnp.where(rows.weight > 0, 1.0, 0.0)
        picks = jax.vmap(
            lambda k: jax.random.choice(
                k, chances.size, (count,), replace=False, p=chances / jnp.sum(chances)
            )
        )(jax.random.split(key, family.n_prompts))
        share = jnp.full((family.n_prompts, chances.size), 1e-3)
        share = jax.vmap(lambda s, i: s.at[i].set(1.0))(share, picks)
        fitted = _from_responsibilities(family, initial, share, rows, limits)
        # A subset says nothing of the gate, and too little of the noise.
        return jnp.where(limits.free & ~is_kept_at_start(family, rows, initial), fitted, initial)

    return jax.lax.map(start, jax.random.split(key, n))


def is_kept_at_start(family: Family, rows: Rows, initial: Float[Array, " p"]) -> Array:
    """Entries [p] that a random start does not take from its subset: gate and dispersion."""
    g = family.gate.size(rows.gate_design.shape[1])
    size = initial.size // family.n_prompts
    index = jnp.arange(size)
    kept = (index < g) | (index >= size - len(family.expert.dispersion_names))
    return jnp.tile(kept, family.n_prompts)


def _shared(family: Family, in_tail: Array, rows: Rows) -> Float[Array, "J n"]:
    """Responsibilities of the prompts, among which the tail is cut at quantiles of y."""
    j = family.n_prompts
    if j == 1:
        return jnp.where(in_tail, _SURE, _UNSURE)[None]
    weight = jnp.where(in_tail, rows.weight, 0.0)
    order = jnp.argsort(rows.response)
    reached = jnp.cumsum(weight[order]) - 0.5 * weight[order]
    part = jnp.floor(j * reached / jnp.maximum(jnp.sum(weight), 1.0)).astype(jnp.int32)
    part = jnp.zeros_like(part).at[order].set(jnp.clip(part, 0, j - 1))
    is_own = part[None, :] == jnp.arange(j, dtype=part.dtype)[:, None]
    rest = _UNSURE / j
    return jnp.where(in_tail[None, :] & is_own, _SURE - (j - 1) * rest, rest)


def _from_responsibilities(
    family: Family, initial: Array, responsibility: Array, rows: Rows, limits: Limits
) -> Array:
    """The parameters that M-steps reach from fixed responsibilities [J, n]."""
    terms = row_terms(family, initial, rows)._replace(responsibility=responsibility)
    g = family.gate.size(rows.gate_design.shape[1])
    is_gate = jnp.tile(jnp.arange(initial.size // family.n_prompts) < g, family.n_prompts)

    def step(k: Any, theta: Array) -> Array:
        new = clip(em_map(family, theta, terms, rows, limits), limits)
        # The gate's single step is from where its shares are known; only the expert goes on.
        return jnp.where(is_gate & (k > 0), theta, new)

    return jax.lax.fori_loop(0, _M_STEPS, step, initial)
