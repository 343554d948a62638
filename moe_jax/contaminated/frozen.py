"""Frozen models: conditional densities f0(y | x) that are known and stay as they are.

Anything with `log_prob(x, y)` will do. It has to be a density in y, normalised for every x: a
regression network gives a mean, which becomes a density only with a noise level.
`calibrate_variance` estimates one; use data for it that neither trained the network nor enter the
fit. Sampling is needed by the Monte-Carlo test and the bootstrap, the mean by the mixture's mean,
the variance to bound the prompt's.

The functions given to the classes here may be of any kind, JAX or not. They receive x as float64
NumPy arrays, within a context in which JAX keeps them so.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy import stats
from jax.typing import ArrayLike
from jaxtyping import Array, Float, PRNGKeyArray

MeanFn = Callable[[np.ndarray], ArrayLike]


class FrozenExpert(Protocol):
    """What a frozen model must offer; `sample`, `mean`, `variance` and `cdf` are optional."""

    def log_prob(self, x: np.ndarray, y: np.ndarray) -> ArrayLike:
        """Log f0(y_i | x_i) [n] for x [n, d] and y [n]."""


@dataclasses.dataclass(frozen=True)
class _LocationScale:
    """y = mean(x) + scale(x) times a standard noise."""

    mean_fn: MeanFn
    var: float | ArrayLike | MeanFn
    discrete: ClassVar[bool] = False

    def mean(self, x: np.ndarray) -> Float[np.ndarray, " n"]:
        """Conditional mean."""
        return _per_row(self.mean_fn(x), x, "mean_fn")

    def variance(self, x: np.ndarray) -> Float[np.ndarray, " n"]:
        """Conditional variance."""
        var = self.var(x) if callable(self.var) else self.var
        values = _per_row(var, x, "var")
        if not np.all(values > 0):
            raise ValueError(
                f"var={float(np.min(values))} of the frozen model, expected positive values"
            )
        return values

    def _scale(self, x: np.ndarray) -> np.ndarray:
        return np.sqrt(self.variance(x))


@dataclasses.dataclass(frozen=True)
class FrozenGaussian(_LocationScale):
    """Normal noise around mean_fn(x).

    Attributes:
        mean_fn: takes x [n, d], returns [n] or [n, 1].
        var: the variance: a number, one a row, or a function of x.
    """

    def log_prob(self, x: np.ndarray, y: np.ndarray) -> Array:
        """Normal log-density."""
        return stats.norm.logpdf(jnp.asarray(y, jnp.float64), self.mean(x), self._scale(x))

    def sample(self, key: PRNGKeyArray, x: np.ndarray) -> Array:
        """A draw a row."""
        return self.mean(x) + self._scale(x) * jax.random.normal(key, (len(x),), jnp.float64)

    def cdf(self, x: np.ndarray, y: np.ndarray) -> Array:
        """P(Y <= y | x)."""
        return stats.norm.cdf(jnp.asarray(y, jnp.float64), self.mean(x), self._scale(x))


@dataclasses.dataclass(frozen=True)
class FrozenLaplace(_LocationScale):
    """Laplace noise around mean_fn(x); `var` is the variance, so the scale is sqrt(var / 2)."""

    def _laplace_scale(self, x: np.ndarray) -> np.ndarray:
        return np.sqrt(0.5 * self.variance(x))

    def log_prob(self, x: np.ndarray, y: np.ndarray) -> Array:
        """Laplace log-density."""
        return stats.laplace.logpdf(
            jnp.asarray(y, jnp.float64), self.mean(x), self._laplace_scale(x)
        )

    def sample(self, key: PRNGKeyArray, x: np.ndarray) -> Array:
        """A draw a row."""
        return self.mean(x) + self._laplace_scale(x) * jax.random.laplace(
            key, (len(x),), jnp.float64
        )

    def cdf(self, x: np.ndarray, y: np.ndarray) -> Array:
        """P(Y <= y | x)."""
        return stats.laplace.cdf(jnp.asarray(y, jnp.float64), self.mean(x), self._laplace_scale(x))


@dataclasses.dataclass(frozen=True)
class FrozenStudentT:
    """Student-t noise around mean_fn(x).

    Attributes:
        mean_fn: takes x [n, d], returns [n] or [n, 1].
        scale: of the noise, which is not its standard deviation: a number, one a row, or a
            function of x.
        df: degrees of freedom.
    """

    mean_fn: MeanFn
    scale: float | ArrayLike | MeanFn
    df: float
    discrete: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 0 < self.df < math.inf:
            raise ValueError(f"df={self.df} of FrozenStudentT, expected a positive number")

    def mean(self, x: np.ndarray) -> Float[np.ndarray, " n"]:
        """Centre of the distribution, its mean if df > 1."""
        return _per_row(self.mean_fn(x), x, "mean_fn")

    def _scale(self, x: np.ndarray) -> np.ndarray:
        return _per_row(self.scale(x) if callable(self.scale) else self.scale, x, "scale")

    def variance(self, x: np.ndarray) -> Float[np.ndarray, " n"]:
        """scale^2 df / (df - 2), or scale^2 where that is infinite."""
        ratio = self.df / (self.df - 2) if self.df > 2 else 1.0
        return ratio * np.square(self._scale(x))

    def log_prob(self, x: np.ndarray, y: np.ndarray) -> Array:
        """Student-t log-density."""
        return stats.t.logpdf(jnp.asarray(y, jnp.float64), self.df, self.mean(x), self._scale(x))

    def sample(self, key: PRNGKeyArray, x: np.ndarray) -> Array:
        """A draw a row."""
        return self.mean(x) + self._scale(x) * jax.random.t(key, self.df, (len(x),), jnp.float64)


@dataclasses.dataclass(frozen=True)
class FrozenClassifier:
    """P(y = k | x) = softmax(logits_fn(x))_k over labels 0..K-1.

    Attributes:
        logits_fn: takes x [n, d], returns [n, K].
    """

    logits_fn: Callable[[np.ndarray], ArrayLike]
    discrete: ClassVar[bool] = True

    def _log_probabilities(self, x: np.ndarray) -> Float[Array, "n K"]:
        logits = jnp.asarray(self.logits_fn(x), jnp.float64)
        if logits.ndim != 2 or logits.shape[0] != len(x):
            raise ValueError(
                f"logits_fn gives shape {logits.shape} for {len(x)} rows, expected ({len(x)}, K)"
            )
        return jax.nn.log_softmax(logits, axis=1)

    def log_prob(self, x: np.ndarray, y: np.ndarray) -> Array:
        """Log P(y_i | x_i).

        Raises:
            ValueError: if a label is not one of 0..K-1.
        """
        logp, y = self._log_probabilities(x), np.asarray(y)
        is_label = (y >= 0) & (y < logp.shape[1]) & (y == np.round(y))
        if not np.all(is_label):
            row, last = int(np.argmin(is_label)), logp.shape[1] - 1
            raise ValueError(f"y={y[row]:g} at row {row}: the frozen model has labels 0..{last}")
        return jnp.take_along_axis(logp, jnp.asarray(y).astype(jnp.int32)[:, None], axis=1)[:, 0]

    def sample(self, key: PRNGKeyArray, x: np.ndarray) -> Array:
        """A label a row."""
        return jax.random.categorical(key, self._log_probabilities(x), axis=1).astype(jnp.float64)

    def mean(self, x: np.ndarray) -> Float[np.ndarray, "n K"]:
        """Class probabilities."""
        return np.asarray(jnp.exp(self._log_probabilities(x)))


class FrozenLogProb:
    """A density given by its functions; what is not given is not offered.

    Args:
        log_prob_fn: takes x [n, d] and y [n], returns [n].
        sample_fn: takes a key and x, returns y [n].
        mean_fn: takes x, returns [n].
        variance_fn: takes x, returns [n].
        cdf_fn: takes x and y, returns [n].
    """

    def __init__(
        self,
        log_prob_fn: Callable[[np.ndarray, np.ndarray], ArrayLike],
        sample_fn: Callable[[Any, np.ndarray], ArrayLike] | None = None,
        mean_fn: MeanFn | None = None,
        variance_fn: MeanFn | None = None,
        cdf_fn: Callable[[np.ndarray, np.ndarray], ArrayLike] | None = None,
    ) -> None:
        self.log_prob = log_prob_fn
        for name, function in (
            ("sample", sample_fn),
            ("mean", mean_fn),
            ("variance", variance_fn),
            ("cdf", cdf_fn),
        ):
            if function is not None:
                setattr(self, name, function)


def calibrate_variance(mean_fn: MeanFn, x_cal: ArrayLike, y_cal: ArrayLike) -> float:
    """Mean squared error of a regression on data set aside, the variance of a `FrozenGaussian`.

    The data must neither have trained the regression nor enter the fit: on its own training data
    the error is too small, and the gate then takes ordinary noise for contamination.

    Raises:
        ValueError: if there are fewer than two rows, or the errors are not finite and not all zero.
    """
    x, y = np.asarray(x_cal, np.float64), np.asarray(y_cal, np.float64)
    if len(x) != len(y) or len(y) < 2:
        raise ValueError(
            f"x_cal has {len(x)} rows and y_cal {len(y)}, expected the same number, 2 or more"
        )
    with jax.enable_x64(True):
        variance = float(np.mean(np.square(y - _per_row(mean_fn(x), x, "mean_fn"))))
    if not 0 < variance < math.inf:
        raise ValueError(
            f"mean squared error {variance} on the calibration data, expected a positive number"
        )
    return variance


def mean_variance(frozen: Any, x: np.ndarray) -> float:
    """Mean of the frozen model's variance over rows, NaN if it does not say."""
    if not hasattr(frozen, "variance"):
        return math.nan
    with jax.enable_x64(True):
        return float(np.mean(np.asarray(frozen.variance(x), np.float64)))


def require(frozen: Any, method: str, purpose: str) -> Any:
    """The method of a frozen model.

    Raises:
        ValueError: if it has none.
    """
    if not hasattr(frozen, method):
        raise ValueError(f"frozen={type(frozen).__name__} has no method {method}, needed {purpose}")
    return getattr(frozen, method)


def _per_row(values: Any, x: np.ndarray, what: str) -> Float[np.ndarray, " n"]:
    """One value a row as float64, of a number or of [n] or [n, 1]."""
    array = np.asarray(values, np.float64)
    if array.ndim == 0:
        return np.full(len(x), array)
    if array.size != len(x):
        raise ValueError(
            f"{what} gives shape {array.shape} for {len(x)} rows, expected ({len(x)},)"
        )
    return array.reshape(-1)
