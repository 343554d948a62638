"""Draws from a product of t-experts: Gibbs, weighted simplex draws, annealing.

Notation as in `moe_jax.product_of_t.model`. Everything here is a pure function of experts and
exponents (K,), in the dtype of the exponents; an expert whose exponent is 0 takes no part.
"""

import math
from functools import partial

import chex
import jax
import jax.numpy as jnp
from jax.scipy.special import gammaln, logsumexp
from jaxtyping import Array, Float, Key

from moe_jax.product_of_t.experts import (
    Experts,
    _solve,
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
_MAX_CHAINS = 1000
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

    Marsaglia and Tsang (2000) on the whole array at once, again until nothing is left of the one in
    thirty that each pass rejects. `jax.random.loggamma` runs a loop of its own for each element on
    CPU, at fifteen times the cost, which would be most of the cost of a fit.
    """
    dtype = concentration.dtype
    # Gamma(a) is Gamma(a + 1) V^(1/a), which avoids the small a where rejection fails.
    shape = jnp.where(concentration < 1, concentration + 1, concentration)
    third = shape - 1.0 / 3.0

    def propose(state: tuple) -> tuple:
        key, value, log_v, accepted = state
        key, normal_key, uniform_key = jax.random.split(key, 3)
        normal = jax.random.normal(normal_key, shape.shape, dtype)
        root = 1 + normal / (3.0 * jnp.sqrt(third))
        safe = jnp.where(root > 0, root, 1.0)
        log_cube = 3.0 * jnp.log(safe)
        bound = 0.5 * normal**2 + third * (1.0 - safe**3 + log_cube)
        log_uniform = jnp.log1p(-jax.random.uniform(uniform_key, shape.shape, dtype))
        good = (root > 0) & (log_uniform < bound)
        new = good & ~accepted
        value = jnp.where(new, jnp.log(third) + log_cube, value)
        # Below a bound that it met, the uniform is uniform again: V costs no further draw.
        log_v = jnp.where(new, log_uniform - jnp.minimum(bound, 0.0), log_v)
        return key, value, log_v, accepted | good

    # A shape that is no number accepts nothing: it gives no number, instead of a loop for ever.
    hopeless = ~jnp.isfinite(shape)
    first = jnp.where(hopeless, jnp.nan, jnp.zeros_like(shape))
    _, value, log_v, _ = jax.lax.while_loop(
        lambda state: ~jnp.all(state[3]), propose, (key, first, first, hopeless)
    )
    is_positive = concentration > 0
    boost = jnp.where(concentration < 1, log_v / jnp.where(is_positive, concentration, 1.0), 0.0)
    return jnp.where(concentration == 0, -jnp.inf, value + boost)


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
    log_gamma = log_gamma_draws(gamma_key, concentration).astype(exponents.dtype)
    rates = jnp.exp(log_gamma) / (1.0 + quadratics(experts, points))
    centre, cholesky = weighted_quadratic(experts, rates)
    normal = jax.random.normal(normal_key, points.shape, points.dtype) * math.sqrt(0.5)
    return centre + _solve(cholesky, normal, transpose=True)


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


@partial(jax.jit, static_argnums=(3, 4))
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
    total, dim = jnp.sum(exponents), experts.dim
    share = (exponents / total)[None]
    centre, cholesky, spread, _ = conditional_parameters(experts, exponents, share)
    freedom = jnp.minimum(2.0 * total - dim, _REFERENCE_DEGREES_OF_FREEDOM)
    precision = cholesky @ jnp.swapaxes(cholesky, -1, -2)
    precision = precision * ((2.0 * total - dim) / (freedom * spread))[:, None, None]
    reference = full_experts(centre, precision)
    everyone = join_experts(reference, experts)
    first = jnp.pad(0.5 * (freedom + dim)[None], (0, exponents.shape[0]))
    last = jnp.pad(exponents, (1, 0))

    start_key, key = jax.random.split(key)
    only = jnp.zeros((num_samples, 1), exponents.dtype)
    values, log_mass = _draw_conditionals(start_key, reference, first[:1], only)

    def step(state: tuple[Array, Array], inputs: tuple[Array, Array]) -> tuple:
        points, log_weights = state
        key, index = inputs
        before, after = (index / num_steps) ** 2, ((index + 1) / num_steps) ** 2
        log_d = log_factors(everyone, points)
        log_weights = log_weights - (after - before) * (log_d @ (last - first))
        points = gibbs_sweep(key, everyone, first + after * (last - first), points)
        return (points, log_weights), None

    steps = jnp.arange(num_steps).astype(exponents.dtype)
    keys = jax.random.split(key, num_steps)
    (values, log_weights), _ = jax.lax.scan(step, (values, log_mass), (keys, steps))
    return WeightedDraws(
        values=values, log_weights=log_weights, ess=effective_sample_size(log_weights)
    )


@partial(jax.jit, static_argnums=(3, 4))
def annealed_gibbs(
    key: Key[Array, ""],
    experts: Experts,
    exponents: Float[Array, " experts"],
    num_samples: int,
    num_steps: int,
) -> Float[Array, "samples dim"]:
    """Draws without weights: annealed, resampled, then moved by Gibbs sweeps.

    Asked for more draws than there are chains, each chain gives several, two sweeps apart.
    """
    chains = max(min(num_samples, _MAX_CHAINS), 1)
    rounds = -(-num_samples // chains) or 1
    anneal_key, resample_key, gibbs_key, order_key = jax.random.split(key, 4)
    # Resampling from few particles would repeat the luck of one of them.
    weighted = annealed_draws(anneal_key, experts, exponents, max(chains, 64), num_steps)
    start = resample(resample_key, weighted, chains)
    states = gibbs(gibbs_key, experts, exponents, start, 6 + 2 * rounds)[7::2]
    # Systematic resampling leaves the particles in order.
    draws = jax.random.permutation(order_key, states.reshape(-1, experts.dim))
    return draws[:num_samples]


def resample(
    key: Key[Array, ""], draws: WeightedDraws, num_samples: int
) -> Float[Array, "samples dim"]:
    """Unweighted points from weighted draws, by systematic resampling."""
    edges = jnp.cumsum(jax.nn.softmax(draws.log_weights))
    grid = jnp.arange(num_samples).astype(edges.dtype) + jax.random.uniform(key, (), edges.dtype)
    index = jnp.searchsorted(edges, grid / num_samples * edges[-1])
    return draws.values[jnp.minimum(index, draws.values.shape[0] - 1)]
