"""The Gaussian that a user of numpyro would fit instead, for the program's comparison."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from jaxtyping import Array, Float, Key
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoMultivariateNormal

_PARTICLES = 16
_LEARNING_RATE = 1e-2


def fit_gaussian(
    key: Key[Array, ""],
    log_density: Callable[[Array], Array],
    dim: int,
    num_scores: int,
) -> tuple[Float[np.ndarray, " dim"], Float[np.ndarray, "dim dim"]]:
    """Fits numpyro's AutoMultivariateNormal by maximising the ELBO with Adam.

    Args:
        key: random key.
        log_density: z [dim] -> log p up to a constant.
        dim: number of coordinates.
        num_scores: gradients of log p to take, 16 a step.

    Returns:
        Mean [dim] and lower Cholesky factor of the covariance [dim, dim], float64.
    """
    steps = max(num_scores // _PARTICLES, 1)

    def model() -> None:
        real_vector = dist.ImproperUniform(dist.constraints.real_vector, (), (dim,))
        numpyro.factor("log_density", log_density(numpyro.sample("z", real_vector)))

    def run(key: jax.Array) -> dict[str, jax.Array]:
        guide = AutoMultivariateNormal(model)
        schedule = optax.cosine_decay_schedule(_LEARNING_RATE, steps, 0.01)
        optimizer = optax.chain(optax.clip_by_global_norm(10.0), optax.adam(schedule))
        svi = SVI(model, guide, optimizer, Trace_ELBO(_PARTICLES))
        state = svi.init(key)
        state = jax.lax.fori_loop(0, steps, lambda _, s: svi.stable_update(s)[0], state)
        return svi.get_params(state)

    # numpyro mixes dtypes and ranks.
    with (
        jax.enable_x64(True),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        params = jax.jit(run)(key)
        loc, scale = params["auto_loc"], params["auto_scale_tril"]
    return np.asarray(loc, np.float64), np.asarray(jnp.tril(scale), np.float64)
