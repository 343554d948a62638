"""What the tests of this family share."""

import jax
import pytest


@pytest.fixture(scope="module")
def quick_compilation():
    """Small programs: most of their time would go into optimising what runs for an instant."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
