"""The configuration of a run on a simulated system: its sections, checked."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from moe_jax.symmetries import simulate
from moe_jax.symmetries.config import LatentMoSConfig
from moe_jax.symmetries.data import check_integer
from moe_jax.symmetries.fit import OPTIMIZER, as_shares
from moe_jax.symmetries.losses import LossConfig
from moe_jax.symmetries.neural import NEURAL
from moe_jax.symmetries.simulate import Trajectories
from moe_jax.symmetries.swing import swing
from moe_jax.training.configs import check_known, from_mapping
from moe_jax.training.optimizer import OptimizerConfig

SYSTEMS: dict[str, Callable[..., Trajectories]] = {
    "oscillators": simulate.oscillators,
    "pendulum": simulate.pendulum,
    "damped_pendulum": simulate.damped_pendulum,
    "double_pendulum": simulate.double_pendulum,
    "two_body": simulate.two_body,
    "lotka_volterra": simulate.lotka_volterra,
    "reaction_diffusion": simulate.reaction_diffusion,
    "kuramoto": simulate.kuramoto,
    "lorenz": simulate.lorenz,
    "swing": swing,
}
# Arguments of simulators that other settings give, or the library alone.
_OTHER_ARGUMENTS = {"seed", "rows", "times"}


@dataclasses.dataclass(frozen=True)
class SystemConfig:
    """What to simulate and how little of it is seen; validates itself.

    Attributes:
        name: a system, see `SYSTEMS`.
        options: arguments of its simulator besides seed, rows and times.
        rows, val_rows, test_rows: trajectories of each set.
        fraction, noise: see `low_resolution`.

    Raises:
        ValueError: naming the field, its value and what is accepted.
    """

    name: str = "pendulum"
    options: Any = dataclasses.field(default_factory=dict)
    rows: int = 64
    val_rows: int = 64
    test_rows: int = 200
    fraction: float = 0.25
    noise: float = 0.02

    def __post_init__(self) -> None:
        if self.name not in SYSTEMS:
            raise ValueError(f"name={self.name!r} is not one of {tuple(SYSTEMS)}")
        for name in ("rows", "val_rows", "test_rows"):
            check_integer(name, getattr(self, name), 1)
        accepted = inspect.signature(SYSTEMS[self.name]).parameters.keys() - _OTHER_ARGUMENTS
        if not isinstance(self.options, Mapping) or not set(self.options) <= accepted:
            raise ValueError(
                f"options={self.options!r} must be arguments of {self.name}: {sorted(accepted)}"
            )
        if not 0 < self.fraction <= 1 or not self.noise >= 0:
            raise ValueError(
                f"fraction={self.fraction} must be in (0, 1], noise={self.noise} not negative"
            )


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """How to fit; see `moe_jax.symmetries.fit.fit`.

    Attributes:
        steps, batch_size, drop, multistart: as there.
        planes: numbers of latent planes to choose from, by validation error.
        linear_latent: whether to train the linear latent model for the table as well.
        neural: names of neural baselines to train as well, see `moe_jax.symmetries.neural`; they
            need diffrax, and are not resumed within.
    """

    steps: int = 1500
    batch_size: int = 64
    drop: tuple[float, float] = (0.0, 0.5)
    multistart: int = 1
    planes: tuple[int, ...] = (1,)
    linear_latent: bool = True
    neural: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "multistart"):
            check_integer(name, getattr(self, name), 1)
        as_shares(self.drop)
        if not isinstance(self.planes, Sequence) or not self.planes:
            raise ValueError(f"planes={self.planes} must name at least one positive number")
        for planes in self.planes:
            check_integer("planes", planes, 1)
        if isinstance(self.neural, str):
            raise ValueError(f"neural={self.neural!r} must be a tuple of names")
        for name in self.neural:
            if name not in NEURAL:
                raise ValueError(f"neural={self.neural}: {name!r} is not one of {tuple(NEURAL)}")


class Settings(NamedTuple):
    """The sections of a configuration, checked."""

    seed: int
    system: SystemConfig
    train: TrainConfig
    loss: LossConfig
    optimizer: OptimizerConfig
    model: Mapping[str, Any]


def configuration(**sections: Any) -> ConfigDict:
    """A whole configuration: the defaults, and what the sections say otherwise.

    All keys are there, so that each can be set on the command line, `--config.model.experts=8`.

    Args:
        **sections: `seed`, or mappings `system`, `model`, `train`, `loss` and `optimizer`.

    Raises:
        ValueError: for a section or key that does not exist.
    """
    model = dataclasses.asdict(LatentMoSConfig(obs_dim=1))
    defaults: dict[str, Any] = {
        "seed": 0,
        "system": dataclasses.asdict(SystemConfig()),
        "model": {k: v for k, v in model.items() if k not in ("obs_dim", "planes")},
        "train": dataclasses.asdict(TrainConfig()),
        "loss": dataclasses.asdict(LossConfig()),
        "optimizer": dataclasses.asdict(OPTIMIZER),
    }
    check_known(sections, defaults, "")
    for name, section in sections.items():
        if isinstance(defaults[name], dict):
            check_known(section, defaults[name], name)
            defaults[name] |= section
        else:
            defaults[name] = section
    return ConfigDict(defaults)


def read_settings(config: Mapping[str, Any]) -> Settings:
    """Checks a configuration; see `configuration`.

    The model's `obs_dim` is the system's, and its `planes` are those that `train` chooses from.

    Raises:
        ValueError: naming the key, its value and what is accepted.
    """
    names = ("seed", "system", "train", "loss", "optimizer", "model")
    check_known(config, dict.fromkeys(names), "")
    for name in names[1:]:
        if not isinstance(config.get(name, {}), Mapping | ConfigDict):
            raise ValueError(f"config.{name}={config[name]!r} must be a section of keys")
    seed = config.get("seed", 0)
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**31:
        raise ValueError(f"config.seed={seed!r} must be an integer in [0, 2^31)")
    model = dict(config.get("model", {}).items())
    for name in ("obs_dim", "planes"):
        if name in model:
            raise ValueError(f"config.model.{name} follows from system and train")
    from_mapping(LatentMoSConfig, model | {"obs_dim": 1}, "model")
    optimizer = dataclasses.asdict(OPTIMIZER) | dict(config.get("optimizer", {}).items())
    return Settings(
        seed=seed,
        system=from_mapping(SystemConfig, config.get("system", {}), "system"),
        train=from_mapping(TrainConfig, config.get("train", {}), "train"),
        loss=from_mapping(LossConfig, config.get("loss", {}), "loss"),
        optimizer=from_mapping(OptimizerConfig, optimizer, "optimizer"),
        model=model,
    )


def model_config(settings: Settings, obs_dim: int, planes: int) -> LatentMoSConfig:
    """The model for a system of `obs_dim` channels with `planes` latent planes."""
    fields = dict(settings.model) | {"obs_dim": obs_dim, "planes": planes}
    return from_mapping(LatentMoSConfig, fields, "model")
