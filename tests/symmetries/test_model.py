"""The model on irregular data: what must not matter does not, and what is odd stays finite.

Tests named after a report in another project carry the input that failed there.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.symmetries.anchors import level_anchors, locate, segment_means
from moe_jax.symmetries.config import LatentMoSConfig
from moe_jax.symmetries.context import as_arrays, measure_scales
from moe_jax.symmetries.data import IrregularBatch
from moe_jax.symmetries.model import LatentMoS, apply_model, init_params, predict, ready

NAN = np.nan
ROWS, TIMES, QUERIES = 3, 8, 6
LENGTHS = np.array([8, 5, 3])
COMPILER = {"compiler_options": {"xla_backend_optimization_level": 0}}
SMALL = LatentMoSConfig(obs_dim=2, hidden=6, decoder_hidden=8, planes=2, experts=3)
CAUSAL = {
    "bigru": dataclasses.replace(SMALL, causal=True),
    "odernn": dataclasses.replace(SMALL, encoder="odernn", causal=True),
    "transformer": dataclasses.replace(SMALL, encoder="transformer", causal=True),
}


FAR = dataclasses.replace(SMALL, max_horizon=100.0, input_dim=1)
find_neighbours = jax.jit(locate, static_argnames="anchors", **COMPILER)
find_coarse = jax.jit(level_anchors, static_argnames=("stride", "causal"), **COMPILER)
find_means = jax.jit(segment_means, **COMPILER)


@functools.partial(jax.jit, **COMPILER)
def scales_of(batch):
    """Scales of a batch whose times are relative."""
    return measure_scales(as_arrays(batch))


def data(seed=0, rows=ROWS):
    rng = np.random.default_rng(seed)
    times = np.sort(rng.uniform(0, 10, (rows, TIMES)), axis=1)
    batch = IrregularBatch(
        times=times, values=rng.normal(size=(rows, TIMES, 2)), lengths=LENGTHS[:rows]
    )
    return batch, rng.uniform(-2, 14, (rows, QUERIES))


@functools.cache
def variables_of(config):
    """Parameters that are far from their first values, and the scales of the example."""
    batch = data()[0]
    scales = scales_of(dataclasses.replace(batch, times=batch.times - batch.times[:, :1]))
    params = jax.jit(init_params, static_argnums=1, **COMPILER)(jax.random.key(0), config, scales)
    return {"params": params, "scales": {"scales": scales}}


@functools.partial(jax.jit, static_argnums=0, **COMPILER)
def quickly_compiled(config, variables, batch, query):
    return LatentMoS(config).apply(variables, batch, query)


def answer(config, batch, query, variables=None):
    """`predict` without the compiler's optimisation, which takes longer than the answer."""
    variables = variables_of(config) if variables is None else variables
    return quickly_compiled(config, variables, *ready(batch, query))


def with_values(batch, index, value):
    values = np.array(batch.values)
    values[index] = value
    return dataclasses.replace(batch, values=values)


def test_latent_at_an_anchor_is_the_anchor():  # P9
    batch, _ = data()
    output = answer(SMALL, batch, batch.times[:, :QUERIES])
    for row, length in enumerate(LENGTHS):
        size = min(length, QUERIES)
        np.testing.assert_array_equal(
            output.latent[row, :size], output.anchor_latent[0, row, :size]
        )


def test_answers_are_continuous_at_anchors():  # P9
    batch, _ = data()
    inner = batch.times[:, 1:2]
    output = answer(SMALL, batch, inner + np.array([[-2, -1, -1e-12, 0, 1, 2]]) * 1e-6)
    mean = np.asarray(output.mean)
    assert np.abs(np.diff(mean, axis=1)).max() < 1e-4 < np.abs(mean[0] - mean[1]).max()


def test_order_and_repeats_of_queries_do_not_matter():  # P9; diffrax#382, #425
    batch, query = data()
    output = answer(SMALL, batch, query)
    order = np.array([3, 3, 0, 5, 1, 0])
    again = np.asarray(answer(SMALL, batch, query[:, order]).mean)
    np.testing.assert_array_equal(again, np.asarray(output.mean)[:, order])
    descending = np.sort(query, axis=1)[:, ::-1]
    ascending = answer(SMALL, batch, descending[:, ::-1]).mean[:, ::-1]
    np.testing.assert_array_equal(answer(SMALL, batch, descending).mean, ascending)


