"""Log-likelihood of a contaminated mixture, its exact score and observed information.

    p(y | x) = pi_0(x) f0(y | x) + sum_j pi_j(x) f_j(y | x),   pi = softmax(0, a_1(x), ..., a_J(x))

Only log f0 at the data enters, so the frozen model may be anything. Densities are never formed.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from moe_jax.contaminated.expert import Units
from moe_jax.contaminated.gates import Columns
from moe_jax.contaminated.layout import Family
from moe_jax.contaminated.linalg import gram

Total = TypeVar("Total")

# Rows a pass works on at once: the n x p matrices of scores then never exist as a whole.
BLOCK_ROWS = 8192
# Stands for a frozen log-density of -inf: the responsibility is then exactly 1 and nothing is NaN.
LOWEST_LOG_DENSITY = -1e30


class Rows(NamedTuple):
    """The data as the likelihood takes them; every array has the rows first."""

    gate_design: Array
    expert_design: Array
    response: Array
    log_frozen: Array
    weight: Array


class RowTerms(NamedTuple):
    """Log p(y_i | x_i) [n]; P(prompt j | x_i, y_i), pi_j(x_i), log f_j(y_i | x_i), all [J, n]."""

    loglik: Array
    responsibility: Array
    gate: Array
    log_expert: Array


class Moments(NamedTuple):
    """Sums over rows: weighted log-likelihood [], score [p], observed information [p, p]."""

    loglik: Array
    score: Array
    information: Array


def make_rows(
    family: Family,
    x: Float[Array, "n d"],
    y: Float[Array, " n"],
    log_frozen: Float[Array, " n"],
    weight: Float[Array, " n"] | None = None,
    *,
    columns: Columns | None = None,
    units: Units | None = None,
) -> Rows:
    """Rows for parameters in the user's units, or in those that `columns` and `units` define."""
    weight = jnp.ones(y.shape, jnp.float64) if weight is None else weight
    return Rows(
        family.gate.design(x, columns),
        family.expert.design(x, units),
        family.expert.response(y, units),
        jnp.maximum(log_frozen, LOWEST_LOG_DENSITY),
        weight,
    )


def split(family: Family, theta: Shaped[Array, " p"], rows: Rows) -> tuple[Array, Array]:
    """Gate parameters [J, g] and expert parameters [J, e]; of any vector [p] laid out as theta."""
    blocks = theta.reshape(family.n_prompts, -1)
    g = family.gate.size(rows.gate_design.shape[1])
    return blocks[:, :g], blocks[:, g:]


def row_terms(family: Family, theta: Float[Array, " p"], rows: Rows) -> RowTerms:
    """What every row says about the parameters.

    log p = logaddexp(log f0, a_j + log f_j over j) - logaddexp(0, a_j over j).
    """
    gammas, phis = split(family, theta, rows)
    prompts = range(family.n_prompts)
    logits = [family.gate.logit(gammas[j], rows.gate_design) for j in prompts]
    experts = [family.expert.log_prob(phis[j], rows.expert_design, rows.response) for j in prompts]
    gate_total, joint_total = jnp.zeros_like(logits[0]), rows.log_frozen
    for a, log_f in zip(logits, experts, strict=True):
        gate_total = jnp.logaddexp(gate_total, a)
        joint_total = jnp.logaddexp(joint_total, a + log_f)
    gate = jnp.stack([jnp.exp(a - gate_total) for a in logits])
    responsibility = jnp.stack(
        [jnp.exp(a + log_f - joint_total) for a, log_f in zip(logits, experts, strict=True)]
    )
    return RowTerms(joint_total - gate_total, responsibility, gate, jnp.stack(experts))


def row_loglik(family: Family, theta: Float[Array, " p"], rows: Rows) -> Float[Array, " n"]:
    """Log-density log p(y_i | x_i; theta) of every row."""
    return row_terms(family, theta, rows).loglik


def row_scores(family: Family, theta: Float[Array, " p"], rows: Rows) -> Float[Array, "n p"]:
    """Derivatives of log p(y_i | x_i; theta) by theta: (r_j - pi_j) da_j and r_j d log f_j."""
    terms = row_terms(family, theta, rows)
    columns = []
    for j, (jacobian, scores) in enumerate(_complete_scores(family, theta, rows)):
        r = terms.responsibility[j]
        columns += [(r - terms.gate[j])[:, None] * jacobian, r[:, None] * scores]
    return jnp.concatenate(columns, axis=1)


