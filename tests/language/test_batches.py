import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_jax.language.batches import PackedWindows, evaluation_windows, make_batches
from moe_jax.language.corpus import TokenizedDocuments

BOS, EOS, PAD = 900, 901, 902

text_lengths = st.lists(st.integers(0, 40), min_size=1, max_size=8)
sequence_lengths = st.integers(1, 16)


def make_documents(lengths):
    """Documents of BOS, `length` tokens unlike any other of the corpus, EOS."""
    counter = itertools.count(1000)
    texts = [[BOS, *itertools.islice(counter, length), EOS] for length in lengths]
    starts = np.cumsum([0, *(len(text) for text in texts)]).astype(np.int64)
    return TokenizedDocuments(
        tokens=np.array(sum(texts, []), np.uint16),
        starts=starts,
        names=tuple(f"document {i}" for i in range(len(lengths))),
        num_bytes=np.array(lengths, np.int64),
    )


def document_ids(documents):
    return [
        documents.tokens[start:end].tolist()
        for start, end in zip(documents.starts[:-1], documents.starts[1:], strict=True)
    ]


def packed(documents, length, seed=0, **options):
    return PackedWindows(documents, sequence_length=length, seed=seed, pad_id=PAD, **options)


def all_rows(windows):
    return [windows[i] for i in range(len(windows))]


def fitting(documents, length):
    return min(length, len(documents.tokens))


