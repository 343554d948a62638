"""Products that the tests share, and their normalisers and moments by quadrature."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moe_jax.product_of_t import Experts, full_experts

# Two dimensions, four experts whose precisions do not commute, A = 4.5, nu = 7: moments of fourth
# order are finite, so that standard errors of second moments are.
LOC = np.array([[0.0, 0.0], [1.5, -0.5], [2.0, 2.5], [1.0, 1.0]])
PRECISION = np.array(
    [[[2.0, 0.6], [0.6, 0.5]], [[0.7, -0.2], [-0.2, 1.5]], [[1.0, 0.0], [0.0, 3.0]],
     [[0.4, 0.1], [0.1, 0.3]]]
)  # fmt: skip
EXPONENTS = np.array([1.2, 0.9, 0.8, 1.6])


class Moments(NamedTuple):
    """Log normaliser, mean [dim] and covariance [dim, dim]."""

    log_normalizer: float
    mean: np.ndarray
    covariance: np.ndarray


def example_experts() -> Experts:
    """The four experts, float64 under `jax.enable_x64`, else float32."""
    # Copies: JAX gives an array that it once traced back in the precision it had then.
    return full_experts(jnp.asarray(LOC.copy()), jnp.asarray(PRECISION.copy()))


def log_product(loc: np.ndarray, precision: np.ndarray, exponents: np.ndarray, z: np.ndarray):
    """-sum_k alpha_k log D_k(z) for z [n, dim], an expert at a time."""
    total = np.zeros(len(z))
    for mu, matrix, exponent in zip(loc, precision, exponents, strict=True):
        total -= exponent * np.log1p(np.sum((z - mu) @ matrix * (z - mu), axis=1))
    return total


def integrate(log_density, dim: int, width: float = 2.0, points: int = 800) -> Moments:
    """By the midpoint rule on a square that z = width tan(u) maps to the plane, or on a line.

    Smooth densities of algebraic tails make it converge fast: doubling `points` changes the fifth
    digit of the covariances of the example and the ninth of its normaliser.
    """
    u = (np.arange(points) + 0.5) / points * np.pi - np.pi / 2
    axis, slope = width * np.tan(u), width / np.cos(u) ** 2 * np.pi / points
    grid = np.stack(np.meshgrid(*[axis] * dim, indexing="ij"), axis=-1).reshape(-1, dim)
    log_cell = sum(np.meshgrid(*[np.log(slope)] * dim, indexing="ij")).ravel()
    logs = np.asarray(log_density(grid)) + log_cell
    top = logs.max()
    masses = np.exp(logs - top)
    total = masses.sum()
    masses /= total
    mean = masses @ grid
    # Cells at the ends have no mass but squares beyond any bound.
    covariance = ((grid - mean) * masses[:, None]).T @ (grid - mean)
    return Moments(float(top + np.log(total)), mean, covariance)


def example_moments() -> Moments:
    """Of the example product."""
    return integrate(lambda z: log_product(LOC, PRECISION, EXPONENTS, z), 2)


def in_double_precision(function, *args):
    """`function` of numpy arguments, computed in 64 bits and returned as numpy arrays."""
    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, function(*jax.tree.map(jnp.asarray, args)))
