"""What the constructions refuse, each in one line that names the argument."""

import dataclasses

import jax
import numpy as np
import pytest

from theory.atlas import (
    chart_coordinates,
    check_contained,
    nearest,
    regular_centers,
    voronoi_atlas,
)
from theory.construct import answer, chart_moe, nodal_values, pad_network
from theory.manifolds import (
    MANIFOLDS,
    circle,
    clifford_torus,
    embed_isometric,
    moment_curve,
    sphere,
    torus,
)
from theory.measure import interval_bound
from theory.network import apply_network, lift, moe_layer
from theory.partition import bumps, partition_of_unity
from theory.rings import affine_gate, two_layer_gate
from theory.targets import kinks, ring_index, waves

KEY = jax.random.key(0)
ATLAS = voronoi_atlas(KEY, circle(), center_params=regular_centers("circle", 4), num_sample=2000)
BUILD = chart_moe(KEY, ATLAS, waves(), 8)
X = np.ones((3, 2))


def two_atlas():
    return voronoi_atlas(KEY, sphere(), 12, num_sample=2000)


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (lambda: embed_isometric(KEY, sphere(), 2), "ambient_dim=2 is smaller than the 3 dim"),
        (lambda: embed_isometric(KEY, clifford_torus(), 3), "ambient_dim=3 is smaller than the 4"),
        (lambda: moment_curve(0), "ambient_dim=0 must be even and at least 2"),
        (lambda: moment_curve(5), "ambient_dim=5 must be even"),
        (lambda: torus(1.0, 2.0), "minor=2.0 must be positive and below major=1.0"),
        (lambda: regular_centers("cube"), "name='cube' is not circle"),
        (lambda: regular_centers("circle"), "num=0 must be at least 1"),
        (lambda: voronoi_atlas(KEY, circle()), "expected one of num_charts and center_params"),
        (lambda: voronoi_atlas(KEY, circle(), 0), "num_charts=0 is not in"),
        (lambda: voronoi_atlas(KEY, circle(), 1, num_sample=2000), "take more charts"),
        (lambda: voronoi_atlas(KEY, sphere(), 2, num_sample=2000), "take more charts"),
        (lambda: chart_coordinates(ATLAS, np.ones((3, 5)), np.zeros(3, int)), "atlas in D=2"),
        (lambda: check_contained(ATLAS, 3 * X, np.zeros(3, int)), "chart 0 does not contain its d"),
        (lambda: answer(BUILD, 3 * X), "does not contain its data: 3 of 3 points"),
        (lambda: chart_moe(KEY, ATLAS, waves(), 0), "num_segments=0 must be at least 1 for d=1"),
        (lambda: chart_moe(KEY, two_atlas(), waves(), 2), "num_segments=2 must be at least 3"),
        (lambda: chart_moe(KEY, ATLAS, waves(), 8, gate="cosine"), "gate='cosine' is not one of"),
        (lambda: nodal_values(ATLAS, lambda x: x[:1], 8), "expected rows"),
        (lambda: interval_bound(two_atlas(), waves(), 8), "charts have dimension 2; expected 1"),
        (lambda: apply_network(BUILD.network, np.ones((3, 5))), r"\(3, 5\) does not fit input_dim"),
        (lambda: lift(np.ones((3, 5)), 4), "does not fit tokens of model_dim=4"),
        (lambda: pad_network(BUILD.network, 8, (9, 9)), "disagree with 1 layers"),
        (lambda: pad_network(BUILD.network, 2, (9,)), "below the network's own"),
        (lambda: bumps(X, np.zeros((1, 2)), 0.5), "leaves 3 of 3 points in no ball"),
        (lambda: partition_of_unity(KEY, ATLAS, 0), "width=0 must be at least 1"),
        (lambda: partition_of_unity(KEY, ATLAS, 4, overlap=1.0), "overlap=1.0 must be above 1"),
        (lambda: kinks(np.eye(2), 1.5), "exponent=1.5 is not in"),
        (lambda: ring_index(X, (0.5, 0.3)), "finite, positive and increase"),
        (lambda: affine_gate((0.5,), 2), "num_sides=2 must be at least 3"),
        (lambda: two_layer_gate((0.5,), 1), "num_segments=1 must be at least 2"),
        (
            lambda: moe_layer(np.ones((3, 2)), np.ones((2, 3, 4)), np.ones((2, 4, 5))),
            "disagree: expected",
        ),
    ],
)
def test_bad_input_is_refused_in_one_line(attempt, message):
    with pytest.raises(ValueError, match=message) as refused:
        attempt()
    assert "\n" not in str(refused.value)


def test_a_box_that_is_too_small_is_noticed():
    small = dataclasses.replace(BUILD, atlas=dataclasses.replace(ATLAS, high=ATLAS.high - 0.2))
    angles = np.linspace(0.0, 6.0, 100)[:, None]
    with pytest.raises(ValueError, match="leave their chart's box, by up to 0.1"):
        answer(small, ATLAS.manifold.embed(angles))


@pytest.mark.parametrize("name", MANIFOLDS)
def test_jacobians_are_derivatives_and_embeddings_keep_distances(name):
    manifold = MANIFOLDS[name]()
    params = manifold.sample_params(KEY, 20)
    step = 1e-6
    for i in range(params.shape[1]):
        moved = params.copy()
        moved[:, i] += step
        slope = (manifold.native(moved) - manifold.native(params)) / step
        # Forward differences err by the step times half the curvature, below 10 on all of these.
        assert np.abs(slope - manifold.jacobian(params)[:, :, i]).max() < 1e-4
    far = embed_isometric(KEY, manifold, 50)
    gaps = [np.linalg.norm(np.diff(m.embed(params), axis=0), axis=1) for m in (manifold, far)]
    np.testing.assert_allclose(*gaps, rtol=1e-12)
    assert np.linalg.matrix_rank(manifold.jacobian(params)[0]) == manifold.dim


def test_the_moment_curve_spans_every_dimension():
    x = moment_curve(20).embed(np.linspace(0, 6, 200)[:, None])
    assert np.linalg.matrix_rank(x - x.mean(axis=0)) == 20


def test_every_cell_of_an_atlas_lies_in_its_box():
    atlas = two_atlas()
    x = atlas.manifold.embed(atlas.manifold.sample_params(jax.random.key(5), 5000))
    check_contained(atlas, x, nearest(x, atlas.centers))
