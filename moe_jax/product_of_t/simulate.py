"""Targets of known density and exact draws: skew, heavy tails, curvature and several modes.

Every density is normalised, works in the dtype of its argument, and has a sampler that draws from
it independently and exactly, so that a fit is compared with the truth and not with another fit.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import betainc, logsumexp
from jaxtyping import Array, Float, Key

_LOG_2PI = float(np.log(2.0 * np.pi))


@dataclasses.dataclass(frozen=True)
class SyntheticTarget:
    """A density on R^dim.

    Attributes:
        name: what it is called in tables and figures.
        dim: number of coordinates.
        log_density: z [dim] -> log p(z), normalised.
        sample: (key, n) -> n independent draws [n, dim] in JAX's default float type.
    """

    name: str
    dim: int
    log_density: Callable[[Float[Array, " dim"]], Float[Array, ""]]
    sample: Callable[[Key[Array, ""], int], Float[Array, "draws dim"]]


def heavy_t(
    dim: int = 2, degrees_of_freedom: float = 3.0, correlation: float = 0.5
) -> SyntheticTarget:
    """Multivariate t with scale matrix of unit diagonal and correlation r^|i - j|."""
    factor = np.linalg.cholesky(_correlations(dim, correlation))
    log_det = float(np.log(np.diag(factor)).sum())

    def log_density(z: Float[Array, " dim"]) -> Float[Array, ""]:
        whitened = _solve(factor, z)
        return _log_t(whitened @ whitened, dim, degrees_of_freedom) - log_det

    def sample(key: Key[Array, ""], num_draws: int) -> Float[Array, "draws dim"]:
        normal_key, chi_key = jax.random.split(key)
        normals = _times(factor, jax.random.normal(normal_key, (num_draws, dim)))
        return normals / _root_chi_square(chi_key, degrees_of_freedom, num_draws)

    return SyntheticTarget("heavy_t", dim, log_density, sample)


def skew_t(
    dim: int = 2, degrees_of_freedom: float = 5.0, skewness: float = 3.0, correlation: float = 0.3
) -> SyntheticTarget:
    """Skew t of Azzalini and Capitanio (2003), equation 26, with equal slants.

    p(z) = 2 t_nu(z; 0, Omega) T_{nu + D}(a'z sqrt((nu + D) / (nu + z' Omega^-1 z))), where t and T
    are the density and the distribution function of Student's t, Omega has correlation r^|i - j|,
    and a = skewness / sqrt(D) in every coordinate.
    """
    matrix = _correlations(dim, correlation)
    factor = np.linalg.cholesky(matrix)
    log_det = float(np.log(np.diag(factor)).sum())
    slant = np.full(dim, skewness / np.sqrt(dim))
    delta = matrix @ slant / np.sqrt(1.0 + slant @ matrix @ slant)
    joint = np.block([[np.ones((1, 1)), delta[None]], [delta[:, None], matrix]])
    joint_factor = np.linalg.cholesky(joint)

    def log_density(z: Float[Array, " dim"]) -> Float[Array, ""]:
        whitened = _solve(factor, z)
        quadratic = whitened @ whitened
        root = jnp.sqrt((degrees_of_freedom + dim) / (degrees_of_freedom + quadratic))
        tilt = _log_t_cdf(degrees_of_freedom + dim, jnp.asarray(slant, z.dtype) @ z * root)
        return math.log(2.0) + _log_t(quadratic, dim, degrees_of_freedom) - log_det + tilt

    def sample(key: Key[Array, ""], num_draws: int) -> Float[Array, "draws dim"]:
        normal_key, chi_key = jax.random.split(key)
        normals = _times(joint_factor, jax.random.normal(normal_key, (num_draws, dim + 1)))
        skewed = jnp.where(normals[:, :1] > 0, normals[:, 1:], -normals[:, 1:])
        return skewed / _root_chi_square(chi_key, degrees_of_freedom, num_draws)

    return SyntheticTarget("skew_t", dim, log_density, sample)


def sinh_arcsinh(
    dim: int = 2, skewness: float = 0.3, tail: float = 0.7, correlation: float = 0.0
) -> SyntheticTarget:
    """Sinh-arcsinh normal (Jones and Pewsey 2009): z = sinh((asinh(y) + eps) / tau), y normal.

    The normals have unit variances and correlation r^|i - j|. eps > 0 skews to the right, tau < 1
    makes the tails heavier than normal.
    """
    factor = np.linalg.cholesky(_correlations(dim, correlation))
    log_det = float(np.log(np.diag(factor)).sum())

    def log_density(z: Float[Array, " dim"]) -> Float[Array, ""]:
        inner = tail * jnp.arcsinh(z) - skewness
        whitened = _solve(factor, jnp.sinh(inner))
        # log of dy/dz = tau cosh(tau asinh(z) - eps) / sqrt(1 + z^2), without overflow of cosh.
        log_cosh = jnp.logaddexp(inner, -inner) - math.log(2.0)
        log_slope = math.log(tail) + log_cosh - 0.5 * jnp.log1p(z * z)
        return _log_normal(whitened) - log_det + log_slope.sum()

    def sample(key: Key[Array, ""], num_draws: int) -> Float[Array, "draws dim"]:
        normals = _times(factor, jax.random.normal(key, (num_draws, dim)))
        return jnp.sinh((jnp.arcsinh(normals) + skewness) / tail)

    return SyntheticTarget("sinh_arcsinh", dim, log_density, sample)


def banana(dim: int = 2, width: float = 1.5, curvature: float = 0.5) -> SyntheticTarget:
    """z_1 ~ N(0, s^2), z_2 ~ N(c (z_1^2 - s^2), 1), and standard normals after them."""
    _check_dim("banana", dim)

    def log_density(z: Float[Array, " dim"]) -> Float[Array, ""]:
        bend = curvature * (z[0] ** 2 - width**2)
        straight = z.at[0].divide(width).at[1].add(-bend)
        return _log_normal(straight) - math.log(width)

    def sample(key: Key[Array, ""], num_draws: int) -> Float[Array, "draws dim"]:
        normals = jax.random.normal(key, (num_draws, dim)).at[:, 0].multiply(width)
        return normals.at[:, 1].add(curvature * (normals[:, 0] ** 2 - width**2))

    return SyntheticTarget("banana", dim, log_density, sample)


def funnel(dim: int = 2, width: float = 1.2) -> SyntheticTarget:
    """Neal's funnel (2003): z_1 ~ N(0, s^2), the others N(0, exp(z_1)) given it."""
    _check_dim("funnel", dim)

    def log_density(z: Float[Array, " dim"]) -> Float[Array, ""]:
        straight = z * jnp.exp(-0.5 * z[0])
        straight = straight.at[0].set(z[0] / width)
        return _log_normal(straight) - math.log(width) - 0.5 * (dim - 1) * z[0]

    def sample(key: Key[Array, ""], num_draws: int) -> Float[Array, "draws dim"]:
        normals = jax.random.normal(key, (num_draws, dim))
        first = width * normals[:, :1]
        return jnp.concatenate([first, normals[:, 1:] * jnp.exp(0.5 * first)], axis=1)

    return SyntheticTarget("funnel", dim, log_density, sample)


