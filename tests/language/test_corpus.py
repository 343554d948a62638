import hashlib
import json
import os
import pathlib
import sysconfig
import zipfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_jax.language import corpus as corpus_module
from moe_jax.language.corpus import held_out_texts, load_corpus
from moe_jax.language.tokenizer import ByteTokenizer

BOS, EOS = ByteTokenizer().bos_id, ByteTokenizer().eos_id


def load(source, tokenizer=None, fraction=0.5, cache_dir=None, **options):
    tokenizer = tokenizer or ByteTokenizer()
    return load_corpus(
        str(source) if source else source,
        tokenizer,
        held_out_fraction=fraction,
        cache_dir=cache_dir,
        **options,
    )


def write_texts(folder, count=12):
    """Texts file_00.txt ...: with a fraction of a half, some are on either side."""
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(count):
        (folder / f"file_{i:02}.txt").write_bytes(f"text {i} ".encode() * (i + 1))
    return folder / "*.txt"


def sides(corpus):
    """Side of each document by the last part of its name."""
    return {
        pathlib.PurePath(name).name: side
        for side in ("train", "held_out")
        for name in getattr(corpus, side).names
    }


def texts_of(documents):
    ids = [
        documents.tokens[start:end]
        for start, end in zip(documents.starts[:-1], documents.starts[1:], strict=True)
    ]
    assert all(document[0] == BOS and document[-1] == EOS for document in ids)
    return [bytes(document[1:-1].astype(np.uint8)) for document in ids]


def test_documents_hold_the_bytes_of_the_files(tmp_path):
    corpus = load(write_texts(tmp_path))
    for documents in (corpus.train, corpus.held_out):
        texts = texts_of(documents)
        assert texts == [pathlib.Path(name).read_bytes() for name in documents.names]
        assert documents.num_bytes.tolist() == [len(text) for text in texts]
        assert list(documents.names) == sorted(documents.names)
    assert len(corpus.train) + len(corpus.held_out) == 12


def test_report_counts_what_is_stored(tmp_path):
    corpus = load(write_texts(tmp_path))
    report = corpus.report
    assert report.num_files == 12
    assert report.train_documents + report.held_out_documents == 12
    assert report.train_tokens == len(corpus.train.tokens)
    assert report.train_tokens == report.train_bytes + 2 * report.train_documents
    assert report.held_out_tokens == report.held_out_bytes + 2 * report.held_out_documents
    assert str(report).startswith("12 files; train ")


def test_side_is_the_hash_of_the_content(tmp_path):
    corpus = load(write_texts(tmp_path), fraction=0.3)
    for side in ("train", "held_out"):
        for name in getattr(corpus, side).names:
            digest = hashlib.sha256(pathlib.Path(name).read_bytes()).hexdigest()
            fraction = int(digest[:16], 16) / 16**16
            assert (fraction < 0.3) == (side == "held_out")


def test_adding_files_moves_no_other(tmp_path):
    glob = write_texts(tmp_path, 12)
    before = sides(load(glob))
    after = sides(load(write_texts(tmp_path, 40)))
    assert before.items() < after.items()


