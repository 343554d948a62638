"""Distances between the frozen density and a trainable expert's, by quadrature over y."""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from moe_jax.contaminated.layout import Family
from moe_jax.contaminated.location_scale import LocationScale, StudentT
from moe_jax.contaminated.model import ContaminatedMoE

# Nodes y = centre + scale sinh(t) around the frozen mean and around the expert's. sinh(8) is 1490.
_NODES = np.sinh(np.linspace(-8.0, 8.0, 601))
# Steps towards the expert whose mean is nearest to the frozen one; one is exact for a linear mean.
_PROJECTION_STEPS = 30


class Nodes(NamedTuple):
    """Nodes and weights of an integral over y at points x, all [k, m], and the log-densities."""

    y: np.ndarray
    weight: np.ndarray
    log_frozen: np.ndarray
    log_expert: np.ndarray


def experts_of(family: Family, theta: Float[Array, " p"], d: int) -> list[Array]:
    """The expert's parameters of every prompt."""
    size = sum(math.prod(shape) for _, shape in family.expert.layout(d))
    return [block[-size:] for block in theta.reshape(family.n_prompts, -1)]


def separation(model: ContaminatedMoE, phi: Float[Array, " e"], x: np.ndarray) -> float:
    """S^2 = mean (h - h0)^2/nu0 + mean (log nu/nu0)^2 / 2.

    For classes the chi-squared distance sum (p - p0)^2 / p0, to which the first term is equal to
    second order for a shifted Gaussian. NaN if a mean or variance is unknown.
    """
    expert = model.expert
    if expert.labels:
        nodes = _nodes(model, phi, x)
        p, p0 = np.exp(nodes.log_expert), np.exp(nodes.log_frozen)
        return float(np.mean(np.sum(np.square(p - p0) / p0, axis=1)))
    moments = _frozen_moments(model, x)
    if moments is None or not isinstance(expert, LocationScale):
        return math.nan
    mean0, variance0 = moments
    mean, variance = _expert_moments(expert, phi, x)
    location = np.square(mean - mean0) / variance0
    return float(np.mean(location + 0.5 * np.square(np.log(variance / variance0))))


def hellinger(model: ContaminatedMoE, phi: Float[Array, " e"], x: np.ndarray) -> float:
    """Mean over x of 1 - int sqrt(f f0) dy; NaN if the frozen mean or variance is unknown."""
    nodes = _nodes(model, phi, x)
    if nodes is None:
        return math.nan
    affinity = np.sum(nodes.weight * np.exp(0.5 * (nodes.log_frozen + nodes.log_expert)), axis=1)
    return float(np.clip(np.mean(1.0 - affinity), 0.0, 1.0))


def definition1_check(model: ContaminatedMoE, phi: Float[Array, " e"], x: np.ndarray) -> float:
    """Sine of the angle in L2(dy) between f0 and the span of f1, f2, df2/dh, d2f2/dh2, mean over x.

    f2 is the expert and f1 the one member of its family, the same at every x, that is nearest to f0
    (`limit_expert`). 0 if f0 is a combination of them at every x, as a linear Gaussian f0 is for
    linear Gaussian experts: then the pair is not distinguishable (Definition 1 of Yan et al. 2025).
    A frozen tanh beside a linear expert is none, and the angle says how far they are apart for
    these x, which can be little. The angle, unlike the least singular value of the five together,
    does not vanish merely because f1 and f2 meet.

    What it cannot tell: whether other parameters than the nearest f1 and the present f2 combine
    to f0; and the nearest member of a nonlinear family is found by a local search from f2, so that
    an angle above 0 is an upper bound. NaN for experts without a location, and for classes, whose
    mixture no single x identifies.
    """
    nodes = None if model.expert.labels else _nodes(model, phi, x)
    if nodes is None or not isinstance(model.expert, LocationScale):
        return math.nan
    expert = model.expert
    psi = expert.split(phi)[1]
    mean, _ = _expert_moments(expert, phi, x)
    nearest = limit_expert(model, phi, x)
    mean1 = np.asarray(expert.mean(nearest, expert.design(jnp.asarray(x), None)))
    psi1 = expert.split(nearest)[1]
    sines = []
    for k in range(len(x)):
        root = np.sqrt(nodes.weight[k])
        slopes = expert.noise_derivatives(jnp.asarray(nodes.y[k] - mean[k]), psi)
        by_mean, twice = np.asarray(slopes.by_mean), np.asarray(slopes.by_mean_mean)
        f2 = np.exp(nodes.log_expert[k])
        f1 = np.exp(np.asarray(expert.noise(jnp.asarray(nodes.y[k] - mean1[k]), psi1)))
        with np.errstate(over="ignore", invalid="ignore"):
            span = np.stack([f1, f2, f2 * by_mean, f2 * (twice + np.square(by_mean))]) * root
        if not np.all(np.isfinite(span)) or not np.all(np.any(span != 0, axis=1)):
            # Densities too narrow or too far apart for the nodes.
            return math.nan
        span = span / np.linalg.norm(span, axis=1, keepdims=True)
        target = np.exp(nodes.log_frozen[k]) * root
        target = target / np.linalg.norm(target)
        coefficients, *_ = np.linalg.lstsq(span.T, target, rcond=1e-10)
        sines.append(np.linalg.norm(target - coefficients @ span))
    return float(np.mean(sines))


