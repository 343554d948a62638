"""Designs with known truth: the paper's three experiments, and ones whose slow rates are real.

All have the mean tanh(eta . x) for both experts, x ~ N(0, I_8), eta0 = e_1 and tau* = 1, as Section
5 of Yan et al. (NeurIPS 2025, arXiv 2505.18455). `theory` and `paper` hold the slopes of log error
on log n that its theorems predict, according to the paper, and that it reports.
docs/contaminated.md says why (b-i) and (b-ii) cannot give them.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from moe_jax.contaminated.frozen import FrozenGaussian, FrozenLaplace
from moe_jax.contaminated.location_scale import GaussianNonlinear
from moe_jax.contaminated.model import ContaminatedMoE

ROWS = ("beta", "exp_tau", "eta", "nu")
DIM = 8


@dataclasses.dataclass(frozen=True)
class Design:
    """A model, and a truth that may move with the number of observations.

    Attributes:
        name, title: short and in words.
        model: frozen expert and family. Its parameters are beta, tau, eta and log_nu.
        truth: parameters of the data of n observations.
        dim: number of covariates.
        theory, paper: slopes of log error on log n that were claimed, by row of `ROWS`.
    """

    name: str
    title: str
    model: ContaminatedMoE
    truth: Callable[[int], Mapping[str, Any]]
    dim: int = DIM
    theory: Mapping[str, float] = dataclasses.field(default_factory=dict)
    paper: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def draw_x(self, key: jax.Array, num_rows: int) -> Float[np.ndarray, "rows dim"]:
        """Independent standard normal covariates."""
        with jax.enable_x64(True):
            return np.asarray(jax.random.normal(key, (num_rows, self.dim), jnp.float64))


def row_vectors(params: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The parameters in the coordinates of `ROWS`: intercept as e^tau, variance as nu.

    Leading axes, of replicates, are kept.
    """
    tau, log_nu = np.asarray(params["tau"]), np.asarray(params["log_nu"])
    return {
        "beta": np.asarray(params["beta"]),
        "exp_tau": np.exp(tau)[..., None],
        "eta": np.asarray(params["eta"]),
        "nu": np.exp(log_nu)[..., None],
    }


def tanh_mean(
    eta: Float[jax.Array, " dim"], x: Float[jax.Array, "rows dim"]
) -> Float[jax.Array, " rows"]:
    """tanh(eta . x), strongly identifiable in the sense of the paper's Definition 2."""
    return jnp.tanh(x @ eta)


def _frozen_mean(x: Float[np.ndarray, "rows dim"]) -> Float[np.ndarray, " rows"]:
    return np.tanh(x[:, 0])


def _model(variance: float, frozen: type = FrozenGaussian) -> ContaminatedMoE:
    expert = GaussianNonlinear(tanh_mean, np.zeros(DIM))
    return ContaminatedMoE(frozen(_frozen_mean, variance), expert=expert)


def _truth(beta: float, eta: float, nu: float) -> dict[str, np.ndarray]:
    """Gate slope beta in every coordinate, tau = 1, expert eta e_1."""
    return {
        "beta": np.full(DIM, beta),
        "tau": np.asarray(1.0),
        "eta": eta * np.eye(DIM)[0],
        "log_nu": np.asarray(math.log(nu)),
    }


def _slopes(beta: float, exp_tau: float, eta: float, nu: float) -> dict[str, float]:
    return dict(zip(ROWS, (beta, exp_tau, eta, nu), strict=True))


_MOVING = 1.0 / math.sqrt(DIM)
_MERGING = _slopes(-0.375, -0.25, -0.375, -0.375)

DESIGNS = {
    design.name: design
    for design in (
        Design(
            "paper_a",
            "(a) frozen Laplace of variance .001, eta* = -eta0",
            _model(0.001, FrozenLaplace),
            lambda n: _truth(_MOVING, -1.0, 0.001),
            theory=_slopes(-0.5, -0.5, -0.5, -0.5),
            paper=_slopes(-0.45, -0.52, -0.50, -0.54),
        ),
        Design(
            "paper_b1",
            "(b-i) frozen Gaussian, eta* = eta0 (1 + n^-1/8), as printed",
            _model(0.001),
            lambda n: _truth(_MOVING, 1.0 + n**-0.125, 0.001),
            theory=_MERGING,
            paper=_slopes(-0.37, -0.23, -0.39, -0.35),
        ),
        Design(
            "paper_b2",
            "(b-ii) frozen Gaussian, eta* = -eta0, nu* = nu0 (1 + n^-1/8), as printed",
            _model(0.001),
            lambda n: _truth(_MOVING, -1.0, 0.001 * (1.0 + n**-0.125)),
            theory=_MERGING,
            paper=_slopes(-0.39, -0.22, -0.37, -0.39),
        ),
        Design(
            "slow_constant_gate",
            "eta* = eta0 (1 + n^-1/8), beta* = 0, nu0 = .01",
            _model(0.01),
            lambda n: _truth(0.0, 1.0 + n**-0.125, 0.01),
            theory=_MERGING,
        ),
        Design(
            "slow_moving_gate",
            "eta* = eta0 (1 + n^-1/8), beta* = 1/sqrt(8), nu0 = .01",
            _model(0.01),
            lambda n: _truth(_MOVING, 1.0 + n**-0.125, 0.01),
            theory=_MERGING,
        ),
        Design(
            "slow_low_noise",
            "eta* = eta0 (1 + n^-1/8), beta* = 0, nu0 = .001",
            _model(0.001),
            lambda n: _truth(0.0, 1.0 + n**-0.125, 0.001),
            theory=_MERGING,
        ),
        Design(
            "variance_only",
            "eta* = eta0, nu* = nu0 (1 + n^-1/8), nu0 = .001: to be detected, not fitted",
            _model(0.001),
            lambda n: _truth(_MOVING, 1.0, 0.001 * (1.0 + n**-0.125)),
            theory=_MERGING,
        ),
    )
}
