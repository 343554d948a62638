"""Compute times of a layer for the simulator: measured here, or from its products and a rate."""

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from moe_jax.sharding.network import Network, all_reduce_cost, check_positive, exchange_costs
from moe_jax.sharding.schedule_simulator import StepWork


@dataclasses.dataclass(frozen=True)
class LayerShape:
    """A layer of FlowMoE's grid, as one device sees it.

    Attributes:
        batch, length: B sequences of N tokens on the device.
        model_dim: M.
        hidden_dim: H, of an expert of two matrices.
        num_selected: k.
        capacity_factor: f, rows of an expert over those of perfect balance.
        experts_per_device: E / P.
        bytes_per_number: of what is sent and summed.
    """

    batch: int
    length: int
    model_dim: int
    hidden_dim: int
    num_selected: int = 2
    capacity_factor: float = 1.0
    experts_per_device: int = 1
    bytes_per_number: int = 4

    def __post_init__(self) -> None:
        check_positive(self)

    @property
    def rows(self) -> float:
        """Rows sent and received by a device in one all-to-all, k f B N."""
        return self.num_selected * self.capacity_factor * self.batch * self.length

    @property
    def exchange_bytes(self) -> float:
        """Of one all-to-all: k f B N M numbers."""
        return self.rows * self.model_dim * self.bytes_per_number

    @property
    def attention_flops(self) -> float:
        """B N (8 M^2 + 4 N M): four projections, scores and their weighted sum."""
        tokens, model = self.batch * self.length, self.model_dim
        return float(tokens * (8 * model**2 + 4 * self.length * model))

    @property
    def expert_flops(self) -> float:
        """4 k f B N M H: two matrices."""
        return 4.0 * self.rows * self.model_dim * self.hidden_dim

    def reduction_bytes(self, num_devices: int) -> float:
        """4 M^2 + M E numbers: attention and gate, which every device holds."""
        experts = num_devices * self.experts_per_device
        numbers = 4 * self.model_dim**2 + self.model_dim * experts
        return float(numbers * self.bytes_per_number)


def work_from_shape(
    shape: LayerShape, network: Network, *, flops_per_second: float, num_layers: int = 1
) -> StepWork:
    """Times from counted products at a given rate, and from the network."""
    if not flops_per_second > 0:
        raise ValueError(f"flops_per_second={flops_per_second} must be positive")
    return work_from_times(
        shape,
        network,
        attention=shape.attention_flops / flops_per_second,
        experts=shape.expert_flops / flops_per_second,
        num_layers=num_layers,
    )


def work_from_times(
    shape: LayerShape,
    network: Network,
    *,
    attention: float,
    experts: float,
    backward: float = 2.0,
    num_layers: int = 1,
) -> StepWork:
    """Given or measured seconds of the forward pass, and the network's times for the shape."""
    reduction_bytes = shape.reduction_bytes(network.num_devices)
    return StepWork(
        num_layers=num_layers,
        attention=attention,
        experts=experts,
        exchange=exchange_costs(network, shape.exchange_bytes),
        reduction=all_reduce_cost(network, reduction_bytes),
        reduction_bytes=reduction_bytes,
        backward=backward,
    )


def measure_seconds(
    function: Callable[..., Any], *arguments: Any, repeats: int = 5
) -> tuple[float, float]:
    """Median seconds of a function of arrays here, and those of its value and all gradients.

    The gradients are of the sum of the function's outputs with respect to every argument, which
    must be of floating-point type. Both are compiled and run once before the clock starts.

    Raises:
        ValueError: if `repeats` is below 1.
    """
    if repeats < 1:
        raise ValueError(f"repeats={repeats} must be at least 1")

    def total(*arguments: Any) -> jax.Array:
        leaves = jax.tree.leaves(function(*arguments))
        return sum((jnp.sum(leaf, dtype=jnp.float32) for leaf in leaves), jnp.float32(0.0))

    everything = tuple(range(len(arguments)))
    programs = jax.jit(function), jax.jit(jax.value_and_grad(total, argnums=everything))
    medians = []
    for program in programs:
        jax.block_until_ready(program(*arguments))
        seconds = []
        for _ in range(repeats):
            begin = time.perf_counter()
            jax.block_until_ready(program(*arguments))
            seconds.append(time.perf_counter() - begin)
        medians.append(statistics.median(seconds))
    return medians[0], medians[1]
