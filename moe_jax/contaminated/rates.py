"""Rate studies: how fast the error of the estimates falls with the number of observations."""

import dataclasses
import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float

from moe_jax.contaminated.compilation import padded_rows
from moe_jax.contaminated.designs import DESIGNS, ROWS, Design, row_vectors
from moe_jax.contaminated.exponents import blocks, cramer_rao, information, normal_points
from moe_jax.contaminated.model import ContaminatedMoE
from moe_jax.contaminated.simulate import simulate
from moe_jax.training.rates import MIN_WIDTHS, fit_rate

# Nodes in y for the Cramer-Rao bound; three times as many change it by less than 1e-4.
BOUND_NODES = 201
# Logarithm to base 2 of the points in x.
BOUND_LOG2_POINTS = 12


@dataclasses.dataclass(frozen=True)
class SizeFits:
    """Fits of data sets of one size.

    Attributes:
        size: observations of a data set.
        errors: distance of estimate and truth of every fit so far, in the order of `ROWS`.
        statuses: of the same fits.
        seconds: spent on them, compilation included.
    """

    size: int
    errors: tuple[tuple[float, ...], ...] = ()
    statuses: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def count(self) -> int:
        """Number of fits."""
        return len(self.errors)

    def first(self, count: int) -> "SizeFits":
        """The first `count` of the fits."""
        return dataclasses.replace(self, errors=self.errors[:count], statuses=self.statuses[:count])

    def to_json(self) -> str:
        """Reversed, to the last bit, by `from_json`."""
        return json.dumps(dataclasses.asdict(self)) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "SizeFits":
        """Reads what `to_json` wrote.

        Raises:
            ValueError: if it is damaged.
        """
        try:
            fields = json.loads(text)
            fields["errors"] = tuple(tuple(map(float, row)) for row in fields["errors"])
            fields["statuses"] = tuple(fields["statuses"])
            return cls(**fields)
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"stored fits are damaged: {error}") from error


class Slope(NamedTuple):
    """A slope with its bootstrap standard error and interval."""

    slope: float
    se: float
    low: float
    high: float


class MeanErrors(NamedTuple):
    """Mean errors with bootstrap intervals, each [sizes, rows]."""

    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray


@dataclasses.dataclass(frozen=True)
class RateStudy:
    """Errors of a design's estimates over sample sizes, beside the Cramer-Rao bound.

    Attributes:
        design, title: name of the design and what it is.
        rows: names of the errors, `ROWS`.
        sizes: observations of a data set, ascending.
        errors: distances of estimate and truth, [sizes, replicates, rows].
        statuses: number of fits of every status, one a size.
        bound: root of the trace of the Cramer-Rao covariance, [sizes, rows]: to a root mean square.
        bound_mean: mean length of a Gaussian vector of that covariance: to a mean error.
        theory, paper: slopes claimed, by row.
        seconds: spent on the fits of each size, compilation included.
    """

    design: str
    title: str
    rows: tuple[str, ...]
    sizes: tuple[int, ...]
    errors: Float[np.ndarray, "sizes replicates rows"]
    statuses: tuple[dict[str, int], ...]
    bound: Float[np.ndarray, "sizes rows"]
    bound_mean: Float[np.ndarray, "sizes rows"]
    theory: Mapping[str, float]
    paper: Mapping[str, float]
    seconds: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class SlopeTable:
    """Slopes of log error on log n by row: of our fits, of the bound, and claimed ones."""

    ours: Mapping[str, Slope]
    bound: Mapping[str, float]
    theory: Mapping[str, float]
    paper: Mapping[str, float]


def bootstrap_means(
    errors: Float[np.ndarray, "sizes replicates rows"], num_draws: int, seed: int = 0
) -> Float[np.ndarray, "sizes draws rows"]:
    """Means over replicates drawn with replacement, separately at each size."""
    rng = np.random.default_rng(seed)
    num_sizes, count, _ = errors.shape
    # Counts of each replicate in a draw; their product with the errors needs no large gather.
    weights = rng.multinomial(count, np.full(count, 1.0 / count), size=(num_sizes, num_draws))
    return np.einsum("snr,srk->snk", weights / count, errors)


