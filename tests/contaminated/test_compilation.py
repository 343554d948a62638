"""How often the estimators are compiled, and that padding changes nothing."""

import sys

import jax
import numpy as np
import pytest

from moe_jax.contaminated import compilation
from tests.contaminated.small import MODEL, data


@pytest.mark.parametrize("n", [1, 63, 64, 65, 1000, 16_384])
def test_padding_is_at_most_a_quarter_beyond_64_rows(n):
    assert n <= compilation.padded_size(n) < max(65, 1.25 * n)


def test_sizes_of_an_octave_share_four_programs():
    assert len({compilation.padded_size(n) for n in range(1025, 2049)}) == 4
    assert compilation.padded_size(16_385) == 16_385


def test_another_number_of_rows_compiles_no_estimation(caplog):
    x, y = data()
    MODEL.fit(x, y)
    with jax.log_compiles(), caplog.at_level("WARNING"):
        results = [MODEL.fit(x[:n], y[:n]) for n in (41, 50)]
    assert not [r for r in caplog.records if "_estimate" in r.getMessage()]
    assert len(results[0].y) == 41 and results[1].responsibilities().shape == (50,)


def test_padding_changes_no_estimate(monkeypatch):
    x, y = data()
    padded = MODEL.fit(x[:50], y[:50])
    # The name `fit` of the package is the function's, hence not a path.
    monkeypatch.setattr(sys.modules["moe_jax.contaminated.fit"], "padded_size", lambda n: n)
    plain = MODEL.fit(x[:50], y[:50])
    assert padded.status == plain.status and padded.iterations == plain.iterations
    np.testing.assert_allclose(padded.theta, plain.theta, rtol=1e-9)
    np.testing.assert_allclose(padded.cov(), plain.cov(), rtol=1e-7)


def test_an_option_that_xla_does_not_know_is_left_out(monkeypatch):
    monkeypatch.setattr(compilation, "_OLDER_FUSION", {"xla_cpu_no_such_option": True})
    # Not the cached function: the options of the session stay as they are.
    assert compilation.compiler_options.__wrapped__(True) == {}
