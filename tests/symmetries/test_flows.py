"""Propositions on generators and mixtures: groups, equivariance, what each mixing keeps."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg

from moe_jax.symmetries.bases import basis_matrices, quadratic_invariants
from moe_jax.symmetries.config import LatentMoSConfig
from moe_jax.symmetries.exponential import expm, expm_action, phi_1
from moe_jax.symmetries.gates import gate, init_gate
from moe_jax.symmetries.generators import (
    PlaneRates,
    expert_rates,
    flow,
    init_generators,
    mean_flow,
    rate_matrices,
)
from moe_jax.symmetries.mixing import mixture_flow

KEY = jax.random.key(0)
FAMILIES = ("rst", "gl", "so", "stable", "basis")
COMPILER = {"compiler_options": {"xla_backend_optimization_level": 0}}
mixture = jax.jit(mixture_flow, static_argnames=("mixing", "skew"), **COMPILER)
one_flow = jax.jit(flow, static_argnames="skew", **COMPILER)
shared_exponential = jax.jit(expm_action, **COMPILER)
matrix_exponential = jax.jit(expm, static_argnames="skew", **COMPILER)


def rotations(num_experts, planes, *, sigma=0.0, translations=0, seed=1):
    keys = jax.random.split(jax.random.key(seed), 2)
    return PlaneRates(
        sigma=jnp.full((num_experts, planes), sigma),
        omega=jax.random.uniform(keys[0], (num_experts, planes), minval=0.5, maxval=2.0),
        velocity=jax.random.normal(keys[1], (num_experts, translations)),
        drift=None,
    )


def config_of(family, **options):
    basis = {"basis": "sl"} if family == "basis" else {}
    gate_of = {"gate": "invariant" if family in ("rst", "so") else "state"}
    return LatentMoSConfig(obs_dim=2, generator=family, planes=2, **gate_of, **basis, **options)


def rates_of(config):
    params = init_generators(KEY, config, 0, 3.0, 0.1)
    noise = jax.random.split(KEY, len(jax.tree.leaves(params)))
    leaves, tree = jax.tree.flatten(params)
    leaves = [
        leaf + 0.3 * jax.random.normal(key, leaf.shape)
        for leaf, key in zip(leaves, noise, strict=True)
    ]
    return expert_rates(jax.tree.unflatten(tree, leaves), config)


def turn(z, angles):
    """Rotates each plane by its angle and leaves other coordinates."""
    z = np.asarray(z)
    planes = z[..., : 2 * len(angles)].reshape(*z.shape[:-1], len(angles), 2)
    x, y = planes[..., 0], planes[..., 1]
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    turned = np.stack([cos * x - sin * y, sin * x + cos * y], -1)
    turned = turned.reshape(*z.shape[:-1], -1)
    return jnp.asarray(np.concatenate([turned, z[..., 2 * len(angles) :]], -1))


def random_latents(rows, d, seed=2):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(rows, d)), jnp.float32)


def relative(error, scale):
    return float(np.abs(error).max() / np.abs(scale).max())


@pytest.mark.parametrize("family", FAMILIES)
def test_one_expert_is_a_one_parameter_group(family):  # P1
    config = config_of(family)
    rates = jax.tree.map(lambda leaf: leaf[:1], rates_of(config))
    rates = jax.tree.map(lambda leaf: jnp.repeat(leaf, 5, axis=0), rates)
    z, s, t = random_latents(5, 4), jnp.linspace(-0.3, 0.4, 5), jnp.linspace(0.5, -0.2, 5)
    skew = family == "so"
    both = one_flow(rates, z, s + t, skew=skew)
    in_turn = one_flow(rates, one_flow(rates, z, t, skew=skew), s, skew=skew)
    assert relative(both - in_turn, both) <= 1e-5
    back = one_flow(rates, one_flow(rates, z, t, skew=skew), -t, skew=skew)
    assert relative(back - z, z) <= 1e-5
    np.testing.assert_array_equal(one_flow(rates, z, jnp.zeros(5), skew=skew), z)


@pytest.mark.parametrize("mixing", ["algebra", "output"])
def test_mixtures_commute_with_what_commutes_with_every_expert(mixing):  # P2
    rates = rotations(4, 2, sigma=-0.1)
    z, weights = random_latents(6, 4), jax.nn.softmax(random_latents(6, 4, seed=3))
    time = jnp.linspace(-1.0, 2.0, 6)
    angles = np.array([0.7, -1.9])
    after = turn(np.asarray(mixture(rates, z, weights, time, mixing=mixing)), angles)
    before = mixture(rates, turn(z, angles), weights, time, mixing=mixing)
    assert relative(after - before, after) <= 1e-5


@functools.partial(jax.jit, static_argnums=0, **COMPILER)
def cell(config, params, rates, z, time):
    """One step: gate, then flow."""
    weights = gate(params, config, z, jnp.zeros((*z.shape[:-1], config.hidden)))
    return mixture_flow(rates, z, weights, time, mixing=config.mixing)


def strong_gate(config):
    """A gate whose weights vary much."""
    return jax.tree.map(lambda leaf: 2.0 * leaf, init_gate(jax.random.key(4), config))


def gate_defect(kind):
    config = LatentMoSConfig(obs_dim=2, planes=2, gate=kind)
    params, rates = strong_gate(config), rotations(4, 2)
    z, angles = 2.0 * random_latents(8, 4), np.array([0.7, -1.9])
    time = jnp.full(8, 5.0)
    after = turn(np.asarray(cell(config, params, rates, z, time)), angles)
    return relative(after - cell(config, params, rates, turn(z, angles), time), after)


def test_a_cell_with_an_invariant_gate_is_equivariant():  # P3
    assert gate_defect("invariant") <= 1e-5


def test_a_cell_with_a_state_gate_is_not():  # P3, must fail
    assert gate_defect("state") > 0.1


def composition(mixing):
    config = LatentMoSConfig(obs_dim=2, planes=2, mixing=mixing)
    params, rates = strong_gate(config), rotations(4, 2)
    z = 2.0 * random_latents(8, 4)
    s, t = jnp.full(8, 1.5), jnp.full(8, 2.5)
    whole = cell(config, params, rates, z, s + t)
    parts = cell(config, params, rates, cell(config, params, rates, z, t), s)
    return relative(whole - parts, whole)


def test_algebra_with_an_invariant_gate_is_a_flow():  # P4
    assert composition("algebra") <= 1e-5


def test_output_with_the_same_gate_is_no_flow():  # P4, must fail
    assert composition("output") > 0.1


@pytest.mark.parametrize("time", [0.1, 0.01])
def test_output_mixing_departs_from_a_group_by_the_variance_of_the_generators(time):  # P5
    rng = np.random.default_rng(0)
    weights = np.array([0.2, 0.5, 0.3])
    matrices = rng.normal(size=(3, 4, 4))
    matrices = matrices - matrices.swapaxes(-1, -2)
    mean = np.einsum("k,kij->ij", weights, matrices)
    variance = np.einsum("k,kij,kjl->il", weights, matrices, matrices) - mean @ mean
    with jax.enable_x64(True):
        z, rates, gates = jnp.eye(4), jnp.asarray(matrices), jnp.tile(weights, (4, 1))

        def mixed(t, mixing):
            # Row i of the result is M(t) e_i, so that M is its transpose.
            span = jnp.full(4, t)
            return np.asarray(mixture(rates, z, gates, span, mixing=mixing)).T

        defect = mixed(2 * time, "output") - mixed(time, "output") @ mixed(time, "output")
        from_algebra = mixed(time, "output") - mixed(time, "algebra")
    norm = np.linalg.norm(variance)
    assert np.linalg.norm(defect) / (time**2 * norm) == pytest.approx(1.0, abs=0.05)
    assert np.linalg.norm(from_algebra) / (time**2 / 2 * norm) == pytest.approx(1.0, abs=0.05)


def test_an_equal_output_mixture_of_two_rotations_becomes_singular():  # P6
    # (e^{i w t} + e^{i (w + dw) t}) / 2 has modulus |cos(dw t / 2)|, and rotations of the plane
    # have both singular values equal to the modulus.
    rates = PlaneRates(
        sigma=jnp.zeros((2, 1)),
        omega=jnp.array([[1.0], [1.5]]),
        velocity=jnp.zeros((2, 0)),
        drift=None,
    )
    for time, expected in ((1.0, math.cos(0.25)), (2.0 * math.pi, 0.0)):
        matrix = mixture(
            rates, jnp.eye(2), jnp.full((2, 2), 0.5), jnp.full(2, time), mixing="output"
        )
        singular = np.linalg.svd(matrix, compute_uv=False)
        np.testing.assert_allclose(singular, expected, atol=1e-6)


def test_output_mixing_reads_a_representation_on_copies():  # P7
    rates = np.asarray(rate_matrices(rotations(3, 2)), np.float64)
    weights, z = np.array([0.2, 0.5, 0.3]), random_latents(1, 4)
    sum_of_blocks = scipy.linalg.block_diag(*rates)
    reading = np.kron(weights[None], np.eye(4))
    expected = reading @ scipy.linalg.expm(0.8 * sum_of_blocks) @ np.tile(z[0], 3)
    rates = rotations(3, 2)
    gates = jnp.asarray(weights[None], jnp.float32)
    actual = mixture(rates, z, gates, jnp.full(1, 0.8), mixing="output")
    np.testing.assert_allclose(actual[0], expected, atol=1e-6)


def test_algebra_without_growth_keeps_every_radius_and_output_does_not():  # P8
    rates, z = rotations(4, 3), random_latents(32, 6)
    weights = jax.nn.softmax(random_latents(32, 4, seed=5))
    radii = np.square(z.reshape(32, 3, 2)).sum(-1)

    def radii_of(mixing, time):
        moved = mixture(rates, z, weights, jnp.full(32, time), mixing=mixing)
        return np.square(np.asarray(moved).reshape(32, 3, 2)).sum(-1)

    assert relative(radii_of("algebra", 50.0) - radii, radii) <= 1e-5
    assert radii_of("output", 1.0).sum() / radii.sum() < 0.97


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("skew", [False, True])
def test_exponentials_agree_with_scipy(size, skew):
    rng = np.random.default_rng(size)
    matrices = rng.normal(size=(6, size, size)).astype(np.float32)
    # From zero, where closed forms change to series, to several turns.
    matrices *= np.array([0.0, 1e-4, 0.03, 0.5, 1.0, 3.0], np.float32)[:, None, None]
    if skew:
        matrices = matrices - matrices.swapaxes(-1, -2)
    expected = np.stack([scipy.linalg.expm(m.astype(np.float64)) for m in matrices])
    actual = matrix_exponential(jnp.asarray(matrices), jnp.ones(6), skew=skew)
    scale = np.abs(expected).max((1, 2))[:, None, None]
    np.testing.assert_allclose(actual / scale, expected / scale, atol=3e-6)


def test_one_matrix_at_many_times_agrees_with_scipy():
    rng = np.random.default_rng(5)
    matrix = rng.normal(size=(4, 4))
    time = np.array([0.0, 1e-6, -0.4, 3.0, -7.0])
    with jax.enable_x64(True):
        z = rng.normal(size=(5, 4))
        moved = shared_exponential(jnp.asarray(matrix), jnp.asarray(time), jnp.asarray(z))
        moved = np.asarray(moved)
    expected = [scipy.linalg.expm(t * matrix) @ each for t, each in zip(time, z, strict=True)]
    np.testing.assert_array_equal(moved[0], z[0])
    for actual, wanted in zip(moved, expected, strict=True):
        # Taylor's ninth term leaves 0.5^10 / 10! of a step's norm, at most 30 steps here.
        assert np.abs(actual - wanted).max() <= 1e-7 * np.abs(wanted).max()


def test_one_matrix_at_many_times_has_the_gradient_of_each_and_stays_finite():
    rng = np.random.default_rng(6)
    matrix, z = rng.normal(size=(4, 4)).astype(np.float32), random_latents(3, 4)
    time = jnp.array([0.0, 0.7, -1.2])

    def shared(matrix, time, z):
        return jnp.sum(jnp.tanh(expm_action(matrix, time, z)))

    def each(matrix, time, z):
        powers = expm(jnp.broadcast_to(matrix, (3, 4, 4)), time)
        return jnp.sum(jnp.tanh(jnp.einsum("nij,nj->ni", powers, z)))

    gradients = [
        jax.jit(jax.grad(form, (0, 1, 2)), **COMPILER)(matrix, time, z) for form in (shared, each)
    ]
    for actual, expected in zip(*gradients, strict=True):
        np.testing.assert_allclose(actual, expected, atol=2e-5)
    for huge in (-1e6, 1e9, -1e19):
        moved = shared_exponential(huge * jnp.eye(4), time, z)
        assert np.isfinite(moved).all()
        if huge < 0:
            np.testing.assert_allclose(moved[1], 0.0, atol=1e-6)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_exponentials_have_finite_gradients_at_zero_and_at_huge_matrices(
    size,
):  # jax#13985, jax#26802
    spd = np.eye(size, dtype=np.float32) + 0.1
    skew = np.triu(np.ones((size, size), np.float32), 1)
    huge = jnp.stack([0.0 * spd, -1e6 * spd, 1e6 * (skew - skew.T), 1e9 * spd, -1e19 * spd])

    def total(matrices):
        return jnp.sum(jnp.tanh(expm(matrices, jnp.ones(5))))

    value, gradient = jax.jit(jax.value_and_grad(total), **COMPILER)(huge)
    assert np.isfinite(value) and np.isfinite(gradient).all()
    contracted = matrix_exponential(huge, jnp.ones(5))[1]
    np.testing.assert_allclose(contracted, 0.0, atol=1e-6)


def test_many_small_exponentials_cost_no_more_than_one_by_one():  # jax#15195
    rng = np.random.default_rng(0)
    matrices = jnp.asarray(rng.normal(size=(16, 40, 4, 4)), jnp.float32)
    spans = jnp.asarray(rng.uniform(-1, 1, (16, 40)), jnp.float32)
    together = matrix_exponential(matrices, spans)
    for row, column in ((0, 0), (7, 31), (15, 39)):
        expected = scipy.linalg.expm(
            np.asarray(spans[row, column] * matrices[row, column], np.float64)
        )
        np.testing.assert_allclose(together[row, column], expected, atol=1e-5)

    def operations(function, *arguments):
        compiled = jax.jit(function, **COMPILER).lower(*arguments).compile()
        return compiled.cost_analysis()["flops"]

    # No branch that vmap turns into work for every matrix: the count is linear in the batch.
    single = operations(expm, matrices[:1, :1], spans[:1, :1])
    assert operations(expm, matrices, spans) <= 1.05 * 640 * single
    # The default family has no matrix to exponentiate.
    rates = jax.tree.map(lambda leaf: jnp.repeat(leaf, 640, axis=0), rotations(1, 2))
    assert operations(flow, rates, random_latents(640, 4), spans.ravel()) < 640 * single / 20


def test_phi_1_agrees_with_its_quotient_and_its_series():
    x = np.array([1e-9, 1e-4 + 1e-4j, 9e-4j, 1.1e-3, 0.5 - 2.0j, -3.0 + 1.0j])
    with jax.enable_x64(True):
        pairs = jnp.asarray(np.stack([x.real, x.imag], -1)[:, None])
        actual = np.asarray(phi_1(pairs))[:, 0]
    # (e^x - 1) / x as the mean of e^{x s} over [0, 1], by Gauss-Legendre quadrature.
    nodes, weights = np.polynomial.legendre.leggauss(20)
    expected = np.exp(x[:, None] * (nodes + 1) / 2) @ weights / 2
    np.testing.assert_allclose(actual[:, 0] + 1j * actual[:, 1], expected, atol=2e-10)


def test_flow_with_drift_solves_its_equation():
    rates = PlaneRates(
        sigma=jnp.array([[-0.2]]),
        omega=jnp.array([[1.3]]),
        velocity=jnp.array([[0.5]]),
        drift=jnp.array([[[0.4, -0.7]]]),
    )
    z, time = np.array([[1.0, -0.5, 2.0]], np.float32), 1.7
    # Homogeneous coordinates make it linear: (x, y, c, 1)' = matrix (x, y, c, 1).
    matrix = np.array([[-0.2, -1.3, 0, 0.4], [1.3, -0.2, 0, -0.7], [0, 0, 0, 0.5], [0, 0, 0, 0]])
    expected = scipy.linalg.expm(time * matrix) @ np.append(z[0], 1.0)
    actual = one_flow(rates, z, jnp.full(1, time))
    np.testing.assert_allclose(actual[0], expected[:3], atol=1e-6)


def test_mean_of_the_flow_is_its_integral():
    rates = jax.tree.map(lambda leaf: leaf[:1], rotations(1, 2, sigma=-0.3, translations=1))
    z, length = random_latents(1, 5), 1.5
    nodes, weights = np.polynomial.legendre.leggauss(12)
    points = (nodes + 1) / 2 * length
    values = [np.asarray(one_flow(rates, z, jnp.full(1, p))) for p in points.astype(np.float32)]
    expected = np.einsum("prd,p->rd", np.stack(values), weights / 2)
    actual = jax.jit(mean_flow, **COMPILER)(rates, z, jnp.full(1, length))
    np.testing.assert_allclose(actual, expected, atol=1e-6)


@pytest.mark.parametrize("rate", [1e6, -1e6])
def test_stiff_rates_are_clipped_rather_than_infinite(rate):  # diffrax#268, diffrax#319
    rates = PlaneRates(
        sigma=jnp.array([[rate]]),
        omega=jnp.array([[1.0]]),
        velocity=jnp.zeros((1, 0)),
        drift=None,
    )
    moved = one_flow(rates, jnp.ones((1, 2)), jnp.ones(1))
    bound = 2 * np.exp(8.0 if rate > 0 else -30.0)
    assert np.isfinite(moved).all() and np.abs(moved).max() <= bound


def test_so_keeps_norms_and_stable_shrinks_them():
    z = random_latents(4, 4)
    for family, bound in (("so", 1e-5), ("stable", None)):
        rates = rates_of(config_of(family))
        norm = np.linalg.norm(one_flow(rates, z, jnp.full(4, 3.0), skew=family == "so"), axis=-1)
        ratio = norm / np.linalg.norm(z, axis=-1)
        if bound is None:
            assert (ratio < 1.0).all()
        else:
            np.testing.assert_allclose(ratio, 1.0, atol=bound)


def test_spectral_norm_is_capped():
    rates = rates_of(config_of("gl", max_rate=0.7))
    assert np.linalg.norm(rates, ord=2, axis=(-2, -1)).max() <= 0.7 + 1e-5
    planes = rates_of(config_of("rst", max_rate=0.7))
    assert np.hypot(planes.sigma, planes.omega).max() <= 0.7 + 1e-5


@pytest.mark.parametrize(("name", "count"), [("so", 6), ("sl", 15), ("affine", 12)])
def test_bases_span_their_algebras(name, count):
    basis = basis_matrices(name, 4)
    assert np.linalg.matrix_rank(basis.reshape(len(basis), -1)) == count == len(basis)
    if name == "so":
        np.testing.assert_array_equal(basis, -basis.swapaxes(1, 2))
    if name == "sl":
        np.testing.assert_array_equal(np.trace(basis, axis1=1, axis2=2), 0.0)
    if name == "affine":
        np.testing.assert_array_equal(basis[:, -1], 0.0)


def test_supplied_basis_must_fit():
    options = {"obs_dim": 1, "generator": "basis", "gate": "fixed"}
    with pytest.raises(ValueError, match=r"basis \(1, 1, 3\) must be \[matrices, 2, 2\]"):
        LatentMoSConfig(basis=(((0.0, 1.0, 0.0),),), **options)
    with pytest.raises(ValueError, match="must be finite"):
        LatentMoSConfig(basis=(((0.0, math.inf), (0.0, 0.0)),), **options)
    with pytest.raises(ValueError, match="basis='so' is empty for 1 latent coordinates"):
        LatentMoSConfig(basis="so", planes=0, translations=1, **options)


BOOST = ((0.0, 1.0, 0.0, 0.0), (1.0, 0.0, 0.0, 0.0), (0.0,) * 4, (0.0,) * 4)


def test_quadratic_forms_that_a_basis_keeps():
    np.testing.assert_allclose(quadratic_invariants(basis_matrices("so", 4)), [np.eye(4)])
    last = np.zeros((4, 4))
    last[3, 3] = 1.0
    np.testing.assert_allclose(quadratic_invariants(basis_matrices("affine", 4)), [last], atol=1e-9)
    assert not len(quadratic_invariants(basis_matrices("sl", 4)))
    # A boost keeps x^2 - y^2 and every form of the other two coordinates: 1 + 3.
    forms = quadratic_invariants(np.array([BOOST]))
    assert len(forms) == 4
    z = np.random.default_rng(0).normal(size=4)
    moved = scipy.linalg.expm(0.7 * np.array(BOOST)) @ z
    np.testing.assert_allclose(moved @ forms @ moved, z @ forms @ z, atol=1e-12)


@pytest.mark.parametrize("basis", ["so", "affine", (BOOST,)], ids=["so", "affine", "boost"])
def test_a_cell_with_the_invariants_of_a_basis_is_a_flow(basis):  # P4
    config = LatentMoSConfig(obs_dim=2, planes=2, generator="basis", basis=basis, experts=2)
    params = strong_gate(config)
    rates = expert_rates(init_generators(KEY, config, 0, 3.0, 0.1), config)
    z, s, t = 2.0 * random_latents(8, 4), jnp.full(8, 0.4), jnp.full(8, 0.7)
    whole = cell(config, params, rates, z, s + t)
    parts = cell(config, params, rates, cell(config, params, rates, z, t), s)
    assert relative(whole - parts, whole) <= 1e-5
    weights = gate(params, config, z, jnp.zeros((8, 32)))
    assert np.ptp(weights, axis=0).max() > 0.01


def test_product_mixing_moves_each_slice_by_its_own_expert():
    rates, z = rotations(3, 1), random_latents(2, 6)
    moved = mixture(rates, z, jnp.full((2, 3), 1 / 3), jnp.full(2, 0.9), mixing="product")
    for k in range(3):
        own = jax.tree.map(lambda leaf, k=k: jnp.repeat(leaf[k : k + 1], 2, 0), rates)
        expected = one_flow(own, z[:, 2 * k : 2 * k + 2], jnp.full(2, 0.9))
        np.testing.assert_allclose(moved[:, 2 * k : 2 * k + 2], expected, atol=1e-6)


def test_top_k_gate_weighs_the_selected_experts_only():
    config = LatentMoSConfig(obs_dim=1, planes=2, gate="state", num_selected=2)
    ask = jax.jit(gate, static_argnums=1, **COMPILER)
    weights = ask(strong_gate(config), config, random_latents(9, 4), jnp.zeros((9, 32)))
    weights = np.asarray(weights)
    assert ((weights > 0).sum(-1) == 2).all()
    np.testing.assert_allclose(weights.sum(-1), 1.0, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"generator": "lie"}, "generator='lie' is not one of"),
        ({"experts": True}, "experts=True must be an integer"),
        ({"experts": 0}, "experts=0 must be at least 1"),
        ({"planes": 0}, "leave no latent coordinate"),
        ({"translations": -1}, "translations=-1 must not be negative"),
        ({"num_selected": 5}, "num_selected=5 exceeds experts=4"),
        ({"stride": 1}, "stride=1 must be at least 2"),
        ({"generator": "gl"}, "'gl' carry any latent to any other; use one of"),
        ({"generator": "stable"}, "'stable' carries every latent to 0"),
        ({"generator": "basis", "basis": "sl"}, "keeps no quadratic form"),
        ({"planes": 0, "translations": 2}, "gate='invariant' needs planes"),
        ({"generator": "so", "drift": True}, "drift=True needs generator='rst'"),
        ({"generator": "basis", "gate": "fixed"}, "does not fit generator='basis'"),
        ({"observation": "mean"}, "does not fit observation='mean'"),
        ({"observation": "mean", "interval": (1.0, 2.0)}, "must have 1 or 3 numbers"),
        ({"observation": "mean", "interval": (-1.0,)}, "must be a tuple of positive numbers"),
        # A list has no hash, and configurations are keys of compiled functions.
        ({"observation": "mean", "interval": [1.0]}, r"interval=\[1.0\] must be a tuple"),
        ({"observation": "mean", "interval": 1.0}, "interval=1.0 must be a tuple"),
        ({"max_rate": 0.0}, "max_rate=0.0 must be a positive number"),
        ({"max_horizon": None}, "max_horizon=None must be a positive number"),
        ({"variational": True, "encoder": "odernn"}, "variational=True needs"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(options, message, unchecked):
    with pytest.raises(ValueError, match=message):
        LatentMoSConfig(obs_dim=3, **options)
