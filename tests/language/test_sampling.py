"""The distributions that tokens are drawn from, against a loop over sorted tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.language.sampling import check_sampling, draw, log_probabilities

LOGITS = np.log(np.array([0.1, 0.4, 0.25, 0.05, 0.2]))
_log_probabilities = jax.jit(log_probabilities)


def expected(logits, temperature, top_k, top_p):
    if temperature == 0:
        return np.eye(len(logits))[np.argmax(logits)]
    probability = np.exp(logits / temperature)
    kept = np.argsort(-probability, kind="stable")[:top_k]
    share = probability[kept] / probability[kept].sum()
    count = next(n for n in range(1, len(kept) + 1) if n == len(kept) or share[:n].sum() >= top_p)
    result = np.zeros(len(logits))
    result[kept[:count]] = probability[kept[:count]]
    return result / result.sum()


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("top_k", [None, 1, 3, 5])
@pytest.mark.parametrize("top_p", [1e-9, 0.5, 0.66, 1.0])
def test_distribution_is_that_of_the_loop(temperature, top_k, top_p):
    sampling = check_sampling(temperature, top_k, top_p, 5)
    found = np.exp(_log_probabilities(jnp.asarray(LOGITS, jnp.float32)[None], sampling)[0])
    np.testing.assert_allclose(found, expected(LOGITS, temperature, top_k, top_p), atol=1e-6)


def test_ties_stay_together_but_for_temperature_0():
    logits = jnp.asarray([[1.0, 2.0, 2.0, 0.0]], jnp.float32)
    one = np.exp(_log_probabilities(logits, check_sampling(1.0, 1, 1.0, 4))[0])
    np.testing.assert_allclose(one, [0, 0.5, 0.5, 0], atol=1e-6)
    cold = np.exp(_log_probabilities(logits, check_sampling(0.0, None, 1.0, 4))[0])
    np.testing.assert_array_equal(cold, [0, 1, 0, 0])


def test_tokens_are_drawn_with_their_probabilities():
    """A chi-square of 4 degrees above 23.5 has probability 1e-4."""
    count = 4000
    keys = jax.random.split(jax.random.key(0), count)
    sampling = check_sampling(2.0, None, 1.0, 5)
    rows = jnp.broadcast_to(jnp.asarray(LOGITS, jnp.float32), (count, 5))
    drawn = np.asarray(jax.jit(functools.partial(draw, sampling=sampling))(keys, rows))
    mean = count * expected(LOGITS, 2.0, None, 1.0)
    assert np.sum((np.bincount(drawn, minlength=5) - mean) ** 2 / mean) < 23.5
