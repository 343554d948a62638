"""Trainable rows of mixture layers, every expert computed, under the rules of weighting compared.

A layer's parameters are those of the library's `SparseMoE` without biases: tokens are (1, x, 0..0),
the constant is put back between layers. So a construction of `theory.construct` or
`theory.datadriven` is a starting point, and a trained layer with an affine gate is a `SparseMoE`.

Weights w_e of the answers, p the softmax of the gate's scores, S the k experts of largest score:

- `hard`: 1 / k on S. The paper's form for k = 1: the task loss gives the gate no gradient at all.
- `straight_through`: p renormalised over S forward, the gradient of p backward (every expert's
  answer enters it).
- `switch`: p on S, not renormalised (Fedus et al. 2021).
- `soft`: p on all experts; all are active.
- `likelihood`: trained by -log sum_e p_e N(y; f_e(x), s^2) with s falling, one layer; answers as
  `hard`.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, PyTree

from moe_jax.core import ExpertFFN, FeedForward
from moe_jax.core.gates import GATES
from theory.checks import check_count

WEIGHTINGS = ("hard", "straight_through", "switch", "soft", "likelihood")
STACK_GATES = ("affine", "quadratic", "hidden_layer", "dense", "cosine")


@dataclasses.dataclass(frozen=True)
class Stack:
    """Shape of a network and how its experts are weighed.

    Attributes:
        input_dim, output_dim: of the function.
        num_experts: E of each layer.
        hidden_dim: m, neurons of an expert.
        num_layers: L.
        state_dim: least width of the state between layers, without the constant.
        num_selected: k.
        weighting: one of `WEIGHTINGS`.
        gate: one of `STACK_GATES`: scores linear in (1, x); in all products of its entries; of a
            hidden layer; linear behind a dense layer that passes x on and adds `gate_dim` ReLU
            neurons, which the experts see too; cosine.
        gate_dim: width of the `hidden_layer` and `dense` gates.
        shared_dim: neurons of an expert that answers every point; 0 for none.
        encoder_dim: d' of an expert f_low(Enc x), Enc linear with one constant; 0 for full experts.

    Raises:
        ValueError: naming the attribute, its value and what is accepted.
    """

    input_dim: int
    output_dim: int
    num_experts: int
    hidden_dim: int
    num_layers: int = 1
    state_dim: int = 0
    num_selected: int = 1
    weighting: str = "straight_through"
    gate: str = "affine"
    gate_dim: int = 16
    shared_dim: int = 0
    encoder_dim: int = 0

    def __post_init__(self) -> None:
        for name in ("input_dim", "output_dim", "num_experts", "hidden_dim", "num_layers"):
            check_count(name, getattr(self, name))
        for name in ("num_selected", "gate_dim"):
            check_count(name, getattr(self, name))
        for name in ("state_dim", "shared_dim", "encoder_dim"):
            check_count(name, getattr(self, name), 0)
        if not 1 <= self.num_selected <= self.num_experts:
            raise ValueError(
                f"num_selected={self.num_selected} is not in [1, num_experts={self.num_experts}]"
            )
        if self.weighting not in WEIGHTINGS:
            raise ValueError(f"weighting={self.weighting!r} is not one of {WEIGHTINGS}")
        if self.gate not in STACK_GATES:
            raise ValueError(f"gate={self.gate!r} is not one of {STACK_GATES}")
        if self.weighting == "likelihood" and self.num_layers > 1:
            raise ValueError(f"weighting='likelihood' needs num_layers=1, not {self.num_layers}")

    @property
    def token_dim(self) -> int:
        """Width of a token, the constant included."""
        return 1 + max(self.input_dim, self.output_dim, self.state_dim)

    @property
    def active_parameters(self) -> int:
        """Parameters that enter one point's answer, the gate's included.

        Those of k experts a layer; of all for `soft`, which leaves none out.
        """
        return self._count(self.num_experts if self.weighting == "soft" else self.num_selected)

    @property
    def total_parameters(self) -> int:
        """All parameters, without the gate of a single expert, which decides nothing."""
        return self._count(self.num_experts)

    def _count(self, num_experts: int) -> int:
        front = self.gate_dim if self.gate == "dense" else 0
        width, gate_width = self.token_dim + front, self.token_dim + front
        gate = {
            "quadratic": gate_width * (gate_width + 1) // 2 * self.num_experts,
            "hidden_layer": (gate_width + 1) * self.gate_dim
            + (self.gate_dim + 1) * self.num_experts,
        }.get(self.gate, gate_width * self.num_experts)
        gate = gate if self.num_experts > 1 else 0
        inner = width * self.hidden_dim
        if self.encoder_dim:
            inner = width * self.encoder_dim + (self.encoder_dim + 1) * self.hidden_dim
        expert = inner + self.hidden_dim * self.token_dim
        shared = (width + self.token_dim) * self.shared_dim
        dense = front * self.token_dim
        return self.num_layers * (gate + num_experts * expert + shared + dense)


class Output(NamedTuple):
    """What a stack says of points.

    Attributes:
        y: [points, outputs].
        answers: [experts, points, outputs] of the last layer.
        logits: [layers, points, experts], the gates' scores.
        reconstruction: [], mean squared error of decoding the encoders' codes; 0 without encoders.
    """

    y: Float[Array, "points outputs"]
    answers: Float[Array, "experts points outputs"]
    logits: Float[Array, "layers points experts"]
    reconstruction: Float[Array, ""]

    @property
    def selection(self) -> Int[Array, "layers points"]:
        """The expert of largest score."""
        return jnp.argmax(self.logits, axis=-1)


def init_stack(key: Key[Array, ""], stack: Stack) -> list[PyTree]:
    """Random parameters, one entry a layer."""
    return [_init_layer(layer_key, stack) for layer_key in jax.random.split(key, stack.num_layers)]


def apply_stack(
    stack: Stack, params: list[PyTree], x: Float[Array, "points D"], *, weighting: str | None = None
) -> Output:
    """Answers of the network.

    Args:
        stack: shape.
        params: as `init_stack` gives.
        x: points.
        weighting: in place of the stack's own; `hard` for evaluation.
    """
    rule = weighting or stack.weighting
    tokens = jnp.zeros((x.shape[0], stack.token_dim), x.dtype)
    tokens = tokens.at[:, 0].set(1.0).at[:, 1 : 1 + x.shape[1]].set(x)
    logits, reconstruction = [], jnp.zeros((), x.dtype)
    answers = tokens[None]
    for layer in params:
        seen = tokens
        if stack.gate == "dense":
            front = jax.nn.relu(tokens @ layer["front"])
            seen = jnp.concatenate([tokens, front], axis=1)
        scores = _gate(stack).apply({"params": layer["router"]["gate"]}, _gate_input(stack, seen))
        answers, error = _all_answers(stack, layer, seen)
        reconstruction += error
        weight = expert_weights(scores, stack.num_selected, rule)
        tokens = jnp.einsum("te,etd->td", weight, answers)
        if stack.shared_dim:
            shared = FeedForward(stack.shared_dim, activation="relu", gated=False)
            added: Any = shared.apply({"params": layer["shared_experts"]}, seen)
            tokens += added[:, : stack.token_dim]
        tokens = tokens.at[:, 0].set(1.0)
        logits.append(scores)
    outputs = slice(1, 1 + stack.output_dim)
    return Output(tokens[:, outputs], answers[:, :, outputs], jnp.stack(logits), reconstruction)


def expert_weights(
    scores: Float[Array, "points experts"], num_selected: int, rule: str
) -> Float[Array, "points experts"]:
    """Weights of the experts' answers by one of `WEIGHTINGS`."""
    share = jax.nn.softmax(scores)
    if rule == "soft":
        return share
    _, index = jax.lax.top_k(scores, num_selected)
    chosen = jax.nn.one_hot(index, scores.shape[1], dtype=scores.dtype).sum(axis=1)
    if rule == "switch":
        return chosen * share
    if rule == "straight_through":
        kept = chosen * share
        forward = kept / kept.sum(axis=1, keepdims=True)
        return jax.lax.stop_gradient(forward - share) + share
    return chosen / num_selected


