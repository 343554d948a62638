"""Every router through every way of laying tokens out, against loops over tokens and experts."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.core import GATES, ROUTERS, SparseMoE, expert_capacity, routing_metrics

TOKENS, MODEL, HIDDEN, EXPERTS, SELECTED = 9, 3, 4, 4, 2
TOKEN_IDS = np.array([3, 1, 4, 1, 5, 9, 2, 6, 5], np.int32)
COTANGENT = np.array([1.0, -0.5, 0.25])
BALANCE, Z = 0.3, 0.2
CASES = {
    "top_k": {},
    "top_k after": {"router_options": {"softmax": "after"}},
    "top_k raw": {"router_options": {"renormalize": False}},
    "top_k of one": {"num_selected": 1},
    "top_k of all": {"num_selected": EXPERTS},
    "one expert": {"num_experts": 1, "num_selected": 1},
    "noisy_top_k": {"router": "noisy_top_k"},
    "sigmoid": {"router": "sigmoid", "router_options": {"scale": 2.5}},
    "sigmoid groups": {
        "router": "sigmoid",
        "router_options": {"num_groups": 2, "num_selected_groups": 1, "renormalize": False},
    },
    "sinkhorn": {"router": "sinkhorn"},
    "hash": {"router": "hash"},
    "dense": {"router": "dense", "num_selected": EXPERTS},
    "expert_choice": {"router": "expert_choice"},
    "plain experts": {"gated": False, "activation": "gelu", "num_shared_experts": 1},
    "relu": {"activation": "relu", "num_shared_experts": 2},
}
LAYOUTS = {
    "dropless": {},
    "by position": {"capacity_factor": 0.5},
    "by score": {"capacity_factor": 0.5, "capacity_priority": "score"},
}
PAIRS = [
    (case, layout)
    for case in CASES
    for layout in LAYOUTS
    if layout == "dropless" or case not in ("expert_choice", "relu", "plain experts")
]


def make_layer(case="top_k", layout="dropless", **options):
    defaults = {"num_experts": EXPERTS, "num_selected": SELECTED, "hidden_dim": HIDDEN}
    return SparseMoE(**(defaults | CASES[case] | LAYOUTS[layout] | options))


def random_variables(layer, seed=0):
    """Float32 values large enough that no expert or gate is near 0."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(
        layer.init, jax.random.key(0), random_tokens(), token_ids=jnp.asarray(TOKEN_IDS)
    )
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), jnp.float32), shapes)


def random_tokens(seed=1):
    x = np.random.default_rng(seed).normal(size=(TOKENS, MODEL))
    return jnp.asarray(x, jnp.bfloat16).astype(jnp.float32)


@functools.partial(jax.jit, static_argnums=0)
def run(layer, variables, x, mask, expert_mask):
    """Output, routing, and gradients of output and losses with regard to parameters and x."""

    def objective(params, x):
        out, routing = layer.apply(
            {**variables, "params": params},
            x,
            mask,
            token_ids=jnp.asarray(TOKEN_IDS),
            expert_mask=expert_mask,
            capture=True,
        )
        total = jnp.sum(jnp.where(jnp.isnan(out), 0.0, out) @ jnp.asarray(COTANGENT, out.dtype))
        losses = BALANCE * routing.load_balance_loss + Z * routing.router_z_loss
        return total.astype(jnp.float32) + losses, (out, routing)

    gradients, (out, routing) = jax.grad(objective, argnums=(0, 1), has_aux=True)(
        variables["params"], x
    )
    return out, routing, gradients


def softmax(logits):
    shifted = np.exp(logits - logits.real.max())
    return shifted / shifted.sum()


def log_sum(logits):
    return np.log(np.sum(np.exp(logits - logits.real.max()))) + logits.real.max()


def activate(name, z):
    if name == "silu":
        return z / (1 + np.exp(-z))
    if name == "relu":
        return z * (z.real > 0)
    return z * (1 + np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))) / 2


def feed_forward(layer, weights, x):
    hidden = x @ weights["up"]
    if layer.gated:
        hidden = activate(layer.activation, x @ weights["gate"]) * hidden
    else:
        hidden = activate(layer.activation, hidden)
    return hidden @ weights["down"]


def distribution(layer, logits):
    """The gate's distribution over experts, which the balance loss is about."""
    if layer.router == "sigmoid":
        score = 1 / (1 + np.exp(-logits))
        return score / score.sum()
    return softmax(logits)


