import functools
import math

import flax.linen as nn
import hypothesis
import hypothesis.extra.numpy
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from moe_jax.core import Routing, SparseMoE, routing_metrics
from moe_jax.core.grouped_matmul import IMPLEMENTATIONS

TOKENS, MODEL, HIDDEN, EXPERTS, SELECTED = 7, 3, 4, 4, 2
EVERY_TOKEN = (True,) * TOKENS
# Float32 rounding; bfloat16 rounds weights, products and answers to 8 bits.
TOLERANCE = {jnp.float32: 1e-5, jnp.bfloat16: 2e-2}
BALANCE, Z = 0.3, 0.2
COTANGENT = np.array([1.0, -0.5, 0.25], np.float32)

every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def sparse_layer(**options):
    defaults = {
        "num_experts": EXPERTS,
        "num_selected": SELECTED,
        "hidden_dim": HIDDEN,
        "num_shared_experts": 2,
        "implementation": "loop",
    }
    return SparseMoE(**(defaults | options))


def random_params(num_experts=EXPERTS, num_shared_experts=2, seed=0):
    generator = np.random.default_rng(seed)

    def weights(*leading, hidden):
        shapes = {"gate": (MODEL, hidden), "up": (MODEL, hidden), "down": (hidden, MODEL)}
        return {name: generator.standard_normal(leading + end) for name, end in shapes.items()}

    params = {
        "router": {"gate": {"kernel": 2.0 * generator.standard_normal((MODEL, num_experts))}},
        "experts": weights(num_experts, hidden=HIDDEN),
    }
    if num_shared_experts:
        params["shared_experts"] = weights(hidden=num_shared_experts * HIDDEN)
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), params)


def random_tokens(num_tokens=TOKENS, seed=1, offset=0.0):
    tokens = np.random.default_rng(seed).standard_normal((num_tokens, MODEL)) + offset
    # Representable in bfloat16, so that the gate sees the same tokens whatever the type.
    return jnp.asarray(tokens, jnp.bfloat16).astype(jnp.float32)


def value_and_gradients(layer, params, x, mask, balance=BALANCE, z=Z):
    """Output, routing, and gradients of a sum of output, balance loss and z-loss."""
    return compiled(layer, params, x, mask, balance, z)


@functools.partial(jax.jit, static_argnums=0)
def compiled(layer, params, x, mask, balance, z):
    def objective(params, x):
        out, routing = layer.apply({"params": params}, x, mask)
        total = jnp.sum(jnp.where(jnp.isnan(out), 0.0, out).astype(jnp.float32) @ COTANGENT)
        losses = balance * routing.load_balance_loss + z * routing.router_z_loss
        return total + losses, (out, routing)

    gradients, (out, routing) = jax.grad(objective, argnums=(0, 1), has_aux=True)(params, x)
    return out, routing, gradients


def reference_ffn(activation, weights, x):
    z = x @ weights["gate"]
    if activation == "silu":
        activated = z / (1 + np.exp(-z))
    else:
        activated = z * (1 + np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))) / 2
    return (activated * (x @ weights["up"])) @ weights["down"]


def reference(layer, params, x, mask=EVERY_TOKEN):
    """Output and losses of the layer, one token and one expert at a time."""
    num_experts, num_selected = layer.num_experts, layer.num_selected
    out = np.zeros(x.shape, x.dtype)
    chosen, probabilities, z_losses = [], [], []
    for token in np.flatnonzero(mask):
        logits = x[token] @ params["router"]["gate"]["kernel"]
        shifted = np.exp(logits - logits.real.max())
        probability = shifted / shifted.sum()
        best = sorted(range(num_experts), key=lambda e: (-logits[e].real, e))[:num_selected]
        scale = (
            probability[best].sum()
            if layer.router_options.get("renormalize", True) and num_selected > 1
            else 1.0
        )
        for expert in best:
            weights = {name: leaf[expert] for name, leaf in params["experts"].items()}
            answer = reference_ffn(layer.activation, weights, x[token])
            out[token] += probability[expert] / scale * answer
        for shared in range(layer.num_shared_experts):
            part = slice(shared * HIDDEN, (shared + 1) * HIDDEN)
            weights = {
                name: leaf[part] if name == "down" else leaf[:, part]
                for name, leaf in params["shared_experts"].items()
            }
            out[token] += reference_ffn(layer.activation, weights, x[token])
        chosen += best
        probabilities.append(probability)
        z_losses.append((np.log(shifted.sum()) + logits.real.max()) ** 2)
    if not probabilities:
        return out, 0.0, 0.0
    load = np.bincount(chosen, minlength=num_experts) / len(chosen)
    return out, num_experts * load @ np.mean(probabilities, axis=0), np.mean(z_losses)


