import functools
import os
import subprocess
import sys
from pathlib import Path

import flax.errors
import flax.linen as nn
import hypothesis
import hypothesis.extra.numpy
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from moe_jax.core import (
    ROUTERS,
    Routing,
    SparseMoE,
    routing_metrics,
    update_balance_bias,
)
from moe_jax.core.grouped_matmul import IMPLEMENTATIONS
from tests.core import reference

TOKENS, MODEL, HIDDEN, EXPERTS, SELECTED = 7, 3, 4, 4, 2
EVERY_TOKEN = np.ones(TOKENS, bool)
EVERY_EXPERT = np.ones(EXPERTS, bool)
# Float32 rounding; bfloat16 rounds weights, products and answers to 8 bits.
TOLERANCE = {jnp.float32: 1e-5, jnp.bfloat16: 2e-2}
BALANCE, Z = 0.3, 0.2
COTANGENT = np.array([1.0, -0.5, 0.25], np.float32)
ITERATIONS = 5

GROUPS = {"num_groups": 2, "num_selected_groups": 1, "scale": 1.5}
LINEAR = {"gate": "linear", "gate_options": {}}
DROP = {"capacity_factor": 0.6}  # ceil(0.6 * 7 * 2 / 4) = 3 of at most 7
CASES = {
    "top_k": {"num_shared_experts": 2},
    "top_k plain capacity": DROP | {"gated": False, "activation": "gelu"},
    "top_k score capacity": DROP | {"capacity_priority": "score", "num_shared_experts": 1},
    "sigmoid groups capacity": DROP | {"router": "sigmoid", "router_options": GROUPS},
    "expert_choice": {"router": "expert_choice", "router_options": {"capacity_factor": 0.8}},
    "sinkhorn capacity": DROP
    | {"router": "sinkhorn", "router_options": {"num_iterations": ITERATIONS}},
    "dense capacity": {"router": "dense", "num_selected": EXPERTS, "capacity_factor": 0.5},
    "soft": {"router": "soft", "router_options": LINEAR | {"slots_per_expert": 2}},
    "soft cosine": {"router": "soft", "gated": False, "num_shared_experts": 1},
}
# In these what becomes of a token depends on the others, capacity aside.
JOINT = ("expert_choice", "sinkhorn capacity", "soft", "soft cosine")

every_case = pytest.mark.parametrize("name", CASES)
every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def sparse_layer(**options):
    defaults = {"num_experts": EXPERTS, "num_selected": SELECTED, "hidden_dim": HIDDEN}
    return SparseMoE(**(defaults | options))


def make(name, **options):
    return sparse_layer(**(CASES[name] | options))


def random_variables(layer, seed=0):
    """Standard normal parameters, whatever the layer would start from, and a bias if it has one."""
    keys = {"params": jax.random.key(0), "router": jax.random.key(0)}
    shapes = jax.eval_shape(layer.init, keys, jnp.zeros((2, MODEL)))
    generator = np.random.default_rng(seed)

    def fill(path, leaf):
        # A temperature near 1 keeps the cosine gate from choosing a single token.
        scale = 0.2 if "temperature" in str(path) or "balance_bias" in str(path) else 1.0
        return jnp.asarray(scale * generator.standard_normal(leaf.shape), leaf.dtype)

    return jax.tree_util.tree_map_with_path(fill, shapes)


def random_tokens(num_tokens=TOKENS, seed=1, offset=0.0):
    tokens = np.random.default_rng(seed).standard_normal((num_tokens, MODEL)) + offset
    # Representable in bfloat16, so that the gate sees the same tokens whatever the type.
    return jnp.asarray(tokens, jnp.bfloat16).astype(jnp.float32)


def run(layer, variables, x, mask=None, expert_mask=None, balance=BALANCE, z=Z):
    """Output, routing, and gradients of a sum of output, balance loss and z-loss."""
    mask = np.ones(len(x), bool) if mask is None else mask
    expert_mask = np.ones(layer.num_experts, bool) if expert_mask is None else expert_mask
    masks = jnp.asarray(mask, bool), jnp.asarray(expert_mask, bool)
    return compiled(layer, variables, x, *masks, balance, z)


