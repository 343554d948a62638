import dataclasses
import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.language.config import LanguageModelConfig
from moe_jax.language.corpus import TokenizedDocuments
from moe_jax.language.evaluate import make_evaluation, sample_documents
from moe_jax.language.model import LanguageModel

PAD = 15
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


def documents_of(lengths, seed=0):
    """Documents of random tokens; `num_bytes` is arbitrary."""
    rng = np.random.default_rng(seed)
    return TokenizedDocuments(
        tokens=rng.integers(0, 16, sum(lengths)).astype(np.uint16),
        starts=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        names=tuple(f"document_{index}" for index in range(len(lengths))),
        num_bytes=np.arange(10, 10 + len(lengths)).astype(np.int64),
    )


@functools.cache
def model_and_variables():
    model = LanguageModel(CONFIG)
    init = jax.jit(model.init, compiler_options={"xla_backend_optimization_level": 0})
    variables = init(jax.random.key(0), jnp.zeros((1, 8), jnp.int32))
    # Larger than at the start, so that a wrong context changes the result.
    return model, jax.tree.map(lambda leaf: 2 * leaf, variables)


@functools.cache
def compiled():
    model, variables = model_and_variables()
    return jax.jit(lambda row: model.apply(variables, row)[0])


def log_probabilities(row):
    """log p[place, token] after each place of one row of 8 tokens."""
    return np.asarray(jax.nn.log_softmax(compiled()(row[None].astype(np.int32))[0]))


class UniformModel(LanguageModel):
    """Every token has probability 1 / vocab_size."""

    @nn.compact
    def __call__(self, tokens, segment_ids=None, positions=None, *, deterministic=True):
        return jnp.zeros((*tokens.shape, self.config.vocab_size), jnp.float32), None


def test_bits_of_short_documents_are_those_of_one_pass_over_each():
    model, variables = model_and_variables()
    documents = documents_of([2, 9, 5, 8, 3])
    evaluate = make_evaluation(model, sequence_length=8, batch_size=2, pad_id=PAD)
    evaluation = evaluate(variables, documents)
    for index, start in enumerate(documents.starts[:-1]):
        tokens = documents.tokens[start : documents.starts[index + 1]].astype(np.int32)
        num_targets = len(tokens) - 1
        row = np.pad(tokens[:-1], (0, 8 - num_targets))
        nats = -log_probabilities(row)[np.arange(num_targets), tokens[1:]].sum()
        assert evaluation.bits[index] == pytest.approx(nats / math.log(2), rel=1e-5)
    assert evaluation.bits.dtype == np.float64
    total_bytes = 10 + 11 + 12 + 13 + 14
    assert evaluation.bits_per_byte == pytest.approx(evaluation.bits.sum() / total_bytes)


def test_every_token_but_the_first_is_scored_once():
    documents = documents_of([2, 8, 9, 10, 25, 64])
    model = UniformModel(dataclasses.replace(CONFIG, layer_pattern=("dense",), hidden_dim=8))
    for sequence_length, batch_size in ((8, 3), (7, 4), (1, 5)):
        evaluate = make_evaluation(
            model, sequence_length=sequence_length, batch_size=batch_size, pad_id=PAD
        )
        # 4 bits for each of the tokens after the first.
        np.testing.assert_allclose(
            evaluate({}, documents).bits, 4.0 * np.array([1, 7, 8, 9, 24, 63]), rtol=1e-6
        )


def test_long_document_is_scored_in_windows_that_advance_by_a_quarter():
    model, variables = model_and_variables()
    documents = documents_of([21], seed=1)
    tokens = documents.tokens.astype(np.int32)
    evaluate = make_evaluation(model, sequence_length=8, batch_size=2, pad_id=PAD)
    # First targets 1..8 from inputs 0..7; then windows from 2, 4, ..., 12 for the next 2 targets.
    bits = 0.0
    for first in range(0, 13, 2):
        log_probability = log_probabilities(tokens[first : first + 8])
        for place in range(0 if first == 0 else 6, 8):
            bits -= log_probability[place, tokens[first + place + 1]] / math.log(2)
    assert evaluate(variables, documents).bits[0] == pytest.approx(bits, rel=1e-5)


def test_batch_size_changes_nothing():
    model, variables = model_and_variables()
    documents = documents_of([9, 20, 3])
    first, second = (
        make_evaluation(model, sequence_length=8, batch_size=size, pad_id=PAD)(variables, documents)
        for size in (2, 3)
    )
    np.testing.assert_allclose(first.bits, second.bits, rtol=1e-5)


def test_sample_holds_whole_documents_within_the_limit():
    documents = documents_of([5, 7, 30, 4, 6, 9])
    sample = sample_documents(documents, 20, seed=0)
    lengths = np.diff(sample.starts)
    assert sample.starts[0] == 0 and 0 < sample.starts[-1] <= 20
    assert len(sample) == len(lengths) == len(sample.num_bytes)
    chosen = [documents.names.index(name) for name in sample.names]
    assert chosen == sorted(chosen)
    for place, index in enumerate(chosen):
        np.testing.assert_array_equal(
            sample.tokens[sample.starts[place] : sample.starts[place + 1]],
            documents.tokens[documents.starts[index] : documents.starts[index + 1]],
        )
        assert sample.num_bytes[place] == documents.num_bytes[index]


def test_sample_leaves_no_room_for_a_document_it_passed_over():
    documents = documents_of([5, 7, 30, 4, 6, 9])
    for seed in range(10):
        sample = sample_documents(documents, 20, seed=seed)
        rest = [5, 7, 30, 4, 6, 9]
        for length in np.diff(sample.starts):
            rest.remove(length)
        assert min(rest) > 20 - sample.starts[-1]


def test_sample_depends_on_the_seed_alone():
    documents = documents_of([4] * 30)
    names = [sample_documents(documents, 40, seed=seed).names for seed in (0, 0, 1)]
    assert names[0] == names[1] != names[2]


def test_sample_of_all_is_all():
    documents = documents_of([5, 7, 3])
    sample = sample_documents(documents, 15, seed=0)
    assert sample.names == documents.names
    np.testing.assert_array_equal(sample.tokens, documents.tokens)
    np.testing.assert_array_equal(sample.starts, documents.starts)


def test_sample_is_the_shortest_document_if_none_fits():
    assert sample_documents(documents_of([9, 6, 8]), 5, seed=0).names == ("document_1",)
