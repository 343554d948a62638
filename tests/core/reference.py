"""Slow references in float64: one token and one expert at a time, from the papers' formulas.

A choice is a list with one dict a token, {expert: weight}, best expert first; a token that is
masked has none. Everything is analytic but for comparisons, which look at real parts, so a complex
step Im f(x + i h) / h gives derivatives that are exact to rounding and free of any formula.
"""

import math

import jax
import numpy as np

from moe_jax.core import expert_capacity


def ranked(scores):
    """Indices by falling score, equal ones in order of index."""
    return sorted(range(len(scores)), key=lambda index: (-np.real(scores[index]), index))


def softmax(logits, is_open=None):
    """Probabilities over the open entries; 0 for the others."""
    is_open = np.ones(len(logits), bool) if is_open is None else np.asarray(is_open)
    if not is_open.any():
        is_open = ~is_open
    top = max(np.real(logits[index]) for index in np.flatnonzero(is_open))
    exponential = np.zeros(len(logits), np.result_type(logits, np.float64))
    for index in np.flatnonzero(is_open):
        exponential[index] = np.exp(logits[index] - top)
    return exponential / sum(exponential)


def log_partition(logits, is_open=None):
    is_open = np.ones(len(logits), bool) if is_open is None else np.asarray(is_open)
    if not is_open.any():
        is_open = ~is_open
    top = max(np.real(logits[index]) for index in np.flatnonzero(is_open))
    return top + np.log(sum(np.exp(logits[index] - top) for index in np.flatnonzero(is_open)))


def every(mask, length):
    return np.ones(length, bool) if mask is None else np.asarray(mask, bool)


def top_k(logits, num_selected, *, softmax_after=False, renormalize=True, mask=None, is_open=None):
    """Shazeer et al. 2017; for K = 1 the weight is the probability itself."""
    num_tokens, num_experts = logits.shape
    is_open, choice = every(is_open, num_experts), []
    for token in range(num_tokens):
        choice.append({})
        if not every(mask, num_tokens)[token]:
            continue
        probability = softmax(logits[token], is_open)
        order = [e for e in ranked(logits[token]) if is_open[e]][:num_selected]
        scale = 1.0
        if softmax_after or (renormalize and num_selected > 1):
            scale = sum(probability[expert] for expert in order)
        choice[token] = {expert: probability[expert] / scale for expert in order}
    return choice


