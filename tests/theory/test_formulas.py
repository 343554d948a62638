"""Formulas of the constructions against plain computations of what they say."""

import jax
import numpy as np
import pytest
from scipy.spatial import distance

from theory.atlas import nearest, regular_centers, voronoi_atlas
from theory.cells import misrouted_near_ties
from theory.construct import chart_moe, reference_interpolant
from theory.datadriven import fit_charts, k_means
from theory.experts import grid_lines, hat_weights, interpolate_square, triangle
from theory.manifolds import circle, clifford_torus, embed_isometric, sphere
from theory.network import apply_network, lift
from theory.partition import bumps, partition_of_unity
from theory.product_grid import (
    cube_points,
    least_experts,
    one_layer_floor,
    one_layer_gate,
    product_grid,
)
from theory.rings import affine_gate, two_layer_gate
from theory.targets import waves

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)


def test_a_spline_expert_is_the_interpolant_of_numpy():
    placed = embed_isometric(jax.random.key(1), circle(), 7)
    atlas = voronoi_atlas(KEY, placed, center_params=regular_centers("circle", 5), num_sample=2000)
    build = chart_moe(KEY, atlas, waves(), 9)
    x = placed.embed(RNG.uniform(0, 6.28, (300, 1)))
    found = apply_network(build.network, x, implementation="dense")
    for e in range(5):
        member = found.selection[:, 0] == e
        u = (x[member] - atlas.centers[e]) @ atlas.tangents[e][:, 0]
        knots = np.linspace(atlas.low[e, 0], atlas.high[e, 0], 10)
        known = np.interp(u, knots, build.values[e, :, 0])
        np.testing.assert_allclose(found.y[member, 0], known, atol=1e-12)
        # At the knots the value is the target's at the point of the circle over them: on the side
        # of the centre, x = c + t sin + ..., from the flat picture.
        center = 2 * np.pi * e / 5
        inside = np.abs(knots) <= 1
        turn = np.arcsin(knots[inside])
        sign = np.sign(
            (placed.embed(np.array([[center + 0.1]])) - atlas.centers[e]) @ atlas.tangents[e]
        )[0, 0]
        at = center + sign * turn
        np.testing.assert_allclose(
            build.values[e, inside, 0], np.sin(5 * np.cos(at)) + np.cos(3 * np.sin(at)), atol=1e-9
        )


def plain_layers(network, x):
    """down_e relu(up_e token) by the expert e of largest score, layer by layer."""
    tokens = lift(x, network.model_dim)
    for variables in network.params:
        experts = variables["params"]["experts"]
        chosen = np.argmax(tokens @ variables["params"]["router"]["gate"]["kernel"], axis=1)
        hidden = np.maximum(np.einsum("td,tdh->th", tokens, experts["up"][chosen]), 0)
        tokens = np.einsum("th,thd->td", hidden, experts["down"][chosen])
    return tokens[:, 1 : 1 + network.output_dim]


def test_weights_on_the_flat_torus_fall_in_error_as_the_square_of_the_mesh():
    """Two outputs, another function than elsewhere; n = 4 to 12 is a factor of 9 in theory."""
    placed = embed_isometric(jax.random.key(5), clifford_torus(), 9)
    atlas = voronoi_atlas(KEY, placed, 40, num_sample=20_000)
    target = lambda s: np.stack([np.exp(s[:, 0]) * s[:, 2], np.tanh(2 * s[:, 3])], axis=1)  # noqa: E731
    params = placed.sample_params(jax.random.key(6), 1000)
    x, y = placed.embed(params), target(placed.native(params))
    errors = [
        np.abs(plain_layers(chart_moe(KEY, atlas, target, n).network, x) - y).max(axis=0)
        for n in (4, 12)
    ]
    np.testing.assert_allclose(errors[0] / errors[1], 9, rtol=0.4)


