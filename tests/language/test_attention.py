import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.language import attention
from moe_jax.language.attention import Attention, RMSNorm, causal_attention, rotate
from moe_jax.language.config import LanguageModelConfig


def reference(query, key, value, segment_ids, out_gradient):
    """Attention and its derivative in float64, one row and head at a time."""
    query, key, value, out_gradient = (
        np.asarray(array, np.float64) for array in (query, key, value, out_gradient)
    )
    batch, length, num_heads, head_dim = query.shape
    out, gradients = np.zeros_like(query), [np.zeros_like(x) for x in (query, key, value)]
    earlier = np.tril(np.ones((length, length), bool))
    for b in range(batch):
        visible = earlier & (segment_ids[b][:, None] == segment_ids[b][None, :])
        for h in range(num_heads):
            g = h // (num_heads // key.shape[2])
            q, k, v, do = query[b, :, h], key[b, :, g], value[b, :, g], out_gradient[b, :, h]
            scores = np.where(visible, q @ k.T / np.sqrt(head_dim), -np.inf)
            weight = np.exp(scores - scores.max(axis=1, keepdims=True))
            weight /= weight.sum(axis=1, keepdims=True)
            out[b, :, h] = weight @ v
            weight_gradient = do @ v.T
            mean = (weight * weight_gradient).sum(axis=1, keepdims=True)
            score_gradient = weight * (weight_gradient - mean) / np.sqrt(head_dim)
            gradients[0][b, :, h] += score_gradient @ k
            gradients[1][b, :, g] += score_gradient.T @ q
            gradients[2][b, :, g] += weight.T @ do
    return out, gradients


def value_and_gradients(query, key, value, segment_ids, out_gradient):
    out, backward = jax.vjp(
        lambda *arrays: causal_attention(*arrays, segment_ids), query, key, value
    )
    return out, list(backward(out_gradient))


JITTED = jax.jit(value_and_gradients)


