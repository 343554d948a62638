"""Exact Fisher information by quadrature, and how it fades as an expert nears the frozen one.

Where the trainable expert approaches the frozen one at distance D, standard deviations of estimates
grow as n^-1/2 D^-k. The exponents k follow from the information matrix alone, without simulation.
With responsibility r and s = d log f / d(expert), the score is ((r - w) x~, r s), and as D goes to
0 its gate part becomes w (1 - w) (f - f0) / p, a combination of the expert scores. Under a constant
gate the combination is the same at all x, and only its second-order part tells the gate's intercept
from the expert: k is 2 for the intercept and 1 for the rest, the worst case of Yan et al. (arXiv
2505.18455, Theorem 3). A gate that moves with x breaks it: k is 1 for the gate, 0 for the expert.
An expert with an intercept that moves in this intercept alone does worse than the theorem, whose
conditions exclude it: x_u D d_b f = D d_{a_u} f and D^2 d_hh f = 2 D^2 d_nu f make k 3 for the
gate's intercept, 2 for its slope and the expert's intercept, and 1 for slopes and variance.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float
from scipy.special import ndtri
from scipy.stats import qmc

from moe_jax.contaminated import likelihood
from moe_jax.contaminated.compilation import jit
from moe_jax.contaminated.layout import Family, flatten, parameter_names, unflatten
from moe_jax.contaminated.model import ContaminatedMoE

# Rows of the quadrature that are held at once.
_BLOCK_ROWS = 65_536
# Reach of the nodes in standard deviations of an expert, and how many times the nodes: first for
# Gaussian and Laplace tails, then for those of Student's t.
_REACHES = ((40.0, 1), (1e5, 2))


def information(
    model: ContaminatedMoE,
    params: Mapping[str, Any],
    x: ArrayLike,
    *,
    quadrature: int = 401,
    weights: ArrayLike | None = None,
) -> Float[np.ndarray, "p p"]:
    """Expected Fisher information of one observation, mean over x of the integral over y.

    I = E_x int p(y|x) g g' dy with g the score in the coordinates of `parameter_names`, so in
    log nu. Sums over the classes of a multinomial expert; otherwise integrates the density of every
    expert, by Gauss-Legendre panels in t, y = mean + sd sinh(t), that break at all means.

    Args:
        model: one trainable expert; frozen expert and expert need a mean and a variance.
        params: where the information is taken.
        x: points [rows, d] over which it is averaged.
        quadrature: nodes in y for each of the two experts.
        weights: of the points, [rows]; equal ones by default.

    Raises:
        ValueError: for several prompts, for an expert without mean or variance, or if the density
            does not integrate to 1.
    """
    if model.family.n_prompts != 1:
        raise ValueError(f"n_prompts={model.family.n_prompts} must be 1")
    if quadrature < 3:
        raise ValueError(f"quadrature={quadrature} must be at least 3")
    with jax.enable_x64(True):
        points = np.atleast_2d(np.asarray(x, np.float64))
        share = np.full(len(points), 1.0 / len(points))
        if weights is not None:
            share = np.asarray(weights, np.float64) / np.sum(weights)
        theta = jnp.asarray(flatten(model.family, dict(params), points.shape[1]))
        for reach, factor in _REACHES:
            nodes = factor * quadrature
            total, mass = _integrate(model, theta, points, share, nodes, reach)
            if abs(mass - 1.0) < 1e-7:
                return total
    raise ValueError(
        f"the density integrates to {mass:.6g} instead of 1: the frozen expert is not normalised, "
        "or its mean and variance do not describe it"
    )


class _Nodes(NamedTuple):
    """Nodes y and the measure dy of frozen and trainable expert there, all [points, nodes]."""

    y: np.ndarray
    of_frozen: np.ndarray
    of_expert: np.ndarray


def _integrate(
    model: ContaminatedMoE,
    theta: Array,
    points: np.ndarray,
    share: np.ndarray,
    quadrature: int,
    reach: float,
) -> tuple[np.ndarray, float]:
    """Information and mass of the density, in blocks of points."""
    total, mass = np.zeros((len(theta), len(theta))), 0.0
    step = max(_BLOCK_ROWS // _nodes(model, theta, points[:1], quadrature, reach).y.size, 1)
    for first in range(0, len(points), step):
        # The last block is filled up with points of weight 0: one compiled shape.
        index = np.arange(first, first + step)
        part = np.where(index < len(points), share[np.minimum(index, len(points) - 1)], 0.0)
        block = points[np.minimum(index, len(points) - 1)]
        nodes = _nodes(model, theta, block, quadrature, reach)
        y, x = nodes.y.reshape(-1), np.repeat(block, nodes.y.shape[1], axis=0)
        log_frozen = np.asarray(model.frozen.log_prob(x, y), np.float64)
        measures = [(part[:, None] * m).reshape(-1) for m in (nodes.of_frozen, nodes.of_expert)]
        arrays = map(jnp.asarray, (x, y, log_frozen, *measures))
        block_total, block_mass = _outer_product(model.family, theta, *arrays)
        total += np.asarray(block_total)
        mass += float(block_mass)
    return total, mass


@partial(jit, static="family", quick=False)
def _outer_product(
    family: Family,
    theta: Array,
    x: Array,
    y: Array,
    log_frozen: Array,
    of_frozen: Array,
    of_expert: Array,
) -> tuple[Array, Array]:
    rows = likelihood.make_rows(family, x, y, log_frozen, None)
    terms = likelihood.row_terms(family, theta, rows)
    r = terms.responsibility[0]
    # The frozen expert's nodes integrate (1 - r) p = (1 - w) f0, the other's r p = w f.
    mass = jnp.exp(terms.loglik) * ((1.0 - r) * of_frozen + r * of_expert)
    scores = likelihood.row_scores(family, theta, rows)
    # Far out in the tails a node may have no density and a score that is not finite.
    scores = jnp.where(mass[:, None] > 0.0, scores, 0.0)
    return (scores * mass[:, None]).T @ scores, jnp.sum(mass)


def _nodes(
    model: ContaminatedMoE, theta: Array, points: np.ndarray, quadrature: int, reach: float
) -> _Nodes:
    if num_labels := model.family.expert.labels:
        y = np.tile(np.arange(num_labels, dtype=np.float64), (len(points), 1))
        return _Nodes(y, np.ones(y.shape), np.ones(y.shape))
    means, deviations = _moments(model, theta, points)
    base, base_weight = np.polynomial.legendre.leggauss(-(-quadrature // 3))
    limit = np.arcsinh(reach)
    all_y, measures = [], []
    for own in (0, 1):
        mean, deviation = means[own], deviations[own]
        other = np.clip(np.arcsinh((means[1 - own] - mean) / deviation), -limit, limit)
        ends = np.full_like(other, limit)
        breaks = np.sort(np.stack([-ends, np.zeros_like(other), other, ends], axis=1), axis=1)
        half = 0.5 * np.diff(breaks, axis=1)[..., None]
        t = (breaks[:, :-1, None] + half * (1.0 + base)).reshape(len(points), -1)
        dt = (half * base_weight).reshape(len(points), -1)
        all_y.append(mean[:, None] + deviation[:, None] * np.sinh(t))
        measures.append(deviation[:, None] * np.cosh(t) * dt)
    zeros = np.zeros_like(measures[0])
    return _Nodes(
        np.concatenate(all_y, axis=1),
        np.concatenate([measures[0], zeros], axis=1),
        np.concatenate([zeros, measures[1]], axis=1),
    )


def _moments(
    model: ContaminatedMoE, theta: Array, points: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Means and scales of frozen and trainable expert, each [2, points]."""
    expert = model.family.expert
    if "log_nu" not in expert.dispersion_names:
        raise ValueError(f"expert={expert} has no variance nu, which the nodes are spread by")
    mean, variance = (getattr(model.frozen, name, None) for name in ("mean", "variance"))
    if mean is None or variance is None:
        raise ValueError(f"frozen={model.frozen} needs a mean and a variance for the quadrature")
    params = unflatten(model.family, np.asarray(theta), points.shape[1])
    design = expert.design(jnp.asarray(points), None)
    size = expert.location_size(points.shape[1]) + len(expert.dispersion_names)
    expert_mean = expert.mean(theta[-size:], design)
    shape = (len(points),)
    means = [np.broadcast_to(np.asarray(m, np.float64), shape) for m in (mean(points), expert_mean)]
    variances = np.asarray(variance(points), np.float64), np.exp(params["log_nu"])
    deviations = [np.broadcast_to(np.sqrt(v), shape) for v in variances]
    return np.stack(means), np.stack(deviations)


