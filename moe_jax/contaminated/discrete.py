"""Multinomial logistic expert."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from moe_jax.contaminated.expert import Expert, Units
from moe_jax.contaminated.gates import (
    Columns,
    affine_from_user,
    affine_to_user,
    standardise,
    with_ones,
)
from moe_jax.contaminated.linalg import solve_positive


@dataclasses.dataclass(frozen=True)
class Multinomial(Expert):
    """P(y = k | x) = softmax(coef x + intercept)_k over labels 0..K-1; the last logit is 0.

    Attributes:
        n_classes: K.
    """

    n_classes: int

    def __post_init__(self) -> None:
        if self.n_classes < 2:
            raise ValueError(f"n_classes={self.n_classes} of Multinomial, expected at least 2")

    @property
    def standardises(self) -> bool:
        """In x; labels stay."""
        return True

    @property
    def intercept_name(self) -> str | None:
        """The intercepts."""
        return "intercept"

    @property
    def labels(self) -> int | None:
        """K."""
        return self.n_classes

    @property
    def discrete(self) -> bool | None:
        """True."""
        return True

    def layout(self, d: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Slopes coef [K-1, d] and intercept [K-1]."""
        return (("coef", (self.n_classes - 1, d)), ("intercept", (self.n_classes - 1,)))

    def design(self, x: Float[Array, "n d"], units: Units | None) -> Float[Array, "n k"]:
        """Standardised columns and ones."""
        return with_ones(
            standardise(x, None if units is None else Columns(units.mean, units.scale))
        )

    def _matrix(self, phi: Float[Array, " e"]) -> Float[Array, "r k"]:
        """The vector phi as [K-1, d+1], the intercepts last."""
        r = self.n_classes - 1
        return jnp.concatenate([phi[:-r].reshape(r, -1), phi[-r:, None]], axis=1)

    def _vector(self, matrix: Float[Array, "... r k"]) -> Float[Array, "... e"]:
        """Inverse of `_matrix`."""
        lead = matrix.shape[:-2]
        return jnp.concatenate([matrix[..., :-1].reshape(*lead, -1), matrix[..., -1]], axis=-1)

    def _log_probabilities(self, phi: Array, design: Array) -> Float[Array, "n K"]:
        logits = design @ self._matrix(phi).T
        return jax.nn.log_softmax(
            jnp.concatenate([logits, jnp.zeros((logits.shape[0], 1))], axis=1), axis=1
        )

    def log_prob(
        self, phi: Float[Array, " e"], design: Float[Array, "n k"], y: Float[Array, " n"]
    ) -> Float[Array, " n"]:
        """Log-probability of the label, log P(y_i | x_i)."""
        logp = self._log_probabilities(phi, design)
        return jnp.take_along_axis(logp, y.astype(jnp.int32)[:, None], axis=1)[:, 0]

    def _residual(self, phi: Array, design: Array, y: Array) -> tuple[Array, Array]:
        """1[y = k] - p_k and p_k, both [n, K-1]."""
        p = jnp.exp(self._log_probabilities(phi, design)[:, :-1])
        return jax.nn.one_hot(y.astype(jnp.int32), self.n_classes, dtype=p.dtype)[:, :-1] - p, p

    def score(
        self, phi: Float[Array, " e"], design: Float[Array, "n k"], y: Float[Array, " n"]
    ) -> Float[Array, "n e"]:
        """(1[y = k] - p_k) (x, 1)."""
        residual, _ = self._residual(phi, design, y)
        return self._vector(residual[:, :, None] * design[:, None, :])

    def information(
        self,
        phi: Float[Array, " e"],
        design: Float[Array, "n k"],
        y: Float[Array, " n"],
        weight: Float[Array, " n"],
    ) -> Float[Array, "e e"]:
        """sum_i weight_i (diag(p) - p p^T) kron (x, 1)(x, 1)^T, whatever the labels."""
        _, p = self._residual(phi, design, y)
        return self._permute(self._information(p, design, weight))

    def _information(self, p: Array, design: Array, weight: Array) -> Float[Array, "e e"]:
        """`information` in the order of `_matrix`."""
        r, k = p.shape[1], design.shape[1]
        within = jax.vmap(lambda q: (design * (weight * q)[:, None]).T @ design, in_axes=1)(p)
        outer = (p[:, :, None] * design[:, None, :]).reshape(-1, r * k)
        between = (outer * weight[:, None]).T @ outer
        return jax.scipy.linalg.block_diag(*within) - between

    def _permute(self, matrix: Float[Array, "e e"]) -> Float[Array, "e e"]:
        """From the order of `_matrix` to that of the layout."""
        r = self.n_classes - 1
        index = np.arange(matrix.shape[0]).reshape(r, -1)
        order = np.concatenate([index[:, :-1].reshape(-1), index[:, -1]])
        return matrix[order][:, order]

    def m_step(
        self,
        phi: Float[Array, " e"],
        design: Float[Array, "n k"],
        y: Float[Array, " n"],
        weight: Float[Array, " n"],
        free: Bool[Array, " e"],
    ) -> Float[Array, " e"]:
        """Newton, or the step with Boehning's bound on the information where that does better.

        The bound (I - 11^T/K)/2 kron X^T W X never overshoots (Boehning 1992).
        """
        r = self.n_classes - 1
        residual, p = self._residual(phi, design, y)
        force = self._vector((residual * weight[:, None]).T @ design)
        newton = self._permute(self._information(p, design, weight))
        total = (design * weight[:, None]).T @ design
        bound = self._permute(
            jnp.kron(0.5 * (jnp.eye(r) - jnp.full((r, r), 1.0 / self.n_classes)), total)
        )
        candidates = jnp.stack([phi + solve_positive(m, force, free) for m in (newton, bound)])
        value = jax.vmap(lambda c: weight @ self.log_prob(c, design, y))(candidates)
        return candidates[jnp.argmax(jnp.where(jnp.isfinite(value), value, -jnp.inf))]

    def to_user(self, phi: Float[Array, " e"], units: Units) -> Float[Array, " e"]:
        """Maps to coef / scale and intercept - coef.mean / scale."""
        return self._vector(affine_to_user(self._matrix(phi), Columns(units.mean, units.scale)))

    def from_user(self, phi: Float[Array, " e"], units: Units) -> Float[Array, " e"]:
        """Inverse of `to_user`."""
        return self._vector(affine_from_user(self._matrix(phi), Columns(units.mean, units.scale)))

    def mean(self, phi: Float[Array, " e"], design: Float[Array, "n k"]) -> Array:
        """Class probabilities [n, K]."""
        return jnp.exp(self._log_probabilities(phi, design))

    def sample(
        self, key: PRNGKeyArray, phi: Float[Array, " e"], design: Float[Array, "n k"]
    ) -> Float[Array, " n"]:
        """A label a row."""
        logp = self._log_probabilities(phi, design)
        return jax.random.categorical(key, logp, axis=1).astype(jnp.float64)
