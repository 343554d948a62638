"""Softmax-contaminated mixtures: a frozen model, trainable prompts, and inference on them.

    p(y|x) = (1 - w(x)) f0(y|x) + w(x) f(y|x; eta, nu),   w(x) = sigmoid(beta.x + tau)

f0 is any model with a log-density, never changed. Estimation is exact maximum likelihood in
float64, whatever JAX's global setting. Yan, Nguyen, Le, Akbarian, Ho and Rinaldo 2025 (arXiv
2505.18455).

Axes in annotations: n rows, d covariates, p parameters, J prompts, R data sets, K classes.
"""

from moe_jax.contaminated.custom import Custom
from moe_jax.contaminated.discrete import Multinomial
from moe_jax.contaminated.fit import fit
from moe_jax.contaminated.frozen import (
    FrozenClassifier,
    FrozenGaussian,
    FrozenLaplace,
    FrozenLogProb,
    FrozenStudentT,
    calibrate_variance,
)
from moe_jax.contaminated.gates import ConstantGate, CustomGate, LinearGate
from moe_jax.contaminated.location_scale import GaussianLinear, GaussianNonlinear, StudentT
from moe_jax.contaminated.model import ContaminatedMoE
from moe_jax.contaminated.result import FitResult
from moe_jax.contaminated.simulate import simulate

__all__ = [
    "ConstantGate",
    "ContaminatedMoE",
    "Custom",
    "CustomGate",
    "FitResult",
    "FrozenClassifier",
    "FrozenGaussian",
    "FrozenLaplace",
    "FrozenLogProb",
    "FrozenStudentT",
    "GaussianLinear",
    "GaussianNonlinear",
    "LinearGate",
    "Multinomial",
    "StudentT",
    "calibrate_variance",
    "fit",
    "simulate",
]