def weights_of(layer, logits, experts):
    """Weights of one token's experts."""
    options = dict(layer.router_options)
    if layer.router == "hash":
        return np.full(len(experts), 1 / len(experts))
    if layer.router in ("dense", "expert_choice"):
        return softmax(logits)[experts]
    score = 1 / (1 + np.exp(-logits)) if layer.router == "sigmoid" else softmax(logits)
    chosen = score[experts]
    renormalize = options.get("renormalize", True) and len(experts) > 1
    if renormalize or options.get("softmax") == "after":
        chosen = chosen / chosen.sum()
    return options.get("scale", 1.0) * chosen


def choose(layer, logits, bias):
    """Experts of every token, best first, from real logits [tokens, experts]."""
    options = dict(layer.router_options)
    if layer.router in ("dense", "expert_choice"):
        return [list(range(layer.num_experts))] * len(logits)
    chosen = []
    for row in logits:
        score = row
        if layer.router == "sigmoid":
            score = 1 / (1 + np.exp(-row)) + bias
            groups = options.get("num_groups", 1)
            size = layer.num_experts // groups
            by_group = score.reshape(groups, size)
            quality = np.sort(by_group, axis=1)[:, -2:].sum(axis=1)
            best = np.argsort(-quality, kind="stable")[: options.get("num_selected_groups", 1)]
            score = np.where(np.isin(np.arange(layer.num_experts) // size, best), score, -np.inf)
        chosen.append(sorted(range(layer.num_experts), key=lambda e: (-score[e], e)))
    return [row[: layer.num_selected] for row in chosen]


def kept_assignments(layer, logits, experts, mask):
    """{(token, place)} of the assignments that an expert answers."""
    real = [token for token in range(TOKENS) if mask[token]]
    if layer.router == "expert_choice":
        capacity = expert_capacity(len(real), layer.num_selected, layer.num_experts, 1.0)
        probability = np.array([softmax(row) for row in logits])
        kept = set()
        for expert in range(layer.num_experts):
            best = sorted(real, key=lambda token: (-probability[token, expert], token))
            kept |= {(token, expert) for token in best[:capacity]}
        return kept
    queue = [(token, place) for token in real for place in range(len(experts[token]))]
    if layer.capacity_factor is None:
        return set(queue)
    if layer.capacity_priority == "score":
        weight = {
            (token, place): weights_of(layer, logits[token], experts[token])[place]
            for token, place in queue
        }
        queue.sort(key=lambda pair: (-weight[pair], pair))
    capacity = expert_capacity(TOKENS, layer.num_selected, layer.num_experts, layer.capacity_factor)
    kept, used = set(), [0] * layer.num_experts
    for token, place in queue:
        expert = experts[token][place]
        if used[expert] < capacity:
            used[expert] += 1
            kept.add((token, place))
    return kept


def reference(layer, variables, x, mask, experts=None):
    """Output and losses, one token and one expert at a time; analytic but for choices."""
    params = variables["params"]
    router = params.get("router", {})
    if layer.router == "hash":
        logits = np.full((TOKENS, layer.num_experts), -np.inf)
        for token in range(TOKENS):
            logits[token, experts[token]] = 0.0
    else:
        logits = x @ router["gate"]["kernel"]
    if experts is None:
        bias = variables.get("router_state", {}).get("router", {}).get("balance_bias", 0.0)
        experts = choose(layer, logits.real, np.real(bias))
    kept = kept_assignments(layer, logits.real, experts, mask)
    out = np.zeros(x.shape, x.dtype)
    norms = np.zeros((TOKENS, len(experts[0])))
    for token in np.flatnonzero(mask):
        weights = weights_of(layer, logits[token], experts[token])
        for place, expert in enumerate(experts[token]):
            if (token, place) in kept:
                own = {name: leaf[expert] for name, leaf in params["experts"].items()}
                answer = feed_forward(layer, own, x[token])
                norms[token, place] = np.linalg.norm(answer.real)
                out[token] += weights[place] * answer
        for shared in range(layer.num_shared_experts):
            part = slice(shared * HIDDEN, (shared + 1) * HIDDEN)
            own = {
                name: leaf[part] if name == "down" else leaf[:, part]
                for name, leaf in params["shared_experts"].items()
            }
            out[token] += feed_forward(layer, own, x[token])
    real = np.flatnonzero(mask)
    load = np.bincount(np.concatenate([experts[t] for t in real]), minlength=layer.num_experts)
    probability = np.mean([distribution(layer, logits[token]) for token in real], axis=0)
    balance = layer.num_experts * (load / load.sum()) @ probability
    z = np.mean([log_sum(logits[token]) ** 2 for token in real])
    return out, balance, z, kept, experts, norms


def reference_gradients(layer, variables, x, mask, experts):
    """Complex-step derivative, Im f(x + i h) / h: exact to rounding and free of any formula."""
    leaves, structure = jax.tree.flatten((variables["params"], x))
    leaves = [np.asarray(leaf, np.complex128) for leaf in leaves]
    step, gradients = 1e-30, []
    for leaf in leaves:
        gradient = np.zeros(leaf.shape)
        for position in np.ndindex(leaf.shape):
            kept, leaf[position] = leaf[position], leaf[position] + 1j * step
            params, moved = jax.tree.unflatten(structure, leaves)
            out, balance, z, *_ = reference(
                layer, {**variables, "params": params}, moved, mask, experts
            )
            objective = np.sum(out @ COTANGENT) + BALANCE * balance + Z * z
            gradient[position] = np.imag(objective) / step
            leaf[position] = kept
        gradients.append(gradient)
    return jax.tree.unflatten(structure, gradients)


def in_float64(tree):
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), tree)


