"""Each diagnostic on hand-made cases whose answer is known, and what each refuses."""

import jax
import numpy as np
import pytest

from theory.capacity import (
    degrees_of_freedom,
    empirical_capacity,
    pseudo_dimension_sketch,
    rademacher_value,
)
from theory.cells import adjusted_rand, forced_answers, purity, specialisation, tie_mass
from theory.network import Network, apply_network, moe_layer
from theory.partition import misassigned
from theory.paths import encode_paths, path_stats
from theory.rank import effective_rank, local_dimension
from theory.regions import (
    grid_patterns,
    linear_regions_on_segment,
    region_bound,
    selected_set_bound,
)

KEY = jax.random.key(0)


def spline_network(knots, slopes):
    """One expert, y = sum_k a_k relu(x - t_k), on tokens (1, x)."""
    up = np.zeros((1, 2, len(knots)))
    up[0, 0], up[0, 1] = -np.asarray(knots), 1.0
    down = np.zeros((1, len(knots), 2))
    down[0, :, 1] = slopes
    layer, params = moe_layer(np.zeros((2, 1)), up, down)
    return Network((layer,), (params,), 1, 1)


def step_network(levels):
    """Two experts of constants, the first for x < 0."""
    up = np.zeros((2, 2, 1))
    up[:, 0, 0] = 1.0
    down = np.zeros((2, 1, 2))
    down[:, 0, 1] = levels
    layer, params = moe_layer(np.array([[0.0, 0.0], [-1.0, 1.0]]), up, down)
    return Network((layer,), (params,), 1, 1)


def test_paths_are_numbers_in_base_e():
    # 1 2 0 in base 3: 9 + 6 + 0.
    assert encode_paths(np.array([[1, 2, 0], [0, 0, 2]]), 3).tolist() == [15, 2]
    # 2^62 paths still have a number each.
    assert encode_paths(np.ones((1, 62), int), 2).tolist() == [2**62 - 1]


def test_path_statistics_of_six_points():
    """Paths 00 three times, 01 twice, 11 once, of 4 paths in 6 points."""
    stats = path_stats(np.array([[0, 0]] * 3 + [[0, 1]] * 2 + [[1, 1]]), 2)
    assert stats.num_paths == 3 and stats.coverage == 3 / 4
    # Layer 1 chooses 0 five times of six, layer 2 three times of six.
    first = -(5 / 6 * np.log(5 / 6) + 1 / 6 * np.log(1 / 6))
    joint = -(1 / 2 * np.log(1 / 2) + 1 / 3 * np.log(1 / 3) + 1 / 6 * np.log(1 / 6))
    np.testing.assert_allclose(stats.layer_perplexity, [np.exp(first), 2.0])
    assert stats.joint_perplexity == pytest.approx(np.exp(joint))
    assert stats.total_correlation == pytest.approx(first + np.log(2) - joint)
    # One path seen once, one seen twice: f1 / n = 1/6; 3 + 1 * 0 / (2 * 2) = 3.
    assert stats.unseen_mass == 1 / 6 and stats.chao1 == 3
    # Three singletons and no doubleton: 3 + 3 * 2 / 2 = 6.
    assert path_stats(np.array([[0, 0], [0, 1], [1, 1]]), 2).chao1 == 6


def test_layers_that_copy_each_other_share_all_their_entropy():
    same = np.repeat(np.arange(4)[:, None], 2, axis=1)
    assert path_stats(same, 4).total_correlation == pytest.approx(np.log(4))


def test_unseen_mass_is_what_good_and_turing_say_it_is():
    """300 samples of 50 points on 64 equal paths: the mean is within 4 standard errors of it."""
    rng = np.random.default_rng(0)
    gaps = []
    for _ in range(300):
        paths = rng.integers(0, 8, size=(50, 2))
        unseen = 1 - len(np.unique(encode_paths(paths, 8))) / 64
        gaps.append(path_stats(paths, 8).unseen_mass - unseen)
    # Good-Turing estimates the mass unseen by 49 of the 50 points: (63/64)^49 (1/64) more.
    bias = (63 / 64) ** 49 / 64
    assert abs(np.mean(gaps) - bias) < 4 * np.std(gaps) / np.sqrt(300)