@given(text_lengths, sequence_lengths, st.integers(0, 5))
def test_windows_are_the_stream_of_whole_documents(lengths, length, seed):
    documents = make_documents(lengths)
    windows = packed(documents, fitting(documents, length), seed)
    rows = all_rows(windows)
    real = [row["segment_ids"] > 0 for row in rows]
    inputs = np.concatenate([row["inputs"][kept] for row, kept in zip(rows, real, strict=True)])
    targets = np.concatenate([row["targets"][kept] for row, kept in zip(rows, real, strict=True)])
    assert inputs[1:].tolist() == targets[:-1].tolist()
    stream = [*inputs.tolist(), int(targets[-1])]
    ends = [i + 1 for i, token in enumerate(stream) if token == EOS]
    found = [stream[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    assert sorted(found) == sorted(document_ids(documents))


def test_unshuffled_stream_is_in_the_order_of_the_documents():
    documents = make_documents([3, 0, 5])
    rows = all_rows(packed(documents, 4, shuffle_documents=False))
    inputs = np.concatenate([row["inputs"] for row in rows])
    assert inputs[: len(documents.tokens) - 1].tolist() == documents.tokens[:-1].tolist()


def test_order_of_documents_follows_the_seed():
    documents = make_documents(range(1, 9))
    orders = [
        np.concatenate([row["inputs"] for row in all_rows(packed(documents, 8, seed))]).tolist()
        for seed in (0, 0, 1)
    ]
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]


@given(text_lengths, sequence_lengths)
def test_every_target_within_a_document_counts_once(lengths, length):
    documents = make_documents(lengths)
    rows = all_rows(packed(documents, fitting(documents, length)))
    counted = np.concatenate([row["targets"][row["loss_mask"]] for row in rows])
    expected = [token for ids in document_ids(documents) for token in ids[1:]]
    assert sorted(counted.tolist()) == sorted(expected)


@given(text_lengths, sequence_lengths)
def test_segments_and_positions_follow_the_documents(lengths, length):
    documents = make_documents(lengths)
    for row in all_rows(packed(documents, fitting(documents, length))):
        segment, position = 1, -1
        assert row["segment_ids"][0] == 1
        for i, token in enumerate(row["inputs"].tolist()):
            if token == PAD:
                break
            # A document opens with BOS, so each BOS past the first place starts a new segment.
            new = i > 0 and token == BOS
            segment, position = (segment + 1, 0) if new else (segment, position + 1)
            assert (row["segment_ids"][i], row["positions"][i]) == (segment, position)
            assert row["loss_mask"][i] == (row["targets"][i] != BOS)
        padding = row["inputs"] == PAD
        assert not np.any(padding[:-1] & ~padding[1:])
        assert np.all(row["targets"][padding] == PAD)
        for key in ("segment_ids", "positions", "loss_mask"):
            assert not np.any(row[key][padding])


def test_hand_cut_windows():
    # Stream: B a E B b c E; windows of 4 share one token: B a E B b | b c E.
    documents = make_documents([1, 2])
    first, second = all_rows(packed(documents, 4, shuffle_documents=False))
    assert first["inputs"].tolist() == [BOS, 1000, EOS, BOS]
    assert first["targets"].tolist() == [1000, EOS, BOS, 1001]
    assert first["segment_ids"].tolist() == [1, 1, 1, 2]
    assert first["positions"].tolist() == [0, 1, 2, 0]
    assert first["loss_mask"].tolist() == [True, True, False, True]
    assert second["inputs"].tolist() == [1001, 1002, PAD, PAD]
    assert second["targets"].tolist() == [1002, EOS, PAD, PAD]
    assert second["segment_ids"].tolist() == [1, 1, 0, 0]
    assert second["positions"].tolist() == [0, 1, 0, 0]
    assert second["loss_mask"].tolist() == [True, True, False, False]


def test_types_and_shapes():
    row = packed(make_documents([9, 9]), 8)[0]
    kinds = {key: (value.dtype, value.shape) for key, value in row.items()}
    assert kinds == {
        "inputs": (np.int32, (8,)),
        "targets": (np.int32, (8,)),
        "segment_ids": (np.int32, (8,)),
        "positions": (np.int32, (8,)),
        "loss_mask": (np.bool_, (8,)),
    }


def test_sequence_longer_than_the_corpus_is_an_error():
    documents = make_documents([8])
    assert len(packed(documents, 10)) == 1
    with pytest.raises(ValueError, match="sequence_length=11 exceeds the corpus of 10 tokens"):
        packed(documents, 11)


@pytest.mark.parametrize("index", [-1, 4])
def test_index_out_of_range(index):
    windows = packed(make_documents([10]), 3)
    assert len(windows) == 4
    with pytest.raises(IndexError, match=f"index={index}"):
        windows[index]


def batches_of(documents, batch_size=4, length=4, seed=0):
    return make_batches(
        documents, batch_size=batch_size, sequence_length=length, seed=seed, pad_id=PAD
    )


def epochs_of(documents, count, seed=0):
    """First inputs of the rows of `count` epochs, each epoch a list."""
    windows = packed(documents, 4, seed)
    rows = itertools.chain.from_iterable(
        batch["inputs"][:, :2].tolist() for batch in batches_of(documents, 3, seed=seed)
    )
    return [[tuple(row) for row in itertools.islice(rows, len(windows))] for _ in range(count)]


def test_epochs_cover_each_window_once_in_different_orders():
    documents = make_documents([20, 7, 0, 30])
    expected = sorted(tuple(row["inputs"][:2].tolist()) for row in all_rows(packed(documents, 4)))
    epochs = epochs_of(documents, 4)
    assert all(sorted(epoch) == expected for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_neighbouring_seeds_share_no_order_of_windows():
    # One document, so the windows are the same and only their order depends on the seed.
    documents = make_documents([120])
    orders = [tuple(epoch) for seed in range(4) for epoch in epochs_of(documents, 4, seed)]
    assert len(set(orders)) == 16


def test_batches_are_deterministic_and_stacked():
    documents = make_documents([20, 7, 0, 30])
    first, second = batches_of(documents), batches_of(documents)
    for _ in range(8):
        a, b = next(first), next(second)
        assert a["inputs"].shape == (4, 4)
        for key in a:
            np.testing.assert_array_equal(a[key], b[key])


@settings(max_examples=20)
@given(st.integers(0, 20), st.integers(0, 5), st.integers(1, 7))
def test_resumed_batches_are_identical(before, ahead, batch_size):
    documents = make_documents([20, 7, 0, 30])
    original = batches_of(documents, batch_size)
    for _ in range(before):
        next(original)
    state = json.loads(json.dumps(original.get_state()))
    resumed = batches_of(documents, batch_size)
    for _ in range(ahead):
        next(resumed)
    resumed.set_state(state)
    for _ in range(6):
        a, b = next(original), next(resumed)
        assert original.get_state() == resumed.get_state()
        for key in a:
            np.testing.assert_array_equal(a[key], b[key])


def test_a_batch_may_span_epochs():
    documents = make_documents([6])
    assert len(packed(documents, 4)) == 2
    inputs = next(batches_of(documents, 6))["inputs"].tolist()
    assert sorted(inputs) == sorted(
        3 * [row["inputs"].tolist() for row in all_rows(packed(documents, 4))]
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size=0 must be at least 1"),
        ({"length": 0}, "sequence_length=0 must be at least 1"),
        ({"seed": -1}, "seed=-1 must not be negative"),
    ],
)
def test_arguments_out_of_range_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        batches_of(make_documents([20]), **options)


def evaluate(documents, batch_size, length, stride):
    return list(
        evaluation_windows(
            documents, batch_size=batch_size, sequence_length=length, stride=stride, pad_id=PAD
        )
    )


@st.composite
def cuts(draw):
    """Lengths of the texts, sequence length, and a stride no larger."""
    length = draw(sequence_lengths)
    return draw(text_lengths), length, draw(st.integers(1, length))


@given(cuts(), st.integers(1, 5))
def test_evaluation_scores_every_token_once_with_enough_context(cut, batch_size):
    lengths, length, stride = cut
    documents = make_documents(lengths)
    scored = [np.zeros(len(ids), np.int64) for ids in document_ids(documents)]
    for batch in evaluate(documents, batch_size, length, stride):
        assert batch["inputs"].shape == (batch_size, length)
        for row in range(batch_size):
            index = batch["document_index"][row]
            real = batch["segment_ids"][row] > 0
            if index < 0:
                assert not real.any()
                continue
            ids = document_ids(documents)[index]
            inputs, targets = batch["inputs"][row], batch["targets"][row]
            num_real = real.sum()
            assert num_real == min(length, len(ids) - 1)
            assert real[:num_real].all()
            # Tokens are unlike one another but for BOS and EOS, so the text tells the place.
            start = next(
                i for i in range(len(ids)) if ids[i : i + num_real] == inputs[real].tolist()
            )
            assert targets[real].tolist() == ids[start + 1 : start + 1 + num_real]
            for column in np.flatnonzero(batch["loss_mask"][row]):
                scored[index][start + column + 1] += 1
                assert start == 0 or column >= length - stride
    for counts in scored:
        assert counts[0] == 0
        assert np.all(counts[1:] == 1)


@given(cuts())
def test_evaluation_positions_masks_and_padding(cut):
    lengths, length, stride = cut
    documents = make_documents(lengths)
    for batch in evaluate(documents, 3, length, stride):
        real = batch["segment_ids"] == 1
        place = np.broadcast_to(np.arange(length), real.shape)
        np.testing.assert_array_equal(batch["positions"], np.where(real, place, 0))
        assert not np.any(batch["loss_mask"] & ~real)
        assert np.all(batch["inputs"][~real] == PAD)
        assert np.all(batch["targets"][~real] == PAD)
        assert {batch[key].dtype for key in ("inputs", "targets", "segment_ids", "positions")} == {
            np.dtype(np.int32)
        }
        assert batch["loss_mask"].dtype == np.bool_
        assert batch["document_index"].dtype == np.int32


@given(cuts())
def test_evaluation_wastes_no_window_on_long_documents(cut):
    lengths, length, stride = cut
    documents = make_documents(lengths)
    rows = sum(
        (batch["document_index"] >= 0).sum() for batch in evaluate(documents, 2, length, stride)
    )
    num_targets = np.diff(documents.starts) - 1
    expected = 1 + np.ceil(np.maximum(num_targets - length, 0) / stride)
    assert rows == expected.sum()


@pytest.mark.parametrize("stride", [0, 9])
def test_stride_out_of_range_is_named_before_the_first_batch(stride):
    with pytest.raises(ValueError, match=rf"stride={stride} is not in \[1, sequence_length=8\]"):
        evaluation_windows(
            make_documents([20]), batch_size=2, sequence_length=8, stride=stride, pad_id=PAD
        )
