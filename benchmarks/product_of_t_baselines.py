"""What else a user of numpyro or blackjax would fit, on a count of the target's scores.

Every method is made for a log density of R^dim and a budget of scores, and maps a key to `Fit`:
draws of the approximation, log p - log q at them, and how often the target was evaluated. Guides,
flows and optimisers keep the packages' defaults but for the step sizes named here.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.handlers import substitute
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from numpyro.infer.autoguide import (
    AutoBNAFNormal,
    AutoIAFNormal,
    AutoMultivariateNormal,
    AutoNormal,
)

from benchmarks.product_of_t_gaussian import (
    Gaussian,
    fit_by_batch_and_match,
    fit_by_score_matching,
)

LogDensity = Callable[[jax.Array], jax.Array]
NUM_DRAWS = 4000
PARTICLES = 16
GAUSSIAN_RATE, FLOW_RATE = 1e-2, 5e-3
MATCH_BATCH = 32
# Multi-path Pathfinder's defaults in Stan are 4 paths and 25 draws for an ELBO; here more paths,
# since its budget is never exhausted.
NUM_PATHS, ELBO_DRAWS, PATH_ITERATIONS = 20, 50, 100


class Fit(NamedTuple):
    """One run of one method.

    Attributes:
        draws: of the approximation [NUM_DRAWS, dim].
        log_ratios: log p - log q at draws of the approximation before any resampling; None for a
            method without a density.
        scores: gradients of log p evaluated.
        log_densities: values of log p evaluated besides.
        seconds: without compilation.
        compile_seconds: of compilation.
    """

    draws: np.ndarray
    log_ratios: np.ndarray | None
    scores: int
    log_densities: int
    seconds: float
    compile_seconds: float


def run_variational(
    guide: str, keys: list[jax.Array], log_density: LogDensity, dim: int, budget: int
) -> list[Fit]:
    """SVI of numpyro with Adam on a cosine schedule, gradients clipped to norm 10."""
    make_guide, rate = _GUIDES[guide]
    steps = max(budget // PARTICLES, 1)

    def model() -> None:
        z = numpyro.sample("z", dist.ImproperUniform(dist.constraints.real_vector, (), (dim,)))
        numpyro.factor("log_density", log_density(z))

    def run(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        fit_key, draw_key = jax.random.split(key)
        family = make_guide(model)
        schedule = optax.cosine_decay_schedule(rate, steps, 0.01)
        optimizer = optax.chain(optax.clip_by_global_norm(10.0), optax.adam(schedule))
        svi = SVI(model, family, optimizer, Trace_ELBO(PARTICLES))
        state = svi.init(fit_key)
        state = jax.lax.fori_loop(0, steps, lambda _, s: svi.stable_update(s)[0], state)
        draws, log_q = _draw(family, svi.get_params(state), draw_key)
        return draws, jax.vmap(log_density)(draws) - log_q

    return _timed(run, keys, steps * PARTICLES)


def _draw(family: object, params: dict, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Draws of a guide with their log density, forward through its flows, which may not invert."""
    if isinstance(family, AutoNormal):
        posterior = dist.Normal(params["z_auto_loc"], params["z_auto_scale"]).to_event(1)
    else:
        posterior = substitute(family._get_posterior, params)()
    if not isinstance(posterior, dist.TransformedDistribution):
        draws = posterior.sample(key, (NUM_DRAWS,))
        return draws, posterior.log_prob(draws)
    z = posterior.base_dist.sample(key, (NUM_DRAWS,))
    log_q = posterior.base_dist.log_prob(z)
    for transform in posterior.transforms:
        moved, intermediates = transform.call_with_intermediates(z)
        log_q = log_q - transform.log_abs_det_jacobian(z, moved, intermediates)
        z = moved
    return z, log_q


_GUIDES = {
    "AutoNormal": (AutoNormal, GAUSSIAN_RATE),
    "AutoMultivariateNormal": (AutoMultivariateNormal, GAUSSIAN_RATE),
    "AutoBNAFNormal": (AutoBNAFNormal, FLOW_RATE),
    "AutoIAFNormal": (AutoIAFNormal, FLOW_RATE),
}


