import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.core import GATES, CosineGate, HiddenLayerGate, LinearGate, RandomGate
from tests.core import reference

MODEL, EXPERTS = 6, 5

every_gate = pytest.mark.parametrize("name", GATES)


def random_tokens(*shape, seed=0):
    shape = shape or (4, MODEL)
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def in_float64(tree):
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), tree)


def scores(gate, tokens, seed=0):
    variables = gate.init(jax.random.key(seed), tokens)
    return variables, jax.jit(gate.apply)(variables, tokens)


def test_linear_gate_is_a_product():
    variables, out = scores(LinearGate(EXPERTS), random_tokens())
    kernel = in_float64(variables["params"]["kernel"])
    np.testing.assert_allclose(out, in_float64(random_tokens()) @ kernel, rtol=1e-5, atol=1e-6)
    assert jax.tree.map(jnp.shape, variables) == {"params": {"kernel": (MODEL, EXPERTS)}}


def test_hidden_layer_gate_is_two_products_with_a_gelu_between():
    gate = HiddenLayerGate(EXPERTS, hidden_dim=7)
    variables, _ = scores(gate, random_tokens())
    # Biases start at 0; any other value shows where they stand.
    params = jax.tree.map(lambda leaf: leaf + 0.1, variables["params"])
    out = jax.jit(gate.apply)({"params": params}, random_tokens())
    hidden, last = in_float64(params["hidden"]), in_float64(params["out"])
    z = in_float64(random_tokens()) @ hidden["kernel"] + hidden["bias"]
    wanted = reference.activate("gelu", z) @ last["kernel"] + last["bias"]
    np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=1e-6)
    assert params["hidden"]["kernel"].shape == (MODEL, 7)


def test_a_hidden_layer_separates_what_no_linear_gate_can():
    # Exclusive or: with h = relu-like units, expert 1 wins on (1, -1) and (-1, 1) only.
    x = jnp.array([[3.0, 3.0], [-3.0, -3.0], [3.0, -3.0], [-3.0, 3.0]])
    hidden = jnp.array([[1.0, -1.0], [-1.0, 1.0]])
    params = {
        "hidden": {"kernel": hidden, "bias": jnp.zeros(2)},
        "out": {"kernel": jnp.array([[0.0, 1.0], [0.0, 1.0]]), "bias": jnp.array([3.0, 0.0])},
    }
    out = HiddenLayerGate(2, hidden_dim=2).apply({"params": params}, x)
    np.testing.assert_array_equal(np.argmax(out, axis=1), [0, 0, 1, 1])


@pytest.mark.parametrize("projection_dim", [None, 3, 256])
def test_cosine_gate_agrees_with_a_loop(projection_dim):
    gate = CosineGate(EXPERTS, projection_dim=projection_dim, temperature=0.5)
    variables, out = scores(gate, random_tokens())
    params = in_float64(variables["params"])
    wanted = reference.cosine_scores(params, in_float64(random_tokens()))
    np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=1e-5)
    width = MODEL if projection_dim is None else min(projection_dim, MODEL)
    assert ("projection" in params) == (projection_dim is not None)
    assert params["embedding"].shape == (width, EXPERTS)
    assert params["log_temperature"] == pytest.approx(math.log(0.5), rel=1e-6)


def test_cosine_scores_are_bounded_by_1_over_the_temperature_and_ignore_lengths():
    gate = CosineGate(EXPERTS, temperature=0.07)
    tokens = random_tokens(50, MODEL)
    variables, out = scores(gate, tokens)
    assert np.max(np.abs(out)) <= 1 / 0.07 * (1 + 1e-5)
    params = variables["params"]
    kernel = jnp.linalg.pinv(params["projection"])
    aligned = params["embedding"].T @ kernel
    best = gate.apply(variables, aligned)
    np.testing.assert_allclose(np.diag(best), 1 / 0.07, rtol=1e-4)
    longer = gate.apply(variables, 1000.0 * tokens)
    np.testing.assert_allclose(longer, out, rtol=1e-4, atol=1e-4)


def test_temperature_is_learned_but_never_below_its_bound():
    gate = CosineGate(EXPERTS, min_temperature=0.05, temperature=0.07)
    tokens = random_tokens()
    variables, _ = scores(gate, tokens)
    at = {}
    for temperature in (0.05, 0.001, 0.1, 0.2):
        params = {**variables["params"], "log_temperature": jnp.log(jnp.float32(temperature))}
        at[temperature] = gate.apply({"params": params}, tokens)
    np.testing.assert_allclose(at[0.001], at[0.05], rtol=1e-5)
    np.testing.assert_allclose(at[0.1], 2 * at[0.2], rtol=1e-5)

    def total(params):
        return jnp.sum(jnp.square(gate.apply({"params": params}, tokens)))

    gradient = jax.jit(jax.grad(total))(variables["params"])
    assert gradient["log_temperature"] < 0.0


