"""The density: identities, normaliser, score, kinds of experts, limits and bad arguments."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import gammaln, roots_jacobi
from scipy.stats import multivariate_t

from moe_jax.product_of_t import (
    ProductOfT,
    diagonal_experts,
    full_experts,
    join_experts,
    low_rank_experts,
    transform_experts,
)
from moe_jax.product_of_t.samplers import conditional_parameters
from tests.product_of_t import products
from tests.product_of_t.products import EXPONENTS, LOC, PRECISION, in_double_precision

POINTS = np.random.default_rng(0).normal(size=(6, 2)) * 2.0


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


@functools.cache
def moments():
    return products.example_moments()


def example(**options):
    return ProductOfT(products.example_experts(), jnp.asarray(EXPONENTS.copy()), **options)


def test_density_is_a_product_of_powers():
    expected = products.log_product(LOC, PRECISION, EXPONENTS, POINTS)
    np.testing.assert_allclose(
        example().unnormalized_log_prob(jnp.asarray(POINTS)), expected, rtol=1e-12
    )


def test_feynman_identity_of_two_experts_at_points():
    """E_{w ~ Dirichlet} (w . D(z))^-A = prod D^-alpha, and C = E C_alpha(w), by Gauss-Jacobi."""
    exponents = np.array([1.3, 0.8])
    # The rule's weight (1 - x)^(b-1) (1 + x)^(a-1) is a Beta(a, b) in w = (1 + x) / 2.
    nodes, weights = roots_jacobi(60, exponents[1] - 1, exponents[0] - 1)
    first = (1 + nodes) / 2
    simplex, weights = np.stack([first, 1 - first], axis=1), weights / weights.sum()
    experts = full_experts(jnp.asarray(LOC[:2]), jnp.asarray(PRECISION[:2]))
    total, dim = exponents.sum(), 2
    centre, cholesky, spread, log_mass = map(
        np.asarray, conditional_parameters(experts, jnp.asarray(exponents), jnp.asarray(simplex))
    )
    for z in POINTS:
        # s + |L'(z - m)|^2 is sum_k w_k D_k(z), by the completed square.
        half = np.einsum("nji,nj->ni", cholesky, z - centre)
        sums = spread + np.sum(half**2, axis=1)
        log_product = products.log_product(LOC[:2], PRECISION[:2], exponents, z[None])[0]
        assert weights @ sums**-total == pytest.approx(np.exp(log_product), rel=1e-10)
    reference = products.integrate(
        lambda z: products.log_product(LOC[:2], PRECISION[:2], exponents, z), dim, points=1600
    )
    # nu = 2.2: the tails leave the quadrature six digits.
    assert np.log(weights @ np.exp(log_mass)) == pytest.approx(reference.log_normalizer, abs=2e-5)


def test_conditional_is_the_t_that_the_weights_give():
    weights = np.array([[0.1, 0.4, 0.2, 0.3], [0.7, 0.1, 0.1, 0.1]])
    q = example()
    conditional = q.conditional(jnp.asarray(weights))
    for index, w in enumerate(weights):
        precision = np.einsum("k,kij->ij", w, PRECISION)
        centre = np.linalg.solve(precision, np.einsum("k,kij,kj->i", w, PRECISION, LOC))
        offset = LOC - centre
        spread = 1 + np.einsum("k,ki,kij,kj->", w, offset, PRECISION, offset)
        nu = 2 * EXPONENTS.sum() - 2
        expected = multivariate_t(centre, np.linalg.inv(precision) * spread / nu, df=nu)
        with jax.numpy_rank_promotion("allow"):  # numpyro broadcasts
            ours = conditional.log_prob(jnp.asarray(POINTS)[:, None])[:, index]
        np.testing.assert_allclose(ours, expected.logpdf(POINTS), rtol=1e-9)


@pytest.mark.parametrize("dim", [1, 2, 5])
def test_one_expert_is_scipys_t(dim):
    rng = np.random.default_rng(dim)
    loc, root = rng.normal(size=dim), rng.normal(size=(dim, dim))
    precision = root @ root.T + np.eye(dim)
    exponent = 0.5 * dim + 1.7
    q = ProductOfT(
        full_experts(jnp.asarray(loc[None]), jnp.asarray(precision[None])), jnp.array([exponent])
    )
    nu = 2 * exponent - dim
    expected = multivariate_t(loc, np.linalg.inv(precision) / nu, df=nu)
    points = rng.normal(size=(7, dim)) * 3
    np.testing.assert_allclose(
        q.log_prob(jnp.asarray(points)), expected.logpdf(points).reshape(7), rtol=1e-10
    )
    assert q.log_normalizer_error == 0.0
    assert float(q.degrees_of_freedom) == pytest.approx(nu)


def test_score_is_the_gradient():
    q = example(log_normalizer=0.0)
    expected = jax.vmap(jax.grad(q.log_prob))(jnp.asarray(POINTS))
    np.testing.assert_allclose(q.score(jnp.asarray(POINTS)), expected, rtol=1e-10, atol=1e-12)
    assert q.score(jnp.asarray(POINTS[0])).shape == (2,)


def test_derivative_of_the_log_normalizer_is_minus_the_mean_of_log_factors():
    """d log C / d alpha_k = -E_q log D_k, both by quadrature: the family is exponential."""
    step = 1e-4

    def log_c(exponents):
        return products.integrate(
            lambda z: products.log_product(LOC, PRECISION, exponents, z), 2, points=400
        ).log_normalizer

    for k in range(4):
        change = step * np.eye(4)[k]
        slope = (log_c(EXPONENTS + change) - log_c(EXPONENTS - change)) / (2 * step)
        tilted = EXPONENTS - 1e-3 * np.eye(4)[k]
        # E_q D_k^h = C(alpha - h e_k) / C(alpha); its slope in h is E_q log D_k.
        mean_log = (log_c(tilted) - log_c(EXPONENTS)) / 1e-3
        assert slope == pytest.approx(-mean_log, rel=2e-3)


@pytest.mark.parametrize("method", ["dirichlet", "mixture", "annealed"])
def test_normalizer_lies_within_its_standard_errors(method):
    estimate = example().estimate_log_normalizer(jax.random.key(5), 4000, method)
    error = float(estimate.standard_error)
    # 4.5 standard errors, three methods: a false alarm in 2e-5 of all keys.
    assert abs(float(estimate.value) - moments().log_normalizer) < 4.5 * error
    assert 0.0 < error < 0.05
    assert 0.1 < float(estimate.ess) <= 1.0


def test_standard_error_of_the_normalizer_is_what_it_says():
    """Dirichlet weights are bounded; 40 estimates of 400 draws scatter as their errors say."""
    q = example()
    estimates = [
        q.estimate_log_normalizer(jax.random.key(key), 400, "dirichlet") for key in range(40)
    ]
    scores = [
        (float(e.value) - moments().log_normalizer) / float(e.standard_error) for e in estimates
    ]
    # A chi-square of 40 degrees lies outside of [0.45, 1.9] x 40 with probability 2e-3; the keys
    # are fixed, and the bias of a logarithm is a tenth of an error here.
    assert 0.45 < np.mean(np.square(scores)) < 1.9


def test_normalized_density_integrates_to_one():
    q = example().normalized(jax.random.key(2))
    error = 4.5 * float(q.log_normalizer_error)
    total = products.integrate(lambda z: np.asarray(q.log_prob(jnp.asarray(z))), 2, points=300)
    assert abs(total.log_normalizer) < error < 0.1


def test_identical_experts_add_their_exponents():
    twice = full_experts(
        jnp.asarray(np.repeat(LOC, 2, axis=0)), jnp.asarray(np.repeat(PRECISION, 2, axis=0))
    )
    halves = jnp.asarray(np.stack([0.3 * EXPONENTS, 0.7 * EXPONENTS], axis=1).ravel())
    np.testing.assert_allclose(
        ProductOfT(twice, halves).unnormalized_log_prob(jnp.asarray(POINTS)),
        example().unnormalized_log_prob(jnp.asarray(POINTS)),
        rtol=1e-12,
    )


def test_expert_of_no_exponent_is_absent():
    more = join_experts(
        products.example_experts(), full_experts(jnp.full((1, 2), 9.0), jnp.eye(2)[None])
    )
    q = ProductOfT(more, jnp.asarray([*EXPONENTS, 0.0]))
    estimate = q.estimate_log_normalizer(jax.random.key(5), 4000, "dirichlet")
    assert abs(float(estimate.value) - moments().log_normalizer) < 4.5 * float(
        estimate.standard_error
    )


def test_full_diagonal_and_low_rank_precisions_agree():
    """One set of matrices in three forms: the same density, score, z | w and normaliser."""
    diagonals = np.array([[2.0, 0.5], [0.7, 1.5], [1.0, 3.0], [0.4, 0.3]])
    diagonal = diagonal_experts(jnp.asarray(LOC), jnp.asarray(diagonals))
    factor = np.sqrt(0.6 * diagonals)[:, :, None] * np.eye(2)
    forms = {
        "full": full_experts(jnp.asarray(LOC), jnp.asarray(diagonals[:, :, None] * np.eye(2))),
        "diagonal": diagonal,
        "low rank": low_rank_experts(
            jnp.asarray(LOC), jnp.asarray(factor), jnp.asarray(0.4 * diagonals)
        ),
    }
    weights = jnp.asarray(np.random.default_rng(1).dirichlet(np.ones(4), size=3))
    found = []
    for experts in forms.values():
        q = ProductOfT(experts, jnp.asarray(EXPONENTS))
        parameters = conditional_parameters(experts, q.exponents, weights)
        points = jnp.asarray(POINTS)
        found.append((q.unnormalized_log_prob(points), q.score(points), *parameters))
        assert experts.is_full_rank.tolist() == [1.0] * 4
    for other in found[1:]:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9), found[0], other)


def test_low_rank_experts_are_those_of_their_matrices():
    factor = np.array([[[1.0], [0.5]], [[0.0], [2.0]]])
    flat = low_rank_experts(jnp.asarray(LOC[:2]), jnp.asarray(factor))
    everyone = join_experts(products.example_experts(), flat)
    assert everyone.is_full_rank.tolist() == [1.0] * 4 + [0.0] * 2
    q = ProductOfT(everyone, jnp.asarray([*EXPONENTS, 0.4, 1.1]))
    matrices = np.concatenate([PRECISION, factor @ np.swapaxes(factor, 1, 2)])
    expected = products.log_product(
        np.concatenate([LOC, LOC[:2]]), matrices, np.asarray(q.exponents), POINTS
    )
    np.testing.assert_allclose(q.unnormalized_log_prob(jnp.asarray(POINTS)), expected, rtol=1e-12)
    reference = products.integrate(
        lambda z: np.asarray(q.unnormalized_log_prob(jnp.asarray(z))), 2, points=400
    )
    estimate = q.estimate_log_normalizer(jax.random.key(0), 4000, "dirichlet")
    # 4.5 standard errors: a false alarm in 7e-6 of all keys.
    assert abs(float(estimate.value) - reference.log_normalizer) < 4.5 * float(
        estimate.standard_error
    )


def test_affine_maps_leave_the_factors():
    loc, scale = np.array([3.0, -1.0]), np.array([[2.0, 0.0], [0.7, 0.3]])
    experts = join_experts(
        products.example_experts(),
        low_rank_experts(jnp.asarray(LOC[:1]), jnp.ones((1, 2, 1)), jnp.asarray([[0.3, 0.2]])),
    )
    moved = transform_experts(experts, jnp.asarray(loc), jnp.asarray(scale))
    exponents = jnp.asarray([*EXPONENTS, 0.5])
    np.testing.assert_allclose(
        ProductOfT(moved, exponents).unnormalized_log_prob(jnp.asarray(loc + POINTS @ scale.T)),
        ProductOfT(experts, exponents).unnormalized_log_prob(jnp.asarray(POINTS)),
        rtol=1e-10,
    )
    assert moved.is_full_rank.tolist() == [1.0] * 5


def test_single_precision_far_from_zero_keeps_the_normalizer():
    """Locations at 1,000: what cancels is taken about the centre, so float32 keeps three digits."""
    shifted = LOC + 1000.0
    weights = np.random.default_rng(2).dirichlet(EXPONENTS, size=50)

    def log_mass(dtype):
        experts = full_experts(jnp.asarray(shifted, dtype), jnp.asarray(PRECISION, dtype))
        exponents = jnp.asarray(EXPONENTS, dtype)
        simplex = jnp.asarray(weights, dtype)
        return np.asarray(conditional_parameters(experts, exponents, simplex)[3])

    np.testing.assert_allclose(log_mass(jnp.float32), log_mass(jnp.float64), atol=2e-3)


def test_distribution_passes_through_jit_as_an_argument():
    q = example(log_normalizer=moments().log_normalizer)
    compiled = jax.jit(lambda q, z: q.log_prob(z))(q, jnp.asarray(POINTS))
    np.testing.assert_allclose(compiled, q.log_prob(jnp.asarray(POINTS)), rtol=1e-12)
    assert (q.event_shape, q.batch_shape) == ((2,), ())


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: full_experts(jnp.zeros((1, 2)), -jnp.eye(2)[None]), "positive definite"),
        (lambda: full_experts(jnp.zeros((1, 2)), jnp.ones((1, 2, 2))), "positive definite"),
        (
            lambda: full_experts(jnp.zeros((1, 2)), jnp.array([[[1.0, 0.5], [0.0, 1.0]]])),
            "not symmetric",
        ),
        (lambda: full_experts(jnp.zeros((1, 2)), jnp.full((1, 2, 2), jnp.nan)), "not finite"),
        (lambda: diagonal_experts(jnp.zeros((1, 2)), jnp.array([[1.0, 0.0]])), "expected all > 0"),
        (
            lambda: low_rank_experts(jnp.zeros((1, 2)), jnp.ones((1, 2, 1)), -jnp.ones((1, 2))),
            "expected all >= 0",
        ),
        (
            lambda: join_experts(
                products.example_experts(), diagonal_experts(jnp.zeros((1, 3)), jnp.ones((1, 3)))
            ),
            r"dimensions \[2, 3\]",
        ),
        (lambda: ProductOfT(products.example_experts(), jnp.ones(3)), r"shape \(3,\): expected"),
        (lambda: ProductOfT(products.example_experts(), -jnp.ones(4)), "numbers >= 0"),
        (lambda: ProductOfT(products.example_experts(), jnp.full(4, jnp.nan)), "finite numbers"),
        # At the bound A = D / 2 itself the product is not integrable.
        (lambda: ProductOfT(products.example_experts(), jnp.full(4, 0.25)), "sum to 1: expected"),
        (lambda: example().estimate_log_normalizer(jax.random.key(0), 10, "exact"), "method="),
        (lambda: example().weighted_sample(jax.random.key(0), 10, "annealed"), "method="),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_flat_experts_do_not_count_towards_integrability():
    """Axis exponents 0.3 and 1.2 need more than 0.2 on the full expert; D / 2 is asked for."""
    flat = low_rank_experts(jnp.zeros((2, 2)), jnp.eye(2)[:, :, None])
    experts = join_experts(products.example_experts(), flat)
    with pytest.raises(ValueError, match="positive definite experts sum to 0.8"):
        ProductOfT(experts, jnp.array([0.8, 0.0, 0.0, 0.0, 0.3, 1.2]))


def test_constant_of_one_t():
    """C = pi^(D/2) Gamma(a - D/2) / (Gamma(a) sqrt|Lambda|) with |Lambda| = 2 * 0.5 - 0.36."""
    q = ProductOfT(full_experts(jnp.asarray(LOC[:1]), jnp.asarray(PRECISION[:1])), jnp.array([2.5]))
    expected = np.log(np.pi) + gammaln(1.5) - gammaln(2.5) - 0.5 * np.log(0.64)
    assert float(q.log_normalizer) == pytest.approx(expected, rel=1e-12)


def test_results_are_the_same_inside_and_outside_of_64_bits():
    """Numpy arrays of a result serve in 32 bits: digits are lost, nothing else."""
    q = in_double_precision(lambda: example(log_normalizer=1.0).log_prob(jnp.asarray(POINTS)))
    with jax.enable_x64(False):
        single = example(log_normalizer=1.0).log_prob(jnp.asarray(POINTS, jnp.float32))
    np.testing.assert_allclose(single, q, rtol=1e-5)
