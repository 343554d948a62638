import dataclasses
import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from moe_jax.language.config import LanguageModelConfig
from moe_jax.language.model import LanguageModel, layer_runs

SPARSE = LanguageModelConfig(
    vocab_size=32,
    model_dim=16,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    layer_pattern=("sparse",),
    hidden_dim=24,
    num_experts=4,
    num_selected=2,
    expert_hidden_dim=12,
)
DENSE = dataclasses.replace(SPARSE, layer_pattern=("dense",))
MIXED = dataclasses.replace(SPARSE, layer_pattern=("dense", "sparse", "sparse"), num_layers=3)
TOKENS = np.random.default_rng(0).integers(0, 32, (2, 12)).astype(np.int32)
DOCUMENTS = np.array([[1] * 5 + [2] * 4 + [0] * 3, [1] * 12], np.int32)
POSITIONS = np.array([[*range(5), *range(4), 0, 0, 0], [*range(12)]], np.int32)
ALONG_THE_ROW = np.arange(12, dtype=np.int32)[None].repeat(2, axis=0)
# Compilation is most of the time here, and what is compiled runs once or twice.
COMPILER = {"compiler_options": {"xla_backend_optimization_level": 0}}

dense_and_mixed = pytest.mark.parametrize("config", [DENSE, MIXED], ids=["dense", "mixed"])


def shapes(config):
    inputs = jax.random.key(0), jnp.asarray(TOKENS)
    return jax.eval_shape(LanguageModel(config).init, *inputs)["params"]


@functools.cache
def random_params(config):
    """Parameters of the usual sizes from numpy; compiling their initialisers takes seconds."""
    rng = np.random.default_rng(1)

    def draw(path, leaf):
        if path[-1].key == "scale":
            return rng.uniform(0.8, 1.2, leaf.shape).astype(np.float32)
        fan_in = 1 if path[-1].key == "embedding" else leaf.shape[-2]
        return (rng.normal(size=leaf.shape) * fan_in**-0.5).astype(np.float32)

    return jax.tree.map(jnp.asarray, jax.tree_util.tree_map_with_path(draw, shapes(config)))


def initialised(config):
    return jax.jit(LanguageModel(config).init, **COMPILER)(jax.random.key(0), TOKENS)["params"]


@functools.cache
def apply(config):
    """Compiled (params, tokens, segment_ids, positions) -> (logits, routing)."""
    model = LanguageModel(config)
    return jax.jit(lambda params, *inputs: model.apply({"params": params}, *inputs), **COMPILER)


@functools.cache
def loss_gradient(config):
    """Compiled params -> (loss, gradient) over the packed documents."""
    model = LanguageModel(config)
    inputs = [jnp.asarray(array) for array in (TOKENS, DOCUMENTS, POSITIONS)]

    @jax.value_and_grad
    def function(params):
        logits, routing = model.apply({"params": params}, *inputs)
        losses = -jax.nn.log_softmax(logits)[..., 0]
        loss = jnp.sum(jnp.where(inputs[1] > 0, losses, 0.0))
        return loss if routing is None else loss + jnp.sum(routing.load_balance_loss)

    return jax.jit(function, **COMPILER).lower(shapes(config)).compile()


def assert_trees_close(first, second, **tolerance):
    assert jax.tree.structure(first) == jax.tree.structure(second)
    for (path, left), right in zip(
        jax.tree_util.tree_leaves_with_path(first), jax.tree.leaves(second), strict=True
    ):
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(left, right, err_msg=name, **tolerance)


@pytest.mark.parametrize(
    ("kinds", "runs"),
    [
        ("s", [("s", 1)]),
        ("ssss", [("s", 4)]),
        ("dsss", [("d", 1), ("s", 3)]),
        ("dsds", [("ds", 2)]),
        ("dsdsd", [("ds", 2), ("d", 1)]),
        ("dssdss", [("dss", 2)]),
        ("ssdssd", [("ssd", 2)]),
        ("ddss", [("d", 2), ("s", 2)]),
        ("dds", [("d", 2), ("s", 1)]),
    ],
)
def test_layer_runs_finds_the_longest_repetition(kinds, runs):
    assert [("".join(unit), repeats) for unit, repeats in layer_runs(tuple(kinds))] == runs