@pytest.mark.parametrize("content", [0.0, 1e30, NAN])
def test_content_of_padding_does_not_matter(content):  # P9; torchcde#20, dynamax#343
    batch, query = data()
    padding = np.arange(TIMES)[None] >= LENGTHS[:, None]
    times, values = np.array(batch.times), np.array(batch.values)
    times[padding], values[padding] = content, content
    other = dataclasses.replace(batch, times=times, values=values)
    expected = answer(SMALL, batch, query).mean
    np.testing.assert_array_equal(answer(SMALL, other, query).mean, expected)


def gradients(batch, query):
    batch = (
        dataclasses.replace(batch, mask=~np.isnan(batch.values)) if batch.mask is None else batch
    )
    batch, query = as_arrays(batch), jnp.asarray(query, jnp.float32)

    def loss(params, values):
        given = dataclasses.replace(batch, values=values, lengths=batch.lengths)
        output = LatentMoS(SMALL).apply(variables_of(SMALL) | {"params": params}, given, query)
        return jnp.mean(jnp.square(output.mean))

    value_and_grad = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)), **COMPILER)
    return value_and_grad(variables_of(SMALL)["params"], batch.values)


def test_gradients_are_finite_with_nan_in_padding_and_in_gaps():
    batch, query = data()
    padding = np.arange(TIMES)[None] >= LENGTHS[:, None]
    times, values = np.array(batch.times), np.array(batch.values)
    times[padding], values[padding] = NAN, NAN
    values[0, 2:5] = NAN
    values[:, :, 1] = NAN
    query[0, 0] = times[0, 0]
    found = gradients(dataclasses.replace(batch, times=times, values=values), query)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found))


def test_splitting_a_batch_and_vmap_do_not_matter():  # P9
    # Rows have grids of their own: diffrax#500, torchdiffeq#122, torchsde#129.
    batch, query = data()
    expected = answer(SMALL, batch, query).mean
    model, variables = LatentMoS(SMALL), variables_of(SMALL)
    batch = as_arrays(dataclasses.replace(batch, times=batch.times - batch.times[:, :1]))
    query = jnp.asarray(query - data()[0].times[:, :1], jnp.float32)

    def one(batch, query):
        single = jax.tree.map(lambda leaf: leaf[None], batch)
        return model.apply(variables, single, query[None]).mean[0]

    np.testing.assert_allclose(jax.jit(jax.vmap(one))(batch, query), expected, atol=1e-6)


def test_rows_do_not_see_each_other():  # deeptime#23
    batch, query = data()
    expected = answer(SMALL, batch, query).mean
    other = answer(SMALL, with_values(batch, (1, slice(None)), 50.0), query).mean
    np.testing.assert_array_equal(other[0], expected[0])
    np.testing.assert_array_equal(other[2], expected[2])
    assert np.abs(other[1] - expected[1]).max() > 0.1


@pytest.mark.parametrize("origin", [1e3, 1.7e9])
def test_a_shift_of_all_times_changes_nothing(origin):  # P10; diffrax#663, torchdiffeq#91
    batch, query = data()
    times = np.round(batch.times * 1024) / 1024  # sums with the origin are then exact
    query = np.round(query * 1024) / 1024
    expected = answer(SMALL, dataclasses.replace(batch, times=times), query).mean
    shifted = answer(SMALL, dataclasses.replace(batch, times=times + origin), query + origin).mean
    np.testing.assert_allclose(shifted, expected, atol=1e-5)


def test_a_change_of_the_time_unit_changes_nothing():  # P10; latent_ode#12
    batch, query = data()
    expected = answer(SMALL, batch, query).mean
    variables = variables_of(SMALL)
    scales = variables["scales"]["scales"]
    scales = scales._replace(time_unit=scales.time_unit * 6000)
    scaled = dataclasses.replace(batch, times=batch.times * 6000)
    actual = answer(SMALL, scaled, query * 6000, variables | {"scales": {"scales": scales}})
    np.testing.assert_allclose(actual.mean, expected, atol=1e-5)


