"""How the estimators are compiled: for the time that a user waits, not for the last percent.

The programs are long and their arrays small, so that on a CPU compiling takes seconds and running
milliseconds. XLA's older way of emitting fused loops compiles them twice as fast as its newer one
and they run as fast; without LLVM's optimisations compiling takes a sixth of the time and running
two to three times as long, which pays for data that are fitted in milliseconds.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Rows up to which a program is not worth optimising, all starts together: of a fit, which may be
# repeated, and of many at once, which seldom are.
QUICK_ROWS = 8_192
QUICK_ROWS_OF_MANY = 65_536
# Rows up to which data are padded to a size that others share.
_PADDED_ROWS = 16_384
_OLDER_FUSION = {"xla_cpu_use_fusion_emitters": False}
_UNOPTIMISED = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@functools.cache
def compiler_options(quick: bool) -> dict[str, Any]:
    """Options for `jax.jit`; none on other devices than CPUs or if XLA does not know them."""
    if jax.default_backend() != "cpu":
        return {}
    options = _OLDER_FUSION | (_UNOPTIMISED if quick else {})
    try:
        jax.jit(jnp.negative, compiler_options=options)(np.float32(0))
    except jax.errors.JaxRuntimeError:
        return {}
    return options


def jit(
    function: Callable[..., Any], *, static: str | tuple[str, ...], quick: bool = True
) -> Callable[..., Any]:
    """`jax.jit` with `compiler_options`, which are asked for at the first call."""

    @functools.cache
    def compiled() -> Callable[..., Any]:
        options = compiler_options(quick)
        return jax.jit(function, static_argnames=static, compiler_options=options or None)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return compiled()(*args, **kwargs)

    return call


def padded_rows(size: int) -> int:
    """The next quarter of a power of two.

    Sizes in any number share four compiled programs an octave, for an eighth more work at the
    median.
    """
    quarter = max(2 ** (size.bit_length() - 3), 1)
    return -(-size // quarter) * quarter


def padded_size(size: int) -> int:
    """Rows that the data of one fit are padded to: up to 16,384 `padded_rows`, 64 at least.

    Padding has weight 0 and moves results by rounding errors only.
    """
    return size if size > _PADDED_ROWS else max(padded_rows(size), 64)


def lengthen(array: np.ndarray, missing: int, axis: int) -> np.ndarray:
    """The array with its first entry along an axis repeated at the end."""
    first = np.take(array, [0], axis=axis)
    return np.concatenate([array, np.repeat(first, missing, axis=axis)], axis=axis)
