"""Curved interfaces: the quadratic gate is exact; two layers and polygons have their rates."""

import jax
import numpy as np
import pytest

from moe_jax.training.rates import fit_rate
from theory.network import apply_network
from theory.product_grid import product_grid
from theory.rings import affine_gate, quadratic_gate, two_layer_gate, with_square
from theory.targets import circle_directions, kinks, random_directions, ring_index, waves

RADII = (0.35, 0.65, 0.95)


def square(num):
    side = np.linspace(-1.0, 1.0, num) * (1 - 1e-9)
    return np.stack(np.meshgrid(side, side), axis=-1).reshape(-1, 2)


def misrouted(network, x, inputs=None):
    answer = apply_network(network, x if inputs is None else inputs, implementation="dense")
    return np.mean(np.abs(answer.y[:, 0] - ring_index(x, RADII)) > 1e-9)


def test_a_gate_linear_in_the_square_of_the_radius_is_exact():
    x = square(101)
    assert misrouted(quadratic_gate(RADII), x, with_square(x)) == 0


def test_a_two_layer_gate_misroutes_a_share_of_order_one_over_its_width_squared():
    """The spec's prototype measured a slope of -1.99; a fine grid resolves shares of 1e-4."""
    x, widths = square(300), np.array([4.0, 6.0, 8.0, 12.0, 16.0])
    shares = np.array([misrouted(two_layer_gate(RADII, int(h)), x) for h in widths])
    assert abs(fit_rate(widths, shares).slope + 2) < 0.2


def test_polygons_misroute_a_share_of_order_one_over_their_sides_squared():
    x, sides = square(300), np.array([4.0, 6.0, 8.0, 12.0, 16.0])
    networks = [affine_gate(RADII, int(n)) for n in sides]
    assert [net.layers[0].num_experts for net in networks] == [1 + 3 * int(n) for n in sides]
    shares = np.array([misrouted(net, x) for net in networks])
    assert abs(fit_rate(sides, shares).slope + 2) < 0.2


def test_targets_have_the_values_they_are_defined_by():
    x = np.array([[0.5, 0.0], [0.0, -1.0]])
    np.testing.assert_allclose(waves()(x), [[np.sin(2.5) + 1.0], [np.cos(-3.0)]], atol=1e-15)
    # |0.5 - 0.3|^(1/2) and |0 - 0.3|^(1/2).
    np.testing.assert_allclose(kinks(np.array([[1.0], [0.0]]), 0.5)(x)[:, 0], np.sqrt([0.2, 0.3]))
    assert ring_index(x, RADII).tolist() == [1.0, 3.0]
    np.testing.assert_allclose(np.linalg.norm(circle_directions(5), axis=0), 1.0)
    np.testing.assert_allclose(
        np.linalg.norm(random_directions(jax.random.key(0), 3, 5), axis=0), 1.0
    )


@pytest.mark.parametrize("min_jump", [0.5, 2.0])
def test_a_product_grid_jumps_by_its_least_jump_at_every_face(min_jump):
    target = product_grid(jax.random.key(0), 3, 2, min_jump=min_jump)
    for axis in range(2):
        for face in (1.0, 2.0):
            x = np.full((2, 2), 0.5)
            x[:, axis] = face, face + 1e-9
            gap = np.abs(np.diff(target(x), axis=0))[0, axis]
            assert gap >= min_jump - 1e-6
            assert gap == pytest.approx(target.jumps[axis, int(face) - 1], abs=1e-6)
