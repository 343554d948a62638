"""Routers in which each token chooses its experts: pure functions from scores to `Routing`.

All of them work in float32, or in float64 on float64 scores, give equal scores to the lower expert
index, and take

- `mask`, bool[tokens]: False for padding, which gets no expert, no weight and no share in a loss;
- `expert_mask`, bool[experts]: False for a closed (pruned) expert, which gets no token;
- `axis_names`: mesh axes that split the tokens inside `shard_map`, for the losses.

They raise ValueError if `num_selected` is not in [1, experts] or a mask does not fit.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from moe_jax.core.precision import wide_type
from moe_jax.core.routing import (
    Routing,
    check_num_selected,
    every_expert,
    make_routing,
    open_logits,
    selection_weight,
)

SOFTMAX_PLACES = ("before", "after")


def top_k_routing(
    gate_logits: Float[Array, "tokens experts"],
    num_selected: int,
    *,
    softmax: str = "before",
    renormalize: bool = True,
    mask: Bool[Array, " tokens"] | None = None,
    expert_mask: Bool[Array, " experts"] | None = None,
    axis_names: tuple[str, ...] = (),
) -> Routing:
    """Sends each token to the experts with the largest softmax probabilities.

    With p = softmax(l) and S the K largest entries, the weights are p_e / sum_{j in S} p_j, or p_e
    itself without renormalisation. For K = 1 renormalisation would make the weight a constant and
    cut the gate off from the gradient, so p_e is used there.

    Args:
        gate_logits: scores l.
        num_selected: K.
        softmax: `before` the selection, over all experts; or `after` it, over the K selected
            logits, which equals renormalising for K > 1 and is the constant 1 for K = 1.
        renormalize: make the weights of a token sum to 1 (for K > 1).
        mask, expert_mask, axis_names: see the module.

    Raises:
        ValueError: see the module; or if `softmax` is neither of the two.

    Reference: Shazeer et al. 2017 (arXiv 1701.06538); renormalised as in Mixtral (2401.04088).
    """
    check_num_selected(num_selected, gate_logits.shape[-1])
    if softmax not in SOFTMAX_PLACES:
        raise ValueError(f"softmax={softmax!r} is not one of {SOFTMAX_PLACES}")
    gate_logits, mask = open_logits(gate_logits, mask, expert_mask)
    # Not by probability, which is 0 far below the largest, nor by logit: top_k puts 0 above -0.
    log_probability = jax.nn.log_softmax(gate_logits, axis=-1)
    _, expert_index = jax.lax.top_k(log_probability, num_selected)
    selected = jnp.take_along_axis(log_probability, expert_index, axis=-1)
    if softmax == "after":
        weight = jax.nn.softmax(selected, axis=-1)
    else:
        weight = selection_weight(selected, renormalize=renormalize)
    return make_routing(
        gate_logits, expert_index, weight, mask, expert_mask=expert_mask, axis_names=axis_names
    )


def noisy_top_k_routing(
    key: Key[Array, ""],
    gate_logits: Float[Array, "tokens experts"],
    noise_scale: Float[Array, "tokens experts"] | float,
    num_selected: int,
    *,
    renormalize: bool = True,
    mask: Bool[Array, " tokens"] | None = None,
    expert_mask: Bool[Array, " experts"] | None = None,
    axis_names: tuple[str, ...] = (),
) -> Routing:
    """`top_k_routing` on l + noise_scale * epsilon, epsilon standard normal a token and expert.

    Shazeer et al. learn the scale, softplus(x W_noise); vmoe fixes it to 1 / E. The record's
    `gate_logits` are the noisy ones, so that weights and losses agree with the choice.

    Args:
        key: draws the noise; the same key gives the same noise.
        gate_logits: scores l.
        noise_scale: standard deviation of the noise; 0 is `top_k_routing`.
        num_selected, renormalize, mask, expert_mask, axis_names: see `top_k_routing`.

    Reference: Shazeer et al. 2017 (arXiv 1701.06538), equation 4.
    """
    wide = wide_type(gate_logits.dtype)
    noise = jax.random.normal(key, gate_logits.shape, dtype=wide)
    return top_k_routing(
        gate_logits.astype(wide) + jnp.asarray(noise_scale, dtype=wide) * noise,
        num_selected,
        renormalize=renormalize,
        mask=mask,
        expert_mask=expert_mask,
        axis_names=axis_names,
    )


def sigmoid_routing(
    gate_logits: Float[Array, "tokens experts"],
    num_selected: int,
    *,
    balance_bias: Float[Array, " experts"] | None = None,
    num_groups: int = 1,
    num_selected_groups: int = 1,
    renormalize: bool = True,
    scale: float = 1.0,
    mask: Bool[Array, " tokens"] | None = None,
    expert_mask: Bool[Array, " experts"] | None = None,
    axis_names: tuple[str, ...] = (),
) -> Routing:
    """Sends each token to the experts of largest s_e + b_e, s = sigmoid(l); the weights use s only.

    The bias b steers the load without entering the output or the gradient; see
    `update_balance_bias`. With G groups of consecutive experts, a token first keeps the groups with
    the largest sum of their two best s_e + b_e, then chooses within them. The weights are
    scale * s_e / sum_{j in S} s_j, or scale * s_e without renormalisation and for K = 1.

    The record's `gate_logits` are log s, whose softmax is s / sum_e s_e; the z-loss uses l.

    Args:
        gate_logits: scores l.
        num_selected: K.
        balance_bias: b; none if None.
        num_groups: G, divides the experts.
        num_selected_groups: groups a token may use, which must hold K experts.
        renormalize: make the weights of a token sum to `scale` (for K > 1).
        scale: factor on the weights.
        mask, expert_mask, axis_names: see the module.

    Raises:
        ValueError: see the module; or if the groups do not fit.

    Reference: DeepSeek-V3 (arXiv 2412.19437), section 2.1.2; Wang et al. 2024 (2408.15664).
    """
    num_experts = gate_logits.shape[-1]
    check_num_selected(num_selected, num_experts)
    check_groups(num_experts, num_selected, num_groups, num_selected_groups)
    raw, mask = open_logits(gate_logits, mask, expert_mask)
    log_score = jax.nn.log_sigmoid(raw)
    # Without a bias the logarithm ranks alike, and still tells apart what rounds to 0 or 1.
    rank_by = log_score
    if balance_bias is not None or num_groups > 1:
        bias = 0.0 if balance_bias is None else balance_bias.astype(raw.dtype)[None, :]
        rank_by = jnp.where(jnp.isneginf(raw), -jnp.inf, jnp.exp(log_score) + bias)
    rank_by = jax.lax.stop_gradient(rank_by)
    if num_selected_groups < num_groups:
        rank_by = _within_best_groups(rank_by, num_groups, num_selected_groups)
    _, expert_index = jax.lax.top_k(rank_by, num_selected)
    # Where a token's groups hold fewer than K open experts, one outside of them fills the index.
    keep = ~jnp.isneginf(jnp.take_along_axis(rank_by, expert_index, axis=-1))
    selected = jnp.where(keep, jnp.take_along_axis(log_score, expert_index, axis=-1), -jnp.inf)
    return make_routing(
        log_score,
        expert_index,
        scale * selection_weight(selected, renormalize=renormalize),
        mask,
        keep=keep,
        expert_mask=expert_mask,
        z_logits=raw,
        axis_names=axis_names,
    )


def dense_routing(
    gate_logits: Float[Array, "tokens experts"],
    *,
    mask: Bool[Array, " tokens"] | None = None,
    expert_mask: Bool[Array, " experts"] | None = None,
    axis_names: tuple[str, ...] = (),
) -> Routing:
    """Sends each token to every expert, with weights softmax(l): the classical mixture.

    Experts come in the order of their index, and K = E.

    Reference: Jacobs et al. 1991, Adaptive mixtures of local experts, equation 1.
    """
    gate_logits, mask = open_logits(gate_logits, mask, expert_mask)
    return make_routing(
        gate_logits,
        every_expert(*gate_logits.shape),
        jax.nn.softmax(gate_logits, axis=-1),
        mask,
        expert_mask=expert_mask,
        axis_names=axis_names,
    )


def hash_routing(
    token_ids: Int[Array, " tokens"],
    num_experts: int,
    num_selected: int,
    *,
    seed: int = 0,
    mask: Bool[Array, " tokens"] | None = None,
    expert_mask: Bool[Array, " experts"] | None = None,
    axis_names: tuple[str, ...] = (),
) -> Routing:
    """Sends each token to the K experts with the largest hash of (token id, expert, seed).

    Nothing is learned; the weights are 1 / K. Closing an expert moves only its own tokens. The
    record's `gate_logits` are 0 for the chosen experts and -inf for the others.

    Args:
        token_ids: what is hashed, usually the vocabulary id.
        num_experts: E.
        num_selected: K.
        seed: another seed, another assignment; layers should differ.
        mask, expert_mask, axis_names: see the module.

    Reference: Roller et al. 2021 (arXiv 2106.04426), random hash.
    """
    check_num_selected(num_selected, num_experts)
    if not jnp.issubdtype(token_ids.dtype, jnp.integer):
        raise ValueError(f"token_ids has type {token_ids.dtype}; expected integers")
    zeros = jnp.zeros((token_ids.shape[0], num_experts), dtype=jnp.float32)
    opened, mask = open_logits(zeros, mask, expert_mask)
    expert = jnp.arange(num_experts, dtype=jnp.uint32)
    seeded = _mix(jnp.uint32(seed % 2**32) + jnp.uint32(0x9E3779B9))
    hashed = _mix(token_ids.astype(jnp.uint32) ^ seeded)[:, None]
    # 31 bits, so that a closed expert can rank below every open one.
    rank_by = (_mix(hashed + _mix(expert + jnp.uint32(1))[None, :]) >> 1).astype(jnp.int32)
    rank_by = jnp.where(jnp.isneginf(opened), jnp.int32(-1), rank_by)
    _, expert_index = jax.lax.top_k(rank_by, num_selected)
    experts = jnp.arange(num_experts, dtype=expert_index.dtype)
    chosen = jnp.any(expert_index[:, :, None] == experts[None, None, :], axis=1)
    gate_logits = jnp.where(chosen | ~mask[:, None], opened, -jnp.inf)
    num_open = jnp.float32(num_selected)
    if expert_mask is not None:
        num_open = jnp.clip(jnp.sum(expert_mask, dtype=jnp.float32), 1.0, num_open)
    weight = jnp.full(expert_index.shape, 1.0, dtype=jnp.float32) / num_open
    return make_routing(
        gate_logits, expert_index, weight, mask, expert_mask=expert_mask, axis_names=axis_names
    )


def check_groups(
    num_experts: int, num_selected: int, num_groups: int, num_selected_groups: int
) -> None:
    """Raises ValueError unless the experts divide into groups that can serve a token."""
    if num_groups < 1 or num_experts % num_groups:
        raise ValueError(f"num_groups={num_groups} does not divide num_experts={num_experts}")
    if not 1 <= num_selected_groups <= num_groups:
        raise ValueError(
            f"num_selected_groups={num_selected_groups} is not in [1, num_groups={num_groups}]"
        )
    available = num_selected_groups * (num_experts // num_groups)
    if num_selected > available:
        raise ValueError(
            f"num_selected={num_selected} exceeds the {available} experts of "
            f"num_selected_groups={num_selected_groups} groups"
        )


def _within_best_groups(score: Array, num_groups: int, num_selected_groups: int) -> Array:
    """Scores with -inf outside each token's groups of largest sum of two best scores."""
    num_tokens, num_experts = score.shape
    grouped = score.reshape(num_tokens, num_groups, num_experts // num_groups)
    best, _ = jax.lax.top_k(grouped, min(2, grouped.shape[-1]))
    # A group with one open expert is judged by it; one with none stays -inf.
    rest = jnp.sum(jnp.where(jnp.isneginf(best), 0.0, best)[:, :, 1:], axis=-1)
    _, chosen = jax.lax.top_k(best[:, :, 0] + rest, num_selected_groups)
    allowed = jnp.any(
        chosen[:, :, None] == jnp.arange(num_groups, dtype=chosen.dtype)[None, None, :], axis=1
    )
    return jnp.where(allowed[:, :, None], grouped, -jnp.inf).reshape(num_tokens, num_experts)


def _mix(value: Array) -> Array:
    """A bijection of uint32 in which every input bit moves about half of the output bits."""
    value = (value ^ (value >> 16)) * jnp.uint32(0x7FEB352D)
    value = (value ^ (value >> 15)) * jnp.uint32(0x846CA68B)
    return value ^ (value >> 16)
