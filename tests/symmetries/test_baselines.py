import numpy as np
import pytest

from moe_jax.symmetries.baselines import interpolate, linear_latent, single_expert, training_mean
from moe_jax.symmetries.config import LatentMoSConfig
from moe_jax.symmetries.data import IrregularBatch

TIMES = np.array([[0.0, 1.0, 2.5, 4.0, 9.9]])
BATCH = IrregularBatch(
    times=TIMES,
    values=np.stack([2 * TIMES - 1, np.full_like(TIMES, np.nan)], -1),
    lengths=np.array([4]),
)


@pytest.mark.parametrize("kind", ["cubic", "linear"])
def test_lines_are_interpolated_exactly_and_ends_persist(kind):
    answer = interpolate(BATCH, np.array([[0.3, 3.9, 7.0, -5.0]]), kind=kind)
    np.testing.assert_allclose(answer[0, :, 0], [-0.4, 6.8, 7.0, -1.0], atol=1e-12)


def test_persistence_holds_the_last_value_before():
    answer = interpolate(BATCH, np.array([[-5.0, 0.0, 0.9, 2.5, 3.9, 7.0]]), kind="persistence")
    np.testing.assert_array_equal(answer[0, :, 0], [-1, -1, -1, 4, 4, 7])


def test_a_cubic_spline_bends_where_lines_do_not():
    values = np.sin(TIMES)[..., None]
    batch = IrregularBatch(times=TIMES, values=values, lengths=np.array([4]))
    query = np.array([[0.5, 1.7]])
    errors = [
        np.abs(interpolate(batch, query, kind=kind)[0, :, 0] - np.sin(query[0])).max()
        for kind in ("cubic", "linear")
    ]
    assert errors[0] < errors[1]


def test_a_channel_that_is_never_seen_is_its_mean_and_repeats_are_averaged():
    assert (interpolate(BATCH, np.zeros((1, 2)))[0, :, 1] == 0.0).all()
    batch = IrregularBatch(times=np.array([[1.0, 1.0, 2.0]]), values=np.array([[[1], [3], [5.0]]]))
    assert interpolate(batch, np.array([[1.0]])).item() == 2.0
    assert training_mean(batch).item() == 3.0


def test_unknown_kinds_are_refused():
    with pytest.raises(ValueError, match="kind='quadratic' is not one of"):
        interpolate(BATCH, np.zeros((1, 1)), kind="quadratic")


@pytest.mark.parametrize("query", [np.zeros((2, 1)), np.zeros(3), np.full((1, 1), np.nan)])
def test_queries_of_other_rows_or_without_a_time_are_refused(query):
    with pytest.raises(ValueError, match=r"must be finite \[1, queries\]"):
        interpolate(BATCH, query)


def test_special_cases_of_the_model():
    config = LatentMoSConfig(obs_dim=2, num_selected=2)
    assert single_expert(config).experts == 1
    linear = linear_latent(config, dim=7)
    assert (linear.generator, linear.anchors, linear.slice_dim) == ("gl", "initial", 7)
