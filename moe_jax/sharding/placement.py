"""Which device each expert stands on, from the routing that a trained model was seen to do.

A token is sent once to every device that holds at least one of its experts (Mozart, arXiv
2603.07006, section 3): its traffic is the number of devices it visits, C_T. Experts that are chosen
together belong on one device, and the devices' loads should be equal.
"""

import math

import numpy as np
from jaxtyping import Bool, Float, Int

PLACEMENTS = ("contiguous", "random", "load", "clusters", "visits")


def place_experts(
    use: Bool[np.ndarray, "tokens experts"],
    num_devices: int,
    *,
    method: str = "visits",
    balance_limit: float = 1.1,
    seed: int = 0,
) -> Int[np.ndarray, " experts"]:
    """Finds a placement; device d holds places d E / D to (d + 1) E / D.

    Args:
        use: which experts each token went to, see `expert_use`.
        num_devices: D, divides E.
        method: `contiguous` leaves all experts where they are; `random` draws; `load` evens the
            devices' loads, heaviest expert first; `clusters` is Mozart's Algorithm 1, which groups
            by co-activation alone; `visits` (ours) starts from the last two and exchanges pairs of
            experts as long as the visits of the tokens seen become fewer, with the busiest device
            within `balance_limit` or what `load` attains, whichever is larger.
        balance_limit: load of the busiest device over the mean.
        seed: of `random`.

    Returns:
        The permutation: place p holds expert permutation[p].

    Raises:
        ValueError: if D does not divide E, the method is unknown, or no token uses an expert.
    """
    num_experts = use.shape[1]
    _check_devices(num_experts, num_devices)
    if method not in PLACEMENTS:
        raise ValueError(f"method={method!r} is not one of {PLACEMENTS}")
    if method == "contiguous":
        return np.arange(num_experts)
    if method == "random":
        return np.random.default_rng(seed).permutation(num_experts)
    if not use.any():
        raise ValueError(f"use {use.shape} holds no token that uses an expert")
    if not balance_limit >= 1:
        raise ValueError(f"balance_limit={balance_limit} must be at least 1")
    load = use.mean(axis=0)
    if method == "load":
        return to_permutation(even_groups(load, num_devices))
    clusters = cluster_experts(co_activation(use), num_devices)
    if method == "clusters":
        return to_permutation(clusters)
    even = even_groups(load, num_devices)
    limit = max(balance_limit, busiest_device(load, to_permutation(even), num_devices))
    found = [exchange_experts(use, groups, limit) for groups in (clusters, even)]
    return to_permutation(min(found, key=lambda groups: _cost(use, groups, limit)))


def place_in_tree(
    use: Bool[np.ndarray, "tokens experts"],
    branches: tuple[int, ...],
    *,
    balance_limit: float = 1.1,
) -> Int[np.ndarray, " experts"]:
    """Placement `visits` for devices at the leaves of a tree, from its root to the leaves.

    Experts are first shared out among the branches at the root, then within each branch among its
    own, so that tokens enter few branches, and few leaves of those.

    Args:
        use: see `place_experts`.
        branches: how many there are at each level; (4, 4) for 16 devices in 4 groups.
        balance_limit: of the branches of each node.
    """
    if not branches:
        return np.arange(use.shape[1])
    here = place_experts(use, branches[0], balance_limit=balance_limit)
    groups = here.reshape(branches[0], -1)
    inner = [
        group[place_in_tree(use[:, group], branches[1:], balance_limit=balance_limit)]
        for group in groups
    ]
    return np.concatenate(inner)


def expert_use(
    expert_index: Int[np.ndarray, "tokens k"],
    num_experts: int,
    keep: Bool[np.ndarray, "tokens k"] | None = None,
) -> Bool[np.ndarray, "tokens experts"]:
    """Which experts each token went to, of the fields of a `moe_jax.core.Routing`; kept ones only.

    Raises:
        ValueError: if an index is not in [0, num_experts).
    """
    if expert_index.size and not 0 <= expert_index.min() <= expert_index.max() < num_experts:
        raise ValueError(
            f"expert_index from {expert_index.min()} to {expert_index.max()} is not in "
            f"[0, num_experts={num_experts})"
        )
    use = np.zeros((len(expert_index), num_experts), bool)
    rows = np.broadcast_to(np.arange(len(expert_index))[:, None], expert_index.shape)
    kept = np.ones(expert_index.shape, bool) if keep is None else keep
    use[rows[kept], expert_index[kept]] = True
    return use


