"""In which type sums are taken, statistics kept and scores computed."""

import jax
import jax.numpy as jnp


def wide_type(dtype: jax.typing.DTypeLike) -> jnp.dtype:
    """float64 for float64, float32 for everything narrower.

    Layers on float64 tokens, which exist only under `jax.enable_x64`, thereby lose nothing to
    rounding in float32.
    """
    return jnp.dtype(jnp.float64 if jnp.dtype(dtype) == jnp.float64 else jnp.float32)
