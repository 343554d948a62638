"""Data of the learned experiments: points, values of unit variance, and cells where there are some.

Manifolds are rotated: points on the first axes would leave the weights of the others without
effect, and independence of D would come for free.
"""

import dataclasses

import jax
import numpy as np
from jaxtyping import Array, Key

from theory.checks import check_count, check_points
from theory.manifolds import (
    Manifold,
    circle,
    draw_normal,
    draw_uniform,
    embed_isometric,
    moment_curve,
    sphere,
)
from theory.product_grid import ProductGrid, product_grid
from theory.targets import ring_index, waves

PARTITIONS = ("arcs", "rings", "spirals", "grid")
RING_RADII = (0.35, 0.65, 0.95)


@dataclasses.dataclass(frozen=True)
class Problem:
    """A function to learn from points.

    Attributes:
        x, y: float32[train, D] and [train, outputs], to train on; y of mean 0 and variance 1.
        x_test, y_test: the same, held out.
        labels: int[test], the cell of each held-out point; None if there are no cells.
        jump: least jump between cells in the units of y; 0 if there are no cells.
    """

    x: np.ndarray
    y: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    labels: np.ndarray | None = None
    jump: float = 0.0


def manifold_problem(
    key: Key[Array, ""], name: str, ambient_dim: int, *, num_train: int, num_test: int
) -> Problem:
    """A wave on a manifold at a random place in R^D.

    sin(5 cos t) + cos(3 sin t) on the `moment_curve`, sin(3 x_1) + cos(2 x_2) on the `sphere`.

    Raises:
        ValueError: for another name, a D that cannot hold it, fewer than 2 points to train on or
            none to test on.
    """
    _check_numbers(num_train, num_test)
    place_key, train_key, test_key = jax.random.split(key, 3)
    if name == "moment_curve":
        manifold = embed_isometric(place_key, moment_curve(ambient_dim), ambient_dim)
        flat, target = circle(), waves()
    elif name == "sphere":
        manifold = embed_isometric(place_key, sphere(), ambient_dim)
        flat, target = sphere(), waves(3.0, 2.0)
    else:
        raise ValueError(f"name={name!r} is not moment_curve or sphere")

    def draw(draw_key: Array, num: int, source: Manifold) -> tuple[np.ndarray, np.ndarray]:
        params = source.sample_params(draw_key, num)
        return source.embed(params), target(flat.native(params))

    x, y = draw(train_key, num_train, manifold)
    x_test, y_test = draw(test_key, num_test, manifold)
    return _standardised(x, y, x_test, y_test)


def partition_problem(key: Key[Array, ""], name: str, *, num_train: int, num_test: int) -> Problem:
    """An affine function on each cell of one of `PARTITIONS` of the plane, with jumps between.

    4 arcs of the circle; a disc and 3 rings; 4 arms of a spiral; 9 squares.

    Raises:
        ValueError: for another name, fewer than 2 points to train on or none to test on.
    """
    _check_numbers(num_train, num_test)
    if name not in PARTITIONS:
        raise ValueError(f"name={name!r} is not one of {PARTITIONS}")
    point_key, slope_key = jax.random.split(key)
    x = draw_uniform(point_key, (num_train + num_test, 2), -1.0, 1.0)
    if name == "arcs":
        x = x / np.linalg.norm(x, axis=1, keepdims=True)
    labels = cell_of(name, x)
    # Neighbouring cells differ by 1 or more at the origin.
    levels = np.array([0.0, 2.0, -1.0, 1.0, -2.0, 3.0, 0.0, 2.0, -1.0])
    slopes = 0.5 * draw_normal(slope_key, (9, 2))
    y = (levels[labels] + np.sum(slopes[labels] * x, axis=1))[:, None]
    problem = _standardised(x[:num_train], y[:num_train], x[num_train:], y[num_train:])
    return dataclasses.replace(problem, labels=labels[num_train:])


def cell_of(name: str, x: np.ndarray) -> np.ndarray:
    """Cell of points of [-1, 1]^2 in one of `PARTITIONS`, as an index.

    Raises:
        ValueError: for another name, or unless points are finite and in the plane.
    """
    if name not in PARTITIONS:
        raise ValueError(f"name={name!r} is not one of {PARTITIONS}")
    x = check_points("x", x, 2, least=0)
    angle = np.arctan2(x[:, 1], x[:, 0]) / (2 * np.pi)
    if name == "arcs":
        return np.floor(4 * np.mod(angle + 0.1, 1.0)).astype(int)
    if name == "rings":
        return ring_index(x, RING_RADII).astype(int)
    if name == "spirals":
        return np.floor(4 * np.mod(angle + np.linalg.norm(x, axis=1), 1.0)).astype(int)
    column, row = np.clip(np.floor(1.5 * (x + 1)).astype(int), 0, 2).T
    return 3 * column + row


def grid_problem(
    key: Key[Array, ""], num_cells: int, num_axes: int, *, num_train: int, num_test: int
) -> Problem:
    """A `product_grid` target with jumps of 1 or more, its cube scaled to [-1, 1]^L.

    Raises:
        ValueError: as `product_grid`, or for fewer than 2 points to train on or none to test on.
    """
    _check_numbers(num_train, num_test)
    target_key, point_key = jax.random.split(key)
    target: ProductGrid = product_grid(target_key, num_cells, num_axes)
    x = draw_uniform(point_key, (num_train + num_test, num_axes), 0.0, float(num_cells))
    y = target(x)
    scaled = 2 * x / num_cells - 1
    problem = _standardised(scaled[:num_train], y[:num_train], scaled[num_train:], y[num_train:])
    cells = target.cells(x[num_train:])
    labels = cells @ (num_cells ** np.arange(num_axes))
    spread = y[:num_train].std(axis=0)
    jump = float((target.jumps / spread[:, None]).min())
    return dataclasses.replace(problem, labels=labels, jump=jump)


def _check_numbers(num_train: int, num_test: int) -> None:
    check_count("num_train", num_train, 2)
    check_count("num_test", num_test)


def _standardised(x: np.ndarray, y: np.ndarray, x_test: np.ndarray, y_test: np.ndarray) -> Problem:
    mean, spread = y.mean(axis=0), y.std(axis=0)
    if not np.all(spread > 0):
        raise ValueError(f"num_train={len(y)} points have equal values; take more")
    arrays = (x, (y - mean) / spread, x_test, (y_test - mean) / spread)
    x, y, x_test, y_test = (array.astype(np.float32) for array in arrays)
    return Problem(x, y, x_test, y_test)
