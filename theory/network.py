"""Networks of the library's own `SparseMoE` layers with parameters written down, in float64.

The layers have no biases, as in the paper: coordinate 0 of every token is the constant 1, which a
neuron of each expert passes on, relu(1) = 1. So affine gates and biases are rows of the weights. A
token is (1, x_1..x_D, 0..0) going in, and carries the answer in coordinates 1.. coming out.

Every layer has top-1 gates with weight exactly 1 (the softmax is taken over the one selected
expert), ReLU experts of two matrices, no capacity limit.
"""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from moe_jax.core import SparseMoE
from theory.checks import as_numbers, check_count, check_finite, check_points


@dataclasses.dataclass(frozen=True)
class Network:
    """Layers in a row.

    Attributes:
        layers: modules.
        params: variables of each, as `SparseMoE.apply` takes them, in float64 numpy.
        input_dim: D of the points.
        output_dim: coordinates of the answer.
    """

    layers: tuple[SparseMoE, ...]
    params: tuple[Mapping[str, Any], ...]
    input_dim: int
    output_dim: int

    @property
    def model_dim(self) -> int:
        """Width of a token."""
        return self.params[0]["params"]["experts"]["up"].shape[1]


class Answer(NamedTuple):
    """What a network says of points.

    Attributes:
        y: float64[points, outputs].
        selection: int32[points, layers], the expert of each point in each layer.
    """

    y: np.ndarray
    selection: np.ndarray


def moe_layer(
    kernel: Float[np.ndarray, "model experts"],
    up: Float[np.ndarray, "_ _ hidden"],
    down: Float[np.ndarray, "_ _ _"],
) -> tuple[SparseMoE, Mapping[str, Any]]:
    """A top-1 `SparseMoE` and its variables, from the gate's and the experts' matrices.

    Raises:
        ValueError: if the shapes disagree or a weight is not finite.
    """
    kernel, up, down = as_numbers("kernel", kernel), as_numbers("up", up), as_numbers("down", down)
    for name, matrix in (("kernel", kernel), ("up", up), ("down", down)):
        check_finite(name, matrix)
    num_experts, model_dim, hidden_dim = up.shape if up.ndim == 3 else (0, 0, 0)
    if not num_experts or (
        (kernel.shape, down.shape)
        != ((model_dim, num_experts), (num_experts, hidden_dim, model_dim))
    ):
        raise ValueError(
            f"kernel {kernel.shape}, up {up.shape} and down {down.shape} disagree: expected "
            "[model, experts], [experts, model, hidden] and [experts, hidden, model]"
        )
    layer = SparseMoE(
        num_experts=num_experts,
        num_selected=1,
        hidden_dim=hidden_dim,
        router_options={"softmax": "after"},
        activation="relu",
        gated=False,
        dtype=jnp.float64,
    )
    params = {"router": {"gate": {"kernel": kernel}}, "experts": {"up": up, "down": down}}
    return layer, {"params": params}


def lift(x: Float[np.ndarray, "points D"], model_dim: int) -> Float[np.ndarray, "points model"]:
    """Tokens (1, x, 0..0).

    Raises:
        ValueError: if the points have too many entries, or something is not finite.
    """
    check_count("model_dim", model_dim)
    x = check_points("x", x)
    if x.shape[1] + 1 > model_dim:
        raise ValueError(f"x {x.shape} does not fit tokens of model_dim={model_dim}")
    tokens = np.zeros((len(x), model_dim))
    tokens[:, 0] = 1.0
    tokens[:, 1 : 1 + x.shape[1]] = x
    return tokens


def apply_network(
    network: Network,
    x: Float[np.ndarray, "points D"],
    *,
    batch_size: int = 8192,
    implementation: str | None = None,
) -> Answer:
    """Pushes points through the layers, dispatch included, `batch_size` at a time.

    Args:
        network: layers.
        x: points.
        batch_size: tokens a call.
        implementation: of the experts' products, see `moe_jax.core.grouped_matmul`: `dense`
            compiles fastest and suits small layers.

    Raises:
        ValueError: if there is no point, or points are not finite or not of the network's
            dimension.
    """
    check_count("batch_size", batch_size)
    if np.ndim(x) != 2 or np.shape(x)[1] != network.input_dim:
        raise ValueError(f"x {np.shape(x)} does not fit input_dim={network.input_dim}")
    x = check_points("x", x)
    size = min(batch_size, len(x))
    answers, selections = [], []
    with jax.enable_x64(True):
        params = jax.tree.map(jnp.asarray, network.params)
        for first in range(0, len(x), size):
            part = x[first : first + size]
            tokens = np.zeros((size, network.model_dim))
            tokens[: len(part)] = lift(part, network.model_dim)
            chosen = []
            # Layer by layer: those of one shape share a compilation.
            for layer, variables in zip(network.layers, params, strict=True):
                layer = layer.clone(implementation=implementation)
                tokens, selection = _apply_layer(layer, variables, tokens)
                chosen.append(np.asarray(selection))
            answers.append(np.asarray(tokens)[: len(part), 1 : 1 + network.output_dim])
            selections.append(np.stack(chosen, axis=1)[: len(part)])
    return Answer(np.concatenate(answers), np.concatenate(selections))


# A shape runs a few times only: to compile it in half the time is worth more than its speed.
@partial(jax.jit, static_argnums=0, compiler_options={"xla_backend_optimization_level": 0})
def _apply_layer(
    layer: SparseMoE, variables: Any, tokens: Float[Array, "points model"]
) -> tuple[Float[Array, "points model"], Int[Array, " points"]]:
    answer: Any = layer.apply(variables, tokens)
    out, routing = answer
    return out, routing.expert_index[:, 0]
