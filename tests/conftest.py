"""Session rules: CPU unless asked otherwise, no implicit dtype or rank promotion, fixed examples.

Programs are compiled fast rather than well, here and in subprocesses: most of them run for an
instant. JAX_DISABLE_MOST_OPTIMIZATIONS=0 in the environment tests what users run.
Warnings as errors and the run-time checks of shapes and types are switched on in setup.cfg.
"""

import os
import sys

# JAX reads these when it is first imported, so they come before every import that may pull JAX in.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

import hypothesis
import jax
import pytest

jax.config.update("jax_enable_x64", False)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Compilation makes the first example slow whatever its size, hence no deadline.
hypothesis.settings.register_profile("deterministic", derandomize=True, deadline=None)
hypothesis.settings.load_profile("deterministic")


@pytest.fixture(scope="module", autouse=True)
def _few_memory_maps():
    """Every compiled program holds maps of memory, of which Linux allows a process 65,530."""
    yield
    if sys.platform.startswith("linux"):
        with open("/proc/self/maps") as maps:
            if sum(1 for _ in maps) > 20_000:
                jax.clear_caches()
