"""Compact manifolds with known parametrisations, and isometric embeddings into many dimensions.

A manifold lives in its own k coordinates; a frame, D x k with orthonormal columns, places it in
R^D. Distances, tangents and targets do not depend on the frame, so whatever changes with D is the
network's doing. Circle, sphere, tori and roll span k <= 4 dimensions only, and a linear layer could
throw the others away; the moment curve spans all D.

Parameters may be redundant: the sphere takes any vector but 0 and divides by its length, which has
no pole. All arrays are float64 numpy.
"""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np
from jaxtyping import Array, Float, Key

from theory.checks import check_count, check_number, check_points, check_positive

Points = Float[np.ndarray, "points _"]


@dataclasses.dataclass(frozen=True)
class Manifold:
    """A d-dimensional submanifold of R^D.

    Attributes:
        name: for messages and figures.
        dim: d.
        native: parameters [points, p] -> its own coordinates [points, k].
        jacobian: parameters [points, p] -> derivatives of `native`, [points, k, p].
        sample_params: (key, number) -> parameters [number, p] that cover the manifold.
        frame: float64[D, k] with orthonormal columns.
        num_params: p.
    """

    name: str
    dim: int
    native: Callable[[np.ndarray], np.ndarray]
    jacobian: Callable[[np.ndarray], np.ndarray]
    sample_params: Callable[[Array, int], np.ndarray]
    frame: np.ndarray
    num_params: int

    @property
    def ambient_dim(self) -> int:
        """D."""
        return self.frame.shape[0]

    def embed(self, params: Points) -> Points:
        """Points of R^D, one a row of parameters.

        Raises:
            ValueError: unless rows are p finite numbers to which a point belongs.
        """
        params = check_points("params", params, self.num_params, least=0)
        with np.errstate(all="ignore"):
            points = self.native(params)
        if not np.all(np.isfinite(points)):
            bad = params[~np.isfinite(points).all(axis=1)][0]
            raise ValueError(f"params hold {bad}, to which no point of the {self.name} belongs")
        return points @ self.frame.T


def embed_isometric(key: Key[Array, ""], manifold: Manifold, ambient_dim: int) -> Manifold:
    """The same manifold in R^D by a random matrix of orthonormal columns.

    Raises:
        ValueError: if D is smaller than the number k of the manifold's own coordinates, or not a
            whole number.
    """
    check_count("ambient_dim", ambient_dim)
    native_dim = manifold.frame.shape[1]
    if ambient_dim < native_dim:
        raise ValueError(
            f"ambient_dim={ambient_dim} is smaller than the {native_dim} dimensions of "
            f"{manifold.name}"
        )
    frame, _ = np.linalg.qr(draw_normal(key, (ambient_dim, native_dim)))
    return dataclasses.replace(manifold, frame=frame)


def circle() -> Manifold:
    """The unit circle, (cos t, sin t)."""
    return Manifold(
        name="circle",
        dim=1,
        native=lambda t: np.concatenate([np.cos(t), np.sin(t)], axis=1),
        jacobian=lambda t: np.stack([-np.sin(t), np.cos(t)], axis=1),
        sample_params=lambda key, num: draw_uniform(key, (num, 1), 0.0, 2 * np.pi),
        frame=np.eye(2),
        num_params=1,
    )