def test_cosine_of_a_zero_vector_is_0_with_a_finite_gradient_and_nan_stays_nan():
    gate = CosineGate(EXPERTS)
    tokens = random_tokens().at[1].set(0.0)
    variables, out = scores(gate, tokens)
    assert not np.any(out[1])

    def total(tokens):
        return jnp.sum(jnp.sin(gate.apply(variables, tokens)))

    assert np.all(np.isfinite(jax.jit(jax.grad(total))(tokens)))
    spoilt = gate.apply(variables, tokens.at[2, 0].set(jnp.nan))
    assert np.all(np.isnan(spoilt[2])) and np.all(np.isfinite(np.delete(spoilt, 2, 0)))


@pytest.mark.parametrize(("temperature", "least"), [(0.001, 0.01), (0.07, 0.0), (0.07, -1.0)])
def test_temperatures_out_of_range_are_refused(temperature, least):
    gate = CosineGate(EXPERTS, temperature=temperature, min_temperature=least)
    with pytest.raises(ValueError) as error:
        jax.eval_shape(gate.init, jax.random.key(0), random_tokens())
    assert str(error.value) == (
        f"temperature={temperature} must be at least min_temperature={least} > 0"
    )


def test_random_gate_has_no_parameter_and_its_projection_no_gradient():
    gate, tokens = RandomGate(EXPERTS), random_tokens()
    variables, out = scores(gate, tokens)
    assert list(variables) == ["router_state"]
    kernel = variables["router_state"]["kernel"]
    np.testing.assert_allclose(out, in_float64(tokens) @ in_float64(kernel), rtol=1e-4, atol=1e-6)
    assert abs(float(jnp.std(kernel)) - 1 / math.sqrt(MODEL)) < 0.2

    def total(variables, tokens):
        return jnp.sum(jnp.sin(gate.apply(variables, tokens)))

    gradient, token_gradient = jax.jit(jax.grad(total, (0, 1)))(variables, tokens)
    assert not np.any(gradient["router_state"]["kernel"]) and np.any(token_gradient)
    _, again = gate.apply(variables, tokens, mutable=["router_state"])
    np.testing.assert_array_equal(again["router_state"]["kernel"], kernel)
    other = gate.init(jax.random.key(1), tokens)["router_state"]["kernel"]
    assert np.any(other != kernel)


@every_gate
def test_scores_are_float32_from_tokens_of_any_type_and_shape(name):
    gate, tokens = GATES[name](EXPERTS), random_tokens(2, 3, MODEL).astype(jnp.bfloat16)
    variables, out = scores(gate, tokens)
    exact = jax.jit(gate.apply)(variables, tokens.astype(jnp.float32))
    assert out.shape == (2, 3, EXPERTS) and out.dtype == jnp.float32
    np.testing.assert_allclose(out, exact, rtol=1e-6, atol=1e-6)
    one = gate.apply(variables, tokens[0, 1])
    np.testing.assert_allclose(one, out[0, 1], rtol=1e-5, atol=1e-5)
    for leaf in jax.tree.leaves(variables):
        assert leaf.dtype == jnp.float32


@every_gate
def test_gradients_agree_with_complex_steps_of_the_formula(name):
    if name == "random":
        pytest.skip("its formula is that of the linear gate; the parameter has no gradient")
    gate, tokens = GATES[name](EXPERTS), random_tokens(2, MODEL)
    if name == "hidden_layer":
        gate = HiddenLayerGate(EXPERTS, hidden_dim=3)
    if name == "cosine":
        gate = CosineGate(EXPERTS, projection_dim=3, temperature=0.5)
    params = gate.init(jax.random.key(0), tokens)["params"]

    def formula(params, tokens):
        if name == "linear":
            out = tokens @ params["kernel"]
        elif name == "cosine":
            out = reference.cosine_scores(params, tokens)
        else:
            z = tokens @ params["hidden"]["kernel"] + params["hidden"]["bias"]
            out = reference.activate("gelu", z) @ params["out"]["kernel"] + params["out"]["bias"]
        return np.sum(np.sin(out))

    def total(params, tokens):
        return jnp.sum(jnp.sin(gate.apply({"params": params}, tokens)))

    wanted = reference.gradients(formula, params, tokens)
    actual = jax.jit(jax.grad(total, (0, 1)))(params, tokens)
    jax.tree.map(lambda a, b: reference.assert_close(a, b, 2e-5), actual, wanted)


def test_products_are_not_rounded_to_bfloat16_by_a_default_precision():
    # Accelerators round float32 operands unless told otherwise; the CPU never does, so read it.
    for name in GATES:
        gate = GATES[name](EXPERTS)
        variables = gate.init(jax.random.key(0), random_tokens())
        jaxpr = jax.make_jaxpr(gate.apply)(variables, random_tokens())
        products = [line for line in str(jaxpr).splitlines() if "dot_general" in line]
        assert products and str(jaxpr).count("HIGHEST") >= len(products)


def test_every_gate_is_a_module():
    assert all(issubclass(gate, nn.Module) for gate in GATES.values())
    assert set(GATES) == {"linear", "cosine", "hidden_layer", "random"}
