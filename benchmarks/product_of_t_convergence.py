"""How fast the exponents reach a target in the family of the given experts, and one outside it."""

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moe_jax.product_of_t import Experts, ProductOfT, fit_product_of_t, full_experts
from moe_jax.product_of_t.settings import PAPER
from moe_jax.product_of_t.simulate import sinh_arcsinh

DIM, NUM_EXPERTS, ITERATIONS = 3, 8, 60
RATES = (1.0, 10.0, 100.0)
BATCH_SIZES = (64, 256, 1024)
TRUTH = np.array([1.5, 0.7, 0.4, 0.3, 0.8, 0.5, 0.2, 0.6])
# Below this the error is rounding; above, its logarithm is fitted by a line.
ROUNDING = 1e-10
# The paper's quadratic proximal term and constant step, samples from Gibbs chains.
SETTINGS = dataclasses.replace(
    PAPER, sampler="gibbs", sweeps=2, iterations=ITERATIONS, num_draws=500
)


def run_convergence(keys: Sequence[jax.Array]) -> dict[str, Any]:
    """Errors |alpha_t - alpha*| by step size (target in the family) and batch size (outside it)."""
    experts = _experts()
    with jax.enable_x64(True):
        truth = ProductOfT(experts, jnp.asarray(TRUTH))
    inside = truth.unnormalized_log_prob
    outside = sinh_arcsinh(DIM).log_density
    found: dict[str, Any] = {"in_family": {}, "outside": {}}
    for rate in RATES:
        settings = dataclasses.replace(SETTINGS, learning_rate=rate)
        paths = [_path(key, inside, experts, settings) for key in keys]
        errors = np.linalg.norm(np.array(paths) - TRUTH, axis=-1)
        rates = [contraction(error) for error in errors]
        found["in_family"][str(rate)] = {"errors": errors.tolist(), "rates": rates}
    # The minimiser of the divergence outside the family is not known; that of the largest batch,
    # averaged, stands in for it.
    large = dataclasses.replace(SETTINGS, learning_rate=10.0, batch_size=16_384)
    best = np.mean([_path(key, outside, experts, large)[20:].mean(axis=0) for key in keys], axis=0)
    for batch_size in BATCH_SIZES:
        settings = dataclasses.replace(large, batch_size=batch_size)
        paths = [_path(key, outside, experts, settings) for key in keys]
        errors = np.linalg.norm(np.array(paths) - best, axis=-1)
        floor = float(np.sqrt(np.mean(errors[:, 20:] ** 2)))
        found["outside"][str(batch_size)] = {"errors": errors.tolist(), "floor": floor}
    return found


def contraction(errors: np.ndarray) -> float:
    """Factor by which the error shrinks an iteration, by least squares on its logarithm."""
    count = int(np.argmax(errors < ROUNDING)) or len(errors)
    if count < 3:
        return 0.0
    return float(np.exp(np.polyfit(np.arange(count), np.log(errors[:count]), 1)[0]))


def _experts() -> Experts:
    rng = np.random.default_rng(3)
    loc = rng.normal(size=(NUM_EXPERTS, DIM))
    roots = rng.normal(size=(NUM_EXPERTS, DIM, DIM))
    precision = roots @ np.swapaxes(roots, 1, 2) / DIM + 0.3 * np.eye(DIM)
    with jax.enable_x64(True):
        return full_experts(jnp.asarray(loc), jnp.asarray(precision))


def _path(key: jax.Array, log_density: Any, experts: Experts, settings: Any) -> np.ndarray:
    start = np.full(NUM_EXPERTS, (DIM + 5.0) / (2 * NUM_EXPERTS))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        result = fit_product_of_t(
            key, log_density, DIM, experts=experts, exponents=start, settings=settings
        )
    return np.asarray(result.history.exponents)
