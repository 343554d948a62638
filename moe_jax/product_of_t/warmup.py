"""Before the fit: where the target is and how wide, for whitening and for choosing experts."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import gammaln, logsumexp
from jaxtyping import Array, Float, Key

from moe_jax.product_of_t.samplers import effective_sample_size
from moe_jax.product_of_t.targets import LogDensity

_MAX_CLIMB = 50
# Relative to the largest eigenvalue: nearly flat directions, such as two almost collinear
# coefficients give, must not be cut off.
_EIGENVALUE_FLOOR = 1e-13
_CONVERGED = 1e-8
_STRICT_DECREMENT = 1e-3
_T_DEGREES = 4.0
_T_SPREAD = 1.5


class Anchors(NamedTuple):
    """Gaussians about the places where the target has its mass.

    Attributes:
        loc: centres.
        scale: lower Cholesky factors of the covariances.
        num_modes: the first so many are strict modes, with covariance -Hessian^-1.
        scores: gradients of log p that finding them took.
        hessians: Hessians of log p that finding them took.
    """

    loc: Float[np.ndarray, "anchors dim"]
    scale: Float[np.ndarray, "anchors dim dim"]
    num_modes: int
    scores: int
    hessians: int


class Candidates(NamedTuple):
    """Draws from a broad proposal over the anchors.

    Attributes:
        points: draws of the mixture of t's with 4 degrees of freedom and 1.5 times the scales.
        log_ratios: log p - log proposal, -inf where log p is not finite.
    """

    points: Float[Array, "draws dim"]
    log_ratios: Float[Array, " draws"]


def hessian(log_density: LogDensity, point: Float[Array, " dim"]) -> Float[Array, "dim dim"]:
    """Hessian of log p, forward over reverse, or reverse twice where a rule forbids the former."""
    gradient = jax.grad(log_density)
    try:
        return jax.jacfwd(gradient)(point)
    except TypeError:
        return jax.jacrev(gradient)(point)


def _absolute_inverse(matrix: Array) -> tuple[Array, Array, Array]:
    """Eigenvalues and vectors of S H S with S = |diag H|^-1/2, and S.

    The scaling makes the floor on eigenvalues independent of the units of the coordinates.
    """
    size = jnp.abs(jnp.diagonal(matrix))
    scale = 1.0 / jnp.sqrt(jnp.maximum(size, 1e-14 * jnp.maximum(jnp.max(size), 1e-300)))
    values, vectors = jnp.linalg.eigh(matrix * scale[:, None] * scale[None])
    return values, vectors, scale


@partial(jax.jit, static_argnums=0)
def _climb(log_density: LogDensity, starts: Array) -> tuple:
    """Damped Newton ascent with |eigenvalues|, from every start at once.

    Returns:
        Points, log p, gradients, Hessians there and the number of steps that each start took.
    """
    value_and_gradient = jax.value_and_grad(log_density)

    def evaluate(point: Array) -> tuple[Array, Array, Array]:
        value, gradient = value_and_gradient(point)
        return value, gradient, hessian(log_density, point)

    def is_good(value: Array, gradient: Array, curvature: Array) -> Array:
        finite = jnp.all(jnp.isfinite(gradient)) & jnp.all(jnp.isfinite(curvature))
        return jnp.isfinite(value) & finite

    def unfinished(state: tuple) -> Array:
        return jnp.any(~state[5]) & (state[7] < _MAX_CLIMB)

    def step(
        point: Array,
        value: Array,
        gradient: Array,
        curvature: Array,
        damping: Array,
        done: Array,
        steps: Array,
    ) -> tuple:
        usable = jnp.where(jnp.isfinite(curvature), curvature, 0.0)
        values, vectors, scale = _absolute_inverse(usable)
        size = jnp.maximum(jnp.abs(values), _EIGENVALUE_FLOOR * jnp.max(jnp.abs(values)))
        slope = vectors.T @ (scale * jnp.where(jnp.isfinite(gradient), gradient, 0.0))
        move = scale * (vectors @ (slope / (size + damping)))
        trial = point + move
        after = evaluate(trial)
        better = is_good(*after) & ((after[0] >= value) | ~jnp.isfinite(value)) & ~done
        decrement = jnp.sum(slope**2 / size)
        # Where full steps gain nothing any more, the point is as good as rounding allows.
        stuck = ~better & (damping > 1e8)

        def choose(new: Array, old: Array) -> Array:
            return jnp.where(better, new, old)

        return (
            choose(trial, point),
            *(
                choose(new, old)
                for new, old in zip(after, (value, gradient, curvature), strict=True)
            ),
            jnp.where(better, 0.2 * damping, 8.0 * damping + 1e-8),
            done | stuck | ((decrement < _CONVERGED) & is_good(value, gradient, curvature)),
            steps + (~done).astype(steps.dtype),
        )

    def step_all(state: tuple) -> tuple:
        return (*jax.vmap(step)(*state[:7]), state[7] + 1)

    count = starts.shape[0]
    value, gradient, curvature = jax.vmap(evaluate)(starts)
    damping = jnp.full(count, 1e-2, starts.dtype)
    done, steps = jnp.zeros(count, jnp.bool_), jnp.ones(count, jnp.int32)
    state = (starts, value, gradient, curvature, damping, done, steps, jnp.zeros((), jnp.int32))
    point, value, gradient, curvature, _, _, steps, _ = jax.lax.while_loop(
        unfinished, step_all, state
    )
    values, _, scale = jax.vmap(_absolute_inverse)(
        jnp.where(jnp.isfinite(curvature), curvature, 0.0)
    )
    del scale
    return point, value, gradient, curvature, values, steps


def find_anchors(log_density: LogDensity, starts: Float[np.ndarray, "starts dim"]) -> Anchors:
    """Strict modes of log p with their Laplace covariances, each once, the highest first.

    Where the climb finds no strict mode, as in a funnel whose density is unbounded, the single
    anchor is the best start with the scale of its |Hessian|.

    Raises:
        ValueError: if log p or its gradient is finite at none of the starts.
    """
    first = np.asarray(jax.jit(jax.vmap(jax.value_and_grad(log_density)))(jnp.asarray(starts))[0])
    if not np.any(np.isfinite(first)):
        raise ValueError(
            f"target is not finite at any of the {len(starts)} starts: give `starts` inside its "
            "support"
        )
    climbed = _climb(log_density, jnp.asarray(starts))
    points, values, gradients, curvatures, eigenvalues, steps = map(np.asarray, climbed)
    total = int(np.sum(steps))
    modes: list[tuple[np.ndarray, np.ndarray]] = []
    for index in np.argsort(-np.where(np.isfinite(values), values, -np.inf)):
        # A mode at the end of the range of numbers is a density that grows without end.
        definite = np.all(np.isfinite(curvatures[index])) and eigenvalues[index, -1] < 0
        if not definite or not np.isfinite(values[index]) or np.max(np.abs(points[index])) > 1e12:
            continue
        precision = -curvatures[index]
        scale = _inverse_root(precision)
        if scale is None or np.sum((scale.T @ gradients[index]) ** 2) > _STRICT_DECREMENT:
            continue
        offsets = [np.linalg.solve(scale, points[index] - loc) for loc, _ in modes]
        if all(offset @ offset > 0.1 for offset in offsets):
            modes.append((points[index], scale))
    num_modes = len(modes)
    if not modes:
        best = int(np.argmax(np.where(np.isfinite(first), first, -np.inf)))
        modes = [(starts[best], np.eye(starts.shape[1]))]
    loc, scale = (np.stack(part) for part in zip(*modes, strict=True))
    return Anchors(loc, scale, num_modes, total + len(starts), total)


def _inverse_root(precision: np.ndarray) -> np.ndarray | None:
    """Lower Cholesky factor of the inverse, by a scaling to unit diagonal; None if singular."""
    diagonal = np.diagonal(precision)
    if not np.all(diagonal > 0):
        return None
    scale = 1.0 / np.sqrt(diagonal)
    values, vectors = np.linalg.eigh(precision * scale[:, None] * scale[None])
    if not values[0] > _EIGENVALUE_FLOOR * values[-1]:
        return None
    # A square root by QR keeps digits that forming the covariance would lose.
    root = scale[:, None] * vectors / np.sqrt(values)[None]
    triangular = np.asarray(np.linalg.qr(root.T, mode="r")).T
    return triangular * np.where(np.diagonal(triangular) < 0, -1.0, 1.0)[None]


@partial(jax.jit, static_argnums=(1, 4, 5))
def batch_and_match(
    key: Key[Array, ""],
    log_density: LogDensity,
    loc: Float[Array, " dim"],
    scale: Float[Array, "dim dim"],
    batch_size: int,
    iterations: int,
) -> tuple[Float[Array, "iterations dim"], Float[Array, "iterations dim dim"]]:
    """A Gaussian fitted to scores by batch and match, from N(loc, scale scale').

    With the batch's means and covariances zbar, C of points and gbar, Gamma of scores, and
    lambda_t = B D / (t + 1),
        U = lambda Gamma + lambda / (1 + lambda) gbar gbar',
        V = S + lambda C + lambda / (1 + lambda) (m - zbar)(m - zbar)',
        S' = 2 V (I + (I + 4 U V)^(1/2))^-1,
        m' = m / (1 + lambda) + lambda / (1 + lambda) (S' gbar + zbar).
    S' is computed as 2 L (I + (I + 4 L' U L)^(1/2))^-1 L' with V = L L', which stays definite.
    Samples of huge or no score get little or no weight, as in the fit.

    Returns:
        m and the lower Cholesky factor of S after every iteration.

    Reference: Cai, Modi, Pillaud-Vivien, Margossian, Gower, Blei, Saul 2024 (arXiv 2402.14758).
    """
    dim = loc.shape[0]

    def step(state: tuple[Array, Array], inputs: tuple[Array, Array]) -> tuple:
        mean, root = state
        key, index = inputs
        noise = jax.random.normal(key, (batch_size, dim), loc.dtype)
        points = mean[None] + noise @ root.T
        values, scores = jax.vmap(jax.value_and_grad(log_density))(points)
        finite = jnp.isfinite(values) & jnp.all(jnp.isfinite(scores), axis=-1)
        scores = jnp.where(finite[:, None], scores, 0.0)
        length = jnp.sum((scores @ root) ** 2, axis=-1)
        weights = jnp.where(finite, 1.0 / (1.0 + length / (20.0 * dim)), 0.0)
        weights = weights / jnp.maximum(jnp.sum(weights), 1e-300)
        step_size = batch_size * dim / (index + 1.0)
        shrunk = step_size / (1.0 + step_size)

        def moments(values: Array) -> tuple[Array, Array]:
            centre = weights @ values
            offset = values - centre[None]
            return centre, (offset * weights[:, None]).T @ offset

        point_mean, point_cov = moments(points)
        score_mean, score_cov = moments(scores)
        gap = mean - point_mean
        spread = step_size * score_cov + shrunk * jnp.outer(score_mean, score_mean)
        matched = root @ root.T + step_size * point_cov + shrunk * jnp.outer(gap, gap)
        lower = jnp.linalg.cholesky(matched)
        eigenvalues, vectors = jnp.linalg.eigh(lower.T @ spread @ lower)
        inner = 2.0 / (1.0 + jnp.sqrt(1.0 + 4.0 * jnp.maximum(eigenvalues, 0.0)))
        covariance = lower @ (vectors * inner[None]) @ vectors.T @ lower.T
        new_mean = mean / (1.0 + step_size)
        new_mean = new_mean + shrunk * (covariance @ score_mean + point_mean)
        new_root = jnp.linalg.cholesky(covariance)
        good = jnp.all(jnp.isfinite(new_root)) & jnp.all(jnp.isfinite(new_mean))
        state = (jnp.where(good, new_mean, mean), jnp.where(good, new_root, root))
        return state, state

    inputs = (jax.random.split(key, iterations), jnp.arange(iterations).astype(loc.dtype))
    return jax.lax.scan(step, (loc, scale), inputs)[1]


@partial(jax.jit, static_argnums=(1, 4))
def evidence_bound(
    key: Key[Array, ""],
    log_density: LogDensity,
    loc: Float[Array, " dim"],
    scale: Float[Array, "dim dim"],
    num_samples: int,
) -> Float[Array, ""]:
    """E log p + log|scale| under N(loc, scale scale'), to rank Gaussians; -inf if not finite."""
    noise = jax.random.normal(key, (num_samples, loc.shape[0]), loc.dtype)
    values = jax.vmap(log_density)(loc[None] + noise @ scale.T)
    bound = jnp.mean(values) + jnp.sum(jnp.log(jnp.diagonal(scale)))
    return jnp.where(jnp.isfinite(bound), bound, -jnp.inf)


@partial(jax.jit, static_argnums=(1, 4))
def draw_candidates(
    key: Key[Array, ""],
    log_density: LogDensity,
    loc: Float[Array, "anchors dim"],
    scale: Float[Array, "anchors dim dim"],
    num_samples: int,
) -> Candidates:
    """Draws from the equal mixture over anchors of broadened t's, with log p - log proposal."""
    dim = loc.shape[-1]
    pick_key, chi_key, normal_key = jax.random.split(key, 3)
    pick = jax.random.randint(pick_key, (num_samples,), 0, loc.shape[0])
    chi = 2.0 * jax.random.gamma(chi_key, 0.5 * _T_DEGREES, (num_samples,), loc.dtype)
    noise = jax.random.normal(normal_key, (num_samples, dim), loc.dtype)
    noise = noise * (_T_SPREAD * jnp.sqrt(_T_DEGREES / chi))[:, None]
    points = loc[pick] + jnp.einsum("nij,nj->ni", scale[pick], noise)

    def log_component(loc: Array, scale: Array) -> Array:
        offset = jax.scipy.linalg.solve_triangular(scale, (points - loc[None]).T, lower=True)
        square = jnp.sum(offset**2, axis=0) / (_T_SPREAD**2 * _T_DEGREES)
        power = 0.5 * (_T_DEGREES + dim)
        constant = gammaln(jnp.asarray(power, loc.dtype)) - jnp.sum(jnp.log(jnp.diagonal(scale)))
        return constant - power * jnp.log1p(square)

    log_proposal = logsumexp(jax.vmap(log_component)(loc, scale), axis=0)
    values = jax.vmap(log_density)(points)
    ratios = jnp.where(jnp.isfinite(values), values - log_proposal, -jnp.inf)
    return Candidates(points, ratios)


def temper(log_ratios: Float[Array, " draws"], least_ess: float) -> Float[Array, ""]:
    """Largest power in [0, 1] at which the weights keep an effective sample size of `least_ess`."""
    finite = jnp.where(jnp.isfinite(log_ratios), log_ratios, -1e300)
    top = jnp.max(finite)

    def halve(bracket: tuple[Array, Array], _: None) -> tuple[tuple[Array, Array], None]:
        low, high = bracket
        middle = 0.5 * (low + high)
        enough = effective_sample_size(middle * (finite - top)) >= least_ess
        return (jnp.where(enough, middle, low), jnp.where(enough, high, middle)), None

    zero, one = jnp.zeros((), finite.dtype), jnp.ones((), finite.dtype)
    (low, _), _ = jax.lax.scan(halve, (zero, one), None, length=30)
    return jnp.where(effective_sample_size(finite - top) >= least_ess, one, low)
