"""Training on small sets: it learns, repeats, resumes, keeps the best, and survives bad rates."""

import dataclasses
import functools
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.symmetries.config import LatentMoSConfig
from moe_jax.symmetries.data import IrregularBatch, from_ragged
from moe_jax.symmetries.diagnostics import (
    casimir_drift,
    composition_defect,
    energy_drift,
    equivariance_defect,
    gate_usage,
    group_defect,
)
from moe_jax.symmetries.examples import Examples, reconstruct
from moe_jax.symmetries.extrapolate import extrapolate
from moe_jax.symmetries.fit import (
    OPTIMIZER,
    _warn_of_offsets,
    fit,
    make_loss_function,
    make_optimizer,
    prepare,
)
from moe_jax.symmetries.losses import LossConfig, overlap
from moe_jax.symmetries.model import predict
from moe_jax.symmetries.sample import low_resolution
from moe_jax.symmetries.simulate import oscillators, pendulum_energy
from moe_jax.symmetries.spectrum import (
    anchor_spectrum,
    canonical_angle,
    generator_matrices,
    match_spectrum,
    spectrum,
)
from moe_jax.training import Interrupts

COMPILER = {"compiler_options": {"xla_backend_optimization_level": 0}}
CONFIG = LatentMoSConfig(obs_dim=3, hidden=8, decoder_hidden=8, experts=2)
STEPS = 60
TIMES = np.linspace(0.0, 12.0, 41)


@functools.cache
def split(seed=0, rows=16):
    truth = oscillators(seed, rows, channels=3, nonlinear=False, times=TIMES)
    return low_resolution(truth, seed=seed, fraction=0.4)


def fitted(**options):
    arguments = {
        "steps": STEPS,
        "batch_size": 8,
        "loss": LossConfig(consistency=0.1, overlap=0.01, balance=0.01),
    }
    optimizer = dataclasses.replace(OPTIMIZER, learning_rate=2e-2)
    return fit(
        options.pop("config", CONFIG),
        options.pop("train", split().examples),
        split(1).examples,
        **(arguments | {"optimizer": optimizer} | options),
    )


@pytest.fixture(scope="module")
def result():
    return fitted()


def assert_same(first, second):
    for one, other in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(one, other)


def test_training_learns_and_repeats_with_its_seed(result):
    # Predicting the mean of the channels has ratio 1.
    assert result.error_over_mean < 0.7 and result.finished
    again = fitted()
    assert_same(result.variables, again.variables)
    assert again.validation_error == result.validation_error


def test_an_interrupted_run_resumes_to_the_same_end(result, tmp_path):
    interrupts = Interrupts()

    class StopsLate(Interrupts):
        """Asks to stop at its third look after the second checkpoint's steps."""

        looks = 0

        @property
        def requested(self):
            self.looks += 1
            return signal.SIGTERM if self.looks > 16 else None

        @requested.setter
        def requested(self, value):
            pass

    stopped = fitted(workdir=tmp_path, interrupts=StopsLate())
    assert not stopped.finished
    steps = {int(path.name) for path in (tmp_path / "start_0/checkpoints").iterdir()}
    assert steps and max(steps) < STEPS
    resumed = fitted(workdir=tmp_path, interrupts=interrupts)
    assert resumed.finished
    assert_same(resumed.variables, result.variables)
    assert (tmp_path / "start_0/metrics.jsonl").exists()


def test_steps_with_a_wild_rate_leave_finite_parameters():  # torchdiffeq#27, #58, #244
    optimizer = dataclasses.replace(OPTIMIZER, learning_rate=30.0)
    found = fitted(optimizer=optimizer, steps=20)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found.variables))
    query = np.broadcast_to(TIMES, (16, 41))
    answer = predict(found.model, found.variables, split().examples.context, query)
    assert np.isfinite(answer.mean).all()


