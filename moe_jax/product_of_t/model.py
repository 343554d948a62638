"""A product of t-experts as a numpyro distribution.

    q(z) = prod_k D_k(z)^(-alpha_k) / C(alpha),    D_k(z) = 1 + (z - mu_k)' Lambda_k (z - mu_k)

with exponents alpha_k >= 0. It is proper if 2 A > D, where A = sum_k alpha_k over experts whose
Lambda_k is positive definite; one such expert is a multivariate t with nu = 2 A - D. Products have
skew, heavy tails and several modes; the score is linear in alpha.

Feynman's identity prod_k D_k^(-alpha_k) = E_{w ~ Dirichlet(alpha)} (sum_k w_k D_k)^(-A) makes q a
mixture over the simplex: z | w is a multivariate t with centre m(w) and nu = 2 A - D, and w has the
density Dirichlet(w; alpha) C_alpha(w) / C(alpha) (`samplers.conditional_parameters`).

Reference: Cai, Gower, Blei, Saul 2025, "Fisher meets Feynman" (arXiv 2510.21598), sections 2 and 3.
"""

import math
from collections.abc import Callable
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import gammaln, logsumexp
from jaxtyping import Array, Float, Key
from numpyro.distributions import Distribution, MultivariateStudentT, constraints

from moe_jax.product_of_t import samplers
from moe_jax.product_of_t.experts import Experts, expert_scores, log_factors

# Below this share of the draws the mixture proposal is no basis for a normaliser.
_GOOD_ESS = 0.3
_METHODS = ("auto", "dirichlet", "mixture", "annealed")


class LogNormalizer(NamedTuple):
    """Estimate of log C.

    Attributes:
        value: log of the mean weight.
        standard_error: of the value, by the delta method: sqrt(1 / ess - 1 / draws).
        ess: effective sample size as a share of the draws.
    """

    value: Float[Array, ""]
    standard_error: Float[Array, ""]
    ess: Float[Array, ""]


class Estimate(NamedTuple):
    """Self-normalised estimate of an expectation.

    Attributes:
        mean: sum_i w_i f(z_i) / sum_i w_i.
        standard_error: sqrt(sum_i w_i^2 (f(z_i) - mean)^2) / sum_i w_i.
        ess: effective sample size as a share of the draws.
    """

    mean: Array
    standard_error: Array
    ess: Float[Array, ""]