def sigmoid(
    logits,
    num_selected,
    *,
    bias=None,
    num_groups=1,
    num_selected_groups=1,
    renormalize=True,
    scale=1.0,
    mask=None,
    is_open=None,
):
    """DeepSeek-V3, equations 12-16, and its node-limited selection."""
    num_tokens, num_experts = logits.shape
    is_open, choice = every(is_open, num_experts), []
    bias = np.zeros(num_experts) if bias is None else bias
    size = num_experts // num_groups
    for token in range(num_tokens):
        choice.append({})
        if not every(mask, num_tokens)[token]:
            continue
        score = 1.0 / (1.0 + np.exp(-logits[token]))
        biased = np.where(is_open, np.real(score) + bias, -np.inf)
        group_score = []
        for group in range(num_groups):
            members = biased[group * size : (group + 1) * size]
            best = [value for value in sorted(members, reverse=True)[:2] if value > -np.inf]
            group_score.append(sum(best) if best else -np.inf)
        groups = ranked(group_score)[:num_selected_groups]
        order = [e for e in ranked(biased) if e // size in groups and is_open[e]][:num_selected]
        total = 1.0
        if renormalize and num_selected > 1:
            total = sum(score[expert] for expert in order)
        choice[token] = {expert: scale * score[expert] / total for expert in order}
    return choice


def expert_choice(logits, capacity, *, mask=None, is_open=None):
    """Zhou et al. 2022: every expert picks its `capacity` best tokens."""
    num_tokens, num_experts = logits.shape
    mask, is_open = every(mask, num_tokens), every(is_open, num_experts)
    probability = np.array([softmax(row, is_open) for row in logits]).reshape(logits.shape)
    choice = [{} for _ in range(num_tokens)]
    for expert in np.flatnonzero(is_open):
        candidates = [token for token in ranked(probability[:, expert]) if mask[token]]
        for token in candidates[:capacity]:
            choice[token][int(expert)] = probability[token, expert]
    return choice


def sinkhorn_plan(logits, num_iterations, *, mask=None, is_open=None):
    """Cuturi 2013, algorithm 1: scale columns to T / E, then rows to 1, again and again."""
    num_tokens, num_experts = logits.shape
    mask, is_open = every(mask, num_tokens), every(is_open, num_experts)
    plan = np.zeros((num_tokens, num_experts))
    for token in np.flatnonzero(mask):
        plan[token] = softmax(np.real(logits[token]), is_open)
    if not mask.any() or not is_open.any():
        return plan
    for _ in range(num_iterations):
        for expert in np.flatnonzero(is_open):
            plan[:, expert] *= mask.sum() / is_open.sum() / plan[:, expert].sum()
        for token in np.flatnonzero(mask):
            plan[token] /= plan[token].sum()
    return plan


def sinkhorn(logits, num_selected, num_iterations, *, renormalize=True, mask=None, is_open=None):
    """Clark et al. 2022: the plan decides, the weights are those of top-k."""
    num_tokens, num_experts = logits.shape
    mask, is_open = every(mask, num_tokens), every(is_open, num_experts)
    plan = sinkhorn_plan(logits, num_iterations, mask=mask, is_open=is_open)
    choice = [{} for _ in range(num_tokens)]
    for token in np.flatnonzero(mask):
        probability = softmax(logits[token], is_open)
        order = [e for e in ranked(plan[token]) if is_open[e]][:num_selected]
        scale = 1.0
        if renormalize and num_selected > 1:
            scale = sum(probability[expert] for expert in order)
        choice[token] = {expert: probability[expert] / scale for expert in order}
    return choice


def dense(logits, *, mask=None, is_open=None):
    num_tokens, num_experts = logits.shape
    is_open, choice = every(is_open, num_experts), []
    for token in range(num_tokens):
        probability = softmax(logits[token], is_open)
        answers = every(mask, num_tokens)[token]
        choice.append({int(e): probability[e] for e in np.flatnonzero(is_open) if answers})
    return choice


def soft_weights(logits, num_experts, *, mask=None, is_open=None):
    """Puigcerver et al. 2023, equations 1 and 3: dispatch over tokens, combine over slots."""
    num_tokens, num_slots = logits.shape
    mask = every(mask, num_tokens)
    open_slots = np.repeat(every(is_open, num_experts), num_slots // num_experts)
    dispatch = np.zeros(logits.shape, logits.dtype)
    combine = np.zeros(logits.shape, logits.dtype)
    for slot in np.flatnonzero(open_slots):
        if mask.any():
            dispatch[:, slot] = softmax(logits[:, slot], mask)
    for token in np.flatnonzero(mask):
        if open_slots.any():
            combine[token] = softmax(logits[token], open_slots)
    return dispatch, combine


def limit_capacity(choice, capacity, priority="position"):
    """Drops what exceeds `capacity`: the latest tokens of an expert, or those of least weight."""
    kept = [dict(weights) for weights in choice]
    for expert in {expert for weights in choice for expert in weights}:
        takers = [token for token, weights in enumerate(choice) if expert in weights]
        if priority == "score":
            takers.sort(key=lambda token, e=expert: (-np.real(choice[token][e]), token))
        for token in takers[capacity:]:
            del kept[token][expert]
    return kept


def load_balance(probability, selected, mask=None, is_open=None):
    """E sum_e f_e P_e over open experts; `selected` lists the experts of each token."""
    num_tokens, num_experts = probability.shape
    mask, is_open = every(mask, num_tokens), every(is_open, num_experts)
    counts, mean = np.zeros(num_experts), np.zeros(num_experts, probability.dtype)
    for token in np.flatnonzero(mask):
        mean += probability[token] / mask.sum()
        for expert in selected[token]:
            counts[expert] += is_open[expert]
    if counts.sum() == 0:
        return 0.0
    return is_open.sum() * np.sum(counts / counts.sum() * mean)


def router_z(logits, mask=None, is_open=None):
    mask = every(mask, len(logits))
    squares = [log_partition(logits[t], is_open) ** 2 for t in np.flatnonzero(mask)]
    return sum(squares) / max(len(squares), 1)


def activate(name, z):
    if name == "silu":
        return z / (1 + np.exp(-z))
    if name == "relu":
        return np.where(np.real(z) > 0, z, 0)
    return z * (1 + np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))) / 2