def blocks(model: ContaminatedMoE, dim: int) -> dict[str, list[int]]:
    """Positions of every parameter in the flat vector, by name without index."""
    found: dict[str, list[int]] = {}
    for position, name in enumerate(parameter_names(model.family, dim)):
        found.setdefault(name.partition("[")[0], []).append(position)
    return found


def cramer_rao(matrix: Float[np.ndarray, "p p"]) -> Float[np.ndarray, "p p"]:
    """Inverse information: no unbiased estimate from one observation has a smaller covariance.

    Raises:
        ValueError: if the information is singular to working precision.
    """
    diagonal = np.diag(matrix)
    # Where the experts coincide the gate's scores are rounding errors, whose squares these are.
    is_singular = diagonal.min() <= 1e-28 * diagonal.max()
    scale = 1.0 / np.sqrt(np.where(diagonal > 0.0, diagonal, 1.0))
    values, vectors = np.linalg.eigh(matrix * np.outer(scale, scale))
    if is_singular or values[0] <= 1e-14 * len(values):
        raise ValueError(
            f"the information is singular: least diagonal entry {diagonal.min():.1e}, smallest "
            f"eigenvalue {values[0]:.1e} once that is 1; the experts coincide, or a direction "
            "leaves the density as it is"
        )
    half = vectors / np.sqrt(values) * scale[:, None]
    return half @ half.T


