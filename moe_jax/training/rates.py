"""Rates of convergence: slopes of log error on log size, with intervals, floors and equivalence.

Least squares on logarithms. Its residuals are rarely independent, since neighbouring sizes share
their construction or their data, so the intervals describe the fit rather than bound a truth; the
bootstrap over seeds (where there are several) does not rest on that independence.
"""

import dataclasses

import numpy as np
from jaxtyping import Float
from scipy import optimize, stats

MIN_WIDTHS = 5


@dataclasses.dataclass(frozen=True)
class RateFit:
    """log error = intercept + slope log size.

    Attributes:
        slope, intercept: least-squares estimates.
        standard_error: of the slope.
        num_widths: sizes in the fit.
        interval: t interval of the slope.
        bootstrap_interval: percentile interval over resampled seeds; None for one seed.
        local_slopes: float64[widths - 1], between neighbouring sizes.
    """

    slope: float
    intercept: float
    standard_error: float
    num_widths: int
    interval: tuple[float, float]
    bootstrap_interval: tuple[float, float] | None
    local_slopes: np.ndarray

    @property
    def half_width(self) -> float:
        """Half the length of the t interval."""
        return (self.interval[1] - self.interval[0]) / 2


@dataclasses.dataclass(frozen=True)
class FloorFit:
    """error = floor + scale size^-rate.

    Attributes:
        floor, scale, rate: estimates.
        floor_interval: values of the floor that the profile likelihood does not reject.
    """

    floor: float
    scale: float
    rate: float
    floor_interval: tuple[float, float]


def fit_rate(
    widths: Float[np.ndarray, " widths"],
    errors: Float[np.ndarray, "seeds _"] | Float[np.ndarray, " _"],
    *,
    confidence: float = 0.95,
    num_bootstrap: int = 1000,
    seed: int = 0,
) -> RateFit:
    """Fits the slope of log error, averaged over seeds, on log width.

    Args:
        widths: sizes, different and positive: widths, experts, observations. Say which one was
            used: (n + 1)^d in place of n^d shifts the slope at small n.
        errors: positive, one row a seed.
        confidence: of the intervals.
        num_bootstrap: resamplings of the seeds.
        seed: of the bootstrap.

    Raises:
        ValueError: for fewer than 5 widths, widths or errors that are not positive and finite, no
            seed, shapes that disagree, or an option out of range.

    With few seeds the bootstrap interval is short: at 95% and 8 seeds, 87% to 90% hold the slope.
    """
    widths, errors = _check(widths, errors)
    _check_share("confidence", confidence)
    if num_bootstrap < 1:
        raise ValueError(f"num_bootstrap={num_bootstrap} must be at least 1")
    x, y = np.log(widths), np.log(errors)
    slope, intercept, standard_error = _line(x, y.mean(axis=0))
    reach = stats.t.ppf(0.5 + confidence / 2, len(x) - 2) * standard_error
    bootstrap = None
    if len(y) > 1:
        rng = np.random.default_rng(seed)
        picks = rng.integers(len(y), size=(num_bootstrap, len(y)))
        slopes = [_line(x, y[pick].mean(axis=0))[0] for pick in picks]
        low, high = np.quantile(slopes, [0.5 - confidence / 2, 0.5 + confidence / 2])
        bootstrap = (float(low), float(high))
    return RateFit(
        slope=slope,
        intercept=intercept,
        standard_error=standard_error,
        num_widths=len(x),
        interval=(slope - reach, slope + reach),
        bootstrap_interval=bootstrap,
        local_slopes=local_slopes(widths, errors),
    )


def local_slopes(
    widths: Float[np.ndarray, " widths"],
    errors: Float[np.ndarray, "seeds _"] | Float[np.ndarray, " _"],
) -> Float[np.ndarray, " pairs"]:
    """Slopes of log error, averaged over seeds, between neighbouring widths.

    Raises:
        ValueError: as `fit_rate`, but 2 widths do.
    """
    widths, errors = _check(widths, errors, least=2)
    y = np.log(errors).mean(axis=0)
    return np.diff(y) / np.diff(np.log(widths))


def equivalent(fit: RateFit, theory: float, margin: float, *, level: float = 0.05) -> bool:
    """Whether the slope is within `margin` of `theory`, by two one-sided t tests.

    A slope that merely does not differ from theory proves nothing: a wide interval would do. Here
    both slope <= theory - margin and slope >= theory + margin have to be rejected at `level`.

    Raises:
        ValueError: if margin is not positive, theory not finite or level not in (0, 1).
    """
    if not margin > 0:
        raise ValueError(f"margin={margin} must be positive")
    if not np.isfinite(theory):
        raise ValueError(f"theory={theory} is not finite")
    _check_share("level", level)
    reach = stats.t.ppf(1 - level, fit.num_widths - 2) * fit.standard_error
    return bool(fit.slope - reach > theory - margin and fit.slope + reach < theory + margin)