def feed_forward(activation, weights, x):
    """One network on one vector; gated if the weights hold a gate."""
    up = x @ weights["up"]
    hidden = activate(activation, up)
    if "gate" in weights:
        hidden = activate(activation, x @ weights["gate"]) * up
    return hidden @ weights["down"]


def expert_weights(params, expert):
    return {name: leaf[expert] for name, leaf in params["experts"].items()}


def shared_answer(activation, params, x, num_shared_experts):
    """Sum of the shared experts one by one, each a slice of the joint width."""
    out = np.zeros(len(x), np.result_type(x, params["shared_experts"]["up"]))
    width = params["shared_experts"]["up"].shape[-1] // num_shared_experts
    for number in range(num_shared_experts):
        part = slice(number * width, (number + 1) * width)
        weights = {
            name: leaf[part] if name == "down" else leaf[:, part]
            for name, leaf in params["shared_experts"].items()
        }
        out += feed_forward(activation, weights, x)
    return out


def sparse_moe(params, x, choice, *, activation="silu", num_shared_experts=0, mask=None):
    """Output of the layer for tokens [T, D] and a choice, and the norm of each answer."""
    out = np.zeros(x.shape, np.result_type(x, params["experts"]["up"]))
    norms = [{} for _ in choice]
    for token in np.flatnonzero(every(mask, len(x))):
        for expert, weight in choice[token].items():
            answer = feed_forward(activation, expert_weights(params, expert), x[token])
            out[token] += weight * answer
            norms[token][expert] = np.sqrt(sum(np.abs(answer) ** 2))
        if num_shared_experts:
            out[token] += shared_answer(activation, params, x[token], num_shared_experts)
    return out, norms