def test_held_out_share_is_near_the_fraction(tmp_path):
    lines = [json.dumps({"text": f"document {i}"}) for i in range(2000)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    report = load(tmp_path / "a.jsonl", fraction=0.2).report
    # Binomial(2000, 0.2): standard deviation 18, so 90 is five of them.
    assert abs(report.held_out_documents - 400) < 90


def test_copies_are_kept_once_and_counted(tmp_path):
    glob = write_texts(tmp_path)
    for i in range(5):
        copy = (tmp_path / f"file_{i:02}.txt").read_bytes()
        (tmp_path / f"z_copy_{i}.txt").write_bytes(copy)
    corpus = load(glob)
    assert corpus.report.num_duplicates == 5
    assert not any("copy" in name for name in sides(corpus))
    texts = texts_of(corpus.train) + texts_of(corpus.held_out)
    assert len(set(texts)) == len(texts) == 12


def test_held_out_texts_are_those_of_the_corpus_in_order(tmp_path):
    glob = write_texts(tmp_path)
    lines = [json.dumps({"text": f"line {i}"}) for i in range(12)]
    (tmp_path / "b.jsonl").write_text("\n".join(lines))
    source = f"{glob},{tmp_path}/*.jsonl"
    documents = load(source).held_out
    texts = held_out_texts(source, held_out_fraction=0.5)
    assert [name for name, _ in texts] == list(documents.names)
    assert [text for _, text in texts] == texts_of(documents)
    assert any(".jsonl:" in name for name in documents.names)


def test_byte_order_mark_and_line_ends_are_kept(tmp_path):
    glob = write_texts(tmp_path)
    text = b"\xef\xbb\xbfone\r\ntwo\rthree\n"
    (tmp_path / "odd.txt").write_bytes(text)
    corpus = load(glob)
    assert text in texts_of(corpus.train) + texts_of(corpus.held_out)


def test_files_that_are_not_utf8_are_skipped_and_counted(tmp_path):
    glob = write_texts(tmp_path)
    for i in range(5):
        (tmp_path / f"latin_{i}.txt").write_bytes(b"caf\xe9 %d" % i)
    (tmp_path / "cut.jsonl").write_bytes(b'{"text": "a"}\n{"text": "caf\xc3')
    report = load(f"{glob},{tmp_path}/*.jsonl").report
    skipped = report.skipped["not UTF-8"]
    assert skipped.total == 6
    assert [pathlib.PurePath(name).name for name in skipped.examples] == [
        "cut.jsonl",
        "latin_0.txt",
        "latin_1.txt",
    ]
    assert report.train_documents + report.held_out_documents == 12
    assert "6 not UTF-8 (" in str(report)


def test_no_utf8_file_at_all_is_an_error(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xff")
    (tmp_path / "b.txt").write_bytes(b"\xfe")
    with pytest.raises(ValueError, match=r"holds no document: 2 files, 2 not UTF-8 \(.*a\.txt"):
        load(tmp_path / "*.txt")


def test_empty_files_are_skipped_and_counted(tmp_path):
    glob = write_texts(tmp_path)
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "blank.jsonl").write_bytes(b"\n\n")
    (tmp_path / "part.jsonl").write_bytes(b'{"text": ""}\n')
    skipped = load(f"{glob},{tmp_path}/*.jsonl").report.skipped["empty"]
    assert skipped.total == 3
    assert any(name.endswith("part.jsonl:1") for name in skipped.examples)


def test_only_empty_files_are_an_error(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"")
    with pytest.raises(ValueError, match=r"holds no document: 1 files, 1 empty"):
        load(tmp_path / "a.txt")


def test_unreadable_files_are_skipped_and_counted(tmp_path, monkeypatch):
    glob = write_texts(tmp_path)
    (tmp_path / "dangling.txt").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe.txt")
    read_bytes = pathlib.Path.read_bytes

    def forbid(path):
        if path.name == "file_03.txt":
            raise PermissionError("forbidden")
        return read_bytes(path)

    monkeypatch.setattr(pathlib.Path, "read_bytes", forbid)
    report = load(glob).report
    assert report.skipped["unreadable"].total == 3
    assert report.train_documents + report.held_out_documents == 11


def test_globs_are_recursive_joined_by_commas_and_start_at_home(tmp_path, monkeypatch):
    write_texts(tmp_path / "a" / "b")
    (tmp_path / "c.md").write_text("markdown")
    monkeypatch.setenv("HOME", str(tmp_path))
    corpus = load("~/**/*.txt, ~/*.md ,~/c.md")
    assert corpus.report.num_files == 13
    assert corpus.report.num_duplicates == 0


@pytest.mark.parametrize("missing", ["none*.txt", "folder"])
def test_glob_without_a_file_is_named(tmp_path, missing):
    glob = write_texts(tmp_path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match="matches no file") as caught:
        load(f"{glob},{tmp_path}/{missing}")
    assert repr(f"{tmp_path}/{missing}") in str(caught.value)


def test_no_glob_is_an_error():
    with pytest.raises(ValueError, match="holds no glob"):
        load(" , ")


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1, float("nan")])
def test_fraction_out_of_range_is_named(tmp_path, fraction):
    with pytest.raises(ValueError, match=f"held_out_fraction={fraction} is not between"):
        load(write_texts(tmp_path), fraction=fraction)


