"""Before the fit: where the target is and how wide, for whitening and for choosing experts.

In numpy but for the target itself: what runs once is not worth compiling.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key
from scipy.special import gammaln, logsumexp

from moe_jax.product_of_t.targets import (
    Derivatives,
    LogDensity,
    derivatives_at,
    generator_of,
    values_at,
    whitened_scores,
)

_MAX_CLIMB = 50
# Relative to the largest eigenvalue: nearly flat directions, such as two almost collinear
# coefficients give, must not be cut off.
_EIGENVALUE_FLOOR = 1e-13
_CONVERGED = 1e-8
_STRICT_DECREMENT = 1e-3
_T_DEGREES = 4.0
_T_SPREAD = 1.5
_STAGES = 3
# Below this power of p / proposal, the tempered moments say more of the proposal than of p.
_TRUSTED_POWER = 0.3


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


class Proposal(NamedTuple):
    """Mixture of t's with 4 degrees of freedom.

    Attributes:
        loc: centres.
        scale: lower triangular roots of the scale matrices.
        share: weights, of sum 1.
    """

    loc: Float[np.ndarray, "anchors dim"]
    scale: Float[np.ndarray, "anchors dim dim"]
    share: Float[np.ndarray, " anchors"]

    def log_prob(self, points: Float[np.ndarray, "points dim"]) -> Float[np.ndarray, " points"]:
        """Log density."""
        dim = self.loc.shape[-1]
        power = 0.5 * (_T_DEGREES + dim)
        constant = gammaln(power) - gammaln(0.5 * _T_DEGREES)
        constant -= 0.5 * dim * math.log(_T_DEGREES * math.pi)
        logs = []
        for centre, root, share in zip(*self, strict=True):
            offset = np.linalg.solve(root, (points - centre).T)
            log_determinant = np.sum(np.log(np.abs(np.diagonal(root))))
            tail = power * np.log1p(np.sum(offset**2, axis=0) / _T_DEGREES)
            logs.append(math.log(share) - log_determinant - tail)
        return constant + logsumexp(logs, axis=0)


class Candidates(NamedTuple):
    """Draws from a broad proposal.

    Attributes:
        points: the draws.
        log_density: log p there.
        log_ratios: log p - log proposal, -inf where log p is not finite.
        proposal: what they are draws of.
    """

    points: Float[np.ndarray, "draws dim"]
    log_density: Float[np.ndarray, " draws"]
    log_ratios: Float[np.ndarray, " draws"]
    proposal: Proposal


def _climb(
    log_density: LogDensity, starts: np.ndarray
) -> tuple[np.ndarray, np.ndarray, Derivatives, int]:
    """Damped Newton ascent with |eigenvalues|, from every start at once.

    The Hessian is scaled to S H S with S = |diag H|^-1/2, which makes the floor on eigenvalues
    independent of the units of the coordinates.

    Returns:
        Log p at the starts, points, derivatives there and the number of points visited.
    """
    points = starts.copy()
    found = derivatives_at(log_density, points)
    first = found.values.copy()
    damping, active = np.full(len(points), 1e-2), np.isfinite(first)
    visited = len(points)
    for _ in range(_MAX_CLIMB):
        index = np.flatnonzero(active)
        if not len(index):
            break
        gradient, curvature = found.gradients[index], found.hessians[index]
        usable = np.all(np.isfinite(gradient), axis=-1) & np.all(
            np.isfinite(curvature), axis=(-2, -1)
        )
        gradient = np.where(usable[:, None], gradient, 0.0)
        curvature = np.where(usable[:, None, None], curvature, -np.eye(points.shape[1]))
        size = np.abs(np.diagonal(curvature, axis1=-2, axis2=-1))
        largest = np.maximum(np.max(size, axis=-1, keepdims=True), 1e-300)
        scale = 1.0 / np.sqrt(np.maximum(size, 1e-14 * largest))
        values, vectors = np.linalg.eigh(curvature * scale[:, :, None] * scale[:, None, :])
        values = np.abs(values)
        values = np.maximum(values, _EIGENVALUE_FLOOR * np.max(values, axis=-1, keepdims=True))
        slope = np.einsum("nji,nj->ni", vectors, scale * gradient)
        step = slope / (values + damping[index, None])
        trials = points[index] + scale * np.einsum("nij,nj->ni", vectors, step)
        after = derivatives_at(log_density, trials)
        visited += len(index)
        better = np.isfinite(after.values) & (after.values >= found.values[index])
        better &= np.all(np.isfinite(after.gradients), axis=-1)
        better &= np.all(np.isfinite(after.hessians), axis=(-2, -1))
        moved = index[better]
        points[moved] = trials[better]
        for old, new in zip(found, after, strict=True):
            old[moved] = new[better]
        converged = np.sum(slope**2 / values, axis=-1) < _CONVERGED
        # Where full steps gain nothing any more, the point is as good as rounding allows.
        stuck = ~better & (damping[index] > 1e8)
        damping[index] = np.where(better, 0.2 * damping[index], 8.0 * damping[index] + 1e-8)
        active[index] = ~(stuck | (converged & usable))
    return first, points, found, visited


def find_anchors(log_density: LogDensity, starts: Float[np.ndarray, "starts dim"]) -> Anchors:
    """Strict modes of log p with their Laplace covariances, each once, the highest first.

    Where the climb finds no strict mode, as in a funnel whose density is unbounded, the single
    anchor is the best start with unit scale.

    Raises:
        ValueError: if log p is finite at none of the starts.
    """
    first, points, found, visited = _climb(log_density, starts)
    if not np.any(np.isfinite(first)):
        raise ValueError(
            f"target is not finite at any of the {len(starts)} starts: give `starts` inside its "
            "support"
        )
    values, gradients, curvatures = found
    modes: list[tuple[np.ndarray, np.ndarray]] = []
    for index in np.argsort(-np.where(np.isfinite(values), values, -np.inf)):
        # A mode at the end of the range of numbers is a density that grows without end.
        usable = np.all(np.isfinite(curvatures[index])) and np.isfinite(values[index])
        if not usable or np.max(np.abs(points[index])) > 1e12:
            continue
        scale = _inverse_root(-curvatures[index])
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
    return Anchors(loc, scale, num_modes, visited, visited)


def _inverse_root(precision: np.ndarray) -> np.ndarray | None:
    """Lower Cholesky factor of the inverse, by a scaling to unit diagonal; None if not definite."""
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


def batch_and_match(
    key: Key[Array, ""],
    log_density: LogDensity,
    loc: Float[np.ndarray, " dim"],
    scale: Float[np.ndarray, "dim dim"],
    batch_size: int,
    iterations: int,
) -> tuple[Float[np.ndarray, " dim"], Float[np.ndarray, "dim dim"]]:
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
        m and the lower Cholesky factor of S.

    Reference: Cai, Modi, Pillaud-Vivien, Margossian, Gower, Blei, Saul 2024 (arXiv 2402.14758).
    """
    rng = generator_of(key)
    mean, root, dim = loc, scale, len(loc)
    # The target is evaluated as in the fit's own updates, in x with z = mean + root x.
    for index in range(iterations):
        white = rng.standard_normal((batch_size, dim))
        result = whitened_scores(
            log_density, jnp.asarray(mean), jnp.asarray(root), jnp.asarray(white)
        )
        _, white_scores, finite = map(np.asarray, result)
        weights = finite / (1.0 + np.sum(white_scores**2, axis=-1) / (20.0 * dim))
        if not np.any(weights > 0):
            continue
        step_size = batch_size * dim / (index + 1.0)
        # In x, where S = I and m = 0.
        matched = _match(white, white_scores, weights / np.sum(weights), step_size)
        if matched is None:
            continue
        new_mean, new_root = mean + root @ matched[0], root @ matched[1]
        if np.all(np.isfinite(new_mean)) and np.all(np.isfinite(new_root)):
            mean, root = new_mean, new_root
    return mean, root


