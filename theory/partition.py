"""Partitions of unity over balls around the centres, exact and fitted by a two-layer ReLU net.

rho_i(x) = b(|x - c_i| / r) / sum_j b(|x - c_j| / r),  b(s) = exp(-1 / (1 - s^2)) for s < 1, else 0.

Derived: sum_i rho_i = 1 gives max_i rho_i >= 1 / E, so an approximation with sup error below
1 / (2 E) already has its largest entry at an i with rho_i(x) > 0, that is, at a chart that contains
x. Sufficient, not necessary: the figure `routing` of `theory.gallery` shows how much less will do.
"""

import dataclasses

import jax
import numpy as np
from jaxtyping import Array, Float, Int, Key

from theory.atlas import Atlas
from theory.checks import check_count, check_indices, check_points, check_positive
from theory.manifolds import draw_normal, draw_uniform


@dataclasses.dataclass(frozen=True)
class Partition:
    """A fitted partition of unity, rho~(x) = relu(x W + b) A + x B + c.

    Attributes:
        weights: float64[D, width], W.
        bias: float64[width], b.
        out: float64[width, charts], A.
        linear: float64[D, charts], B.
        constant: float64[charts], c.
        radius: r of the balls.
    """

    weights: np.ndarray
    bias: np.ndarray
    out: np.ndarray
    linear: np.ndarray
    constant: np.ndarray
    radius: float

    def __call__(self, x: Float[np.ndarray, "points D"]) -> Float[np.ndarray, "points charts"]:
        """Returns rho~ at the points.

        Raises:
            ValueError: for points of another dimension, or not finite.
        """
        x = check_points("x", x, len(self.weights), least=0)
        hidden = np.maximum(x @ self.weights + self.bias, 0.0)
        return hidden @ self.out + x @ self.linear + self.constant


def bumps(
    x: Float[np.ndarray, "points D"], centers: Float[np.ndarray, "charts D"], radius: float
) -> Float[np.ndarray, "points charts"]:
    """The exact rho_i.

    Raises:
        ValueError: if a point lies in no ball, shapes disagree or something is not finite.
    """
    centers = check_points("centers", centers)
    x = check_points("x", x, centers.shape[1], least=0)
    radius = check_positive("radius", radius)
    square = np.sum(x**2, axis=1)[:, None] - 2 * x @ centers.T + np.sum(centers**2, axis=1)[None, :]
    gap = 1 - square / radius**2
    bump = np.where(gap > 0, np.exp(-1 / np.maximum(gap, 1e-300)), 0.0)
    total = bump.sum(axis=1, keepdims=True)
    if not np.all(total > 0):
        raise ValueError(
            f"radius={radius:.3g} leaves {np.sum(total <= 0)} of {len(x)} points in no ball"
        )
    return bump / total


def partition_of_unity(
    key: Key[Array, ""],
    atlas: Atlas,
    width: int,
    *,
    overlap: float = 1.2,
    num_sample: int = 4_000,
) -> Partition:
    """Fits rho by least squares on `width` random ReLU features, besides x and 1.

    Args:
        key: draws sample and features.
        atlas: whose centres and manifold are used.
        width: neurons.
        overlap: radius of the balls over the largest distance of a point to its centre.
        num_sample: points of the fit.

    Raises:
        ValueError: if width or num_sample is below 1 or overlap not above 1.
    """
    check_count("width", width)
    check_count("num_sample", num_sample)
    if not 1 < overlap < np.inf:
        raise ValueError(f"overlap={overlap} must be above 1 and finite")
    sample_key, weight_key, bias_key = jax.random.split(key, 3)
    x = atlas.manifold.embed(atlas.manifold.sample_params(sample_key, num_sample))
    distance = np.sqrt(_nearest_square(x, atlas.centers))
    radius = overlap * float(distance.max())
    rho = bumps(x, atlas.centers, radius)
    scale = np.sqrt(np.mean(np.sum((x - x.mean(axis=0)) ** 2, axis=1)))
    native_dim = atlas.manifold.frame.shape[1]
    # In the manifold's own coordinates, so that the features do not change with D.
    direction = draw_normal(weight_key, (native_dim, width))
    direction = atlas.manifold.frame @ (direction / np.linalg.norm(direction, axis=0))
    bias = draw_uniform(bias_key, (width,), -scale, scale)
    features = np.concatenate(
        [
            np.maximum(x @ direction + bias, 0.0),
            x @ atlas.manifold.frame,
            np.ones((num_sample, 1)),
        ],
        axis=1,
    )
    solution, *_ = np.linalg.lstsq(features, rho, rcond=1e-10)
    return Partition(
        weights=direction,
        bias=bias,
        out=solution[:width],
        linear=atlas.manifold.frame @ solution[width:-1],
        constant=solution[-1],
        radius=radius,
    )


def misassigned(
    x: Float[np.ndarray, "points D"],
    selection: Int[np.ndarray, " _"],
    centers: Float[np.ndarray, "charts D"],
    radius: float,
) -> float:
    """Share of the points sent to a chart whose ball does not contain them; NaN is in none.

    Raises:
        ValueError: if shapes disagree, there is no point, a chart does not exist or the radius is
            not positive.
    """
    radius = check_positive("radius", radius)
    centers = check_points("centers", centers)
    x = check_points("x", x, centers.shape[1], finite=False)
    if np.shape(selection) != x.shape[:1]:
        raise ValueError(f"selection {np.shape(selection)} disagrees with x {x.shape}")
    selection = check_indices("selection", selection, len(x), len(centers))
    distance = np.linalg.norm(x - centers[selection], axis=1)
    return float(np.mean(~(distance < radius)))


def _nearest_square(x: np.ndarray, centers: np.ndarray) -> np.ndarray:
    square = np.sum(x**2, axis=1)[:, None] - 2 * x @ centers.T + np.sum(centers**2, axis=1)[None, :]
    return np.maximum(square.min(axis=1), 0.0)
