"""Experts split over a mesh: tokens travel to the devices that hold theirs, and back.

The batch is split over the axes `data`, `fsdp` and `expert`, and the experts over `expert`: its
devices form a ring in which every expert stands once, and tokens travel within their ring. Each
device of `tensor` holds a part of every expert's hidden units, gets the same tokens, and adds its
part of their answers. Routing comes before, outside `shard_map`: capacities, losses and metrics
are those of the whole batch, as on one device.

Three ways to exchange, of the same result:

- `ragged`: each row once, by `ragged_all_to_all`. On arrival rows stand sorted by expert.
- `fixed`: blocks of equal size between each two devices, by `all_to_all`; moves padding, but every
  backend has it.
- `gather`: every device of the ring sees all its tokens and answers for its own experts; the parts
  are added up. Sends fewer rows where the ring is shorter than the number of a token's experts.

None drops a token. The rows that a device can receive are bounded by the tokens of its ring and, if
there is one, by the capacity of its experts; buffers are of that size.
"""

import dataclasses
from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from moe_jax.core import ExpertFFN, Routing, combine, dispatch
from moe_jax.core.permutation import RowOrder, sort_assignments
from moe_jax.sharding.meshes import EXCHANGES
from moe_jax.sharding.ragged import check_implementation, copy_slices, ragged_all_to_all
from moe_jax.sharding.rules import MESH_AXES

TOKENS = MESH_AXES["batch"]
RING = "expert"


@dataclasses.dataclass(frozen=True)
class ExpertParallel:
    """The `exchange` of a `SparseMoE` on a mesh, see the module.

        mesh = make_mesh(MeshConfig(data=-1, expert=4))
        layer = SparseMoE(num_experts=8, num_selected=2, hidden_dim=64,
                          exchange=ExpertParallel(mesh))

    To be called under `jax.jit`, on the tokens of all devices.

    Attributes:
        mesh: of axes `AXES`, see `make_mesh`.
        exchange: `ragged`, `fixed` or `gather`; `auto` is `gather` in a ring of fewer devices than
            a token has experts, else `ragged`.
        ragged: `native` or `emulated`, see `ragged_all_to_all`; None for what the backend has.

    Raises:
        ValueError: if an exchange is unknown.
    """

    mesh: Mesh
    exchange: str = "auto"
    ragged: str | None = None

    def __post_init__(self) -> None:
        if self.exchange not in EXCHANGES:
            raise ValueError(f"exchange={self.exchange!r} is not one of {EXCHANGES}")
        if self.ragged is not None:
            check_implementation(self.ragged)

    def __call__(
        self,
        experts: ExpertFFN,
        weights: Mapping[str, Array],
        tokens: Float[Array, "tokens model"],
        routing: Routing,
        capacity: int | None,
    ) -> Float[Array, "tokens model"]:
        """The experts' answers, weighted and added up for every token.

        Args:
            experts: the module that `weights` belong to.
            weights: its parameters, on any sharding.
            tokens: those of all devices, in any number.
            routing: of these tokens, after drops.
            capacity: most rows that `routing` keeps of an expert; None for no limit.

        Raises:
            ValueError: if experts or hidden units do not divide over their mesh axis.
        """
        self._check(experts)
        num_tokens = tokens.shape[0]
        pieces = self.mesh.shape[RING] * self.mesh.shape["data"] * self.mesh.shape["fsdp"]
        padding = -num_tokens % pieces
        arrays: tuple[Array, ...]
        arrays = (tokens, routing.expert_index, routing.combine_weight, routing.keep)
        if padding:
            arrays = tuple(jnp.pad(array, ((0, padding), (0, 0))) for array in arrays)
        tokens, *choice = arrays
        inner = P(RING, None, "tensor")
        specs = {name: P(RING, "tensor", None) if name == "down" else inner for name in weights}
        # Cast before they are gathered over `fsdp`, and once for all rows.
        dtype = experts.dtype
        weights = {name: weight.astype(dtype) for name, weight in weights.items()}
        answer = jax.shard_map(
            partial(self._answer, experts, capacity),
            mesh=self.mesh,
            in_specs=(specs, *(P(TOKENS, None) for _ in arrays)),
            out_specs=P(TOKENS, None),
        )
        return answer(weights, tokens.astype(dtype), *choice)[:num_tokens]

    def _answer(
        self,
        experts: ExpertFFN,
        capacity: int | None,
        weights: Mapping[str, Array],
        tokens: Array,
        expert_index: Array,
        combine_weight: Array,
        keep: Array,
    ) -> Array:
        """Of one device, on its own tokens and its part of the weights."""
        ring = self.mesh.shape[RING]
        num_local = experts.num_experts // ring
        choices = min(expert_index.shape[1], num_local)
        most = ring * tokens.shape[0] * choices
        most_of_pair = tokens.shape[0] * choices
        if capacity is not None:
            most = min(most, num_local * capacity)
            most_of_pair = min(most_of_pair, num_local * capacity)
        choice = (expert_index, combine_weight, keep)
        exchange = self._exchange(expert_index.shape[1])
        if exchange == "gather":
            out = _gather(experts, weights, tokens, choice, num_local, most)
        else:
            order = sort_assignments(expert_index, keep, experts.num_experts)
            slices = _Slices.of(order, num_local)
            rows = dispatch(tokens, order)
            if exchange == "ragged":
                answers = _ragged(experts, weights, rows, slices, most, self.ragged)
            else:
                answers = _fixed(experts, weights, rows, slices, most, most_of_pair)
            out = combine(answers, combine_weight, order)
        return jax.lax.psum(out, "tensor")

    def _exchange(self, num_selected: int) -> str:
        if self.exchange != "auto":
            return self.exchange
        return "gather" if self.mesh.shape[RING] < num_selected else "ragged"

    def _check(self, experts: ExpertFFN) -> None:
        for name, axis in (("num_experts", RING), ("hidden_dim", "tensor")):
            number, size = getattr(experts, name), self.mesh.shape[axis]
            if number % size:
                divisors = [value for value in range(1, number + 1) if number % value == 0]
                raise ValueError(
                    f"{name}={number} is not divisible by the mesh axis {axis}={size}; "
                    f"sizes of it that fit: {', '.join(map(str, divisors))}"
                )


