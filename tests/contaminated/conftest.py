"""Compiles fast rather than well: the programs are large, and the data sets of the tests small."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def _quick_compilation(quick_compilation):
    """The shared fixture, for every file of this folder."""