def example(length, num_heads=4, num_kv_heads=2, head_dim=6, dtype=jnp.float32, seed=0):
    """Random q, k, v, documents of random lengths with padding at the end, and a cotangent."""
    rng = np.random.default_rng(seed)
    shapes = [(2, length, heads, head_dim) for heads in (num_heads, num_kv_heads, num_kv_heads)]
    query, key, value = (jnp.asarray(rng.normal(size=s).astype(np.float32), dtype) for s in shapes)
    segment_ids = 1 + np.cumsum(rng.random((2, length)) < 3 / length, axis=1, dtype=np.int32)
    segment_ids[1, length - length // 4 :] = 0
    out_gradient = jnp.asarray(rng.normal(size=shapes[0]).astype(np.float32), dtype)
    return query, key, value, jnp.asarray(segment_ids), out_gradient


def assert_agrees(arguments, tolerance, function=JITTED):
    out, gradients = function(*arguments)
    expected, expected_gradients = reference(*arguments)
    names = ("out", "query gradient", "key gradient", "value gradient")
    for name, got, want in zip(
        names, [out, *gradients], [expected, *expected_gradients], strict=True
    ):
        assert got.dtype == arguments[0].dtype
        error = np.max(np.abs(np.asarray(got, np.float64) - want))
        assert error <= tolerance * max(np.max(np.abs(want)), 1.0), (name, error)


# Around the block of 128 queries, below it, and past two of them.
@pytest.mark.parametrize("length", [1, 5, 127, 128, 130, 300])
def test_agrees_with_plain_attention(length):
    # Sums of up to 300 products of order 1, each rounded to 6e-8 of its size.
    assert_agrees(example(length), 5e-6)


@pytest.mark.parametrize("num_kv_heads", [1, 4])
def test_agrees_with_plain_attention_for_any_grouping(num_kv_heads):
    assert_agrees(example(5, num_kv_heads=num_kv_heads, seed=1), 5e-6)


def test_agrees_with_plain_attention_over_many_blocks(monkeypatch):
    monkeypatch.setattr(attention, "MIN_BLOCK", 3)
    monkeypatch.setattr(attention, "MAX_BLOCKS", 4)
    assert attention._blocks(18) == [(0, 5), (5, 10), (10, 15), (15, 18)]
    assert_agrees(example(18, seed=2), 5e-6, jax.jit(lambda *args: value_and_gradients(*args)))


def test_agrees_with_plain_attention_in_bfloat16():
    # Operands and results keep 8 bits, and so do the softmax weights before the second product.
    assert_agrees(example(130, dtype=jnp.bfloat16), 2e-2)


def test_large_scores_stay_finite():
    query, *others = example(130, seed=3)
    assert_agrees((query * 1000.0, *others), 1e-3)


def test_blocks_tile_the_length_in_at_most_eight():
    for length in range(1, 3000, 7):
        starts, ends = zip(*attention._blocks(length), strict=True)
        assert starts == (0, *ends[:-1]) and ends[-1] == length and len(starts) <= 8
        assert all(end - start >= 128 for start, end in attention._blocks(length)[:-1])


def test_later_tokens_change_no_bit():
    query, key, value, segment_ids, out_gradient = example(300, seed=4)
    before, _ = JITTED(query, key, value, segment_ids, out_gradient)
    for place in (1, 128, 250):
        changed = [x.at[:, place:].add(3.0) for x in (query, key, value)]
        after, _ = JITTED(*changed, segment_ids, out_gradient)
        np.testing.assert_array_equal(before[:, :place], after[:, :place])
        assert not np.array_equal(before[:, place:], after[:, place:])


def test_other_documents_change_no_bit():
    query, key, value, _, out_gradient = example(300, seed=5)
    document = np.repeat([1, 2, 3], [60, 140, 100])
    segment_ids = jnp.asarray(np.stack([document, document]), jnp.int32)
    before, gradients_before = JITTED(query, key, value, segment_ids, out_gradient)
    inside = jnp.asarray(document == 2)[None, :, None, None]
    changed = [jnp.where(inside, x, x + 3.0) for x in (query, key, value)]
    after, gradients_after = JITTED(*changed, segment_ids, out_gradient)
    own = document == 2
    np.testing.assert_array_equal(before[:, own], after[:, own])
    for first, second in zip(gradients_before, gradients_after, strict=True):
        np.testing.assert_array_equal(first[:, own], second[:, own])


def test_gradient_reaches_neither_later_tokens_nor_other_documents():
    query, key, value, _, out_gradient = example(300, seed=6)
    document = np.repeat([1, 2], [100, 200])
    segment_ids = jnp.asarray(np.stack([document, document]), jnp.int32)
    only = jnp.zeros_like(out_gradient).at[:, 150].set(out_gradient[:, 150])
    _, (query_gradient, key_gradient, value_gradient) = JITTED(query, key, value, segment_ids, only)
    for gradient in (key_gradient, value_gradient):
        assert not np.any(gradient[:, :100]) and not np.any(gradient[:, 151:])
        assert np.all(np.any(gradient[:, 100:151] != 0, axis=(2, 3)))
    assert not np.any(np.delete(query_gradient, 150, axis=1))


def test_rotation_angle_is_position_times_frequency():
    # Width 4, base 100: pairs (x_0, x_2) at frequency 1 and (x_1, x_3) at 100^(-1/2) = 0.1.
    x = jnp.asarray([1.0, 0.0, 0.0, 2.0], jnp.float32).reshape(1, 1, 1, 4)
    out = rotate(x, jnp.full((1, 1), 3, jnp.int32), 100.0)[0, 0, 0]
    expected = [np.cos(3), -2 * np.sin(0.3), np.sin(3), 2 * np.cos(0.3)]
    np.testing.assert_allclose(out, expected, atol=1e-6)


def test_rotation_at_position_0_is_identity():
    x = example(5)[0]
    np.testing.assert_array_equal(rotate(x, jnp.zeros((2, 5), jnp.int32), 10_000.0), x)


def test_rotation_keeps_length_and_type():
    x = example(5, dtype=jnp.bfloat16)[0]
    positions = jnp.broadcast_to(jnp.arange(5, dtype=jnp.int32)[None], (2, 5)) * 1000
    out = rotate(x, positions, 10_000.0)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        *(np.linalg.norm(np.asarray(y, np.float32), axis=-1) for y in (out, x)), rtol=2e-2
    )


def test_rotated_products_depend_on_the_distance_only():
    query, key = example(9, num_kv_heads=4, head_dim=8, seed=7)[:2]
    positions = jnp.broadcast_to(jnp.arange(9, dtype=jnp.int32)[None], (2, 9))

    def scores(shift):
        rotated = [rotate(x, positions + shift, 10_000.0) for x in (query, key)]
        return jnp.einsum("blhd,bmhd->bhlm", *rotated)

    # Angles up to 500 are rounded to 3e-5.
    np.testing.assert_allclose(scores(0), scores(491), atol=5e-4)
    shifted_key = rotate(key, positions + 1, 10_000.0)
    moved = jnp.einsum("blhd,bmhd->bhlm", rotate(query, positions, 10_000.0), shifted_key)
    assert np.max(np.abs(moved - scores(0))) > 0.1


