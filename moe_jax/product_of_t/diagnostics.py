"""What tells whether a fitted product is to be trusted: tails of p / q, sample sizes, a history."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

# Above this shape the importance weights have no finite moment that averages could rely on.
MAX_PARETO_K = 0.7
# Ratios that differ by less than this share of the largest are equal for every purpose: the shape
# of their tail is that of nothing.
_EQUAL = 1e-3
# Means in standard deviations, and deviations relative to themselves, are right to this.
MAX_GAP = 0.1
# Fewer effective draws than this say nothing about an expectation.
MIN_ESS = 100.0


@chex.dataclass(frozen=True)
class History:
    """One entry an iteration, of all rounds one after the other.

    Attributes:
        round: number of the round, from 0.
        fisher_divergence: weighted mean of |grad log p - grad log q|^2 over the batch, for the q
            that drew it, in whitened coordinates.
        ess: effective sample size of the batch's weights.
        num_active: experts with an exponent above 1e-6 of the sum after the update.
        exponent_sum: A after the update.
        pareto_k: k-hat of p / q over the batch; see `pareto_smooth`. It is rough at batch size.
        num_nonfinite: samples at which log p or its gradient was not finite; they get no weight.
        kkt_residual: of the quadratic programme.
        score_evaluations: gradients of log p taken so far, warm-up and choice of experts included.
        exponents: alpha after the update.
    """

    round: np.ndarray
    fisher_divergence: np.ndarray
    ess: np.ndarray
    num_active: np.ndarray
    exponent_sum: np.ndarray
    pareto_k: np.ndarray
    num_nonfinite: np.ndarray
    kkt_residual: np.ndarray
    score_evaluations: np.ndarray
    exponents: np.ndarray


@jax.jit
def pareto_smooth(
    log_ratios: Float[Array, " draws"],
) -> tuple[Float[Array, " draws"], Float[Array, ""]]:
    """Pareto-smoothed importance sampling.

    The largest min(0.2 n, 3 sqrt n) ratios are replaced by quantiles of the generalised Pareto
    distribution fitted to them by Zhang and Stephens' (2009) method, none above the largest ratio.

    Args:
        log_ratios: log p - log q up to a constant at draws of q. Not finite means no weight.

    Returns:
        Normalised log weights, and k-hat: below 0.7 weighted means are reliable; -1 where the
        largest ratios differ by less than a thousandth, infinite where fewer than 5 draws make the
        tail.

    Reference: Vehtari et al. 2024, "Pareto smoothed importance sampling" (arXiv 1507.02646).
    """
    count = log_ratios.shape[0]
    tail = min(count // 5, int(np.ceil(3.0 * np.sqrt(count))))
    usable = jnp.where(jnp.isfinite(log_ratios), log_ratios, -jnp.inf)
    top = jnp.max(usable)
    usable = usable - jnp.where(jnp.isfinite(top), top, 0.0)
    if tail < 5:
        return jax.nn.log_softmax(usable), jnp.asarray(jnp.inf, usable.dtype)
    order = jnp.argsort(usable)
    cutoff = usable[order[count - tail - 1]]
    excess = jnp.exp(usable[order[count - tail :]]) - jnp.exp(cutoff)
    flat = excess[-1] <= _EQUAL
    # Ties at the cutoff leave zeros, which the fit's logarithms do not mind but its quartile does.
    excess = jnp.where(flat, jnp.linspace(0.1, 1.0, tail, dtype=usable.dtype), excess)
    shape, scale = _fit_generalized_pareto(jnp.maximum(excess, 1e-12 * excess[-1]))
    level = (jnp.arange(tail).astype(usable.dtype) + 0.5) / tail
    safe = jnp.where(jnp.abs(shape) < 1e-8, 1e-8, shape)
    quantile = scale * jnp.expm1(-safe * jnp.log1p(-level)) / safe
    smooth = jnp.minimum(jnp.log(quantile + jnp.exp(cutoff)), 0.0)
    smooth = jnp.where(jnp.isfinite(smooth), smooth, usable[order[count - tail :]])
    smoothed = usable.at[order[count - tail :]].set(
        jnp.where(flat, usable[order[count - tail :]], smooth)
    )
    pareto_k = jnp.where(flat, -1.0, shape)
    pareto_k = jnp.where(jnp.isfinite(top), pareto_k, jnp.inf)
    return jax.nn.log_softmax(smoothed), pareto_k


def _fit_generalized_pareto(excess: Array) -> tuple[Array, Array]:
    """Shape k and scale from ascending positive values, k shrunk to 0.5 as by ten observations."""
    count = excess.shape[0]
    size = 30 + int(np.sqrt(count))
    quartile = excess[int(count / 4 + 0.5) - 1]
    grid = 1.0 - jnp.sqrt(size / (jnp.arange(1, size + 1).astype(excess.dtype) - 0.5))
    grid = grid / (3.0 * quartile) + 1.0 / excess[-1]
    shapes = jnp.mean(jnp.log1p(-grid[:, None] * excess[None]), axis=1)
    profile = count * (jnp.log(-grid / shapes) - shapes - 1.0)
    profile = jnp.where(jnp.isfinite(profile), profile, -jnp.inf)
    centre = jnp.dot(jax.nn.softmax(profile), grid)
    shape = jnp.mean(jnp.log1p(-centre * excess))
    return (count * shape + 5.0) / (count + 10.0), -shape / centre


def trust_warnings(
    *,
    pareto_k: float,
    pool_pareto_k: float,
    ess: float,
    num_draws: int,
    degrees_of_freedom: float,
    normalizer_error: float,
    mean_gap: float,
    deviation_gap: float,
    num_nonfinite: int,
    num_runaway: int,
) -> tuple[str, ...]:
    """Sentences on what makes the answer doubtful; empty if nothing does.

    Args:
        pareto_k: of p / q at draws of q.
        pool_pareto_k: of the pool's weights.
        ess: effective sample size of the smoothed weights p / q.
        num_draws: number of those draws.
        degrees_of_freedom: nu of q.
        normalizer_error: standard error of log C.
        mean_gap: of q's means from the pool's, in standard deviations.
        deviation_gap: of q's deviations from the pool's, relative.
        num_nonfinite: draws at which log p or its gradient was not finite, of all iterations.
        num_runaway: iterations whose samples lay out at an absurd distance.
    """
    found = []
    if not pareto_k < MAX_PARETO_K:
        found.append(
            f"Pareto k-hat of p / q is {pareto_k:.2f}, not below {MAX_PARETO_K}: q misses a part "
            "of the target, and neither its moments nor its weighted ones are to be trusted; "
            f"result.pool's, of k-hat {pool_pareto_k:.2f}, are if that is below {MAX_PARETO_K}"
        )
    if not ess >= min(MIN_ESS, 0.5 * num_draws):
        found.append(
            f"the weights p / q have an effective sample size of {ess:.0f} of {num_draws} draws: "
            "q is far from the target"
        )
    if not (mean_gap <= MAX_GAP and deviation_gap <= MAX_GAP):
        found.append(
            f"q's means differ by {mean_gap:.2f} standard deviations and its deviations by "
            f"{deviation_gap:.0%} from those that weights give: take result.pool's"
        )
    if degrees_of_freedom <= 2.0:
        found.append(
            f"q has {degrees_of_freedom:.2f} degrees of freedom: its covariance is infinite or "
            "nearly so; the target may be improper or have tails as heavy"
        )
    if normalizer_error > 0.5:
        found.append(f"log C is uncertain by {normalizer_error:.2f}: so are log q and the evidence")
    if num_runaway:
        found.append(
            f"samples ran away in {num_runaway} iterations: the target is improper, or unbounded"
        )
    if num_nonfinite:
        found.append(
            f"log p or its gradient was not finite at {num_nonfinite} samples, which got no weight"
        )
    return tuple(found)