def test_scales_are_those_of_the_data():
    times = np.array([[0.0, 2.0, 2.0, 6.0], [10.0, 13.0, NAN, NAN]])
    values = np.array([[[1.0, 4.0]] * 4, [[3.0, 4.0]] * 4])
    scales = scales_of(
        IrregularBatch(times=times - times[:, :1], values=values, lengths=np.array([4, 2]))
    )
    # Positive gaps 2, 4, 3; channel 0 holds 1, 1, 1, 1, 3, 3; channel 1 is constant.
    assert float(scales.time_unit) == 30.0
    assert float(scales.window) == pytest.approx(6.0 / 30.0)
    np.testing.assert_allclose(scales.mean, [10 / 6, 4.0], rtol=1e-6)
    np.testing.assert_allclose(scales.std, [np.std([1, 1, 1, 1, 3, 3]), 1.0], rtol=1e-6)


@pytest.mark.parametrize("factor", [1e-30, 1e-12, 1e18, 1e30])
def test_a_change_of_the_values_unit_changes_only_the_unit(factor):
    batch, query = data()
    scales = scales_of(dataclasses.replace(batch, values=batch.values * factor))
    expected = scales_of(batch)
    np.testing.assert_allclose(scales.std / factor, expected.std, rtol=1e-5)
    np.testing.assert_allclose(scales.mean / factor, expected.mean, rtol=1e-4)


def test_a_single_time_has_scales():
    batch = IrregularBatch(times=np.zeros((2, 1)), values=np.ones((2, 1, 1)))
    assert [float(x) for x in scales_of(batch)[2:]] == [1.0, 1.0]


@pytest.mark.parametrize("field", ["times", "values"])
def test_what_float32_cannot_hold_is_refused_by_row(field):
    batch, query = data()
    array = np.array(getattr(batch, field))
    array[1, 3:] = 1e40
    with pytest.raises(ValueError, match=f"{field}: row 1 has an entry beyond 3.4e.38; change"):
        ready(dataclasses.replace(batch, **{field: array}), query)


def test_what_float32_takes_for_zero_is_refused():
    batch, query = data()
    with pytest.raises(ValueError, match="times: all entries are below 1.18e-32; change the unit"):
        ready(dataclasses.replace(batch, times=batch.times * 1e-40), query)


def test_one_observation_is_moved_both_ways():  # diffrax#488
    batch, query = data()
    output = answer(SMALL, dataclasses.replace(batch, lengths=np.array([1, 1, 1])), query)
    assert np.isfinite(output.mean).all() and output.valid.all()
    at_anchor = answer(
        SMALL, dataclasses.replace(batch, lengths=np.array([1, 1, 1])), batch.times[:, :6]
    )
    np.testing.assert_array_equal(at_anchor.latent[:, 0], at_anchor.anchor_latent[0, :, 0])


def test_repeated_times_are_legal():  # torchode#21
    batch, query = data()
    times = np.array(batch.times)
    times[0, 3] = times[0, 2]
    query[0, 0] = times[0, 2]
    output = answer(SMALL, dataclasses.replace(batch, times=times), query)
    assert np.isfinite(output.mean).all()
    np.testing.assert_array_equal(output.latent[0, 0], output.anchor_latent[0, 0, 3])


def test_silent_rows_in_front_and_behind_change_nothing():  # torchcde#17, NeuralCDE#11
    batch, query = data()
    batch = dataclasses.replace(batch, lengths=None)
    silent = with_values(batch, (slice(None), [0, 7]), NAN)
    middle = IrregularBatch(times=batch.times[:, 1:7], values=batch.values[:, 1:7])
    # The origin of time is the first row's in one and the second's in the other.
    np.testing.assert_allclose(
        answer(SMALL, silent, query).mean, answer(SMALL, middle, query).mean, atol=2e-5
    )


