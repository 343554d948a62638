"""What users can pass, who run without the tests' checks of types: no function answers silently."""

import importlib

import jax
import jaxtyping
import numpy as np
import pytest

from theory.atlas import chart_coordinates, nearest, preimages, regular_centers, spread_points
from theory.atlas import voronoi_atlas as build_atlas
from theory.capacity import degrees_of_freedom, empirical_capacity, rademacher_value
from theory.cells import (
    adjusted_rand,
    forced_answers,
    misrouted_near_ties,
    purity,
    specialisation,
    tie_mass,
)
from theory.construct import answer, chart_moe, nodal_values
from theory.datadriven import fit_charts, k_means, node_features
from theory.manifolds import circle, embed_isometric, moment_curve, sphere, swiss_roll
from theory.measure import interval_bound
from theory.model import Stack
from theory.network import apply_network, moe_layer
from theory.partition import bumps, misassigned, partition_of_unity
from theory.paths import path_stats
from theory.problems import cell_of, manifold_problem, partition_problem
from theory.product_grid import (
    cube_points,
    least_experts,
    one_layer_floor,
    one_layer_gate,
    product_grid,
    product_grid_moe,
)
from theory.rank import effective_rank, local_dimension
from theory.regions import grid_patterns, linear_regions_on_segment, region_bound
from theory.regions import selected_set_bound as set_bound
from theory.rings import affine_gate, quadratic_gate, two_layer_gate, with_square
from theory.targets import kinks, ring_index, waves

KEY = jax.random.key(0)
CIRCLE = circle()
ATLAS = build_atlas(KEY, CIRCLE, center_params=regular_centers("circle", 4), num_sample=2000)
BUILD = chart_moe(KEY, ATLAS, waves(), 8)
X = CIRCLE.embed(np.linspace(0, 6, 40)[:, None])
CELL = nearest(X, ATLAS.centers)
GRID = product_grid(KEY, 3, 2)
GATE, CUBES = one_layer_gate(3, 2), cube_points(KEY, 3, 2, 5)
RADII = (0.3, 0.6)
NAN = float("nan")


def holed(array, value=NAN):
    array = np.array(array, float)
    array.flat[0] = value
    return array


@pytest.fixture
def unchecked():
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def atlas_of(centers, num_sample=2000, manifold=CIRCLE):
    return build_atlas(KEY, manifold, center_params=centers, num_sample=num_sample)


def fitted(x=X, y=X[:, :1], **options):
    return fit_charts(KEY, x, y, **{"dim": 1, "num_charts": 3, "num_segments": 4, **options})


