"""Causal self-attention with rotary positions and grouped queries, confined to documents."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.core.experts import matmul
from moe_jax.language.config import LanguageModelConfig

CACHE = "cache"
"""Collection of the keys and values of earlier tokens."""
MIN_BLOCK = 128
MAX_BLOCKS = 8
HIDDEN = -1e30
"""Score of a key that a query must not see: exp underflows to 0, and no infinity meets another."""


def rotate(
    x: Float[Array, "batch length heads head"],
    positions: Int[Array, "batch length"],
    base: float,
) -> Float[Array, "batch length heads head"]:
    """Rotates the pairs (x_i, x_{i + head/2}) by the angle position base^(-2i/head).

    Angles are float32; the result has the type of `x`.

    Reference: Su et al. 2021 (arXiv 2104.09864), with the halves layout of GPT-NeoX and Llama.
    """
    half = x.shape[-1] // 2
    frequency = base ** (-jnp.arange(half, dtype=jnp.float32) / jnp.float32(half))
    angle = positions.astype(jnp.float32)[:, :, None, None] * frequency[None, None, None, :]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def causal_attention(
    query: Float[Array, "batch length heads head"],
    key: Float[Array, "batch length kv_heads head"],
    value: Float[Array, "batch length kv_heads head"],
    segment_ids: Int[Array, "batch length"],
) -> Float[Array, "batch length heads head"]:
    """softmax(q k^T / sqrt(head)) v over the earlier tokens of the same document.

    Token i sees j <= i with segment_ids[j] == segment_ids[i]. Head h uses key and value head
    h // (heads / kv_heads). Scores and softmax are float32; the result has the type of `query`.

    A hidden value has weight exactly 0, but 0 NaN is NaN: one that is not finite reaches others of
    its row, those of other documents too. Finite values do not.

    Queries are taken in blocks, each against the keys up to its own end, which spares nearly half
    of the products. The derivative recomputes the scores from the saved log-partition function, so
    that memory grows with length times block, not length squared (arXiv 2205.14135, section 3.1).
    """
    batch, length, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[2]
    query = (query.astype(jnp.float32) * jnp.float32(head_dim) ** -0.5).astype(query.dtype)
    query = query.reshape(batch, length, num_kv_heads, num_heads // num_kv_heads, head_dim)
    out = _attend(
        jnp.einsum("blgrh->bgrlh", query),
        jnp.einsum("blgh->bglh", key),
        jnp.einsum("blgh->bglh", value),
        segment_ids,
    )
    return jnp.einsum("bgrlh->blgrh", out).reshape(batch, length, num_heads, head_dim)


@jax.custom_vjp
def _attend(query: Array, key: Array, value: Array, segment_ids: Array) -> Array:
    return _attend_forward(query, key, value, segment_ids)[0]


def _attend_forward(
    query: Array, key: Array, value: Array, segment_ids: Array
) -> tuple[Array, tuple[Array, ...]]:
    """Over q [b, g, r, length, h] and k, v [b, g, length, h]; g key heads serve r query heads."""
    outs, log_partitions = [], []
    for start, end in _blocks(query.shape[3]):
        scores = _product("bgrqh,bgkh->bgrqk", query[:, :, :, start:end], key[:, :, :end])
        visible = _visible(segment_ids, slice(start, end), slice(0, end))
        scores = jnp.where(visible[:, None, None], scores, HIDDEN)
        largest = jnp.max(scores, axis=-1, keepdims=True)
        weight = jnp.exp(scores - largest)
        total = jnp.sum(weight, axis=-1)
        out = _product("bgrqk,bgkh->bgrqh", weight.astype(value.dtype), value[:, :, :end])
        # Dividing the sums costs one pass over [length, head] in place of [length, length].
        outs.append((out / total[..., None]).astype(query.dtype))
        log_partitions.append(largest[..., 0] + jnp.log(total))
    out, log_partition = jnp.concatenate(outs, axis=3), jnp.concatenate(log_partitions, axis=3)
    return out, (query, key, value, segment_ids, out, log_partition)


def _attend_backward(
    residuals: tuple[Array, ...], out_gradient: Array
) -> tuple[Array, Array, Array, None]:
    """With P = exp(S - Z): dV = P^T dO, dS = P * (dO V^T - sum(dO * O)), dQ = dS K, dK = dS^T Q.

    Scores are computed twice, once a row of queries and once a row of keys, so that no product
    contracts the leading axis of its left operand, several times slower on CPU.
    """
    query, key, value, segment_ids, out, log_partition = residuals
    dtype = query.dtype
    delta = jnp.sum(out_gradient.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    query_gradients, key_gradients, value_gradients = [], [], []
    for start, end in _blocks(query.shape[3]):
        q, do = query[:, :, :, start:end], out_gradient[:, :, :, start:end]
        k, v = key[:, :, :end], value[:, :, :end]
        scores = _product("bgrqh,bgkh->bgrqk", q, k)
        visible = _visible(segment_ids, slice(start, end), slice(0, end))[:, None, None]
        scores = scores - log_partition[:, :, :, start:end, None]
        weight = jnp.exp(jnp.where(visible, scores, HIDDEN))
        weight_gradient = _product("bgrqh,bgkh->bgrqk", do, v)
        score_gradient = weight * (weight_gradient - delta[:, :, :, start:end, None])
        query_gradients.append(_product("bgrqk,bgkh->bgrqh", score_gradient.astype(dtype), k))

        q, do = query[:, :, :, start:], out_gradient[:, :, :, start:]
        k, v = key[:, :, start:end], value[:, :, start:end]
        scores = _product("bgkh,bgrqh->bgkrq", k, q)
        visible = _visible(segment_ids, slice(start, None), slice(start, end))
        visible = jnp.swapaxes(visible, 1, 2)[:, None, :, None, :]
        scores = scores - log_partition[:, :, None, :, start:]
        weight = jnp.exp(jnp.where(visible, scores, HIDDEN))
        value_gradients.append(_product("bgkrq,bgrqh->bgkh", weight.astype(dtype), do))
        weight_gradient = _product("bgkh,bgrqh->bgkrq", v, do)
        score_gradient = weight * (weight_gradient - delta[:, :, None, :, start:])
        key_gradients.append(_product("bgkrq,bgrqh->bgkh", score_gradient.astype(dtype), q))
    return (
        jnp.concatenate(query_gradients, axis=3).astype(dtype),
        jnp.concatenate(key_gradients, axis=2).astype(key.dtype),
        jnp.concatenate(value_gradients, axis=2).astype(value.dtype),
        None,
    )


_attend.defvjp(_attend_forward, _attend_backward)


def _blocks(length: int) -> list[tuple[int, int]]:
    block = max(MIN_BLOCK, -(-length // MAX_BLOCKS))
    return [(start, min(start + block, length)) for start in range(0, length, block)]


def _visible(segment_ids: Array, queries: slice, keys: slice) -> Array:
    """bool[batch, queries, keys]: earlier or equal, and of the same document."""
    index = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)
    earlier = index[None, keys] <= index[queries, None]
    return earlier[None] & (segment_ids[:, queries, None] == segment_ids[:, None, keys])


def _product(subscripts: str, left: Array, right: Array) -> Array:
    return jnp.einsum(subscripts, left, right, preferred_element_type=jnp.float32)


def cached_attention(
    query: Float[Array, "batch length heads head"],
    keys: Float[Array, "batch kv_heads slots head"],
    values: Float[Array, "batch kv_heads slots head"],
    positions: Int[Array, "batch length"],
) -> Float[Array, "batch length heads head"]:
    """softmax(q k^T / sqrt(head)) v over the slots up to each query's own position.

    The key of a row's token at position p stands in slot p; what later slots hold is not seen.
    Scores and softmax are float32; the result has the type of `query`.
    """
    batch, length, num_heads, head_dim = query.shape
    groups, slots = keys.shape[1:3]
    query = (query.astype(jnp.float32) * jnp.float32(head_dim) ** -0.5).astype(query.dtype)
    query = query.reshape(batch, length, groups, -1, head_dim)
    # One product a head of keys, of all its queries at once.
    query = jnp.einsum("blgrh->bgrlh", query).reshape(batch, groups, -1, head_dim)
    scores = _product("bgqh,bgkh->bgqk", query, keys).reshape(batch, groups, -1, length, slots)
    visible = jnp.arange(slots, dtype=jnp.int32)[None, None] <= positions[:, :, None]
    weight = jax.nn.softmax(jnp.where(visible[:, None, None], scores, HIDDEN))
    weight = weight.astype(values.dtype).reshape(batch, groups, -1, slots)
    out = _product("bgqk,bgkh->bgqh", weight, values).astype(query.dtype)
    out = jnp.einsum("bgrlh->blgrh", out.reshape(batch, groups, -1, length, head_dim))
    return out.reshape(batch, length, num_heads, head_dim)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + epsilon) * scale over the last axis, in float32 (arXiv 1910.07467)."""

    dtype: jax.typing.DTypeLike = jnp.float32
    epsilon: float = 1e-6

    @nn.compact
    def __call__(self, x: Float[Array, "*batch width"]) -> Float[Array, "*batch width"]:
        """Returns the normalised array in `dtype`."""
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), jnp.float32)
        x = x.astype(jnp.float32)
        x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + self.epsilon)
        return (x * jnp.broadcast_to(scale, x.shape)).astype(self.dtype)


