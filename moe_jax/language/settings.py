"""The configuration of a training run: its sections, checked, and kept with the run."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from moe_jax.language.config import LanguageModelConfig
from moe_jax.language.fit import LossConfig
from moe_jax.language.tokenizer import Tokenizer, load_tokenizer
from moe_jax.sharding import MeshConfig
from moe_jax.training.checkpoints import Checkpoints
from moe_jax.training.configs import check_known, from_mapping
from moe_jax.training.loop import LoopConfig
from moe_jax.training.optimizer import OptimizerConfig


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """What to train on; validates itself.

    Attributes:
        source, text_key, held_out_fraction: see `load_corpus`.
        tokenizer: path of a Hugging Face tokenizer.json; "" for bytes.
        cache_dir: folder of the token arrays; "" for `cache` in the workdir.
        batch_size: rows of a step, all micro-batches together.
        sequence_length: tokens of a row.
        accumulate: micro-batches a step is cut into.
        eval_tokens: held-out tokens scored during training; the end scores all of them.

    Raises:
        ValueError: if a number is out of range.
    """

    source: str = ""
    text_key: str = "text"
    held_out_fraction: float = 0.05
    tokenizer: str = ""
    cache_dir: str = ""
    batch_size: int = 16
    sequence_length: int = 256
    accumulate: int = 1
    eval_tokens: int = 65_536

    def __post_init__(self) -> None:
        for name in ("batch_size", "sequence_length", "accumulate", "eval_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.batch_size % self.accumulate:
            raise ValueError(
                f"batch_size={self.batch_size} is not divisible by accumulate={self.accumulate}"
            )


@dataclasses.dataclass(frozen=True)
class SampleConfig:
    """The text sampled at the end: its beginning, number of tokens, and temperature.

    Raises:
        ValueError: if a number is negative.
    """

    prompt: str = ""
    num_tokens: int = 400
    temperature: float = 0.7

    def __post_init__(self) -> None:
        for name in ("num_tokens", "temperature"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")


class Settings(NamedTuple):
    """The sections of a configuration, checked."""

    seed: int
    data: DataConfig
    optimizer: OptimizerConfig
    loss: LossConfig
    train: LoopConfig
    sample: SampleConfig
    mesh: MeshConfig
    model: Mapping[str, Any]


SECTIONS = {
    "data": DataConfig,
    "optimizer": OptimizerConfig,
    "loss": LossConfig,
    "train": LoopConfig,
    "sample": SampleConfig,
    "mesh": MeshConfig,
}


def read_settings(config: Mapping[str, Any]) -> Settings:
    """Checks a configuration; see `configs/language/stdlib_moe.py` for one.

    The model's vocab_size may be left out: it is then the tokenizer's.

    Raises:
        ValueError: naming the key, its value and what is accepted.
    """
    check_known(config, {"seed": 0, "model": 0, **SECTIONS}, "")
    seed = config.get("seed", 0)
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**31:
        raise ValueError(f"config.seed={seed!r} must be an integer in [0, 2^31)")
    sections: dict[str, Any] = {
        name: from_mapping(cls, config.get(name, {}), name) for name, cls in SECTIONS.items()
    }
    model = dict(config.get("model", {}).items())
    from_mapping(LanguageModelConfig, {"vocab_size": 1} | model, "model")
    return Settings(seed=seed, model=model, **sections)


def model_config(fields: Mapping[str, Any], tokenizer: Tokenizer) -> LanguageModelConfig:
    """The model's configuration, with the tokenizer's vocabulary size if it names none.

    Raises:
        ValueError: if it names a smaller one.
    """
    config = from_mapping(
        LanguageModelConfig, {"vocab_size": tokenizer.vocab_size} | dict(fields), "model"
    )
    if config.vocab_size < tokenizer.vocab_size:
        raise ValueError(
            f"config.model.vocab_size={config.vocab_size} is below the tokenizer's "
            f"{tokenizer.vocab_size}"
        )
    return config


def check_configuration(folder: Path, config: Mapping[str, Any]) -> list[str]:
    """What differs from the configuration that the folder's checkpoints were made with.

    Returns:
        A line for every entry that differs; none without checkpoints.

    Raises:
        ValueError: if an entry differs that decides the batches, or the stored file is damaged.
    """
    path = folder / "config.json"
    if not path.exists() or Checkpoints(folder / "checkpoints").latest_step() is None:
        return []
    stored = read_configuration(folder)
    before, now = _batch_keys(stored), _batch_keys(config)
    for name, value in now.items():
        if value != before[name]:
            raise ValueError(
                f"config.{name}={value!r} differs from the {before[name]!r} that {folder} was "
                "started with, so its position in the data has no meaning; use another workdir"
            )
    file, copy = Path(now["data.tokenizer"]).expanduser(), folder / "tokenizer.json"
    if file.is_file() and copy.exists() and file.read_bytes() != copy.read_bytes():
        raise ValueError(f"config.data.tokenizer={str(file)!r} is no longer the same as {copy}")
    was, entries = _entries(stored), _entries(json.loads(json.dumps(config)))
    names = [name for name in {**was, **entries} if was.get(name) != entries.get(name)]
    return [f"config.{name}: {was.get(name)!r} -> {entries.get(name)!r}" for name in names]


def read_configuration(folder: Path) -> dict[str, Any]:
    """What `write_configuration` wrote.

    Raises:
        ValueError: if it is missing or damaged.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
        if not isinstance(config, dict):
            raise ValueError("not a JSON object")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    return config


def write_configuration(folder: Path, config: Mapping[str, Any]) -> None:
    """Writes `config.json`, the configuration of the steps taken from now on, and its tokenizer.

    The folder keeps a copy of the tokenizer's file, which may be elsewhere, or gone, later on.
    """
    tokenizer = from_mapping(DataConfig, config.get("data", {}), "data").tokenizer
    if tokenizer:
        _write(folder / "tokenizer.json", Path(tokenizer).expanduser().read_bytes())
    _write(folder / "config.json", (json.dumps(config, indent=1) + "\n").encode())


def find_tokenizer(folder: Path, tokenizer: str) -> Tokenizer:
    """The tokenizer that a run names `tokenizer`, from the folder's copy if there is one.

    Raises:
        ValueError: as `load_tokenizer`.
    """
    copy = folder / "tokenizer.json"
    return load_tokenizer(str(copy) if tokenizer and copy.exists() else tokenizer)


def _write(path: Path, content: bytes) -> None:
    """Whole or not at all."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_bytes(content)
    partial.replace(path)


def _entries(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values by dotted name."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        inner = _entries(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {}
        found |= inner or {f"{prefix}{name}": value}
    return found


def _batch_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """What decides the sequence of batches."""
    data = from_mapping(DataConfig, config.get("data", {}), "data")
    names = ("source", "text_key", "held_out_fraction", "tokenizer", "batch_size")
    keys = {f"data.{name}": getattr(data, name) for name in (*names, "sequence_length")}
    return keys | {"seed": config.get("seed", 0)}