def likelihood_loss(
    output: Output, y: Float[Array, "points outputs"], scale: Float[Array, ""]
) -> Float[Array, ""]:
    """-log sum_e p_e N(y; f_e, scale^2), the mean over points, less its constant."""
    square = jnp.sum(jnp.square(output.answers - y[None]), axis=2).T
    log_share = jax.nn.log_softmax(output.logits[0])
    mixture = jax.nn.logsumexp(log_share - square / (2 * jnp.square(scale)), axis=1)
    return -jnp.mean(mixture) + y.shape[1] * jnp.log(scale)


def _gate(stack: Stack) -> Any:
    if stack.gate == "hidden_layer":
        return GATES["hidden_layer"](features=stack.num_experts, hidden_dim=stack.gate_dim)
    if stack.gate == "cosine":
        return GATES["cosine"](features=stack.num_experts, projection_dim=None, temperature=0.2)
    return GATES["linear"](features=stack.num_experts)


def _gate_input(stack: Stack, tokens: Array) -> Array:
    if stack.gate != "quadratic":
        return tokens
    row, column = jnp.triu_indices(tokens.shape[1])
    return tokens[:, row] * tokens[:, column]


def _seen_dim(stack: Stack) -> int:
    return stack.token_dim + (stack.gate_dim if stack.gate == "dense" else 0)


