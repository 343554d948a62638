"""Gates: the log-odds a_j(x) of prompt j against the frozen model, whose logit stays 0.

A gate's functions take its parameters gamma [g] and a design, which is what `design` makes of x:
standardised columns during estimation, plain ones in the user's units.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float


class Columns(NamedTuple):
    """Affine map of the covariates, z = (x - mean) / scale, both [d]."""

    mean: Array
    scale: Array


@dataclasses.dataclass(frozen=True)
class Gate:
    """What the estimators ask of a gate; linear in its parameters unless a subclass differs."""

    def layout(self, d: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Names and shapes of the parameters."""
        raise NotImplementedError

    def size(self, columns: int) -> int:
        """Number of parameters when the design has so many columns."""
        return columns

    def design(self, x: Float[Array, "n d"], columns: Columns | None) -> Float[Array, "n k"]:
        """What the other functions take for x; in the user's units if `columns` is None."""
        raise NotImplementedError

    def logit(self, gamma: Float[Array, " g"], design: Float[Array, "n k"]) -> Float[Array, " n"]:
        """a(x)."""
        return design @ gamma

    def jacobian(
        self, gamma: Float[Array, " g"], design: Float[Array, "n k"]
    ) -> Float[Array, "n g"]:
        """Derivatives of a(x) by gamma."""
        return design

    def curvature(
        self, gamma: Float[Array, " g"], design: Float[Array, "n k"], weight: Float[Array, " n"]
    ) -> Float[Array, "g g"]:
        """Sum over rows of weight_i times the second derivatives of a(x_i)."""
        return jnp.zeros((gamma.size, gamma.size), gamma.dtype)

    def to_user(self, gamma: Float[Array, " g"], columns: Columns) -> Float[Array, " g"]:
        """Parameters in the user's units of those for standardised columns."""
        return gamma

    def from_user(self, gamma: Float[Array, " g"], columns: Columns) -> Float[Array, " g"]:
        """Inverse of `to_user`."""
        return gamma

    def initial(self, d: int) -> Float[Array, " g"]:
        """Parameters to start from."""
        return jnp.zeros(sum(math.prod(shape) for _, shape in self.layout(d)))


