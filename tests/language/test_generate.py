"""Generation against the whole model run anew for every token."""

import ast
import dataclasses
import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from moe_jax.language import LanguageModel, LanguageModelConfig, generate
from moe_jax.language.generate import LEAST_LENGTH, _continue, begin, bucket, stream

CONFIG = LanguageModelConfig(
    vocab_size=16,
    model_dim=8,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    layer_pattern=("dense", "sparse"),
    num_experts=4,
    num_selected=2,
    expert_hidden_dim=8,
)
KEY = jax.random.key(0)
PROMPTS = [[3, 7], [5], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1], [0, 0, 0]]
CONFIGS = {
    "softmax": CONFIG,
    "unrolled": dataclasses.replace(CONFIG, scan_layers=False, remat="full"),
    "bias": dataclasses.replace(CONFIG, router="sigmoid", num_layers=2, tie_embeddings=True),
    "hash": dataclasses.replace(CONFIG, router="hash", num_layers=2, capacity_factor=0.5),
    "bfloat16": dataclasses.replace(CONFIG, dtype="bfloat16", num_layers=2, qk_norm=False),
}


@functools.cache
def model_and_variables(name="softmax"):
    model = LanguageModel(CONFIGS[name])
    variables = jax.jit(model.init)(jax.random.key(1), jnp.zeros((1, 8), jnp.int32))
    # Larger gates and outputs, or a few tokens would be the answer to everything.
    scaled = jax.tree.map(lambda leaf: 3.0 * leaf, variables["params"])
    return model, {**variables, "params": scaled}


def continuation(prompts, max_new_tokens=8, *, key=KEY, name="softmax", **options):
    model, variables = model_and_variables(name)
    return generate(
        key, model, variables, prompts, max_new_tokens, **({"temperature": 0.0} | options)
    )


@functools.cache
def uncached(name="softmax"):
    """Logits [1, 32, vocab] of the whole row, without capacities."""
    model, variables = model_and_variables(name)
    model = LanguageModel(dataclasses.replace(model.config, capacity_factor=None))
    return jax.jit(lambda row: model.apply(variables, row)[0])


def greedy(prompt, max_new_tokens, name="softmax"):
    tokens = list(prompt)
    for _ in range(max_new_tokens):
        # Later tokens change nothing, so that those that fill the row may be any.
        row = np.full((1, 32), 9, np.int32)
        row[0, : len(tokens)] = tokens
        tokens.append(int(jnp.argmax(uncached(name)(row)[0, len(tokens) - 1])))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("name", CONFIGS)
def test_temperature_0_takes_the_most_likely_token_of_the_whole_model(name):
    found = continuation(PROMPTS, name=name)
    assert found == [greedy(prompt, 8, name) for prompt in PROMPTS]
    assert len({token for row in found for token in row}) > 3


def test_a_batch_of_one_answers_as_the_rows_of_a_batch():
    assert continuation(PROMPTS) == [continuation([prompt])[0] for prompt in PROMPTS]


def test_temperature_0_ignores_the_key():
    one, two = (continuation([[5]], key=jax.random.key(seed)) for seed in (1, 2))
    assert one == two


def test_same_key_draws_the_same_text_and_another_key_or_row_another():
    draws = [
        continuation([[5], [5]], 12, key=jax.random.key(seed), temperature=2.0)
        for seed in (1, 1, 2)
    ]
    assert draws[0] == draws[1] != draws[2]
    assert draws[0][0] != draws[0][1]
    assert all(0 <= token < 16 for row in draws[0] for token in row)


def test_longer_text_begins_with_the_shorter():
    long, short = (continuation([[5]], count, temperature=1.0)[0] for count in (12, 5))
    assert long[:5] == short