@functools.partial(jax.jit, static_argnums=0)
def compiled(layer, variables, x, mask, expert_mask, balance, z):
    state = {key: value for key, value in variables.items() if key != "params"}

    def objective(params, x):
        # Sinkhorn balances in training only; the other routers here draw nothing in either.
        out, routing = layer.apply(
            {**state, "params": params},
            x,
            mask,
            expert_mask=expert_mask,
            deterministic=layer.router != "sinkhorn",
        )
        total = jnp.sum(jnp.where(jnp.isnan(out), 0.0, out).astype(jnp.float32) @ COTANGENT)
        losses = balance * routing.load_balance_loss + z * routing.router_z_loss
        return total + losses, (out, routing)

    params = variables.get("params", {})
    gradients, (out, routing) = jax.grad(objective, argnums=(0, 1), has_aux=True)(params, x)
    return out, routing, gradients


def assert_agrees(layer, variables, x, mask=None, expert_mask=None, gradients=True):
    mask = np.ones(len(x), bool) if mask is None else mask
    expert_mask = np.ones(layer.num_experts, bool) if expert_mask is None else expert_mask
    tolerance = TOLERANCE[layer.dtype]
    out, routing, actual = run(layer, variables, x, mask, expert_mask)
    assert out.dtype == x.dtype
    exact = reference.in_float64({"params": {}, "router_state": {}, **variables})
    state = exact["router_state"]

    def objective(params, x):
        results = reference.layer(layer, params, state, x, mask, expert_mask)
        return np.sum(results[0] @ COTANGENT) + BALANCE * results[3] + Z * results[4]

    exact_x = np.asarray(x, np.float64)
    wanted, choice, _, balance, z = reference.layer(
        layer, exact["params"], state, exact_x, mask, expert_mask
    )
    kept = reference.as_choice(routing.expert_index, routing.combine_weight, routing.keep)
    reference.assert_same_choice(kept, choice)
    reference.assert_close(out, wanted, tolerance)
    reference.assert_close(routing.load_balance_loss, balance, TOLERANCE[jnp.float32])
    reference.assert_close(routing.router_z_loss, z, TOLERANCE[jnp.float32])
    if gradients:
        expected = reference.gradients(objective, exact["params"], exact_x)
        assert jax.tree.structure(actual) == jax.tree.structure(expected)
        # Each leaf to within the tolerance of the largest, or rounding would decide on small ones.
        scale = max(np.linalg.norm(leaf) for leaf in jax.tree.leaves(expected))
        for got, exact_leaf in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
            error = np.linalg.norm(np.asarray(got, np.float64) - exact_leaf)
            size = max(np.linalg.norm(exact_leaf), 0.05 * scale)
            assert error <= 2 * tolerance * size


@every_case
def test_agrees_with_a_slow_reference(name):
    layer = make(name)
    variables, x = random_variables(layer), random_tokens()
    assert_agrees(layer, variables, x)
    mask, expert_mask = np.arange(TOKENS) != 2, np.arange(EXPERTS) != 1
    if name == "sigmoid groups capacity":
        # Where a group has fewer open experts than K, the load of the losses is not the choice.
        expert_mask = EVERY_EXPERT
    assert_agrees(layer, variables, x, mask, expert_mask)


@pytest.mark.parametrize("name", ["top_k", "expert_choice", "soft"])
def test_agrees_with_a_slow_reference_in_bfloat16(name):
    layer = make(name, dtype=jnp.bfloat16)
    assert_agrees(layer, random_variables(layer), random_tokens())


@pytest.mark.parametrize("implementation", [i for i in IMPLEMENTATIONS if i != "loop"])
@pytest.mark.parametrize("gated", [True, False])
def test_every_implementation_agrees_with_a_slow_reference(implementation, gated):
    layer = make("top_k", implementation=implementation, gated=gated)
    assert_agrees(layer, random_variables(layer), random_tokens(), np.arange(TOKENS) != 2)


@pytest.mark.parametrize(
    ("num_tokens", "options"),
    [
        (1, {"num_experts": 1, "num_selected": 1}),
        (1, {"num_selected": EXPERTS, "activation": "gelu"}),
        (5, {"num_selected": 1}),
        (3, {"num_experts": 8, "capacity_factor": 0.1}),
        (3, {"router_options": {"renormalize": False}, "capacity_factor": 2.0}),
    ],
)
def test_agrees_with_a_slow_reference_at_the_limits(num_tokens, options):
    layer = sparse_layer(**options)
    variables, x = random_variables(layer), random_tokens(num_tokens)
    if "router_options" in options:
        out, routing, _ = run(layer, variables, x)
        exact = reference.in_float64(variables["params"])
        logits = reference.scores(exact, np.asarray(x, np.float64))
        choice = reference.top_k(logits, SELECTED, renormalize=False)
        wanted, _ = reference.sparse_moe(exact, np.asarray(x, np.float64), choice)
        reference.assert_close(out, wanted, 1e-5)
        assert np.all(routing.keep)
    else:
        assert_agrees(layer, variables, x)