@hypothesis.given(st.lists(st.sampled_from(["dense", "sparse"]), min_size=1, max_size=14))
def test_layer_runs_expand_to_the_kinds(kinds):
    runs = layer_runs(tuple(kinds))
    assert [kind for unit, repeats in runs for kind in unit * repeats] == kinds
    assert all(repeats > 1 or len(unit) == 1 for unit, repeats in runs)


def test_parameters_have_their_names_and_shapes():
    every_layer = {
        "attention_norm": {"scale": (16,)},
        "attention": {
            "query": (16, 16),
            "key": (16, 8),
            "value": (16, 8),
            "out": (16, 16),
            "query_norm": {"scale": (8,)},
            "key_norm": {"scale": (8,)},
        },
        "feed_forward_norm": {"scale": (16,)},
    }
    dense = {"gate": (16, 24), "up": (16, 24), "down": (24, 16)}
    sparse = {
        "router": {"gate": {"kernel": (16, 4)}},
        "experts": {"gate": (4, 16, 12), "up": (4, 16, 12), "down": (4, 12, 16)},
        "shared_experts": {"gate": (16, 24), "up": (16, 24), "down": (24, 16)},
    }

    def stacked(repeats, tree):
        is_shape = lambda node: isinstance(node, tuple)  # noqa: E731
        return jax.tree.map(lambda shape: (repeats, *shape), tree, is_leaf=is_shape)

    params = shapes(dataclasses.replace(MIXED, num_shared_experts=2))
    assert jax.tree.map(lambda leaf: leaf.shape, params) == {
        "embedding": (32, 16),
        "blocks_0": stacked(1, {"layer_0": every_layer | {"feed_forward": dense}}),
        "blocks_1": stacked(2, {"layer_0": every_layer | {"moe": sparse}}),
        "final_norm": {"scale": (16,)},
        "head": (16, 32),
    }
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype("float32")}


def test_layers_of_a_period_are_numbered_within_it():
    params = shapes(dataclasses.replace(SPARSE, layer_pattern=("dense", "sparse"), num_layers=4))
    assert set(params) == {"embedding", "blocks_0", "final_norm", "head"}
    assert set(params["blocks_0"]) == {"layer_0", "layer_1"}
    assert params["blocks_0"]["layer_0"]["feed_forward"]["gate"].shape == (2, 16, 24)
    assert params["blocks_0"]["layer_1"]["moe"]["router"]["gate"]["kernel"].shape == (2, 16, 4)


def test_untrained_model_is_near_the_uniform_code_and_its_layers_differ():
    params = initialised(SPARSE)
    assert np.std(params["embedding"]) == pytest.approx(1.0, rel=0.1)
    query = params["blocks_0"]["layer_0"]["attention"]["query"]
    assert np.max(np.abs(query[0] - query[1])) > 0.1
    log_probability = jax.nn.log_softmax(apply(SPARSE)(params, TOKENS)[0])
    # Logits of variance 1 cost half a nat more than equal ones.
    assert 0.2 < -np.mean(log_probability) - np.log(32) < 0.8


@dense_and_mixed
def test_packed_documents_score_as_each_alone(config):
    params = random_params(config)
    packed, _ = apply(config)(params, TOKENS, DOCUMENTS, POSITIONS)
    for place in (slice(0, 5), slice(5, 9)):
        length = place.stop - place.start
        alone, segment_ids = np.zeros((2, 12), np.int32), np.zeros((2, 12), np.int32)
        alone[0, :length], segment_ids[0, :length] = TOKENS[0, place], 1
        logits, _ = apply(config)(params, alone, segment_ids, ALONG_THE_ROW)
        np.testing.assert_allclose(packed[0, place], logits[0, :length], atol=1e-5)


def test_without_segments_every_row_is_one_document():
    params = random_params(MIXED)
    logits, routing = apply(MIXED)(params, TOKENS)
    explicit, explicit_routing = apply(MIXED)(params, TOKENS, np.ones_like(TOKENS), ALONG_THE_ROW)
    np.testing.assert_allclose(logits, explicit, atol=1e-5)
    np.testing.assert_array_equal(routing.expert_index, explicit_routing.expert_index)