def assert_close(actual, expected, tolerance=1e-5):
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape
    # A gradient that is 0 by symmetry comes out at the rounding of the terms that cancel.
    assert np.linalg.norm(actual - expected) <= tolerance * np.linalg.norm(expected) + 1e-6


def all_open(layer):
    return jnp.ones(layer.num_experts, bool)


@pytest.mark.parametrize(("case", "layout"), PAIRS)
def test_values_and_gradients_are_those_of_loops_over_tokens_and_experts(case, layout):
    layer = make_layer(case, layout)
    variables, x = random_variables(layer), random_tokens()
    mask = np.arange(TOKENS) != 4
    out, routing, gradients = run(layer, variables, x, jnp.asarray(mask), all_open(layer))
    # What a hash or a plan decides has tests of its own; here the record's word is taken for it.
    decided = layer.router == "hash"
    experts = np.asarray(routing.expert_index).tolist() if decided else None
    expected, balance, z, kept, experts, norms = reference(
        layer, in_float64(variables), in_float64(x), mask, experts
    )
    np.testing.assert_array_equal(routing.expert_index[mask], np.array(experts)[mask])
    assert {tuple(pair) for pair in np.argwhere(routing.keep).tolist()} == kept
    if layout != "dropless" and layer.num_experts > 1:
        assert len(kept) < mask.sum() * layer.num_selected
    assert_close(out, expected)
    assert_close(routing.load_balance_loss, balance)
    assert_close(routing.router_z_loss, z)
    assert_close(routing.output_norm, norms)
    wanted = reference_gradients(layer, in_float64(variables), in_float64(x), mask, experts)
    wanted[0].get("router", {}).pop("noise", None)
    actual_params, actual_x = gradients
    actual_params.get("router", {}).pop("noise", None)
    jax.tree.map(assert_close, actual_params, wanted[0])
    assert_close(actual_x, wanted[1])


@pytest.mark.parametrize("case", ["top_k", "sigmoid groups", "expert_choice", "plain experts"])
def test_bfloat16_agrees_within_its_rounding(case):
    layer = make_layer(case, dtype=jnp.bfloat16)
    variables, x = random_variables(layer), random_tokens()
    mask = np.ones(TOKENS, bool)
    out, routing, _ = run(layer, variables, x, jnp.asarray(mask), all_open(layer))
    expected, *_ = reference(layer, in_float64(variables), in_float64(x), mask)
    assert_close(out, expected, 2e-2)
    assert routing.gate_logits.dtype == routing.combine_weight.dtype == jnp.float32


@pytest.mark.parametrize("case", [*CASES, "soft"])
def test_masked_tokens_change_no_other_bit_and_get_no_gradient(case):
    layer = make_layer(case) if case in CASES else make_layer(router="soft")
    variables, x = random_variables(layer), random_tokens()
    mask = jnp.asarray(np.arange(TOKENS) % 3 != 1)
    clean = run(layer, variables, x, mask, all_open(layer))
    for padding in (1e30, jnp.nan, jnp.inf):
        padded = jnp.where(mask[:, None], x, padding)
        out, routing, gradients = run(layer, variables, padded, mask, all_open(layer))
        jax.tree.map(np.testing.assert_array_equal, (out, routing, gradients), clean)
    out, routing, (_, x_gradient) = clean
    assert not np.any(out[~mask]) and not np.any(x_gradient[~mask])
    assert not np.any(routing.keep[~mask]) and not np.any(routing.combine_weight[~mask])