@hypothesis.given(
    mask=hypothesis.extra.numpy.arrays(np.bool_, TOKENS),
    chosen=st.none() | st.integers(0, EXPERTS - 1),
    seed=st.integers(0, 2**16),
)
@hypothesis.example(mask=np.zeros(TOKENS, bool), chosen=None, seed=0)
@hypothesis.example(mask=np.ones(TOKENS, bool), chosen=0, seed=0)
@hypothesis.example(mask=np.arange(TOKENS) < 4, chosen=None, seed=0)
@hypothesis.example(mask=np.arange(TOKENS) >= 4, chosen=None, seed=0)
@hypothesis.settings(max_examples=12)
def test_agrees_with_a_slow_reference_whatever_the_mask_and_the_load(mask, chosen, seed):
    for name in ("top_k", "top_k plain capacity"):
        layer = make(name)
        variables, x = random_variables(layer, seed), random_tokens(seed=seed, offset=3.0)
        if chosen is not None:
            # Tokens are mostly positive, so this column brings nearly all of them to one expert.
            gate = variables["params"]["router"]["gate"]
            gate["kernel"] = gate["kernel"].at[:, chosen].set(3.0)
        assert_agrees(layer, variables, x, mask, gradients=seed % 4 == 0)


@every_case
def test_masked_tokens_change_nothing_bit_for_bit_and_get_no_gradient(name):
    layer = make(name)
    variables, x = random_variables(layer), random_tokens()
    for mask in (np.arange(TOKENS) < 4, np.arange(TOKENS) >= 3, np.arange(TOKENS) % 2 == 0):
        clean = run(layer, variables, x, mask)
        for padding in (100.0, jnp.nan, jnp.inf):
            dirty = run(layer, variables, jnp.where(mask[:, None], x, padding), mask)
            jax.tree.map(np.testing.assert_array_equal, dirty, clean)
        out, routing, (_, x_gradient) = clean
        assert not np.any(out[~mask]) and not np.any(x_gradient[~mask])
        assert not np.any(routing.keep[~mask])


@every_case
def test_nan_in_one_token_stays_in_its_output(name):
    layer = make(name)
    variables, x = random_variables(layer), random_tokens()
    for bad in (jnp.nan, jnp.inf):
        out, routing, _ = run(layer, variables, x.at[2, 0].set(bad))
        others = np.delete(out, 2, 0)
        assert np.all(np.isfinite(others))
        if name == "top_k":
            # The token may go to another expert and shift the rows of the others.
            clean = run(layer, variables, x)[0]
            np.testing.assert_allclose(others, np.delete(clean, 2, 0), rtol=1e-5, atol=1e-6)
            assert not np.all(np.isfinite(out[2]))
        elif name in JOINT and "capacity" not in name:
            # It takes part in no plan, no slot and no expert's choice.
            masked = run(layer, variables, x, np.arange(TOKENS) != 2)[0]
            np.testing.assert_allclose(others, np.delete(masked, 2, 0), rtol=1e-5, atol=1e-6)


@every_case
def test_with_few_or_no_experts_open_everything_is_finite(name):
    layer = make(name)
    variables, x = random_variables(layer), random_tokens()
    alone, _, _ = run(layer, variables, x, None, np.arange(EXPERTS) == 2)
    count = compiled._cache_size()
    for opened in ([], [2], [1, 3]):
        expert_mask = np.isin(np.arange(EXPERTS), opened)
        out, routing, gradients = run(layer, variables, x, None, expert_mask)
        for leaf in jax.tree.leaves((out, routing.combine_weight, gradients)):
            assert np.all(np.isfinite(leaf))
        experts = gradients[0]["experts"]
        for leaf in jax.tree.leaves(experts):
            assert not np.any(leaf[~expert_mask])
        assert np.all(expert_mask[np.asarray(routing.expert_index)[np.asarray(routing.keep)]])
        if not opened and not layer.num_shared_experts:
            # The logits have a z-loss all the same.
            without_losses = run(layer, variables, x, None, expert_mask, 0.0, 0.0)[2]
            assert not np.any(out) and not np.any(without_losses[1])
    # Closing experts is data: nothing is compiled anew.
    assert compiled._cache_size() == count
    assert np.any(alone)


