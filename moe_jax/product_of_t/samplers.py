"""Draws from a product of t-experts: Gibbs, weighted simplex draws, annealing.

Notation as in `moe_jax.product_of_t.model`. Everything here is a pure function of experts and
exponents (K,), in the dtype of the exponents; an expert whose exponent is 0 takes no part.
"""

import math
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import gammaln, logsumexp
from jaxtyping import Array, Float, Int, Key

from moe_jax.product_of_t.experts import (
    Experts,
    _solve,
    expanded_quadratics,
    full_experts,
    join_experts,
    log_factors,
    quadratics,
    weighted_quadratic,
)

# Share of plain Dirichlet draws in the mixture proposal. Without it the effective sample size would
# not fall where no centre covers a mode (specification, 4.3).
_DEFENSIVE = 0.05
# Centres of the mixture proposal.
CENTRES = 128
_MAX_CHAINS = 4000
# Sweeps after resampling before the first draw is kept.
_SETTLING = 8
_REFERENCE_DEGREES_OF_FREEDOM = 5.0


@chex.dataclass(frozen=True)
class WeightedDraws:
    """Draws z_i with log weights such that the mean weight estimates the normaliser C.

    Attributes:
        values: z_i.
        log_weights: logarithms of the weights.
        ess: effective sample size, (sum w)^2 / sum w^2, between 1 and the number of draws.
    """

    values: Float[Array, "draws dim"]
    log_weights: Float[Array, " draws"]
    ess: Float[Array, ""]


def effective_sample_size(log_weights: Float[Array, " draws"]) -> Float[Array, ""]:
    """(sum w)^2 / sum w^2 of the weights with these logarithms; 0 if all weights are 0."""
    top = jnp.max(log_weights)
    weights = jnp.exp(log_weights - jnp.where(jnp.isfinite(top), top, 0.0))
    total = jnp.sum(weights)
    return jnp.where(total > 0, total**2 / jnp.where(total > 0, jnp.sum(weights**2), 1.0), 0.0)