def gaussian_mixture(
    means: Float[np.ndarray, "modes dim"],
    covariances: Float[np.ndarray, "modes dim dim"],
    weights: Float[np.ndarray, " modes"],
    name: str = "gaussian_mixture",
) -> SyntheticTarget:
    """Mixture of Gaussians.

    Raises:
        ValueError: if the weights are not positive or do not sum to 1.
    """
    if np.any(weights <= 0) or abs(weights.sum() - 1.0) > 1e-9:
        raise ValueError(f"weights={weights.tolist()} must be positive and sum to 1")
    factors = np.linalg.cholesky(covariances)
    inverses = np.linalg.inv(factors)
    log_scales = np.log(weights) + np.log(np.diagonal(inverses, axis1=1, axis2=2)).sum(axis=1)
    dim = means.shape[1]

    def log_density(z: Float[Array, " dim"]) -> Float[Array, ""]:
        centred = z[None] - jnp.asarray(means, z.dtype)
        whitened = jnp.einsum("kij,kj->ki", jnp.asarray(inverses, z.dtype), centred)
        squares = jnp.square(whitened).sum(axis=1)
        logs = jnp.asarray(log_scales, z.dtype) - 0.5 * squares
        return logsumexp(logs) - 0.5 * dim * _LOG_2PI

    def sample(key: Key[Array, ""], num_draws: int) -> Float[Array, "draws dim"]:
        mode_key, normal_key = jax.random.split(key)
        modes = jax.random.choice(mode_key, len(weights), (num_draws,), p=jnp.asarray(weights))
        normals = jax.random.normal(normal_key, (num_draws, dim))
        shifted = jnp.einsum("nij,nj->ni", jnp.asarray(factors, normals.dtype)[modes], normals)
        return shifted + jnp.asarray(means, normals.dtype)[modes]

    return SyntheticTarget(name, dim, log_density, sample)


def cross(dim: int = 2, distance: float = 2.0, width: float = 0.4) -> SyntheticTarget:
    """Four elongated Gaussians that form a cross in the first two coordinates.

    Two, at +-distance on the first axis, have standard deviations 1 along it and `width` across;
    two on the second axis likewise. The other coordinates are standard normals.
    """
    _check_dim("cross", dim)
    means, variances = np.zeros((4, dim)), np.ones((4, dim))
    means[[0, 1], 0] = (distance, -distance)
    means[[2, 3], 1] = (distance, -distance)
    variances[:2, 1] = variances[2:, 0] = width**2
    covariances = np.eye(dim) * variances[:, None]
    return gaussian_mixture(means, covariances, np.full(4, 0.25), "cross")