def test_experts_that_agree_make_one_feed_forward_network_of_the_layer():
    # The weights sum to 1, so where the experts say the same the gate has no say.
    layer = make("top_k")
    variables, x = random_variables(layer), random_tokens()
    params = variables["params"]
    params["experts"] = jax.tree.map(
        lambda leaf: jnp.broadcast_to(leaf[:1], leaf.shape), params["experts"]
    )
    out, _, _ = run(layer, variables, x)
    exact = reference.in_float64(params)
    alone = {name: leaf[0] for name, leaf in exact["experts"].items()}
    expected = sum(
        reference.feed_forward("silu", weights, np.asarray(x, np.float64))
        for weights in (alone, exact["shared_experts"])
    )
    reference.assert_close(out, expected, TOLERANCE[jnp.float32])


@pytest.mark.parametrize("name", ["top_k", "top_k score capacity", "expert_choice"])
def test_capture_gives_the_norm_of_each_answer(name):
    layer = make(name)
    variables, x = random_variables(layer), random_tokens()
    mask = np.arange(TOKENS) != 1
    apply = jax.jit(functools.partial(layer.apply, capture=True))
    out, routing = apply(variables, x, jnp.asarray(mask))
    plain, silent, _ = run(layer, variables, x, mask)
    np.testing.assert_allclose(out, plain, rtol=1e-5, atol=1e-6)
    assert silent.output_norm is None
    exact = reference.in_float64(variables["params"])
    norms = reference.layer(layer, exact, {}, np.asarray(x, np.float64), mask, EVERY_EXPERT)[2]
    actual = reference.as_choice(routing.expert_index, routing.output_norm, routing.keep)
    reference.assert_same_choice(actual, norms)
    assert not np.any(np.asarray(routing.output_norm)[~np.asarray(routing.keep)])


def test_capture_of_a_soft_layer_gives_the_norm_of_the_mean_answer_of_each_expert():
    layer = make("soft")
    variables, x = random_variables(layer), random_tokens()
    _, routing = jax.jit(functools.partial(layer.apply, capture=True))(variables, x)
    exact, exact_x = reference.in_float64(variables["params"]), np.asarray(x, np.float64)
    dispatch, combine = reference.soft_weights(reference.scores(exact, exact_x), EXPERTS)
    for token in range(TOKENS):
        for expert in range(EXPERTS):
            weights = reference.expert_weights(exact, expert)
            added = sum(
                combine[token, slot]
                * reference.feed_forward("silu", weights, dispatch[:, slot] @ exact_x)
                for slot in (2 * expert, 2 * expert + 1)
            )
            wanted = np.linalg.norm(added) / combine[token, 2 * expert : 2 * expert + 2].sum()
            assert routing.output_norm[token, expert] == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("name", ["top_k", "expert_choice", "soft"])
def test_leading_axes_are_batch_axes(name):
    layer = make(name)
    variables, x = random_variables(layer), random_tokens()
    mask = np.array([True, True, False, True, True, True, True])
    flat, flat_routing, _ = run(layer, variables, x, mask)
    shape = (1, TOKENS, 1) if name != "soft" else (1, 1, TOKENS)
    out, routing = jax.jit(layer.apply)(
        variables, x.reshape(*shape, MODEL), jnp.asarray(mask.reshape(shape))
    )
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, (out.reshape(flat.shape), routing), (flat, flat_routing))
    one, one_routing = jax.eval_shape(layer.apply, variables, x[0], jnp.asarray(mask[0]))
    assert one.shape == (MODEL,) and one_routing.keep.shape[0] == 1


