"""Systems with known equations, solved to high accuracy in float64 on the host.

Each simulator returns `Trajectories`: dense, noise-free truth on a regular grid, from which
`moe_jax.symmetries.sample` takes few and noisy observations.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np


class Trajectories(NamedTuple):
    """Dense truth.

    Attributes:
        times: float64[times], regular.
        values: float64[rows, times, channels], what a sensor could see.
        states: float64[rows, times, state], what the equations move.
    """

    times: np.ndarray
    values: np.ndarray
    states: np.ndarray


Field = Callable[[np.ndarray], np.ndarray]
"""Autonomous vector field, [rows, state] -> [rows, state]."""


def integrate(field: Field, start: np.ndarray, times: np.ndarray, max_step: float) -> np.ndarray:
    """Runge-Kutta of order 4 with equal steps of at most `max_step` between the times.

    Returns:
        float64[rows, times, state].
    """
    state = np.array(start, np.float64)
    states = [state]
    for gap in np.diff(times):
        steps = max(math.ceil(gap / max_step - 1e-9), 1)
        h = gap / steps
        for _ in range(steps):
            k1 = field(state)
            k2 = field(state + 0.5 * h * k1)
            k3 = field(state + 0.5 * h * k2)
            k4 = field(state + h * k3)
            state = state + h / 6.0 * (k1 + 2.0 * k2 + 2.0 * k3 + k4)
        states.append(state)
    return np.stack(states, axis=1)


def oscillators(
    seed: int,
    rows: int,
    *,
    frequencies: tuple[float, ...] = (1.3,),
    damping: float = 0.0,
    channels: int = 5,
    nonlinear: bool = True,
    times: np.ndarray | None = None,
) -> Trajectories:
    """Independent oscillators seen through one random map: linear, or tanh of it.

    The state is x_j, y_j of each; both fall as exp(-damping t), in closed form.
    """
    rng = np.random.default_rng(seed)
    times = np.linspace(0.0, 20.0, 161) if times is None else times
    num = len(frequencies)
    radius, phase = rng.uniform(0.5, 1.5, (rows, num)), rng.uniform(0, 2 * np.pi, (rows, num))
    angle = phase[:, None] + times[None, :, None] * np.array(frequencies)
    amplitude = radius[:, None] * np.exp(-damping * times)[None, :, None]
    states = amplitude[..., None] * np.stack([np.cos(angle), np.sin(angle)], -1)
    states = states.reshape(rows, len(times), 2 * num)
    # The map is the system's, and the same for every seed: rows of different seeds are one system.
    mixing = np.random.default_rng(17).normal(size=(2 * num, channels))
    values = states @ mixing
    return Trajectories(times, np.tanh(values) if nonlinear else values, states)


def pendulum(seed: int, rows: int, *, times: np.ndarray | None = None) -> Trajectories:
    """Theta'' = -sin theta, energy theta'^2 / 2 - cos theta at most 0.99, hence no turning over.

    Starts are uniform over theta in [-pi, pi], theta' in [-2.1, 2.1] within that energy (LaLiGAN).
    """
    rng = np.random.default_rng(seed)
    times = np.linspace(0.0, 20.0, 161) if times is None else times
    start = np.empty((0, 2))
    while len(start) < rows:
        drawn = rng.uniform([-np.pi, -2.1], [np.pi, 2.1], (4 * rows + 8, 2))
        start = np.concatenate([start, drawn[np.abs(pendulum_energy(drawn)) <= 0.99]])
    states = integrate(_pendulum_field, start[:rows], times, 0.02)
    return Trajectories(times, states, states)


def pendulum_energy(state: np.ndarray) -> np.ndarray:
    """theta'^2 / 2 - cos theta."""
    return state[..., 1] ** 2 / 2.0 - np.cos(state[..., 0])


def damped_pendulum(
    seed: int, rows: int, *, damping: float = 0.1, times: np.ndarray | None = None
) -> Trajectories:
    """Theta'' = -sin theta - damping theta', from the starts of `pendulum`."""
    times = np.linspace(0.0, 20.0, 161) if times is None else times
    start = pendulum(seed, rows, times=times[:1]).states[:, 0]

    def field(state: np.ndarray) -> np.ndarray:
        theta, speed = state.T
        return np.stack([speed, -np.sin(theta) - damping * speed], -1)

    states = integrate(field, start, times, 0.02)
    return Trajectories(times, states, states)