def standard_deviations(
    model: ContaminatedMoE, matrix: Float[np.ndarray, "p p"], dim: int
) -> dict[str, float]:
    """Cramer-Rao bound times root n of every parameter; root of the trace for a vector."""
    variances = np.diag(cramer_rao(matrix))
    return {
        name: float(np.sqrt(variances[positions].sum()))
        for name, positions in blocks(model, dim).items()
    }


def exponents(
    model: ContaminatedMoE,
    params: Mapping[str, Any],
    x: ArrayLike,
    direction: Mapping[str, Any],
    *,
    distances: Sequence[float] = (0.08, 0.04),
    quadrature: int = 401,
    weights: ArrayLike | None = None,
) -> dict[str, float]:
    """Local exponents k of SD ~ n^-1/2 D^-k as the expert nears `params` along a direction.

    Args:
        model: see `information`.
        params: the limit D = 0, where the trainable expert equals the frozen one.
        x: points [rows, d], for example of `gauss_hermite`.
        direction: change by unit distance of some of the parameters, in the same coordinates.
        distances: the two at which standard deviations are compared.
        quadrature, weights: see `information`.

    Returns:
        Exponent by name of the parameter: 0 is the usual rate, 1 or more a slower one.

    Raises:
        ValueError: as `information` and `cramer_rao`, and for a direction that names a parameter
            that `params` lacks.
    """
    unknown = set(direction) - set(params)
    if unknown:
        raise ValueError(f"direction names {sorted(unknown)}, params has {sorted(params)}")
    dim = np.atleast_2d(np.asarray(x)).shape[1]
    first, second = (
        standard_deviations(
            model,
            information(
                model,
                {
                    name: np.asarray(value, np.float64)
                    + distance * np.asarray(direction.get(name, 0.0), np.float64)
                    for name, value in params.items()
                },
                x,
                quadrature=quadrature,
                weights=weights,
            ),
            dim,
        )
        for distance in distances
    )
    step = np.log(distances[0] / distances[1])
    return {name: float(np.log(second[name] / first[name]) / step) for name in first}


def gauss_hermite(
    dim: int, order: int = 20
) -> tuple[Float[np.ndarray, "nodes dim"], Float[np.ndarray, " nodes"]]:
    """Product nodes [order^dim, dim] and weights for the standard normal distribution."""
    nodes, weight = np.polynomial.hermite_e.hermegauss(order)
    grid = np.stack(np.meshgrid(*[nodes] * dim, indexing="ij"), axis=-1).reshape(-1, dim)
    product = np.prod(np.stack(np.meshgrid(*[weight] * dim, indexing="ij"), axis=-1), axis=-1)
    return grid, product.reshape(-1) / product.sum()


def normal_points(dim: int, log2_rows: int = 12, seed: int = 0) -> Float[np.ndarray, "rows dim"]:
    """2^log2_rows scrambled Sobol points of the standard normal distribution, for large `dim`."""
    uniform = qmc.Sobol(dim, rng=np.random.default_rng(seed)).random_base2(log2_rows)
    return ndtri(np.clip(uniform, 1e-12, 1.0 - 1e-12))
