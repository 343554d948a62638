"""Simulators keep what their equations conserve; samplers keep what they promise."""

import hashlib

import numpy as np
import pytest
import scipy.integrate

from moe_jax.symmetries import simulate
from moe_jax.symmetries.data import validate
from moe_jax.symmetries.sample import irregular, low_resolution, meter

SYSTEMS = {
    "oscillators": simulate.oscillators,
    "pendulum": simulate.pendulum,
    "damped_pendulum": simulate.damped_pendulum,
    "double_pendulum": simulate.double_pendulum,
    "two_body": simulate.two_body,
    "lotka_volterra": simulate.lotka_volterra,
    "lorenz": simulate.lorenz,
    "kuramoto": simulate.kuramoto,
    "reaction_diffusion": simulate.reaction_diffusion,
}


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_seed_gives_the_same_finite_trajectories(name):
    times = np.linspace(0.0, 1.0, 5)
    first = SYSTEMS[name](3, 2, times=times)
    assert first.values.shape[:2] == (2, 5) and np.isfinite(first.values).all()
    np.testing.assert_array_equal(first.values, SYSTEMS[name](3, 2, times=times).values)
    assert np.abs(first.values - SYSTEMS[name](4, 2, times=times).values).max() > 1e-3


@pytest.mark.parametrize(
    ("name", "energy"),
    [
        ("pendulum", simulate.pendulum_energy),
        ("double_pendulum", simulate.double_pendulum_energy),
        ("two_body", simulate.two_body_energy),
        ("two_body", simulate.two_body_angular_momentum),
        ("lotka_volterra", simulate.lotka_volterra_energy),
    ],
)
def test_conserved_quantities_are_conserved(name, energy):
    states = SYSTEMS[name](0, 4).states
    along = energy(states)
    np.testing.assert_allclose(along, np.broadcast_to(along[:, :1], along.shape), rtol=2e-6)


def test_two_body_orbits_close_after_kepler_s_period():
    # T^2 = 4 pi^2 a^3 / (G (m1 + m2)), and v^2 = mu (2 / r - 1 / a) at the first position.
    start = simulate.two_body(0, 3, times=np.zeros(1)).states[:, 0]
    distance = np.linalg.norm(start[:, 0:2] - start[:, 2:4], axis=1)
    speed = np.linalg.norm(start[:, 4:6] - start[:, 6:8], axis=1)
    axis = 1.0 / (2.0 / distance - speed**2 / 2.0)
    period = np.sqrt(4 * np.pi**2 * axis**3 / 2.0)
    for row in range(3):
        path = simulate.two_body(0, 3, times=np.array([0.0, period[row]])).states
        np.testing.assert_allclose(path[row, 1], start[row], atol=1e-6)


def test_kuramoto_keeps_its_mean_drift_and_its_phase_symmetry():
    run = simulate.kuramoto(0, 2, coupling=3.0, times=np.linspace(0, 2, 5))
    # Pulls cancel in the sum, so that the mean phase moves at the mean natural frequency.
    natural = np.random.default_rng(17).normal(size=10)
    drift = run.states.mean(-1) - run.states[:, :1].mean(-1)
    np.testing.assert_allclose(drift, np.outer(np.ones(2), run.times) * natural.mean(), atol=1e-9)


def test_reaction_diffusion_is_equivariant_under_a_phase():
    # Its fields depend on |u + i v| only: from another spiral phase it is the turned solution.
    run = simulate.reaction_diffusion(0, 2, times=np.linspace(0, 0.5, 3))
    fields = run.values.reshape(2, 3, 2, 32, 32)
    z = fields[:, :, 0] + 1j * fields[:, :, 1]
    phase = z[1, 0, 3, 5] / z[0, 0, 3, 5]
    np.testing.assert_allclose(z[1], phase * z[0], atol=1e-10)


