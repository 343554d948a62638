"""The contaminated mixture of experts: what it is made of, and its density given parameters."""

import dataclasses
import numbers
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float, PRNGKeyArray

from moe_jax.contaminated.compilation import jit
from moe_jax.contaminated.data import check_covariates, check_data, frozen_log_prob
from moe_jax.contaminated.expert import Expert
from moe_jax.contaminated.frozen import require
from moe_jax.contaminated.gates import Gate, LinearGate
from moe_jax.contaminated.layout import Family, flatten
from moe_jax.contaminated.likelihood import RowTerms, make_rows, row_terms
from moe_jax.contaminated.location_scale import GaussianLinear


@dataclasses.dataclass(frozen=True)
class ContaminatedMoE:
    """p(y|x) = pi_0(x) f0(y|x) + sum_j pi_j(x) f(y|x; phi_j), pi = softmax(0, a_1(x), ..., a_J(x)).

    The frozen density f0 is known; the J prompts, of one kind of expert, and their gates are
    fitted. With one prompt, pi_1 = sigmoid(beta.x + tau), this is the softmax-contaminated mixture
    of Yan et al. 2025 (arXiv 2505.18455). The frozen model's logit is 0, so it can never trade
    places with a prompt; several prompts can trade places with each other.

    Attributes:
        frozen: has `log_prob(x, y)` and, for some purposes, `sample`, `mean`, `variance`: see
            `moe_jax.contaminated.frozen`.
        expert: kind of the prompts.
        gate: kind of the gate.
        n_prompts: J.
        nu_bounds: range of a prompt's variance. By default a hundredfold around the variance of y
            and the frozen model's mean variance, whichever is smaller and larger; the lower bound
            is what keeps the likelihood from growing without limit on a point fitted exactly.
        gate_prior_scale: standard deviation of a normal prior on the gate's parameters, in units of
            standardised x; none if None. It keeps the coefficients of a separating gate finite; 5
            is weak.
        fixed: values of parameters that are not estimated, by name; NaN entries stay free.

    Example:
        >>> import jax, numpy as np
        >>> from moe_jax.contaminated import ContaminatedMoE, FrozenGaussian
        >>> model = ContaminatedMoE(FrozenGaussian(lambda x: x[:, 0], var=1.0))
        >>> x = np.linspace(-1.0, 1.0, 400)[:, None]
        >>> params = {"beta": [3.0], "tau": 0.0, "eta": [0.0], "intercept": 5.0, "log_nu": 0.0}
        >>> y = model.sample(jax.random.key(0), params, x)
        >>> model.fit(x, y).status
        'ok'
    """

    frozen: Any
    expert: Expert = dataclasses.field(default_factory=GaussianLinear)
    gate: Gate = dataclasses.field(default_factory=LinearGate)
    n_prompts: int = 1
    nu_bounds: tuple[float, float] | None = None
    gate_prior_scale: float | None = None
    fixed: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        require(self.frozen, "log_prob", "for its density")
        is_discrete = getattr(self.frozen, "discrete", None)
        if None not in (is_discrete, self.expert.discrete) and is_discrete != self.expert.discrete:
            first, second = ("labels", "reals") if is_discrete else ("reals", "labels")
            raise ValueError(
                f"frozen={type(self.frozen).__name__} is a density of {first} and "
                f"expert={type(self.expert).__name__} of {second}: they do not mix"
            )
        if not (isinstance(self.n_prompts, numbers.Integral) and self.n_prompts >= 1):
            raise ValueError(f"n_prompts={self.n_prompts}, expected an integer of at least 1")
        if self.nu_bounds is not None and not (
            len(self.nu_bounds) == 2 and 0 < self.nu_bounds[0] < self.nu_bounds[1]
        ):
            raise ValueError(f"nu_bounds={self.nu_bounds}, expected 0 < low < high")
        if self.gate_prior_scale is not None and not self.gate_prior_scale > 0:
            raise ValueError(
                f"gate_prior_scale={self.gate_prior_scale}, expected a positive number"
            )

    @property
    def family(self) -> Family:
        """The part that compiled programs depend on."""
        return Family(self.expert, self.gate, self.n_prompts)

    def log_prob(
        self, params: Mapping[str, Any], x: ArrayLike, y: ArrayLike
    ) -> Float[np.ndarray, " n"]:
        """Log p(y_i | x_i)."""
        return np.asarray(self._terms(params, x, y).loglik)

    def responsibilities(self, params: Mapping[str, Any], x: ArrayLike, y: ArrayLike) -> np.ndarray:
        """P(prompt | x_i, y_i) [n]; of several prompts [J, n]."""
        return self._of_prompts(np.asarray(self._terms(params, x, y).responsibility))

    def gate_prob(self, params: Mapping[str, Any], x: ArrayLike) -> np.ndarray:
        """P(prompt | x_i) [n]; of several prompts [J, n]."""
        x = check_covariates(x)
        with jax.enable_x64(True):
            return self._of_prompts(np.asarray(_gate(self.family, self._theta(params, x), x)))

    def mean(self, params: Mapping[str, Any], x: ArrayLike) -> np.ndarray:
        """E[y | x_i] [n]; of classifiers the probabilities [n, classes]."""
        x = check_covariates(x)
        frozen_mean = require(self.frozen, "mean", "for the mixture's mean")
        with jax.enable_x64(True):
            theta = self._theta(params, x)
            gate, means = map(
                np.asarray, (_gate(self.family, theta, x), _means(self.family, theta, x))
            )
            gate = gate.reshape(*gate.shape, *[1] * (means.ndim - 2))
            base = np.asarray(frozen_mean(x), np.float64)
            if base.size != means[0].size:
                raise ValueError(
                    f"the frozen mean has shape {base.shape}, the prompts' {means.shape[1:]}"
                )
            base = base.reshape(means.shape[1:])
            return (1 - np.sum(gate, axis=0)) * base + np.sum(gate * means, axis=0)

    def sample(self, key: PRNGKeyArray, params: Mapping[str, Any], x: ArrayLike) -> np.ndarray:
        """A draw of y for every row of x [n]; int64 labels of a classifier."""
        x = check_covariates(x)
        frozen_sample = require(self.frozen, "sample", "to draw from the mixture")
        key, frozen_key = jax.random.split(key)
        with jax.enable_x64(True):
            component, prompts = map(np.asarray, _draw(key, self.family, self._theta(params, x), x))
            frozen = np.asarray(frozen_sample(frozen_key, x), np.float64)
        draws = np.concatenate([frozen[None], prompts])
        y = draws[component, np.arange(len(x))]
        return y.astype(np.int64) if self.expert.labels else y

    def fit(self, x: ArrayLike, y: ArrayLike, **options: Any) -> Any:
        """Maximum likelihood; the options are those of `moe_jax.contaminated.fit`."""
        from moe_jax.contaminated.fit import fit

        return fit(self, x, y, **options)

    def fit_many(self, xs: ArrayLike, ys: ArrayLike, **options: Any) -> Any:
        """Many fits at once; the options are those of `moe_jax.contaminated.fit.fit_many`."""
        from moe_jax.contaminated.fit import fit_many

        return fit_many(self, xs, ys, **options)

    def test_no_contamination(
        self, x: ArrayLike, y: ArrayLike, *, key: PRNGKeyArray, **options: Any
    ) -> Any:
        """Exact Monte-Carlo test of p = f0; see `moe_jax.contaminated.contamination_test`."""
        from moe_jax.contaminated.contamination_test import test_no_contamination

        return test_no_contamination(key, self, x, y, **options)

    def information(self, params: Mapping[str, Any], x: ArrayLike, **options: Any) -> np.ndarray:
        """Expected information by quadrature; see `moe_jax.contaminated.exponents.information`."""
        from moe_jax.contaminated.exponents import information

        return information(self, params, x, **options)

    def exponents(
        self, params: Mapping[str, Any], x: ArrayLike, direction: Any, **options: Any
    ) -> Any:
        """Exponents of the rates; see `moe_jax.contaminated.exponents.exponents`."""
        from moe_jax.contaminated.exponents import exponents

        return exponents(self, params, x, direction, **options)

    def rate_study(
        self, design: Any, ns: Sequence[int], R: int, key: PRNGKeyArray, **options: Any
    ) -> Any:
        """Errors of fits of this model over sample sizes beside the Cramer-Rao bound.

        Args:
            design: truth and covariates: a `moe_jax.contaminated.designs.Design`, whose own model
                is left aside, or the name of one of `DESIGNS`.
            ns: observations of a data set, five or more, ascending.
            R: data sets of each size.
            key: of all data.
            **options: of `moe_jax.contaminated.rates.rate_study`.
        """
        from moe_jax.contaminated.rates import model_rate_study

        return model_rate_study(self, design, ns, R, key, **options)

    def _theta(self, params: Mapping[str, Any], x: np.ndarray) -> Array:
        return flatten(self.family, params, x.shape[1])

    def _terms(self, params: Mapping[str, Any], x: ArrayLike, y: ArrayLike) -> RowTerms:
        x, y = check_data(x, y, self.expert)
        log_frozen = frozen_log_prob(self.frozen, x, y)
        with jax.enable_x64(True):
            terms = _row_terms(self.family, self._theta(params, x), x, y, log_frozen)
        return terms

    def _of_prompts(self, values: np.ndarray) -> np.ndarray:
        return values[0] if self.n_prompts == 1 else values