def co_activation(
    use: Bool[np.ndarray, "tokens experts"],
) -> Float[np.ndarray, "experts experts"]:
    """Share of the tokens that went to both experts; the diagonal is each expert's load."""
    together = use.astype(np.float32).T @ use.astype(np.float32)
    return together.astype(np.float64) / max(len(use), 1)


def device_visits(
    use: Bool[np.ndarray, "tokens experts"],
    permutation: Int[np.ndarray, " experts"],
    num_devices: int,
) -> float:
    """C_T, mean number of devices that hold an expert of a token."""
    return float(visited_devices(use, permutation, num_devices).sum(axis=1).mean())


def visited_devices(
    use: Bool[np.ndarray, "tokens experts"],
    permutation: Int[np.ndarray, " experts"],
    num_devices: int,
) -> Bool[np.ndarray, "tokens devices"]:
    """Which devices hold an expert of each token."""
    _check_devices(use.shape[1], num_devices)
    by_device = use[:, permutation].reshape(len(use), num_devices, -1)
    return np.any(by_device, axis=2)


def uninformed_device_visits(num_experts: int, num_selected: int, num_devices: int) -> float:
    """C_T of k experts drawn at random: D (1 - C(E - E / D, k) / C(E, k)).

    A device is missed if all k are among the E - E / D experts of the others.
    """
    _check_devices(num_experts, num_devices)
    others = num_experts - num_experts // num_devices
    missed = math.comb(others, num_selected) / math.comb(num_experts, num_selected)
    return num_devices * (1.0 - missed)


def busiest_device(
    load: Float[np.ndarray, " experts"],
    permutation: Int[np.ndarray, " experts"],
    num_devices: int,
) -> float:
    """Load of the busiest device over the mean of all."""
    _check_devices(len(load), num_devices)
    devices = load[permutation].reshape(num_devices, -1).sum(axis=1)
    return float(devices.max() / devices.mean())


def to_permutation(groups: Int[np.ndarray, " experts"]) -> Int[np.ndarray, " experts"]:
    """The experts of group 0, then those of group 1, and so on, in the order of their index."""
    return np.argsort(groups, kind="stable")


def even_groups(load: Float[np.ndarray, " items"], num_groups: int) -> Int[np.ndarray, " items"]:
    """Groups of equally many items with loads as equal as a greedy search makes them.

    The heaviest item goes to the lightest group that has room; then, as long as it helps, the
    heaviest group exchanges an item with another. Mozart's Eq. 5 asks the same of clusters.
    """
    _check_devices(len(load), num_groups)
    room = len(load) // num_groups
    groups = np.full(len(load), -1)
    total, count = np.zeros(num_groups), np.zeros(num_groups, int)
    for item in np.argsort(-load, kind="stable"):
        group = int(np.argmin(np.where(count < room, total, np.inf)))
        groups[item] = group
        total[group] += load[item]
        count[group] += 1
    while True:
        heaviest = int(np.argmax(total))
        inside, outside = np.flatnonzero(groups == heaviest), np.flatnonzero(groups != heaviest)
        if not len(outside):
            return groups
        moved = load[inside][:, None] - load[outside][None, :]
        after = np.maximum(total[heaviest] - moved, total[groups[outside]][None, :] + moved)
        first, second = np.unravel_index(int(np.argmin(after)), after.shape)
        if after[first, second] >= total[heaviest] * (1 - 1e-12):
            return groups
        other = int(groups[outside[second]])
        groups[inside[first]], groups[outside[second]] = other, heaviest
        total[heaviest] -= moved[first, second]
        total[other] += moved[first, second]


