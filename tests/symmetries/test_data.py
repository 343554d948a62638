"""The data contract: what is accepted, what is changed with a note, what is refused by row."""

import numpy as np
import pytest

from moe_jax.symmetries.data import IrregularBatch, fill, from_ragged, take_rows, validate
from moe_jax.symmetries.examples import ExampleBatches, forecast, reconstruct

NAN = np.nan


def batch_of(times, values, **rest):
    return IrregularBatch(times=np.array(times), values=np.array(values, float)[..., None], **rest)


def test_report_counts_what_is_odd():
    batch = IrregularBatch(
        times=np.array([[0.0, 1.0, 1.0, 4.0], [5.0, 3.0, NAN, NAN]]),
        values=np.array([[[1, 7, NAN]] * 4, [[2, 7, NAN], [NAN] * 3, [9, 9, 9], [9, 9, 9]]], float),
        lengths=np.array([4, 2]),
    )
    report = validate(batch)
    # Row 0: channel 2 four times; row 1: channel 2 once, and its second time is silent.
    assert report.n_nan == 4 + 1 + 3
    assert (report.n_duplicates, report.n_unsorted, report.n_silent) == (1, 1, 1)
    assert (report.min_gap, report.median_gap, report.max_gap) == (1.0, 2.0, 3.0)
    assert report.span == 4.0
    assert (report.constant_channels, report.missing_channels) == ((1,), (2,))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"times": [[0.0, NAN], [0.0, 1.0]]}, "times: row 0 has a time that is not finite"),
        ({"values": [[1.0, 2.0], [1.0, np.inf]]}, "values: row 1 has an infinite value"),
        ({"values": [[1.0, 2.0], [NAN, NAN]]}, "mask: row 1 has nothing observed"),
        ({"lengths": np.array([2, 0])}, "mask: row 1 has nothing observed"),
        ({"lengths": np.array([2, 3])}, r"lengths=\[2, 3\] must lie in \[0, 2\]"),
        ({"lengths": np.array([2.0, 2.0])}, "lengths float64.* must be integers"),
        ({"mask": np.ones((2, 2), bool)}, "must be bool"),
        ({"times": np.zeros((2, 2), "M8[s]")}, r"times are datetime64\[s\]; give numbers"),
        ({"times": [0.0, 1.0]}, r"times \(2,\) and values"),
        ({"inputs": np.ones((2, 3, 1))}, r"inputs \(2, 3, 1\) must be"),
        ({"inputs": np.zeros((2, 2, 1), complex)}, "inputs are complex128, not real numbers"),
        ({"times": [[0.0, 1.0], [0.0]]}, "times must be one array; .* padded by from_ragged"),
        ({"inputs": np.full((2, 2, 1), NAN)}, "inputs: row 0 has an input that is not finite"),
    ],
)
def test_unusable_batches_are_refused_by_row(change, message, unchecked):
    times, values = [[0.0, 1.0], [0.0, 1.0]], np.array([[1.0, 2.0], [3.0, 4.0]])[..., None]
    change = {k: np.array(v)[..., None] if k == "values" else v for k, v in change.items()}
    with pytest.raises(ValueError, match=message):
        validate(IrregularBatch(**({"times": times, "values": values} | change)))


def test_padding_may_hold_anything():
    batch = batch_of([[0.0, 1.0, NAN]], [[1.0, 2.0, np.inf]], lengths=np.array([2]))
    assert validate(batch).n_nan == 0
    filled = fill(batch)
    np.testing.assert_array_equal(filled.times, [[0.0, 1.0, 1.0]])
    np.testing.assert_array_equal(filled.values[0, :, 0], [1.0, 2.0, 0.0])


def test_ragged_rows_are_sorted_with_a_note_or_refused():
    times, values = [[2, 0, 1], [5]], [[[20.0], [0.0], [10.0]], [[50.0]]]
    batch, notes = from_ragged(times, values)
    np.testing.assert_array_equal(batch.times[0, :3], [0, 1, 2])
    np.testing.assert_array_equal(batch.values[0, :3, 0], [0, 10, 20])
    assert batch.lengths.tolist() == [3, 1] and notes == ("sorted 1 rows",)
    with pytest.raises(ValueError, match="times of row 0 decrease, and sort=False"):
        from_ragged(times, values, sort=False)


@pytest.mark.parametrize(("duplicates", "expected"), [("mean", [2.0, 7.0]), ("last", [3.0, 7.0])])
def test_repeated_times_are_merged_channel_by_channel(duplicates, expected):
    values = [[[1.0, 7.0], [3.0, NAN], [5.0, 5.0]]]
    inputs = [[[1.0], [2.0], [3.0]]]
    batch, notes = from_ragged([[0.0, 0.0, 1.0]], values, inputs=inputs, duplicates=duplicates)
    np.testing.assert_array_equal(batch.values[0, :2], [expected, [5.0, 5.0]])
    np.testing.assert_array_equal(batch.inputs[0, :2, 0], [2.0, 3.0])
    assert notes == ("merged repeated times in 1 rows",)
    with pytest.raises(ValueError, match="times of row 0 repeat"):
        from_ragged([[0.0, 0.0, 1.0]], values, duplicates="error")


