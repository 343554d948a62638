"""Moves of consecutive rows: within a device by copying slices, and between devices.

A slice is a run of consecutive rows, given by where it starts here, where it starts there, and its
size. Slices overlap neither here nor there.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from moe_jax.core import RowOrder, dispatch
from moe_jax.core.varying import vary_alike

IMPLEMENTATIONS = ("native", "emulated")


def copy_slices(
    rows: Float[Array, "rows model"],
    source_start: Int[Array, " slices"],
    target_start: Int[Array, " slices"],
    sizes: Int[Array, " slices"],
    num_targets: int,
) -> Float[Array, "targets model"]:
    """Copies each slice of `rows` to its place among `num_targets` rows; the others are 0.

    A gather in both directions of differentiation.
    """
    num_sources = rows.shape[0]
    source_of_target = _other_place(target_start, source_start, sizes, num_targets, num_sources)
    target_of_source = _other_place(source_start, target_start, sizes, num_sources, num_targets)
    order = RowOrder(
        token_of_row=source_of_target,
        row_of_assignment=target_of_source[:, None],
        group_sizes=sizes,
    )
    return dispatch(rows, order)


def ragged_all_to_all(
    operand: Float[Array, "rows model"],
    output: Float[Array, "targets model"],
    input_offsets: Int[Array, " slices"],
    send_sizes: Int[Array, " slices"],
    output_offsets: Int[Array, " slices"],
    recv_sizes: Int[Array, " slices"],
    *,
    axis_name: str,
    implementation: str | None = None,
) -> Float[Array, "targets model"]:
    """`jax.lax.ragged_all_to_all`, which CPUs lack, or the same from an all-gather.

    Args:
        operand: rows to send.
        output: what stands where nothing is received; of the emulation, zeros alone.
        input_offsets: where each slice starts in `operand`. With S slices a device, slices
            d S ... d S + S - 1 go to device d of the axis.
        send_sizes: rows of each slice.
        output_offsets: where each slice starts in its receiver's output.
        recv_sizes: rows of each slice received; those from device d are d S ... d S + S - 1.
        axis_name: mesh axis, inside `shard_map`.
        implementation: one of `IMPLEMENTATIONS`; None takes `emulated` on CPU.
    """
    if check_implementation(implementation) == "native":
        operand, output = vary_alike(operand, output, send_sizes)[:2]
        return jax.lax.ragged_all_to_all(
            operand,
            output,
            input_offsets,
            send_sizes,
            output_offsets,
            recv_sizes,
            axis_name=axis_name,
        )
    num_devices = jax.lax.axis_size(axis_name)
    slices = jnp.stack([input_offsets, send_sizes, output_offsets])
    # [3, receivers, slices a device] of every sender; this device is one receiver.
    slices = slices.reshape(3, num_devices, -1)
    mine = jax.lax.all_gather(slices, axis_name)[:, :, jax.lax.axis_index(axis_name)]
    sender = jnp.arange(num_devices, dtype=jnp.int32)[:, None]
    return copy_slices(
        jax.lax.all_gather(operand, axis_name, tiled=True),
        (mine[:, 0] + sender * operand.shape[0]).reshape(-1),
        mine[:, 2].reshape(-1),
        mine[:, 1].reshape(-1),
        output.shape[0],
    )


def check_implementation(implementation: str | None) -> str:
    """The implementation meant; raises ValueError if it is unknown."""
    if implementation is None:
        return "emulated" if jax.default_backend() == "cpu" else "native"
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"ragged={implementation!r} is not one of {IMPLEMENTATIONS}")
    return implementation


def _other_place(
    start: Array, other_start: Array, sizes: Array, num_rows: int, num_others: int
) -> Int[Array, " rows"]:
    """For each row the row of the other side; `num_others` for a row in no slice."""
    row = jnp.arange(num_rows, dtype=jnp.int32)[:, None]
    inside = (row >= start[None, :]) & (row < (start + sizes)[None, :])
    shift = jnp.sum(jnp.where(inside, (other_start - start)[None, :], 0), axis=1, dtype=jnp.int32)
    return jnp.where(jnp.any(inside, axis=1), row[:, 0] + shift, jnp.int32(num_others))
