"""Fixtures of the tests of symmetries."""

import jaxtyping
import pytest


@pytest.fixture
def unchecked():
    """Without the tests' checks of types, as users call."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