def _init_layer(key: Key[Array, ""], stack: Stack) -> PyTree:
    gate_key, expert_key, shared_key, front_key, low_key, decode_key = jax.random.split(key, 6)
    tokens = jnp.zeros((stack.num_experts, _seen_dim(stack)))
    gate = _gate(stack).init(gate_key, _gate_input(stack, tokens))["params"]
    experts = _experts(stack).init(expert_key, tokens)["params"]
    layer: dict[str, Any] = {"router": {"gate": gate}, "experts": dict(experts)}
    if stack.gate == "dense":
        shape = (stack.token_dim, stack.gate_dim)
        layer["front"] = jax.random.normal(front_key, shape) / jnp.sqrt(float(shape[0]))
    if stack.shared_dim:
        shared = FeedForward(stack.shared_dim, activation="relu", gated=False)
        layer["shared_experts"] = shared.init(shared_key, tokens)["params"]
    if stack.encoder_dim:
        code, num = stack.encoder_dim, stack.num_experts
        low = (num, code + 1, stack.hidden_dim)
        layer["experts"] = {
            "encoder": experts["up"][:, :, :code]
            if code <= stack.hidden_dim
            else jax.random.normal(low_key, (num, _seen_dim(stack), code)) / 4.0,
            "low": jax.random.normal(low_key, low) / jnp.sqrt(float(code + 1)),
            "down": experts["down"],
            "decoder": jax.random.normal(decode_key, (num, code, _seen_dim(stack))) / 4.0,
        }
    return layer


def _experts(stack: Stack, dtype: Any = jnp.float32) -> ExpertFFN:
    return ExpertFFN(
        stack.num_experts, stack.hidden_dim, activation="relu", gated=False, dtype=dtype
    )


def _all_answers(stack: Stack, layer: PyTree, seen: Array) -> tuple[Array, Array]:
    """Every expert on every token, [experts, points, token], and the codes' decoding error."""
    experts, error = layer["experts"], jnp.zeros((), seen.dtype)
    if stack.encoder_dim:
        encoder, low = experts["encoder"], experts["low"]
        up = jnp.einsum("emc,ech->emh", encoder, low[:, 1:])
        # The constant of the code rides on the token's.
        up = up.at[:, 0].add(low[:, 0])
        decoded = jnp.einsum("tm,emc,ecn->etn", seen, encoder, experts["decoder"])
        error = jnp.mean(jnp.square(decoded - seen[None]))
        experts = {"up": up, "down": experts["down"]}
    rows = jnp.tile(seen, (stack.num_experts, 1))
    out: Any = _experts(stack, seen.dtype).apply({"params": experts}, rows)
    return out.reshape(stack.num_experts, seen.shape[0], -1)[:, :, : stack.token_dim], error