def test_stream_gives_the_same_tokens_a_few_at_a_time():
    model, variables = model_and_variables()
    free = continuation(PROMPTS, 8, temperature=1.0)
    for tokens_at_once in (1, 3):
        parts = list(
            stream(KEY, model, variables, PROMPTS, 8, tokens_at_once=tokens_at_once, stop=[])
        )
        assert len(parts) == -(-8 // tokens_at_once)
        assert [sum(row, []) for row in zip(*parts, strict=True)] == free


def test_stop_tokens_end_each_row_by_itself_and_are_left_out():
    free = continuation(PROMPTS)
    stop = [free[0][3], free[1][5]]

    def cut(row):
        ends = [place for place, token in enumerate(row) if token in stop]
        return row[: min(ends, default=len(row))]

    assert continuation(PROMPTS, stop=stop) == [cut(row) for row in free]
    assert continuation(PROMPTS[:1], stop=stop[0]) == [free[0][: free[0].index(stop[0])]]
    absent = next(token for token in range(16) if not any(token in row for row in free))
    assert continuation(PROMPTS, stop=absent) == free


def test_nothing_is_asked_for():
    assert continuation([[3], [4, 5]], 0) == [[], []]
    assert continuation([]) == []


def test_top_k_of_1_and_a_small_top_p_take_the_most_likely_token():
    free = continuation(PROMPTS)
    assert continuation(PROMPTS, temperature=1.0, top_k=1) == free
    assert continuation(PROMPTS, temperature=1.0, top_p=1e-6) == free


def test_nothing_is_compiled_for_prompts_numbers_and_options_of_the_same_bucket():
    continuation([[1, 2], [3]], 1)
    sizes = begin._cache_size(), _continue._cache_size()
    continuation([[1, 2, 3, 4], [5, 6]], 7, temperature=0.5, top_k=3, top_p=0.9)
    assert (begin._cache_size(), _continue._cache_size()) == sizes


def test_buckets_are_powers_of_2():
    assert [bucket(n) for n in (1, LEAST_LENGTH, LEAST_LENGTH + 1, 64, 65)] == [16, 16, 32, 64, 128]


def test_prompts_may_be_what_a_tokenizer_encodes():
    prompt = np.array([1, 2], np.int32)
    expected = continuation([[1, 2]], 4)
    assert continuation([prompt], 4) == expected
    assert continuation(prompt[None], 4) == expected


@pytest.mark.parametrize("prompts", [["text"], [[0.5]], [[[1, 2]]], [1, 2]])
def test_prompts_of_another_kind_are_refused(prompts):
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        with pytest.raises(ValueError, match="prompt 0 of type .* expected a list of token ids"):
            continuation(prompts)
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([[1], []], {}, "prompt 1 is empty"),
        ([[1]], {"temperature": -0.5}, "temperature=-0.5 must not be negative"),
        ([[1]], {"temperature": float("nan")}, "temperature=nan must not be negative"),
        ([[1]], {"top_k": 0}, r"top_k=0 is not in \[1, vocab_size=16\]"),
        ([[1]], {"top_k": 17}, r"top_k=17 is not in"),
        ([[1]], {"top_p": 0.0}, r"top_p=0.0 is not in \(0, 1\]"),
        ([[1]], {"top_p": float("nan")}, "top_p=nan is not in"),
        ([[1]], {"stop": 16}, r"stop=16 is not in \[0, vocab_size=16\)"),
        ([[1]], {"max_new_tokens": -1}, "max_new_tokens=-1 must not"),
        ([[1, -1]], {}, r"prompt 0 holds token -1, not in \[0, vocab_size="),
        ([[1, 10**6]], {}, r"token 1000000, not in"),
    ],
)
def test_impossible_request_is_named(prompts, options, message):
    with pytest.raises(ValueError, match=message):
        continuation(prompts, **options)


def test_the_example_of_the_documentation_runs(capsys):
    text = (Path(__file__).parents[2] / "docs" / "decoding.md").read_text()
    with jax.numpy_dtype_promotion("standard"):
        exec(re.findall(r"```python\n(.*?)```", text, re.S)[0], {})
    rows = ast.literal_eval(capsys.readouterr().out)
    assert len(rows) == 3 and all(len(row) <= 10 and 0 not in row for row in rows)