def double_pendulum(
    seed: int, rows: int, *, large: bool = False, times: np.ndarray | None = None
) -> Trajectories:
    """Two unit masses on unit rods, g = 9.81: angles up to 0.3 rad, or up to 2.5 (chaotic).

    The state is theta_1, theta_2 and their speeds; all start at rest.
    """
    rng = np.random.default_rng(seed)
    times = np.linspace(0.0, 10.0, 161) if times is None else times
    bound = 2.5 if large else 0.3
    start = np.concatenate([rng.uniform(-bound, bound, (rows, 2)), np.zeros((rows, 2))], -1)
    states = integrate(_double_pendulum_field, start, times, 0.005)
    return Trajectories(times, states, states)


def double_pendulum_energy(state: np.ndarray) -> np.ndarray:
    """Kinetic and potential energy, 0 with both rods level and at rest."""
    a, b, u, v = np.moveaxis(state, -1, 0)
    kinetic = u**2 + v**2 / 2.0 + u * v * np.cos(a - b)
    return kinetic - 9.81 * (2.0 * np.cos(a) + np.cos(b))


def two_body(seed: int, rows: int, *, times: np.ndarray | None = None) -> Trajectories:
    """Two unit masses in a plane, G = 1, on ellipses of eccentricity at most 0.5.

    The state is x_1, y_1, x_2, y_2 and their speeds, with the centre of mass at rest in 0; the
    semi-major axis of the relative orbit is 1 to 1.5.
    """
    rng = np.random.default_rng(seed)
    times = np.linspace(0.0, 12.0, 161) if times is None else times
    axis, eccentricity = rng.uniform(1.0, 1.5, rows), rng.uniform(0.0, 0.5, rows)
    turn = rng.uniform(0.0, 2.0 * np.pi, rows)
    # At the pericentre, where position and speed are at right angles; mu = G (m1 + m2) = 2.
    distance = axis * (1.0 - eccentricity)
    speed = np.sqrt(2.0 / axis * (1.0 + eccentricity) / (1.0 - eccentricity))
    direction = np.stack([np.cos(turn), np.sin(turn)], -1)
    across = np.stack([-np.sin(turn), np.cos(turn)], -1)
    position, velocity = distance[:, None] * direction, speed[:, None] * across
    start = np.concatenate([position / 2, -position / 2, velocity / 2, -velocity / 2], -1)
    states = integrate(_two_body_field, start, times, 0.005)
    return Trajectories(times, states, states)


def two_body_energy(state: np.ndarray) -> np.ndarray:
    """Kinetic energy less 1 over the distance."""
    distance = np.linalg.norm(state[..., 0:2] - state[..., 2:4], axis=-1)
    return (state[..., 4:] ** 2).sum(-1) / 2.0 - 1.0 / distance


def two_body_angular_momentum(state: np.ndarray) -> np.ndarray:
    """Sum of x v_y - y v_x."""
    x, y, u, v = state[..., 0:4:2], state[..., 1:4:2], state[..., 4::2], state[..., 5::2]
    return (x * v - y * u).sum(-1)


def lotka_volterra(seed: int, rows: int, *, times: np.ndarray | None = None) -> Trajectories:
    """X' = 2/3 - 4/3 e^y, y' = e^x - 1 in log populations; 3 <= H <= 4.5 (LaLiGAN).

    H = e^x - x + 4/3 e^y - 2/3 y is conserved; starts are logarithms of uniforms in (0, 1).
    """
    rng = np.random.default_rng(seed)
    times = np.linspace(0.0, 30.0, 161) if times is None else times
    start = np.empty((0, 2))
    while len(start) < rows:
        drawn = np.log(rng.uniform(1e-12, 1.0, (8 * rows + 32, 2)))
        energy = lotka_volterra_energy(drawn)
        start = np.concatenate([start, drawn[(energy >= 3.0) & (energy <= 4.5)]])
    states = integrate(_lotka_volterra_field, start[:rows], times, 0.01)
    return Trajectories(times, states, states)


def lotka_volterra_energy(state: np.ndarray) -> np.ndarray:
    """H = e^x - x + 4/3 e^y - 2/3 y."""
    x, y = state[..., 0], state[..., 1]
    return np.exp(x) - x + 4.0 / 3.0 * np.exp(y) - 2.0 / 3.0 * y


def lorenz(seed: int, rows: int, *, times: np.ndarray | None = None) -> Trajectories:
    """X' = 10 (y - x), y' = x (28 - z) - y, z' = x y - 8/3 z, begun on the attractor."""
    rng = np.random.default_rng(seed)
    times = np.linspace(0.0, 4.0, 161) if times is None else times
    start = rng.normal(size=(rows, 3)) + np.array([0.0, 0.0, 25.0])
    start = integrate(_lorenz_field, start, np.array([0.0, 10.0]), 0.005)[:, -1]
    states = integrate(_lorenz_field, start, times, 0.005)
    return Trajectories(times, states, states)


