"""Nine posteriors of posteriordb as numpyro models, with their data and reference draws.

The data and 2,000 of the 10,000 reference draws of each lie in `posteriordb_data`, under
posteriordb's BSD-3-Clause licence. Coordinates are unconstrained throughout, in the order of
`Posterior.parameters`, which is that of the reference draws and not the alphabetical one in which
numpyro flattens a model.
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jaxtyping import Array, Float
from numpyro.distributions import constraints
from numpyro.infer.util import constrain_fn, potential_energy

_FOLDER = Path(__file__).parent / "posteriordb_data"
# posteriordb's own jitter of the Gaussian process's covariance.
_JITTER = 1e-10


@dataclasses.dataclass(frozen=True, eq=False)
class Posterior:
    """A posterior with a reference.

    Attributes:
        name: posteriordb's name of the model.
        model: numpyro model, called with `data` as keywords.
        data: the observations.
        sites: unconstrained shape of each latent site, in the order of the coordinates.
        parameters: posteriordb's name of each coordinate before it was unconstrained.
        draws: reference draws [2000, dim].
        mean, sd: of all 10,000 reference draws [dim].
        check: a point, and log density and score there, as re-derived by the data's preparers.
    """

    name: str
    model: Callable[..., None]
    data: Mapping[str, Any]
    sites: Mapping[str, tuple[int, ...]]
    parameters: tuple[str, ...]
    draws: Float[np.ndarray, "draws dim"]
    mean: Float[np.ndarray, " dim"]
    sd: Float[np.ndarray, " dim"]
    check: Mapping[str, Any]

    @property
    def dim(self) -> int:
        """Number of coordinates."""
        return len(self.mean)

    def log_density(self, z: Float[Array, " dim"]) -> Float[Array, ""]:
        """Log posterior of unconstrained coordinates, with the transforms' Jacobians."""
        # numpyro mixes dtypes and ranks, and a model that calls this must not see the sites within.
        with (
            jax.numpy_dtype_promotion("standard"),
            jax.numpy_rank_promotion("allow"),
            numpyro.handlers.block(),
        ):
            return -potential_energy(self.model, (), dict(self.data), self._split(z))

    def constrain(self, draws: Float[np.ndarray, "draws dim"]) -> dict[str, np.ndarray]:
        """Maps unconstrained draws to the sites of the model, each [draws, ...]."""
        with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
            with jax.numpy_rank_promotion("allow"):
                one = functools.partial(constrain_fn, self.model, (), dict(self.data))
                sites = jax.jit(jax.vmap(lambda z: one(self._split(z))))(jnp.asarray(draws))
        return {name: np.asarray(sites[name]) for name in self.sites}

    def _split(self, z: jax.Array) -> dict[str, jax.Array]:
        sizes = [int(np.prod(shape)) for shape in self.sites.values()]
        parts = jnp.split(z, np.cumsum(sizes)[:-1].tolist())
        return {
            name: part.reshape(shape)
            for part, (name, shape) in zip(parts, self.sites.items(), strict=True)
        }


@functools.cache
def load_posterior(name: str) -> Posterior:
    """Reads a posterior.

    Args:
        name: one of `POSTERIORS`.

    Raises:
        ValueError: for another name.
    """
    if name not in _MODELS:
        raise ValueError(f"name={name!r} must be one of {', '.join(POSTERIORS)}")
    model, sites, keys = _MODELS[name]
    record = json.loads((_FOLDER / f"{name}.json").read_text())
    with np.load(_FOLDER / "draws.npz") as draws:
        reference = draws[name].astype(np.float64)
    return Posterior(
        name=name,
        model=model,
        data={key: np.asarray(record["data"][key], np.float64) for key in keys},
        sites=sites,
        parameters=tuple(record["parameters"]),
        draws=reference,
        mean=np.array(record["reference"]["mean"]),
        sd=np.array(record["reference"]["sd"]),
        check=record["check"],
    )


def _flat(support: constraints.Constraint, *event_shape: int) -> dist.Distribution:
    return dist.ImproperUniform(support, (), event_shape)


