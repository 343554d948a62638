"""E^L pieces by L layers, exactly (A7, A10), and the floor of one layer (A8)."""

import jax
import numpy as np
import pytest

from theory.network import apply_network
from theory.paths import path_stats
from theory.product_grid import (
    cube_points,
    least_experts,
    one_layer_floor,
    one_layer_gate,
    product_grid,
    product_grid_moe,
)
from theory.regions import linear_regions_on_segment

KEY = jax.random.key(0)


@pytest.mark.parametrize(("num_cells", "num_layers"), [(3, 2), (3, 6), (4, 5), (8, 4), (16, 3)])
def test_a7_a10_every_piece_is_met_by_its_own_path_and_exact(num_cells, num_layers):
    target = product_grid(KEY, num_cells, num_layers)
    assert target.jumps.min() >= 1
    network = product_grid_moe(target)
    assert sum(layer.num_experts for layer in network.layers) == num_cells * num_layers
    x = cube_points(jax.random.key(1), num_cells, num_layers, per_cube=2)
    result = apply_network(network, x, implementation="dense")
    assert np.abs(result.y - target(x)).max() < 1e-12
    assert np.array_equal(result.selection, target.cells(x))
    stats = path_stats(result.selection, num_cells)
    assert stats.num_paths == num_cells**num_layers and stats.coverage == 1
    np.testing.assert_allclose(stats.layer_perplexity, num_cells)
    np.testing.assert_allclose(stats.joint_perplexity, num_cells**num_layers)
    assert stats.total_correlation < 1e-9 and stats.unseen_mass == 0


def test_a10_the_layers_agree_whatever_multiplies_the_groups():
    target = product_grid(KEY, 3, 2)
    x = cube_points(jax.random.key(1), 3, 2, per_cube=50)
    answers = [
        apply_network(product_grid_moe(target), x, implementation=name).y
        for name in (None, "dense", "ragged_dot")
    ]
    assert all(np.abs(each - target(x)).max() < 1e-12 for each in answers)


def random_gate(rng, num_layers, num_experts):
    kernel = rng.normal(size=(num_layers + 1, num_experts))
    kernel[0] *= 3.0
    return kernel


def slab_gate(num_cells, num_layers, axis):
    index = np.arange(1, num_cells + 1)
    kernel = np.zeros((num_layers + 1, num_cells))
    kernel[0], kernel[1 + axis] = -index * (index - 1) / 2, index
    return kernel


@pytest.mark.parametrize(("num_cells", "num_layers"), [(3, 2), (2, 4)])
def test_a8_one_layer_cannot_go_below_half_the_jump(num_cells, num_layers):
    """Random gates, slabs along each axis, and the exact gate less one expert."""
    target = product_grid(KEY, num_cells, num_layers)
    pieces = num_cells**num_layers
    x = cube_points(jax.random.key(2), num_cells, num_layers, per_cube=20)
    rng = np.random.default_rng(0)
    exact = one_layer_gate(num_cells, num_layers)
    gates = [random_gate(rng, num_layers, n) for n in range(1, pieces) for _ in range(40)]
    gates += [slab_gate(num_cells, num_layers, axis) for axis in range(num_layers)]
    gates += [np.delete(exact, i, axis=1) for i in range(pieces)]
    least = target.jumps.min() / 2
    assert all(one_layer_floor(gate, target, x) >= least for gate in gates)
    assert one_layer_floor(exact, target, x) == 0


def test_a8_top_k_gates_obey_the_bound_on_selected_sets():
    """5 experts, top 2: C(5, 2) = 10 >= 9 sets would do; 4 experts give 6 and cannot."""
    assert least_experts(3, 2) == 9 and least_experts(3, 2, 2) == 5
    target = product_grid(KEY, 3, 2)
    x = cube_points(jax.random.key(2), 3, 2, per_cube=50)
    rng = np.random.default_rng(1)
    floors = [
        one_layer_floor(random_gate(rng, 2, 4), target, x, num_selected=2) for _ in range(200)
    ]
    assert min(floors) >= target.jumps.min() / 2


def test_a_line_along_an_axis_crosses_the_gate_at_every_face_and_nowhere_else():
    target = product_grid(KEY, 3, 2, num_segments=4)
    network = product_grid_moe(target)
    along = linear_regions_on_segment(network, np.array([0.01, 0.3]), np.array([2.99, 0.3]))
    np.testing.assert_allclose(0.01 + 2.98 * along.gate_jumps, [1.0, 2.0])
    np.testing.assert_allclose(
        0.01 + 2.98 * along.kinks, [i + j / 4 for i in range(3) for j in range(1, 4)]
    )
    assert along.num_pieces == 12


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 2), "num_cells=0 must be at least 1"),
        ((3, 0), "num_layers=0 must be at least 1"),
        ((2, 63), "not below 2\\^63"),
        ((8, 21), "not below 2\\^63"),
    ],
)
def test_impossible_grids_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        product_grid(KEY, *arguments)


def test_disagreeing_shapes_are_refused():
    target = product_grid(KEY, 3, 2)
    with pytest.raises(ValueError, match="disagrees with num_layers=2"):
        target(np.zeros((4, 3)))
    with pytest.raises(ValueError, match="disagrees with num_layers=2"):
        one_layer_floor(np.zeros((4, 5)), target, np.zeros((1, 2)))
    with pytest.raises(ValueError, match="num_selected=6 is not in"):
        one_layer_floor(np.zeros((3, 5)), target, np.zeros((1, 2)), num_selected=6)
    with pytest.raises(ValueError, match="does not fit input_dim=2"):
        apply_network(product_grid_moe(target), np.zeros((4, 3)))


def test_least_experts_of_many_pieces_are_found_at_once_and_no_selection_is_refused():
    # C(N, 2) >= 2^40 from N (N - 1) >= 2^41 on.
    num = least_experts(2, 40, 2)
    assert num * (num - 1) >= 2**41 > (num - 1) * (num - 2)
    assert least_experts(2, 40) == 2**40
    with pytest.raises(ValueError, match="num_selected=0 must be at least 1"):
        least_experts(2, 3, 0)