@pytest.mark.parametrize(
    ("selection", "num_experts", "message"),
    [
        (np.zeros((2, 63), int), 2, "num_experts=2 to the power layers=63 is not below 2\\^63"),
        (np.full((2, 2), 3), 3, "selection holds 3 to 3; expected \\[0, 3\\)"),
        (np.full((2, 2), -1), 3, "selection holds -1 to -1"),
        (np.zeros((2, 0), int), 3, "layers=0 must be at least 1"),
        (np.zeros((0, 2), int), 3, "holds no point"),
    ],
)
def test_impossible_paths_are_refused(selection, num_experts, message):
    with pytest.raises(ValueError, match=message):
        path_stats(selection, num_experts)


def test_an_expert_of_m_slopes_has_m_pieces_and_its_knots_are_found():
    network = spline_network([0.0, 0.25, 0.5, 0.75], [1.0, -2.0, 3.0, 0.0])
    found = linear_regions_on_segment(network, np.array([-1.0]), np.array([1.0]))
    # The neuron at 0.75 has weight 0: no change of slope there.
    np.testing.assert_allclose(-1 + 2 * found.kinks, [0.0, 0.25, 0.5])
    assert found.num_pieces == 4 and len(found.gate_jumps) == 0


def test_gate_jumps_are_told_from_kinks_and_equal_experts_make_one_piece():
    ends = np.array([-1.0]), np.array([1.0])
    jump = linear_regions_on_segment(step_network([0.0, 1.0]), *ends)
    np.testing.assert_allclose(jump.gate_jumps, [0.5])
    assert jump.num_pieces == 2 and len(jump.kinks) == 0
    same = linear_regions_on_segment(step_network([1.0, 1.0]), *ends)
    np.testing.assert_allclose(same.gate_jumps, [0.5])
    assert same.num_pieces == 1


def test_the_walk_agrees_with_a_fine_grid_on_random_layers():
    """Between the places found the answer is affine: second differences are 0 but around them."""
    rng = np.random.default_rng(0)
    layers = [
        moe_layer(
            rng.normal(size=(3, 3)), rng.normal(size=(3, 3, 4)), rng.normal(size=(3, 4, 3)) / 2
        )
        for _ in range(2)
    ]
    modules, params = zip(*layers, strict=True)
    network = Network(modules, params, 2, 2)
    start, end = np.array([-2.0, -1.0]), np.array([2.0, 1.5])
    found = linear_regions_on_segment(network, start, end)
    t = np.linspace(0, 1, 4001)
    answer = apply_network(network, start + t[:, None] * (end - start), implementation="dense")
    bends = np.abs(np.diff(answer.y, 2, axis=0)).max(axis=1) > 1e-9
    places = np.sort(np.concatenate([found.kinks, found.gate_jumps]))
    distance = np.abs(t[1:-1, None] - places[None, :]).min(axis=1)
    assert len(places) > 3
    assert np.all(distance[bends] <= 1 / 4000 + 1e-9)
    changes = np.any(np.diff(answer.selection, axis=0), axis=1).sum()
    assert changes == len(found.gate_jumps)


def test_patterns_on_a_grid_count_the_pieces():
    network = spline_network([0.0, 0.5], [1.0, 1.0])
    x = np.linspace(-1, 1, 41)[:, None]
    # Left of 0, between and right: three patterns, numbered as they appear.
    assert grid_patterns(network, x)[[0, 25, 40]].tolist() == [0, 1, 2]
    assert region_bound(3, 2) == 1 + 3 + 3 and region_bound(2, 5) == 4
    assert selected_set_bound(5, 2) == 10


def test_segments_that_do_not_fit_are_refused():
    network = spline_network([0.0], [1.0])
    with pytest.raises(ValueError, match=r"start \(2,\) disagrees with input_dim=1"):
        linear_regions_on_segment(network, np.zeros(2), np.ones(1))
    with pytest.raises(ValueError, match="same point"):
        linear_regions_on_segment(network, np.ones(1), np.ones(1))
    with pytest.raises(ValueError, match="more than max_events=1"):
        linear_regions_on_segment(
            spline_network([0.0, 0.5], [1.0, 1.0]), -np.ones(1), np.ones(1), max_events=1
        )