def test_norm_divides_by_the_root_mean_square():
    x = jnp.asarray([[3.0, 4.0]], jnp.float32)
    out = RMSNorm(epsilon=0.0).apply({"params": {"scale": jnp.asarray([1.0, 2.0])}}, x)
    root = np.sqrt(12.5)
    np.testing.assert_allclose(out, [[3 / root, 8 / root]], rtol=1e-6)


def test_norm_works_in_float32_whatever_the_types():
    x = jnp.full((1, 64), 200.0, jnp.bfloat16)
    module = RMSNorm(dtype=jnp.bfloat16)
    params = module.init(jax.random.key(0), x)
    assert params["params"]["scale"].dtype == jnp.float32
    out = module.apply(params, x)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(out, np.float32), 1.0)


def test_norm_of_zero_is_zero_with_finite_gradient():
    x = jnp.zeros((1, 4), jnp.float32)
    params = {"params": {"scale": jnp.ones(4, jnp.float32)}}
    out, gradient = jax.value_and_grad(lambda x: jnp.sum(RMSNorm().apply(params, x)))(x)
    assert out == 0.0 and np.all(np.isfinite(gradient))


CONFIG = LanguageModelConfig(
    vocab_size=8,
    model_dim=10,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    layer_pattern=("dense",),
    hidden_dim=4,
    rope_base=100.0,
)


def test_module_projects_normalises_rotates_and_attends():
    rng = np.random.default_rng(8)
    x = rng.normal(size=(2, 5, 10))
    segment_ids = np.array([[1, 1, 1, 2, 2], [1, 1, 1, 1, 1]], np.int32)
    positions = np.array([[0, 1, 2, 0, 1], [0, 1, 2, 3, 4]], np.int32)
    module = Attention(CONFIG)
    inputs = jnp.asarray(x, jnp.float32), jnp.asarray(segment_ids), jnp.asarray(positions)
    params = jax.jit(module.init)(jax.random.key(0), *inputs)["params"]
    assert jax.tree.map(jnp.shape, params) == {
        "query": (10, 24),
        "key": (10, 12),
        "value": (10, 12),
        "out": (24, 10),
        "query_norm": {"scale": (6,)},
        "key_norm": {"scale": (6,)},
    }
    params["query_norm"]["scale"] = jnp.asarray(rng.uniform(1, 2, 6), jnp.float32)
    weights = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)

    def heads(name):
        out = (x @ weights[name]).reshape(2, 5, -1, 6)
        if name == "value":
            return out
        out /= np.sqrt(np.mean(out**2, axis=-1, keepdims=True) + 1e-6)
        out *= weights[f"{name}_norm"]["scale"]
        turn = np.exp(1j * positions[:, :, None, None] * 100.0 ** (-np.arange(3) / 3))
        turned = (out[..., :3] + 1j * out[..., 3:]) * turn
        return np.concatenate([turned.real, turned.imag], axis=-1)

    arguments = [heads(name) for name in ("query", "key", "value")]
    expected, _ = reference(*arguments, segment_ids, np.zeros_like(arguments[0]))
    out = jax.jit(module.apply)({"params": params}, *inputs)
    np.testing.assert_allclose(out, expected.reshape(2, 5, 24) @ weights["out"], atol=1e-5)


def test_output_projection_starts_smaller_in_deeper_models():
    def spread(num_layers):
        config = LanguageModelConfig(
            vocab_size=8,
            model_dim=64,
            num_layers=num_layers,
            num_heads=4,
            num_kv_heads=2,
            hidden_dim=4,
            layer_pattern=("dense",),
            qk_norm=False,
        )
        x = jnp.zeros((1, 1, 64), jnp.float32)
        place = jnp.zeros((1, 1), jnp.int32)
        params = jax.jit(Attention(config).init)(jax.random.key(0), x, place, place)["params"]
        assert set(params) == {"query", "key", "value", "out"}
        return np.std(params["out"])

    # Standard deviation (2 layers fan-in)^(-1/2), from 4096 draws: 1.1 % of standard error.
    for num_layers in (1, 8):
        np.testing.assert_allclose(spread(num_layers), (2 * num_layers * 64) ** -0.5, rtol=0.05)
