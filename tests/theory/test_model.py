"""Trainable stacks: layers of the library if affine, constructions as parameters, known weights."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.core import SparseMoE
from theory.atlas import regular_centers, voronoi_atlas
from theory.construct import chart_moe
from theory.experiments import built_start
from theory.fit import ONCE
from theory.manifolds import circle
from theory.model import (
    STACK_GATES,
    Output,
    Stack,
    apply_stack,
    expert_weights,
    init_stack,
    likelihood_loss,
)
from theory.network import apply_network
from theory.problems import PARTITIONS, cell_of, grid_problem, manifold_problem, partition_problem
from theory.product_grid import product_grid, product_grid_moe
from theory.targets import waves

KEY = jax.random.key(0)
# Compiled once a shape: operation by operation takes many times as long.
apply = jax.jit(apply_stack, static_argnums=0, compiler_options=ONCE)
init = jax.jit(init_stack, static_argnums=1, compiler_options=ONCE)
SCORES = jnp.log(jnp.array([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7]]))


def points(num, dim):
    return jax.random.normal(jax.random.key(1), (num, dim))


def test_a_stack_with_hard_weights_is_a_row_of_sparse_layers():
    stack = Stack(2, 1, num_experts=3, hidden_dim=4, num_layers=2, state_dim=3, weighting="hard")
    params = init(KEY, stack)
    layer = SparseMoE(
        num_experts=3,
        num_selected=1,
        hidden_dim=4,
        router_options={"softmax": "after"},
        activation="relu",
        gated=False,
        implementation="dense",
    )
    x = points(50, 2)
    tokens = jnp.zeros((50, 4)).at[:, 0].set(1.0).at[:, 1:3].set(x)
    for variables in params:
        tokens, _ = jax.jit(layer.apply)({"params": variables}, tokens)
        tokens = tokens.at[:, 0].set(1.0)
    found = apply(stack, params, x).y
    np.testing.assert_allclose(found, tokens[:, 1:2], atol=1e-5)


def test_constructions_are_parameters_of_a_stack():
    atlas = voronoi_atlas(KEY, circle(), center_params=regular_centers("circle", 4))
    build = chart_moe(KEY, atlas, waves(), 8)
    angles = np.linspace(0.0, 6.0, 200)[:, None]
    x = circle().embed(angles)
    stack = Stack(2, 1, num_experts=4, hidden_dim=9, weighting="hard")
    target = product_grid(KEY, 3, 2)
    deep = product_grid_moe(target)
    cube = np.random.default_rng(0).uniform(0, 3, size=(200, 2))
    row = Stack(2, 2, num_experts=3, hidden_dim=7, num_layers=2, weighting="hard")
    for shape, network, inputs in ((stack, build.network, x), (row, deep, cube)):
        known = apply_network(network, inputs, implementation="dense")
        with jax.enable_x64(True):
            params = [jax.tree.map(jnp.asarray, each["params"]) for each in network.params]
            found = apply(shape, params, jnp.asarray(inputs))
            selection = np.asarray(found.selection)
        assert np.abs(np.asarray(found.y) - known.y).max() < 1e-12
        assert np.array_equal(selection.T, known.selection)


def test_the_data_driven_start_is_close_before_any_training():
    problem = manifold_problem(KEY, "moment_curve", 16, num_train=2000, num_test=500)
    stack = Stack(16, 1, num_experts=4, hidden_dim=11, weighting="hard")
    found = apply(stack, built_start(stack, problem), jnp.asarray(problem.x_test))
    assert np.mean(np.square(found.y - problem.y_test)) < 2e-2


def test_weights_of_known_shares():
    np.testing.assert_allclose(expert_weights(SCORES, 1, "soft")[0], [0.5, 0.3, 0.2], rtol=1e-6)
    np.testing.assert_allclose(expert_weights(SCORES, 1, "hard"), [[1, 0, 0], [0, 0, 1]])
    np.testing.assert_allclose(expert_weights(SCORES, 2, "hard"), [[0.5, 0.5, 0], [0, 0.5, 0.5]])
    np.testing.assert_allclose(
        expert_weights(SCORES, 2, "switch"), [[0.5, 0.3, 0], [0, 0.2, 0.7]], rtol=1e-6
    )
    np.testing.assert_allclose(
        expert_weights(SCORES, 2, "straight_through"),
        [[5 / 8, 3 / 8, 0], [0, 2 / 9, 7 / 9]],
        atol=1e-6,
    )


def test_a9_only_the_paper_s_weights_leave_the_gate_without_gradient():
    def slope(rule, num_selected=1):
        values = jnp.array([1.0, 2.0, 4.0])
        return jax.grad(lambda s: jnp.sum(expert_weights(s, num_selected, rule) @ values))(SCORES)

    assert not np.any(slope("hard"))
    for rule in ("straight_through", "switch", "soft"):
        assert np.all(np.abs(slope(rule)) > 0)
    # The straight-through estimate has the gradient of the soft weights.
    np.testing.assert_allclose(slope("straight_through"), slope("soft"), rtol=1e-6)


def test_likelihood_of_known_residuals():
    """Residuals 1 and 2 at equal shares, s = 1: -log((e^-1/2 + e^-2) / 2)."""
    y = jnp.zeros((1, 1))
    answers = jnp.array([[[1.0]], [[2.0]]])
    output = Output(y, answers, jnp.zeros((1, 1, 2)), jnp.zeros(()))
    expected = -np.log((np.exp(-0.5) + np.exp(-2.0)) / 2)
    assert float(likelihood_loss(output, y, jnp.ones(()))) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("gate", STACK_GATES)
def test_counts_are_those_of_the_parameters(gate):
    stack = Stack(2, 1, num_experts=3, hidden_dim=4, gate=gate, gate_dim=5, shared_dim=2)
    leaves = jax.tree.leaves(jax.eval_shape(lambda: init_stack(KEY, stack)))
    # The cosine gate's one temperature is left out.
    total = sum(leaf.size for leaf in leaves) - (gate == "cosine")
    # The answers' constant and, behind a dense layer, its neurons come out but are not read.
    unread = 5 * (3 * 4 + 2) if gate == "dense" else 0
    assert stack.total_parameters == total - unread
    width = 3 + (5 if gate == "dense" else 0)
    assert total - unread - stack.active_parameters == 2 * 4 * (width + 3)


def test_an_encoded_expert_is_the_composition():
    stack = Stack(3, 1, num_experts=2, hidden_dim=4, encoder_dim=2)
    params = init(KEY, stack)
    expert = params[0]["experts"]
    x = points(20, 3)
    tokens = jnp.concatenate([jnp.ones((20, 1)), x], axis=1)
    answers = apply(stack, params, x).answers
    for e in range(2):
        code = tokens @ expert["encoder"][e]
        hidden = jax.nn.relu(code @ expert["low"][e, 1:] + expert["low"][e, 0][None, :])
        known = (hidden @ expert["down"][e])[:, 1:2]
        np.testing.assert_allclose(answers[e], known, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 0}, "num_experts=0 must be at least 1"),
        ({"num_selected": 4}, "num_selected=4 is not in"),
        ({"weighting": "none"}, "weighting='none' is not one of"),
        ({"gate": "none"}, "gate='none' is not one of"),
        ({"weighting": "likelihood", "num_layers": 2}, "needs num_layers=1, not 2"),
    ],
)
def test_impossible_stacks_are_refused(changes, message):
    stack = Stack(2, 1, num_experts=3, hidden_dim=4)
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(stack, **changes)


def test_problems_have_unit_variance_and_cells_with_jumps():
    sizes = {"num_train": 2000, "num_test": 500}
    problems = [manifold_problem(KEY, name, 10, **sizes) for name in ("moment_curve", "sphere")]
    problems += [partition_problem(KEY, name, **sizes) for name in PARTITIONS]
    problems.append(grid_problem(KEY, 3, 2, **sizes))
    for problem in problems:
        np.testing.assert_allclose(problem.y.mean(axis=0), 0, atol=1e-5)
        np.testing.assert_allclose(problem.y.std(axis=0), 1, atol=1e-5)
    assert [len(np.unique(each.labels)) for each in problems[2:]] == [4, 4, 4, 9, 9]
    assert problems[-1].jump > 0.3
    # On the axis to the right, radius 0.5 lies between the first ring's radii.
    assert cell_of("rings", np.array([[0.5, 0.0]])).tolist() == [1]
    assert cell_of("grid", np.array([[-0.9, 0.9], [0.0, 0.0]])).tolist() == [2, 4]
    for attempt in (manifold_problem, partition_problem):
        with pytest.raises(ValueError, match="name='plane' is not"):
            attempt(
                KEY, "plane", **({"ambient_dim": 3} if attempt is manifold_problem else {}), **sizes
            )