def test_few_short_rows_with_gaps_train_and_the_best_start_is_kept():  # pysindy#200, #187
    # Gaps are irregular: DataDrivenDiffEq.jl#15.
    rng = np.random.default_rng(0)
    times = [np.sort(rng.uniform(0, 6, n)) for n in (5, 7, 8, 6, 5, 6, 8, 7)]
    values = [np.stack([np.cos(t), np.sin(t), 0 * t + 4.0], -1) for t in times]
    for each in values:
        # The first observation stays whole, so that no row is empty.
        each[1:][rng.random(each[1:].shape) < 0.5] = np.nan
    # Padded to the shapes of `split`, so that its program is used again.
    sizes = (part.times.shape[1] for part in (split().examples.context, split().examples.targets))
    given, asked = (from_ragged(times, values, pad_to=size)[0] for size in sizes)
    found = fitted(train=Examples(context=given, targets=asked), multistart=2)
    assert np.isfinite(found.validation_error)
    assert found.start_errors[0] != found.start_errors[1]
    assert found.validation_error == min(found.start_errors)
    constant = float(found.variables["scales"]["scales"].std[2])
    assert constant == 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drop": (0.5, 0.2)}, r"drop=\(0.5, 0.2\) must be two increasing numbers within \[0, 1\)"),
        ({"drop": (0.0, 1.0)}, "drop="),
        ({"drop": 0.3}, "drop=0.3 must be two increasing numbers"),
        ({"seed": -1}, r"seed=-1 must be an integer in \[0, 2\^31\)"),
        ({"seed": 1.5}, "seed=1.5 must be an integer"),
        ({"multistart": 0}, r"multistart=0 must be an integer in \[1, 2\^31\)"),
        ({"multistart": None}, "multistart=None must be an integer"),
        ({"steps": 0}, "num_steps=0 must be"),
        ({"batch_size": 0}, "batch_size=0 must be an integer"),
        ({"batch_size": 2.5}, "batch_size=2.5 must be an integer"),
        ({"config": {"obs_dim": 3}}, "config must be a LatentMoSConfig, not dict"),
        ({"train": (None, ())}, "train_examples must be .*, not tuple; from_ragged returns a"),
        ({"workdir": __file__}, "is a file, not a directory"),
        ({"workdir": "/proc/runs"}, "workdir=/proc/runs"),
    ],
)
def test_options_out_of_range_are_refused(options, message, unchecked):
    with pytest.raises(ValueError, match=message):
        fitted(**options)


def test_rates_move_per_gap_and_kernels_per_step():
    """A unit of time is ten gaps; Adam's first step is the learning rate, whatever the gradient."""
    params = {
        "level_0": {"generators": {"omega": np.float32([5.0])}},
        "encoder": {"kernel": np.float32([0.5])},
    }
    optimizer = dataclasses.replace(OPTIMIZER, learning_rate=1e-2, weight_decay=0.0)
    transformation = make_optimizer(optimizer, 10)
    gradient = jax.tree.map(lambda leaf: np.full_like(leaf, 0.1), params)
    with jax.numpy_dtype_promotion("standard"):
        step, _ = transformation.update(gradient, transformation.init(params), params)
    assert float(step["encoder"]["kernel"][0]) == pytest.approx(-1e-2, rel=1e-4)
    assert float(step["level_0"]["generators"]["omega"][0]) == pytest.approx(-1e-1, rel=1e-4)


def test_examples_of_different_numbers_of_rows_are_refused():
    few = IrregularBatch(times=np.zeros((2, 1)), values=np.ones((2, 1, 3)))
    many = IrregularBatch(times=np.zeros((3, 1)), values=np.ones((3, 1, 3)))
    with pytest.raises(ValueError, match="context has 2 rows, targets 3"):
        prepare(dataclasses.replace(reconstruct(few), targets=many))


@pytest.mark.parametrize("part", ["train", "val"])
def test_examples_of_other_channels_are_refused(part):
    other = IrregularBatch(times=np.zeros((2, 1)), values=np.ones((2, 1, 2)))
    examples = {"train": split().examples, "val": split(1).examples} | {part: other}
    with pytest.raises(ValueError, match=f"{part}_examples: context has 2 channels, but"):
        fit(CONFIG, examples["train"], examples["val"], steps=1)
    driven = dataclasses.replace(CONFIG, input_dim=1)
    with pytest.raises(ValueError, match="context has 0 input channels, but config.input_dim=1"):
        fit(driven, split().examples, split(1).examples, steps=1)