def slope_table(study: RateStudy, *, level: float = 0.95, num_draws: int = 2000) -> SlopeTable:
    """Slopes of log mean error on log n by `fit_rate`.

    Intervals are from a bootstrap over replicates, at each size separately since these are other
    data sets. The slope is linear in the logarithms of the means, so a draw's slope is the fitted
    one plus that of the draw's log ratios to the fitted means.
    """
    means = study.errors.mean(axis=1)
    ratios = np.log(bootstrap_means(study.errors, num_draws) / means[:, None])
    centered = np.log(study.sizes) - np.mean(np.log(study.sizes))
    shifts = np.tensordot(centered, ratios, axes=1) / np.sum(centered**2)
    sizes = np.asarray(study.sizes, np.float64)
    ours, bounds = {}, {}
    for k, row in enumerate(study.rows):
        slope = fit_rate(sizes, means[:, k]).slope
        low, high = slope + np.quantile(shifts[:, k], [(1 - level) / 2, (1 + level) / 2])
        ours[row] = Slope(slope, float(shifts[:, k].std(ddof=1)), float(low), float(high))
        bounds[row] = fit_rate(sizes, study.bound[:, k]).slope
    return SlopeTable(ours, bounds, study.theory, study.paper)


def mean_errors(study: RateStudy, *, level: float = 0.95, num_draws: int = 2000) -> MeanErrors:
    """Mean errors of a study with intervals from a bootstrap over replicates."""
    draws = bootstrap_means(study.errors, num_draws)
    low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2], axis=1)
    return MeanErrors(study.errors.mean(axis=1), low, high)


def efficiency(study: RateStudy) -> Float[np.ndarray, "sizes rows"]:
    """Root mean square error over the Cramer-Rao bound; 1 is as good as an exact fit can be."""
    return np.sqrt(np.mean(study.errors**2, axis=1)) / study.bound


def format_table(study: RateStudy, slopes: SlopeTable) -> str:
    """The study as text: slopes, then errors and statuses by size."""
    count = study.errors.shape[1]
    lines = [f"{study.design}: {study.title}", f"{count} replicates of each size", ""]
    lines.append("slope of log mean error on log n")
    lines.append(f"{'':>8} {'theory':>7} {'paper':>7} {'bound':>7} {'ours':>7} {'SE':>6}  interval")
    for row in study.rows:
        ours = slopes.ours[row]
        claimed = [
            f"{value:7.3f}" if (value := table.get(row)) is not None else f"{'-':>7}"
            for table in (slopes.theory, slopes.paper)
        ]
        lines.append(
            f"{row:>8} {claimed[0]} {claimed[1]} {slopes.bound[row]:7.3f} {ours.slope:7.3f} "
            f"{ours.se:6.3f}  [{ours.low:.3f}, {ours.high:.3f}]"
        )
    lines += ["", "mean error (root mean square error / Cramer-Rao bound)"]
    lines.append(f"{'n':>8} " + " ".join(f"{row:>18}" for row in study.rows) + "  statuses")
    means, ratios = study.errors.mean(axis=1), efficiency(study)
    for index, size in enumerate(study.sizes):
        cells = [
            f"{mean:10.3g} ({ratio:5.2f})"
            for mean, ratio in zip(means[index], ratios[index], strict=True)
        ]
        statuses = ", ".join(f"{name} {num}" for name, num in study.statuses[index].items())
        lines.append(f"{size:>8} " + " ".join(f"{cell:>18}" for cell in cells) + f"  {statuses}")
    return "\n".join(lines)