def score(family: Family, theta: Float[Array, " p"], rows: Rows) -> Float[Array, " p"]:
    """Weighted sum of the rows' scores."""
    return _sum_over_blocks(lambda block: block.weight @ row_scores(family, theta, block), rows)


def outer_product(family: Family, theta: Float[Array, " p"], rows: Rows) -> Float[Array, "p p"]:
    """sum_i weight_i g_i g_i^T over the rows' scores g_i."""

    def block_sum(block: Rows) -> Array:
        g = row_scores(family, theta, block)
        return gram(g, block.weight, g)

    return _sum_over_blocks(block_sum, rows)


def information(family: Family, theta: Float[Array, " p"], rows: Rows) -> Float[Array, "p p"]:
    """The observed information, minus the Hessian of the weighted log-likelihood."""
    return moments(family, theta, rows).information


def loglik(family: Family, theta: Float[Array, " p"], rows: Rows) -> Float[Array, ""]:
    """Weighted log-likelihood."""
    return rows.weight @ row_loglik(family, theta, rows)


def moments(family: Family, theta: Float[Array, " p"], rows: Rows) -> Moments:
    """Log-likelihood, score and observed information in one pass over the rows.

    Louis' identity: the information is the expected complete-data information less the covariance,
    given the data, of the complete-data score. With u_j = (da_j, d log f_j) and r, pi as in
    `RowTerms`, its block (j, l) is, summed over rows,

        (pi_j 1[j=l] - pi_j pi_l) da_j da_l^T - (r_j - pi_j) dda_j  in the gate's corner,
        -r_j dd log f_j  in the expert's, both for j = l, and
        -(r_j 1[j=l] - r_j r_l) u_j u_l^T  everywhere.
    """
    return _sum_over_blocks(lambda block: _block_moments(family, theta, block), rows)


def _complete_scores(family: Family, theta: Array, rows: Rows) -> list[tuple[Array, Array]]:
    gammas, phis = split(family, theta, rows)
    return [
        (
            family.gate.jacobian(gammas[j], rows.gate_design),
            family.expert.score(phis[j], rows.expert_design, rows.response),
        )
        for j in range(family.n_prompts)
    ]


def _block_moments(family: Family, theta: Array, rows: Rows) -> Moments:
    terms = row_terms(family, theta, rows)
    r, pi, weight = terms.responsibility, terms.gate, rows.weight
    gammas, phis = split(family, theta, rows)
    prompts = range(family.n_prompts)
    complete = _complete_scores(family, theta, rows)
    joined = [jnp.concatenate(pair, axis=1) for pair in complete]
    total = [[jnp.zeros(())] * family.n_prompts for _ in prompts]
    g = gammas.shape[1]
    gradient = []
    for j in prompts:
        jacobian, scores = complete[j]
        gradient += [(weight * (r[j] - pi[j])) @ jacobian, (weight * r[j]) @ scores]
        for k in range(j + 1):
            same = 1.0 if j == k else 0.0
            block = -gram(joined[j], weight * r[j] * (same - r[k]), joined[k])
            gate = gram(jacobian, weight * pi[j] * (same - pi[k]), complete[k][0])
            if j == k:
                gate = gate - family.gate.curvature(
                    gammas[j], rows.gate_design, weight * (r[j] - pi[j])
                )
                expert = family.expert.information(
                    phis[j], rows.expert_design, rows.response, weight * r[j]
                )
                block = block.at[g:, g:].add(expert)
            total[j][k] = block.at[:g, :g].add(gate)
            total[k][j] = total[j][k].T
    return Moments(weight @ terms.loglik, jnp.concatenate(gradient), jnp.block(total))


def _sum_over_blocks(function: Callable[[Rows], Total], rows: Rows) -> Total:
    """Sum of function(block), a pytree, over blocks of rows."""
    n = rows.response.shape[0]
    blocks = n // BLOCK_ROWS
    if blocks < 2:
        return function(rows)
    whole = blocks * BLOCK_ROWS
    stacked = jax.tree.map(lambda a: a[:whole].reshape(blocks, BLOCK_ROWS, *a.shape[1:]), rows)
    shapes = jax.eval_shape(function, jax.tree.map(lambda a: a[0], stacked))
    zero = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

    def add(carry: Total, block: Rows) -> tuple[Total, None]:
        return jax.tree.map(jnp.add, carry, function(block)), None

    total, _ = jax.lax.scan(add, zero, stacked)
    if whole == n:
        return total
    rest = function(jax.tree.map(lambda a: a[whole:], rows))
    return jax.tree.map(jnp.add, total, rest)
