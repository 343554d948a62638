"""Two score-based fits of one Gaussian: Gaussian score matching, and batch and match.

Small implementations of the published updates, for the comparison in benchmarks/product_of_t.py;
the authors' own code needs modules that JAX no longer has.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

Score = Callable[[Float[Array, " dim"]], Float[Array, " dim"]]


class Gaussian(NamedTuple):
    """Mean [dim] and covariance [dim, dim]."""

    mean: Float[Array, " dim"]
    covariance: Float[Array, "dim dim"]


def score_matching_update(
    gaussian: Gaussian, point: Float[Array, " dim"], score: Float[Array, " dim"]
) -> Gaussian:
    """The Gaussian nearest in KL(q_0 | q) whose score at `point` is `score`.

    With e = S_0 g - m_0 + z and rho (1 + rho) = g' S_0 g + ((m_0 - z)' g)^2, rho >= 0:
    m = m_0 + (I - (m_0 - z) g' / (1 + rho + (m_0 - z)' g)) e / (1 + rho),
    S = S_0 + (m_0 - z)(m_0 - z)' - (m - z)(m - z)'.

    Reference: Modi et al., "Variational inference with Gaussian score matching" (2023), theorem 1.
    """
    mean, covariance = gaussian
    offset = mean - point
    along = offset @ score
    right = score @ covariance @ score + along**2
    rho = 0.5 * jnp.sqrt(1.0 + 4.0 * right) - 0.5
    error = covariance @ score - offset
    step = (error - offset * (score @ error) / (1.0 + rho + along)) / (1.0 + rho)
    moved = mean + step
    new = covariance + jnp.outer(offset, offset) - jnp.outer(moved - point, moved - point)
    return Gaussian(moved, new)


def batch_and_match_update(
    gaussian: Gaussian,
    points: Float[Array, "batch dim"],
    scores: Float[Array, "batch dim"],
    weight: Float[Array, ""],
) -> Gaussian:
    """Minimises weight * (score divergence over the batch) + 2 KL(q_0 | q) over Gaussians q.

    U = l G + l / (1 + l) gbar gbar', V = S_0 + l C + l / (1 + l) (m_0 - zbar)(m_0 - zbar)', with
    C, G the covariances of points and scores and l the weight; S solves S U S + S = V and
    m = m_0 / (1 + l) + l / (1 + l) (S gbar + zbar).

    Reference: Cai et al., "Batch and match: black-box variational inference with a score-based
    divergence" (2024), section 3.
    """
    mean, covariance = gaussian
    point, score = points.mean(axis=0), scores.mean(axis=0)
    centred, scattered = points - point, scores - score
    count = points.shape[0]
    share = weight / (1.0 + weight)
    u = weight * scattered.T @ scattered / count + share * jnp.outer(score, score)
    v = covariance + weight * centred.T @ centred / count
    v = v + share * jnp.outer(mean - point, mean - point)
    # S U S + S = V has S = L (I + (I + 4 L' U L)^(1/2))^-1 2 L' with V = L L'.
    factor = jnp.linalg.cholesky(v)
    values, vectors = jnp.linalg.eigh(factor.T @ u @ factor)
    half = factor @ vectors
    gains = 2.0 / (1.0 + jnp.sqrt(1.0 + 4.0 * jnp.maximum(values, 0.0)))
    new = (half * gains) @ half.T
    return Gaussian(mean / (1.0 + weight) + share * (new @ score + point), new)


def fit_by_score_matching(
    key: Key[Array, ""], score: Score, start: Gaussian, num_steps: int, batch_size: int
) -> Gaussian:
    """Means of the updates of a batch, drawn anew every step; `num_steps * batch_size` scores."""

    def update(
        gaussian: Gaussian, points: jax.Array, scores: jax.Array, step: jax.Array
    ) -> Gaussian:
        del step
        updates = jax.vmap(score_matching_update, in_axes=(None, 0, 0))(gaussian, points, scores)
        return jax.tree.map(lambda leaf: leaf.mean(axis=0), updates)

    return _iterate(key, score, start, num_steps, batch_size, update)


def fit_by_batch_and_match(
    key: Key[Array, ""], score: Score, start: Gaussian, num_steps: int, batch_size: int
) -> Gaussian:
    """Batch and match with the authors' weights B D / (t + 1); `num_steps * batch_size` scores."""
    scale = float(batch_size * start.mean.shape[0])

    def update(
        gaussian: Gaussian, points: jax.Array, scores: jax.Array, step: jax.Array
    ) -> Gaussian:
        return batch_and_match_update(gaussian, points, scores, scale / (step + 1.0))

    return _iterate(key, score, start, num_steps, batch_size, update)


def _iterate(
    key: jax.Array,
    score: Score,
    start: Gaussian,
    num_steps: int,
    batch_size: int,
    update: Callable[[Gaussian, jax.Array, jax.Array, jax.Array], Gaussian],
) -> Gaussian:
    """Draws, scores and updates; an update that is no Gaussian is not taken."""

    def step(gaussian: Gaussian, count: jax.Array) -> tuple[Gaussian, None]:
        normals = jax.random.normal(
            jax.random.fold_in(key, count), (batch_size, start.mean.shape[0]), start.mean.dtype
        )
        points = gaussian.mean + normals @ jnp.linalg.cholesky(gaussian.covariance).T
        new = update(gaussian, points, jax.vmap(score)(points), count.astype(start.mean.dtype))
        new = Gaussian(new.mean, 0.5 * (new.covariance + new.covariance.T))
        factor = jnp.linalg.cholesky(new.covariance)
        usable = jnp.isfinite(factor).all() & jnp.isfinite(new.mean).all()
        return jax.tree.map(lambda a, b: jnp.where(usable, a, b), new, gaussian), None

    return jax.lax.scan(step, start, jnp.arange(num_steps))[0]