class ProductOfT(Distribution):
    """The density proportional to prod_k D_k(z)^(-exponents_k).

    Example:
        >>> centres = jnp.array([[-2.0, 0.0], [2.0, 0.0]])
        >>> experts = full_experts(centres, jnp.stack([jnp.eye(2)] * 2))
        >>> q = ProductOfT(experts, jnp.array([1.5, 1.5])).normalized(jax.random.key(0))
        >>> draws = q.sample(jax.random.key(1), (1000,))
        >>> log_density = q.log_prob(draws)

    Args:
        experts: K experts in D dimensions, see `experts.full_experts` and its siblings.
        exponents: alpha, of shape (K,); 0 takes an expert out.
        log_normalizer: log C if it is known. For a single expert it always is. Without it,
            `log_prob` estimates it in each call, always from the same key; see `normalized`.
        log_normalizer_error: standard error of `log_normalizer`.
        warmup_sweeps: steps of annealing before `sample` keeps a draw.
        validate_args: whether numpyro checks arguments.

    Raises:
        ValueError: if the shapes disagree, an exponent is negative or not finite, or the exponents
            of the positive definite experts do not sum to more than D / 2. That is sufficient for
            q to be proper, and necessary where all experts are positive definite.
    """

    arg_constraints = {"exponents": constraints.independent(constraints.nonnegative, 1)}
    support = constraints.real_vector
    pytree_data_fields = ("experts", "exponents", "log_normalizer", "log_normalizer_error")
    pytree_aux_fields = ("warmup_sweeps",)

    def __init__(
        self,
        experts: Experts,
        exponents: Float[Array, " experts"] | Float[np.ndarray, " experts"],
        *,
        log_normalizer: Float[Array, ""] | Float[np.ndarray, ""] | float | None = None,
        log_normalizer_error: Float[Array, ""] | Float[np.ndarray, ""] | float | None = None,
        warmup_sweeps: int = 64,
        validate_args: bool | None = None,
    ) -> None:
        if exponents.shape != (experts.num_experts,):
            raise ValueError(
                f"exponents of shape {exponents.shape}: expected ({experts.num_experts},), one an "
                "expert"
            )
        self.experts = experts
        # A numpy array keeps its digits until it is used in a mode of 64 bits.
        self.exponents = cast(Array, exponents)
        if not isinstance(exponents, jax.core.Tracer):
            _check_exponents(experts, np.asarray(exponents))
        self.warmup_sweeps = warmup_sweeps
        if log_normalizer is None and experts.full_loc.shape[0] == experts.num_experts == 1:
            log_normalizer, log_normalizer_error = _log_normalizer_of_one(experts, exponents)
        self.log_normalizer = log_normalizer
        self.log_normalizer_error = log_normalizer_error
        super().__init__((), (experts.dim,), validate_args=validate_args)

    @property
    def degrees_of_freedom(self) -> Float[Array, ""]:
        """Nu = 2 A - D of z | w; E |z|^p is finite for p < nu if no expert is rank-deficient."""
        return 2.0 * jnp.sum(self.exponents) - self.experts.dim

    def unnormalized_log_prob(self, value: Float[Array, "*batch dim"]) -> Float[Array, "*batch"]:
        """-sum_k alpha_k log D_k(z)."""
        log_d = log_factors(self.experts, value.reshape(-1, self.experts.dim))
        return -(log_d @ self.exponents).reshape(value.shape[:-1])

    def log_prob(self, value: Float[Array, "*batch dim"]) -> Float[Array, "*batch"]:
        """-sum_k alpha_k log D_k(z) - log C; the error of log C is `log_normalizer_error`."""
        log_normalizer = self.log_normalizer
        if log_normalizer is None:
            log_normalizer = self.estimate_log_normalizer(jax.random.key(0)).value
        return self.unnormalized_log_prob(value) - log_normalizer

    def score(self, value: Float[Array, "*batch dim"]) -> Float[Array, "*batch dim"]:
        """Grad log q(z) = -sum_k alpha_k 2 Lambda_k (z - mu_k) / D_k(z)."""
        scores, _ = expert_scores(self.experts, value.reshape(-1, self.experts.dim))
        return jnp.tensordot(self.exponents, scores, axes=1).T.reshape(value.shape)

    def normalized(self, key: Key[Array, ""], num_samples: int = 4096) -> "ProductOfT":
        """The same product with log C estimated once, from `num_samples` draws."""
        estimate = self.estimate_log_normalizer(key, num_samples)
        return ProductOfT(
            self.experts,
            self.exponents,
            log_normalizer=estimate.value,
            log_normalizer_error=estimate.standard_error,
            warmup_sweeps=self.warmup_sweeps,
        )

    def estimate_log_normalizer(
        self, key: Key[Array, ""], num_samples: int = 4096, method: str = "auto"
    ) -> LogNormalizer:
        """Log C by importance sampling.

        Args:
            key: for the draws.
            num_samples: number of draws.
            method: "dirichlet", the paper's; "mixture", of scaled Dirichlets about Gibbs draws;
                "annealed", from one t to q in as many steps as there are warm-up sweeps; or "auto",
                mixture unless its ESS is below 0.3 of the draws, then annealed with 4 times the
                steps. "auto" cannot be called under `jit`.

        Raises:
            ValueError: if `method` is none of these.
        """
        if method not in _METHODS:
            raise ValueError(f"method={method!r}: expected one of {_METHODS}")
        if method == "annealed":
            return log_mean_weight(self._annealed(key, num_samples, self.warmup_sweeps))
        if method == "auto":
            centre_key, key = jax.random.split(key)
            return self.log_normalizer_about(
                key, self.sample(centre_key, (samplers.CENTRES,)), num_samples
            )
        return log_mean_weight(self.weighted_sample(key, num_samples, method))

    def log_normalizer_about(
        self, key: Key[Array, ""], draws: Float[Array, "centres dim"], num_samples: int = 4096
    ) -> LogNormalizer:
        """`estimate_log_normalizer` with method "auto", given draws of q as centres."""
        weighted = samplers.mixture_draws(key, self.experts, self.exponents, draws, num_samples)
        estimate = log_mean_weight(weighted)
        if estimate.ess < _GOOD_ESS:
            return log_mean_weight(self._annealed(key, num_samples, 4 * self.warmup_sweeps))
        return estimate

    def conditional(self, weights: Float[Array, "*batch experts"]) -> MultivariateStudentT:
        """Z | w for points w of the simplex: a multivariate t with nu = 2 A - D, exactly."""
        flat = weights.reshape(-1, weights.shape[-1])
        centre, cholesky, spread, _ = samplers.conditional_parameters(
            self.experts, self.exponents, flat
        )
        # The scale matrix is Lambda(w)^-1 s / nu.
        eye = jnp.broadcast_to(jnp.eye(self.experts.dim, dtype=centre.dtype), cholesky.shape)
        inverse = jax.lax.linalg.triangular_solve(cholesky, eye, left_side=True, lower=True)
        scale = jnp.swapaxes(inverse, -1, -2) @ inverse
        scale = scale * (spread / self.degrees_of_freedom)[:, None, None]
        shape = weights.shape[:-1]
        return MultivariateStudentT(
            jnp.broadcast_to(self.degrees_of_freedom, shape),
            centre.reshape(*shape, -1),
            jnp.linalg.cholesky(scale).reshape(*shape, *scale.shape[1:]),
        )

    def weighted_sample(
        self, key: Key[Array, ""], num_samples: int, method: str = "mixture"
    ) -> samplers.WeightedDraws:
        """Independent draws w, z | w with importance weights; `ess` says what they are worth.

        Args:
            key: for the draws.
            num_samples: number of draws.
            method: "dirichlet", the paper's, whose ESS falls fast with the distance between
                experts, or "mixture", the same identity with w proposed about Gibbs draws.

        Raises:
            ValueError: if `method` is neither.
        """
        if method == "dirichlet":
            return samplers.dirichlet_draws(key, self.experts, self.exponents, num_samples)
        if method != "mixture":
            raise ValueError(f"method={method!r}: expected 'dirichlet' or 'mixture'")
        centre_key, draw_key = jax.random.split(key)
        centres = self.sample(centre_key, (samplers.CENTRES,))
        return samplers.mixture_draws(draw_key, self.experts, self.exponents, centres, num_samples)

    def gibbs(
        self, key: Key[Array, ""], start: Float[Array, "chains dim"], num_sweeps: int
    ) -> Float[Array, "sweeps chains dim"]:
        """States of independent Gibbs chains after each sweep; q is their invariant density."""
        return samplers.gibbs(key, self.experts, self.exponents, start, num_sweeps)

    def sample(
        self, key: Key[Array, ""], sample_shape: tuple[int, ...] = ()
    ) -> Float[Array, "*batch dim"]:
        """Draws without weights: annealed, resampled, then moved by Gibbs sweeps.

        At most 4,000 chains run; asked for more draws, each chain gives several, two sweeps apart.
        The annealing gives modes far apart their masses, which single chains would be slow to.
        """
        count = math.prod(sample_shape)
        draws, _ = samplers.annealed_gibbs(
            key, self.experts, self.exponents, count, self.warmup_sweeps
        )
        return draws.reshape(*sample_shape, self.experts.dim)

    def expectation(
        self,
        key: Key[Array, ""],
        function: Callable[[Array], Array],
        num_samples: int = 4096,
        method: str = "mixture",
    ) -> Estimate:
        """E_q f(z), self-normalised, from `weighted_sample`.

        Args:
            key: for the draws.
            function: maps one point (D,) to an array.
            num_samples: number of draws.
            method: as in `weighted_sample`.
        """
        draws = self.weighted_sample(key, num_samples, method)
        weights = jax.nn.softmax(draws.log_weights)
        values = jax.vmap(function)(draws.values)
        mean = jnp.tensordot(weights, values, axes=1)
        squares = jnp.tensordot(weights**2, (values - mean[None]) ** 2, axes=1)
        return Estimate(mean, jnp.sqrt(squares), draws.ess / num_samples)

    def _annealed(self, key: Array, num_samples: int, num_steps: int) -> samplers.WeightedDraws:
        return samplers.annealed_draws(key, self.experts, self.exponents, num_samples, num_steps)