def limit_expert(
    model: ContaminatedMoE, phi: Float[Array, " e"], x: np.ndarray
) -> Float[Array, " e"]:
    """The family's expert nearest to the frozen one: mean by least squares, then the variance.

    Raises:
        ValueError: if the expert has no location or the frozen model no mean or variance.
    """
    moments = _frozen_moments(model, x)
    expert = model.expert
    if moments is None or not isinstance(expert, LocationScale):
        raise ValueError("the frozen model has no mean and variance, or the expert no location")
    mean0, variance0 = (jnp.asarray(m) for m in moments)
    eta, psi = expert.split(phi)
    design = expert.design(jnp.asarray(x), None)
    weight, free = jnp.ones(len(x)), jnp.ones(eta.shape, jnp.bool_)
    for _ in range(_PROJECTION_STEPS):
        eta = expert.mean_model.step(eta, design, mean0, weight, free)
    residual = mean0 - expert.mean_model.value(eta, design)
    variance = jnp.mean(variance0 + jnp.square(residual)) * _scale_per_variance(expert, psi)
    return jnp.concatenate([eta, psi.at[0].set(jnp.log(variance))])


def _scale_per_variance(expert: LocationScale, psi: Float[Array, " k"]) -> float:
    """The ratio of nu to the noise's variance: (df - 2)/df for t noise of finite variance."""
    if not isinstance(expert, StudentT):
        return 1.0
    df = float(jnp.exp(psi[1])) if expert.df is None else expert.df
    return (df - 2) / df if df > 2 else 1.0


def _expert_moments(
    expert: LocationScale, phi: Float[Array, " e"], x: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Mean and variance [k]; for t noise of infinite variance the squared scale."""
    psi = expert.split(phi)[1]
    mean = np.asarray(expert.mean(phi, expert.design(jnp.asarray(x), None)))
    variance = float(jnp.exp(psi[0])) / _scale_per_variance(expert, psi)
    return mean, np.full(len(x), variance)


def _frozen_moments(model: ContaminatedMoE, x: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Mean and variance [k], None if the frozen model lacks one."""
    frozen = model.frozen
    if not (hasattr(frozen, "mean") and hasattr(frozen, "variance")):
        return None
    mean, variance = (
        np.broadcast_to(np.asarray(part, np.float64).reshape(-1), len(x))
        for part in (frozen.mean(x), frozen.variance(x))
    )
    return mean, variance


def _nodes(model: ContaminatedMoE, phi: Float[Array, " e"], x: np.ndarray) -> Any:
    """Nodes for experts with a location, labels for classes; None if they cannot be placed."""
    expert = model.expert
    if expert.labels:
        y = np.tile(np.arange(expert.labels, dtype=np.float64), (len(x), 1))
        weight = np.ones_like(y)
    else:
        moments = _frozen_moments(model, x)
        if moments is None or not isinstance(expert, LocationScale):
            return None
        pairs = (moments, _expert_moments(expert, phi, x))
        parts = [m[:, None] + np.sqrt(v)[:, None] * _NODES[None, :] for m, v in pairs]
        y = np.sort(np.concatenate(parts, axis=1), axis=1)
        gaps = np.diff(y, axis=1)
        weight = 0.5 * (np.pad(gaps, ((0, 0), (1, 0))) + np.pad(gaps, ((0, 0), (0, 1))))
    many, flat = np.repeat(x, y.shape[1], axis=0), y.reshape(-1)
    log_frozen = np.asarray(model.frozen.log_prob(many, flat), np.float64)
    design = expert.design(jnp.asarray(many), None)
    log_expert = np.asarray(expert.log_prob(phi, design, jnp.asarray(flat)))
    return Nodes(y, weight, log_frozen.reshape(y.shape), log_expert.reshape(y.shape))