def test_channels_may_be_seen_at_different_times():  # latent_ode#5, ode-lstms#5
    batch, query = data()
    values = np.array(batch.values)
    values[:, ::2, 0], values[:, 1::2, 1] = NAN, NAN
    output = answer(SMALL, dataclasses.replace(batch, values=values), query)
    assert np.isfinite(output.mean).all() and output.valid.all()
    changed = answer(
        SMALL, with_values(dataclasses.replace(batch, values=values), (0, 1, 0), 9.0), query
    )
    assert np.abs(changed.mean[0] - output.mean[0]).max() > 1e-3


def test_a_mask_hides_values_whatever_they_are():
    batch, query = data()
    mask = np.ones(batch.values.shape, bool)
    mask[0, 3, 1] = False
    hidden = answer(SMALL, with_values(batch, (0, 3, 1), 1e6).replace(mask=mask), query)
    expected = answer(SMALL, with_values(batch, (0, 3, 1), NAN), query)
    np.testing.assert_array_equal(hidden.mean, expected.mean)


def test_a_channel_that_is_never_seen_is_answered_all_the_same():  # PyDMD#481, #570
    batch, query = data()
    output = answer(SMALL, with_values(batch, (slice(None), slice(None), 1), NAN), query)
    assert np.isfinite(output.mean).all()


def test_far_queries_are_finite_and_flagged():
    batch, query = data()
    batch = dataclasses.replace(batch, inputs=np.zeros((ROWS, TIMES, 1)))
    query[:, 0], query[:, 1], query[:, 2] = 109.0, 111.0, -1e30
    output = answer(FAR, dataclasses.replace(batch, lengths=LENGTHS * 0 + TIMES), query)
    first, last = batch.times[:, 0], batch.times[:, -1]
    assert np.isfinite(output.mean).all()
    np.testing.assert_array_equal(output.valid[:, 0], 109.0 - last <= 100.0)
    np.testing.assert_array_equal(output.valid[:, 1], 111.0 - last <= 100.0)
    assert not output.valid[:, 2].any() and (first < 10).all()


def test_bad_queries_and_decreasing_times_are_refused():
    batch, query = data()
    query[1, 2] = NAN
    with pytest.raises(ValueError, match="query: row 1 has a time that is NaN"):
        answer(SMALL, batch, query)
    with pytest.raises(ValueError, match="times decrease; sort the rows"):
        answer(SMALL, dataclasses.replace(batch, times=batch.times[:, ::-1].copy()), data()[1])
    with pytest.raises(ValueError, match=r"query \(2, 6\) must be \[3, queries\]"):
        answer(SMALL, batch, data()[1][:2])
    with pytest.raises(ValueError, match="obs_dim=2"):
        answer(SMALL, dataclasses.replace(batch, values=batch.values[..., :1]), data()[1])
    with pytest.raises(ValueError, match="for input_dim=0"):
        answer(SMALL, dataclasses.replace(batch, inputs=np.ones((3, 8, 1))), data()[1])


def test_integer_times_and_values_are_accepted():
    times = np.array([[0, 1, 2, 3, 5, 8, 13, 21]] * 3)
    batch = IrregularBatch(times=times, values=np.ones((3, 8, 2), int), lengths=LENGTHS)
    query = np.arange(18).reshape(3, 6)
    expected = answer(
        SMALL, dataclasses.replace(batch, times=times * 1.0, values=np.ones((3, 8, 2))), query
    )
    np.testing.assert_array_equal(answer(SMALL, batch, query).mean, expected.mean)


def test_one_shape_is_compiled_once():
    model, variables = LatentMoS(SMALL), variables_of(SMALL)
    first = predict(model, variables, *data())
    size = apply_model._cache_size()
    for seed in (1, 2):
        predict(model, variables, *data(seed))
    np.testing.assert_allclose(first.mean, answer(SMALL, *data()).mean, atol=1e-5)
    assert apply_model._cache_size() == size


def test_float32_and_float64_agree():  # LieGroupHamDL#1
    batch, query = data()
    single = answer(SMALL, batch, query)
    with jax.enable_x64(True):
        variables = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), variables_of(SMALL))
        double = answer(SMALL, batch, query, variables)
        assert double.mean.dtype == jnp.float64
    np.testing.assert_allclose(single.mean, double.mean, atol=2e-5)