@dataclasses.dataclass(frozen=True)
class _Slices:
    """The rows of each expert from each device of the ring, as this device sees them.

    Attributes:
        sizes: int32[ring, experts], rows that a device has for an expert.
        starts: int32[ring, experts], where they start among the device's own rows.
        arrivals: int32[ring, experts], where they start among the rows of the expert's device.
        first: int32[], the first expert of this device.
        num_local: experts of a device.
    """

    sizes: Array
    starts: Array
    arrivals: Array
    first: Array
    num_local: int

    @classmethod
    def of(cls, order: RowOrder, num_local: int) -> "_Slices":
        sizes = jax.lax.all_gather(order.group_sizes, RING)
        ring, num_experts = sizes.shape
        starts = jnp.cumsum(sizes, axis=1, dtype=jnp.int32) - sizes
        # Of a device that receives: expert by expert, within it sender by sender.
        received = jnp.swapaxes(sizes.reshape(ring, ring, num_local), 0, 1)
        by_expert = jnp.swapaxes(received, 1, 2).reshape(ring, -1)
        ends = jnp.cumsum(by_expert, axis=1, dtype=jnp.int32)
        arrivals = (ends - by_expert).reshape(ring, num_local, ring)
        arrivals = jnp.moveaxis(arrivals, 2, 0).reshape(ring, num_experts)
        first = jax.lax.axis_index(RING) * jnp.int32(num_local)
        return cls(sizes, starts, arrivals, first, num_local)

    def sent(self, values: Array) -> Array:
        """int32[experts], of the slices that this device sends."""
        return values[jax.lax.axis_index(RING)]

    def received(self, values: Array) -> Array:
        """int32[ring, local experts], of the slices that this device receives."""
        return jax.lax.dynamic_slice_in_dim(values, self.first, self.num_local, axis=1)

    def group_sizes(self) -> Array:
        """int32[local experts], rows that this device receives for each of its experts."""
        return jnp.sum(self.received(self.sizes), axis=0, dtype=jnp.int32)


def _ragged(
    experts: ExpertFFN,
    weights: Mapping[str, Array],
    rows: Array,
    slices: _Slices,
    most: int,
    implementation: str | None,
) -> Array:
    def move(*arrays: Array) -> Array:
        return ragged_all_to_all(*arrays, axis_name=RING, implementation=implementation)

    there = (slices.sent(slices.starts), slices.sent(slices.sizes), slices.sent(slices.arrivals))
    back = tuple(
        slices.received(values).reshape(-1)
        for values in (slices.arrivals, slices.sizes, slices.starts)
    )
    received = move(rows, jnp.zeros((most, rows.shape[1]), rows.dtype), *there, back[1])
    answers = experts.answer(weights, received, slices.group_sizes())
    return move(answers, jnp.zeros_like(rows), *back, there[1])


def _fixed(
    experts: ExpertFFN,
    weights: Mapping[str, Array],
    rows: Array,
    slices: _Slices,
    most: int,
    most_of_pair: int,
) -> Array:
    ring = slices.sizes.shape[0]
    block = jnp.arange(ring, dtype=jnp.int32)[:, None] * jnp.int32(most_of_pair)

    def swap(blocks: Array) -> Array:
        return jax.lax.all_to_all(blocks, RING, split_axis=0, concat_axis=0, tiled=True)

    # The block for a device holds its experts in order, and so does what arrives from a device.
    own_starts, own_sizes = slices.sent(slices.starts), slices.sent(slices.sizes)
    by_device = own_starts.reshape(ring, -1)
    own_blocks = (by_device - by_device[:, :1] + block).reshape(-1)
    starts = slices.received(slices.starts)
    arrived = (starts - starts[:, :1] + block).reshape(-1)
    arrivals, sizes = (
        slices.received(values).reshape(-1) for values in (slices.arrivals, slices.sizes)
    )
    blocks = copy_slices(rows, own_starts, own_blocks, own_sizes, ring * most_of_pair)
    received = copy_slices(swap(blocks), arrived, arrivals, sizes, most)
    answers = experts.answer(weights, received, slices.group_sizes())
    returned = swap(copy_slices(answers, arrivals, arrived, sizes, ring * most_of_pair))
    return copy_slices(returned, own_blocks, own_starts, own_sizes, rows.shape[0])


def _gather(
    experts: ExpertFFN,
    weights: Mapping[str, Array],
    tokens: Array,
    choice: tuple[Array, ...],
    num_local: int,
    most: int,
) -> Array:
    tokens, expert_index, combine_weight, keep = (
        jax.lax.all_gather(array, RING, tiled=True) for array in (tokens, *choice)
    )
    expert_index = expert_index - jax.lax.axis_index(RING) * jnp.int32(num_local)
    keep = keep & (expert_index >= 0) & (expert_index < num_local)
    order = sort_assignments(jnp.where(keep, expert_index, 0), keep, num_local)
    # Rows that are kept come first, and there are no more of them.
    order = dataclasses.replace(order, token_of_row=order.token_of_row[:most])
    answers = experts.answer(weights, dispatch(tokens, order), order.group_sizes)
    out = combine(answers, jnp.where(keep, combine_weight, 0.0), order)
    return jax.lax.psum_scatter(out, RING, scatter_dimension=0, tiled=True)
