"""The spectrum of a fitted model, and what of a generator can be identified.

Generators are known only up to conjugation by an invertible map, which encoder and decoder absorb,
up to the order of experts and planes and the sign of each frequency, and, for regular sampling with
gap D, up to multiples of 2 pi / D. Compare eigenvalues, or the canonical form of a block, never raw
matrices.
"""

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Complex, Float

from moe_jax.symmetries.generators import PlaneRates, expert_rates
from moe_jax.symmetries.model import LatentMoS, MoSOutput, generators

MAX_MATCHED = 8


class Match(NamedTuple):
    """Eigenvalues matched one to one.

    Attributes:
        learned, true: complex[pairs], in the order of `true`.
        frequency_error: largest |omega_learned - omega_true| / omega_true.
        growth_error: largest |sigma_learned - sigma_true|.
    """

    learned: np.ndarray
    true: np.ndarray
    frequency_error: float
    growth_error: float


def spectrum(model: LatentMoS, variables: Any) -> Complex[Array, "levels experts eigenvalues"]:
    """Continuous-time eigenvalues sigma + i omega of every expert, per original time unit.

    A plane of `rst` has one, which stands for a conjugate pair; a matrix has all d of them. A
    factor e^sigma is growth over one unit of the data's time, and omega / (2 pi) in cycles a unit.
    """
    params, config = variables["params"], model.config
    unit = variables["scales"]["scales"].time_unit
    found = []
    for index in range(config.levels):
        rates = expert_rates(params[f"level_{index}"]["generators"], config)
        if isinstance(rates, PlaneRates):
            found.append(jax.lax.complex(rates.sigma / unit, rates.omega / unit))
        else:
            # No accelerator has the general eigenvalue problem, and the matrices are small.
            values = np.linalg.eigvals(np.asarray(rates)).astype(np.result_type(unit, 1j))
            found.append(jnp.asarray(values / np.asarray(unit)))
    return jnp.stack(found)


def anchor_spectrum(
    model: LatentMoS, variables: Any, output: MoSOutput, *, level: int = 0
) -> Complex[np.ndarray, "rows times planes"]:
    """Eigenvalues of the generator that acts at every anchor under `algebra` mixing.

    sum_k pi_k (sigma_k + i omega_k), per original time unit: a nonlinear oscillation's
    frequency depends on where it is, and this is that dependence. Of meaning where
    `output.is_anchor`.

    Raises:
        ValueError: unless the generator is `rst`, mixed in the algebra.
    """
    if model.config.generator != "rst" or model.config.mixing != "algebra":
        raise ValueError("anchor_spectrum needs generator='rst' and mixing='algebra'")
    values = np.asarray(spectrum(model, variables)[level])
    return np.einsum("rtk,km->rtm", np.asarray(output.gates[level]), values)


def generator_matrices(model: LatentMoS, variables: Any) -> Float[Array, "levels experts d d"]:
    """Every expert's generator as a matrix, per original time unit; linear parts only."""
    return generators(variables["params"], model.config) / variables["scales"]["scales"].time_unit


def match_spectrum(learned: Any, true: Any) -> Match:
    """Pairs learned with true eigenvalues so that the sum of distances is least.

    Signs of imaginary parts are dropped first: a reflection of a plane changes them.

    Args:
        learned: at least as many as true; each is used once.
        true: at most 8, with positive frequencies.

    Raises:
        ValueError: if the numbers do not fit, one is not finite, or a true frequency not positive.
    """
    learned, true = (np.asarray(v, np.complex128).ravel() for v in (learned, true))
    if not 0 < len(true) <= min(len(learned), MAX_MATCHED):
        raise ValueError(f"{len(true)} true eigenvalues for {len(learned)} learned, at most 8")
    if not (np.isfinite(learned).all() and np.isfinite(true).all() and (true.imag > 0).all()):
        raise ValueError(f"{true=} must be finite with positive frequencies, {learned=} finite")
    learned = learned.real + 1j * np.abs(learned.imag)
    distance = np.abs(learned[None, :] - true[:, None])
    orders = itertools.permutations(range(len(learned)), len(true))
    best = min(orders, key=lambda order: sum(distance[i, j] for i, j in enumerate(order)))
    chosen = learned[list(best)]
    return Match(
        learned=chosen,
        true=true,
        frequency_error=float(np.max(np.abs(chosen.imag - true.imag) / np.abs(true.imag))),
        growth_error=float(np.max(np.abs(chosen.real - true.real))),
    )


def canonical_angle(matrix: Any) -> float:
    """Angle in degrees between a traceless, canonical 2 x 2 generator and J = [[0, -1], [1, 0]].

    With the complex eigenvector u + i v of A = P B P^-1, the basis (u, v) brings A to [[sigma,
    omega], [-omega, sigma]]; the angle that is left is numerical. A matrix without a complex pair
    generates no rotation, and has 90 degrees. The raw angle between A and J, by contrast, is one of
    the coordinates that encoder and decoder happened to choose.

    Raises:
        ValueError: unless the matrix is 2 x 2 and finite.
    """
    matrix = np.asarray(matrix, np.float64)
    if matrix.shape != (2, 2) or not np.isfinite(matrix).all():
        raise ValueError(f"matrix {matrix.tolist()} must be 2 x 2 and finite")
    values, vectors = np.linalg.eig(matrix)
    if not np.iscomplex(values).any():
        return 90.0
    vector = vectors[:, 0]
    basis = np.stack([vector.real, vector.imag], axis=1)
    canonical = np.linalg.solve(basis, matrix @ basis)
    traceless = canonical - np.trace(canonical) / 2.0 * np.eye(2)
    rotation = np.array([[0.0, -1.0], [1.0, 0.0]])
    cosine = np.abs(np.sum(traceless * rotation)) / np.linalg.norm(traceless) / np.sqrt(2.0)
    return float(np.degrees(np.arccos(min(cosine, 1.0))))
