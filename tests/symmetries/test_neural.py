"""Neural baselines: one solve a path gives what a fine solve of every query by itself gives."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.symmetries.anchors import locate
from moe_jax.symmetries.context import as_arrays, make_context, measure_scales
from moe_jax.symmetries.data import IrregularBatch
from moe_jax.symmetries.decoders import decode
from moe_jax.symmetries.encoders import encode
from moe_jax.symmetries.nets import mlp
from moe_jax.symmetries.neural import fit_neural, init_neural, neural_answer, neural_config

ROWS, TIMES = 3, 7
COMPILER = {"compiler_options": {"xla_backend_optimization_level": 0}}


def heun(field, z, span, steps=400):
    """Every state by itself, in NumPy-like steps, without diffrax."""

    def step(_, z):
        first = mlp(field, z)
        second = mlp(field, z + first * h)
        return z + h * (first + second) / 2

    h = span[..., None] / steps
    return jax.lax.fori_loop(0, steps, step, z)


@functools.partial(jax.jit, **COMPILER)
def context_of(batch):
    batch = as_arrays(batch)
    scales = measure_scales(batch)
    return scales, make_context(batch, scales)


@pytest.mark.parametrize("name", ["anchored neural ODE", "Latent ODE"])
def test_answers_are_those_of_fine_solves(name):
    rng = np.random.default_rng(0)
    times = np.sort(rng.uniform(0, 3, (ROWS, TIMES)), axis=1)
    values = rng.normal(size=(ROWS, TIMES, 2))
    values[0, 0], values[1, -1], values[2, 2:4] = np.nan, np.nan, np.nan
    scales, context = context_of(IrregularBatch(times=times - times[:, :1], values=values))
    config = dataclasses.replace(neural_config(name, 2, 4), hidden=6, decoder_hidden=6)
    params = jax.jit(init_neural, static_argnums=1, **COMPILER)(jax.random.key(1), config)
    lowest = 0.0 if name == "anchored neural ODE" else 1.0
    query = jnp.asarray(rng.uniform(lowest, 5, (ROWS, 9)), jnp.float32) / scales.time_unit
    answer = jax.jit(neural_answer, static_argnums=1, **COMPILER)
    actual = answer(params, config, scales, context, query)[0]

    @functools.partial(jax.jit, **COMPILER)
    def fine(params, scales, context, query):
        unused = lambda *_: jnp.zeros(())  # noqa: E731
        state, _ = encode(params["encoder"], config, context, unused, unused, scales.window)
        place = locate(context.search_times, context.keep, query, anchors=config.anchors)
        z = jax.vmap(lambda row, at: row[at])(state, place.place)
        moved = heun(params["field"], z, place.span)
        latent = jnp.sum(place.weight[..., None] * moved, axis=2)
        return decode(params["decoder"], config, latent)

    expected = fine(params, scales, context, query)
    np.testing.assert_allclose(actual, expected, atol=5e-4)
    assert np.ptp(expected, axis=1).max() > 0.1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "CRU"}, "name='CRU' is not one of"),
        ({"width": 0}, "width=0 must be at least 1"),
        ({"seed": -1}, "seed=-1 must be in"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    batch = IrregularBatch(times=np.zeros((1, 1)), values=np.ones((1, 1, 1)))
    arguments = {"name": "Latent ODE", "train_examples": batch, "val_examples": batch} | options
    with pytest.raises(ValueError, match=message):
        fit_neural(**arguments)