def reference_gradients(layer, params, x, mask=EVERY_TOKEN):
    """Complex-step derivative, Im f(x + i h) / h: exact to rounding and free of any formula.

    The reference is analytic but for max and sort, which look at real parts only.
    """
    leaves, structure = jax.tree.flatten((params, x))
    leaves = [np.asarray(leaf, np.complex128) for leaf in leaves]
    step, gradients = 1e-30, []
    for leaf in leaves:
        gradient = np.zeros(leaf.shape)
        for position in np.ndindex(leaf.shape):
            kept, leaf[position] = leaf[position], leaf[position] + 1j * step
            out, balance, z = reference(layer, *jax.tree.unflatten(structure, leaves), mask)
            objective = np.sum(out @ COTANGENT) + BALANCE * balance + Z * z
            gradient[position] = np.imag(objective) / step
            leaf[position] = kept
        gradients.append(gradient)
    return jax.tree.unflatten(structure, gradients)


def in_float64(tree):
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), tree)


def assert_close(actual, expected, tolerance):
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape
    assert np.linalg.norm(actual - expected) <= tolerance * np.linalg.norm(expected)


def assert_agrees(layer, params, x, mask=EVERY_TOKEN, gradients=True):
    tolerance = TOLERANCE[layer.dtype]
    out, routing, actual = value_and_gradients(layer, params, x, jnp.asarray(mask, bool))
    assert out.dtype == x.dtype
    wanted, balance, z = reference(layer, in_float64(params), in_float64(x), mask)
    assert_close(out, wanted, tolerance)
    assert_close(routing.load_balance_loss, balance, TOLERANCE[jnp.float32])
    assert_close(routing.router_z_loss, z, TOLERANCE[jnp.float32])
    if gradients:
        expected = reference_gradients(layer, params, x, mask)
        jax.tree.map(lambda a, b: assert_close(a, b, tolerance), actual, expected)


@every_implementation
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_agrees_with_a_slow_reference(implementation, dtype):
    layer = sparse_layer(implementation=implementation, dtype=dtype)
    assert_agrees(layer, random_params(), random_tokens())


@pytest.mark.parametrize(
    ("num_tokens", "options"),
    [
        (0, {}),
        (1, {"num_experts": 1, "num_selected": 1}),
        (1, {"num_selected": EXPERTS, "activation": "gelu"}),
        (5, {"num_selected": 1}),
        (3, {"num_selected": 2, "router_options": {"renormalize": False}}),
    ],
)
def test_agrees_with_a_slow_reference_at_the_limits(num_tokens, options):
    layer = sparse_layer(num_shared_experts=0, **options)
    params = random_params(layer.num_experts, 0)
    assert_agrees(layer, params, random_tokens(num_tokens), (True,) * num_tokens)


@every_implementation
@hypothesis.given(
    mask=hypothesis.extra.numpy.arrays(np.bool_, TOKENS),
    chosen=st.none() | st.integers(0, EXPERTS - 1),
    seed=st.integers(0, 2**16),
)
@hypothesis.example(mask=np.zeros(TOKENS, bool), chosen=None, seed=0)
@hypothesis.example(mask=np.ones(TOKENS, bool), chosen=0, seed=0)
@hypothesis.example(mask=np.arange(TOKENS) < 4, chosen=None, seed=0)
@hypothesis.example(mask=np.arange(TOKENS) >= 4, chosen=None, seed=0)
@hypothesis.settings(max_examples=6)
def test_agrees_with_a_slow_reference_whatever_the_mask_and_the_load(
    implementation, mask, chosen, seed
):
    params, x = random_params(seed=seed), random_tokens(seed=seed, offset=3.0)
    if chosen is not None:
        # Tokens are mostly positive, so this column brings nearly all of them to one expert.
        gate = params["router"]["gate"]
        gate["kernel"] = gate["kernel"].at[:, chosen].set(3.0)
    assert_agrees(sparse_layer(implementation=implementation), params, x, mask)