def soft_moe(params, x, logits, num_experts, *, activation="silu", mask=None, is_open=None):
    """Output of a soft layer for one sequence: every slot is a weighted mean of its tokens."""
    dispatch, combine = soft_weights(logits, num_experts, mask=mask, is_open=is_open)
    out = np.zeros(x.shape, np.result_type(x, logits, params["experts"]["up"]))
    slots_each = logits.shape[1] // num_experts
    for slot in range(logits.shape[1]):
        filled = sum(dispatch[token, slot] * x[token] for token in range(len(x)))
        weights = expert_weights(params, slot // slots_each)
        answer = feed_forward(activation, weights, filled)
        for token in range(len(x)):
            out[token] += combine[token, slot] * answer
    return out


def cosine_scores(params, x, min_temperature=0.01):
    """Chi et al. 2022, equation 5."""
    if "projection" in params:
        x = x @ params["projection"]
    temperature = np.exp(params["log_temperature"])
    if np.real(temperature) < min_temperature:
        temperature = min_temperature
    scores = np.zeros((len(x), params["embedding"].shape[1]), np.result_type(x, temperature))
    for token in range(len(x)):
        for expert in range(scores.shape[1]):
            direction = params["embedding"][:, expert]
            norms = np.sqrt(np.sum(x[token] ** 2)) * np.sqrt(np.sum(direction**2))
            scores[token, expert] = np.sum(x[token] * direction) / norms / temperature
    return scores


def scores(params, x, cosine=False):
    gate = params["router"]["gate"]
    return cosine_scores(gate, x) if cosine else x @ gate["kernel"]


def layer(module, params, state, x, mask, expert_mask):
    """Output, choice, norms and losses of the layer, one token and one expert at a time."""
    num_experts, num_selected, kind = module.num_experts, module.num_selected, module.router
    options = dict(module.router_options)
    masks = {"mask": mask, "is_open": expert_mask}
    joint = kind in ("dense", "expert_choice", "soft")
    logits = scores(params, x, kind == "soft" and "gate" not in options)
    if kind == "top_k":
        choice = top_k(logits, num_selected, **masks)
    elif kind == "sigmoid":
        bias = state["router"]["balance_bias"]
        choice = sigmoid(logits, num_selected, bias=bias, **options, **masks)
    elif kind == "expert_choice":
        factor = options["capacity_factor"]
        capacity = expert_capacity(len(x), num_selected, num_experts, factor)
        choice = expert_choice(logits, capacity, **masks)
    elif kind == "sinkhorn":
        choice = sinkhorn(logits, num_selected, options["num_iterations"], **masks)
    elif kind == "dense":
        choice = dense(logits, **masks)
    activation = {"activation": module.activation}
    if kind == "soft":
        slots = logits
        out = soft_moe(params, x, slots, num_experts, **activation, **masks)
        logits = np.array(
            [[log_partition(part) for part in np.split(row, num_experts)] for row in slots]
        ).reshape(len(x), num_experts)
        choice, norms = dense(logits, **masks), None
        if module.num_shared_experts:
            for token in np.flatnonzero(mask):
                out[token] += shared_answer(
                    module.activation, params, x[token], module.num_shared_experts
                )
    selected = [range(num_experts)] * len(x) if joint else choice
    if kind != "soft":
        if module.capacity_factor is not None:
            capacity = expert_capacity(len(x), num_selected, num_experts, module.capacity_factor)
            choice = limit_capacity(choice, capacity, module.capacity_priority)
        shared = {"num_shared_experts": module.num_shared_experts, "mask": mask}
        out, norms = sparse_moe(params, x, choice, **activation, **shared)
    probability = np.array([softmax(row, expert_mask) for row in logits])
    if kind == "sigmoid":
        score = np.where(expert_mask, 1 / (1 + np.exp(-logits)), 0)
        probability = score / np.sum(score, axis=1, keepdims=True)
    probability = probability.reshape(len(x), num_experts)
    balance = load_balance(probability, selected, mask, expert_mask)
    z = router_z(logits, mask, expert_mask)
    return out, choice, norms, balance, z


def gradients(function, *arguments):
    """Complex-step derivatives of a real function of pytrees of arrays."""
    leaves, structure = jax.tree.flatten(arguments)
    leaves = [np.array(leaf, np.complex128) for leaf in leaves]
    step, result = 1e-30, []
    for leaf in leaves:
        gradient = np.zeros(leaf.shape)
        for position in np.ndindex(leaf.shape):
            kept, leaf[position] = leaf[position], leaf[position] + 1j * step
            gradient[position] = np.imag(function(*jax.tree.unflatten(structure, leaves))) / step
            leaf[position] = kept
        result.append(gradient)
    return jax.tree.unflatten(structure, result)


def in_float64(tree):
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), tree)


def as_choice(expert_index, combine_weight, keep):
    """The kept assignments of a record as a choice, with real numbers."""
    return [
        {int(e): float(w) for e, w, k in zip(*rows, strict=True) if k}
        for rows in zip(*map(np.asarray, (expert_index, combine_weight, keep)), strict=True)
    ]


def assert_same_choice(actual, expected, tolerance=1e-5):
    """Same experts for every token, in any order, and the same weights."""
    assert [sorted(weights) for weights in actual] == [sorted(weights) for weights in expected]
    for got, wanted in zip(actual, expected, strict=True):
        for expert, weight in wanted.items():
            assert abs(got[expert] - weight) <= tolerance * max(1.0, abs(weight))


def assert_close(actual, expected, tolerance):
    """Relative error in the Euclidean norm."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape
    assert np.linalg.norm(actual - expected) <= tolerance * np.linalg.norm(expected)