def log_gamma_draws(
    key: Key[Array, ""], concentration: Float[Array, "batch experts"]
) -> Float[Array, "batch experts"]:
    """Logarithms of independent Gamma(concentration, 1) variables; -inf where it is 0.

    Marsaglia and Tsang (2000) on the whole array at once, then on the few that were rejected, at
    most one in twenty on average, gathered. `jax.random.loggamma` runs a loop of its own for each
    element on CPU, at fifteen times the cost, which would be most of the cost of a fit.
    """
    # Gamma(a) is Gamma(a + 1) V^(1/a), which avoids the small a where rejection fails.
    flat = concentration.reshape(-1)
    shape = jnp.where(flat < 1, flat + 1, flat)
    third = shape - 1.0 / 3.0
    count = flat.shape[0]
    buffer = min(count, count // 16 + 64)
    first_key, key = jax.random.split(key)
    value, log_v, accepted = _propose_log_gamma(first_key, third)
    # A shape that is no number accepts nothing: it gives no number, instead of a loop for ever.
    hopeless = ~jnp.isfinite(shape)
    value, accepted = jnp.where(hopeless, jnp.nan, value), accepted | hopeless

    def retry(state: tuple) -> tuple:
        key, value, log_v, accepted = state
        # Positions of the first rejected; `count`, beyond the end, where there are no more.
        place = jnp.where(accepted, count, jnp.cumsum((~accepted).astype(jnp.int32)) - 1)
        index = jnp.full(buffer, count, jnp.int32)
        index = index.at[place].set(jnp.arange(count, dtype=jnp.int32), mode="drop")
        some = jnp.take(third, index, mode="fill", fill_value=1.0)

        def propose(inner: tuple) -> tuple:
            key, old, old_v, done = inner
            key, step_key = jax.random.split(key)
            new, new_v, good = _propose_log_gamma(step_key, some)
            new, new_v = jnp.where(done, old, new), jnp.where(done, old_v, new_v)
            return key, new, new_v, done | good

        inner = (key, jnp.zeros_like(some), jnp.zeros_like(some), index == count)
        key, new, new_v, _ = jax.lax.while_loop(lambda inner: ~jnp.all(inner[3]), propose, inner)
        value = value.at[index].set(new, mode="drop")
        log_v = log_v.at[index].set(new_v, mode="drop")
        return key, value, log_v, accepted.at[index].set(True, mode="drop")

    _, value, log_v, _ = jax.lax.while_loop(
        lambda state: ~jnp.all(state[3]), retry, (key, value, log_v, accepted)
    )
    is_positive = flat > 0
    boost = jnp.where(flat < 1, log_v / jnp.where(is_positive, flat, 1.0), 0.0)
    return jnp.where(flat == 0, -jnp.inf, value + boost).reshape(concentration.shape)


def _propose_log_gamma(key: Array, third: Array) -> tuple[Array, Array, Array]:
    """A proposal for each shape a = third + 1/3 >= 1: log of it, log of a uniform, acceptance."""
    # Both from one call, which halves the code to compile.
    edge = np.nextafter(np.asarray(-1.0, third.dtype), np.asarray(0.0, third.dtype))
    uniform = jax.random.uniform(key, (2, *third.shape), third.dtype, edge, 1.0)
    normal = math.sqrt(2.0) * jax.lax.erf_inv(uniform[0])
    root = 1 + normal / (3.0 * jnp.sqrt(third))
    safe = jnp.where(root > 0, root, 1.0)
    log_cube = 3.0 * jnp.log(safe)
    bound = 0.5 * normal**2 + third * (1.0 - safe**3 + log_cube)
    log_uniform = jnp.log(0.5 - 0.5 * uniform[1])
    # Below a bound that it met, the uniform is uniform again: V costs no further draw.
    log_v = log_uniform - jnp.minimum(bound, 0.0)
    return jnp.log(third) + log_cube, log_v, (root > 0) & (log_uniform < bound)


def gibbs_sweep(
    key: Key[Array, ""],
    experts: Experts,
    exponents: Float[Array, " experts"],
    points: Float[Array, "chains dim"],
) -> Float[Array, "chains dim"]:
    """One step of a Markov chain that leaves the product exactly invariant.

    From D_k^-a = int lambda^(a-1) exp(-lambda D_k) d lambda / Gamma(a): given z the lambda_k are
    independent Gamma(alpha_k, rate D_k(z)); given them z ~ N(m(lambda), (2 Lambda(lambda))^-1).
    """
    gamma_key, normal_key = jax.random.split(key)
    shape = (points.shape[0], exponents.shape[0])
    # Single precision moves a draw by a relative 1e-7, and costs half.
    concentration = jnp.broadcast_to(exponents.astype(jnp.float32)[None], shape)
    gamma = jnp.exp(log_gamma_draws(gamma_key, concentration)).astype(exponents.dtype)
    rates = gamma / (1.0 + expanded_quadratics(experts, points))
    centre, cholesky = weighted_quadratic(experts, rates)
    normal = jax.random.normal(normal_key, points.shape, points.dtype) * math.sqrt(0.5)
    return centre + _solve(cholesky, normal, transpose=True)


@jax.jit
def gibbs_step(
    key: Key[Array, ""],
    count: Int[Array, ""] | Int[np.ndarray, ""],
    experts: Experts,
    exponents: Float[Array, " experts"],
    points: Float[Array, "chains dim"],
) -> Float[Array, "chains dim"]:
    """`gibbs_sweep` by the `count`-th key of `key`; a chain that would leave the numbers stays."""
    moved = gibbs_sweep(jax.random.fold_in(key, count), experts, exponents, points)
    return jnp.where(jnp.all(jnp.isfinite(moved), axis=-1, keepdims=True), moved, points)


@partial(jax.jit, static_argnums=4)
def gibbs(
    key: Key[Array, ""],
    experts: Experts,
    exponents: Float[Array, " experts"],
    start: Float[Array, "chains dim"],
    num_sweeps: int,
) -> Float[Array, "sweeps chains dim"]:
    """The states of independent chains after each of `num_sweeps` sweeps."""

    def step(points: Array, key: Array) -> tuple[Array, Array]:
        points = gibbs_sweep(key, experts, exponents, points)
        return points, points

    return jax.lax.scan(step, start, jax.random.split(key, num_sweeps))[1]


def conditional_parameters(
    experts: Experts,
    exponents: Float[Array, " experts"],
    weights: Float[Array, "batch experts"],
) -> tuple[
    Float[Array, "batch dim"],
    Float[Array, "batch dim dim"],
    Float[Array, " batch"],
    Float[Array, " batch"],
]:
    """What makes z | w a multivariate t, and the mass of w.

    Returns:
        m(w); L with L L' = Lambda(w); s(w) = 1 + sum_k w_k (mu_k - m)' Lambda_k (mu_k - m), in the
        form that does not cancel; and
        log C_alpha(w) = D/2 log pi + log Gamma(A - D/2) - log Gamma(A) - log|L| - (A - D/2) log s,
        so that q(w) = Dirichlet(w; alpha) C_alpha(w) / C(alpha).
    """
    dim, total = experts.dim, jnp.sum(exponents)
    centre, cholesky = weighted_quadratic(experts, weights)
    spread = 1.0 + jnp.sum(weights * quadratics(experts, centre), axis=-1)
    log_determinant = jnp.sum(jnp.log(jnp.diagonal(cholesky, axis1=-2, axis2=-1)), axis=-1)
    constant = 0.5 * dim * math.log(math.pi) + gammaln(total - 0.5 * dim) - gammaln(total)
    log_mass = constant - log_determinant - (total - 0.5 * dim) * jnp.log(spread)
    return centre, cholesky, spread, log_mass


def _draw_conditionals(
    key: Array, experts: Experts, exponents: Array, log_weights: Array
) -> tuple[Array, Array]:
    """Z | w for every row of unnormalised log w, and log C_alpha(w)."""
    weights = jax.nn.softmax(log_weights, axis=-1)
    centre, cholesky, spread, log_mass = conditional_parameters(experts, exponents, weights)
    chi_key, normal_key = jax.random.split(key)
    half = jnp.sum(exponents) - 0.5 * experts.dim
    # chi^2 with nu = 2 half degrees of freedom is twice a Gamma(half).
    shape = jnp.broadcast_to(half, (spread.shape[0], 1))
    log_gamma = log_gamma_draws(chi_key, shape)[:, 0]
    normal = jax.random.normal(normal_key, centre.shape, centre.dtype)
    radius = jnp.exp(0.5 * (jnp.log(spread) - log_gamma)) * math.sqrt(0.5)
    values = centre + _solve(cholesky, normal * radius[:, None], transpose=True)
    return values, log_mass


@partial(jax.jit, static_argnums=3)
def dirichlet_draws(
    key: Key[Array, ""], experts: Experts, exponents: Float[Array, " experts"], num_samples: int
) -> WeightedDraws:
    """The paper's sampler: w ~ Dirichlet(alpha), z | w, with weight C_alpha(w).

    Reference: section 3 of arXiv 2510.21598.
    """
    weight_key, value_key = jax.random.split(key)
    shape = (num_samples, exponents.shape[0])
    log_gamma = log_gamma_draws(weight_key, jnp.broadcast_to(exponents[None], shape))
    values, log_mass = _draw_conditionals(value_key, experts, exponents, log_gamma)
    return WeightedDraws(values=values, log_weights=log_mass, ess=effective_sample_size(log_mass))


@partial(jax.jit, static_argnums=4)
def mixture_draws(
    key: Key[Array, ""],
    experts: Experts,
    exponents: Float[Array, " experts"],
    centres: Float[Array, "centres dim"],
    num_samples: int,
) -> WeightedDraws:
    """Weighted draws with w from a mixture of Dirichlets scaled by what the centres see.

    Given z_j, w = lambda / sum(lambda) with lambda_k ~ Gamma(alpha_k, rate D_k(z_j)) has density
    Dirichlet(w; alpha) prod_k D_k(z_j)^alpha_k (sum_k w_k D_k(z_j))^-A. The proposal is the equal
    mixture of these and of 5% of Dirichlet(alpha) itself, in which Dirichlet(w; alpha) cancels from
    the weight. Centres that are draws of the product make it the exact marginal of w in the limit.
    """
    total = jnp.sum(exponents)
    num_centres = centres.shape[0]
    # The last row stands for the plain Dirichlet, D_k = 1.
    log_d = jnp.pad(log_factors(experts, centres), ((0, 1), (0, 0)))
    log_share = jnp.full(num_centres + 1, math.log((1 - _DEFENSIVE) / num_centres), log_d.dtype)
    log_share = log_share.at[-1].set(math.log(_DEFENSIVE))
    pick_key, weight_key, value_key = jax.random.split(key, 3)
    pick = jax.random.categorical(pick_key, log_share, shape=(num_samples,))
    shape = (num_samples, exponents.shape[0])
    log_gamma = log_gamma_draws(weight_key, jnp.broadcast_to(exponents[None], shape))
    log_weights = jax.nn.log_softmax(log_gamma - log_d[pick], axis=-1)
    values, log_mass = _draw_conditionals(value_key, experts, exponents, log_weights)
    mixed = jnp.log(jnp.exp(log_weights) @ jnp.exp(log_d).T)
    log_proposal = logsumexp((log_share + log_d @ exponents)[None] - total * mixed, axis=-1)
    log_ratio = log_mass - log_proposal
    return WeightedDraws(values=values, log_weights=log_ratio, ess=effective_sample_size(log_ratio))


def annealed_draws(
    key: Key[Array, ""],
    experts: Experts,
    exponents: Float[Array, " experts"],
    num_samples: int,
    num_steps: int,
) -> WeightedDraws:
    """Annealed importance sampling from one broad t, with a Gibbs sweep at each of its steps.

    The t is fitted to z | E[w], with at most 5 degrees of freedom. Its exponent falls to 0 as those
    of the experts grow, at step i by (i / steps)^2.
    """
    return _anneal(key, experts, exponents, num_samples, 0, np.int32(num_steps))[0]


def annealed_gibbs(
    key: Key[Array, ""],
    experts: Experts,
    exponents: Float[Array, " experts"],
    num_samples: int,
    num_steps: int,
) -> tuple[Float[Array, "samples dim"], WeightedDraws]:
    """Draws without weights: annealed, resampled, then moved by Gibbs sweeps.

    Asked for more draws than there are chains, each chain gives several, two sweeps apart.

    Returns:
        The draws, and the annealed ones with the weights they were resampled by.
    """
    # Resampling from few particles would repeat the luck of one of them.
    chains = max(min(num_samples, _MAX_CHAINS), 64)
    rounds = -(-num_samples // chains) or 1
    weighted, draws = _anneal(key, experts, exponents, chains, rounds, np.int32(num_steps))
    return draws[:num_samples], weighted


@partial(jax.jit, static_argnums=(3, 4))
def _anneal(
    key: Array,
    experts: Experts,
    exponents: Array,
    chains: int,
    rounds: int,
    num_steps: Array,
) -> tuple[WeightedDraws, Array]:
    """Weighted draws after `num_steps`, and `rounds` states of every chain after resampling.

    One loop does all, for each copy of a sweep takes a second to compile.
    """
    total, dim = jnp.sum(exponents), experts.dim
    dtype = exponents.dtype
    share = (exponents / total)[None]
    centre, cholesky, spread, _ = conditional_parameters(experts, exponents, share)
    freedom = jnp.minimum(2.0 * total - dim, _REFERENCE_DEGREES_OF_FREEDOM)
    precision = cholesky @ jnp.swapaxes(cholesky, -1, -2)
    precision = precision * ((2.0 * total - dim) / (freedom * spread))[:, None, None]
    reference = full_experts(centre, precision)
    everyone = join_experts(reference, experts)
    first = jnp.pad(0.5 * (freedom + dim)[None], (0, exponents.shape[0]))
    last = jnp.pad(exponents, (1, 0))

    start_key, resample_key, order_key, key = jax.random.split(key, 4)
    only = jnp.zeros((chains, 1), dtype)
    points, log_mass = _draw_conditionals(start_key, reference, first[:1], only)
    weighted = WeightedDraws(values=points, log_weights=log_mass, ess=jnp.zeros((), dtype))
    draws = jnp.zeros((max(rounds, 1), chains, dim), dtype)

    def fraction(index: Array) -> Array:
        return jnp.minimum(index.astype(dtype) / num_steps.astype(dtype), 1.0) ** 2

    def step(index: Array, state: tuple) -> tuple:
        points, log_weights, weighted, draws = state
        before, after = fraction(index), fraction(index + 1)
        log_d = log_factors(everyone, points)
        log_weights = log_weights - (after - before) * (log_d @ (last - first))
        step_key = jax.random.fold_in(key, index)
        points = gibbs_sweep(step_key, everyone, first + after * (last - first), points)
        if rounds:

            def restart() -> tuple[Array, WeightedDraws]:
                ess = effective_sample_size(log_weights)
                found = WeightedDraws(values=points, log_weights=log_weights, ess=ess)
                return resample(resample_key, found, chains), found

            points, weighted = jax.lax.cond(
                index + 1 == num_steps, restart, lambda: (points, weighted)
            )
            # The last write counts: after `_SETTLING` sweeps, then after every second.
            slot = jnp.clip((index + 1 - num_steps - _SETTLING + 1) // 2, 0, rounds - 1)
            draws = jax.lax.dynamic_update_index_in_dim(draws, points, slot, 0)
        return points, log_weights, weighted, draws

    more = _SETTLING + 2 * (rounds - 1) if rounds else 0
    state = (points, log_mass, weighted, draws)
    points, log_weights, weighted, draws = jax.lax.fori_loop(0, num_steps + more, step, state)
    if not rounds:
        ess = effective_sample_size(log_weights)
        return WeightedDraws(values=points, log_weights=log_weights, ess=ess), draws
    # Systematic resampling leaves the particles in order.
    return weighted, jax.random.permutation(order_key, draws.reshape(-1, dim))


def resample(
    key: Key[Array, ""], draws: WeightedDraws, num_samples: int
) -> Float[Array, "samples dim"]:
    """Unweighted points from weighted draws, by systematic resampling."""
    edges = jnp.cumsum(jax.nn.softmax(draws.log_weights))
    grid = jnp.arange(num_samples).astype(edges.dtype) + jax.random.uniform(key, (), edges.dtype)
    index = jnp.searchsorted(edges, grid / num_samples * edges[-1])
    return draws.values[jnp.minimum(index, draws.values.shape[0] - 1)]