@pytest.mark.parametrize("encoder", CAUSAL)
def test_a_causal_model_sees_no_later_observation(encoder):
    batch, query = data()
    batch = dataclasses.replace(batch, lengths=None)
    config, cut = CAUSAL[encoder], batch.times[:, 4:5]
    query = batch.times[:, :1] + (cut - batch.times[:, :1]) * np.linspace(0, 0.999, QUERIES)
    expected = answer(config, batch, query).mean
    changed = answer(config, with_values(batch, (slice(None), slice(4, None)), 9.0), query).mean
    np.testing.assert_allclose(changed, expected, atol=1e-6)
    early = answer(config, with_values(batch, (slice(None), 0), 9.0), query).mean
    assert np.abs(early - expected).max() > 1e-3


def test_neighbours_of_queries():
    # Anchors at 0, 2 and 6; the observation at 4 is silent; 9 is padding.
    times = jnp.array([[0.0, 2.0, 4.0, 6.0, jnp.inf]])
    is_anchor = jnp.array([[True, True, False, True, False]])
    query = jnp.array([[-1.0, 0.0, 3.0, 5.0, 6.0, 7.0]])
    local = find_neighbours(times, is_anchor, query)
    np.testing.assert_array_equal(local.place[0, 1:4], [[0, 1], [1, 3], [1, 3]])
    np.testing.assert_allclose(
        local.weight[0], [[0, 1], [1, 0], [0.75, 0.25], [0.25, 0.75], [1, 0], [1, 0]]
    )
    np.testing.assert_array_equal(local.span[0, 3], [3.0, -1.0])
    assert float(local.span[0, 0, 1]) == -1.0
    np.testing.assert_array_equal(local.outside[0], [1, 0, 0, 0, 0, 1])
    last = find_neighbours(times, is_anchor, query, anchors="last")
    np.testing.assert_array_equal(last.weight[0], [[0, 1]] + [[1, 0]] * 5)
    first = find_neighbours(times, is_anchor, query, anchors="initial")
    np.testing.assert_array_equal(first.span[0, :, 0], query[0])
    nothing = find_neighbours(times, jnp.zeros((1, 5), bool), query)
    assert np.isfinite(nothing.span).all() and (np.asarray(nothing.weight) == 0).all()


def test_coarse_anchors_are_counted_from_the_last_observation():
    is_anchor = jnp.array([[True, True, False, True, True, True, False]])
    coarse = find_coarse(is_anchor, 2)
    np.testing.assert_array_equal(coarse[0], [True, False, False, True, False, True, False])
    causal = find_coarse(is_anchor, 2, causal=True)
    np.testing.assert_array_equal(causal[0], [True, False, False, True, False, True, False])
    h = jnp.array([1.0, 2.0, 100.0, 4.0, 8.0, 16.0, 100.0])[None, :, None]
    means = find_means(h, is_anchor, coarse)[0, :, 0]
    # Segments {1}, {2, 4}, {8, 16}.
    np.testing.assert_allclose(means[np.array([0, 3, 5])], [1.0, 3.0, 12.0])
    four = find_coarse(is_anchor, 4)
    np.testing.assert_array_equal(np.flatnonzero(four[0]), [0, 5])
    assert np.flatnonzero(find_coarse(is_anchor, 4, causal=True)[0]).tolist() == [0, 5]


def test_every_level_answers_and_the_last_observation_is_on_all():
    config = dataclasses.replace(SMALL, levels=2, stride=2, planes=1)
    output = answer(config, *data())
    assert output.latent.shape == (ROWS, QUERIES, 4) and np.isfinite(output.mean).all()
    last = np.arange(ROWS), LENGTHS - 1
    assert output.is_anchor[:, *last].all()
    assert output.is_anchor[1].sum() == 4 + 3 + 2