@pytest.mark.parametrize("case", [*CASES, "soft"])
def test_nan_in_one_token_stays_there(case):
    layer = make_layer(case) if case in CASES else make_layer(router="soft")
    variables, x = random_variables(layer), random_tokens()
    mask = jnp.ones(TOKENS, bool)
    dirty = x.at[2, 1].set(jnp.nan)
    out, _, _ = run(layer, variables, dirty, mask, all_open(layer))
    others = np.arange(TOKENS) != 2
    assert np.all(np.isfinite(out[others]))
    if case not in ("expert_choice", "soft", "sinkhorn"):
        clean, _, _ = run(layer, variables, x, mask, all_open(layer))
        np.testing.assert_array_equal(out[others], clean[others])


@pytest.mark.parametrize("case", [*CASES, "soft"])
@pytest.mark.parametrize("num_open", [0, 1])
def test_closed_experts_get_no_token_and_no_gradient_and_spoil_nothing(case, num_open):
    layer = make_layer(case) if case in CASES else make_layer(router="soft")
    if layer.num_experts == 1 and num_open > 1:
        pytest.skip("one expert cannot have three open")
    variables, x = random_variables(layer), random_tokens()
    expert_mask = jnp.arange(layer.num_experts) < num_open
    out, routing, (params, _) = run(layer, variables, x, jnp.ones(TOKENS, bool), expert_mask)
    closed = ~np.asarray(expert_mask)
    assert not np.any(np.asarray(routing_metrics(routing).load)[closed])
    assert not np.any(routing.keep & jnp.asarray(closed)[routing.expert_index])
    for leaf in params["experts"].values():
        assert not np.any(np.asarray(leaf)[closed])
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves((out, params)))
    if num_open == 0 and not layer.num_shared_experts:
        assert not np.any(out)
    if num_open and layer.router != "expert_choice":
        weight = np.asarray(routing.combine_weight).sum(axis=1)
        assert np.all(weight > 0)


