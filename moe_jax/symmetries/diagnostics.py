"""What to look at after fitting: which laws the learned flow obeys, and how experts are used."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from moe_jax.core import RoutingMetrics, routing_metrics
from moe_jax.symmetries.gates import invariants, route
from moe_jax.symmetries.model import LatentMoS, MoSOutput, level_gate, move


def group_defect(
    model: LatentMoS, variables: Any, z: Float[Array, "states d"], s: float, t: float
) -> float:
    """Largest ||M(s + t) z - M(s) M(t) z|| / ||M(s + t) z|| with the gate of z kept throughout.

    0 up to rounding for `algebra`; for `output`, about s t Var_pi(A): a mean of group elements is
    no group element. Times are in the data's unit, z is latent. Exponents are clipped at 8 and at
    -30, where the law ends.
    """
    weights = _gate(variables["params"], model.config, z)
    return _two_steps(model, variables, z, s, t, lambda _: weights)


def composition_defect(
    model: LatentMoS, variables: Any, z: Float[Array, "states d"], s: float, t: float
) -> float:
    """The same with the gate asked anew after t: whether the whole cell is a flow."""
    ask = lambda z: _gate(variables["params"], model.config, z)  # noqa: E731
    return _two_steps(model, variables, z, s, t, ask)


def equivariance_defect(
    function: Callable[[Any], Any], act: Callable[[Any], Any], points: Any
) -> float:
    """Largest ||f(g x) - g f(x)|| / ||f(x)|| over points x, for a transformation g of the data.

    Args:
        function: f, from [points, ...] to the same shape.
        act: g.
        points: x.
    """
    before = np.asarray(function(act(points)))
    plain = np.asarray(function(points))
    return _relative(before - np.asarray(act(plain)), plain)


def casimir_drift(
    model: LatentMoS, variables: Any, z: Float[Array, "states d"], time: float
) -> float:
    """Largest relative change of |zeta_j|^2, the group's invariants, over a time, gate kept.

    The time is in the data's unit, z is latent.
    """
    params, config = variables["params"], model.config
    moved = _move(params, config, z, _gate(params, config, z), _spans(variables, z, time))
    before, after = (np.asarray(invariants(each, config), np.float64) for each in (z, moved))
    if config.log_invariants:
        before, after = (np.sign(each) * np.expm1(np.abs(each)) for each in (before, after))
    return float(np.max(np.abs(after - before) / np.maximum(np.abs(before), 1e-12)))


def energy_drift(
    energy: Callable[[Any], Any], predicted: Any, start: Any
) -> Float[np.ndarray, " rows"]:
    """max_t |H(x(t)) - H(x(0))| / |H(x(0))| of every row, for a known conserved H.

    Args:
        energy: H, from [..., channels] to [...].
        predicted: [rows, times, channels].
        start: [rows, channels], true states at the beginning.
    """
    first = np.asarray(energy(np.asarray(start, np.float64)))
    along = np.asarray(energy(np.asarray(predicted, np.float64)))
    return np.max(np.abs(along - first[:, None]), axis=1) / np.maximum(np.abs(first), 1e-12)


def gate_usage(model: LatentMoS, output: MoSOutput, *, level: int = 0) -> RoutingMetrics:
    """Load, balance, entropy and dropped share of the experts over a level's anchors.

    The gate's weights are read as those of a dense router: the load of an expert is then its mean
    weight; with `num_selected` experts, the share of anchors that chose it.
    """
    logits = jnp.log(jnp.maximum(output.gates[level], 1e-30)).astype(jnp.float32)
    metrics = routing_metrics(route(logits, output.is_anchor[level], model.config))
    if model.config.num_selected in (0, model.config.experts):
        weight = jnp.where(output.is_anchor[level][..., None], output.gates[level], 0.0)
        load = jnp.sum(weight, axis=(0, 1)) / jnp.maximum(jnp.sum(weight), 1e-12)
        metrics = dataclasses.replace(
            metrics, load=load, balance=jnp.max(load) * float(load.shape[0])
        )
    return metrics


def _two_steps(
    model: LatentMoS,
    variables: Any,
    z: Array,
    s: float,
    t: float,
    ask: Callable[[Array], Array],
) -> float:
    params, config = variables["params"], model.config

    def moved(z: Array, weights: Array, time: float) -> Array:
        return _move(params, config, z, weights, _spans(variables, z, time))

    whole = moved(z, ask(z), s + t)
    half = moved(z, ask(z), t)
    return _relative(np.asarray(whole - moved(half, ask(half), s)), np.asarray(whole))


_gate = jax.jit(level_gate, static_argnums=1)
_move = jax.jit(move, static_argnums=1)


def _spans(variables: Any, z: Array, time: float) -> Array:
    """An original time for every state, in the rescaled unit."""
    unit = variables["scales"]["scales"].time_unit
    return jnp.broadcast_to(jnp.asarray(time, z.dtype) / unit, z.shape[:-1])


def _relative(error: np.ndarray, scale: np.ndarray) -> float:
    norm = np.linalg.norm(scale.reshape(len(scale), -1), axis=1)
    return float(np.max(np.linalg.norm(error.reshape(len(error), -1), axis=1) / norm))