def moment_curve(ambient_dim: int) -> Manifold:
    """The closed curve (cos(k t) / k^3, sin(k t) / k^3), k = 1..D/2, of bounded curvature.

    It lies in no hyperplane of R^D.

    Raises:
        ValueError: unless D is even and at least 2.
    """
    ambient_dim = check_count("ambient_dim", ambient_dim, -(10**9))
    if ambient_dim < 2 or ambient_dim % 2:
        raise ValueError(f"ambient_dim={ambient_dim} must be even and at least 2")
    k = np.arange(1, ambient_dim // 2 + 1)[None, :]
    return Manifold(
        name="moment curve",
        dim=1,
        native=lambda t: (
            np.concatenate([np.cos(k * t), np.sin(k * t)], axis=1)
            / np.concatenate([k, k], axis=1) ** 3
        ),
        jacobian=lambda t: (
            np.concatenate([-np.sin(k * t), np.cos(k * t)], axis=1)
            / np.concatenate([k, k], axis=1) ** 2
        )[:, :, None],
        sample_params=lambda key, num: draw_uniform(key, (num, 1), 0.0, 2 * np.pi),
        frame=np.eye(ambient_dim),
        num_params=1,
    )


def sphere() -> Manifold:
    """The unit sphere S^2, w / |w|."""

    def native(w: np.ndarray) -> np.ndarray:
        return w / np.linalg.norm(w, axis=1, keepdims=True)

    def jacobian(w: np.ndarray) -> np.ndarray:
        x = native(w)
        projection = np.eye(3)[None] - x[:, :, None] * x[:, None, :]
        return projection / np.linalg.norm(w, axis=1)[:, None, None]

    return Manifold(
        name="sphere",
        dim=2,
        native=native,
        jacobian=jacobian,
        sample_params=lambda key, num: draw_normal(key, (num, 3)),
        frame=np.eye(3),
        num_params=3,
    )


def torus(major: float = 2.0, minor: float = 1.0) -> Manifold:
    """The torus of revolution in R^3 with radii `major` > `minor` > 0."""
    minor, major = check_number("minor", minor), check_number("major", major)
    if not 0 < minor < major:
        raise ValueError(f"minor={minor} must be positive and below major={major}")

    def native(params: np.ndarray) -> np.ndarray:
        around, tube = params.T
        radius = major + minor * np.cos(tube)
        return np.stack(
            [radius * np.cos(around), radius * np.sin(around), minor * np.sin(tube)], axis=1
        )

    def jacobian(params: np.ndarray) -> np.ndarray:
        around, tube = params.T
        radius, slope = major + minor * np.cos(tube), -minor * np.sin(tube)
        columns = [
            [-radius * np.sin(around), slope * np.cos(around)],
            [radius * np.cos(around), slope * np.sin(around)],
            [np.zeros_like(around), minor * np.cos(tube)],
        ]
        return np.stack([np.stack(row, axis=1) for row in columns], axis=1)

    return Manifold(
        name="torus",
        dim=2,
        native=native,
        jacobian=jacobian,
        sample_params=lambda key, num: draw_uniform(key, (num, 2), 0.0, 2 * np.pi),
        frame=np.eye(3),
        num_params=2,
    )


def clifford_torus() -> Manifold:
    """The flat torus (cos s, sin s, cos t, sin t) / sqrt(2) on the unit sphere of R^4."""

    def jacobian(params: np.ndarray) -> np.ndarray:
        s, t = params.T
        zero = np.zeros_like(s)
        rows = [[-np.sin(s), zero], [np.cos(s), zero], [zero, -np.sin(t)], [zero, np.cos(t)]]
        return np.stack([np.stack(row, axis=1) for row in rows], axis=1) / np.sqrt(2)

    return Manifold(
        name="Clifford torus",
        dim=2,
        native=lambda params: (
            np.stack([trig(angle) for angle in params.T for trig in (np.cos, np.sin)], axis=1)
            / np.sqrt(2)
        ),
        jacobian=jacobian,
        sample_params=lambda key, num: draw_uniform(key, (num, 2), 0.0, 2 * np.pi),
        frame=np.eye(4),
        num_params=2,
    )


def swiss_roll(width: float = 21.0) -> Manifold:
    """The sheet (t cos t, h, t sin t), t in [3 pi / 2, 9 pi / 2], h in [0, width].

    One nonlinear chart covers it; affine charts must tell apart sheets 2 pi from each other.

    Raises:
        ValueError: unless the width is positive.
    """
    width = check_positive("width", width)

    def jacobian(params: np.ndarray) -> np.ndarray:
        t, _ = params.T
        zero, one = np.zeros_like(t), np.ones_like(t)
        rows = [
            [np.cos(t) - t * np.sin(t), zero],
            [zero, one],
            [np.sin(t) + t * np.cos(t), zero],
        ]
        return np.stack([np.stack(row, axis=1) for row in rows], axis=1)

    def sample(key: Array, num: int) -> np.ndarray:
        unit = draw_uniform(key, (num, 2), 0.0, 1.0)
        # Arc length grows like t^2 / 2.
        low, high = (1.5 * np.pi) ** 2, (4.5 * np.pi) ** 2
        return np.stack([np.sqrt(low + (high - low) * unit[:, 0]), width * unit[:, 1]], axis=1)

    return Manifold(
        name="Swiss roll",
        dim=2,
        native=lambda params: np.stack(
            [
                params[:, 0] * np.cos(params[:, 0]),
                params[:, 1],
                params[:, 0] * np.sin(params[:, 0]),
            ],
            axis=1,
        ),
        jacobian=jacobian,
        sample_params=sample,
        frame=np.eye(3),
        num_params=2,
    )


def draw_uniform(
    key: Key[Array, ""], shape: tuple[int, ...], low: float, high: float
) -> Float[np.ndarray, "..."]:
    """Uniform float64 numbers in [low, high)."""
    shape = tuple(check_count("size of a draw", size, 0) for size in shape)
    with jax.enable_x64(True):
        return np.array(jax.random.uniform(key, shape, np.float64, low, high))


def draw_normal(key: Key[Array, ""], shape: tuple[int, ...]) -> Float[np.ndarray, "..."]:
    """Standard normal float64 numbers."""
    shape = tuple(check_count("size of a draw", size, 0) for size in shape)
    with jax.enable_x64(True):
        return np.array(jax.random.normal(key, shape, np.float64))


MANIFOLDS: dict[str, Callable[..., Manifold]] = {
    "circle": circle,
    "sphere": sphere,
    "torus": torus,
    "clifford_torus": clifford_torus,
    "swiss_roll": swiss_roll,
}
"""Those with one shape whatever D; the moment curve has one for each D."""