@pytest.mark.parametrize("case", ["top_k", "sigmoid", "hash", "dense", "top_k of one"])
def test_permuting_tokens_permutes_outputs(case):
    layer = make_layer(case)
    variables, x = random_variables(layer), random_tokens()
    order = np.random.default_rng(3).permutation(TOKENS)

    def apply(x, ids):
        return layer.apply(variables, x, token_ids=jnp.asarray(ids))[0]

    np.testing.assert_allclose(
        apply(x[order], TOKEN_IDS[order]), apply(x, TOKEN_IDS)[order], rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("case", [*CASES, "soft"])
@pytest.mark.parametrize("shape", [(0,), (2, 0), (1, 1)])
def test_few_tokens_pass(case, shape):
    layer = make_layer(case) if case in CASES else make_layer(router="soft")
    x = jnp.ones((*shape, MODEL), jnp.float32)
    ids = jnp.zeros(shape, jnp.int32)
    apply = jax.jit(layer.apply)
    out, routing = apply(random_variables(layer), x, token_ids=ids)
    assert out.shape == x.shape and np.all(np.isfinite(out))
    assert np.isfinite(routing.load_balance_loss) and np.isfinite(routing.router_z_loss)
    assert routing.mask.shape == (math.prod(shape),)


@pytest.mark.parametrize(
    ("router", "gate"),
    [*((router, "linear") for router in ROUTERS), *(("top_k", gate) for gate in GATES)],
)
def test_every_router_takes_every_gate_and_draws_only_while_training(router, gate):
    options = {} if router in ("hash", "soft") else {"gate": gate, "jitter": 0.2}
    num_selected = EXPERTS if router == "dense" else SELECTED
    layer = make_layer(router=router, router_options=options, num_selected=num_selected)
    variables, x = random_variables(layer), random_tokens()

    @functools.partial(jax.jit, static_argnums=1)
    def apply(key, deterministic):
        return layer.apply(
            variables,
            x,
            token_ids=jnp.asarray(TOKEN_IDS),
            deterministic=deterministic,
            rngs={"router": key},
        )[0]

    key, other = jax.random.key(0), jax.random.key(1)
    np.testing.assert_array_equal(apply(key, True), apply(other, True))
    np.testing.assert_array_equal(apply(key, False), apply(key, False))
    assert np.array_equal(apply(key, False), apply(other, False)) == (not options)


def test_dropout_of_an_assignment_depends_on_the_key_and_the_assignment_alone():
    """Not on where its row stands: padding another token moves the rows."""
    layer = make_layer(dropout_rate=0.5)
    variables, x = random_variables(layer), random_tokens()

    @jax.jit
    def apply(mask):
        rngs = {"dropout": jax.random.key(4)}
        return layer.apply(variables, x, mask, deterministic=False, rngs=rngs)[0]

    every, some = apply(jnp.ones(TOKENS, bool)), apply(jnp.arange(TOKENS) > 2)
    np.testing.assert_array_equal(every[3:], some[3:])
    clean = layer.apply(variables, x)[0]
    assert not np.allclose(every, clean)


def test_soft_mixture_is_a_loop_over_slots():
    layer = make_layer(router="soft", router_options={"slots_per_expert": 3})
    variables = random_variables(layer)
    x = jnp.asarray(np.random.default_rng(5).normal(size=(2, TOKENS, MODEL)), jnp.float32)
    mask = np.ones((2, TOKENS), bool)
    mask[1, 6:] = False
    out, routing = jax.jit(layer.apply)(variables, x, jnp.asarray(mask))
    params = in_float64(variables["params"])
    gate = params["router"]["gate"]
    unit = gate["embedding"] / np.linalg.norm(gate["embedding"], axis=0)
    for sequence in range(2):
        real = np.flatnonzero(mask[sequence])
        rows = np.asarray(x, np.float64)[sequence, real]
        cosine = rows / np.linalg.norm(rows, axis=1, keepdims=True) @ unit
        logits = cosine / max(np.exp(gate["log_temperature"]), 0.01)
        expected = np.zeros_like(rows)
        for slot in range(3 * EXPERTS):
            own = {name: leaf[slot // 3] for name, leaf in params["experts"].items()}
            answer = feed_forward(layer, own, softmax(logits[:, slot]) @ rows)
            for place in range(len(real)):
                expected[place] += softmax(logits[place])[slot] * answer
        assert_close(out[sequence, real], expected)
    assert not np.any(out[1, 6:])
    np.testing.assert_allclose(np.asarray(routing.combine_weight).sum(1), mask.reshape(-1), 1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"router": "topk"}, "router='topk' is not one of ('top_k',"),
        ({"router_options": {"gate": "linaer"}}, "gate='linaer' is not one of ('linear',"),
        ({"router_options": {"renormalise": True}}, "router_options of 'top_k': 'renormalise' is"),
        (
            {"router_options": {"gate_options": {"width": 3}}},
            "gate_options of 'linear': 'width' is not one of []",
        ),
        ({"router_options": {"jitter": 1.0}}, "jitter=1.0 is not in [0, 1)"),
        ({"router_options": {"softmax": "during"}}, "softmax='during' is not one of"),
        ({"router": "dense"}, "num_selected=2 must equal num_experts=4"),
        (
            {"router": "sigmoid", "router_options": {"num_groups": 3}},
            "num_groups=3 does not divide num_experts=4",
        ),
        (
            {"router": "sigmoid", "router_options": {"num_groups": 4}},
            "num_selected=2 exceeds the 1 experts of num_selected_groups=1",
        ),
        ({"router": "expert_choice", "capacity_factor": 1.0}, "capacity_factor=1.0 does not apply"),
        ({"capacity_factor": 0.0}, "capacity_factor=0.0 is not in (0, 2]"),
        ({"capacity_factor": 1024.0}, "capacity_factor=1024.0 is not in (0, 2]"),
        ({"capacity_factor": math.nan}, "capacity_factor=nan is not in (0, 2]"),
        (
            {"capacity_factor": 1.0, "capacity_priority": "random"},
            "priority='random' is not one of",
        ),
        ({"hidden_dim": 0}, "hidden_dim=0 must be at least 1"),
        ({"num_shared_experts": -1}, "num_shared_experts=-1 must be at least 0"),
        ({"num_experts": 0, "num_selected": 0}, "num_experts=0 must be at least 1"),
        ({"dropout_rate": 1.0}, "dropout_rate=1.0 is not in [0, 1)"),
        (
            {"router": "soft", "router_options": {"slots_per_expert": 0}},
            "slots_per_expert=0 must be at least 1",
        ),
        (
            {"router": "sinkhorn", "router_options": {"num_iterations": 0}},
            "num_iterations=0 must be at least 1",
        ),
    ],
)
def test_impossible_options_are_named_before_anything_is_compiled(options, message):
    layer = make_layer(**options)

    def init(key, x):
        return layer.init(key, x, deterministic=False)

    keys = {"params": jax.random.key(0), "router": jax.random.key(1), "dropout": jax.random.key(2)}
    with pytest.raises(ValueError) as error:
        jax.eval_shape(init, keys, random_tokens())
    assert message in str(error.value)


def test_integer_tokens_are_refused():
    with pytest.raises(ValueError, match=r"x \(9, 3\) of type int32: expected floats"):
        import jaxtyping

        jaxtyping.config.update("jaxtyping_disable", True)
        try:
            make_layer().init(jax.random.key(0), jnp.ones((TOKENS, MODEL), jnp.int32))
        finally:
            jaxtyping.config.update("jaxtyping_disable", False)