@every_implementation
@pytest.mark.parametrize("padding", [100.0, jnp.nan, jnp.inf])
def test_masked_tokens_change_nothing_bit_for_bit_and_get_no_gradient(implementation, padding):
    layer, params, x = sparse_layer(implementation=implementation), random_params(), random_tokens()
    mask = jnp.array([True, False, True, True, False, False, True])
    clean = value_and_gradients(layer, params, x, mask)
    dirty = value_and_gradients(layer, params, jnp.where(mask[:, None], x, padding), mask)
    jax.tree.map(np.testing.assert_array_equal, dirty, clean)
    out, _, (param_gradients, x_gradient) = dirty
    assert not np.any(out[~mask]) and not np.any(x_gradient[~mask])
    assert all(np.any(leaf != 0.0) for leaf in jax.tree.leaves(param_gradients))


@every_implementation
def test_nan_in_one_token_stays_in_its_output(implementation):
    layer, params, x = sparse_layer(implementation=implementation), random_params(), random_tokens()
    everything = jnp.ones(TOKENS, bool)
    clean = value_and_gradients(layer, params, x, everything)[0]
    dirty = value_and_gradients(layer, params, x.at[2, 0].set(jnp.nan), everything)[0]
    assert np.all(np.isnan(dirty[2]))
    # The token may go to another expert and shift the rows of the others.
    np.testing.assert_allclose(np.delete(dirty, 2, 0), np.delete(clean, 2, 0), rtol=1e-5, atol=1e-6)


@every_implementation
def test_permuting_tokens_permutes_outputs(implementation):
    layer, params, x = sparse_layer(implementation=implementation), random_params(), random_tokens()
    everything, order = jnp.ones(TOKENS, bool), jnp.array([3, 6, 0, 5, 1, 4, 2])
    out, routing, gradients = value_and_gradients(layer, params, x, everything)
    permuted = value_and_gradients(layer, params, x[order], everything)
    np.testing.assert_array_equal(permuted[1].expert_index, routing.expert_index[order])
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5),
        (permuted[0], permuted[2]),
        (out[order], (gradients[0], gradients[1][order])),
    )


def test_experts_that_agree_make_one_feed_forward_network_of_the_layer():
    # The weights sum to 1, so where the experts say the same the gate has no say.
    params, x = random_params(), random_tokens()
    params["experts"] = jax.tree.map(
        lambda leaf: jnp.broadcast_to(leaf[:1], leaf.shape), params["experts"]
    )
    out, _, _ = value_and_gradients(sparse_layer(), params, x, jnp.ones(TOKENS, bool))
    alone = {name: leaf[0] for name, leaf in params["experts"].items()}
    expected = sum(
        reference_ffn("silu", in_float64(weights), in_float64(x))
        for weights in (alone, params["shared_experts"])
    )
    assert_close(out, expected, TOLERANCE[jnp.float32])


def test_leading_axes_are_batch_axes():
    layer, params, x = sparse_layer(), random_params(), random_tokens()
    mask = jnp.array([True, True, False, True, True, True, True])
    flat, flat_routing, _ = value_and_gradients(layer, params, x, mask)
    out, routing = jax.jit(layer.apply)(
        {"params": params}, x.reshape(1, TOKENS, 1, MODEL), mask.reshape(1, TOKENS, 1)
    )
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, (out.reshape(flat.shape), routing), (flat, flat_routing))
    one, one_routing = jax.eval_shape(layer.apply, {"params": params}, x[0], mask[0])
    assert one.shape == (MODEL,) and one_routing.keep.shape == (1, SELECTED)


def test_one_selected_expert_gives_the_gate_a_gradient_by_default():
    layer, params = sparse_layer(num_selected=1, num_shared_experts=0), random_params(EXPERTS, 0)
    _, _, (gradients, _) = value_and_gradients(
        layer, params, random_tokens(5), jnp.ones(5, bool), balance=0.0, z=0.0
    )
    assert np.linalg.norm(gradients["router"]["gate"]["kernel"]) > 1e-2


def test_the_type_of_the_products_changes_neither_the_gate_nor_the_type_of_the_output():
    params, x = random_params(), random_tokens() * 1.001
    exact, rounded = (
        value_and_gradients(sparse_layer(dtype=dtype), params, x, jnp.ones(TOKENS, bool))
        for dtype in (jnp.float32, jnp.bfloat16)
    )
    jax.tree.map(np.testing.assert_array_equal, exact[1], rounded[1])
    assert rounded[0].dtype == jnp.float32 and np.any(rounded[0] != exact[0])
    out, routing = jax.eval_shape(
        sparse_layer(dtype=jnp.bfloat16).apply, {"params": params}, x.astype(jnp.bfloat16)
    )
    assert out.dtype == jnp.bfloat16 and routing.gate_logits.dtype == jnp.float32
    for leaf in jax.tree.leaves(rounded[2][0]):
        assert leaf.dtype == jnp.float32


