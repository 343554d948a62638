"""Means of location-scale experts: linear, or any function of x and a pytree."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float

from moe_jax.contaminated.expert import Units
from moe_jax.contaminated.gates import (
    Columns,
    column,
    float64_leaves,
    num_leaves,
    row_gradients,
    shape_of,
    standardise,
    unravel_like,
    with_ones,
)
from moe_jax.contaminated.linalg import gram, solve_positive

# Levenberg-Marquardt dampings tried at once, relative to the diagonal.
_DAMPINGS = (0.0, 1e-2, 1.0, 1e2)


@dataclasses.dataclass(frozen=True)
class Mean:
    """A mean h(x, eta) with its derivatives."""

    @property
    def standardises(self) -> bool:
        """Whether it can undo affine maps of x and y."""
        return False

    @property
    def intercept_name(self) -> str | None:
        """The parameter that takes up a shift."""
        return None

    def layout(self, d: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Names and shapes of eta."""
        raise NotImplementedError

    def design(self, x: Float[Array, "n d"], units: Units | None) -> Float[Array, "n k"]:
        """What the other functions take for x."""
        raise NotImplementedError

    def value(self, eta: Float[Array, " q"], design: Float[Array, "n k"]) -> Float[Array, " n"]:
        """The mean h(x_i, eta) of every row."""
        raise NotImplementedError

    def jacobian(self, eta: Float[Array, " q"], design: Float[Array, "n k"]) -> Float[Array, "n q"]:
        """Derivatives dh/deta, a row each."""
        raise NotImplementedError

    def curvature(
        self, eta: Float[Array, " q"], design: Float[Array, "n k"], weight: Float[Array, " n"]
    ) -> Float[Array, "q q"]:
        """sum_i weight_i d2h(x_i)/deta2."""
        raise NotImplementedError

    def initial(self, d: int) -> Float[Array, " q"]:
        """Parameters eta to start from."""
        raise NotImplementedError

    def step(
        self,
        eta: Float[Array, " q"],
        design: Float[Array, "n k"],
        y: Float[Array, " n"],
        weight: Float[Array, " n"],
        free: Bool[Array, " q"],
    ) -> Float[Array, " q"]:
        """A step that does not raise sum_i weight_i (y_i - h_i)^2."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class LinearMean(Mean):
    """h = eta.x + intercept."""

    intercept: bool

    @property
    def standardises(self) -> bool:
        """Yes: a linear function of x is one of standardised x."""
        return True

    @property
    def intercept_name(self) -> str | None:
        """The intercept, if there is one."""
        return "intercept" if self.intercept else None

    def layout(self, d: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Slopes eta [d] and, if there is one, intercept []."""
        return (("eta", (d,)), ("intercept", ())) if self.intercept else (("eta", (d,)),)

    def design(self, x: Float[Array, "n d"], units: Units | None) -> Float[Array, "n k"]:
        """Standardised columns and, for the intercept, ones."""
        columns = None if units is None else Columns(units.mean, units.scale)
        z = standardise(x, columns)
        return with_ones(z) if self.intercept else z

    def value(self, eta: Float[Array, " q"], design: Float[Array, "n k"]) -> Float[Array, " n"]:
        """The product design eta."""
        return design @ eta

    def jacobian(self, eta: Float[Array, " q"], design: Float[Array, "n k"]) -> Float[Array, "n q"]:
        """The design."""
        return design

    def curvature(
        self, eta: Float[Array, " q"], design: Float[Array, "n k"], weight: Float[Array, " n"]
    ) -> Float[Array, "q q"]:
        """Zero."""
        return jnp.zeros((eta.size, eta.size), eta.dtype)

    def initial(self, d: int) -> Float[Array, " q"]:
        """Zero."""
        return jnp.zeros(d + self.intercept)

    def step(
        self,
        eta: Float[Array, " q"],
        design: Float[Array, "n k"],
        y: Float[Array, " n"],
        weight: Float[Array, " n"],
        free: Bool[Array, " q"],
    ) -> Float[Array, " q"]:
        """Weighted least squares among the free coefficients."""
        residual = y - design @ eta
        return eta + solve_positive(
            gram(design, weight, design), (weight * residual) @ design, free
        )


@dataclasses.dataclass(frozen=True)
class NonlinearMean(Mean):
    """h = apply_fn(params, x), eta being the ravelled params."""

    apply_fn: Callable[[Any, Array], Array]
    params0: Any = dataclasses.field(compare=False)
    shape: Any = dataclasses.field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", shape_of(self.params0))

    def unravel(self, eta: Float[Array, " q"] | Float[np.ndarray, " q"]) -> Any:
        """The pytree of a flat eta."""
        return unravel_like(self.params0, eta)

    def layout(self, d: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """One vector, eta [q]."""
        return (("eta", (num_leaves(self.params0),)),)

    def design(self, x: Float[Array, "n d"], units: Units | None) -> Float[Array, "n k"]:
        """The covariates in the user's units."""
        return x

    def value(self, eta: Float[Array, " q"], design: Float[Array, "n k"]) -> Float[Array, " n"]:
        """apply_fn(params, x)."""
        return column(
            self.apply_fn(self.unravel(eta), design), design.shape[0], "expert's apply_fn"
        )

    def jacobian(self, eta: Float[Array, " q"], design: Float[Array, "n k"]) -> Float[Array, "n q"]:
        """By reverse mode, a row at a time."""
        return row_gradients(self.value, eta, design)

    def curvature(
        self, eta: Float[Array, " q"], design: Float[Array, "n k"], weight: Float[Array, " n"]
    ) -> Float[Array, "q q"]:
        """By forward over reverse mode."""
        return jax.hessian(lambda e: weight @ self.value(e, design))(eta)

    def initial(self, d: int) -> Float[Array, " q"]:
        """params0."""
        return ravel_pytree(float64_leaves(self.params0))[0]

    def step(
        self,
        eta: Float[Array, " q"],
        design: Float[Array, "n k"],
        y: Float[Array, " n"],
        weight: Float[Array, " n"],
        free: Bool[Array, " q"],
    ) -> Float[Array, " q"]:
        """The best of Levenberg-Marquardt steps of several dampings and of none."""
        slope = self.jacobian(eta, design)
        normal = gram(slope, weight, slope)
        force = (weight * (y - self.value(eta, design))) @ slope

        def damped(damping: Array) -> Array:
            matrix = normal + damping * jnp.diag(jnp.diagonal(normal))
            return eta + solve_positive(matrix, force, free)

        def loss(candidate: Array) -> Array:
            value = weight @ jnp.square(y - self.value(candidate, design))
            return jnp.where(jnp.isfinite(value), value, jnp.inf)

        candidates = jnp.concatenate([eta[None], jax.vmap(damped)(jnp.array(_DAMPINGS))])
        return candidates[jnp.argmin(jax.vmap(loss)(candidates))]
