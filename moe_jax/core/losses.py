"""Auxiliary losses of a router, in float32, averaged over the tokens that count.

Every loss is the mean over the tokens where `mask` is True; masked tokens may hold anything. Inside
`shard_map`, name the mesh axes that split the tokens in `axis_names`: value and gradient are then
those of the global batch on every shard. Under `jit` on sharded arrays nothing needs naming.
Differentiate outside `shard_map`, or inside with its default `check_vma=True`; inside without, or
under `vmap(axis_name=...)`, the gradient is right after the usual mean over the shards.

Coefficients do not carry over between libraries as they stand. A weight c on the load-balance loss
of one layer, with K experts a token, is the weight below here:

| library                         | loss at perfect balance | weight here |
| ------------------------------- | ----------------------- | ----------- |
| moe_jax                         | 1                       | c           |
| Megablocks, OLMoE               | 1                       | c           |
| Switch Transformer (K = 1)      | 1                       | c           |
| MaxText, flaxformer             | K                       | c K         |
| Hugging Face Mixtral            | K                       | c K         |
| levanter                        | 1 / K                   | c / K       |

MaxText takes the loss of each sequence, so compare it with `sequence_load_balance_loss`. A library
that sums the loss over L layers, where `moe_jax.language` averages, needs a further factor L.
Hugging Face pools the tokens of all layers into one batch, which no factor undoes.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def load_balance_loss(
    gate_logits: Float[Array, "tokens experts"],
    expert_index: Int[Array, "tokens k"],
    mask: Bool[Array, " tokens"] | None = None,
    *,
    keep: Bool[Array, "tokens k"] | None = None,
    expert_mask: Bool[Array, " experts"] | None = None,
    axis_names: tuple[str, ...] = (),
) -> Float[Array, ""]:
    """Penalises the product of an expert's load and its mean gate probability.

    With f_e the share of the assignments to open experts that expert e receives and P_e its mean
    softmax probability, the loss is E sum_e f_e P_e: 1 when the gate is uniform or the load is
    perfectly balanced, E / K when every token goes to the same K experts with certainty. The
    gradient flows through P only.

    Args:
        gate_logits: logarithms, up to a constant a token, of the gate's probabilities.
        expert_index: selected experts, in [0, experts).
        mask: tokens that count; all of them if None.
        keep: assignments that count in f; all of them if None.
        expert_mask: experts that are open; E is their number. All of them if None.
        axis_names: see the module.

    Returns:
        The loss; 0 if no token counts.

    Reference: Fedus et al. 2021 (arXiv 2101.03961), equations 4-6, with K selections.
    """
    num_experts = gate_logits.shape[-1]
    mean = _token_mean(mask, gate_logits.shape[0], axis_names)
    mean_probability = mean(jax.nn.softmax(clear_masked(gate_logits, mask), axis=-1))
    chosen = jax.nn.one_hot(expert_index, num_experts, dtype=jnp.float32)
    if keep is not None:
        chosen = jnp.where(keep[:, :, None], chosen, 0.0)
    load = mean(jnp.mean(chosen, axis=1))
    open_experts = jnp.float32(num_experts)
    if expert_mask is not None:
        open_experts = jnp.sum(expert_mask, dtype=jnp.float32)
        # Closed experts fill the index of a token for which fewer than K are open.
        load = jnp.where(expert_mask, load, 0.0)
    if keep is not None or expert_mask is not None:
        load = load / jnp.maximum(jnp.sum(load), jnp.finfo(jnp.float32).tiny)
    return open_experts * jnp.sum(jax.lax.stop_gradient(load) * mean_probability)


def sequence_load_balance_loss(
    gate_logits: Float[Array, "tokens experts"],
    expert_index: Int[Array, "tokens k"],
    num_sequences: int,
    mask: Bool[Array, " tokens"] | None = None,
    *,
    expert_mask: Bool[Array, " experts"] | None = None,
    axis_names: tuple[str, ...] = (),
) -> Float[Array, ""]:
    """`load_balance_loss` within each sequence, averaged with the sequences' token counts.

    The tokens are `num_sequences` sequences of equal length, one after the other. Unlike the loss
    over a batch, this one is the same however the batch is cut into micro-batches or shards.

    Raises:
        ValueError: if the tokens do not divide into `num_sequences`.

    Reference: DeepSeek-V3 (arXiv 2412.19437), equations 17-20, up to the weights of the mean; and
    where a balance bias steers the selection, f here counts what it selected, there the K largest
    scores without it.
    """
    num_tokens = gate_logits.shape[0]
    if num_sequences < 1 or num_tokens % num_sequences:
        raise ValueError(f"num_sequences={num_sequences} does not divide tokens={num_tokens}")
    if mask is None:
        mask = jnp.ones(num_tokens, dtype=jnp.bool_)
    check_mask("mask", mask, num_tokens)

    def split(values: Array) -> Array:
        return values.reshape(num_sequences, num_tokens // num_sequences, *values.shape[1:])

    masks = split(mask)
    loss = partial(load_balance_loss, expert_mask=expert_mask)
    losses = jax.vmap(loss)(split(gate_logits), split(expert_index), masks)
    counts = jnp.sum(masks, axis=1, dtype=jnp.float32)
    total = _sum_over(jnp.sum(losses * counts), axis_names)
    return total / jnp.maximum(_sum_over(jnp.sum(counts), axis_names), 1.0)


def router_z_loss(
    gate_logits: Float[Array, "tokens experts"],
    mask: Bool[Array, " tokens"] | None = None,
    *,
    axis_names: tuple[str, ...] = (),
) -> Float[Array, ""]:
    """Mean over tokens of the squared log-partition function of the gate, (log sum_e exp l_e)^2.

    Keeps the logits small, where float32 softmax is accurate. 0 if no token counts.

    Args:
        gate_logits: scores before the softmax.
        mask: tokens that count; all of them if None.
        axis_names: see the module.

    Reference: Zoph et al. 2022 (arXiv 2202.08906), equation 5.
    """
    log_partition = jax.nn.logsumexp(clear_masked(gate_logits, mask), axis=-1)
    return _token_mean(mask, gate_logits.shape[0], axis_names)(jnp.square(log_partition))


def importance_loss(
    gate_logits: Float[Array, "tokens experts"],
    mask: Bool[Array, " tokens"] | None = None,
    *,
    expert_mask: Bool[Array, " experts"] | None = None,
    axis_names: tuple[str, ...] = (),
) -> Float[Array, ""]:
    """Squared coefficient of variation of the experts' importance, E sum_e P_e^2 - 1.

    P_e is the mean gate probability of expert e: 0 when they are equal, E - 1 when one has all. 0
    if no token counts.

    Args:
        gate_logits: scores before the softmax.
        mask: tokens that count; all of them if None.
        expert_mask: experts that are open, with logits of -inf for the others; E is their number.
            All of them if None.
        axis_names: see the module.

    Reference: Shazeer et al. 2017 (arXiv 1701.06538), equations 6-7, which sum the sparse gates;
    the softmax before selection, as here, gives every expert a gradient.
    """
    mean = _token_mean(mask, gate_logits.shape[0], axis_names)
    probability = mean(jax.nn.softmax(clear_masked(gate_logits, mask), axis=-1))
    total = jnp.sum(probability)
    # total is 1 up to rounding, which would otherwise be all that is left near balance.
    if expert_mask is None:
        expert_mask = jnp.ones(gate_logits.shape[-1], dtype=jnp.bool_)
    num_open = jnp.maximum(jnp.sum(expert_mask, dtype=jnp.float32), 1.0)
    share = probability / jnp.where(total > 0, total, 1.0) - 1.0 / num_open
    variation = num_open * jnp.sum(jnp.square(share), where=expert_mask)
    return jnp.where(total > 0, variation, 0.0)


def gate_entropy(
    gate_logits: Float[Array, "tokens experts"],
    mask: Bool[Array, " tokens"] | None = None,
    *,
    axis_names: tuple[str, ...] = (),
) -> Float[Array, ""]:
    """Mean entropy of the gate's softmax in nats, in [0, log E]; 0 if no token counts.

    As a loss, a positive weight sharpens the gate and a negative one flattens it.

    Args:
        gate_logits: scores before the softmax; -inf closes an expert.
        mask: tokens that count; all of them if None.
        axis_names: see the module.
    """
    log_probability = jax.nn.log_softmax(clear_masked(gate_logits, mask), axis=-1)
    # p log p is 0 at p = 0, and must have derivative 0 there for an expert that is closed.
    finite = jnp.maximum(log_probability, jnp.finfo(jnp.float32).min)
    entropy = -jnp.sum(jnp.exp(log_probability) * finite, axis=-1)
    return _token_mean(mask, gate_logits.shape[0], axis_names)(entropy)


def clear_masked(
    gate_logits: Float[Array, "tokens experts"],
    mask: Bool[Array, " tokens"] | None,
    dtype: jax.typing.DTypeLike = jnp.float32,
) -> Float[Array, "tokens experts"]:
    """Casts to `dtype` and zeroes masked rows, whose NaN would survive a product with weight 0.

    Raises:
        ValueError: if the logits are no matrix, or the mask is not boolean or does not fit.
    """
    if gate_logits.ndim != 2:
        raise ValueError(f"gate_logits {gate_logits.shape}: expected [tokens, experts]")
    gate_logits = gate_logits.astype(dtype)
    if mask is None:
        return gate_logits
    check_mask("mask", mask, gate_logits.shape[0])
    return jnp.where(mask[:, None], gate_logits, 0.0)


def check_mask(name: str, mask: Array, length: int) -> None:
    """Raises ValueError unless `mask` is bool[length]: numbers would weigh, one row spread."""
    if mask.dtype != jnp.bool_:
        raise ValueError(f"{name} has type {mask.dtype}; expected bool")
    if mask.shape != (length,):
        raise ValueError(f"{name} {mask.shape} does not fit: expected ({length},)")


def _token_mean(
    mask: Bool[Array, " tokens"] | None, num_tokens: int, axis_names: tuple[str, ...]
) -> Callable[[Array], Array]:
    """Mean over the leading axis of the tokens that count, on all shards; 0 if none does."""
    if mask is None:
        mask = jnp.ones(num_tokens, dtype=jnp.bool_)
    weight = mask.astype(jnp.float32)
    count = jnp.maximum(_sum_over(jnp.sum(weight), axis_names), 1.0)

    def mean(values: Array) -> Array:
        shaped = weight.reshape(-1, *([1] * (values.ndim - 1)))
        return _sum_over(jnp.sum(values * shaped, axis=0), axis_names) / count

    return mean


def _sum_over(values: Array, axis_names: tuple[str, ...]) -> Array:
    return jax.lax.psum(values, axis_names) if axis_names else values