@pytest.mark.parametrize("decoder", ["linear", "mlp"])
def test_interval_means_are_means_of_the_instants(decoder):
    """Behind the last observation, where the flow alone decides, so that a mean is an integral."""
    length = 1.5
    point = dataclasses.replace(SMALL, decoder=decoder)
    mean = dataclasses.replace(point, observation="mean", interval=(length,))
    batch, _ = data()
    start = batch.times[:, -1:] + np.linspace(0.0, 1.0, QUERIES)[None]
    variables = variables_of(point)
    actual = answer(mean, batch, start, variables).mean
    nodes, weights = np.polynomial.legendre.leggauss(8)
    points = [
        answer(point, batch, start + length * (node + 1) / 2, variables).mean for node in nodes
    ]
    expected = np.einsum("prqc,p->rqc", np.stack(points), weights / 2)
    # Three Gauss points integrate the decoded curve only nearly.
    tolerance = 1e-5 if decoder == "linear" else 2e-3
    np.testing.assert_allclose(actual, expected, atol=tolerance)


def test_channels_may_have_intervals_of_their_own():
    both = dataclasses.replace(SMALL, observation="mean", interval=(0.5, 1.5))
    batch, query = data()
    variables = variables_of(SMALL)
    actual = answer(both, batch, query, variables).mean
    nodes, weights = np.polynomial.legendre.leggauss(3)  # of the library's quadrature
    for channel, length in enumerate((0.5, 1.5)):
        points = [
            answer(SMALL, batch, query + length * (node + 1) / 2, variables).mean[..., channel]
            for node in nodes
        ]
        expected = np.einsum("prq,p->rq", np.stack(points), weights / 2)
        np.testing.assert_allclose(actual[..., channel], expected, atol=1e-5)


def test_noise_levels_divergence_and_hiding():
    config = dataclasses.replace(SMALL, likelihood="gaussian", variational=True)
    model, variables = LatentMoS(config), variables_of(config)
    batch, query = data()
    # The first log noise is -1, and the channels' own scale comes on top.
    std = variables["scales"]["scales"].std
    apply = jax.jit(model.apply, static_argnames="drop", **COMPILER)
    plain = apply(variables, batch, query)
    expected = np.broadcast_to(2 * (np.log(std) - 1), plain.mean.shape)
    np.testing.assert_allclose(plain.logvar, expected, rtol=1e-5)
    assert plain.kl.shape == (ROWS,) and (plain.kl > 0).all()
    keys = [jax.random.key(1), jax.random.key(1), jax.random.key(2)]
    drawn = [apply(variables, batch, query, key=key, drop=(0.4, 0.6)) for key in keys]
    np.testing.assert_array_equal(drawn[0].mean, drawn[1].mean)
    assert np.abs(drawn[0].mean - drawn[2].mean).max() > 1e-3
    count = np.stack([each.is_anchor[0].sum(-1) for each in drawn])
    assert (count >= 1).all() and count.sum() < 3 * LENGTHS.sum()


def test_exogenous_inputs_reach_the_answer():  # pysindy#426, #605
    batch, query = data()
    inputs = np.zeros((ROWS, TIMES, 1))
    plain = answer(FAR, dataclasses.replace(batch, inputs=inputs), query).mean
    inputs[0, 2] = 3.0
    driven = answer(FAR, dataclasses.replace(batch, inputs=inputs), query).mean
    assert np.abs(driven[0] - plain[0]).max() > 1e-4
    np.testing.assert_array_equal(driven[1:], plain[1:])


@pytest.mark.parametrize(
    "options",
    [
        {"mixing": "output", "gate": "hidden", "encoder": "odernn"},
        {"mixing": "product", "planes": 1},
        {"generator": "gl", "gate": "state", "anchors": "last"},
        {"generator": "stable", "gate": "fixed", "mixing": "output"},
        {"translations": 1, "drift": True, "num_selected": 2, "anchors": "initial"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_every_form_answers_in_full(options):
    output = answer(dataclasses.replace(SMALL, **options), *data())
    assert output.mean.shape == (ROWS, QUERIES, 2) and np.isfinite(output.mean).all()
    np.testing.assert_allclose(output.gates.sum(-1), 1.0, atol=1e-5)