def two_modes(dim: int = 2, distance: float = 2.0) -> SyntheticTarget:
    """Two equal Gaussians at +-distance on the first axis, correlated with opposite signs.

    The first two coordinates have variance 0.6 and covariance +-0.3, the others are standard.
    """
    _check_dim("two_modes", dim)
    means, covariances = np.zeros((2, dim)), np.tile(np.eye(dim), (2, 1, 1))
    for mode, sign in enumerate((-1.0, 1.0)):
        means[mode, 0] = sign * distance
        covariances[mode, :2, :2] = [[0.6, -0.3 * sign], [-0.3 * sign, 0.6]]
    return gaussian_mixture(means, covariances, np.full(2, 0.5), "two_modes")


def three_modes(dim: int = 2) -> SyntheticTarget:
    """Three overlapping Gaussians of unequal weight, standard normal in all further coordinates."""
    _check_dim("three_modes", dim)
    means, covariances = np.zeros((3, dim)), np.tile(np.eye(dim), (3, 1, 1))
    means[:, :2] = [(-1.0, 1.0), (1.1, 1.1), (-1.0, -1.0)]
    covariances[0, :2, :2] *= 0.5
    return gaussian_mixture(means, covariances, np.array([0.4, 0.3, 0.3]), "three_modes")


def four_modes(dim: int = 2, distance: float = 2.5) -> SyntheticTarget:
    """Four round Gaussians of weights 0.4 to 0.1 on the corners of a square of half-diagonal d."""
    _check_dim("four_modes", dim)
    means, covariances = np.zeros((4, dim)), np.tile(np.eye(dim), (4, 1, 1))
    means[:, :2] = distance * np.array([(1.0, 0.0), (0.0, 1.0), (-1.0, 0.0), (0.0, -1.0)])
    covariances[:, [0, 1], [0, 1]] = 0.5
    return gaussian_mixture(means, covariances, np.array([0.4, 0.3, 0.2, 0.1]), "four_modes")


SYNTHETIC: dict[str, Callable[..., SyntheticTarget]] = {
    "heavy_t": heavy_t,
    "skew_t": skew_t,
    "sinh_arcsinh": sinh_arcsinh,
    "banana": banana,
    "funnel": funnel,
    "cross": cross,
    "two_modes": two_modes,
    "three_modes": three_modes,
    "four_modes": four_modes,
}


def _check_dim(name: str, dim: int) -> None:
    if dim < 2:
        raise ValueError(f"dim={dim} of {name} must be at least 2")


def _correlations(dim: int, correlation: float) -> np.ndarray:
    if dim < 1:
        raise ValueError(f"dim={dim} must be at least 1")
    if not -1 < correlation < 1:
        raise ValueError(f"correlation={correlation} must lie between -1 and 1")
    index = np.arange(dim)
    return correlation ** np.abs(index[:, None] - index[None])


def _solve(factor: np.ndarray, z: jax.Array) -> jax.Array:
    return jax.scipy.linalg.solve_triangular(jnp.asarray(factor, z.dtype), z, lower=True)


def _times(factor: np.ndarray, rows: jax.Array) -> jax.Array:
    return rows @ jnp.asarray(factor, rows.dtype).T


def _root_chi_square(key: jax.Array, degrees_of_freedom: float, num_draws: int) -> jax.Array:
    """Square roots of chi-square / degrees of freedom, [num_draws, 1]."""
    gammas = jax.random.gamma(key, 0.5 * degrees_of_freedom, (num_draws, 1))
    return jnp.sqrt(gammas / (0.5 * degrees_of_freedom))


def _log_normal(z: jax.Array) -> jax.Array:
    return -0.5 * (z @ z) - 0.5 * z.shape[0] * _LOG_2PI


def _log_t(quadratic: jax.Array, dim: int, nu: float) -> jax.Array:
    half = 0.5 * (nu + dim)
    constant = math.lgamma(half) - math.lgamma(0.5 * nu) - 0.5 * dim * math.log(nu * math.pi)
    return constant - half * jnp.log1p(quadratic / nu)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _log_t_cdf(nu: float, x: jax.Array) -> jax.Array:
    """Log distribution function of Student's t; exact derivatives where betainc's are 0 * inf."""
    tail = betainc(0.5 * nu, 0.5, nu / (nu + x * x))
    return jnp.where(x < 0, jnp.log(tail) - math.log(2.0), jnp.log1p(-0.5 * tail))


@_log_t_cdf.defjvp
def _log_t_cdf_jvp(
    nu: float, primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    (x,), (dx,) = primals, tangents
    value = _log_t_cdf(nu, x)
    return value, jnp.exp(_log_t(x * x, 1, nu) - value) * dx