@pytest.mark.parametrize("n", [3, 5])
def test_courant_hats_are_their_formula_by_triangles_and_by_neurons(n):
    """hat = relu(1 - (|u - j| + |v - k| + |(u - v) - (j - k)|) / 2), three times computed."""
    uv = np.concatenate([RNG.uniform(0, n, (200, 2)), RNG.integers(0, n + 1, (20, 2))])
    values = RNG.normal(size=(n + 1, n + 1, 2))
    j, k = np.meshgrid(np.arange(n + 1), np.arange(n + 1), indexing="ij")
    a, b = uv[:, 0, None, None] - j, uv[:, 1, None, None] - k
    hats = np.maximum(1 - (np.abs(a) + np.abs(b) + np.abs(a - b)) / 2, 0)
    np.testing.assert_allclose(hats.sum(axis=(1, 2)), 1, atol=1e-12)
    known = np.einsum("njk,jko->no", hats, values)
    np.testing.assert_allclose(interpolate_square(values, uv), known, atol=1e-12)
    _, weights = triangle(uv, n)
    np.testing.assert_allclose(weights.sum(axis=1), 1)
    assert weights.min() >= 0
    directions, offsets = grid_lines(n)
    into, bias = hat_weights(n)
    hidden = np.maximum(uv @ directions.T - offsets, 0)
    neurons = np.maximum(hidden @ into + bias, 0).reshape(-1, n + 1, n + 1)
    np.testing.assert_allclose(neurons, hats, atol=1e-12)
    assert len(offsets) == 4 * n + 3


def test_the_affine_gate_of_centres_is_the_nearest_centre():
    x, centers = RNG.normal(size=(500, 6)), RNG.normal(size=(17, 6))
    assert np.array_equal(nearest(x, centers), distance.cdist(x, centers).argmin(axis=1))


def test_bumps_and_fitted_partitions_are_their_formulas():
    atlas = voronoi_atlas(KEY, sphere(), 8, num_sample=2000)
    x = sphere().embed(RNG.normal(size=(50, 3)))
    radius = 1.3
    s = distance.cdist(x, atlas.centers) / radius
    bump = np.zeros(s.shape)
    bump[s < 1] = np.exp(-1 / (1 - s[s < 1] ** 2))
    known = bump / bump.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(bumps(x, atlas.centers, radius), known, atol=1e-9)
    fitted = partition_of_unity(KEY, atlas, 12)
    by_hand = [
        np.maximum(point @ fitted.weights + fitted.bias, 0) @ fitted.out
        + point @ fitted.linear
        + fitted.constant
        for point in x
    ]
    np.testing.assert_allclose(fitted(x), by_hand, atol=1e-12)
    # Least squares on x and 1 too: the fit sums to 1 where the target does.
    np.testing.assert_allclose(fitted(x).sum(axis=1), 1, atol=1e-8)


def test_the_one_layer_gate_sends_each_cube_to_its_own_expert():
    x = cube_points(KEY, 4, 3, 2)
    kernel = one_layer_gate(4, 3)
    i = np.arange(1, 5)
    scores = np.stack([i[None, :] * x[:, axis, None] - i * (i - 1) / 2 for axis in range(3)])
    sums = scores[0][:, :, None, None] + scores[1][:, None, :, None] + scores[2][:, None, None, :]
    np.testing.assert_allclose(kernel[0] + x @ kernel[1:], sums.reshape(len(x), -1))
    cube = np.floor(x).astype(int) @ [16, 4, 1]
    assert np.array_equal(np.argmax(sums.reshape(len(x), -1), axis=1), cube)


@pytest.mark.parametrize("num_selected", [1, 2])
def test_the_floor_is_the_largest_jump_between_points_of_one_set(num_selected):
    """Over all pairs of points with one selected set and every face between them."""
    target = product_grid(KEY, 3, 2)
    x = cube_points(jax.random.key(1), 3, 2, 4)
    for _ in range(8):
        kernel = RNG.normal(size=(3, 6)) * [[3.0], [1.0], [1.0]]
        scores = kernel[0] + x @ kernel[1:]
        sets = [frozenset(np.argsort(row)[-num_selected:]) for row in scores]
        worst = 0.0
        for a in range(len(x)):
            for b in range(len(x)):
                if sets[a] != sets[b]:
                    continue
                for axis in range(2):
                    for face in range(2):
                        if x[a, axis] < face + 1 < x[b, axis]:
                            worst = max(worst, target.jumps[axis, face] / 2)
        found = one_layer_floor(kernel, target, x, num_selected=num_selected)
        assert found == pytest.approx(worst)


def test_least_experts_by_counting():
    for cells, layers, k in ((3, 2, 1), (3, 2, 2), (2, 6, 3), (5, 3, 2)):
        num = k
        while len(list(combinations(num, k))) < cells**layers:
            num += 1
        assert least_experts(cells, layers, k) == num