def study_record(study: RateStudy, slopes: SlopeTable) -> dict[str, Any]:
    """The study as what JSON can hold."""
    means = mean_errors(study)
    return {
        "design": study.design,
        "title": study.title,
        "sizes": list(study.sizes),
        "replicates": study.errors.shape[1],
        "slopes": {
            row: {
                "theory": slopes.theory.get(row),
                "paper": slopes.paper.get(row),
                "bound": slopes.bound[row],
                **{f"ours_{name}": value for name, value in slopes.ours[row]._asdict().items()},
            }
            for row in study.rows
        },
        "mean_error": {row: means.mean[:, k].tolist() for k, row in enumerate(study.rows)},
        "median_error": {
            row: np.median(study.errors[..., k], axis=1).tolist()
            for k, row in enumerate(study.rows)
        },
        "rmse_over_bound": {
            row: efficiency(study)[:, k].tolist() for k, row in enumerate(study.rows)
        },
        "bound": {row: study.bound[:, k].tolist() for k, row in enumerate(study.rows)},
        "statuses": list(study.statuses),
        "seconds": list(study.seconds),
    }


def rate_study(
    key: jax.Array,
    design: Design,
    sizes: Sequence[int],
    replicates: int,
    *,
    start: str = "truth",
    chunk_rows: int = 200_000,
) -> RateStudy:
    """Fits `replicates` data sets of every size and compares with truth and Cramer-Rao bound.

    Args:
        key: of all data; a data set depends on its size and number only, so that a study with more
            sizes or replicates contains one with fewer.
        design: model, truth and covariates.
        sizes: observations of a data set, five or more, ascending.
        replicates: data sets of each size, at least 2.
        start: "truth", where the paper starts, or "tail", which knows nothing of it.
        chunk_rows: most rows that one compiled call holds.

    Raises:
        ValueError: if sizes or replicates are out of range.
    """
    if len(sizes) < MIN_WIDTHS or list(sizes) != sorted(set(sizes)):
        raise ValueError(f"sizes={sizes} must be {MIN_WIDTHS} or more, ascending")
    if replicates < 2:
        raise ValueError(f"replicates={replicates} must be at least 2")
    fits = []
    for size in sizes:
        *_, done = fit_size(key, design, size, replicates, start=start, chunk_rows=chunk_rows)
        fits.append(done)
    return assemble_study(design, fits)


def model_rate_study(
    model: ContaminatedMoE,
    design: Design | str,
    sizes: Sequence[int],
    replicates: int,
    key: jax.Array,
    **options: Any,
) -> RateStudy:
    """`rate_study` of a model in place of the design's own.

    Raises:
        ValueError: as `rate_study`, and for a name that is none of `DESIGNS`.
    """
    if isinstance(design, str):
        if design not in DESIGNS:
            raise ValueError(f"design={design!r} is not one of {', '.join(DESIGNS)}")
        design = DESIGNS[design]
    return rate_study(key, dataclasses.replace(design, model=model), sizes, replicates, **options)