def kuramoto(
    seed: int, rows: int, *, coupling: float = 1.0, num: int = 10, times: np.ndarray | None = None
) -> Trajectories:
    """theta_i' = omega_i + coupling / N sum_j sin(theta_j - theta_i); seen as cos and sin.

    Natural frequencies are normal, drawn once: they are the system's, and the same for every seed.
    """
    times = np.linspace(0.0, 20.0, 161) if times is None else times
    natural = np.random.default_rng(17).normal(size=num)
    start = np.random.default_rng(seed).uniform(0, 2 * np.pi, (rows, num))

    def field(theta: np.ndarray) -> np.ndarray:
        pull = np.sin(theta[:, None, :] - theta[:, :, None]).sum(-1)
        return natural + coupling / num * pull

    states = integrate(field, start, times, 0.02)
    return Trajectories(times, np.concatenate([np.cos(states), np.sin(states)], -1), states)


def reaction_diffusion(
    seed: int, rows: int, *, size: int = 32, times: np.ndarray | None = None
) -> Trajectories:
    """The lambda-omega system on [-10, 10]^2, periodic, beta = 1, d = 0.1; spirals.

    u' = (1 - A) u + beta A v + d Lap u, v' = -beta A u + (1 - A) v + d Lap v, A = u^2 + v^2. The
    state is u, then v, on a size x size grid, with the Laplacian of second order.
    """
    rng = np.random.default_rng(seed)
    times = np.linspace(0.0, 10.0, 101) if times is None else times
    axis = np.linspace(-10.0, 10.0, size, endpoint=False)
    x, y = np.meshgrid(axis, axis, indexing="ij")
    radius, angle = np.hypot(x, y), np.arctan2(y, x)
    turn = rng.uniform(0.0, 2.0 * np.pi, (rows, 1, 1))
    u = np.tanh(radius) * np.cos(angle + turn - radius)
    v = np.tanh(radius) * np.sin(angle + turn - radius)
    inverse_square = (size / 20.0) ** 2

    def laplacian(a: np.ndarray) -> np.ndarray:
        shifted = [np.roll(a, shift, axis) for axis in (1, 2) for shift in (1, -1)]
        return (sum(shifted) - 4.0 * a) * inverse_square

    def field(state: np.ndarray) -> np.ndarray:
        u, v = state.reshape(len(state), 2, size, size).swapaxes(0, 1)
        a = u**2 + v**2
        du = (1.0 - a) * u + a * v + 0.1 * laplacian(u)
        dv = -a * u + (1.0 - a) * v + 0.1 * laplacian(v)
        return np.stack([du, dv], 1).reshape(len(state), -1)

    start = np.stack([u, v], 1).reshape(rows, -1)
    states = integrate(field, start, times, 0.05)
    return Trajectories(times, states, states)


def _pendulum_field(state: np.ndarray) -> np.ndarray:
    return np.stack([state[:, 1], -np.sin(state[:, 0])], -1)


def _double_pendulum_field(state: np.ndarray) -> np.ndarray:
    a, b, u, v = state.T
    cos, sin = np.cos(a - b), np.sin(a - b)
    force_a = -sin * v**2 - 2.0 * 9.81 * np.sin(a)
    force_b = sin * u**2 - 9.81 * np.sin(b)
    # [[2, cos], [cos, 1]] (u', v') = forces.
    det = 2.0 - cos**2
    return np.stack(
        [u, v, (force_a - cos * force_b) / det, (2.0 * force_b - cos * force_a) / det], -1
    )


def _two_body_field(state: np.ndarray) -> np.ndarray:
    between = state[:, 2:4] - state[:, 0:2]
    pull = between / np.linalg.norm(between, axis=-1, keepdims=True) ** 3
    return np.concatenate([state[:, 4:], pull, -pull], -1)


def _lotka_volterra_field(state: np.ndarray) -> np.ndarray:
    x, y = state.T
    return np.stack([2.0 / 3.0 - 4.0 / 3.0 * np.exp(y), np.exp(x) - 1.0], -1)


def _lorenz_field(state: np.ndarray) -> np.ndarray:
    x, y, z = state.T
    return np.stack([10.0 * (y - x), x * (28.0 - z) - y, x * y - 8.0 / 3.0 * z], -1)