@dense_and_mixed
def test_later_tokens_change_no_logit(config):
    params = random_params(config)
    before, _ = apply(config)(params, TOKENS, DOCUMENTS, POSITIONS)
    changed = TOKENS.copy()
    changed[1, 7:] = (changed[1, 7:] + 1) % 32
    after, _ = apply(config)(params, changed, DOCUMENTS, POSITIONS)
    # Sorted by expert, a token may stand in another row of a product, whose sums may be reordered.
    np.testing.assert_allclose(before[1, :7], after[1, :7], atol=1e-5)
    assert np.max(np.abs(before[1, 7:] - after[1, 7:])) > 1e-2


@dense_and_mixed
def test_padding_changes_no_logit_and_no_loss_of_the_gate(config):
    params = random_params(config)
    before, routing_before = apply(config)(params, TOKENS, DOCUMENTS, POSITIONS)
    changed = TOKENS.copy()
    changed[0, 9:] = (changed[0, 9:] + 5) % 32
    after, routing_after = apply(config)(params, changed, DOCUMENTS, POSITIONS)
    real = DOCUMENTS > 0
    np.testing.assert_allclose(before[real], after[real], atol=1e-5)
    if config.num_sparse_layers:
        for name in ("load_balance_loss", "router_z_loss"):
            np.testing.assert_allclose(routing_before[name], routing_after[name], rtol=1e-6)
        assert not np.any(routing_before.keep[:, ~real.reshape(-1)])


def test_scan_and_unrolled_layers_agree_on_the_same_parameters():
    unrolled = dataclasses.replace(SPARSE, scan_layers=False)
    params = random_params(SPARSE)
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, shapes(unrolled))
    inputs = params, TOKENS, DOCUMENTS, POSITIONS
    assert_trees_close(apply(SPARSE)(*inputs), apply(unrolled)(*inputs), atol=1e-5)
    # Sums over 21 tokens.
    gradients = loss_gradient(SPARSE)(params), loss_gradient(unrolled)(params)
    assert_trees_close(*gradients, rtol=1e-4, atol=1e-4)


def test_scan_and_unrolled_layers_start_alike():
    config = dataclasses.replace(DENSE, qk_norm=False)
    unrolled = dataclasses.replace(config, scan_layers=False)
    assert_trees_close(initialised(config), initialised(unrolled), rtol=0)


def test_rematerialisation_changes_no_gradient_and_saves_memory():
    config = dataclasses.replace(DENSE, num_layers=6, hidden_dim=64)
    params = random_params(config)
    functions = {
        remat: loss_gradient(dataclasses.replace(config, remat=remat))
        for remat in ("none", "dots", "full")
    }
    expected = functions["none"](params)
    for remat in ("dots", "full"):
        assert_trees_close(functions[remat](params), expected, rtol=1e-4, atol=1e-4)
    none, dots, full = (
        function.memory_analysis().temp_size_in_bytes for function in functions.values()
    )
    assert full < dots < none


def test_rematerialisation_changes_no_gradient_of_a_sparse_model():
    params = random_params(SPARSE)
    remat = loss_gradient(dataclasses.replace(SPARSE, remat="full"))
    assert_trees_close(remat(params), loss_gradient(SPARSE)(params), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("pattern", "num_layers", "owners"),
    [
        (("dense", "sparse", "sparse"), 3, [2, 0]),
        (("sparse", "dense"), 4, [3, 1]),
        (("sparse", "dense", "sparse"), 6, [1, 3, 0, 2]),
    ],
    ids=["dss", "sdsd", "sdssds"],
)
def test_routing_is_stacked_in_the_order_of_the_layers(pattern, num_layers, owners):
    config = dataclasses.replace(
        SPARSE, layer_pattern=pattern, num_layers=num_layers, num_selected=1
    )
    params = jax.tree.map(np.array, random_params(config))
    # Feature 0 dominates every token after the norm, so that one row of a gate names its expert.
    params["embedding"][:, 0] = 100.0
    remaining = iter(owners)
    for index, (kinds, repeats) in enumerate(layer_runs(config.layer_kinds)):
        for repeat in range(repeats):
            for place, kind in enumerate(kinds):
                if kind == "sparse":
                    layer = params[f"blocks_{index}"][f"layer_{place}"]["moe"]
                    gate = layer["router"]["gate"]["kernel"]
                    gate[repeat, 0] = 10.0 * (np.arange(4) == next(remaining))
    _, routing = apply(config)(params, TOKENS)
    expected = np.array(owners)[:, None, None].repeat(TOKENS.size, axis=1)
    np.testing.assert_array_equal(routing.expert_index, expected)
    assert routing.gate_logits.shape == (len(owners), TOKENS.size, 4)
    assert routing.load_balance_loss.shape == (len(owners),)


