"""Targets of a fit: a log density of a vector, or a numpyro model made into one."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Key
from numpyro.handlers import seed, trace
from numpyro.infer.util import initialize_model

from moe_jax.product_of_t.experts import in_blocks

_NUM_STARTS = 8
# numpyro's own range of initial values in unconstrained space.
_START_RADIUS = 2.0
# Points at which a target is evaluated in one call: whatever their number, each of its values,
# scores and Hessians is compiled once.
_VALUES_BLOCK, _HESSIANS_BLOCK = 512, 8


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


class Derivatives(NamedTuple):
    """Log p with its first and second derivatives at each of some points."""

    values: Float[np.ndarray, " points"]
    gradients: Float[np.ndarray, "points dim"]
    hessians: Float[np.ndarray, "points dim dim"]


def values_at(
    log_density: LogDensity, points: Float[np.ndarray, "points dim"]
) -> Float[np.ndarray, " points"]:
    """Log p at each point."""
    return in_blocks(partial(_values, log_density), points, _VALUES_BLOCK)


def derivatives_at(log_density: LogDensity, points: Float[np.ndarray, "points dim"]) -> Derivatives:
    """Log p, its gradient and its Hessian at each point."""
    return Derivatives(*in_blocks(partial(_derivatives, log_density), points, _HESSIANS_BLOCK))


@partial(jax.jit, static_argnums=0)
def whitened_scores(
    log_density: LogDensity,
    loc: Float[Array, " dim"],
    scale: Float[Array, "dim dim"],
    points: Float[Array, "batch dim"],
) -> tuple[Float[Array, " batch"], Float[Array, "batch dim"], Bool[Array, " batch"]]:
    """Log p at z = loc + scale x for points x, its gradient in x, and where both are finite.

    Where they are not, the gradient is 0.
    """
    values, gradients = jax.vmap(jax.value_and_grad(log_density))(loc[None] + points @ scale.T)
    finite = jnp.isfinite(values) & jnp.all(jnp.isfinite(gradients), axis=-1)
    finite = finite & jnp.all(jnp.isfinite(points), axis=-1)
    return values, jnp.where(finite[:, None], gradients, 0.0) @ scale, finite


@partial(jax.jit, static_argnums=0)
def _values(log_density: LogDensity, points: Array) -> Array:
    return jax.vmap(log_density)(points)


@partial(jax.jit, static_argnums=0)
def _derivatives(log_density: LogDensity, points: Array) -> tuple[Array, Array, Array]:
    value_and_gradient = jax.value_and_grad(log_density)

    def at(point: Array) -> tuple[Array, Array, Array]:
        value, gradient = value_and_gradient(point)
        return value, gradient, _hessian(log_density, point)

    return jax.vmap(at)(points)


def _hessian(log_density: LogDensity, point: Array) -> Array:
    """Forward over reverse, or reverse twice where a rule forbids the former."""
    gradient = jax.grad(log_density)
    try:
        return jax.jacfwd(gradient)(point)
    except TypeError:
        return jax.jacrev(gradient)(point)


def generator_of(key: Key[Array, ""]) -> np.random.Generator:
    """A numpy generator seeded by a key: what is drawn once needs no compilation."""
    return np.random.default_rng(np.asarray(jax.random.key_data(key)))


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
        starts = generator_of(key).uniform(-_START_RADIUS, _START_RADIUS, shape)
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

    shape = (_NUM_STARTS - 1, first.shape[0])
    others = generator_of(key).uniform(-_START_RADIUS, _START_RADIUS, shape)
    starts = np.concatenate([np.asarray(first, np.float64)[None], others])
    return Target(LogDensity(log_density), starts, constrain)