@dataclasses.dataclass(frozen=True)
class LinearGate(Gate):
    """a(x) = beta.x + tau, the paper's gate.

    Attributes:
        features: columns of x that enter; all of them if None.
    """

    features: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.features is not None:
            object.__setattr__(self, "features", tuple(self.features))

    def layout(self, d: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Slopes beta [d or number of features] and intercept tau []."""
        features = self.features
        if features is not None and not all(0 <= f < d for f in features):
            raise ValueError(f"features={features} of LinearGate, expected numbers in [0, {d})")
        return (("beta", (d if features is None else len(features),)), ("tau", ()))

    def _select(self, values: Array) -> Array:
        return values if self.features is None else values[..., jnp.array(self.features, jnp.int32)]

    def design(self, x: Float[Array, "n d"], columns: Columns | None) -> Float[Array, "n k"]:
        """The chosen columns and a column of ones."""
        return with_ones(standardise(self._select(x), self._columns(columns)))

    def to_user(self, gamma: Float[Array, " g"], columns: Columns) -> Float[Array, " g"]:
        """Maps to beta / scale and tau - beta.mean / scale."""
        return affine_to_user(gamma, self._columns(columns))

    def from_user(self, gamma: Float[Array, " g"], columns: Columns) -> Float[Array, " g"]:
        """Maps to beta scale and tau + beta.mean."""
        return affine_from_user(gamma, self._columns(columns))

    def _columns(self, columns: Columns | None) -> Any:
        return None if columns is None else Columns(*map(self._select, columns))


@dataclasses.dataclass(frozen=True)
class ConstantGate(Gate):
    """a(x) = tau: the share of contamination does not depend on x."""

    def layout(self, d: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """The intercept tau []."""
        return (("tau", ()),)

    def design(self, x: Float[Array, "n d"], columns: Columns | None) -> Float[Array, "n k"]:
        """A column of ones."""
        return jnp.ones((x.shape[0], 1), x.dtype)


@dataclasses.dataclass(frozen=True)
class CustomGate(Gate):
    """a(x) = apply(params, x) for any differentiable function; x comes in the user's units.

    Attributes:
        apply: takes params and x [n, d], returns [n].
        params0: pytree to start from.
    """

    apply: Callable[[Any, Array], Array]
    params0: Any = dataclasses.field(compare=False)
    shape: Any = dataclasses.field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        # Equal shapes share one compiled program, whatever the values.
        object.__setattr__(self, "shape", shape_of(self.params0))

    def layout(self, d: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """One vector, gate [q]: the parameters ravelled."""
        return (("gate", (num_leaves(self.params0),)),)

    def size(self, columns: int) -> int:
        """Number of entries of params0."""
        return num_leaves(self.params0)

    def design(self, x: Float[Array, "n d"], columns: Columns | None) -> Float[Array, "n k"]:
        """The covariates as they are."""
        return x

    def unravel(self, gamma: Float[Array, " g"] | Float[np.ndarray, " g"]) -> Any:
        """The pytree of a flat vector."""
        return unravel_like(self.params0, gamma)

    def logit(self, gamma: Float[Array, " g"], design: Float[Array, "n k"]) -> Float[Array, " n"]:
        """The function's value, apply(params, x)."""
        return column(self.apply(self.unravel(gamma), design), design.shape[0], "gate")

    def jacobian(
        self, gamma: Float[Array, " g"], design: Float[Array, "n k"]
    ) -> Float[Array, "n g"]:
        """By reverse mode, a row at a time."""
        return row_gradients(self.logit, gamma, design)

    def curvature(
        self, gamma: Float[Array, " g"], design: Float[Array, "n k"], weight: Float[Array, " n"]
    ) -> Float[Array, "g g"]:
        """By forward over reverse mode."""
        return jax.hessian(lambda g: weight @ self.logit(g, design))(gamma)

    def initial(self, d: int) -> Float[Array, " g"]:
        """The pytree params0, ravelled."""
        return ravel_pytree(float64_leaves(self.params0))[0]


def standardise(x: Float[Array, "n d"], columns: Columns | None) -> Float[Array, "n d"]:
    """(x - mean) / scale; x itself if `columns` is None."""
    return x if columns is None else (x - columns.mean[None, :]) / columns.scale[None, :]


def with_ones(x: Float[Array, "n d"]) -> Float[Array, "n k"]:
    """Appends a column of ones to x."""
    return jnp.concatenate([x, jnp.ones((x.shape[0], 1), x.dtype)], axis=1)


def affine_to_user(
    slopes_intercept: Float[Array, "... k"], columns: Columns
) -> Float[Array, "... k"]:
    """Coefficients on x of the affine function b.(x - mean) / scale + c, the intercept last."""
    lead = slopes_intercept.shape[:-1]
    slopes = slopes_intercept[..., :-1] / jnp.broadcast_to(
        columns.scale, (*lead, columns.scale.size)
    )
    return jnp.concatenate(
        [slopes, slopes_intercept[..., -1:] - (slopes @ columns.mean)[..., None]], -1
    )


def affine_from_user(
    slopes_intercept: Float[Array, "... k"], columns: Columns
) -> Float[Array, "... k"]:
    """Inverse of `affine_to_user`."""
    lead = slopes_intercept.shape[:-1]
    slopes = slopes_intercept[..., :-1]
    intercept = slopes_intercept[..., -1:] + (slopes @ columns.mean)[..., None]
    return jnp.concatenate(
        [slopes * jnp.broadcast_to(columns.scale, (*lead, columns.scale.size)), intercept], -1
    )


def column(values: Array, n: int, what: str) -> Float[Array, " n"]:
    """Values a row, which a network may return as [n, 1].

    Raises:
        ValueError: if there is not one value a row.
    """
    if values.size != n:
        raise ValueError(f"the {what} returns shape {values.shape} for {n} rows, expected ({n},)")
    return values.reshape(n).astype(jnp.float64)


def row_gradients(
    function: Callable[..., Array], params: Float[Array, " p"], *rows: Array
) -> Float[Array, "n p"]:
    """Gradients by params of function(params, *rows) [n], one a row."""

    def at_row(p: Array, *row: Array) -> Array:
        return function(p, *(r[None] for r in row))[0]

    return jax.vmap(jax.grad(at_row), in_axes=(None, *[0] * len(rows)))(params, *rows)


def float64_leaves(params: Any) -> Any:
    """Every leaf as float64."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), params)


def shape_of(params: Any) -> Any:
    """A hashable record of a pytree's structure and shapes."""
    leaves, structure = jax.tree.flatten(params)
    return structure, tuple(jnp.shape(leaf) for leaf in leaves)


def num_leaves(params: Any) -> int:
    """Number of entries of a pytree."""
    return sum(math.prod(jnp.shape(leaf)) for leaf in jax.tree.leaves(params))


def unravel_like(params: Any, flat: Float[Array, " p"] | Float[np.ndarray, " p"]) -> Any:
    """The pytree shaped as `params` that holds a flat vector, NumPy arrays of a NumPy one."""
    leaves, structure = jax.tree.flatten(params)
    out, start = [], 0
    for leaf in leaves:
        stop = start + math.prod(jnp.shape(leaf))
        out.append(flat[start:stop].reshape(jnp.shape(leaf)))
        start = stop
    return jax.tree.unflatten(structure, out)