def combinations(num, k):
    if k == 0:
        return [()]
    return [(first, *rest) for first in range(num) for rest in combinations(first, k - 1)]


def test_polygons_have_the_area_of_their_circles_and_chords_their_mean_square():
    network = affine_gate((0.5, 0.9), 7)
    side = (np.arange(400) + 0.5) / 200 - 1
    x = np.stack(np.meshgrid(side, side), axis=-1).reshape(-1, 2)
    level = apply_network(network, x, implementation="dense").y[:, 0]
    for ring, radius in ((1, 0.5), (2, 0.9)):
        # A boundary of length 6 on a grid of spacing 1/200: areas are right to about 3e-4.
        assert 4 * np.mean(level < ring - 0.5) == pytest.approx(np.pi * radius**2, abs=2e-3)
    # The last gate reads |x|^2 up to chords, whose mean over the square is right.
    layered = two_layer_gate((0.5,), 6)
    experts = layered.params[0]["params"]["experts"]
    tokens = np.concatenate([np.ones((len(x), 1)), x, np.zeros((len(x), 1))], axis=1)
    square = (np.maximum(tokens @ experts["up"][0], 0) @ experts["down"][0])[:, 3]
    gap = square - np.sum(x**2, axis=1)
    # Midpoints of 400 cells a side: the mean of |x|^2 is short by 2 (1/200)^2 / 12 = 4e-6.
    assert abs(np.mean(gap)) < 1e-5 and np.abs(gap).max() <= 2 * (1 / 3) ** 2 / 6 + 1e-9


def test_k_means_ends_where_centres_are_the_means_of_their_cells():
    x = RNG.normal(size=(200, 3))
    centers, cell = k_means(KEY, x, 6)
    assert np.array_equal(cell, distance.cdist(x, centers).argmin(axis=1))
    means = [x[cell == e].mean(axis=0) for e in range(6)]
    np.testing.assert_allclose(centers, means, atol=1e-12)


def test_the_data_driven_nodes_minimise_squares_plus_ridge_around_the_plane():
    """min_c |P + F c - y|^2 + ridge |c|^2 with P the cell's linear fit, as one least squares."""
    x = sphere().embed(RNG.normal(size=(600, 3)))
    y = np.sin(3 * x[:, :1]) + x[:, 1:2]
    build = fit_charts(KEY, x, y, dim=2, num_charts=6, num_segments=3, ridge=0.01)
    charts = build.atlas
    chart = nearest(x, charts.centers)
    steps = np.arange(4.0)
    node = np.stack(np.meshgrid(steps, steps, indexing="ij"), axis=-1).reshape(-1, 2)
    for e in range(6):
        member = chart == e
        u = (x[member] - charts.centers[e]) @ charts.tangents[e]
        mesh = (u - charts.low[e]) / (charts.high[e] - charts.low[e]) * 3
        a = mesh[:, None, :] - node[None]
        cross = np.abs(a[:, :, 0] - a[:, :, 1])
        hats = np.maximum(1 - (np.abs(a).sum(axis=2) + cross) / 2, 0)
        flat = np.concatenate([np.ones((len(mesh), 1)), mesh], axis=1)
        plane = np.linalg.lstsq(flat, y[member], rcond=None)[0]
        rows = np.concatenate([hats, np.sqrt(0.01) * np.eye(16)])
        rest = np.concatenate([y[member] - flat @ plane, np.zeros((16, 1))])
        known = np.linalg.lstsq(rows, rest, rcond=None)[0] + plane[:1] + node @ plane[1:]
        np.testing.assert_allclose(build.values[e], known, atol=1e-8)
    assert np.abs(reference_interpolant(build, x, chart) - y).mean() < 0.1


def test_misrouted_points_near_ties_are_counted():
    """Cells (0: labels 0 0 1), (1: labels 1 1 0): points 2 and 5 are misrouted, 2 near a tie."""
    scores = np.array([[2.0, 0.0], [2.0, 0.0], [0.5, 0.45], [0.0, 2.0], [0.0, 2.0], [0.0, 2.0]])
    labels = np.array([0, 0, 1, 1, 1, 0])
    assert misrouted_near_ties(scores, labels, 0.1) == pytest.approx(1 / 6)
    assert misrouted_near_ties(scores, labels, 3.0) == pytest.approx(2 / 6)
    assert misrouted_near_ties(scores, labels, 0.01) == 0