def test_k_equal_singular_values_have_rank_k():
    rng = np.random.default_rng(0)
    left, _ = np.linalg.qr(rng.normal(size=(20, 3)))
    right, _ = np.linalg.qr(rng.normal(size=(8, 3)))
    rank = effective_rank(1e-90 * left @ right.T)
    assert rank.entropy == pytest.approx(3) and rank.participation == pytest.approx(3)
    # s = (2, 1): entropy of (2/3, 1/3), and 25 / 17.
    rank = effective_rank(np.diag([2.0, 1.0]))
    assert rank.entropy == pytest.approx(np.exp(np.log(3) - 2 / 3 * np.log(2)))
    assert rank.participation == pytest.approx(25 / 17)


def test_centring_removes_the_mean_and_nothing_else():
    rows = np.array([[1.0, 5.0], [-1.0, 5.0]])
    assert effective_rank(rows, center=True).entropy == pytest.approx(1)
    assert effective_rank(rows).entropy > 1.4


@pytest.mark.parametrize(
    ("matrix", "message"),
    [(np.zeros((2, 2)), "must not be 0"), (np.full((2, 2), np.nan), "4 entries are not")],
)
def test_matrices_without_rank_are_refused(matrix, message):
    with pytest.raises(ValueError, match=message):
        effective_rank(matrix)


def test_local_dimension_of_a_line_a_plane_and_a_point():
    rng = np.random.default_rng(0)
    frame, _ = np.linalg.qr(rng.normal(size=(6, 2)))
    x = np.concatenate(
        [
            rng.normal(size=(50, 1)) @ frame.T[:1],
            rng.normal(size=(50, 2)) @ frame.T,
            np.ones((1, 6)),
        ]
    )
    cell = np.array([0] * 50 + [1] * 50 + [3])
    assert local_dimension(x, cell).tolist() == [1, 2, 0, 0]
    with pytest.raises(ValueError, match="explained=1.0 is not in"):
        local_dimension(x, cell, explained=1.0)
    with pytest.raises(ValueError, match=r"selection \(3,\) disagrees"):
        local_dimension(x, cell[:3])


def test_specialisation_of_two_experts_that_swap_signs():
    """Errors: own cell 0, other's cell (2)^2 = 4, and (1)^2 = 1 for expert 1 on cell 0."""
    y = np.array([[1.0], [1.0], [-1.0]])
    answers = np.array([[[1.0], [1.0], [1.0]], [[0.0], [0.0], [-1.0]]])
    found = specialisation(answers, y, np.array([0, 0, 1]))
    np.testing.assert_allclose(found.loss, [[0, 4], [1, 0]])
    assert found.margin == pytest.approx(2.5)
    empty = specialisation(answers, y, np.zeros(3, int))
    assert np.isnan(empty.loss[:, 1]).all() and np.isfinite(empty.margin)
    with pytest.raises(ValueError, match="disagree: expected"):
        specialisation(answers, y[:2], np.array([0, 0, 1]))


def test_each_expert_can_be_made_to_answer_everywhere():
    answers = forced_answers(step_network([2.0, 3.0]), np.array([[-0.5], [0.5]]))
    np.testing.assert_array_equal(answers[:, :, 0], [[2, 2], [3, 3]])
    deep = step_network([2.0, 3.0])
    deep = Network(deep.layers * 2, deep.params * 2, 1, 1)
    with pytest.raises(ValueError, match="2 layers; expected 1"):
        forced_answers(deep, np.zeros((1, 1)))


def test_purity_and_adjusted_rand_of_known_tables():
    labels = np.array([0, 0, 0, 1, 1, 1])
    assert purity(labels, labels) == 1 and adjusted_rand(1 - labels, labels) == 1
    # Cells (0, 0, 1) and (0, 1, 1): two of three each.
    mixed = np.array([0, 0, 1, 0, 1, 1])
    assert purity(mixed, labels) == pytest.approx(4 / 6)
    # Pairs together in both: 1 + 1 = 2 of 15; rows 6, columns 6, by chance 2.4: -0.4 / 3.6.
    assert adjusted_rand(mixed, labels) == pytest.approx(-1 / 9)
    # One cell tells nothing: purity of the larger label, index 0.
    assert adjusted_rand(np.zeros(6, int), labels) == 0
    with pytest.raises(ValueError, match="disagree"):
        purity(labels, labels[:3])


