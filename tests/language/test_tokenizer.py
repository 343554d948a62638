import json
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_jax.language.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer

TRAINING_TEXT = "def f(x):\n    return x + 1\n\nprint('naïve café', f(2))\r\n" * 20


def write_byte_level_bpe(path, special_tokens=()):
    """A byte-level BPE of about 300 tokens; every text is in its reach."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=list(special_tokens),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TRAINING_TEXT], trainer)
    tokenizer.save(str(path))
    return str(path)


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    return load_tokenizer(write_byte_level_bpe(path, ("<s>", "</s>", "<pad>")))


@given(st.binary(max_size=64))
def test_bytes_are_their_own_ids(text):
    assert ByteTokenizer().encode(text).tolist() == list(text)


@given(st.text(max_size=64))
def test_bytes_round_trip(text):
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode(text.encode())) == text


def test_byte_specials_follow_the_bytes_and_are_dropped_in_decoding():
    tokenizer = ByteTokenizer()
    specials = [tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id]
    assert specials == [256, 257, 258]
    assert tokenizer.vocab_size == 259
    assert tokenizer.decode([256, 104, 105, 257, 258, 258]) == "hi"


def test_bytes_that_are_not_utf8_decode_to_the_replacement_character():
    assert ByteTokenizer().decode([0x61, 0xFF, 0x62]) == "a\ufffdb"


@pytest.mark.parametrize("path", [None, ""])
def test_no_path_means_bytes(path):
    assert load_tokenizer(path) == ByteTokenizer()


def test_both_kinds_are_tokenizers(bpe):
    assert isinstance(ByteTokenizer(), Tokenizer)
    assert isinstance(bpe, Tokenizer)


@given(text=st.text(max_size=64))
def test_byte_level_bpe_round_trips(bpe, text):
    ids = bpe.encode(text.encode())
    assert ids.dtype == np.int32
    assert bpe.decode(ids) == text


def test_bpe_merges_bytes(bpe):
    assert len(bpe.encode(TRAINING_TEXT.encode())) < len(TRAINING_TEXT.encode()) / 2


def test_specials_of_the_file_are_found_and_dropped_in_decoding(bpe):
    assert [bpe.bos_id, bpe.eos_id, bpe.pad_id] == [0, 1, 2]
    ids = [bpe.bos_id, *bpe.encode(b"return x"), bpe.eos_id, bpe.pad_id]
    assert bpe.decode(ids) == "return x"


def test_a_special_spelled_out_in_a_text_is_text(bpe):
    ids = bpe.encode(b"a</s>b")
    assert bpe.eos_id not in ids
    assert bpe.decode(ids) == "a</s>b"


def test_missing_specials_are_appended_past_the_vocabulary(tmp_path):
    path = write_byte_level_bpe(tmp_path / "tokenizer.json", ("<|endoftext|>",))
    tokenizer = load_tokenizer(path)
    size = len(json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"])
    # GPT-2 has one token for both ends, and no padding.
    assert (tokenizer.bos_id, tokenizer.eos_id) == (0, 0)
    assert (tokenizer.pad_id, tokenizer.vocab_size) == (size, size + 1)
    assert tokenizer.decode([tokenizer.pad_id, *tokenizer.encode(b"x"), tokenizer.pad_id]) == "x"


def test_a_file_without_specials_gets_three_distinct_ones(tmp_path):
    tokenizer = load_tokenizer(write_byte_level_bpe(tmp_path / "tokenizer.json"))
    size = len(json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"])
    specials = [tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id]
    assert specials == [size, size + 1, size + 2]
    assert tokenizer.vocab_size == size + 3


def test_truncation_and_padding_in_the_file_are_ignored(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    path = write_byte_level_bpe(tmp_path / "tokenizer.json")
    tokenizer = tokenizers.Tokenizer.from_file(path)
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=16)
    tokenizer.save(path)
    loaded = load_tokenizer(path)
    assert loaded.decode(loaded.encode(TRAINING_TEXT.encode())) == TRAINING_TEXT
    assert len(loaded.encode(b"~")) == 1


def test_fingerprint_follows_the_content_of_the_file(tmp_path):
    first = write_byte_level_bpe(tmp_path / "a.json", ("[BOS]",))
    second = write_byte_level_bpe(tmp_path / "b.json", ("<bos>",))
    copy = tmp_path / "c.json"
    copy.write_bytes((tmp_path / "a.json").read_bytes())
    prints = [load_tokenizer(str(path)).fingerprint for path in (first, second, copy)]
    assert prints[0] == prints[2]
    assert len({*prints, ByteTokenizer().fingerprint}) == 3


def test_missing_file_is_named(tmp_path):
    path = str(tmp_path / "none.json")
    with pytest.raises(ValueError, match="none.json' cannot be read: No such file"):
        load_tokenizer(path)


@pytest.mark.parametrize("content", [b"", b"{}", b"not json", b"\xff\xfe"])
def test_invalid_file_is_named_in_one_line(tmp_path, content):
    pytest.importorskip("tokenizers")
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"tokenizer\.json' is not a tokenizer\.json") as caught:
        load_tokenizer(str(path))
    assert "\n" not in str(caught.value)


def test_missing_package_names_the_extra(tmp_path, monkeypatch):
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match=r"moe_jax\[pretrained\]"):
        load_tokenizer(str(path))


def test_text_and_its_bytes_have_the_same_ids(bpe):
    for tokenizer in (ByteTokenizer(), bpe):
        for text in ("", "def f(x)", "na\u00efve"):
            assert tokenizer.encode(text).tolist() == tokenizer.encode(text.encode()).tolist()
