"""The grids against what is printed about them, and the swing equations' symmetries."""

import numpy as np
import pytest

from moe_jax.symmetries.grids import NE39, WSCC9
from moe_jax.symmetries.swing import electrical_power, modes, reduce_to_machines, swing


def test_nine_bus_reduction_is_the_textbook_s():  # Anderson and Fouad, example 2.6
    machines = reduce_to_machines(WSCC9)
    printed = np.array(
        [
            [0.845 - 2.988j, 0.287 + 1.513j, 0.210 + 1.226j],
            [0.287 + 1.513j, 0.420 - 2.724j, 0.213 + 1.088j],
            [0.210 + 1.226j, 0.213 + 1.088j, 0.277 - 2.368j],
        ]
    )
    np.testing.assert_allclose(machines.admittance, printed, atol=6e-4)
    np.testing.assert_allclose(machines.emf, [1.0566, 1.0502, 1.0170], atol=6e-5)
    np.testing.assert_allclose(np.degrees(machines.angle), [2.272, 19.732, 13.166], atol=6e-4)
    np.testing.assert_allclose(machines.power, [0.7164, 1.63, 0.85], atol=6e-5)
    np.testing.assert_allclose(modes(machines), [1.383, 2.126], atol=6e-4)


def test_thirty_nine_bus_reduction_has_the_known_operating_point_and_modes():
    machines = reduce_to_machines(NE39)
    emf = [1.100, 1.237, 1.151, 1.080, 1.397, 1.191, 1.139, 1.070, 1.136, 1.036]
    angle = [-3.5, 22.9, 17.6, 14.6, 26.7, 16.9, 17.6, 14.7, 27.8, -11.3]
    hertz = [0.617, 0.946, 1.019, 1.135, 1.261, 1.286, 1.474, 1.534, 1.546]
    assert machines.buses.tolist() == list(range(30, 40))
    np.testing.assert_allclose(machines.emf, emf, atol=6e-4)
    np.testing.assert_allclose(np.degrees(machines.angle), angle, atol=0.06)
    np.testing.assert_allclose(modes(machines), hertz, atol=6e-4)


@pytest.mark.parametrize("grid", [WSCC9, NE39], ids=["wscc9", "ne39"])
def test_operating_point_is_an_equilibrium_and_angles_count_by_difference(grid):
    machines = reduce_to_machines(grid)
    power = electrical_power(machines, machines.angle)
    np.testing.assert_allclose(power, machines.power, atol=1e-12)
    np.testing.assert_allclose(
        electrical_power(machines, machines.angle + 0.7), machines.power, atol=1e-12
    )


def test_power_is_the_double_sum_over_machines():
    machines = reduce_to_machines(WSCC9)
    delta = np.array([0.1, -0.4, 0.9])
    g, b = machines.admittance.real, machines.admittance.imag
    expected = [
        sum(
            machines.emf[i]
            * machines.emf[j]
            * (g[i, j] * np.cos(delta[i] - delta[j]) + b[i, j] * np.sin(delta[i] - delta[j]))
            for j in range(3)
        )
        for i in range(3)
    ]
    np.testing.assert_allclose(electrical_power(machines, delta), expected, atol=1e-12)


@pytest.mark.parametrize("case", ["wscc9", "ne39"])
def test_swings_stay_relative_to_the_centre_of_inertia(case):
    run = swing(0, 3, case=case, times=np.linspace(0, 1, 21))
    size = run.states.shape[-1] // 2
    mass = reduce_to_machines({"wscc9": WSCC9, "ne39": NE39}[case]).mass
    for part in (run.states[..., :size], run.states[..., size:]):
        np.testing.assert_allclose(part @ mass / mass.sum(), 0.0, atol=1e-9)
    assert np.isfinite(run.values).all() and np.abs(run.values).max() < 30


def test_small_swings_have_the_modes_frequencies():
    run = swing(0, 1, disturbance=1e-4, times=np.linspace(0, 40, 4001))
    spectrum = np.abs(np.fft.rfft(run.values[0, :, 0] * np.hanning(4001)))
    peak = np.fft.rfftfreq(4001, 0.01)[spectrum.argmax()]
    assert np.abs(modes(reduce_to_machines(WSCC9)) - peak).min() < 0.03


def test_an_unknown_case_is_refused():
    with pytest.raises(ValueError, match="case='ieee14' is not one of"):
        swing(0, 1, case="ieee14")