def cluster_experts(
    together: Float[np.ndarray, "experts experts"], num_groups: int
) -> Int[np.ndarray, " experts"]:
    """Mozart's Algorithm 1 as its descriptions allow: spread seeds, then clusters of equal size.

    The first seed is the busiest expert, each further one the expert whose largest co-activation
    with the seeds is smallest. Then the expert and the cluster with room whose mean co-activation
    is highest are joined, until none is left.
    """
    num_experts = len(together)
    _check_devices(num_experts, num_groups)
    room = num_experts // num_groups
    groups = np.full(num_experts, -1)
    seeds = [int(np.argmax(np.diagonal(together)))]
    while len(seeds) < num_groups:
        closest = together[:, seeds].max(axis=1)
        closest[seeds] = np.inf
        seeds.append(int(np.argmin(closest)))
    groups[seeds] = np.arange(num_groups)
    total, count = together[:, seeds].copy(), np.ones(num_groups, int)
    while (groups < 0).any():
        mean = np.where((groups < 0)[:, None] & (count < room)[None, :], total / count, -np.inf)
        expert, group = np.unravel_index(int(np.argmax(mean)), mean.shape)
        groups[expert] = group
        total[:, group] += together[:, expert]
        count[group] += 1
    return groups


def exchange_experts(
    use: Bool[np.ndarray, "tokens experts"],
    groups: Int[np.ndarray, " experts"],
    balance_limit: float,
) -> Int[np.ndarray, " experts"]:
    """Exchanges the pair of experts that helps most until none helps.

    What falls is C_T + k max(0, busiest device over the mean - balance_limit), k the mean number of
    experts a token uses. All E^2 exchanges are counted on the tokens at once by two products.
    """
    groups = groups.copy()
    x = use.astype(np.float32)
    load = x.sum(axis=0, dtype=np.float64)
    num_groups = int(groups.max()) + 1
    weight = load.sum()
    while True:
        count = np.stack([x[:, groups == group].sum(axis=1) for group in range(num_groups)], axis=1)
        # Moving expert a away loses a visit where it was the token's only expert there, unless the
        # expert b that comes is one of the token's too; and b's coming adds those not there yet.
        only = x * (count[:, groups] == 1)
        lost = only.sum(axis=0, dtype=np.float64)[:, None] - only.T @ x
        added = (count == 0).astype(np.float32).T @ x
        change = added[groups] - lost
        visits = change + change.T
        total = np.bincount(groups, load, num_groups)
        busiest = _busiest_after(load, groups, total) / total.mean()
        now = weight * max(0.0, total.max() / total.mean() - balance_limit)
        cost = visits + weight * np.maximum(0.0, busiest - balance_limit) - now
        cost[groups[:, None] == groups[None, :]] = 0.0
        first, second = np.unravel_index(int(np.argmin(cost)), cost.shape)
        if cost[first, second] > -1e-6 * len(x):
            return groups
        groups[first], groups[second] = groups[second], groups[first]


def _busiest_after(
    load: Float[np.ndarray, " experts"],
    groups: Int[np.ndarray, " experts"],
    total: Float[np.ndarray, " groups"],
) -> Float[np.ndarray, "experts experts"]:
    """Load of the busiest group after the exchange of each pair of experts."""
    moved = load[None, :] - load[:, None]
    own = total[groups]
    both = np.maximum(own[:, None] + moved, own[None, :] - moved)
    if len(total) < 3:
        return both
    # Of the three busiest groups at least one takes no part in the exchange.
    top = np.argsort(-total)[:3]
    others = np.zeros((len(total), len(total)))
    for group in top[::-1]:
        takes_part = np.zeros(len(total), bool)
        takes_part[group] = True
        others[~takes_part[:, None] & ~takes_part[None, :]] = total[group]
    return np.maximum(both, others[groups[:, None], groups[None, :]])


def _cost(
    use: Bool[np.ndarray, "tokens experts"], groups: Int[np.ndarray, " experts"], limit: float
) -> float:
    permutation, num_groups = to_permutation(groups), int(groups.max()) + 1
    load = use.mean(axis=0)
    excess = max(0.0, busiest_device(load, permutation, num_groups) - limit)
    return device_visits(use, permutation, num_groups) + float(load.sum()) * excess


def _check_devices(num_experts: int, num_devices: int) -> None:
    if num_devices < 1 or num_experts % num_devices:
        raise ValueError(f"num_devices={num_devices} does not divide num_experts={num_experts}")
