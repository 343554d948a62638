"""Text to token ids and back: bytes by default, or any Hugging Face `tokenizer.json`."""

import dataclasses
import hashlib
import pathlib
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int32

BOS_NAMES = (
    "<s>",
    "<bos>",
    "<|begin_of_text|>",
    "<|startoftext|>",
    "<|bos|>",
    "[BOS]",
    "<\uff5cbegin\u2581of\u2581sentence\uff5c>",
    "<|endoftext|>",
)
EOS_NAMES = (
    "</s>",
    "<eos>",
    "<|end_of_text|>",
    "<|eos|>",
    "[EOS]",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "<|endoftext|>",
)
PAD_NAMES = ("<pad>", "<|pad|>", "<|padding|>", "[PAD]", "<|finetune_right_pad_id|>")


@runtime_checkable
class Tokenizer(Protocol):
    """What the data pipeline and the decoding loop ask of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """One past the largest id, specials included."""

    @property
    def bos_id(self) -> int:
        """Opens a document."""

    @property
    def eos_id(self) -> int:
        """Closes a document."""

    @property
    def pad_id(self) -> int:
        """Fills a row past its last document."""

    @property
    def fingerprint(self) -> str:
        """Equal for two tokenizers only if they encode every text alike."""

    def encode(self, text: str | bytes) -> Int32[np.ndarray, " tokens"]:
        """Ids of a text, or of its bytes in UTF-8, without BOS and EOS."""

    def decode(self, ids: Any) -> str:
        """Text of a sequence or array of ids; specials are dropped."""


@dataclasses.dataclass(frozen=True)
class ByteTokenizer:
    """Ids 0 to 255 are bytes; BOS, EOS and padding follow."""

    bos_id: int = dataclasses.field(default=256, init=False)
    eos_id: int = dataclasses.field(default=257, init=False)
    pad_id: int = dataclasses.field(default=258, init=False)
    vocab_size: int = dataclasses.field(default=259, init=False)
    fingerprint: str = dataclasses.field(default="bytes", init=False)

    def encode(self, text: str | bytes) -> Int32[np.ndarray, " tokens"]:
        """The bytes of any text, UTF-8 or not; no specials are added."""
        text = text.encode() if isinstance(text, str) else text
        return np.frombuffer(text, np.uint8).astype(np.int32)

    def decode(self, ids: Any) -> str:
        """Text of a sequence or array of ids; bytes that are not UTF-8 become U+FFFD."""
        ids = np.asarray(ids, np.int64).reshape(-1)
        return bytes(ids[(ids >= 0) & (ids < 256)].tolist()).decode("utf-8", errors="replace")


def load_tokenizer(path: str | None) -> Tokenizer:
    """The byte tokenizer if `path` is None or empty, else the one in a `tokenizer.json` file.

    Of such a file, specials are found by their customary names; one that is missing gets the next
    id past the vocabulary, so vocab_size grows. Special tokens spelled out in a text are encoded
    like other text, so that a document cannot end itself.

    Raises:
        ValueError: if the file is missing, unreadable or no tokenizer, or if the `tokenizers`
            package is not installed.
    """
    if not path:
        return ByteTokenizer()
    try:
        content = pathlib.Path(path).expanduser().read_bytes()
    except OSError as error:
        raise ValueError(f"tokenizer={path!r} cannot be read: {error.strerror}") from error
    try:
        import tokenizers
    except ImportError as error:
        raise ValueError(
            f"tokenizer={path!r} needs the extra `pretrained`: pip install 'moe_jax[pretrained]'"
        ) from error
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(content)
    # The package raises bare Exception for whatever it cannot parse.
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"tokenizer={path!r} is not a tokenizer.json: {reason}") from error
    # Files made for short-input models cut or fill every text to a fixed length.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    specials = {
        token.content: token_id
        for token_id, token in tokenizer.get_added_tokens_decoder().items()
        if token.special
    }
    vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    special_ids = []
    for names in (BOS_NAMES, EOS_NAMES, PAD_NAMES):
        found = _first_known(names, specials)
        special_ids.append(vocab_size if found is None else found)
        vocab_size += found is None
    bos_id, eos_id, pad_id = special_ids
    return _FileTokenizer(
        tokenizer=tokenizer,
        bos_id=bos_id,
        eos_id=eos_id,
        pad_id=pad_id,
        vocab_size=vocab_size,
        fingerprint=f"tokenizer.json {hashlib.sha256(content).hexdigest()}",
    )


@dataclasses.dataclass(frozen=True)
class _FileTokenizer:
    tokenizer: Any
    bos_id: int
    eos_id: int
    pad_id: int
    vocab_size: int
    fingerprint: str

    def encode(self, text: str | bytes) -> Int32[np.ndarray, " tokens"]:
        text = text if isinstance(text, str) else text.decode("utf-8")
        encoding = self.tokenizer.encode(text, add_special_tokens=False)
        return np.asarray(encoding.ids, np.int32)

    def decode(self, ids: Any) -> str:
        # Ids past the vocabulary, such as appended specials, are skipped by the package.
        ids = np.asarray(ids, np.int64).reshape(-1).tolist()
        return self.tokenizer.decode(ids, skip_special_tokens=True)


def _first_known(names: Sequence[str], specials: dict[str, int]) -> int | None:
    return next((specials[name] for name in names if name in specials), None)