def run_gaussian(
    method: str, keys: list[jax.Array], log_density: LogDensity, dim: int, budget: int
) -> list[Fit]:
    """Gaussian score matching or batch and match, from a standard normal at a uniform start."""
    fit = {"GSM": fit_by_score_matching, "BaM": fit_by_batch_and_match}[method]
    steps = max(budget // MATCH_BATCH, 1)

    def run(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        start_key, fit_key, draw_key = jax.random.split(key, 3)
        start = Gaussian(
            jax.random.uniform(start_key, (dim,), minval=-2.0, maxval=2.0), jnp.eye(dim)
        )
        found = fit(fit_key, jax.grad(log_density), start, steps, MATCH_BATCH)
        normal = dist.MultivariateNormal(found.mean, found.covariance)
        draws = normal.sample(draw_key, (NUM_DRAWS,))
        return draws, jax.vmap(log_density)(draws) - normal.log_prob(draws)

    return _timed(run, keys, steps * MATCH_BATCH)


def run_pathfinder(
    num_paths: int, keys: list[jax.Array], log_density: LogDensity, dim: int
) -> list[Fit]:
    """Pathfinder of blackjax; with several paths, draws resampled by smoothed weights.

    It stops by itself, far below the others' budgets. Its scores are counted by a callback in a run
    of their own, since L-BFGS searches lines.
    """
    from blackjax.vi import multipathfinder, pathfinder

    count = [0]

    def increase() -> None:
        count[0] += 1

    @jax.custom_vjp
    def counted(z: jax.Array) -> jax.Array:
        return log_density(z)

    def forward(z: jax.Array) -> tuple[jax.Array, jax.Array]:
        jax.debug.callback(increase)
        return jax.value_and_grad(log_density)(z)

    counted.defvjp(forward, lambda gradient, cotangent: (cotangent * gradient,))

    def approximate(key: jax.Array, function: LogDensity) -> tuple[jax.Array, jax.Array]:
        start_key, path_key, draw_key = jax.random.split(key, 3)
        starts = jax.random.uniform(start_key, (num_paths, dim), minval=-2.0, maxval=2.0)
        options = {"num_samples": ELBO_DRAWS, "maxiter": PATH_ITERATIONS, "maxls": 30}
        if num_paths == 1:
            state, _ = pathfinder.approximate(path_key, function, starts[0], **options)
            draws, log_q = pathfinder.sample(draw_key, state, NUM_DRAWS)
            return draws, jax.vmap(log_density)(draws) - log_q
        state, _ = multipathfinder.multi_approximate(path_key, function, starts, **options)
        draw_keys = jax.random.split(draw_key, num_paths + 1)
        # More draws a path than gave the ELBOs, so that resampling leaves enough different ones.
        sample = jax.vmap(lambda k, s: pathfinder.sample(k, s, NUM_DRAWS // num_paths * 4))
        draws, log_q = sample(draw_keys[1:], state.path_states)
        draws, log_q = draws.reshape(-1, dim), log_q.reshape(-1)
        ratios = jax.vmap(log_density)(draws) - log_q
        state = state._replace(samples=draws, logp=ratios, logq=jnp.zeros_like(ratios))
        log_weights, _ = multipathfinder.psis_weights(state)
        chosen = jax.random.categorical(draw_keys[0], log_weights, shape=(NUM_DRAWS,))
        return draws[chosen], ratios

    fits = _timed(lambda key: approximate(key, log_density), keys, 0)
    counting = jax.jit(lambda key: approximate(key, counted)[0])
    densities = num_paths * ELBO_DRAWS * (PATH_ITERATIONS + 1)
    for index, key in enumerate(keys):
        count[0] = 0
        jax.block_until_ready(counting(key))
        jax.effects_barrier()
        fits[index] = fits[index]._replace(scores=count[0], log_densities=densities)
    return fits


def run_nuts(keys: list[jax.Array], log_density: LogDensity, dim: int) -> list[Fit]:
    """NUTS of numpyro: four chains of 500 warm-up and 1,000 kept transitions, a reference."""
    fits = []
    for key in keys:
        start_key, warmup_key, run_key = jax.random.split(key, 3)
        began = time.perf_counter()
        sampler = MCMC(
            NUTS(potential_fn=lambda z: -log_density(z), dense_mass=True),
            num_warmup=500,
            num_samples=NUM_DRAWS // 4,
            num_chains=4,
            chain_method="vectorized",
            progress_bar=False,
        )
        starts = jax.random.uniform(start_key, (4, dim), minval=-2.0, maxval=2.0)
        sampler.warmup(
            warmup_key, init_params=starts, extra_fields=("num_steps",), collect_warmup=True
        )
        scores = int(sampler.get_extra_fields()["num_steps"].sum())
        sampler.run(run_key, extra_fields=("num_steps",))
        scores += int(sampler.get_extra_fields()["num_steps"].sum())
        draws = np.asarray(sampler.get_samples())
        # Its two compilations cannot be told from its sampling.
        fits.append(Fit(draws, None, scores, 0, time.perf_counter() - began, 0.0))
    return fits


def _timed(
    run: Callable[[jax.Array], tuple[jax.Array, jax.Array]], keys: list[jax.Array], scores: int
) -> list[Fit]:
    began = time.perf_counter()
    compiled = jax.jit(run).lower(keys[0]).compile()
    compile_seconds = time.perf_counter() - began
    fits = []
    for key in keys:
        began = time.perf_counter()
        draws, ratios = jax.block_until_ready(compiled(key))
        seconds = time.perf_counter() - began
        fits.append(Fit(np.asarray(draws), np.asarray(ratios), scores, 0, seconds, compile_seconds))
    return fits
