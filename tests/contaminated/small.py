"""Small data sets that tests share, padded to one shape so that one program fits them all."""

import functools

import jax
import numpy as np

from moe_jax.contaminated import ContaminatedMoE, FrozenGaussian

ROWS = 64
MODEL = ContaminatedMoE(FrozenGaussian(lambda x: x[:, 0], 1.0))
PARAMS = {"beta": [1.0], "tau": -0.3, "eta": [-1.0], "intercept": 4.0, "log_nu": -0.5}


def padded(x, y, rows=ROWS):
    """x, y and the mask of rows that count; the others hold NaN."""
    x = np.asarray(x)
    x = x[:, None] if x.ndim == 1 else x
    missing = rows - len(x)
    wide = np.concatenate([x.astype(np.float64), np.full((missing, x.shape[1]), np.nan)])
    tall = np.concatenate([np.asarray(y, np.float64), np.full(missing, np.nan)])
    return wide, tall, np.arange(rows) < len(x)


def fit_padded(model, x, y, **options):
    """The fit of at most ROWS rows, in the program compiled for ROWS."""
    wide, tall, mask = padded(x, y)
    return model.fit(wide, tall, mask=mask, **options)


def centred(mean=0.0, var=1.0):
    """The model whose frozen density ignores x."""
    return ContaminatedMoE(FrozenGaussian(lambda x: np.full(len(x), mean), var))


@functools.cache
def data():
    """x and y of MODEL at PARAMS, ROWS rows."""
    x = np.random.default_rng(5).normal(size=(ROWS, 1))
    return x, MODEL.sample(jax.random.key(5), PARAMS, x)


@functools.cache
def fitted():
    """The fit to `data`."""
    return MODEL.fit(*data())
