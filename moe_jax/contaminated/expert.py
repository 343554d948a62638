"""What the estimators ask of a trainable expert, with autodiff answers for those that say nothing.

An expert's functions take its parameters phi [e], a design, which is what `design` makes of x, and
the response that `response` makes of y: standardised during estimation, the user's own otherwise.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from moe_jax.contaminated.gates import row_gradients


class Units(NamedTuple):
    """Affine maps of covariates, (x - mean) / scale [d], and response, (y - y_mean) / y_scale."""

    mean: Array
    scale: Array
    y_mean: Array
    y_scale: Array


@dataclasses.dataclass(frozen=True)
class Expert:
    """Base of the experts: a conditional density f(y | x; phi)."""

    @property
    def standardises(self) -> bool:
        """Whether the expert works in standardised units, which `to_user` undoes."""
        return False

    @property
    def intercept_name(self) -> str | None:
        """Parameter that takes up a shift of x and y; without one they are scaled, not centred."""
        return None

    @property
    def dispersion_names(self) -> tuple[str, ...]:
        """Parameters that are not the location's, last in the layout: log_nu, log_df."""
        return ()

    @property
    def labels(self) -> int | None:
        """Number of labels, None for a real response."""
        return None

    @property
    def discrete(self) -> bool | None:
        """Whether its density is of labels, not of real numbers; None if it may be either."""
        return None

    def layout(self, d: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Names and shapes of the parameters."""
        raise NotImplementedError

    def location_size(self, d: int) -> int:
        """Number of parameters without the dispersion's."""
        return sum(math.prod(s) for k, s in self.layout(d) if k not in self.dispersion_names)

    def design(self, x: Float[Array, "n d"], units: Units | None) -> Float[Array, "n k"]:
        """What the other functions take for x; in the user's units if `units` is None."""
        return x

    def response(self, y: Float[Array, " n"], units: Units | None) -> Float[Array, " n"]:
        """What the other functions take for y."""
        return y

    def log_prob(
        self, phi: Float[Array, " e"], design: Float[Array, "n k"], y: Float[Array, " n"]
    ) -> Float[Array, " n"]:
        """Log-density log f(y_i | x_i; phi) of every row."""
        raise NotImplementedError

    def score(
        self, phi: Float[Array, " e"], design: Float[Array, "n k"], y: Float[Array, " n"]
    ) -> Float[Array, "n e"]:
        """Derivatives of `log_prob` by phi, one row a row."""
        return row_gradients(self.log_prob, phi, design, y)

    def information(
        self,
        phi: Float[Array, " e"],
        design: Float[Array, "n k"],
        y: Float[Array, " n"],
        weight: Float[Array, " n"],
    ) -> Float[Array, "e e"]:
        """Minus the second derivatives of sum_i weight_i log f(y_i | x_i; phi)."""
        return -jax.hessian(lambda p: weight @ self.log_prob(p, design, y))(phi)

    def m_step(
        self,
        phi: Float[Array, " e"],
        design: Float[Array, "n k"],
        y: Float[Array, " n"],
        weight: Float[Array, " n"],
        free: Bool[Array, " e"],
    ) -> Float[Array, " e"]:
        """Moves the free entries of phi so as to raise sum_i weight_i log f(y_i | x_i; phi)."""
        raise NotImplementedError

    def initial(self, d: int) -> Float[Array, " e"]:
        """Parameters from which the first M-step starts; `log_nu` comes from the data instead."""
        return jnp.zeros(sum(math.prod(shape) for _, shape in self.layout(d)))

    def to_user(self, phi: Float[Array, " e"], units: Units) -> Float[Array, " e"]:
        """Parameters in the user's units of those for the standardised design and response."""
        return phi

    def from_user(self, phi: Float[Array, " e"], units: Units) -> Float[Array, " e"]:
        """Inverse of `to_user`."""
        return phi

    def mean(self, phi: Float[Array, " e"], design: Float[Array, "n k"]) -> Array:
        """Conditional mean [n]; of a classifier the probabilities [n, classes]."""
        raise NotImplementedError

    def sample(
        self, key: PRNGKeyArray, phi: Float[Array, " e"], design: Float[Array, "n k"]
    ) -> Float[Array, " n"]:
        """A draw of y for every row."""
        raise NotImplementedError