def test_dense_model_has_no_routing():
    logits, routing = apply(DENSE)(random_params(DENSE), TOKENS)
    assert routing is None and logits.shape == (2, 12, 32)


def test_shared_experts_alone_are_a_dense_layer():
    # Two shared experts of width 12 side by side are one network of width 24, the dense layer's.
    config = dataclasses.replace(SPARSE, num_shared_experts=2)
    params = random_params(config)
    layer = params["blocks_0"]["layer_0"]
    moe = layer["moe"]
    silent = moe["experts"] | {"down": jnp.zeros_like(moe["experts"]["down"])}
    only_shared = layer | {"moe": moe | {"experts": silent}}
    dense = {name: leaf for name, leaf in layer.items() if name != "moe"}
    dense["feed_forward"] = moe["shared_experts"]

    def logits(config, layer):
        return apply(config)(params | {"blocks_0": {"layer_0": layer}}, TOKENS)[0]

    expected = logits(DENSE, dense)
    np.testing.assert_allclose(logits(config, only_shared), expected, atol=1e-5)
    assert np.max(np.abs(logits(config, layer) - expected)) > 1e-2


def test_tied_head_is_the_embedding():
    tied = dataclasses.replace(DENSE, tie_embeddings=True)
    params = random_params(tied)
    assert "head" not in params
    expected, _ = apply(DENSE)(params | {"head": params["embedding"].T}, TOKENS)
    np.testing.assert_allclose(apply(tied)(params, TOKENS)[0], expected, atol=1e-5)


def test_tied_embedding_starts_as_small_as_a_head():
    config = dataclasses.replace(DENSE, tie_embeddings=True, num_layers=1, qk_norm=False)
    assert np.std(initialised(config)["embedding"]) == pytest.approx(16**-0.5, rel=0.1)


def test_bfloat16_is_close_to_float32():
    # All experts selected, so that a rounded gate cannot send a token elsewhere.
    config = dataclasses.replace(SPARSE, num_selected=4)
    half = dataclasses.replace(config, dtype="bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(shapes(half))} == {np.dtype("float32")}
    params = random_params(config)
    logits, _ = apply(config)(params, TOKENS)
    half_logits, routing = apply(half)(params, TOKENS)
    assert half_logits.dtype == routing.gate_logits.dtype == jnp.float32
    # Operands keep 8 bits; logits are of order 1.
    error = np.abs(half_logits - logits)
    assert 1e-4 < np.max(error) < 0.1 and np.mean(error) < 0.02


def test_gradient_reaches_every_parameter():
    _, gradient = loss_gradient(MIXED)(random_params(MIXED))
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
        assert np.all(np.isfinite(leaf)) and np.any(leaf), jax.tree_util.keystr(path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((TOKENS[0],), r"tokens \(12,\) of type int32: expected ids \[batch, length\]"),
        ((TOKENS.astype(np.float32),), r"tokens \(2, 12\) of type float32: expected ids"),
        ((TOKENS[:, :0],), r"tokens \(2, 0\) of type int32: expected ids"),
        ((TOKENS, DOCUMENTS[:1]), r"segment_ids \(1, 12\) does not fit tokens \(2, 12\)"),
        ((TOKENS, DOCUMENTS, POSITIONS[0]), r"positions \(12,\) does not fit tokens \(2, 12\)"),
    ],
)
def test_input_that_does_not_fit_is_named(arguments, message):
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(LanguageModel(DENSE).init, jax.random.key(0), *arguments)
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
