"""Targets of a fit: a log density of a vector, or a numpyro model made into one."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, Key
from numpyro.handlers import seed, trace
from numpyro.infer.util import initialize_model

_NUM_STARTS = 8
# numpyro's own range of initial values in unconstrained space.
_START_RADIUS = 2.0


@dataclasses.dataclass(frozen=True)
class LogDensity:
    """log p of a vector in float64, hashable so that a compiled step is found again.

    Attributes:
        function: log density up to a constant; whatever dtypes it mixes.
        input_dtype: dtype in which it takes its argument.
    """

    function: Callable[[Array], Array]
    input_dtype: Any = np.float64

    def __call__(self, point: Float[Array, " dim"]) -> Array:
        """Log p(point), a scalar unless the function is at fault, which `target_of_...` reports."""
        # The target's dtypes and ranks are its author's business.
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return jnp.asarray(self.function(point.astype(self.input_dtype))).astype(point.dtype)


class Target(NamedTuple):
    """What a fit needs to know of its target.

    Attributes:
        log_density: log p up to a constant on R^D.
        starts: points from which modes are sought.
        constrain: maps draws (n, D) to a dict of the model's sites; None for a bare function.
    """

    log_density: LogDensity
    starts: np.ndarray
    constrain: Callable[[np.ndarray], dict[str, np.ndarray]] | None


def target_of_function(
    key: Key[Array, ""],
    function: Callable[[Array], Array],
    dim: int | None,
    starts: np.ndarray | None,
) -> Target:
    """A log density of a vector of length `dim`, checked for its shape.

    Raises:
        ValueError: if `starts` does not fit `dim`, or `function` does not return a scalar.
    """
    if dim is not None and dim < 1:
        raise ValueError(f"dim={dim}: expected at least 1")
    if starts is None and dim is not None:
        shape = (_NUM_STARTS, dim)
        radius = _START_RADIUS
        starts = np.asarray(jax.random.uniform(key, shape, minval=-radius, maxval=radius))
    starts = np.asarray(starts, dtype=np.float64)
    if starts.ndim != 2 or not starts.size or dim not in (None, starts.shape[-1]):
        raise ValueError(f"starts of shape {starts.shape}: expected (n, D) with D = dim = {dim}")
    if not np.all(np.isfinite(starts)):
        raise ValueError("starts has an entry that is not finite")
    log_density = LogDensity(function)
    argument = jax.ShapeDtypeStruct(starts.shape[1:], np.float64)
    try:
        result = jax.eval_shape(log_density, argument)
    except TypeError:
        # Written for single precision throughout, such as around a loop that carries float32.
        log_density = LogDensity(function, np.float32)
        result = jax.eval_shape(log_density, argument)
    if result.shape != ():
        raise ValueError(
            f"target returns shape {result.shape} for an argument of shape {starts.shape[1:]}: "
            "expected a scalar log density"
        )
    return Target(log_density, starts, None)


def target_of_model(
    key: Key[Array, ""],
    model: Callable[..., Any],
    model_args: tuple,
    model_kwargs: dict[str, Any],
) -> Target:
    """A numpyro model's log joint density in its unconstrained coordinates, raveled.

    Raises:
        ValueError: if the model has discrete latent sites, or no latent site.
    """
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        sites = trace(seed(model, key)).get_trace(*model_args, **model_kwargs).values()
        latent = [s for s in sites if s["type"] == "sample" and not s["is_observed"]]
        discrete = [s["name"] for s in latent if s["fn"].support.is_discrete]
        if discrete:
            raise ValueError(
                f"model has the discrete latent sites {discrete}: sum them out first; products of "
                "t-experts have densities"
            )
        if not latent:
            raise ValueError("model has no latent site: there is nothing to infer")
        info = initialize_model(key, model, model_args=model_args, model_kwargs=model_kwargs)
    first, unravel = ravel_pytree(info.param_info.z)

    def log_density(point: Array) -> Array:
        return -info.potential_fn(unravel(point))

    def constrain(points: np.ndarray) -> dict[str, np.ndarray]:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            values = jax.jit(jax.vmap(lambda point: info.postprocess_fn(unravel(point))))(points)
        return {name: np.asarray(value) for name, value in values.items()}

    radius = _START_RADIUS
    others = jax.random.uniform(
        key, (_NUM_STARTS - 1, first.shape[0]), first.dtype, minval=-radius, maxval=radius
    )
    starts = np.concatenate([np.asarray(first)[None], np.asarray(others)]).astype(np.float64)
    return Target(LogDensity(log_density), starts, constrain)
