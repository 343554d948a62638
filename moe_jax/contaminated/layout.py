"""Where each named parameter sits in the flat vector that the estimators work on.

The vector holds one block a prompt: the gate's parameters, then the expert's, each in the order of
its `layout`. Named parameters are dicts; with one prompt their leaves have no prompt axis.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from moe_jax.contaminated.data import real_numbers
from moe_jax.contaminated.expert import Expert
from moe_jax.contaminated.gates import Gate

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Family:
    """What is compiled: the kinds of expert and gate and how many prompts there are."""

    expert: Expert
    gate: Gate
    n_prompts: int = 1

    def layout(self, d: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Names and shapes of one prompt's parameters, in the order of the flat vector."""
        return self.gate.layout(d) + self.expert.layout(d)

    def size(self, d: int) -> int:
        """Number of parameters of all prompts."""
        return self.n_prompts * sum(math.prod(shape) for _, shape in self.layout(d))


def parameter_names(family: Family, d: int) -> tuple[str, ...]:
    """A name for each entry of the flat vector: "beta[0]", "tau"; "beta[j,0]" of prompt j."""
    names = []
    for prompt in range(family.n_prompts):
        lead = [prompt] if family.n_prompts > 1 else []
        for name, shape in family.layout(d):
            for index in np.ndindex(*shape):
                inside = ",".join(str(i) for i in [*lead, *index])
                names.append(f"{name}[{inside}]" if inside else name)
    return tuple(names)


def unflatten(family: Family, theta: Float[Array, " p"] | np.ndarray, d: int) -> Params:
    """Named parameters of a flat vector; its leading axes, if any, become theirs."""
    module = np if isinstance(theta, np.ndarray) else jnp
    batch = theta.shape[:-1]
    blocks = theta.reshape(*batch, family.n_prompts, -1)
    lead = (family.n_prompts,) if family.n_prompts > 1 else ()
    params, start = {}, 0
    for name, shape in family.layout(d):
        stop = start + math.prod(shape)
        params[name] = module.reshape(blocks[..., start:stop], (*batch, *lead, *shape))
        start = stop
    return params


def flatten(
    family: Family, params: Mapping[str, Any], d: int, *, batch: tuple[int, ...] = ()
) -> Array:
    """The flat vector of named parameters, the inverse of `unflatten`.

    Raises:
        ValueError: if a name is missing or unknown or a shape is wrong.
    """
    layout = dict(family.layout(d))
    if set(params) != set(layout):
        raise ValueError(f"params names {sorted(params)}, expected {sorted(layout)}")
    lead = (family.n_prompts,) if family.n_prompts > 1 else ()
    blocks = []
    for name, shape in layout.items():
        leaf = jnp.asarray(params[name], dtype=jnp.float64)
        expected = (*batch, *lead, *shape)
        if leaf.shape != expected:
            raise ValueError(f"params[{name!r}] has shape {leaf.shape}, expected {expected}")
        blocks.append(leaf.reshape(*batch, family.n_prompts, math.prod(shape)))
    return jnp.concatenate(blocks, axis=-1).reshape(*batch, -1)


def fixed_vector(
    family: Family, fixed: Mapping[str, Any] | None, d: int, what: str = "fixed"
) -> np.ndarray:
    """Values of the fixed entries of the flat vector and NaN for the free ones.

    Raises:
        ValueError: naming `what`, if a name is unknown, a shape wrong or a value infinite.
    """
    lead = (family.n_prompts,) if family.n_prompts > 1 else ()
    layout = {name: (*lead, *shape) for name, shape in family.layout(d)}
    unknown = sorted(set(fixed or {}) - set(layout))
    if unknown:
        raise ValueError(f"{what} names {unknown}, expected some of {sorted(layout)}")
    params = {}
    for name, shape in layout.items():
        value = real_numbers((fixed or {}).get(name, np.nan), f"{what}[{name!r}]")
        if value.shape not in ((), shape):
            raise ValueError(f"{what}[{name!r}] has shape {value.shape}, expected {shape}")
        if np.any(np.isinf(value)):
            raise ValueError(f"{what}[{name!r}]={value}, expected finite numbers; NaN is free")
        params[name] = np.broadcast_to(value, shape)
    return flatten_numpy(family, params, d)


def flatten_numpy(family: Family, params: Mapping[str, np.ndarray], d: int) -> np.ndarray:
    """`flatten` without JAX, bit for bit, for values that must come back unchanged."""
    blocks = [
        np.asarray(params[name], dtype=np.float64).reshape(family.n_prompts, math.prod(shape))
        for name, shape in family.layout(d)
    ]
    return np.concatenate(blocks, axis=-1).reshape(-1)


def coordinates(family: Family, name: str, d: int) -> np.ndarray:
    """True at the entries of the flat vector that belong to a name."""
    one = np.concatenate([np.full(math.prod(s), k == name) for k, s in family.layout(d)])
    return np.tile(one, family.n_prompts)