def test_tie_mass_counts_close_scores():
    logits = np.array([[0.0, 1.0, 0.95], [0.0, 2.0, 1.0], [3.0, 3.0, 0.0]])
    assert tie_mass(logits, 0.1) == pytest.approx(2 / 3) and tie_mass(logits, 0.0) == 1 / 3
    with pytest.raises(ValueError, match="at least two experts"):
        tie_mass(logits[:, :1], 0.1)


def test_misassigned_counts_points_outside_their_ball():
    centers = np.array([[0.0], [2.0]])
    x = np.array([[0.1], [1.9], [0.9], [2.5]])
    assert misassigned(x, np.array([0, 0, 0, 1]), centers, 1.0) == 1 / 4
    with pytest.raises(ValueError, match="disagrees with x"):
        misassigned(x, np.array([0]), centers, 1.0)


def least_squares(num_features):
    """The class of combinations of the first powers of x."""

    def fit(x, labels):
        features = np.vander(x[:, 0], num_features, increasing=True)
        return features @ np.linalg.lstsq(features, labels, rcond=None)[0]

    return fit


def line(key, num):
    return np.linspace(-1.0, 1.0, num)[:, None]


def test_p_linear_parameters_fit_p_random_labels_and_no_more():
    sizes = (1, 2, 3, 4, 5, 6, 7, 8)
    assert empirical_capacity(KEY, least_squares(5), line, sizes) == 5
    assert empirical_capacity(KEY, lambda x, labels: 0 * labels, line, sizes) == 0
    with pytest.raises(ValueError, match="must be positive and increase"):
        empirical_capacity(KEY, least_squares(5), line, (3, 2))


def test_rademacher_value_of_p_parameters_is_p_over_n():
    """The fit is a projection on p of n dimensions: mean p / n, standard error below 0.03."""
    x = line(KEY, 40)
    value = rademacher_value(KEY, least_squares(4), x, num_draws=200)
    assert value == pytest.approx(4 / 40, abs=0.03)
    assert rademacher_value(KEY, lambda x, signs: signs, x) == 1
    with pytest.raises(ValueError, match="num_draws=0"):
        rademacher_value(KEY, least_squares(4), x, num_draws=0)


def test_degrees_of_freedom_are_the_trace_of_the_hat_matrix():
    features = np.random.default_rng(0).normal(size=(30, 5))
    gram = features.T @ features
    hat = features @ np.linalg.solve(gram + 2.0 * np.eye(5), features.T)
    assert degrees_of_freedom(features, 2.0) == pytest.approx(np.trace(hat))
    assert degrees_of_freedom(features, 0.0) == pytest.approx(5)
    with pytest.raises(ValueError, match="ridge=-1.0"):
        degrees_of_freedom(features, -1.0)


def test_the_sketch_of_a_bound_counts_all_parameters():
    assert pseudo_dimension_sketch(100, 2, 3) == pytest.approx(600 * np.log(100))
    with pytest.raises(ValueError, match="must be at least 1"):
        pseudo_dimension_sketch(0, 2, 3)


def test_nan_is_neither_assigned_nor_a_tie_nor_fitted():
    x = np.array([[np.nan, 0.0], [0.0, 0.0]])
    assert misassigned(x, np.zeros(2, int), np.zeros((1, 2)), 1.0) == 0.5
    with pytest.raises(ValueError, match="radius=nan must be finite"):
        misassigned(x, np.zeros(2, int), np.zeros((1, 2)), np.nan)
    with pytest.raises(ValueError, match="gate_logits hold NaN"):
        tie_mass(np.array([[np.nan, 1.0]]), 0.1)
    draw = lambda key, size: np.ones((size, 1))  # noqa: E731
    fit = lambda x, labels: np.full(len(x), np.nan)  # noqa: E731
    assert empirical_capacity(jax.random.key(0), fit, draw, (1, 2)) == 0
