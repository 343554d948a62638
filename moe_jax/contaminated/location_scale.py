"""Experts with a mean and a scale: Gaussian or Student-t noise around any mean."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import digamma, gammaln
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from moe_jax.contaminated.expert import Expert, Units
from moe_jax.contaminated.gates import Columns, affine_from_user, affine_to_user
from moe_jax.contaminated.linalg import gram
from moe_jax.contaminated.means import LinearMean, Mean, NonlinearMean

# Bounds of the degrees of freedom of a Student-t expert that estimates them.
DF_BOUNDS = (1.0, 200.0)
# Of an M-step on points that lie on the mean exactly; the estimators have bounds of their own.
_LEAST_VARIANCE = 1e-300


class NoiseDerivatives(NamedTuple):
    """Derivatives of log f by the mean h and the dispersion psi [k], a row each."""

    by_mean: Array
    by_mean_mean: Array
    by_psi: Array
    by_mean_psi: Array
    by_psi_psi: Array


@dataclasses.dataclass(frozen=True)
class LocationScale(Expert):
    """log f = noise(y - h(x, eta); psi) with psi = (log nu, ...)."""

    @property
    def mean_model(self) -> Mean:
        """The mean h."""
        raise NotImplementedError

    def noise(self, residual: Float[Array, " n"], psi: Float[Array, " k"]) -> Float[Array, " n"]:
        """Log-density of the residual."""
        raise NotImplementedError

    def noise_derivatives(
        self, residual: Float[Array, " n"], psi: Float[Array, " k"]
    ) -> NoiseDerivatives:
        """First and second derivatives of the noise's log-density."""
        raise NotImplementedError

    @property
    def standardises(self) -> bool:
        """True of a linear mean."""
        return self.mean_model.standardises

    @property
    def intercept_name(self) -> str | None:
        """The linear mean's."""
        return self.mean_model.intercept_name

    @property
    def dispersion_names(self) -> tuple[str, ...]:
        """The log-variance."""
        return ("log_nu",)

    @property
    def discrete(self) -> bool | None:
        """False."""
        return False

    def layout(self, d: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """The mean's parameters, then the dispersion's scalars."""
        return self.mean_model.layout(d) + tuple((name, ()) for name in self.dispersion_names)

    def split(self, phi: Float[Array, " e"]) -> tuple[Array, Array]:
        """The mean's eta and the dispersion's psi."""
        k = len(self.dispersion_names)
        return phi[:-k], phi[-k:]

    def design(self, x: Float[Array, "n d"], units: Units | None) -> Float[Array, "n k"]:
        """The mean's design."""
        return self.mean_model.design(x, units)

    def response(self, y: Float[Array, " n"], units: Units | None) -> Float[Array, " n"]:
        """Standardised where the mean can follow."""
        if units is None or not self.standardises:
            return y
        return (y - units.y_mean) / units.y_scale

    def log_prob(
        self, phi: Float[Array, " e"], design: Float[Array, "n k"], y: Float[Array, " n"]
    ) -> Float[Array, " n"]:
        """Log-density log f(y_i | x_i; phi) of every row."""
        eta, psi = self.split(phi)
        return self.noise(y - self.mean_model.value(eta, design), psi)

    def score(
        self, phi: Float[Array, " e"], design: Float[Array, "n k"], y: Float[Array, " n"]
    ) -> Float[Array, "n e"]:
        """(by_mean dh/deta, by_psi)."""
        eta, psi = self.split(phi)
        d = self.noise_derivatives(y - self.mean_model.value(eta, design), psi)
        return jnp.concatenate(
            [d.by_mean[:, None] * self.mean_model.jacobian(eta, design), d.by_psi], axis=1
        )

    def information(
        self,
        phi: Float[Array, " e"],
        design: Float[Array, "n k"],
        y: Float[Array, " n"],
        weight: Float[Array, " n"],
    ) -> Float[Array, "e e"]:
        """Minus sum_i weight_i [[l_hh dh dh^T + l_h ddh, dh l_hpsi^T], [., l_psipsi]]."""
        eta, psi = self.split(phi)
        d = self.noise_derivatives(y - self.mean_model.value(eta, design), psi)
        slope = self.mean_model.jacobian(eta, design)
        location = gram(slope, weight * d.by_mean_mean, slope)
        location = location + self.mean_model.curvature(eta, design, weight * d.by_mean)
        cross = gram(slope, weight, d.by_mean_psi)
        dispersion = jnp.tensordot(weight, d.by_psi_psi, axes=1)
        return -jnp.block([[location, cross], [cross.T, dispersion]])

    def initial(self, d: int) -> Float[Array, " e"]:
        """The mean's start and unit dispersion."""
        return jnp.concatenate([self.mean_model.initial(d), jnp.zeros(len(self.dispersion_names))])

    def to_user(self, phi: Float[Array, " e"], units: Units) -> Float[Array, " e"]:
        """Maps to h = y_mean + y_scale h' and log nu = log nu' + 2 log y_scale."""
        if not self.standardises:
            return phi
        eta, psi = self.split(phi)
        eta = eta * units.y_scale
        if self.intercept_name is None:
            eta = eta / units.scale
        else:
            eta = affine_to_user(eta, Columns(units.mean, units.scale))
            eta = eta.at[-1].add(units.y_mean)
        return jnp.concatenate([eta, psi.at[0].add(2 * jnp.log(units.y_scale))])

    def from_user(self, phi: Float[Array, " e"], units: Units) -> Float[Array, " e"]:
        """Inverse of `to_user`."""
        if not self.standardises:
            return phi
        eta, psi = self.split(phi)
        if self.intercept_name is None:
            eta = eta * units.scale
        else:
            columns = Columns(units.mean, units.scale)
            eta = affine_from_user(eta.at[-1].add(-units.y_mean), columns)
        return jnp.concatenate([eta / units.y_scale, psi.at[0].add(-2 * jnp.log(units.y_scale))])

    def mean(self, phi: Float[Array, " e"], design: Float[Array, "n k"]) -> Array:
        """The mean h(x, eta)."""
        return self.mean_model.value(self.split(phi)[0], design)


@dataclasses.dataclass(frozen=True)
class _Gaussian(LocationScale):
    def noise(self, residual: Float[Array, " n"], psi: Float[Array, " k"]) -> Float[Array, " n"]:
        """-log(2 pi nu) / 2 - residual^2 / (2 nu)."""
        return -0.5 * (math.log(2 * math.pi) + psi[0] + jnp.square(residual) * jnp.exp(-psi[0]))

    def noise_derivatives(
        self, residual: Float[Array, " n"], psi: Float[Array, " k"]
    ) -> NoiseDerivatives:
        """With e = residual / nu: e, -1/nu, (residual e - 1)/2, -e, -residual e / 2."""
        precision = jnp.exp(-psi[0])
        e = residual * precision
        square = residual * e
        return NoiseDerivatives(
            by_mean=e,
            by_mean_mean=jnp.broadcast_to(-precision, e.shape),
            by_psi=0.5 * (square - 1.0)[:, None],
            by_mean_psi=-e[:, None],
            by_psi_psi=-0.5 * square[:, None, None],
        )

    def m_step(
        self,
        phi: Float[Array, " e"],
        design: Float[Array, "n k"],
        y: Float[Array, " n"],
        weight: Float[Array, " n"],
        free: Bool[Array, " e"],
    ) -> Float[Array, " e"]:
        """Weighted least squares for eta, then nu = sum weight residual^2 / sum weight."""
        eta, psi = self.split(phi)
        eta = self.mean_model.step(eta, design, y, weight, free[:-1])
        square = jnp.square(y - self.mean_model.value(eta, design))
        nu = jnp.maximum((weight @ square) / jnp.sum(weight), _LEAST_VARIANCE)
        return jnp.append(eta, jnp.where(free[-1], jnp.log(nu), psi[0]))

    def sample(
        self, key: PRNGKeyArray, phi: Float[Array, " e"], design: Float[Array, "n k"]
    ) -> Float[Array, " n"]:
        """Draws h + sqrt(nu) z with z standard normal."""
        h = self.mean(phi, design)
        return h + jnp.exp(0.5 * phi[-1]) * jax.random.normal(key, h.shape, h.dtype)


@dataclasses.dataclass(frozen=True)
class GaussianLinear(_Gaussian):
    """y = eta.x + intercept + noise of variance nu.

    Attributes:
        intercept: whether there is an intercept.
    """

    intercept: bool = True

    @property
    def mean_model(self) -> Mean:
        """Linear."""
        return LinearMean(self.intercept)


@dataclasses.dataclass(frozen=True)
class GaussianNonlinear(_Gaussian):
    """y = h(x, eta) + noise of variance nu, with h any differentiable function, as of Flax.

    Rows of x are given to h in the user's units and in float64. Two experts with the same
    `apply_fn` object and shapes share their compiled programs.

    Attributes:
        apply_fn: takes params and x [n, d], returns [n] or [n, 1]; no row may depend
            on another.
        params0: pytree to start from.
    """

    apply_fn: Callable[[Any, Array], Array]
    params0: Any = dataclasses.field(compare=False)
    mean_of: NonlinearMean = dataclasses.field(init=False, repr=False, default=None)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        object.__setattr__(self, "mean_of", NonlinearMean(self.apply_fn, self.params0))

    @property
    def mean_model(self) -> Mean:
        """The function with its shapes."""
        return self.mean_of

    def unravel(self, eta: Float[Array, " q"] | Float[np.ndarray, " q"]) -> Any:
        """The pytree of a flat eta."""
        return self.mean_of.unravel(eta)


@dataclasses.dataclass(frozen=True)
class StudentT(LocationScale):
    """Student-t noise around the mean of a Gaussian expert; nu is the squared scale.

    Attributes:
        base: the expert whose mean is used.
        df: degrees of freedom; estimated within [1, 200] if None.
    """

    base: GaussianLinear | GaussianNonlinear = dataclasses.field(default_factory=GaussianLinear)
    df: float | None = 4.0

    def __post_init__(self) -> None:
        if self.df is not None and not 0 < self.df < math.inf:
            raise ValueError(f"df={self.df} of StudentT, expected a positive number or None")

    @property
    def mean_model(self) -> Mean:
        """The base's."""
        return self.base.mean_model

    @property
    def dispersion_names(self) -> tuple[str, ...]:
        """log_nu, and log_df where it is estimated."""
        return ("log_nu",) if self.df is not None else ("log_nu", "log_df")

    def _df(self, psi: Float[Array, " k"]) -> Array:
        return jnp.exp(psi[1]) if self.df is None else jnp.asarray(self.df, jnp.float64)

    def noise(self, residual: Float[Array, " n"], psi: Float[Array, " k"]) -> Float[Array, " n"]:
        """c(df) - log(nu) / 2 - (df + 1)/2 log(1 + residual^2 / (df nu))."""
        df = self._df(psi)
        constant = (
            gammaln(0.5 * (df + 1)) - gammaln(0.5 * df) - 0.5 * (jnp.log(math.pi * df) + psi[0])
        )
        return constant - 0.5 * (df + 1) * jnp.log1p(jnp.square(residual) * jnp.exp(-psi[0]) / df)

    def noise_derivatives(
        self, residual: Float[Array, " n"], psi: Float[Array, " k"]
    ) -> NoiseDerivatives:
        """By autodiff of the scalar log-density in (mean, psi)."""

        def at(mean_psi: Array, r: Array) -> Array:
            # The residual falls as the mean rises.
            return self.noise((r - mean_psi[0])[None], mean_psi[1:])[0]

        at_zero = jnp.concatenate([jnp.zeros(1), psi])
        first = jax.vmap(jax.grad(at), in_axes=(None, 0))(at_zero, residual)
        second = jax.vmap(jax.hessian(at), in_axes=(None, 0))(at_zero, residual)
        return NoiseDerivatives(
            first[:, 0], second[:, 0, 0], first[:, 1:], second[:, 0, 1:], second[:, 1:, 1:]
        )

    def m_step(
        self,
        phi: Float[Array, " e"],
        design: Float[Array, "n k"],
        y: Float[Array, " n"],
        weight: Float[Array, " n"],
        free: Bool[Array, " e"],
    ) -> Float[Array, " e"]:
        """One EM step for t noise, u = (df + 1)/(df + residual^2/nu) the latent precisions."""
        eta, psi = self.split(phi)
        df = self._df(psi)
        square = jnp.square(y - self.mean_model.value(eta, design))
        u = (df + 1) / (df + square * jnp.exp(-psi[0]))
        eta = self.mean_model.step(eta, design, y, weight * u, free[: eta.size])
        square = jnp.square(y - self.mean_model.value(eta, design))
        nu = jnp.maximum((weight * u) @ square / jnp.sum(weight), _LEAST_VARIANCE)
        new_psi = [jnp.log(nu)]
        if self.df is None:
            mean_log_u_less_u = weight @ (jnp.log(u) - u) / jnp.sum(weight)
            new_psi.append(_log_df_root(mean_log_u_less_u, df))
        return jnp.concatenate([eta, jnp.where(free[eta.size :], jnp.stack(new_psi), psi)])

    def initial(self, d: int) -> Float[Array, " e"]:
        """The base's mean, log_nu = 0 and, where it is estimated, df = 10."""
        psi = jnp.zeros(1) if self.df is not None else jnp.array([0.0, math.log(10.0)])
        return jnp.concatenate([self.mean_model.initial(d), psi])

    def sample(
        self, key: PRNGKeyArray, phi: Float[Array, " e"], design: Float[Array, "n k"]
    ) -> Float[Array, " n"]:
        """Draws h + sqrt(nu) t with t of df degrees of freedom."""
        h = self.mean(phi, design)
        psi = self.split(phi)[1]
        return h + jnp.exp(0.5 * psi[0]) * jax.random.t(key, self._df(psi), h.shape, h.dtype)


def _log_df_root(mean_log_u_less_u: Array, old: Array) -> Array:
    """Root in log df of the digamma equation of the EM for t noise, by bisection within the bounds.

    log(df/2) - digamma(df/2) + 1 + mean(log u - u) + digamma((old+1)/2) - log((old+1)/2) = 0, whose
    left side falls in df. Liu and Rubin 1995, equation 30.
    """
    half = 0.5 * (old + 1)
    constant = 1 + mean_log_u_less_u + digamma(half) - jnp.log(half)

    def halve(_: Any, bracket: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bracket
        middle = 0.5 * (low + high)
        df = jnp.exp(middle)
        is_left = jnp.log(0.5 * df) - digamma(0.5 * df) + constant > 0
        return jnp.where(is_left, middle, low), jnp.where(is_left, high, middle)

    bounds = tuple(jnp.full_like(old, math.log(b)) for b in DF_BOUNDS)
    low, high = jax.lax.fori_loop(0, 50, halve, bounds)
    return 0.5 * (low + high)
