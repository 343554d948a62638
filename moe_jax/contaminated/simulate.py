"""Data with known truth from a contaminated mixture of experts."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Float, Int

from moe_jax.contaminated.model import ContaminatedMoE


def simulate(
    key: jax.Array, model: ContaminatedMoE, params: Mapping[str, Any], x: ArrayLike
) -> Float[np.ndarray, " rows"] | Int[np.ndarray, " rows"]:
    """Draws y for every row of x from p(y|x) = (1 - w(x)) f0(y|x) + w(x) f(y|x).

    The frozen expert must be able to `sample`, and so must the trainable one.

    Args:
        key: of the draws; the same key gives the same y.
        model: whose frozen expert, gate and family are used; it needs no fit.
        params: parameters of gate and expert, as `model.fit` returns them.
        x: covariates [rows, d].

    Returns:
        Responses, float64; class labels for a multinomial expert.

    Example:
        >>> import numpy as np
        >>> from moe_jax.contaminated import ContaminatedMoE, FrozenGaussian, simulate
        >>> model = ContaminatedMoE(FrozenGaussian(lambda x: x[:, 0], var=1.0))
        >>> x = np.random.default_rng(0).normal(size=(5, 1))
        >>> params = {"beta": [1.0], "tau": 0.0, "eta": [-1.0], "intercept": 3.0, "log_nu": 0.0}
        >>> simulate(jax.random.key(0), model, params, x).shape
        (5,)
    """
    return model.sample(key, dict(params), x)
