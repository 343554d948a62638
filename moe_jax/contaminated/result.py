"""What a fit returns: estimates, how far to trust them, and what follows from them."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Float, PRNGKeyArray

from moe_jax.contaminated import inference
from moe_jax.contaminated.data import check_covariates
from moe_jax.contaminated.inference import Derived, Kind, Wald
from moe_jax.contaminated.layout import fixed_vector, parameter_names, unflatten
from moe_jax.contaminated.model import ContaminatedMoE
from moe_jax.contaminated.problem import Estimate, Plan, Problem
from moe_jax.contaminated.screening import Screening
from moe_jax.contaminated.status import STATUSES, remedy

# Parameters that are logarithms, and what they are logarithms of.
_EXPONENTIALS = {"tau": "exp(tau)", "log_nu": "nu", "log_df": "df"}


@dataclasses.dataclass(frozen=True, repr=False)
class FitResult:
    """A fitted contaminated mixture; arrays are float64 NumPy arrays in the user's units.

    Attributes:
        params: estimates by name.
        theta: the same as one vector [p].
        names: of its entries.
        loglik: log-likelihood at the estimates, without a prior's share.
        trace: objective (log-likelihood and log-prior) after every iteration of the best start.
        status: how the fit ended, one of `moe_jax.contaminated.status.STATUSES`.
        message: what to do about it; empty if the status is "ok".
        flags: every status that holds, since several can.
        converged: whether the best start met the method's stopping rule.
        iterations: of the best start, EM's and the method's.
        n_agree: starts whose objective is within 0.01 of the best.
        starts_table: a dict for every start: name, loglik (objective), iterations, converged. Of
            large data also sample_iterations, spent on a sample of the rows, and same_as, the first
            start that the sample led to the same optimum: the two go on together.
        gradient: of the mean objective in standardised units [p].
        information: observed information [p, p], with the prior's precision.
        outer_product: sum of weight g g^T over the rows' scores g [p, p].
        movable: entries that are neither fixed nor held at a bound [p].
        model, x, y, weight, log_frozen: what was fitted, and to what.
        plan, estimate: what ran and what came back, in standardised units.
    """

    params: dict[str, np.ndarray]
    theta: np.ndarray
    names: tuple[str, ...]
    loglik: float
    trace: np.ndarray
    status: str
    message: str
    flags: dict[str, bool]
    converged: bool
    iterations: int
    n_agree: int
    starts_table: list[dict[str, Any]]
    gradient: np.ndarray
    information: np.ndarray
    outer_product: np.ndarray
    movable: np.ndarray
    model: ContaminatedMoE
    x: np.ndarray
    y: np.ndarray
    weight: np.ndarray
    log_frozen: np.ndarray
    plan: Plan
    estimate: Estimate

    def __repr__(self) -> str:
        return (
            f"FitResult(status={self.status!r}, loglik={self.loglik:.6g}, "
            f"iterations={self.iterations})"
        )

    def cov(self, kind: Kind = "observed") -> Float[np.ndarray, "p p"]:
        """Covariance of `theta`: "observed", "opg" or "sandwich", see `inference.covariance`.

        Fixed parameters have variance 0, those at a bound NaN. All is NaN if the matrix to invert
        is singular; `status` is then "flat_information".
        """
        e = self.estimate
        cov = (
            e.to_user
            @ inference.covariance(e.information, e.outer_product, e.movable, kind)
            @ e.to_user.T
        )
        is_fixed = ~np.isnan(fixed_vector(self.model.family, self.model.fixed, self.x.shape[1]))
        held = ~self.movable & ~is_fixed
        cov[held, :] = cov[:, held] = np.nan
        return cov

    def standard_errors(self, kind: Kind = "observed") -> Float[np.ndarray, " p"]:
        """Square roots of the covariance's diagonal."""
        return np.sqrt(np.diagonal(self.cov(kind)))

    def confint(self, level: float = 0.95, kind: Kind = "observed") -> Float[np.ndarray, "p 2"]:
        """Wald intervals, estimate -+ quantile times standard error."""
        half = inference.normal_quantile(level) * self.standard_errors(kind)
        return np.stack([self.theta - half, self.theta + half], axis=1)

    def wald(self, hypothesis: Mapping[str, Any], kind: Kind = "observed") -> Wald:
        """Wald test that parameters have the values given by name; NaN entries are left open.

        tau -> -inf, no contamination, is on the boundary, where no Wald test is valid: see
        `test_no_contamination`.
        """
        values = fixed_vector(self.model.family, hypothesis, self.x.shape[1], "hypothesis")
        return inference.wald_test(self.theta, values, self.cov(kind))

    def delta(
        self,
        function: Callable[[dict[str, Any]], Any],
        level: float = 0.95,
        kind: Kind = "observed",
    ) -> Derived:
        """A function of the parameters, written in JAX, with delta-method errors and interval.

        Example: `result.delta(lambda p: jnp.exp(p["tau"]))`.
        """
        args = (self.model.family, self.theta, self.cov(kind), self.x.shape[1], level)
        return inference.delta_method(function, *args)

    def profile(self, name: str, **options: Any) -> Any:
        """Profile likelihood of one entry of `names`; see `moe_jax.contaminated.resampling`."""
        from moe_jax.contaminated.resampling import profile

        return profile(self, name, **options)

    def bootstrap(self, key: PRNGKeyArray, **options: Any) -> Any:
        """Parametric bootstrap; see `moe_jax.contaminated.resampling.bootstrap`."""
        from moe_jax.contaminated.resampling import bootstrap

        return bootstrap(key, self, **options)

    def diagnose(self, **options: Any) -> Any:
        """How well the data tell the prompt from the frozen model; see `diagnostics.diagnose`."""
        from moe_jax.contaminated.diagnostics import diagnose

        return diagnose(self, **options)

    def responsibilities(
        self, x: ArrayLike | None = None, y: ArrayLike | None = None
    ) -> np.ndarray:
        """P(prompt | x_i, y_i) [n] or [J, n], of the fitted data if neither is given."""
        if (x is None) != (y is None):
            raise ValueError(f"{'y' if y is None else 'x'}=None: give both x and y, or neither")
        if x is None or y is None:
            x, y = self.x, self.y
        return self.model.responsibilities(self.params, self._like_fitted(x), y)

    def gate(self, x: ArrayLike | None = None) -> np.ndarray:
        """P(prompt | x_i) [n] or [J, n]."""
        return self.model.gate_prob(self.params, self.x if x is None else self._like_fitted(x))

    def mean(self, x: ArrayLike | None = None) -> np.ndarray:
        """E[y | x_i]."""
        return self.model.mean(self.params, self.x if x is None else self._like_fitted(x))

    def log_prob(self, x: ArrayLike, y: ArrayLike) -> Float[np.ndarray, " n"]:
        """Log p(y_i | x_i)."""
        return self.model.log_prob(self.params, self._like_fitted(x), y)

    def sample(self, key: PRNGKeyArray, x: ArrayLike) -> np.ndarray:
        """A draw of y for every row of x."""
        return self.model.sample(key, self.params, self._like_fitted(x))

    def _like_fitted(self, x: ArrayLike) -> np.ndarray:
        """Covariates, as many as the fit's."""
        x = check_covariates(x)
        if x.shape[1] != self.x.shape[1]:
            raise ValueError(f"x has {x.shape[1]} covariates, expected the fit's {self.x.shape[1]}")
        return x

    def summary(self, level: float = 0.95, kind: Kind = "observed") -> str:
        """A table of estimates, standard errors and intervals, with e^tau and nu where they are."""
        interval = f"{level:.0%} interval"
        head = [
            f"status {self.status}" + (f": {self.message}" if self.message else ""),
            f"log-likelihood {self.loglik:.6f}   rows {np.sum(self.weight):g}   "
            f"iterations {self.iterations}   "
            f"starts that agree {self.n_agree}/{len(self.starts_table)}",
            f"{'':<16}{'estimate':>13}{'std. error':>13}{'z':>9}{interval:>27}   ({kind})",
        ]
        errors, bounds = self.standard_errors(kind), self.confint(level, kind)
        own = zip(self.names, self.theta, errors, bounds, strict=True)
        # The exponential of a gate that runs away is infinite.
        with np.errstate(over="ignore", invalid="ignore"):
            lines = [_line(n, v, e, v / e if e > 0 else np.nan, b) for n, v, e, b in own]
            for i, (name, value) in enumerate(zip(self.names, np.exp(self.theta), strict=True)):
                base, bracket, index = name.partition("[")
                if base in _EXPONENTIALS:
                    # Delta method; the interval is the logarithm's, mapped: it stays positive.
                    label = _EXPONENTIALS[base] + bracket + index
                    lines.append(_line(label, value, value * errors[i], None, np.exp(bounds[i])))
        return "\n".join([*head, *lines])