class Attention(nn.Module):
    """Projections around `causal_attention`.

    Parameters, float32: `query` [model, heads * head], `key` and `value` [model, kv_heads * head],
    `out` [heads * head, model], and the scales of the query and key norms.

    Where collection `cache` is mutable, keys and values [batch, kv_heads, slots, head] are kept
    there: made from the tokens at hand if there are none yet, else extended at their positions and
    attended to. See `moe_jax.language.cache`.
    """

    config: LanguageModelConfig

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "batch length model"],
        segment_ids: Int[Array, "batch length"],
        positions: Int[Array, "batch length"],
    ) -> Float[Array, "batch length model"]:
        """Attends within documents; `x` is expected normalised, in the compute type."""
        config = self.config
        dtype = jnp.dtype(config.dtype)
        batch, length, model_dim = x.shape

        def project(name: str, num_heads: int) -> Array:
            shape = (model_dim, num_heads * config.head_dim)
            kernel = self.param(name, nn.initializers.lecun_normal(), shape, jnp.float32)
            out = matmul(x, kernel.astype(dtype))
            return out.reshape(batch, length, num_heads, config.head_dim)

        query = project("query", config.num_heads)
        key = project("key", config.num_kv_heads)
        value = project("value", config.num_kv_heads)
        if config.qk_norm:
            query = RMSNorm(dtype=dtype, name="query_norm")(query)
            key = RMSNorm(dtype=dtype, name="key_norm")(key)
        query = rotate(query, positions, config.rope_base)
        key = rotate(key, positions, config.rope_base)
        if self.is_mutable_collection(CACHE) and not self.is_initializing():
            out = self._attend_cached(query, key, value, segment_ids, positions)
        else:
            out = causal_attention(query, key, value, segment_ids)
        out = out.reshape(batch, length, -1)
        # Residual branches start small, so that the stream's variance does not grow with depth.
        scale = 1.0 / (2.0 * config.num_layers)
        initializer = nn.initializers.variance_scaling(scale, "fan_in", "truncated_normal")
        kernel = self.param("out", initializer, (out.shape[-1], model_dim), jnp.float32)
        return matmul(out, kernel.astype(dtype))

    def _attend_cached(
        self, query: Array, key: Array, value: Array, segment_ids: Array, positions: Array
    ) -> Array:
        new = {"key": jnp.swapaxes(key, 1, 2), "value": jnp.swapaxes(value, 1, 2)}
        if not self.has_variable(CACHE, "key"):
            for name, rows in new.items():
                self.put_variable(CACHE, name, rows)
            return causal_attention(query, key, value, segment_ids)
        whole = {}
        for name, rows in new.items():
            kept: Array = self.get_variable(CACHE, name)
            whole[name] = _write_rows(kept, rows, positions[:, 0])
            self.put_variable(CACHE, name, whole[name])
        return cached_attention(query, whole["key"], whole["value"], positions)


def _write_rows(kept: Array, rows: Array, first: Array) -> Array:
    """Rows [batch, kv_heads, length, head] into the slots from `first` [batch] on."""

    def write(kept: Array, rows: Array, first: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(kept, rows, first, axis=1)

    return jax.vmap(write)(kept, rows, first)
