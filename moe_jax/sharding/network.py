"""Seconds of collectives on a network of nodes, by the alpha-beta model.

A message of n bytes over a link takes alpha + beta n. Nodes hold m devices each and there are N of
them, P = m N devices in all; a device has one link to its own node and one to the others.
"""

import dataclasses
from typing import Any, NamedTuple

EXCHANGES = ("linear", "hierarchical", "adaptive", "two_level")
"""Algorithms of the all-to-all, see `exchange_costs`."""


class Cost(NamedTuple):
    """Seconds of a collective: one r-th of it takes startup + transfer / r.

    Attributes:
        startup: paid by every part.
        transfer: of the whole.
    """

    startup: float
    transfer: float


def check_positive(record: Any) -> None:
    """Raises ValueError for the first field of a dataclass that is not positive."""
    for name, value in dataclasses.asdict(record).items():
        if not value > 0:
            raise ValueError(f"{name}={value} must be positive")


@dataclasses.dataclass(frozen=True)
class Link:
    """Attributes: startup, alpha in seconds; bandwidth, 1 / beta, in bytes a second of a device."""

    startup: float
    bandwidth: float

    def __post_init__(self) -> None:
        if not self.startup >= 0:
            raise ValueError(f"startup={self.startup} must not be negative")
        if not self.bandwidth > 0:
            raise ValueError(f"bandwidth={self.bandwidth} must be positive")

    def seconds(self, messages: int, num_bytes: float) -> Cost:
        """Of messages sent one after the other."""
        return Cost(messages * self.startup, num_bytes / self.bandwidth)


@dataclasses.dataclass(frozen=True)
class Network:
    """Equal nodes.

    Attributes:
        nodes: N.
        devices_per_node: m.
        local: link within a node.
        remote: link to other nodes, of one device while all its neighbours use it too.
        ring: link that limits a ring through all devices, where one device a node sends outside.
    """

    nodes: int
    devices_per_node: int
    local: Link
    remote: Link
    ring: Link

    def __post_init__(self) -> None:
        for name in ("nodes", "devices_per_node"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")

    @property
    def num_devices(self) -> int:
        """P."""
        return self.nodes * self.devices_per_node


def exchange_costs(network: Network, num_bytes: float) -> dict[str, Cost]:
    """All-to-all in which each device sends `num_bytes` in equal shares to all P devices.

    `linear`: a message to each peer in turn. `hierarchical`: first within the node, gathered by
    destination, then one message a node (Tutel's 2DH, arXiv 2206.03382, section 4.3). `adaptive`:
    the cheaper of the two. `two_level`: messages within the node beside those between nodes, as in
    the pipelined all-to-all of ScheMoE (EuroSys 2024).
    """
    nodes, devices = network.nodes, network.devices_per_node
    share = num_bytes / network.num_devices
    near = network.local.seconds(devices - 1, (devices - 1) * share)
    far = network.remote.seconds((nodes - 1) * devices, (nodes - 1) * devices * share)
    gather = network.local.seconds(devices - 1, num_bytes * (devices - 1) / devices)
    across = network.remote.seconds(nodes - 1, num_bytes * (nodes - 1) / nodes)
    linear = _sum(near, far)
    hierarchical = _sum(gather, across)
    return {
        "linear": linear,
        "hierarchical": hierarchical,
        "adaptive": min(linear, hierarchical, key=sum),
        "two_level": max(near, far, key=sum),
    }


def all_reduce_cost(network: Network, num_bytes: float) -> Cost:
    """Ring all-reduce: 2 (P - 1) messages of 1 / P of the bytes each."""
    steps = 2 * (network.num_devices - 1)
    return network.ring.seconds(steps, steps * num_bytes / network.num_devices)


def _sum(first: Cost, second: Cost) -> Cost:
    return Cost(first.startup + second.startup, first.transfer + second.transfer)