def _match(
    points: np.ndarray, scores: np.ndarray, weights: np.ndarray, step_size: float
) -> tuple[np.ndarray, np.ndarray] | None:
    """Mean and lower Cholesky factor of the update of N(0, I), or None if it is no Gaussian."""
    shrunk = step_size / (1.0 + step_size)

    def moments(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        centre = weights @ values
        offset = values - centre
        return centre, (offset * weights[:, None]).T @ offset

    point_mean, point_cov = moments(points)
    score_mean, score_cov = moments(scores)
    spread = step_size * score_cov + shrunk * np.outer(score_mean, score_mean)
    matched = np.eye(points.shape[1]) + step_size * point_cov
    matched += shrunk * np.outer(point_mean, point_mean)
    try:
        lower = np.linalg.cholesky(matched)
        eigenvalues, vectors = np.linalg.eigh(lower.T @ spread @ lower)
        inner = 2.0 / (1.0 + np.sqrt(1.0 + 4.0 * np.maximum(eigenvalues, 0.0)))
        half = lower @ (vectors * np.sqrt(inner))
        covariance = half @ half.T
        return shrunk * (covariance @ score_mean + point_mean), np.linalg.cholesky(covariance)
    except np.linalg.LinAlgError:
        return None


def evidence_bound(
    key: Key[Array, ""],
    log_density: LogDensity,
    loc: Float[np.ndarray, " dim"],
    scale: Float[np.ndarray, "dim dim"],
    num_samples: int,
) -> float:
    """E log p + log|scale| under N(loc, scale scale'), to rank Gaussians; -inf if not finite."""
    noise = generator_of(key).standard_normal((num_samples, len(loc)))
    values = values_at(log_density, loc + noise @ scale.T)
    if not np.all(np.isfinite(values)):
        return -math.inf
    return float(np.mean(values) + np.sum(np.log(np.diagonal(scale))))


def draw_candidates(
    key: Key[Array, ""],
    log_density: LogDensity,
    loc: Float[np.ndarray, "anchors dim"],
    scale: Float[np.ndarray, "anchors dim dim"],
    num_samples: int,
) -> Candidates:
    """Draws about the anchors, then twice about what the draws so far say of the target.

    A curved target reaches beyond every Gaussian that is matched to it: its moments, estimated with
    tempered weights, are the next t, so that the draws find their way along it. In the end all are
    draws of one mixture (deterministic mixtures; Cornuet et al. 2012, arXiv 0907.1254).
    """
    rng = generator_of(key)
    sizes = [len(part) for part in np.array_split(np.arange(num_samples), _STAGES)]
    components = [(centre, _T_SPREAD * root) for centre, root in zip(loc, scale, strict=True)]
    counts = np.full(len(components), sizes[0] / len(components))
    points = _draw_t(rng, components, sizes[0])
    values = values_at(log_density, points)
    for size in sizes[1:]:
        moments = tempered_moments(_candidates(points, values, components, counts))
        if moments is None:
            counts[: len(loc)] += size / len(loc)
            some = _draw_t(rng, components[: len(loc)], size)
        else:
            components.append((moments[0], _T_SPREAD * moments[1]))
            counts = np.append(counts, size)
            some = _draw_t(rng, components[-1:], size)
        points = np.concatenate([points, some])
        values = np.concatenate([values, values_at(log_density, some)])
    return _candidates(points, values, components, counts)


def _draw_t(
    rng: np.random.Generator, components: list[tuple[np.ndarray, np.ndarray]], count: int
) -> np.ndarray:
    loc, scale = (np.stack(part) for part in zip(*components, strict=True))
    # As equal in number as can be.
    pick = rng.permutation(np.arange(count) % len(loc))
    radius = np.sqrt(_T_DEGREES / rng.chisquare(_T_DEGREES, count))
    noise = rng.standard_normal((count, loc.shape[-1])) * radius[:, None]
    return loc[pick] + np.einsum("nij,nj->ni", scale[pick], noise)


def _candidates(
    points: np.ndarray,
    values: np.ndarray,
    components: list[tuple[np.ndarray, np.ndarray]],
    counts: np.ndarray,
) -> Candidates:
    loc, scale = (np.stack(part) for part in zip(*components, strict=True))
    proposal = Proposal(loc, scale, counts / np.sum(counts))
    ratios = np.where(np.isfinite(values), values - proposal.log_prob(points), -np.inf)
    return Candidates(points, values, ratios, proposal)


def tempered_moments(candidates: Candidates) -> tuple[np.ndarray, np.ndarray] | None:
    """Mean and lower root of the covariance by tempered weights; None where those are poor."""
    power, weights = tempered_weights(candidates)
    if power < _TRUSTED_POWER:
        return None
    mean = weights @ candidates.points
    # In the coordinates of the proposal's last component, where the covariance is well conditioned.
    scale = candidates.proposal.scale[-1]
    offset = np.linalg.solve(scale, (candidates.points - mean).T).T
    try:
        root = scale @ np.linalg.cholesky((offset * weights[:, None]).T @ offset)
    except np.linalg.LinAlgError:
        return None
    return (mean, root) if np.all(np.isfinite(root)) else None


def tempered_weights(
    candidates: Candidates,
) -> tuple[float, Float[np.ndarray, " draws"]]:
    """Largest trusted power of p / proposal, and the normalised weights by it.

    All 0 where the target is finite at none of the candidates.
    """
    finite = np.isfinite(candidates.log_ratios)
    weights = np.zeros(len(finite))
    if not np.any(finite):
        return 0.0, weights
    logs = candidates.log_ratios[finite]
    power = temper(logs, max(100.0, 10.0 * candidates.points.shape[1]))
    weights[finite] = np.exp(power * (logs - np.max(logs)))
    return power, weights / np.sum(weights)


def temper(log_ratios: Float[np.ndarray, " draws"], least_ess: float) -> float:
    """Largest power in [0, 1] at which the weights keep an effective sample size of `least_ess`."""
    finite = log_ratios[np.isfinite(log_ratios)]

    def is_enough(power: float) -> bool:
        weights = np.exp(power * (finite - np.max(finite)))
        return bool(np.sum(weights) ** 2 >= least_ess * np.sum(weights**2))

    if not len(finite):
        return 0.0
    if is_enough(1.0):
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if is_enough(middle) else (low, middle)
    return low