@jax.jit
def log_mean_weight(draws: samplers.WeightedDraws) -> LogNormalizer:
    """Log C from weighted draws."""
    count = draws.log_weights.shape[0]
    value = logsumexp(draws.log_weights) - math.log(count)
    variance = jnp.maximum(1.0 / draws.ess - 1.0 / count, 0.0)
    return LogNormalizer(value, jnp.sqrt(variance), draws.ess / count)


def _log_normalizer_of_one(experts: Experts, exponents: Array | np.ndarray) -> tuple[Array, Array]:
    """Log of C = pi^(D/2) Gamma(a - D/2) / (Gamma(a) |Lambda|^(1/2)) of one t, and its error, 0."""
    (exponent,) = exponents
    half = 0.5 * experts.dim
    cholesky = jnp.linalg.cholesky(experts.full_precision[0])
    log_determinant = jnp.sum(jnp.log(jnp.diagonal(cholesky)))
    value = half * math.log(math.pi) + gammaln(exponent - half) - gammaln(exponent)
    return value - log_determinant, jnp.zeros_like(value)


def _check_exponents(experts: Experts, exponents: np.ndarray) -> None:
    if not np.all(np.isfinite(exponents)) or np.any(exponents < 0):
        raise ValueError(f"exponents={exponents}: expected finite numbers >= 0")
    total = float(exponents @ np.asarray(experts.is_full_rank))
    if not total > 0.5 * experts.dim:
        raise ValueError(
            f"the exponents of positive definite experts sum to {total:.6g}: expected more than "
            f"D / 2 = {0.5 * experts.dim}, or the product may not be integrable"
        )
