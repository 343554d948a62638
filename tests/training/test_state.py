import jax
import jax.numpy as jnp
import numpy as np
import optax

from moe_jax.training.state import init_state, variables_of

OPTIMIZER = optax.adam(0.1)


def init(key):
    return init_state(key, {"w": jnp.ones((2,), jnp.float32)}, OPTIMIZER)


def test_state_starts_at_zero_with_the_optimisers_own_state():
    key = jax.random.key(3)
    state = init(key)
    for counter in (state.step, state.skipped, state.skipped_in_row):
        assert counter.dtype == jnp.int32 and counter.shape == () and counter == 0
    assert state.key is key
    expected = OPTIMIZER.init(state.params)
    assert jax.tree.structure(state.opt_state) == jax.tree.structure(expected)


def test_no_two_leaves_share_a_buffer():
    for make in (init, jax.jit(init)):
        state = make(jax.random.key(3))
        leaves = [leaf for leaf in jax.tree.leaves(state) if leaf.dtype != state.key.dtype]
        pointers = [leaf.unsafe_buffer_pointer() for leaf in leaves]
        assert len(set(pointers)) == len(pointers) == 7


def test_model_state_is_kept_out_of_the_optimiser_and_joins_the_variables():
    params, model_state = {"w": jnp.ones((2,))}, {"router_state": {"b": jnp.zeros((3,))}}
    state = init_state(jax.random.key(3), params, OPTIMIZER, model_state)
    expected = OPTIMIZER.init(state.params)
    assert jax.tree.structure(state.opt_state) == jax.tree.structure(expected)
    assert set(variables_of(state)) == {"params", "router_state"}
    assert set(variables_of(init(jax.random.key(3)))) == {"params"}


def test_state_passes_through_jit_with_its_key():
    state = init(jax.random.key(3))
    after = jax.jit(lambda state: state.replace(step=state.step + 1))(state)
    assert after.step == 1
    np.testing.assert_array_equal(jax.random.key_data(after.key), jax.random.key_data(state.key))
