"""Swing equations: machines of a power grid as coupled rotors.

M_i omega_i' = P_m,i - P_e,i - D_i omega_i, delta_i' = omega_i, with M = 2 H / (2 pi 60) and

P_e,i = sum_j E_i E_j (G_ij cos(delta_i - delta_j) + B_ij sin(delta_i - delta_j)).

G + i B is the bus admittance matrix with loads as constant impedances and every machine behind its
transient reactance, reduced to the machines' internal nodes (Kron). Angles and speeds are relative
to the centre of inertia, whose motion the equations do not determine.
"""

from typing import NamedTuple

import numpy as np

from moe_jax.symmetries.grids import GRIDS, Grid
from moe_jax.symmetries.simulate import Trajectories, integrate

NOMINAL_FREQUENCY = 60.0


class Machines(NamedTuple):
    """A grid reduced to its machines, at its operating point; in the order of the bus numbers.

    Attributes:
        buses: of the machines.
        admittance: complex[machines, machines], between internal nodes.
        emf: E, magnitudes of the internal voltages.
        angle: delta, of the internal voltages, rad, relative to the slack bus.
        power: P_m, mechanical power, per unit.
        mass: M, s^2 / rad.
    """

    buses: np.ndarray
    admittance: np.ndarray
    emf: np.ndarray
    angle: np.ndarray
    power: np.ndarray
    mass: np.ndarray


def reduce_to_machines(grid: Grid) -> Machines:
    """Solves the power flow and eliminates every node but the machines' internal ones.

    Raises:
        ValueError: if the power flow does not converge.
    """
    admittance = bus_admittance(grid)
    voltage = power_flow(grid, admittance)
    size, buses = len(voltage), np.array(grid.machines) - 1
    load = np.zeros(size, complex)
    for bus, (p, q) in grid.loads.items():
        load[bus - 1] = p + 1j * q
    injected = voltage * np.conj(admittance @ voltage) + load
    order = np.argsort(buses)
    buses = buses[order]
    reactance = np.array(grid.reactance)[order]
    current = np.conj(injected[buses] / voltage[buses])
    internal = voltage[buses] + 1j * reactance * current
    # Constant impedances take the load at the operating point.
    loaded = admittance + np.diag(np.conj(load) / np.abs(voltage) ** 2)
    link = 1.0 / (1j * reactance)
    loaded[buses, buses] += link
    across = np.zeros((size, len(buses)), complex)
    across[buses, np.arange(len(buses))] = -link
    reduced = np.diag(link) - across.T @ np.linalg.solve(loaded, across)
    electrical = internal * np.conj(reduced @ internal)
    return Machines(
        buses=buses + 1,
        admittance=reduced,
        emf=np.abs(internal),
        angle=np.angle(internal),
        power=electrical.real,
        mass=2.0 * np.array(grid.inertia)[order] / (2.0 * np.pi * NOMINAL_FREQUENCY),
    )


def bus_admittance(grid: Grid) -> np.ndarray:
    """complex[buses, buses] of the branches: pi sections with an ideal tap at their first bus."""
    size = int(grid.branches[:, :2].max())
    matrix = np.zeros((size, size), complex)
    for first, second, r, x, b, ratio in grid.branches:
        i, j, tap = int(first) - 1, int(second) - 1, ratio or 1.0
        series = 1.0 / (r + 1j * x)
        matrix[i, i] += (series + 0.5j * b) / tap**2
        matrix[j, j] += series + 0.5j * b
        matrix[i, j] -= series / tap
        matrix[j, i] -= series / tap
    return matrix


