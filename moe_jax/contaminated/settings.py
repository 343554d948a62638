"""The configuration of a rate study: checked, and kept with its results."""

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_jax.contaminated.designs import DESIGNS
from moe_jax.training.configs import check_known, from_mapping
from moe_jax.training.rates import MIN_WIDTHS

STARTS = ("truth", "tail")
# They do not change a fit that is already there.
FREE_KEYS = {"replicates", "sizes", "designs", "level", "bootstrap"}


@dataclasses.dataclass(frozen=True)
class RateSettings:
    """What a rate study fits and how it is summarised; validates itself.

    Attributes:
        seed: of all data.
        designs: names of `moe_jax.contaminated.designs.DESIGNS`.
        sizes: observations of a data set, ascending.
        replicates: data sets of each size.
        start: "truth", as in the paper, or "tail", which does not know the truth.
        chunk_rows: most rows that one compiled call holds, all its data sets together.
        bootstrap: draws of the replicate bootstrap behind the intervals.
        level: of the intervals.

    Raises:
        ValueError: if a value is out of range.
    """

    designs: tuple[str, ...]
    sizes: tuple[int, ...]
    replicates: int
    seed: int = 0
    start: str = "truth"
    chunk_rows: int = 200_000
    bootstrap: int = 2000
    level: float = 0.95

    def __post_init__(self) -> None:
        for name in self.designs:
            if name not in DESIGNS:
                raise ValueError(f"designs={name!r} is not one of {', '.join(DESIGNS)}")
        if not self.designs or len(set(self.designs)) < len(self.designs):
            raise ValueError(f"designs={self.designs} must be one or more different names")
        is_sound = all(type(size) is int and 50 <= size <= 10**7 for size in self.sizes)
        is_rising = list(self.sizes) == sorted(set(self.sizes))
        if not (is_sound and is_rising and len(self.sizes) >= MIN_WIDTHS):
            raise ValueError(
                f"sizes={self.sizes} must be {MIN_WIDTHS} or more ascending integers in [50, 10^7]"
            )
        if not 0 <= self.seed < 2**31:
            raise ValueError(f"seed={self.seed} must be in [0, 2^31)")
        if self.start not in STARTS:
            raise ValueError(f"start={self.start!r} must be one of {', '.join(STARTS)}")
        for name, least in (("replicates", 2), ("chunk_rows", 1), ("bootstrap", 100)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")
        if not (math.isfinite(self.level) and 0 < self.level < 1):
            raise ValueError(f"level={self.level} must be in (0, 1)")


def read_settings(config: Mapping[str, Any]) -> RateSettings:
    """Checks a configuration; see `configs/contaminated/rates.py` for one.

    Raises:
        ValueError: naming the key, its value and what is accepted.
    """
    check_known(config, {"study": 0}, "")
    return from_mapping(RateSettings, config.get("study", {}), "study")


def check_same_study(folder: Path, config: Mapping[str, Any]) -> None:
    """Refuses to mix fits of two studies in one folder.

    More replicates, sizes or designs continue a study; another seed or start begins a new one.

    Raises:
        ValueError: if an entry differs that decides the fits, or the stored file is damaged.
    """
    path = folder / "config.json"
    if not path.exists():
        return
    try:
        stored = dataclasses.asdict(read_settings(json.loads(path.read_text())))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    for name, value in dataclasses.asdict(read_settings(config)).items():
        if name not in FREE_KEYS and value != stored[name]:
            raise ValueError(
                f"config.study.{name}={value!r} differs from the {stored[name]!r} of the fits in "
                f"{folder}; use another workdir"
            )
