import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from moe_jax.language.config import LanguageModelConfig
from moe_jax.language.generate import generate
from moe_jax.language.model import LanguageModel

CONFIG = LanguageModelConfig(
    vocab_size=16,
    model_dim=8,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    num_experts=4,
    num_selected=2,
    expert_hidden_dim=8,
    qk_norm=False,
)
KEY = jax.random.key(0)
CONTEXT = 6


@functools.cache
def model_and_variables():
    model = LanguageModel(CONFIG)
    init = jax.jit(model.init, compiler_options={"xla_backend_optimization_level": 0})
    return model, init(jax.random.key(1), jnp.zeros((1, 8), jnp.int32))


def continuation(prompt, max_new_tokens=8, *, key=KEY, **options):
    model, variables = model_and_variables()
    options = {"context_length": CONTEXT, "temperature": 0.0} | options
    return generate(key, model, variables, prompt, max_new_tokens, **options)


@functools.cache
def compiled():
    model, variables = model_and_variables()
    return jax.jit(lambda row: model.apply(variables, row)[0])


class FixedModel(LanguageModel):
    """Scores log 1, log 2 and log 4 everywhere."""

    @nn.compact
    def __call__(self, tokens, segment_ids=None, positions=None, *, deterministic=True):
        return jnp.log(jnp.asarray([[[1.0, 2.0, 4.0]]], jnp.float32)).repeat(CONTEXT, axis=1), None


def test_temperature_0_takes_the_most_likely_token_of_the_full_forward():
    tokens = [3, 7]
    for _ in range(8):
        seen = tokens[-CONTEXT:]
        # Later tokens change nothing, so that those that fill the row may be any.
        row = np.pad(np.array(seen, np.int32), (0, CONTEXT - len(seen)), constant_values=9)
        tokens.append(int(jnp.argmax(compiled()(row[None])[0, len(seen) - 1])))
    assert continuation([3, 7]) == tokens[2:]
    assert len(set(tokens[2:])) > 1


def test_temperature_0_ignores_the_key():
    assert continuation([5], key=jax.random.key(1)) == continuation([5], key=jax.random.key(2))


def test_same_key_draws_the_same_text_and_another_key_another():
    draws = [continuation([5], 12, key=jax.random.key(seed), temperature=2.0) for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]
    assert all(0 <= token < 16 for token in draws[0])


def test_longer_text_begins_with_the_shorter():
    assert continuation([5], 12, temperature=1.0)[:5] == continuation([5], 5, temperature=1.0)


def test_stop_token_ends_the_text_and_is_left_out():
    free = continuation([3, 7])
    stop = free[3]
    first = free.index(stop)
    assert continuation([3, 7], stop=stop) == free[:first]
    absent = next(token for token in range(16) if token not in free)
    assert continuation([3, 7], stop=absent) == free


def test_no_token_is_drawn_if_none_is_asked_for():
    assert continuation([3], 0) == []


def test_only_the_end_of_a_long_prompt_is_seen():
    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    assert continuation(prompt) == continuation(prompt[-CONTEXT:])
    assert continuation(prompt, 1) != continuation([*prompt[:-1], 11], 1)


def test_tokens_are_drawn_with_the_probabilities_of_the_temperature():
    model = FixedModel(
        LanguageModelConfig(
            vocab_size=3,
            model_dim=4,
            num_layers=1,
            num_heads=1,
            num_kv_heads=1,
            layer_pattern=("dense",),
            hidden_dim=4,
        )
    )
    for temperature, weight in ((1.0, np.array([1, 2, 4])), (2.0, np.sqrt([1, 2, 4]))):
        drawn = generate(KEY, model, {}, [0], 400, context_length=CONTEXT, temperature=temperature)
        frequency = np.bincount(drawn, minlength=3) / 400
        # Standard errors are below 0.025.
        np.testing.assert_allclose(frequency, weight / weight.sum(), atol=0.08)


def test_nothing_is_compiled_for_a_new_length():
    # No other test has this context, so that nothing of it has been compiled before.
    continuation([1, 2], 1, context_length=11)
    compilations = []
    listener = lambda name, seconds, **_: compilations.append(name)  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        continuation([1, 2, 3, 4], 4, context_length=11)
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
    assert [name for name in compilations if "compile" in name] == []


def test_prompt_may_be_what_a_tokenizer_encodes():
    prompt = np.array([1, 2], np.int32)
    assert continuation(prompt, 4) == continuation([1, 2], 4)


@pytest.mark.parametrize("prompt", ["text", [0.5], [[1, 2]]])
def test_prompt_of_another_kind_is_refused(prompt):
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        with pytest.raises(ValueError, match="prompt of type .* expected token ids"):
            continuation(prompt)
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "prompt is empty"),
        ([1], {"context_length": 0}, "context_length=0 must be at least 1"),
        ([1], {"temperature": -0.5}, "temperature=-0.5 must not be negative"),
        ([1], {"temperature": float("nan")}, "temperature=nan must not be negative"),
        ([1], {"max_new_tokens": -1}, "max_new_tokens=-1 must not"),
        ([1, -1], {}, r"token -1, not in \[0, vocab_size="),
        ([1, 10**6], {}, r"token 1000000, not in"),
    ],
)
def test_impossible_request_is_named(prompt, options, message):
    with pytest.raises(ValueError, match=message):
        continuation(prompt, **options)
