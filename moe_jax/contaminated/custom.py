"""An expert with any density the user can write in JAX."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from moe_jax.contaminated.expert import Expert
from moe_jax.contaminated.gates import column, float64_leaves, num_leaves, shape_of, unravel_like

# L-BFGS iterations of one M-step: a few do, since every M-step goes on from the last.
_M_STEP_ITERATIONS = 5


@dataclasses.dataclass(frozen=True)
class Custom(Expert):
    """f(y | x) = exp(log_prob_fn(params, x, y)), normalised over y by the user.

    Scores and information come from autodiff, M-steps from L-BFGS. For a density without second
    derivatives, such as Laplace's, fit with method="squarem".

    Attributes:
        log_prob_fn: takes params, x [n, d] and y [n], returns [n]; no row
            may depend on another.
        params0: pytree to start from, unconstrained.
        sample_fn: takes key, params and x, returns y [n]; needed to simulate.
        mean_fn: takes params and x, returns [n]; needed for the mixture's mean.
    """

    log_prob_fn: Callable[[Any, Array, Array], Array]
    params0: Any = dataclasses.field(compare=False)
    sample_fn: Callable[[Array, Any, Array], Array] | None = None
    mean_fn: Callable[[Any, Array], Array] | None = None
    shape: Any = dataclasses.field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", shape_of(self.params0))

    def unravel(self, phi: Float[Array, " e"] | Float[np.ndarray, " e"]) -> Any:
        """The pytree of a flat vector."""
        return unravel_like(self.params0, phi)

    def layout(self, d: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """One vector, eta [q]: the parameters ravelled."""
        return (("eta", (num_leaves(self.params0),)),)

    def initial(self, d: int) -> Float[Array, " e"]:
        """params0."""
        return ravel_pytree(float64_leaves(self.params0))[0]

    def log_prob(
        self, phi: Float[Array, " e"], design: Float[Array, "n k"], y: Float[Array, " n"]
    ) -> Float[Array, " n"]:
        """log_prob_fn(params, x, y)."""
        return column(
            self.log_prob_fn(self.unravel(phi), design, y), y.size, "expert's log_prob_fn"
        )

    def m_step(
        self,
        phi: Float[Array, " e"],
        design: Float[Array, "n k"],
        y: Float[Array, " n"],
        weight: Float[Array, " n"],
        free: Bool[Array, " e"],
    ) -> Float[Array, " e"]:
        """A few iterations of L-BFGS, kept only if they do not lower the expected log-density."""
        total = jnp.sum(weight)

        def loss(candidate: Array) -> Array:
            return -(weight @ self.log_prob(jnp.where(free, candidate, phi), design, y)) / total

        optimiser = optax.lbfgs(memory_size=_M_STEP_ITERATIONS)
        value_and_grad = optax.value_and_grad_from_state(loss)

        def iterate(_: Any, carry: tuple[Array, Any]) -> tuple[Array, Any]:
            params, state = carry
            value, grad = value_and_grad(params, state=state)
            # Optax mixes 32- and 64-bit counters where 64 bits are enabled.
            with jax.numpy_dtype_promotion("standard"):
                updates, state = optimiser.update(
                    grad, state, params, value=value, grad=grad, value_fn=loss
                )
            return optax.apply_updates(params, updates), state

        new, _ = jax.lax.fori_loop(0, _M_STEP_ITERATIONS, iterate, (phi, optimiser.init(phi)))
        new = jnp.where(free, new, phi)
        return jnp.where(loss(new) <= loss(phi), new, phi)

    def mean(self, phi: Float[Array, " e"], design: Float[Array, "n k"]) -> Array:
        """mean_fn(params, x)."""
        if self.mean_fn is None:
            raise ValueError("mean_fn=None of Custom, needed for the mixture's mean")
        return column(self.mean_fn(self.unravel(phi), design), design.shape[0], "expert's mean_fn")

    def sample(
        self, key: PRNGKeyArray, phi: Float[Array, " e"], design: Float[Array, "n k"]
    ) -> Float[Array, " n"]:
        """sample_fn(key, params, x)."""
        if self.sample_fn is None:
            raise ValueError("sample_fn=None of Custom, needed to draw from it")
        return column(
            self.sample_fn(key, self.unravel(phi), design), design.shape[0], "expert's sample_fn"
        )