def _line(name: str, value: float, error: float, z: float | None, bounds: np.ndarray) -> str:
    ratio = "" if z is None else f"{z:.2f}"
    low, high = bounds
    return f"{name:<16}{value:>13.6g}{error:>13.4g}{ratio:>9}{low:>14.5g}{high:>13.5g}"


def make_result(
    model: ContaminatedMoE,
    plan: Plan,
    problem: Problem,
    found: Estimate,
    screening: Screening | None = None,
) -> FitResult:
    """The result of an estimate, both as NumPy arrays."""
    d = problem.x.shape[1]
    flags = {name: bool(getattr(found.flags, name)) for name in STATUSES}
    status = next(name for name in STATUSES if flags[name])
    flags["ok"] = status == "ok"
    traces = (found.em_trace[: found.em_iterations + 1], found.trace[1 : found.iterations + 1])
    back = found.from_user
    given = len(found.start_values) - plan.n_tail - plan.n_random
    kinds = ["given"] * given + ["tail"] * plan.n_tail + ["random"] * plan.n_random
    per_start = zip(
        kinds, found.start_values, found.start_iterations, found.start_converged, strict=True
    )
    table: list[dict[str, Any]] = [
        {"name": k, "loglik": float(v), "iterations": int(i), "converged": bool(c)}
        for k, v, i, c in per_start
    ]
    if screening is not None:
        for k, row in enumerate(table):
            row["sample_iterations"] = int(screening.iterations[k])
            row["same_as"] = int(screening.same_as[k])
    return FitResult(
        params=unflatten(model.family, found.theta, d),
        theta=found.theta,
        names=parameter_names(model.family, d),
        loglik=float(found.loglik),
        trace=np.concatenate(traces),
        status=status,
        message=remedy(status, **{k: v.item() for k, v in found.facts.items()}),
        flags=flags,
        converged=bool(found.converged),
        iterations=int(found.em_iterations + found.iterations),
        n_agree=int(found.n_agree),
        starts_table=table,
        gradient=found.gradient,
        information=back.T @ found.information @ back,
        outer_product=back.T @ found.outer_product @ back,
        movable=found.movable,
        model=model,
        x=problem.x,
        y=problem.y,
        weight=problem.weight,
        log_frozen=problem.log_frozen,
        plan=plan,
        estimate=found,
    )