def test_a_soft_layer_keeps_sequences_apart_and_its_losses_count_tokens():
    layer = make("soft")
    variables, x = random_variables(layer), random_tokens(6)
    mask = jnp.array([[True, True, True], [True, False, False], [False, False, False]])
    sequences = jnp.concatenate([x, jnp.full((3, MODEL), jnp.nan)]).reshape(3, 3, MODEL)
    out, routing = jax.jit(layer.apply)(variables, sequences, mask)
    z = []
    for number in range(2):
        alone, alone_routing = jax.jit(layer.apply)(variables, sequences[number], mask[number])
        np.testing.assert_allclose(out[number], alone, rtol=1e-5, atol=1e-6)
        z.append(alone_routing.router_z_loss)
    assert not np.any(out[2])
    # Three tokens of the first sequence, one of the second, none of the third.
    assert routing.router_z_loss == pytest.approx(float(3 * z[0] + z[1]) / 4, rel=1e-5)
    assert routing.load_balance_loss == pytest.approx(1.0, rel=1e-6)


def test_the_type_of_the_products_changes_neither_the_gate_nor_the_type_of_the_output():
    layer, narrow = make("top_k"), make("top_k", dtype=jnp.bfloat16)
    variables, x = random_variables(layer), random_tokens() * 1.001
    exact, rounded = (run(each, variables, x) for each in (layer, narrow))
    jax.tree.map(np.testing.assert_array_equal, exact[1], rounded[1])
    assert rounded[0].dtype == jnp.float32 and np.any(rounded[0] != exact[0])
    out, routing = jax.eval_shape(narrow.apply, variables, x.astype(jnp.bfloat16))
    assert out.dtype == jnp.bfloat16 and routing.gate_logits.dtype == jnp.float32
    for leaf in jax.tree.leaves(rounded[2][0]):
        assert leaf.dtype == jnp.float32


@functools.partial(jax.jit, static_argnums=0)
def apply_with_dropout(layer, variables, x, key):
    rngs = {"dropout": key, "router": key}
    return layer.apply(variables, x, rngs=rngs, deterministic=False)[0]


def test_dropout_keeps_the_mean_and_acts_in_training_only():
    # With one expert, a linear network and weight 1 the mean over masks is the plain answer.
    layer = sparse_layer(
        num_experts=1, num_selected=1, dropout_rate=0.25, gated=False, activation="relu"
    )
    variables, x = random_variables(layer), random_tokens(2)
    keys = jax.random.split(jax.random.key(0), 4000)
    draws = jax.vmap(lambda key: apply_with_dropout(layer, variables, x, key))(keys)
    still = layer.apply(variables, x)[0]
    # Five standard deviations of the mean of 4000 draws: false alarm 6e-7 an entry.
    error = np.abs(np.mean(draws, axis=0) - still)
    assert np.all(error <= 5 * np.std(draws, axis=0) / np.sqrt(4000) + 1e-6)
    with pytest.raises(flax.errors.InvalidRngError):
        layer.apply(variables, x, deterministic=False)


class Block(nn.Module):
    """What a model scans over: a residual layer that hands its routing out."""

    router: str = "sigmoid"

    @nn.compact
    def __call__(self, x, _):
        out, routing = sparse_layer(router=self.router, name="moe")(x)
        return x + out, routing


def test_scan_and_remat_over_layers_equal_a_loop_over_them():
    depth, x = 2, random_tokens()
    layer = sparse_layer(router="sigmoid")
    each = [random_variables(layer, seed) for seed in range(depth)]
    stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)

    def scanned(params):
        layers = nn.scan(
            nn.remat(Block),
            variable_axes={"params": 0, "router_state": 0},
            split_rngs={"params": True},
            length=depth,
        )()
        variables = {"params": {"moe": params}, "router_state": {"moe": stack["router_state"]}}
        return layers.apply(variables, x, None)

    def unrolled(params):
        hidden, routings = x, []
        for number in range(depth):
            variables = {**stack, "params": params}
            variables = jax.tree.map(lambda leaf, i=number: leaf[i], variables)
            out, routing = layer.apply(variables, hidden)
            hidden = hidden + out
            routings.append(routing)
        return hidden, jax.tree.map(lambda *leaves: jnp.stack(leaves), *routings)

    def objective(model, params):
        out, routing = model(params)
        losses = jnp.sum(routing.load_balance_loss) + jnp.sum(routing.router_z_loss)
        return jnp.sum(jnp.sin(out)) + losses, (out, routing)

    results = [
        jax.jit(jax.grad(functools.partial(objective, model), has_aux=True))(stack["params"])
        for model in (scanned, unrolled)
    ]
    _, (_, routing) = results[0]
    assert isinstance(routing, Routing) and routing.load_balance_loss.shape == (depth,)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    jax.tree.map(close, *results)
    # One metric and one bias update a layer.
    bias = stack["router_state"]["router"]["balance_bias"]
    moved = update_balance_bias(bias, routing_metrics(routing).load)
    assert moved.shape == (depth, EXPERTS) and np.all(np.any(moved != bias, axis=1))


