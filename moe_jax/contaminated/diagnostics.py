"""How well the data tell a prompt from the frozen model, and its gate from its expert.

The thresholds are choices, not theorems. Names follow Yan et al. 2025 (arXiv 2505.18455): Delta is
the distance between the experts, Xi(l_n) the parameters with Delta^2 e^tau sqrt(n) >= l_n >> log n.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from moe_jax.contaminated.densities import (
    definition1_check,
    experts_of,
    hellinger,
    limit_expert,
    separation,
)
from moe_jax.contaminated.exponents import exponents
from moe_jax.contaminated.fit import split_names
from moe_jax.contaminated.inference import covariance
from moe_jax.contaminated.layout import unflatten
from moe_jax.contaminated.result import FitResult

AMBER_CORRELATION, RED_CORRELATION = 0.6, 0.95
AMBER_EIGENVALUE, RED_EIGENVALUE = 0.1, 0.01
MAX_GATE_DEVIATION = 0.5
POINTS_PER_PARAMETER = 10
# Below this the frozen density is a combination of the expert's, up to quadrature.
NOT_DISTINGUISHABLE = 1e-5
# Covariate rows at which densities are integrated.
_POINTS = 48
_DISTANCES = (0.08, 0.04)


class Direction(NamedTuple):
    """A direction in which the log-likelihood is flat: eigenvalue at unit diagonal, who moves."""

    eigenvalue: float
    description: str
    loadings: dict[str, float]


class RateFactor(NamedTuple):
    """How a parameter's standard error grows as the expert nears the frozen one at distance D.

    Attributes:
        exponent: k in n^-1/2 D^-k close to the frozen expert.
        local_exponent: the same from the estimate to half its distance.
        standard_error: at the estimate; root of the trace for a vector.
    """

    exponent: float
    local_exponent: float
    standard_error: float


@dataclasses.dataclass(frozen=True)
class Diagnostics:
    """The eight diagnostics of a fit; per-prompt values are arrays [J].

    Attributes:
        canonical_correlation: largest one between the scores of gate and expert, in 0..1.
        lambda_min: least eigenvalue of the observed information at unit diagonal; 1 is ideal.
        separation: mean of (h - h0)^2 / nu0 + (log nu/nu0)^2 / 2; for classes,
            the chi-squared distance.
        hellinger: mean squared Hellinger distance 1 - int sqrt(f f0) of prompt and frozen.
        regularity: sqrt(n) times separation times the odds at the mean log-odds, to be compared
            with `log_rows`.
        log_rows: log n.
        gate_deviation: standard error of the log-odds at the gate's mean design, which is that of
            tau for centred covariates.
        collinear_directions: of the least eigenvalues, at most three.
        definition1_check: sine of the angle between f0 and the span of the expert's densities and
            derivatives; 0 is not distinguishable. See `densities.definition1_check` for what it
            cannot tell.
        rate_factors: by name of the parameter; empty where they cannot be computed.
        responsibility_count, gate_count: sums of r and of w.
        lights: "green", "amber" or "red" by diagnostic.
        warnings: what the lights mean for this fit.
    """

    canonical_correlation: float
    lambda_min: float
    separation: Float[np.ndarray, " J"]
    hellinger: Float[np.ndarray, " J"]
    regularity: Float[np.ndarray, " J"]
    log_rows: float
    gate_deviation: Float[np.ndarray, " J"]
    collinear_directions: tuple[Direction, ...]
    definition1_check: float
    rate_factors: dict[str, RateFactor]
    responsibility_count: Float[np.ndarray, " J"]
    gate_count: Float[np.ndarray, " J"]
    lights: dict[str, str]
    warnings: tuple[str, ...]

    @property
    def wald_gate_is_usable(self) -> bool:
        """Whether Wald intervals of the gate may be read; profiles and bootstrap always may."""
        return bool(np.all(self.gate_deviation <= MAX_GATE_DEVIATION))

    def __str__(self) -> str:
        lines = [
            f"{name:<24}{_text(getattr(self, name)):<28}{self.lights.get(name, '')}"
            for name in (
                "canonical_correlation",
                "lambda_min",
                "separation",
                "hellinger",
                "regularity",
                "log_rows",
                "gate_deviation",
                "definition1_check",
                "responsibility_count",
                "gate_count",
            )
        ]
        lines += [f"flat {d.eigenvalue:8.2e}  {d.description}" for d in self.collinear_directions]
        lines += [
            f"rate {name:<16} D^{-rate.exponent:+.2f}, here D^{-rate.local_exponent:+.2f}, "
            f"standard error {rate.standard_error:.3g}"
            for name, rate in self.rate_factors.items()
        ]
        return "\n".join([*lines, *self.warnings])


def _text(value: Any) -> str:
    return " ".join(f"{v:.4g}" for v in np.atleast_1d(value))


def diagnose(result: FitResult, *, rates: bool = True) -> Diagnostics:
    """Computes the eight diagnostics of a fit.

    Args:
        result: a fit.
        rates: whether to integrate the information along the way to the frozen expert; seconds.
    """
    d, movable = result.x.shape[1], result.movable
    is_gate, is_expert = split_names(result.model.family, d)
    present = result.weight > 0
    index = np.flatnonzero(present)
    points = result.x[index[np.linspace(0, len(index) - 1, min(_POINTS, len(index))).astype(int)]]
    information = result.information
    lambda_min, directions = flat_directions(information, movable, result.names)
    matrix = information if lambda_min > 0 else result.outer_product
    correlation = canonical_correlation(matrix, is_gate & movable, is_expert & movable)
    with jax.enable_x64(True):
        theta = jnp.asarray(result.theta)
        experts = experts_of(result.model.family, theta, d)
        apart = np.array([separation(result.model, phi, points) for phi in experts])
        distance = np.array([hellinger(result.model, phi, points) for phi in experts])
        angle = min(definition1_check(result.model, phi, points) for phi in experts)
        log_odds, deviation = _log_odds(result)
    rows = float(np.sum(result.weight))
    terms = np.atleast_2d(result.responsibilities()), np.atleast_2d(result.gate())
    counts = [term @ result.weight for term in terms]
    with np.errstate(over="ignore"):
        # The odds of a gate that separates are infinite.
        odds = np.exp(log_odds)
    found = {
        "canonical_correlation": correlation,
        "lambda_min": lambda_min,
        "separation": apart,
        "hellinger": distance,
        "regularity": math.sqrt(rows) * apart * odds,
        "log_rows": math.log(rows),
        "gate_deviation": deviation,
        "definition1_check": angle,
        "responsibility_count": counts[0],
        "gate_count": counts[1],
    }
    size = int(np.sum(is_expert & movable)) / result.model.n_prompts
    lights, warnings = _judge(found, size, directions)
    factors, why = rate_factors(result, points, float(np.mean(apart))) if rates else ({}, "")
    if why:
        warnings = (*warnings, f"no rate factors: {why}")
    return Diagnostics(
        **found,
        collinear_directions=directions,
        rate_factors=factors,
        lights=lights,
        warnings=warnings,
    )


def flat_directions(
    information: Float[np.ndarray, "p p"], movable: Bool[np.ndarray, " p"], names: tuple[str, ...]
) -> tuple[float, tuple[Direction, ...]]:
    """Least eigenvalue of the movable entries' information at unit diagonal, and its directions.

    Without curvature in an entry the eigenvalue is 0 and that entry the direction.
    """
    kept = np.flatnonzero(movable)
    if not len(kept):
        return math.nan, ()
    matrix = information[np.ix_(kept, kept)]
    diagonal = np.diagonal(matrix)
    if not np.all(diagonal > 0):
        bad = [names[k] for k in kept[~(diagonal > 0)]]
        return 0.0, (Direction(0.0, " ↔ ".join(bad), dict.fromkeys(bad, 1.0)),)
    scale = 1.0 / np.sqrt(diagonal)
    values, vectors = np.linalg.eigh(matrix * scale[:, None] * scale[None, :])
    directions = []
    for value, vector in list(zip(values, vectors.T, strict=True))[:3]:
        order = np.argsort(-np.abs(vector))
        strong = [k for k in order[:4] if abs(vector[k]) >= 0.4 * abs(vector[order[0]])]
        loadings = {names[kept[k]]: float(vector[k]) for k in order}
        directions.append(
            Direction(float(value), " ↔ ".join(names[kept[k]] for k in strong), loadings)
        )
    return float(values[0]), tuple(directions)


def canonical_correlation(
    matrix: Float[np.ndarray, "p p"],
    first: Bool[np.ndarray, " p"],
    second: Bool[np.ndarray, " p"],
) -> float:
    """Largest canonical correlation between two blocks of a positive definite matrix.

    It is the largest singular value of A^-1/2 B C^-1/2 with A, C the blocks and B what joins them.
    """
    if not first.any() or not second.any():
        return 0.0
    whitened = []
    for block in (first, second):
        own = matrix[np.ix_(block, block)]
        diagonal = np.diagonal(own)
        if not np.all(diagonal > 0):
            return math.nan
        scale = 1.0 / np.sqrt(diagonal)
        values, vectors = np.linalg.eigh(own * scale[:, None] * scale[None, :])
        if values[0] <= 1e-12:
            return math.nan
        whitened.append(scale[:, None] * vectors / np.sqrt(values))
    cross = whitened[0].T @ matrix[np.ix_(first, second)] @ whitened[1]
    return float(min(np.linalg.svd(cross, compute_uv=False)[0], 1.0))


def _log_odds(result: FitResult) -> tuple[np.ndarray, np.ndarray]:
    """Mean log-odds of every prompt and the standard error at the mean design, both [J]."""
    family, d, found = result.model.family, result.x.shape[1], result.estimate
    weight = result.weight / np.sum(result.weight)
    design = family.gate.design(jnp.asarray(result.x), None)
    blocks = result.theta.reshape(family.n_prompts, -1)
    size = int(np.sum(split_names(family, d)[0])) // family.n_prompts
    # In standardised units: in the user's, x far from 0 would cancel to a negative variance.
    cov = covariance(found.information, found.outer_product, found.movable)
    mean, deviation = [], []
    for j, block in enumerate(blocks):
        gamma = jnp.asarray(block[:size])
        slope = np.zeros_like(blocks)
        slope[j, :size] = weight @ np.asarray(family.gate.jacobian(gamma, design))
        slope = found.to_user.T @ slope.reshape(-1)
        mean.append(weight @ np.asarray(family.gate.logit(gamma, design)))
        deviation.append(np.sqrt(slope @ cov @ slope))
    return np.array(mean), np.array(deviation)


def rate_factors(
    result: FitResult, points: Float[np.ndarray, "k d"], apart: float
) -> tuple[dict[str, RateFactor], str]:
    """Exponents of the standard errors along the way from the estimate to the frozen expert.

    The frozen expert's nearest in the family, by least squares of the means, stands for D = 0. If
    the frozen model is none of the family the information stays regular and exponents are near 0.

    Returns:
        The factors by name, and why there are none.
    """
    model, d = result.model, result.x.shape[1]
    if model.n_prompts != 1:
        return {}, "they need n_prompts=1"
    if not apart > 0:
        return {}, "the experts' distance is unknown"
    try:
        with jax.enable_x64(True):
            phi = experts_of(model.family, jnp.asarray(result.theta), d)[0]
            limit = np.asarray(limit_expert(model, phi, points))
            size = len(result.theta) - len(limit)
            theta0 = np.concatenate([result.theta[:size], limit])
            params = unflatten(model.family, theta0, d)
            step = (result.theta - theta0) / math.sqrt(apart)
            direction = unflatten(model.family, step, d)
            distance = math.sqrt(apart)
            close = exponents(model, params, points, direction, distances=_DISTANCES)
            here = (distance, 0.5 * distance)
            local = exponents(model, params, points, direction, distances=here)
    except ValueError as error:
        return {}, str(error)
    variances = np.diagonal(result.cov())
    errors = {
        name: math.sqrt(
            sum(v for v, n in zip(variances, result.names, strict=True) if _is(n, name))
        )
        for name in close
    }
    return {n: RateFactor(close[n], local[n], errors[n]) for n in close}, ""


def _is(name: str, base: str) -> bool:
    return name.partition("[")[0] == base


def _judge(
    found: dict[str, Any], expert_size: float, directions: tuple[Direction, ...]
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Traffic lights and what they mean."""
    rho, least = found["canonical_correlation"], found["lambda_min"]
    lights = {
        "canonical_correlation": _light(
            rho < AMBER_CORRELATION, not (math.isnan(rho) or rho > RED_CORRELATION)
        ),
        "lambda_min": _light(least >= AMBER_EIGENVALUE, least >= RED_EIGENVALUE),
        "gate_deviation": _light(np.all(found["gate_deviation"] <= MAX_GATE_DEVIATION), False),
        "responsibility_count": _light(
            np.all(found["responsibility_count"] >= POINTS_PER_PARAMETER * expert_size), True
        ),
    }
    if np.all(np.isfinite(found["regularity"])):
        lights["regularity"] = _light(np.all(found["regularity"] >= found["log_rows"]), True)
    if math.isfinite(found["definition1_check"]):
        lights["definition1_check"] = _light(found["definition1_check"] > NOT_DISTINGUISHABLE, True)
    flat = directions[0].description if directions else "none"
    texts = {
        "canonical_correlation": "gate and expert are hardly told apart: their scores correlate",
        "lambda_min": f"the information is nearly singular along {flat}",
        "gate_deviation": "no Wald interval of the gate is to be trusted: use profile or bootstrap",
        "responsibility_count": (
            f"fewer than {POINTS_PER_PARAMETER} effective points a parameter reach an expert"
        ),
        "regularity": "outside the range in which the theory promises its rates",
        "definition1_check": (
            "the frozen density is of the expert's kind: rates slow down as the two approach"
        ),
    }
    return lights, tuple(f"{k}: {texts[k]}" for k, light in lights.items() if light != "green")


def _light(is_green: Any, is_amber: Any) -> str:
    return "green" if is_green else "amber" if is_amber else "red"