CASES = {
    # Points of another dimension.
    "patterns": (lambda: grid_patterns(quadratic_gate(RADII), X), "do not fit input_dim=3"),
    "forced": (lambda: forced_answers(quadratic_gate(RADII), X), "are not rows of 3 numbers"),
    "ring of 3-d": (lambda: ring_index(np.ones((4, 3)), RADII), "not rows of 2 numbers"),
    "square of 3-d": (lambda: with_square(np.ones((4, 3))), "not rows of 2 numbers"),
    "labels of 2-d": (lambda: purity(CELL, CELL[:, None]), "a number a point"),
    "both 2-d": (lambda: purity(CELL[:, None], CELL[:, None]), "a number a point"),
    "paths of 1-d": (lambda: path_stats(CELL, 4), "whole numbers [points, layers]"),
    "network of 1-d": (lambda: apply_network(BUILD.network, X[0]), "does not fit input_dim=2"),
    "chart of 1-d": (lambda: chart_coordinates(ATLAS, X[0], CELL), "does not fit an atlas"),
    "grid of 3-d": (lambda: GRID(np.ones((3, 3))), "disagrees with num_layers=2"),
    "cells of 3-d": (lambda: cell_of("rings", np.ones((3, 3))), "not rows of 2 numbers"),
    "params of torus": (lambda: CIRCLE.embed(np.ones((3, 2))), "not rows of 1 numbers"),
    # NaN, infinity, and numbers whose squares are infinite.
    "floor, gate": (lambda: one_layer_floor(holed(GATE), GRID, CUBES), "kernel (3, 9) must be fin"),
    "floor, x": (lambda: one_layer_floor(GATE, GRID, holed(CUBES)), "x (45, 2) must be finite"),
    "ring of nan": (lambda: ring_index(holed(X), RADII), "must be finite; 1 entries"),
    "ring radii": (lambda: ring_index(X, (0.3, NAN)), "must be finite, positive and increase"),
    "quadratic": (lambda: quadratic_gate((NAN,)), "must be finite, positive and increase"),
    "polygon": (lambda: affine_gate((0.3, np.inf), 5), "must be finite, positive and increase"),
    "jump of nan": (lambda: product_grid(KEY, 3, 2, min_jump=NAN), "min_jump=nan must be finite"),
    "jump below 0": (lambda: product_grid(KEY, 3, 2, min_jump=-1), "min_jump=-1.0 must be finite"),
    "target": (
        lambda: chart_moe(KEY, ATLAS, lambda x: holed(x), 8),
        "target is not finite in 1 of",
    ),
    "fit x": (lambda: fitted(holed(X)), "x (40, 2) must be finite"),
    "fit y": (lambda: fitted(y=holed(X)), "y (40, 2) must be finite"),
    "fit huge": (lambda: fitted(1e300 * X), "expected at most 1e+150"),
    "network nan": (lambda: apply_network(BUILD.network, holed(X)), "x (40, 2) must be finite"),
    "network empty": (lambda: apply_network(BUILD.network, X[:0]), "must hold at least 1 rows"),
    "answer nan": (lambda: answer(BUILD, holed(X)), "x (40, 2) must be finite"),
    "answer empty": (lambda: answer(BUILD, X[:0]), "must hold at least 1 rows"),
    "weights": (
        lambda: moe_layer(holed(GATE), np.ones((9, 3, 1)), np.ones((9, 1, 3))),
        "kernel (3",
    ),
    "half width": (lambda: two_layer_gate(RADII, 4, -1.0), "half_width=-1.0 must be positive"),
    "half width nan": (lambda: two_layer_gate(RADII, 4, NAN), "half_width=nan must be finite"),
    "bumps": (lambda: bumps(X, ATLAS.centers, NAN), "radius=nan must be finite"),
    "offset": (lambda: kinks(np.eye(2), 0.5, NAN), "offset=nan must be finite"),
    "specialised": (
        lambda: specialisation(holed(np.ones((4, 40, 1))), np.ones((40, 1)), CELL),
        "answers (4, 40, 1) must be finite",
    ),
    "segment": (
        lambda: linear_regions_on_segment(BUILD.network, np.array([NAN, 0.0]), np.ones(2)),
        "start (1, 2) must be finite",
    ),
    "freedom": (lambda: degrees_of_freedom(holed(X), 1.0), "features (40, 2) must be finite"),
    "signs": (lambda: rademacher_value(KEY, lambda x, s: holed(s), X), "fit (20, 40) must be"),
    "fit of another shape": (
        lambda: empirical_capacity(KEY, lambda x, s: s[:1], lambda k, n: X[:n], (1, 2)),
        "fit gives (1,) for labels (2,)",
    ),
    "sphere at 0": (lambda: sphere().embed(np.zeros((1, 3))), "no point of the sphere belongs"),
    # Outside what is defined.
    "left of the grid": (lambda: GRID(np.array([[-0.1, 1.0]])), "outside [0, 3]^2"),
    "right of the grid": (lambda: GRID(np.array([[1.0, 3.1]])), "outside [0, 3]^2"),
    "floor outside": (lambda: one_layer_floor(GATE, GRID, CUBES + 1), "outside [0, 3]^2"),
    "off the mesh": (lambda: node_features(np.array([[3.5]]), 3), "leaves [0, 3]^d"),
    "chart 9": (lambda: chart_coordinates(ATLAS, X, CELL + 9), "chart hold 9 to 12; expected"),
    "preimage of chart -1": (lambda: preimages(ATLAS, CELL - 1, X[:, :1]), "chart hold -1 to 2"),
    "specialised -1": (
        lambda: specialisation(np.ones((4, 40, 1)), np.ones((40, 1)), CELL - 1),
        "selection hold -1 to 2; expected at least 0 and below 4",
    ),
    "assigned to 9": (lambda: misassigned(X, CELL + 9, ATLAS.centers, 1.0), "hold 9 to 12"),
    "dimension of -1": (lambda: local_dimension(X, CELL - 1), "selection hold -1 to 2"),
    # Counts that are not whole, too small or too large.
    "mesh of 2.5": (
        lambda: chart_moe(KEY, ATLAS, waves(), 2.5),
        "num_segments=2.5 must be a whole",
    ),
    "mesh of True": (lambda: chart_moe(KEY, ATLAS, waves(), True), "num_segments=True must be"),
    "nodes of 0": (lambda: nodal_values(ATLAS, waves(), 0), "num_segments=0 must be at least 1"),
    "fit of 0": (lambda: fitted(num_segments=0), "num_segments=0 must be at least 1 for d=1"),
    "fit of 2": (
        lambda: fitted(dim=2, num_segments=2),
        "num_segments=2 must be at least 3 for d=2",
    ),
    "margin": (lambda: fitted(margin=-0.1), "margin=-0.1 must be finite and at least 0"),
    "bound of 0": (lambda: interval_bound(ATLAS, waves(), 0), "num_segments=0 must be at least 1"),
    "cube of -1": (lambda: cube_points(KEY, 3, 2, -1), "per_cube=-1 must be at least 1"),
    "selected 0": (lambda: least_experts(3, 2, 0), "num_selected=0 must be at least 1"),
    "many layers": (lambda: product_grid(KEY, 2, 10**9), "is not below 2^63"),
    "many paths": (lambda: path_stats(np.zeros((2, 70), int), 2), "is not below 2^63"),
    "width -1": (lambda: region_bound(-1, 2), "width=-1 must be at least 0"),
    "sets of 6 in 5": (lambda: set_bound(5, 6), "num_selected=6 is not in [1, 5]"),
    "k-means": (lambda: k_means(KEY, np.ones((5, 2)), 2), "fewer than num=2 different points"),
    "spread": (lambda: spread_points(np.ones((5, 2)), 2), "fewer than num=2 different points"),
    "D of 5.5": (lambda: embed_isometric(KEY, CIRCLE, 5.5), "ambient_dim=5.5 must be a whole"),
    "D of 6.0": (lambda: moment_curve(6.0), "ambient_dim=6.0 must be a whole"),
    "roll": (lambda: swiss_roll(-1.0), "width=-1.0 must be positive"),
    "draws": (lambda: CIRCLE.sample_params(KEY, -1), "size of a draw=-1 must be at least 0"),
    "no data": (lambda: manifold_problem(KEY, "sphere", 4, num_train=0, num_test=9), "num_train=0"),
    "no tests": (lambda: partition_problem(KEY, "grid", num_train=9, num_test=0), "num_test=0"),
    "stack": (lambda: Stack(2, 1, 3, 2.5), "hidden_dim=2.5 must be a whole number"),
    "overlap": (
        lambda: partition_of_unity(KEY, ATLAS, 4, overlap=NAN),
        "overlap=nan must be above",
    ),
    # Centres and cells.
    "twice": (lambda: atlas_of(np.array([[0.0], [2.0], [2.0]])), "hold the same point twice"),
    "turned": (
        lambda: atlas_of(np.array([[0.0], [2.0], [2 * np.pi]])),
        "hold the same point twice",
    ),
    "empty cell": (lambda: atlas_of(np.array([[0.0], [1e-7], [2e-7], [3.0]])), "holds none of"),
    "centre of nan": (
        lambda: atlas_of(np.array([[NAN], [2.0]])),
        "center_params (2, 1) must be fin",
    ),
    "centres of 2-d": (lambda: atlas_of(np.ones((4, 2))), "center_params (4, 2) are not rows of 1"),
    "no centre": (lambda: atlas_of(np.ones((0, 1))), "must hold at least 1 rows"),
    "few points": (
        lambda: atlas_of(regular_centers("circle", 4), 100),
        "num_sample=100 is below 50",
    ),
    "one point": (
        lambda: atlas_of(regular_centers("circle", 4), 1),
        "num_sample=1 must be at least",
    ),
    "flat cell": (lambda: fitted(np.ones((40, 2)), num_charts=1), "extends in fewer than dim=1"),
    # Statistics of too little.
    "pairs of one": (lambda: adjusted_rand(CELL[:1], CELL[:1]), "pairs need at least 2"),
    "labels of 0.5": (lambda: purity(CELL, CELL + 0.5), "labels must hold whole numbers"),
    "ties of none": (lambda: tie_mass(np.ones((0, 3)), 0.1), "must score at least two experts"),
    "width of ties": (lambda: tie_mass(X, -1.0), "width=-1.0 must be finite and at least 0"),
    "ties without labels": (lambda: misrouted_near_ties(X, CELL[:3], 0.1), "disagree"),
    "equal rows": (
        lambda: effective_rank(np.full((5, 3), 0.1), center=True),
        "5 rows that are",
    ),
    "none assigned": (lambda: misassigned(X[:0], CELL[:0], ATLAS.centers, 1.0), "at least 1 rows"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_has_no_answer_is_refused_in_one_line(case, unchecked):
    attempt, message = CASES[case]
    with pytest.raises(ValueError) as refused:
        attempt()
    assert message in str(refused.value)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 200


def test_whole_numbers_and_lists_are_as_good_as_floats(unchecked):
    whole = np.array([[1, 0], [0, 1], [-1, 0]])
    for call in (
        lambda x: apply_network(BUILD.network, x, implementation="dense").y,
        lambda x: GRID(np.abs(x)) if isinstance(x, np.ndarray) else GRID([[1, 0], [0, 1], [1, 0]]),
        lambda x: ring_index(x, RADII),
        lambda x: nearest(x, ATLAS.centers),
        lambda x: with_square(x),
        lambda x: np.array(effective_rank(x)),
    ):
        known = call(whole.astype(float))
        np.testing.assert_array_equal(call(whole), known)
        np.testing.assert_array_equal(call(whole.tolist()), known)


def test_every_module_imports_alone():
    for name in ("checks", "evaluation", "tables", "plots", "gallery", "main"):
        assert importlib.import_module(f"theory.{name}").__doc__


def test_experts_with_the_same_scores_are_one_cell():
    """Two equal columns tie everywhere; the first is chosen, and its cell is certified as such."""
    one = np.zeros((3, 1))
    known = one_layer_floor(one, GRID, CUBES)
    assert known >= GRID.jumps.min() / 2
    assert one_layer_floor(np.zeros((3, 2)), GRID, CUBES) == known
    assert one_layer_floor(np.zeros((3, 5)), GRID, CUBES, num_selected=2) == known
    doubled = np.concatenate([GATE, GATE], axis=1)
    assert one_layer_floor(doubled, GRID, CUBES) == 0
    with pytest.raises(ValueError, match="ties at each of the 45 points"):
        one_layer_floor(np.array([[0.0, 0.0], [1.0, 1.0 + 1e-12], [0.0, 0.0]]), GRID, CUBES)


def test_a_product_grid_and_its_layers_agree_on_the_faces_too():
    for num_cells, num_layers in ((8, 2), (5, 3)):
        target = product_grid(KEY, num_cells, num_layers)
        axes = [np.arange(2 * num_cells + 1) / 2] * num_layers
        x = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, num_layers)
        result = apply_network(product_grid_moe(target), x, implementation="dense")
        assert np.array_equal(result.selection, target.cells(x))
        assert np.abs(result.y - target(x)).max() < 1e-12


def test_ranks_and_dimensions_of_extreme_sizes():
    matrix = np.diag([2.0, 1.0])
    known = effective_rank(matrix)
    for scale in (1e-300, 1e300, 2.0**1000):
        np.testing.assert_allclose(effective_rank(scale * matrix), known)
    rows = np.array([[0.1, 5.0], [-0.1, 5.0], [0.3, 5.0]])
    assert effective_rank(1e-200 * rows, center=True).entropy == pytest.approx(1)
    same = np.full((4, 3), 0.1)
    assert local_dimension(same, np.array([0, 0, 1, 1])).tolist() == [0, 0]
    line = np.arange(4.0)[:, None] * np.array([[1.0, 2.0]])
    assert local_dimension(1e-140 * line, np.zeros(4, int)).tolist() == [1]


def test_answers_do_not_depend_on_how_they_are_computed():
    known = answer(BUILD, X, implementation="dense")
    small = answer(BUILD, X, implementation="dense", batch_size=7)
    np.testing.assert_allclose(small.y, known.y, atol=1e-12)
    assert np.array_equal(small.selection, known.selection)