def test_vmap_over_sequences_equals_one_at_a_time():
    layer = make("top_k plain capacity")
    variables = random_variables(layer)
    batch = jnp.stack([random_tokens(seed=seed) for seed in range(3)])
    mask = jnp.stack([jnp.arange(TOKENS) < length for length in (7, 4, 0)])
    together = jax.vmap(functools.partial(run, layer, variables))(batch, mask)
    for number in range(3):
        alone = run(layer, variables, batch[number], mask[number])
        jax.tree.map(
            lambda leaf, wanted, i=number: np.testing.assert_allclose(
                leaf[i], wanted, rtol=1e-4, atol=1e-5
            ),
            together,
            alone,
        )
    metrics = jax.jit(routing_metrics)(together[1])
    np.testing.assert_allclose(np.sum(metrics.load, axis=1), [1.0, 1.0, 0.0], rtol=1e-6)


def test_eight_devices_under_shard_map_give_the_losses_metrics_and_gradients_of_one():
    root = Path(__file__).parents[2]
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "PYTHONPATH": str(root),
    }
    command = [sys.executable, str(Path(__file__).with_name("on_eight_devices.py"))]
    result = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, timeout=600
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.split() == ["losses", "metrics", "layer", "soft", "noise"]


def test_every_parameter_is_float32_and_has_its_shape():
    layer = make("top_k", dtype=jnp.bfloat16)
    keys = jax.random.key(0)
    shapes = jax.eval_shape(layer.init, keys, random_tokens())
    ffn = {"gate": (MODEL, HIDDEN), "up": (MODEL, HIDDEN), "down": (HIDDEN, MODEL)}
    wide = {"gate": (MODEL, 8), "up": (MODEL, 8), "down": (8, MODEL)}
    assert jax.tree.map(lambda leaf: leaf.shape, shapes) == {
        "params": {
            "router": {"gate": {"kernel": (MODEL, EXPERTS)}},
            "experts": {name: (EXPERTS, *shape) for name, shape in ffn.items()},
            "shared_experts": wide,
        }
    }
    assert {leaf.dtype.name for leaf in jax.tree.leaves(shapes)} == {"float32"}
    plain = jax.eval_shape(make("top_k", gated=False).init, keys, random_tokens())["params"]
    assert set(plain["experts"]) == {"up", "down"} == set(plain["shared_experts"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_selected": 0}, "num_selected=0 must be at least 1"),
        ({"num_selected": 5}, "num_selected=5 exceeds num_experts=4"),
        ({"activation": "tanh"}, "activation='tanh' is not one of ('silu', 'gelu', 'relu')"),
        ({"implementation": "fast"}, f"implementation='fast' is not one of {IMPLEMENTATIONS}"),
        (
            {"router": "soft", "router_options": {"num_experts": 3}},
            "router_options of 'soft': 'num_experts' is not one of ['axis_names', 'gate', "
            "'gate_options', 'jitter', 'slots_per_expert']",
        ),
        # Even where there is no limit that it could rank for.
        (
            {"capacity_priority": "first"},
            "capacity_priority='first' is not one of ('position', 'score')",
        ),
        (
            {"capacity_factor": 1.0, "router": "soft"},
            "capacity_factor=1.0 does not apply to router='soft'",
        ),
        ({"router": "hash"}, "token_ids None does not fit: expected (7,)"),
        ({"hidden_dim": 0}, "hidden_dim=0 must be at least 1"),
        ({"dtype": jnp.int32}, "dtype=int32 is not a floating-point type"),
        (
            {"router_options": {"gate": "cosine", "gate_options": {"projection_dim": 0}}},
            "projection_dim=0 must be at least 1",
        ),
        (
            {"router_options": {"gate": "hidden_layer", "gate_options": {"hidden_dim": 0}}},
            "hidden_dim=0 must be at least 1",
        ),
    ],
)
def test_options_out_of_range_are_refused_before_anything_is_compiled(options, message):
    layer = sparse_layer(**options)
    with pytest.raises(ValueError) as error:
        jax.eval_shape(layer.init, jax.random.key(0), random_tokens())
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mask": (3, 2)}, "mask (3, 2) does not fit x (2, 3, 3): expected (2, 3)"),
        ({"mask": (6,)}, "mask (6,) does not fit x (2, 3, 3): expected (2, 3)"),
        ({"mask": (2, 3, 1)}, "mask (2, 3, 1) does not fit x (2, 3, 3): expected (2, 3)"),
        ({"token_ids": (6,)}, "token_ids (6,) does not fit x (2, 3, 3): expected (2, 3)"),
        ({"expert_mask": (5,)}, "expert_mask (5,) does not fit: expected (4,)"),
    ],
)
def test_a_mask_of_another_shape_is_refused_even_if_it_could_be_flattened_to_fit(
    arguments, message
):
    x, layer = random_tokens(6).reshape(2, 3, MODEL), sparse_layer()
    types = {"mask": bool, "token_ids": jnp.int32, "expert_mask": bool}
    arrays = {name: jnp.ones(shape, types[name]) for name, shape in arguments.items()}
    assert refusal(lambda: layer.apply(random_variables(layer), x, **arrays)) == message