@pytest.mark.parametrize(("fraction", "side"), [(1e-9, "held_out"), (1 - 1e-9, "train")])
def test_side_without_a_document_is_an_error(tmp_path, fraction, side):
    with pytest.raises(ValueError, match=f"leaves no {side} document among the 12 of source="):
        load(write_texts(tmp_path), fraction=fraction)


def test_jsonl_lines_are_documents_named_by_line(tmp_path):
    lines = [json.dumps({"id": i, "body": f"Größe {i}\r\n"}) for i in range(20)]
    content = "\ufeff" + "\r\n".join([*lines[:10], "", *lines[10:]])
    (tmp_path / "a.jsonl").write_bytes(content.encode())
    corpus = load(tmp_path / "*.jsonl", text_key="body")
    texts = {
        name: text
        for documents in (corpus.train, corpus.held_out)
        for name, text in zip(documents.names, texts_of(documents), strict=True)
    }
    assert len(texts) == 20
    assert texts[f"{tmp_path}/a.jsonl:1"] == "Größe 0\r\n".encode()
    assert texts[f"{tmp_path}/a.jsonl:12"] == "Größe 10\r\n".encode()


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "plain text",
        "[1]",
        "3",
        '"text"',
        "null",
        '{"body": "b"}',
        '{"text": 3}',
        '{"text": "\\ud800"}',
        "[" * 100_000,
    ],
)
def test_bad_jsonl_line_names_file_and_line(tmp_path, line):
    good = [json.dumps({"text": f"document {i}"}) for i in range(2)]
    (tmp_path / "a.jsonl").write_text("\n".join([good[0], line, good[1]]))
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2: not ") as caught:
        load(tmp_path / "*.jsonl")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_default_is_the_standard_library_without_its_tests():
    corpus = load(None, fraction=0.05)
    names = corpus.train.names + corpus.held_out.names
    assert {"argparse.py", "json/decoder.py"} <= set(names)
    assert all(name.endswith(".py") for name in names)
    excluded = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    assert not any(excluded & set(name.split("/")) for name in names)
    assert corpus.report.train_bytes > 5_000_000
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    first = corpus.held_out.names[0]
    assert texts_of(corpus.held_out)[0] == (root / first).read_bytes()


def test_standard_library_partly_in_an_archive(tmp_path, monkeypatch):
    root = tmp_path / "lib" / "python3"
    root.mkdir(parents=True)
    for i in range(6):
        (root / f"loose_{i}.py").write_text(f"loose = {i}")
    (root / "test").mkdir()
    (root / "test" / "test_loose.py").write_text("assert True")
    version = f"{corpus_module.sys.version_info.major}{corpus_module.sys.version_info.minor}"
    with zipfile.ZipFile(tmp_path / "lib" / f"python{version}.zip", "w") as archive:
        for i in range(6):
            archive.writestr(f"pack/zipped_{i}.py", f"zipped = {i}")
        archive.writestr("pack/tests/test_zipped.py", "assert 1")
        archive.writestr("pack/zipped.pyc", b"\0")
    monkeypatch.setattr(corpus_module.sysconfig, "get_path", lambda name: str(root))
    corpus = load(None)
    names = sorted(corpus.train.names + corpus.held_out.names)
    expected = [f"loose_{i}.py" for i in range(6)] + [f"pack/zipped_{i}.py" for i in range(6)]
    assert names == expected
    assert b"zipped = 3" in texts_of(corpus.train) + texts_of(corpus.held_out)


class CountingTokenizer(ByteTokenizer):
    calls = 0

    def encode(self, text):
        type(self).calls += 1
        return super().encode(text)


@pytest.fixture
def counting():
    CountingTokenizer.calls = 0
    return CountingTokenizer()