@partial(jit, static="family")
def _row_terms(family: Family, theta: Array, x: Array, y: Array, log_frozen: Array) -> RowTerms:
    return row_terms(family, theta, make_rows(family, x, y, log_frozen))


def _gate_probabilities(family: Family, theta: Array, x: Array) -> Float[Array, "J n"]:
    """pi_j(x_i)."""
    design = family.gate.design(x, None)
    g = family.gate.size(design.shape[1])
    gammas = theta.reshape(family.n_prompts, -1)[:, :g]
    logits = jnp.stack([family.gate.logit(gamma, design) for gamma in gammas])
    return jax.nn.softmax(jnp.concatenate([jnp.zeros_like(logits[:1]), logits]), axis=0)[1:]


_gate = jit(_gate_probabilities, static="family")


@partial(jit, static="family")
def _means(family: Family, theta: Array, x: Array) -> Array:
    """E[y | x_i, prompt j] [J, n] or [J, n, classes]."""
    design = family.expert.design(x, None)
    return jnp.stack([family.expert.mean(phi, design) for phi in _experts(family, theta, x)])


@partial(jit, static="family")
def _draw(key: PRNGKeyArray, family: Family, theta: Array, x: Array) -> tuple[Array, Array]:
    """Component of every row [n], 0 for the frozen model, and a draw from every prompt [J, n]."""
    gate = _gate_probabilities(family, theta, x)
    logp = jnp.log(jnp.concatenate([1 - jnp.sum(gate, axis=0, keepdims=True), gate]))
    key, *keys = jax.random.split(key, 1 + family.n_prompts)
    design = family.expert.design(x, None)
    experts = _experts(family, theta, x)
    draws = [family.expert.sample(k, phi, design) for k, phi in zip(keys, experts, strict=True)]
    return jax.random.categorical(key, logp, axis=0), jnp.stack(draws)


def _experts(family: Family, theta: Array, x: Array) -> Float[Array, "J e"]:
    size = family.gate.size(family.gate.design(x, None).shape[1])
    return theta.reshape(family.n_prompts, -1)[:, size:]