def fit_floor(
    widths: Float[np.ndarray, " widths"],
    errors: Float[np.ndarray, "seeds _"] | Float[np.ndarray, " _"],
    *,
    confidence: float = 0.95,
) -> FloorFit:
    """Fits error = floor + scale width^-rate, with normal errors in the logarithm.

    For a given floor the rest is least squares on log(error - floor) to start from, then on log
    error. The interval holds the floors whose profile likelihood is within half a chi-square
    quantile of the largest; its lower end is 0 where no floor is needed.

    Raises:
        ValueError: as `fit_rate`; or if errors are the same at every width, where any floor up to
            them fits as well as any other.
    """
    widths, errors = _check(widths, errors)
    _check_share("confidence", confidence)
    x = np.log(widths)
    y = np.log(errors)
    if np.ptp(y.mean(axis=0)) < 1e-9:
        raise ValueError(
            f"errors are {errors.mean():.6g} at every width: they neither fall nor tell a floor "
            "from a rate of 0"
        )
    least = float(errors.mean(axis=0).min())

    def profile(floor: float) -> tuple[float, np.ndarray]:
        rest = np.log(np.maximum(errors.mean(axis=0) - floor, 1e-3 * least))
        slope, intercept, _ = _line(x, rest)

        def residuals(line: np.ndarray) -> np.ndarray:
            return (np.log(floor + np.exp(line[0] + line[1] * x))[None, :] - y).ravel()

        found = optimize.least_squares(residuals, np.array([intercept, slope]))
        return 2 * float(found.cost), found.x

    grid = np.concatenate([[0.0], least * np.geomspace(1e-3, 2.0, 25)])
    cost = np.array([profile(floor)[0] for floor in grid])
    best = int(np.argmin(cost))
    around = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
    refined = optimize.minimize_scalar(
        lambda floor: profile(floor)[0],
        bounds=around,
        method="bounded",
        options={"xatol": 1e-4 * least},
    )
    floor, smallest = (
        (float(refined.x), float(refined.fun))
        if refined.fun < cost[best]
        else (float(grid[best]), float(cost[best]))
    )
    _, line = profile(floor)

    def excess(floor: float) -> float:
        # Twice the drop of the log-likelihood, the variance at its own maximum for each floor.
        ratio = max(profile(floor)[0], 1e-300) / max(smallest, 1e-300)
        return y.size * float(np.log(ratio)) - float(stats.chi2.ppf(confidence, 1))

    ends = [0.0, float(grid[-1])]
    for i, end in enumerate(ends):
        if excess(end) > 0:
            ends[i] = optimize.brentq(excess, floor, end, xtol=1e-4 * least)
    return FloorFit(
        floor=float(floor),
        scale=float(np.exp(line[0])),
        rate=float(-line[1]),
        floor_interval=(ends[0], ends[1]),
    )


def _check(
    widths: np.ndarray, errors: np.ndarray, least: int = MIN_WIDTHS
) -> tuple[np.ndarray, np.ndarray]:
    widths, errors = np.asarray(widths, np.float64), np.atleast_2d(np.asarray(errors, np.float64))
    if widths.ndim != 1 or errors.shape[1:] != widths.shape:
        raise ValueError(f"widths {widths.shape} and errors {errors.shape} disagree")
    if len(np.unique(widths)) < least:
        raise ValueError(
            f"widths={widths.tolist()} are {len(np.unique(widths))} different sizes; a rate needs "
            f"at least {least}"
        )
    if not np.all((widths > 0) & np.isfinite(widths)):
        raise ValueError(f"widths={widths.tolist()} must be positive and finite")
    if not len(errors):
        raise ValueError(f"errors {errors.shape} hold no seed")
    if not np.all((errors > 0) & np.isfinite(errors)):
        bad = errors[~((errors > 0) & np.isfinite(errors))][0]
        raise ValueError(f"errors hold {bad}; a rate needs positive, finite errors")
    return widths, errors


def _check_share(name: str, value: float) -> None:
    if not 0 < value < 1:
        raise ValueError(f"{name}={value} is not in (0, 1)")


def _line(x: np.ndarray, y: np.ndarray) -> tuple[float, float, float]:
    centered = x - x.mean()
    slope = float(centered @ y / (centered @ centered))
    intercept = float(y.mean() - slope * x.mean())
    residual = y - intercept - slope * x
    variance = residual @ residual / (len(x) - 2)
    return slope, intercept, float(np.sqrt(variance / (centered @ centered)))