def test_an_offset_that_hides_the_variation_is_named(caplog):
    values = split().examples.context.values + np.array([0.0, 1e8, 0.0])
    _warn_of_offsets(IrregularBatch(times=np.zeros(values.shape[:2]), values=values))
    assert [record.getMessage()[:18] for record in caplog.records] == ["channel 1 varies b"]


def test_a_likelihood_and_a_divergence_change_the_loss(result):
    config = dataclasses.replace(CONFIG, likelihood="gaussian")
    examples = prepare(split().examples)
    params = result.variables["params"] | {"log_noise": np.full(3, -0.5, np.float32)}
    state = {"scales": result.variables["scales"], "progress": {"step": np.int32(0)}}
    nothing = LossConfig(consistency=0.0, growth=0.0)
    loss_function = jax.jit(make_loss_function(config, nothing, (0.0, 0.0)), **COMPILER)
    key = jax.random.key(0)
    loss, (metrics, _) = loss_function(params, state, examples, np.float32(1.0), key)
    # Of standardised channels: error exp(1) / 2 - 0.5 + log(2 pi) / 2.
    expected = float(metrics["error"]) * np.e / 2 - 0.5 + np.log(2 * np.pi) / 2
    assert float(loss) == pytest.approx(expected, rel=1e-4)


def test_overlap_of_generators_counts_cosines():
    rotation = np.array([[0.0, -1.0], [1.0, 0.0]])
    scale = np.eye(2)
    matrices = np.stack([rotation, -2 * rotation, scale])[None]
    # |cos| is 1 for the first pair, 0 for the other two.
    assert float(overlap(jnp.asarray(matrices, jnp.float32))) == pytest.approx(1.0, abs=1e-6)


def test_extrapolation_stays_finite_over_ten_windows(result):  # PyDMD#176; diffrax#207
    batch = split().examples.context
    horizon = np.linspace(1.0, 120.0, 5)
    frozen = extrapolate(result.model, result.variables, batch, horizon)
    assert frozen.shape == (16, 5, 3) and np.isfinite(frozen).all()
    bound = 8 * np.abs(batch.values).max()
    assert np.abs(frozen).max() < bound


def test_regating_agrees_with_the_frozen_gate_where_nothing_grows(result):  # P4
    params = dict(result.variables["params"])
    level = params["level_0"]
    generators = level["generators"] | {"sigma": 0 * level["generators"]["sigma"]}
    params["level_0"] = level | {"generators": generators}
    variables = result.variables | {"params": params}
    horizon, batch = np.array([0.5, 1.5, 4.0]), split().examples.context
    frozen = extrapolate(result.model, variables, batch, horizon)
    regated = extrapolate(result.model, variables, batch, horizon, mode="regate", substeps=3)
    np.testing.assert_allclose(regated, frozen, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "open"}, "mode='open' is not one of"),
        ({"horizon": [2.0, 1.0]}, "must be positive increasing"),
        ({"horizon": [0.0]}, "must be positive increasing"),
        ({"horizon": ["soon"]}, "horizon are <U4, not real numbers"),
        ({"horizon": np.array([1], "m8[s]")}, r"horizon are timedelta64\[s\]; give numbers"),
        ({"substeps": 0}, r"substeps=0 must be an integer in \[1, 2\^31\)"),
        ({"substeps": 1.5}, "substeps=1.5 must be an integer"),
        ({"lengths": np.full(16, 99)}, r"lengths=.* must lie in \[0, "),
        ({"times": np.zeros(3)}, r"times \(3,\) and values"),
    ],
)
def test_bad_horizons_and_batches_are_refused(options, message, result, unchecked):
    fields = {name: options[name] for name in ("lengths", "times") if name in options}
    batch = dataclasses.replace(split().examples.context, **fields)
    rest = {name: value for name, value in options.items() if name not in fields}
    with pytest.raises(ValueError, match=message):
        extrapolate(
            result.model, result.variables, batch, **({"horizon": [1.0], "mode": "regate"} | rest)
        )