def test_second_load_tokenizes_nothing_and_gives_the_same(tmp_path, counting):
    glob = write_texts(tmp_path / "texts")
    first = load(glob, counting, cache_dir=tmp_path / "cache")
    second = load(glob, counting, cache_dir=tmp_path / "cache")
    assert CountingTokenizer.calls == 12
    for side in ("train", "held_out"):
        a, b = getattr(first, side), getattr(second, side)
        assert isinstance(b.tokens, np.memmap)
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_array_equal(a.starts, b.starts)
        np.testing.assert_array_equal(a.num_bytes, b.num_bytes)
        assert a.names == b.names
    assert first.report == second.report


def test_memory_and_disk_agree(tmp_path):
    glob = write_texts(tmp_path / "texts")
    on_disk, in_memory = load(glob, cache_dir=tmp_path / "cache"), load(glob)
    for a, b in zip(on_disk[:2], in_memory[:2], strict=True):
        assert a.tokens.dtype == b.tokens.dtype == np.uint16
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_array_equal(a.starts, b.starts)


def change_content(texts):
    (texts / "file_05.txt").write_text("another text")


def change_name(texts):
    (texts / "file_05.txt").rename(texts / "file_99.txt")


@pytest.mark.parametrize("change", [change_content, change_name])
def test_changed_files_miss_the_cache(tmp_path, counting, change):
    glob = write_texts(tmp_path / "texts")
    load(glob, counting, cache_dir=tmp_path / "cache")
    change(tmp_path / "texts")
    corpus = load(glob, counting, cache_dir=tmp_path / "cache")
    assert CountingTokenizer.calls == 24
    assert texts_of(corpus.train) == [
        pathlib.Path(name).read_bytes() for name in corpus.train.names
    ]


def test_fraction_and_tokenizer_miss_the_cache(tmp_path, counting):
    glob = write_texts(tmp_path / "texts")
    cache = tmp_path / "cache"
    load(glob, counting, cache_dir=cache)
    load(glob, counting, cache_dir=cache, fraction=0.4)
    object.__setattr__(counting, "fingerprint", "another")
    load(glob, counting, cache_dir=cache)
    assert CountingTokenizer.calls == 36


def test_large_vocabulary_is_stored_in_32_bits(tmp_path):
    class LargeTokenizer(ByteTokenizer):
        def encode(self, text):
            return super().encode(text) + 70_000

    tokenizer = LargeTokenizer()
    object.__setattr__(tokenizer, "vocab_size", 80_000)
    tokens = load(write_texts(tmp_path), tokenizer).train.tokens
    assert tokens.dtype == np.uint32
    assert tokens.max() == 70_000 + ord("x")


def test_file_that_changes_meanwhile_is_named(tmp_path):
    glob = write_texts(tmp_path)

    class MeddlingTokenizer(ByteTokenizer):
        def encode(self, text):
            (tmp_path / "file_07.txt").write_text("changed")
            return super().encode(text)

    with pytest.raises(ValueError, match=r"file_07\.txt changed while the corpus was being read"):
        load(glob, MeddlingTokenizer())


@given(st.lists(st.binary(max_size=8), min_size=1, max_size=12), st.floats(0.1, 0.9))
def test_every_text_is_kept_once_or_counted(tmp_path_factory, contents, fraction):
    folder = tmp_path_factory.mktemp("texts")
    for i, content in enumerate(contents):
        (folder / f"{i:02}.txt").write_bytes(content)
    kept = []
    for content in contents:
        try:
            content.decode("utf-8")
        except UnicodeDecodeError:
            continue
        if content and content not in kept:
            kept.append(content)
    try:
        corpus = load(folder / "*.txt", fraction=fraction)
    except ValueError as error:
        assert not kept or "document among" in str(error)
        return
    assert sorted(texts_of(corpus.train) + texts_of(corpus.held_out)) == sorted(kept)
    left_out = sum(skipped.total for skipped in corpus.report.skipped.values())
    assert len(kept) + left_out + corpus.report.num_duplicates == len(contents)


def test_jsonl_without_the_text_key_says_which_setting_names_it(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": "a"}')
    with pytest.raises(ValueError, match="line 1: .* string 'text'; text_key names the field"):
        load(tmp_path / "*.jsonl")