def fit_size(
    key: jax.Array,
    design: Design,
    size: int,
    replicates: int,
    *,
    start: str = "truth",
    chunk_rows: int = 200_000,
    done: SizeFits | None = None,
) -> Iterator[SizeFits]:
    """Fits data sets of one size chunk by chunk, yielding all fits so far after each.

    Arguments as `rate_study`; `done` are fits of an earlier call with the same key, design and
    start, which are not repeated.

    Raises:
        ValueError: if `done` is of another size.
    """
    done = SizeFits(size) if done is None else done
    if done.size != size:
        raise ValueError(f"stored fits are of {done.size} observations, not {size}")
    rows = padded_rows(size)
    num_chunks = -(-replicates * rows // max(chunk_rows, rows))
    chunk = -(-replicates // num_chunks)
    truth = {name: np.asarray(value) for name, value in design.truth(size).items()}
    mask = None if rows == size else np.tile(np.arange(rows) < size, (chunk, 1))
    while done.count < replicates:
        began = time.monotonic()
        # The last chunk is filled up with data sets that are dropped: one compiled shape.
        x, y = _draw(key, design, truth, size, rows, range(done.count, done.count + chunk))
        starts: Any = truth if start == "truth" else start
        many = design.model.fit_many(x, y, mask=mask, starts=starts, chunk_rows=chunk * rows)
        kept = min(chunk, replicates - done.count)
        true_rows, found = row_vectors(truth), row_vectors(many.params)
        errors = np.stack(
            [np.linalg.norm(found[row] - true_rows[row], axis=-1)[:kept] for row in ROWS], axis=1
        )
        done = dataclasses.replace(
            done,
            errors=(*done.errors, *map(tuple, errors.tolist())),
            statuses=(*done.statuses, *many.status[:kept]),
            seconds=done.seconds + time.monotonic() - began,
        )
        yield done


def assemble_study(design: Design, fits: Sequence[SizeFits]) -> RateStudy:
    """Puts fits of several sizes together with the Cramer-Rao bound at the truth of each.

    Raises:
        ValueError: if a fit has no finite estimate, or the numbers of fits differ.
    """
    errors = np.array([fit.errors for fit in fits], np.float64)
    for fit, of_size in zip(fits, errors, strict=True):
        if not np.isfinite(of_size).all():
            count = int(np.sum(~np.isfinite(of_size).all(axis=1)))
            raise ValueError(f"{count} of the fits of {fit.size} observations are not finite")
    bounds = []
    known: dict[bytes, np.ndarray] = {}
    for fit in fits:
        truth = design.truth(fit.size)
        # Many designs have one truth at every size.
        values = b"".join(np.asarray(truth[k], np.float64).tobytes() for k in sorted(truth))
        if values not in known:
            known[values] = _truth_information(design, truth)
        bounds.append(bound_errors(design, fit.size, known[values]))
    return RateStudy(
        design=design.name,
        title=design.title,
        rows=ROWS,
        sizes=tuple(fit.size for fit in fits),
        errors=errors,
        statuses=tuple(dict(Counter(fit.statuses).most_common()) for fit in fits),
        bound=np.array([root for root, _ in bounds]),
        bound_mean=np.array([mean for _, mean in bounds]),
        theory=design.theory,
        paper=design.paper,
        seconds=tuple(fit.seconds for fit in fits),
    )


def bound_errors(
    design: Design, size: int, matrix: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Cramer-Rao bounds to root mean square and mean error by row of `ROWS`, both [rows].

    The delta method carries the covariance to e^tau and nu. The second is the mean length of a
    Gaussian vector of that covariance. `matrix` is the information at the truth of that size, if it
    is known already.
    """
    truth = design.truth(size)
    if matrix is None:
        matrix = _truth_information(design, truth)
    covariance = cramer_rao(matrix) / size
    positions = blocks(design.model, design.dim)
    factors = {
        "beta": ("beta", 1.0),
        "exp_tau": ("tau", float(np.exp(truth["tau"]))),
        "eta": ("eta", 1.0),
        "nu": ("log_nu", float(np.exp(truth["log_nu"]))),
    }
    normal = np.random.default_rng(0).standard_normal((20_000, len(covariance)))
    roots, means = [], []
    for row in ROWS:
        name, factor = factors[row]
        block = covariance[np.ix_(positions[name], positions[name])]
        values = factor**2 * np.linalg.eigvalsh(block)
        roots.append(np.sqrt(values.sum()))
        means.append(np.sqrt(normal[:, : len(values)] ** 2 @ values).mean())
    return np.array(roots), np.array(means)


def _truth_information(design: Design, truth: Mapping[str, Any]) -> np.ndarray:
    points = normal_points(design.dim, BOUND_LOG2_POINTS)
    return information(design.model, truth, points, quadrature=BOUND_NODES)


def _draw(
    key: jax.Array,
    design: Design,
    truth: Mapping[str, np.ndarray],
    size: int,
    rows: int,
    replicates: Sequence[int],
) -> tuple[np.ndarray, np.ndarray]:
    """Data sets [replicates, rows, dim] and [replicates, rows]; rows past `size` are padding."""
    x, y = np.zeros((len(replicates), rows, design.dim)), np.zeros((len(replicates), rows))
    size_key = jax.random.fold_in(key, size)
    for index, replicate in enumerate(replicates):
        x_key, y_key = jax.random.split(jax.random.fold_in(size_key, replicate))
        x[index, :size] = design.draw_x(x_key, size)
        y[index, :size] = simulate(y_key, design.model, truth, x[index, :size])
    return x, y