class Block(nn.Module):
    """What a model scans over: a residual layer that hands its routing out."""

    @nn.compact
    def __call__(self, x, _):
        out, routing = sparse_layer(num_shared_experts=0, name="moe")(x)
        return x + out, routing


def test_scan_and_remat_over_layers_equal_a_loop_over_them():
    depth, x = 2, random_tokens()
    each = [random_params(EXPERTS, 0, seed) for seed in range(depth)]
    stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)

    def scanned(stack):
        layers = nn.scan(
            nn.remat(Block),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=depth,
        )()
        return layers.apply({"params": {"moe": stack}}, x, None)

    def unrolled(stack):
        hidden, routings = x, []
        for number in range(depth):
            params = jax.tree.map(lambda leaf, i=number: leaf[i], stack)
            out, routing = sparse_layer(num_shared_experts=0).apply({"params": params}, hidden)
            hidden = hidden + out
            routings.append(routing)
        return hidden, jax.tree.map(lambda *leaves: jnp.stack(leaves), *routings)

    def objective(model, stack):
        out, routing = model(stack)
        losses = jnp.sum(routing.load_balance_loss) + jnp.sum(routing.router_z_loss)
        return jnp.sum(jnp.sin(out)) + losses, (out, routing)

    results = [
        jax.jit(jax.grad(functools.partial(objective, model), has_aux=True))(stack)
        for model in (scanned, unrolled)
    ]
    _, (_, routing) = results[0]
    assert isinstance(routing, Routing) and routing.load_balance_loss.shape == (depth,)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)
    jax.tree.map(close, *results)


def test_vmap_over_sequences_equals_one_at_a_time():
    layer, params = sparse_layer(), random_params()
    batch = jnp.stack([random_tokens(seed=seed) for seed in range(3)])
    mask = jnp.stack([jnp.arange(TOKENS) < length for length in (7, 4, 0)])
    together = jax.vmap(functools.partial(value_and_gradients, layer, params))(batch, mask)
    for number in range(3):
        alone = value_and_gradients(layer, params, batch[number], mask[number])
        jax.tree.map(
            lambda leaf, wanted, i=number: np.testing.assert_allclose(
                leaf[i], wanted, rtol=1e-4, atol=1e-5
            ),
            together,
            alone,
        )
    metrics = jax.jit(jax.vmap(routing_metrics))(together[1])
    np.testing.assert_allclose(np.sum(metrics.load, axis=1), [1.0, 1.0, 0.0], rtol=1e-6)


def test_every_parameter_is_float32_and_has_its_shape():
    layer = sparse_layer(dtype=jnp.bfloat16)
    shapes = jax.eval_shape(layer.init, jax.random.key(0), random_tokens())["params"]
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype.name), shapes) == jax.tree.map(
        lambda leaf: (leaf.shape, "float32"), random_params()
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_selected": 0}, "num_selected=0 must be at least 1"),
        ({"num_selected": 5}, "num_selected=5 exceeds num_experts=4"),
        ({"activation": "tanh"}, "activation='tanh' is not one of ('silu', 'gelu', 'relu')"),
        (
            {"implementation": "fast"},
            "implementation='fast' is not one of ('loop', 'ragged_dot', 'dense')",
        ),
    ],
)
def test_options_out_of_range_are_refused_before_anything_is_compiled(options, message):
    layer = sparse_layer(**options)
    with pytest.raises(ValueError) as error:
        jax.eval_shape(layer.init, jax.random.key(0), random_tokens())
    assert str(error.value) == message


@pytest.mark.parametrize("shape", [(3, 2), (6,), (1, 1), (2, 3, 1)])
def test_a_mask_of_another_shape_is_refused_even_if_it_could_be_flattened_to_fit(shape):
    x = random_tokens(6).reshape(2, 3, MODEL)
    # Outside the tests nothing checks annotations.
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        with pytest.raises(ValueError) as error:
            sparse_layer().apply({"params": random_params()}, x, jnp.ones(shape, bool))
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)
    assert str(error.value) == f"mask {shape} does not fit x (2, 3, 3): expected (2, 3)"
