"""Session rules: CPU unless asked otherwise, no implicit dtype or rank promotion, fixed examples.

Warnings as errors and the run-time checks of shapes and types are switched on in setup.cfg.
"""

import os

# JAX reads this when it is first imported, so it comes before every import that may pull JAX in.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import hypothesis
import jax

jax.config.update("jax_enable_x64", False)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Compilation makes the first example slow whatever its size, hence no deadline.
hypothesis.settings.register_profile("deterministic", derandomize=True, deadline=None)
hypothesis.settings.load_profile("deterministic")