@pytest.mark.parametrize(
    ("x", "mask", "message"),
    [
        (jnp.ones((), jnp.float32), None, "x () of type float32: expected floats"),
        (jnp.ones((2, 0)), None, "x (2, 0) of type float32: expected floats"),
        (jnp.ones((2, MODEL)), jnp.ones(2), "mask has type float32; expected bool"),
    ],
)
def test_inputs_of_another_type_are_refused(x, mask, message):
    layer = sparse_layer()
    got = refusal(lambda: layer.apply(random_variables(layer), x, mask))
    assert got.startswith(message)


def test_token_ids_that_are_no_integers_are_refused():
    layer = sparse_layer(router="hash")
    ids = jnp.ones(2, jnp.float32)
    got = refusal(
        lambda: layer.apply(random_variables(make("top_k")), jnp.ones((2, 3)), token_ids=ids)
    )
    assert got == "token_ids has type float32; expected integers"


def test_numpy_arrays_and_lists_do_as_jax_arrays_do():
    layer = make("top_k")
    variables = random_variables(layer)
    x, mask, opened = random_tokens(), EVERY_TOKEN.copy(), EVERY_EXPERT.copy()
    mask[2] = opened[1] = False
    want, _ = layer.apply(variables, x, jnp.asarray(mask), expert_mask=jnp.asarray(opened))
    for array in (np.asarray, np.ndarray.tolist):
        jaxtyping.config.update("jaxtyping_disable", True)
        try:
            values = (array(mask), array(opened))
            got, _ = layer.apply(variables, np.asarray(x), values[0], expert_mask=values[1])
        finally:
            jaxtyping.config.update("jaxtyping_disable", False)
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("router", ROUTERS)
def test_of_float64_tokens_every_router_makes_float64_in_training_too(router):
    """Strict promotion, on in all tests, refuses to mix the two types anywhere on the way."""
    options = {} if router == "hash" else {"jitter": 0.1}
    layer = sparse_layer(
        router=router,
        num_selected=EXPERTS if router == "dense" else SELECTED,
        router_options=options,
        dropout_rate=0.1,
        dtype=jnp.float64,
    )
    keys = {name: jax.random.key(0) for name in ("params", "router", "dropout")}

    def train(x, ids):
        variables = layer.init(keys, x, token_ids=ids)
        return layer.apply(
            variables, x, token_ids=ids, deterministic=False, capture=True, rngs=keys
        )

    with jax.enable_x64(True):
        for shape in ((2, 3, MODEL), (2, 0, MODEL), (0, 3, MODEL)):
            x = jax.ShapeDtypeStruct(shape, jnp.float64)
            ids = jax.ShapeDtypeStruct(shape[:-1], jnp.int64)
            out, routing = jax.eval_shape(train, x, ids)
            assert (out.shape, out.dtype) == (shape, jnp.float64)
            assert routing.combine_weight.dtype == (jnp.float32 if router == "hash" else out.dtype)


def refusal(function):
    """The message of the ValueError that a user sees, for whom nothing checks annotations."""
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        with pytest.raises(ValueError) as error:
            function()
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
    return str(error.value)
