"""Compiles fast rather than well: the programs are large, and the data sets of the tests small."""

import jax
import pytest


@pytest.fixture(scope="module", autouse=True)
def _fast_compilation():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
