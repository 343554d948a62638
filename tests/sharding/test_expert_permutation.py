"""Permuted experts compute what they did, wherever they stand in a tree."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from moe_jax.core import SparseMoE, routing_metrics
from moe_jax.language.config import LanguageModelConfig
from moe_jax.language.model import LanguageModel
from moe_jax.sharding import permute_experts

EXPERTS, MODEL = 6, 8
MODEL_CONFIG = LanguageModelConfig(
    vocab_size=17,
    model_dim=MODEL,
    num_layers=5,
    num_heads=2,
    num_kv_heads=1,
    layer_pattern=("dense", "sparse", "sparse"),
    hidden_dim=8,
    num_experts=EXPERTS,
    expert_hidden_dim=4,
    router="sigmoid",
)


X = jax.random.normal(jax.random.key(0), (12, MODEL))


def random_variables(module, *args, **kwargs):
    """Numbers of the right shapes, without compiling the module's own initialisation."""
    shapes = jax.eval_shape(lambda: module.init(jax.random.key(0), *args, **kwargs))
    rng = np.random.default_rng(7)
    return jax.tree.map(
        lambda leaf: jnp.asarray(0.5 * rng.normal(size=leaf.shape), leaf.dtype), shapes
    )


@pytest.mark.parametrize(
    ("router", "options"),
    [
        ("top_k", {}),
        ("top_k", {"gate": "cosine"}),
        ("top_k", {"gate": "hidden_layer"}),
        ("top_k", {"gate": "random"}),
        ("noisy_top_k", {}),
        ("sigmoid", {}),
        ("expert_choice", {}),
    ],
)
def test_layer_computes_the_same_with_its_experts_permuted(router, options):
    layer = SparseMoE(EXPERTS, 2, 4, num_shared_experts=1, router=router, router_options=options)
    variables = random_variables(layer, X)
    run = jax.jit(lambda variables: layer.apply(variables, X))
    permutation = np.random.default_rng(0).permutation(EXPERTS)
    moved = permute_experts(variables, permutation)
    out, routing = run(variables)
    moved_out, moved_routing = run(moved)
    np.testing.assert_allclose(moved_out, out, atol=1e-6)
    np.testing.assert_array_equal(
        routing_metrics(moved_routing).counts, routing_metrics(routing).counts[permutation]
    )
    # So that the test could fail: the permutation moves something.
    assert not np.array_equal(
        moved["params"]["experts"]["down"], variables["params"]["experts"]["down"]
    )
    inverse = permute_experts(moved, np.argsort(permutation))
    jax.tree.map(np.testing.assert_array_equal, inverse, variables)


@functools.cache
def language_model():
    model = LanguageModel(MODEL_CONFIG)
    tokens = jax.random.randint(jax.random.key(3), (2, 9), 0, 17)
    variables = random_variables(model, tokens)
    return variables, jax.jit(lambda variables: model.apply(variables, tokens))


@pytest.mark.parametrize("per_layer", [False, True])
def test_language_model_computes_the_same_with_each_layer_permuted(per_layer):
    variables, run = language_model()
    rng = np.random.default_rng(1)
    # Layers dense, sparse, sparse, dense, sparse: three sparse ones, in two blocks.
    rows = np.stack([rng.permutation(EXPERTS) for _ in range(3)])
    logits, routing = run(variables)
    moved = permute_experts(variables, rows if per_layer else rows[0])
    moved_logits, moved_routing = run(moved)
    np.testing.assert_allclose(moved_logits, logits, atol=1e-6 * float(jnp.abs(logits).max()))
    counts = routing_metrics(routing).counts
    rows = rows if per_layer else np.broadcast_to(rows[0], rows.shape)
    np.testing.assert_array_equal(
        routing_metrics(moved_routing).counts, np.take_along_axis(np.asarray(counts), rows, 1)
    )
    assert len({tuple(row) for row in np.asarray(counts).tolist()}) == 3


def test_optimiser_moments_move_with_their_parameters():
    layer = SparseMoE(EXPERTS, 2, 4)
    params = random_variables(layer, X)["params"]
    adam, *rest = optax.adam(0.1).init(params)
    rng = np.random.default_rng(6)
    mu = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype), params)
    state = (adam._replace(mu=mu, nu=jax.tree.map(jnp.square, mu)), *rest)
    permutation = np.random.default_rng(2).permutation(EXPERTS)
    moved = permute_experts(state, permutation)
    wanted = permute_experts({"mu": state[0].mu, "nu": state[0].nu}, permutation)
    jax.tree.map(np.testing.assert_array_equal, moved[0].mu, wanted["mu"])
    jax.tree.map(np.testing.assert_array_equal, moved[0].nu, wanted["nu"])
    assert not np.array_equal(moved[0].mu["experts"]["up"], state[0].mu["experts"]["up"])


def layer_params(**options):
    layer = SparseMoE(EXPERTS, 2, 4, **options)
    return random_variables(layer, X, token_ids=jnp.zeros(len(X), jnp.int32))["params"]


@pytest.mark.parametrize(
    ("make", "permutation", "message"),
    [
        (lambda: layer_params(), [0, 0, 1, 2, 3, 4], "no permutation"),
        (lambda: layer_params(), [1, 0], "has not 2 experts"),
        (lambda: layer_params(), [list(range(6))] * 2, "2 rows for 1 sparse layers"),
        (lambda: {"kernel": jnp.ones((2, 2))}, [1, 0], "no experts"),
        (lambda: layer_params(router="hash"), list(range(6)), "hash router"),
        (
            lambda: layer_params(router_options={"gate": "random"}),
            list(range(6)),
            "router_state",
        ),
    ],
)
def test_what_cannot_be_permuted_is_refused(make, permutation, message):
    with pytest.raises(ValueError, match=message):
        permute_experts(make(), np.array(permutation))