def power_flow(grid: Grid, admittance: np.ndarray) -> np.ndarray:
    """Complex bus voltages, by Newton's method on the power mismatch in polar coordinates.

    Raises:
        ValueError: if it does not converge.
    """
    size = len(admittance)
    wanted = np.zeros(size, complex)
    for bus, (p, q) in grid.loads.items():
        wanted[bus - 1] -= p + 1j * q
    machines = np.array(grid.machines) - 1
    wanted[machines] += np.array(grid.power)
    magnitude, angle = np.ones(size), np.zeros(size)
    magnitude[machines] = grid.voltage
    by_angle = np.setdiff1d(np.arange(size), machines[:1])
    by_magnitude = np.setdiff1d(np.arange(size), machines)
    for _ in range(30):
        voltage = magnitude * np.exp(1j * angle)
        current = admittance @ voltage
        mismatch = voltage * np.conj(current) - wanted
        residual = np.concatenate([mismatch.real[by_angle], mismatch.imag[by_magnitude]])
        if np.abs(residual).max() < 1e-12:
            return voltage
        diagonal = np.diag(voltage)
        d_angle = 1j * diagonal @ np.conj(np.diag(current) - admittance @ diagonal)
        direction = np.diag(voltage / magnitude)
        d_magnitude = diagonal @ np.conj(admittance @ direction)
        d_magnitude = d_magnitude + np.diag(np.conj(current)) @ direction
        top = [d_angle.real[np.ix_(by_angle, by_angle)]]
        top.append(d_magnitude.real[np.ix_(by_angle, by_magnitude)])
        bottom = [d_angle.imag[np.ix_(by_magnitude, by_angle)]]
        bottom.append(d_magnitude.imag[np.ix_(by_magnitude, by_magnitude)])
        step = np.linalg.solve(np.block([top, bottom]), residual)
        angle[by_angle] -= step[: len(by_angle)]
        magnitude[by_magnitude] -= step[len(by_angle) :]
    raise ValueError(f"the power flow did not converge: residual {np.abs(residual).max():.2g}")


def electrical_power(machines: Machines, angle: np.ndarray) -> np.ndarray:
    """P_e of every machine, at angles [..., machines]."""
    internal = machines.emf * np.exp(1j * angle)
    return (internal * np.conj(internal @ machines.admittance.T)).real


def modes(machines: Machines) -> np.ndarray:
    """Frequencies of the linearised, undamped equations, Hz, increasing; one less than machines."""
    size = len(machines.mass)
    internal = machines.emf * np.exp(1j * machines.angle)
    # d P_e,i / d delta_j = Im(V_i conj(Y_ij V_j)) for j != i, and rows sum to zero.
    coupling = (internal[:, None] * np.conj(machines.admittance * internal[None, :])).imag
    np.fill_diagonal(coupling, 0.0)
    stiffness = coupling - np.diag(coupling.sum(1))
    squares = np.sort(np.linalg.eigvals(stiffness / machines.mass[:, None]).real)
    # The smallest is 0: turning all angles alike changes no power.
    return np.sqrt(squares[1:size]) / (2.0 * np.pi)


def swing(
    seed: int,
    rows: int,
    *,
    case: str = "wscc9",
    disturbance: float = 0.4,
    damping: float = 0.0,
    times: np.ndarray | None = None,
) -> Trajectories:
    """Oscillations of a grid's machines after a disturbance of their angles and speeds.

    The state is every machine's angle less the operating point's and every speed (rad, rad/s), both
    relative to the centre of inertia; what is seen is the same.

    Args:
        seed: of the disturbances, uniform and independent.
        rows: number of trajectories.
        case: `wscc9` or `ne39`.
        disturbance: largest change of an angle, rad; of a speed, it is times the lowest mode's
            angular frequency.
        damping: D / M of every machine, 1/s.
        times: s.

    Raises:
        ValueError: for an unknown case.
    """
    if case not in GRIDS:
        raise ValueError(f"case={case!r} is not one of {tuple(GRIDS)}")
    times = np.linspace(0.0, 4.0, 161) if times is None else times
    machines = reduce_to_machines(GRIDS[case])
    rng = np.random.default_rng(seed)
    size, share = len(machines.mass), machines.mass / machines.mass.sum()
    start = disturbance * rng.uniform(-1.0, 1.0, (rows, 2, size))
    start[:, 1] *= 2.0 * np.pi * modes(machines)[0]
    start = start - (start * share).sum(-1, keepdims=True)

    def field(state: np.ndarray) -> np.ndarray:
        delta, omega = state[:, :size], state[:, size:]
        excess = machines.power - electrical_power(machines, delta + machines.angle)
        drift = excess.sum(-1, keepdims=True) / machines.mass.sum()
        return np.concatenate([omega, excess / machines.mass - drift - damping * omega], -1)

    states = integrate(field, start.reshape(rows, -1), times, 0.005)
    return Trajectories(times, states, states)