def test_lengths_are_padded_to_powers_of_two():
    rows = [np.arange(n) for n in (3, 5)]
    batch, notes = from_ragged(rows, [row[:, None] * 1.0 for row in rows])
    assert batch.times.shape == (2, 8) and notes == ()
    with pytest.raises(ValueError, match="pad_to=4 is shorter than a row of 5 times"):
        from_ragged(rows, [row[:, None] * 1.0 for row in rows], pad_to=4)


@pytest.mark.parametrize(
    ("times", "values", "message"),
    [
        ([[0.0, NAN]], [[[1.0], [2.0]]], "row 0 has a time that is not finite"),
        ([[]], [np.zeros((0, 1))], "times of row 0"),
        ([[0.0]], [[1.0]], "values of row 0"),
        ([[0.0], [0.0]], [[[1.0]], [[1.0, 2.0]]], r"rows have \[1, 2\] channels"),
        ([[0.0]], [], "1 times, 0 values"),
        ([np.array(["2020-01-01"], "M8[D]")], [[[1.0]]], r"times of row 0 are datetime64\[D\]"),
        ([["now"]], [[[1.0]]], "times of row 0 are <U3, not real numbers"),
        ([[0.0]], [[[1j]]], "values of row 0 are complex128, not real numbers"),
        ([], [], "0 times, 0 values"),
    ],
)
def test_unusable_ragged_rows_are_refused(times, values, message):
    with pytest.raises(ValueError, match=message):
        from_ragged(times, values)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        # Either would be silent: the inputs of row 1 dropped, one channel of row 1 used for two.
        ({"inputs": [None, [[1.0]]]}, r"rows have \[0, 1\] input channels"),
        ({"inputs": [[[1.0, 2.0]], [[1.0]]]}, r"rows have \[1, 2\] input channels"),
        ({"inputs": [[["on"]], [["off"]]]}, "inputs of row 0 are <U2, not real numbers"),
        ({"pad_to": 2.5}, "pad_to=2.5 must be an integer"),
        ({"duplicates": "first"}, "duplicates='first' is not one of"),
    ],
)
def test_unusable_options_of_ragged_rows_are_refused(options, message, unchecked):
    with pytest.raises(ValueError, match=message):
        from_ragged([[0.0], [0.0]], [[[1.0]], [[1.0]]], **options)


def test_forecast_gives_the_past_and_asks_for_everything():
    batch = batch_of([[0.0, 1.0, 2.0, 3.0], [0.0, 5.0, 6.0, 7.0]], np.arange(8.0).reshape(2, 4))
    examples = forecast(batch, 2.0)
    assert examples.context.lengths.tolist() == [3, 1]
    np.testing.assert_array_equal(examples.context.mask[1, :, 0], [True, False, False])
    assert examples.targets.mask.all()
    with pytest.raises(ValueError, match="row 1 has nothing observed by its time -1"):
        forecast(batch, np.array([1.0, -1.0]))
    for times in (NAN, np.ones(3)):
        with pytest.raises(ValueError, match="must be one finite number, or one a row"):
            forecast(batch, times)
    with pytest.raises(ValueError, match="times of the batch decrease"):
        forecast(batch_of([[2.0, 1.0]], [[1.0, 2.0]]), 1.5)


def test_batches_hold_every_row_once_an_epoch_and_resume():
    batch = batch_of(np.zeros((5, 1)), np.arange(5.0)[:, None])
    batches = ExampleBatches(reconstruct(batch), 2, seed=0)
    seen = [next(batches).context.values[:, 0, 0].astype(int).tolist() for _ in range(5)]
    first, second = sum(seen, [])[:5], sum(seen, [])[5:]
    assert sorted(first) == sorted(second) == [0, 1, 2, 3, 4]
    again = ExampleBatches(reconstruct(batch), 2, seed=0)
    again.set_state({"drawn": 3})
    assert next(again).context.values[:, 0, 0].astype(int).tolist() == seen[3]
    assert again.get_state() == {"drawn": 4}


def test_rows_are_taken_with_all_their_fields():
    batch = fill(batch_of(np.zeros((3, 1)), np.arange(3.0)[:, None], inputs=np.ones((3, 1, 2))))
    taken = take_rows(batch, np.array([2, 0]))
    np.testing.assert_array_equal(taken.values[:, 0, 0], [2.0, 0.0])
    assert taken.inputs.shape == (2, 1, 2)