@pytest.mark.parametrize("name", ["lorenz", "damped_pendulum"])
def test_integration_agrees_with_scipy(name):
    times = np.linspace(0.0, 1.0, 5)
    run = SYSTEMS[name](0, 1, times=times)

    def field(_, state):
        if name == "lorenz":
            x, y, z = state
            return [10 * (y - x), x * (28 - z) - y, x * y - 8 / 3 * z]
        return [state[1], -np.sin(state[0]) - 0.1 * state[1]]

    start = run.states[0, 0]
    solved = scipy.integrate.solve_ivp(field, (0, 1), start, t_eval=times, rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(run.states[0], solved.y.T, atol=2e-5)


def test_simulated_sets_do_not_change():  # dysts#34
    run = simulate.pendulum(0, 4)
    rounded = np.round(run.values, 6) + 0.0
    assert hashlib.sha256(rounded.tobytes()).hexdigest()[:16] == PENDULUM_DIGEST


def test_few_points_are_kept_with_noise_of_the_stated_size():
    run = simulate.pendulum(0, 200)
    batch = irregular(run, seed=1, fraction=0.25, noise=0.02)
    assert batch.times.shape == (200, 40) and validate(batch).n_unsorted == 0
    index = np.rint(batch.times / run.times[1]).astype(int)
    noise = batch.values - np.take_along_axis(run.values, index[..., None], 1)
    # 8000 draws a channel: the standard deviation is known within 0.8% at one sigma; 5 sigma.
    np.testing.assert_allclose(noise.std((0, 1)) / run.values.std((0, 1)), 0.02, rtol=0.04)
    with pytest.raises(ValueError, match=r"fraction=0.0 must be in \(0, 1\]"):
        irregular(run, seed=1, fraction=0.0)


def test_low_resolution_splits_the_window():
    split = low_resolution(simulate.pendulum(0, 3), seed=0)
    parts = split.is_given.astype(int) + split.is_interpolation + split.is_extrapolation
    np.testing.assert_array_equal(parts, 1)
    assert split.is_given.sum(1).tolist() == [20] * 3
    assert split.examples.context.lengths.tolist() == [20] * 3
    assert split.examples.targets.lengths.tolist() == [40] * 3
    limit = split.times[80]
    assert split.examples.context.times.max() <= limit < split.examples.targets.times.max()


def test_meters_report_means_over_their_own_intervals():
    times = np.linspace(0.0, 10.0, 1001)
    values = np.stack([times**2, 3 * times], -1)[None]
    run = simulate.Trajectories(times, values, values)
    batch = meter(run, seed=0, periods=(0.5, 2.0), jitter=0.1, missing=0.2)
    for channel, period in enumerate((0.5, 2.0)):
        seen = batch.mask[0, :, channel]
        begin, means = batch.times[0, seen], batch.values[0, seen, channel]
        end = begin + period
        integral = (end**3 - begin**3) / 3 if channel == 0 else 1.5 * (end**2 - begin**2)
        # Interpolating the integral is exact to h^2 / 8 times its second derivative, 20 at most.
        np.testing.assert_allclose(means, integral / period, atol=1e-3)
        late = np.mod(begin, period) / period
        assert (late <= 0.1 + 1e-9).all() and late.max() > 0.01
    assert batch.mask[0, :, 0].sum() < 19 and batch.mask[0, :, 0].sum() > 8
    rough = meter(run, seed=0, periods=(0.5, 2.0), quantum=0.25)
    np.testing.assert_allclose(np.mod(rough.values[rough.mask], 0.25), 0.0, atol=1e-12)


@pytest.mark.parametrize("periods", [(1.0,), (1.0, 0.001), (1.0, 99.0)])
def test_periods_that_do_not_fit_are_refused(periods):
    with pytest.raises(ValueError, match="periods="):
        meter(simulate.pendulum(0, 1), seed=0, periods=periods)


PENDULUM_DIGEST = "0835b6e7d15427c4"