def test_spectrum_is_in_original_time_units(result):  # PyDMD#571
    values = np.asarray(spectrum(result.model, result.variables))
    assert values.shape == (1, 2, 1)
    scales = result.variables["scales"]["scales"]
    omega = result.variables["params"]["level_0"]["generators"]["omega"]
    np.testing.assert_allclose(values[0].imag, omega / scales.time_unit, rtol=1e-6)
    matrices = generator_matrices(result.model, result.variables)
    eigenvalues = np.linalg.eigvals(np.asarray(matrices, np.float64))
    assert match_spectrum(eigenvalues[0, 0, :1], values[0, 0]).frequency_error < 1e-5
    output = predict(result.model, result.variables, split().examples.context, np.zeros((16, 1)))
    acting = anchor_spectrum(result.model, result.variables, output)
    low, high = np.sort(values[0, :, 0].imag)
    assert (acting.imag > low - 1e-5).all() and (acting.imag < high + 1e-5).all()


def test_diagnostics_of_a_flow(result):
    z = jnp.asarray(np.random.default_rng(0).normal(size=(5, 2)), jnp.float32)
    arguments = result.model, result.variables, z
    assert group_defect(*arguments, 0.5, 1.0) < 1e-5
    sigma = np.asarray(spectrum(result.model, result.variables)).real
    drift = casimir_drift(*arguments, 1.0)
    # Growth exp(2 sigma t) of a squared radius, at most that of the fastest expert.
    assert 0 < drift <= np.max(np.abs(np.expm1(2 * sigma))) + 1e-5
    assert composition_defect(*arguments, 0.5, 1.0) < 0.5
    usage = gate_usage(
        result.model,
        predict(result.model, result.variables, split().examples.context, np.zeros((16, 1))),
    )
    assert float(usage.load.sum()) == pytest.approx(1.0, abs=1e-5)


def test_energy_drift_and_equivariance_of_known_maps():
    still = np.array([[1.0, 0.0], [0.5, 0.2]])
    path = np.repeat(still[:, None], 3, axis=1)
    path[1, 2, 1] = 0.4
    drift = energy_drift(pendulum_energy, path, still)
    # H = v^2 / 2 - cos: a change of (0.16 - 0.04) / 2 over |0.02 - cos 0.5|.
    np.testing.assert_allclose(drift, [0.0, 0.06 / (np.cos(0.5) - 0.02)], atol=1e-12)
    points = np.array([[1.0, 2.0], [3.0, -1.0]])
    swap = lambda x: x[:, ::-1]  # noqa: E731
    assert equivariance_defect(lambda x: 2 * x, swap, points) == 0.0
    assert equivariance_defect(lambda x: x * [1.0, 2.0], swap, points) > 0.1


def test_canonical_angle_ignores_coordinates_and_trace():
    rng = np.random.default_rng(0)
    basis = rng.normal(size=(2, 2))
    generator = np.array([[-0.1, -1.3], [1.3, -0.1]])
    matrix = basis @ generator @ np.linalg.inv(basis)
    assert canonical_angle(matrix) < 1e-4
    assert canonical_angle(np.diag([1.0, -2.0])) == 90.0
    with pytest.raises(ValueError, match="must be 2 x 2 and finite"):
        canonical_angle(np.eye(3))
    with pytest.raises(ValueError, match=r"matrix \[\[nan, .* must be 2 x 2 and finite"):
        canonical_angle(np.full((2, 2), np.nan))


def test_eigenvalues_are_matched_up_to_order_and_sign():
    match = match_spectrum([0.1 - 2.02j, -0.05 + 1.0j, 5j], [1.0j, 2.0j])
    np.testing.assert_allclose(match.learned, [-0.05 + 1.0j, 0.1 + 2.02j])
    assert match.frequency_error == pytest.approx(0.01)
    assert match.growth_error == pytest.approx(0.1)
    with pytest.raises(ValueError, match="2 true eigenvalues for 1 learned"):
        match_spectrum([1j], [1j, 2j])
    for learned, true in (([np.nan], [1j]), ([1j], [0j])):
        with pytest.raises(ValueError, match="must be finite with positive frequencies"):
            match_spectrum(learned, true)
