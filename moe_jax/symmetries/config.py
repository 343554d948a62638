"""What a latent mixture of symmetries is made of."""

import dataclasses
import math
from typing import Any

from moe_jax.symmetries.bases import basis_matrices, quadratic_invariants

GENERATORS = ("rst", "gl", "so", "stable", "basis")
MIXINGS = ("algebra", "output", "product")
GATES = ("invariant", "state", "hidden", "fixed")
ENCODERS = ("bigru", "odernn", "transformer")
ANCHORS = ("local", "initial", "last")
DECODERS = ("mlp", "linear")
OBSERVATIONS = ("point", "mean")
LIKELIHOODS = ("squared", "gaussian")
# Why no continuous function but a constant is invariant, which is what `fixed` is.
_NO_INVARIANTS = {
    "gl": "the free matrices of generator='gl' carry any latent to any other",
    "stable": "generator='stable' carries every latent to 0",
}
_CHOICES = {
    "generator": GENERATORS,
    "mixing": MIXINGS,
    "gate": GATES,
    "encoder": ENCODERS,
    "anchors": ANCHORS,
    "decoder": DECODERS,
    "observation": OBSERVATIONS,
    "likelihood": LIKELIHOODS,
}


@dataclasses.dataclass(frozen=True)
class LatentMoSConfig:
    """Sizes and forms of a `LatentMoS`; validates itself.

    Attributes:
        obs_dim: observed channels, D.
        input_dim: exogenous input channels that the encoder reads, U.
        planes, translations: m and q; the latent of one expert has d = 2 m + q coordinates.
        experts: generators of a level, K.
        generator: `rst` rotates and scales planes and translates the other coordinates, in closed
            form; `gl` is any matrix, `so` a skew one, `stable` a contraction, `basis` a combination
            of `basis`.
        basis: for `basis`, a name (`so`, `sl`, `affine`) or matrices as nested tuples [C, d, d].
        drift: adds an affine drift inside the planes of `rst`, whose experts then do not commute.
        mixing: `algebra` mixes generators and then flows, our default; `output` flows and then
            mixes, which is how the paper is publicly described (Eq. 8); `product` gives every
            expert a latent of its own.
        gate: what the gate sees: what the group leaves alone (`invariant`: squared radii of the
            planes of `rst`, |z|^2 of `so`, the quadratic forms that a `basis` keeps), the latent
            (`state`), the encoder's memory (`hidden`, nearest to the paper), or nothing (`fixed`).
        log_invariants: whether the gate sees log(1 + r) instead of r.
        num_selected: experts kept by the gate at an anchor; 0 for all.
        encoder: `bigru` smooths, `odernn` flows between its updates, `transformer` attends.
        causal: no state depends on a later observation; anchors are then one-sided.
        anchors: `local` flows from both neighbouring observations, `last` from the one before,
            `initial` from the first.
        levels, stride: level l has an anchor every stride^l observations and generators of its own.
        decoder, decoder_hidden: the map from latents to channels.
        observation: a value is taken at its time (`point`), or is the mean over an interval that
            begins there (`mean`).
        interval: for `mean`, its length in original time units, one number or one a channel.
        likelihood: `gaussian` learns a noise level for every channel.
        variational: the encoder gives a mean and log variance of each anchor, sampled in training.
        hidden: width of encoder and gate.
        max_rate: cap on a generator's spectral norm, per rescaled time unit; inf for none.
        max_horizon: how far from a row's observations a query counts as valid, in original units.

    Raises:
        ValueError: naming the field, its value and what is accepted.
    """

    obs_dim: int
    input_dim: int = 0
    planes: int = 1
    translations: int = 0
    experts: int = 4
    generator: str = "rst"
    basis: Any = ()
    drift: bool = False
    mixing: str = "algebra"
    gate: str = "invariant"
    log_invariants: bool = True
    num_selected: int = 0
    encoder: str = "bigru"
    causal: bool = False
    anchors: str = "local"
    levels: int = 1
    stride: int = 4
    decoder: str = "mlp"
    decoder_hidden: int = 50
    observation: str = "point"
    interval: tuple[float, ...] = ()
    likelihood: str = "squared"
    variational: bool = False
    hidden: int = 32
    max_rate: float = math.inf
    max_horizon: float = math.inf

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is int and (isinstance(value, bool) or not isinstance(value, int)):
                raise ValueError(f"{field.name}={value!r} must be an integer")
            if field.type is bool and not isinstance(value, bool):
                raise ValueError(f"{field.name}={value!r} must be True or False")
        for name, accepted in _CHOICES.items():
            if getattr(self, name) not in accepted:
                raise ValueError(f"{name}={getattr(self, name)!r} is not one of {accepted}")
        for name in ("obs_dim", "experts", "levels", "decoder_hidden", "hidden"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("input_dim", "planes", "translations"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")
        for name in ("max_rate", "max_horizon"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not value > 0:
                raise ValueError(f"{name}={value!r} must be a positive number")
        if not isinstance(self.interval, tuple) or not all(
            isinstance(length, int | float) and length > 0 for length in self.interval
        ):
            raise ValueError(f"interval={self.interval!r} must be a tuple of positive numbers")
        if self.slice_dim < 1:
            raise ValueError("planes=0 and translations=0 leave no latent coordinate")
        if self.stride < 2:
            raise ValueError(f"stride={self.stride} must be at least 2")
        if not 0 <= self.num_selected <= self.experts:
            raise ValueError(f"num_selected={self.num_selected} exceeds experts={self.experts}")
        self._check_combination()

    def _check_combination(self) -> None:
        if self.gate == "invariant" and self.generator in _NO_INVARIANTS:
            raise ValueError(
                f"gate='invariant' needs a group that leaves something alone, and "
                f"{_NO_INVARIANTS[self.generator]}; use one of {GATES[1:]}"
            )
        if self.gate == "invariant" and self.generator == "rst" and not self.planes:
            raise ValueError(f"gate='invariant' needs planes, not {self.planes=}")
        if self.drift and self.generator != "rst":
            raise ValueError(f"drift=True needs generator='rst', not {self.generator!r}")
        if self.variational and self.encoder == "odernn":
            raise ValueError("variational=True needs another encoder than 'odernn'")
        if (self.generator == "basis") != (self.basis != ()):
            raise ValueError(f"basis={self.basis!r} does not fit generator={self.generator!r}")
        if self.generator == "basis":
            matrices = basis_matrices(self.basis, self.slice_dim)
            if self.gate == "invariant" and not len(quadratic_invariants(matrices)):
                raise ValueError(
                    f"gate='invariant' needs a group that leaves something alone, and the one of "
                    f"{self.basis=} keeps no quadratic form; use one of {GATES[1:]}"
                )
        if (self.observation == "mean") != bool(self.interval):
            raise ValueError(
                f"interval={self.interval} does not fit observation={self.observation!r}"
            )
        if self.interval and len(self.interval) not in (1, self.obs_dim):
            raise ValueError(f"interval={self.interval} must have 1 or {self.obs_dim} numbers")

    @property
    def slice_dim(self) -> int:
        """Latent coordinates on which one expert acts, d."""
        return 2 * self.planes + self.translations

    @property
    def latent_dim(self) -> int:
        """Latent coordinates of one level: d, or K d where every expert has its own."""
        return self.slice_dim * (self.experts if self.mixing == "product" else 1)