def arma11(y: Float[np.ndarray, " times"]) -> None:
    """ARMA(1, 1): y_t = mu + phi y_{t-1} + theta e_{t-1} + e_t, with y_0 = mu and e_0 = 0."""
    mu = numpyro.sample("mu", dist.Normal(0.0, 10.0))
    phi = numpyro.sample("phi", dist.Normal(0.0, 2.0))
    theta = numpyro.sample("theta", dist.Normal(0.0, 2.0))
    sigma = numpyro.sample("sigma", dist.HalfCauchy(2.5))
    series = jnp.asarray(y)
    first = series[0] - mu - phi * mu

    def step(error: jax.Array, pair: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        before, now = pair
        error = now - (mu + phi * before + theta * error)
        return error, error

    _, errors = jax.lax.scan(step, first, (series[:-1], series[1:]))
    errors = jnp.concatenate([first[None], errors])
    numpyro.factor("likelihood", dist.Normal(0.0, sigma).log_prob(errors).sum())


def garch11(y: Float[np.ndarray, " times"], sigma1: Float[np.ndarray, ""]) -> None:
    """GARCH(1, 1): s_t^2 = alpha0 + alpha1 (y_{t-1} - mu)^2 + beta1 s_{t-1}^2, flat priors."""
    mu = numpyro.sample("mu", _flat(constraints.real))
    alpha0 = numpyro.sample("alpha0", _flat(constraints.positive))
    alpha1 = numpyro.sample("alpha1", _flat(constraints.unit_interval))
    beta1 = numpyro.sample("beta1", _flat(constraints.interval(0.0, 1.0 - alpha1)))
    residuals = jnp.asarray(y) - mu
    first = jnp.square(jnp.asarray(sigma1)) * jnp.ones_like(mu)

    def step(variance: jax.Array, residual: jax.Array) -> tuple[jax.Array, jax.Array]:
        variance = alpha0 + alpha1 * residual**2 + beta1 * variance
        return variance, variance

    _, variances = jax.lax.scan(step, first, residuals[:-1])
    scales = jnp.sqrt(jnp.concatenate([first[None], variances]))
    numpyro.factor("likelihood", dist.Normal(0.0, scales).log_prob(residuals).sum())


def eight_schools_centered(
    y: Float[np.ndarray, " schools"], sigma: Float[np.ndarray, " schools"]
) -> None:
    """Effects theta ~ N(mu, tau) of eight schools; the density is unbounded as tau -> 0."""
    mu = numpyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = numpyro.sample("tau", dist.HalfCauchy(5.0))
    theta = numpyro.sample("theta", dist.Normal(mu, tau).expand([len(y)]).to_event(1))
    numpyro.sample("y", dist.Normal(theta, sigma).to_event(1), obs=jnp.asarray(y))


def eight_schools_noncentered(
    y: Float[np.ndarray, " schools"], sigma: Float[np.ndarray, " schools"]
) -> None:
    """The same with theta = mu + tau theta_trans and standard normal theta_trans."""
    mu = numpyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = numpyro.sample("tau", dist.HalfCauchy(5.0))
    scaled = numpyro.sample("theta_trans", dist.Normal(0.0, 1.0).expand([len(y)]).to_event(1))
    numpyro.sample("y", dist.Normal(mu + tau * scaled, sigma).to_event(1), obs=jnp.asarray(y))


def _gaussian_process(x: np.ndarray) -> jax.Array:
    """Samples length scale and amplitude; returns the covariance."""
    rho = numpyro.sample("rho", dist.Gamma(25.0, 4.0))
    alpha = numpyro.sample("alpha", dist.HalfNormal(2.0))
    square = jnp.asarray((x[:, None] - x[None]) ** 2)
    return alpha**2 * jnp.exp(-0.5 * square / rho**2)


def gp_regr(x: Float[np.ndarray, " points"], y: Float[np.ndarray, " points"]) -> None:
    """Gaussian process regression; sigma is the variance of the noise, as in posteriordb."""
    covariance = _gaussian_process(x)
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    covariance = covariance + sigma * jnp.eye(len(x))
    normal = dist.MultivariateNormal(jnp.zeros(len(x)), covariance)
    numpyro.sample("y", normal, obs=jnp.asarray(y))


def gp_pois_regr(x: Float[np.ndarray, " points"], k: Float[np.ndarray, " points"]) -> None:
    """Poisson counts whose log rate is a Gaussian process, f = chol(covariance) f_tilde.

    The covariance is nearly singular: it needs float64.
    """
    covariance = _gaussian_process(x)
    scaled = numpyro.sample("f_tilde", dist.Normal(0.0, 1.0).expand([len(x)]).to_event(1))
    log_rate = jnp.linalg.cholesky(covariance + _JITTER * jnp.eye(len(x))) @ scaled
    # The Poisson log probability up to a constant; numpyro's exponentiates and takes a log again.
    numpyro.factor("likelihood", (jnp.asarray(k) * log_rate - jnp.exp(log_rate)).sum())


def kilpisjarvi(
    x: Float[np.ndarray, " years"],
    y: Float[np.ndarray, " years"],
    pmualpha: Float[np.ndarray, ""],
    psalpha: Float[np.ndarray, ""],
    pmubeta: Float[np.ndarray, ""],
    psbeta: Float[np.ndarray, ""],
) -> None:
    """Linear regression on uncentred years: intercept and slope correlate to four digits."""
    alpha = numpyro.sample("alpha", dist.Normal(pmualpha, psalpha))
    beta = numpyro.sample("beta", dist.Normal(pmubeta, psbeta))
    sigma = numpyro.sample("sigma", _flat(constraints.positive))
    line = alpha + beta * jnp.asarray(x)
    numpyro.sample("y", dist.Normal(line, sigma).to_event(1), obs=jnp.asarray(y))


def low_dim_gauss_mix(y: Float[np.ndarray, " observations"]) -> None:
    """Two Gaussians with ordered means."""
    mu = numpyro.sample("mu", _flat(constraints.ordered_vector, 2))
    numpyro.factor("mu_prior", dist.Normal(0.0, 2.0).log_prob(mu).sum())
    sigma = numpyro.sample("sigma", dist.HalfNormal(2.0).expand([2]).to_event(1))
    theta = numpyro.sample("theta", dist.Beta(5.0, 5.0))
    logs = dist.Normal(mu, sigma).log_prob(jnp.asarray(y)[:, None])
    logs = logs + jnp.stack([jnp.log(theta), jnp.log1p(-theta)])
    numpyro.factor("likelihood", jax.scipy.special.logsumexp(logs, axis=1).sum())


def one_comp_mm_elim_abs(
    D: Float[np.ndarray, ""],
    V: Float[np.ndarray, ""],
    times: Float[np.ndarray, " times"],
    C_hat: Float[np.ndarray, " times"],
) -> None:
    """One compartment with Michaelis-Menten elimination and first-order absorption.

    dC/dt = k_a exp(-k_a t) D / V - (V_m / V) C / (K_m + C), C(0) = 0, by fixed Runge-Kutta steps.
    """
    half_cauchy = dist.HalfCauchy(1.0)
    k_a, k_m, v_m, sigma = (numpyro.sample(n, half_cauchy) for n in ("k_a", "K_m", "V_m", "sigma"))

    def slope(time: jax.Array, level: jax.Array) -> jax.Array:
        # A trial step may fall below zero, where the equation means nothing.
        level = jnp.maximum(level, 0.0)
        return k_a * jnp.exp(-k_a * time) * D / V - v_m / V * level / (k_m + level)

    concentrations = _runge_kutta(slope, jnp.zeros_like(k_a), times)
    log_normal = dist.LogNormal(jnp.log(concentrations), sigma).to_event(1)
    numpyro.sample("C_hat", log_normal, obs=jnp.asarray(C_hat))


def _runge_kutta(
    slope: Callable[[jax.Array, jax.Array], jax.Array],
    start: jax.Array,
    times: np.ndarray,
    substeps: int = 12,
) -> jax.Array:
    """Solution at `times`, from `start` at 0, by the classical method of order four.

    Steps shrink quadratically towards 0, where the elimination relaxes at the rate V_m / (V K_m).
    """
    fractions = np.linspace(0.0, 1.0, substeps + 1)
    edges = np.concatenate([[0.0], times])
    nodes = edges[:-1, None] + np.diff(edges)[:, None] * fractions[None]
    nodes[0] = edges[1] * fractions**2
    steps = np.stack([nodes[:, :-1].ravel(), np.diff(nodes, axis=1).ravel()], axis=1)

    def advance(level: jax.Array, step: jax.Array) -> tuple[jax.Array, jax.Array]:
        time, width = step[0], step[1]
        first = slope(time, level)
        second = slope(time + 0.5 * width, level + 0.5 * width * first)
        third = slope(time + 0.5 * width, level + 0.5 * width * second)
        fourth = slope(time + width, level + width * third)
        level = level + width / 6.0 * (first + 2.0 * second + 2.0 * third + fourth)
        return level, level

    _, levels = jax.lax.scan(advance, start, jnp.asarray(steps, start.dtype))
    return levels[substeps - 1 :: substeps]


_SCHOOLS = ("y", "sigma")
# Model, unconstrained shapes of its sites in the order of the reference draws, names of its data.
_MODELS: dict[str, tuple[Callable[..., None], dict[str, tuple[int, ...]], tuple[str, ...]]] = {
    "arma11": (arma11, {"mu": (), "phi": (), "theta": (), "sigma": ()}, ("y",)),
    "eight_schools_centered": (
        eight_schools_centered,
        {"theta": (8,), "mu": (), "tau": ()},
        _SCHOOLS,
    ),
    "eight_schools_noncentered": (
        eight_schools_noncentered,
        {"theta_trans": (8,), "mu": (), "tau": ()},
        _SCHOOLS,
    ),
    "garch11": (garch11, {"mu": (), "alpha0": (), "alpha1": (), "beta1": ()}, ("y", "sigma1")),
    "gp_pois_regr": (gp_pois_regr, {"rho": (), "alpha": (), "f_tilde": (11,)}, ("x", "k")),
    "gp_regr": (gp_regr, {"rho": (), "alpha": (), "sigma": ()}, ("x", "y")),
    "kilpisjarvi": (
        kilpisjarvi,
        {"alpha": (), "beta": (), "sigma": ()},
        ("x", "y", "pmualpha", "psalpha", "pmubeta", "psbeta"),
    ),
    "low_dim_gauss_mix": (low_dim_gauss_mix, {"mu": (2,), "sigma": (2,), "theta": ()}, ("y",)),
    "one_comp_mm_elim_abs": (
        one_comp_mm_elim_abs,
        {"k_a": (), "K_m": (), "V_m": (), "sigma": ()},
        ("D", "V", "times", "C_hat"),
    ),
}
POSTERIORS = tuple(_MODELS)
