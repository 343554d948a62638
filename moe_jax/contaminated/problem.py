"""What an estimation takes and what it gives back, as pytrees of arrays."""

import dataclasses
from typing import Any, NamedTuple

from moe_jax.contaminated.layout import Family
from moe_jax.contaminated.status import Flags

# An array of JAX in a compiled program, of NumPy outside it, an axis number for vmap.
Values = Any


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is compiled: the family, the method, the starts.

    Attributes:
        n_tail: deterministic tail starts, at most 4.
        n_random: random starts.
        max_iter: iterations of the method; of Newton's in "em+newton".
        em_steps: EM iterations before Newton's.
        centre_gate: whether the gate's covariates may be centred, which moves tau.
        centre_expert: whether the expert's covariates and response may be, which moves its
            intercept.
        sequential: whether starts run one after the other, for large data, instead of together.
    """

    family: Family
    method: str = "em+newton"
    n_tail: int = 4
    n_random: int = 0
    max_iter: int = 200
    em_steps: int = 20
    centre_gate: bool = True
    centre_expert: bool = True
    sequential: bool = False


class Problem(NamedTuple):
    """The data of one estimation in the user's units.

    Attributes:
        x: covariates [n, d].
        y: response [n].
        log_frozen: log f0(y_i | x_i) [n].
        weight: of the rows [n], 0 for absent ones, whose other values must be finite all the same.
        frozen_variance: mean variance of y under the frozen model, NaN if it is unknown.
    """

    x: Values
    y: Values
    log_frozen: Values
    weight: Values
    frozen_variance: Values


class Settings(NamedTuple):
    """Numbers that an estimation takes without being compiled anew.

    Attributes:
        initial: the family's initial parameters [p].
        given: further starts [s, p].
        fixed: fixed values of parameters and NaN for free ones [p].
        nu_bounds: range of the variances [2]; NaN for the default.
        gate_prior_scale: standard deviation of the prior, infinite for none.
        tol: Newton's stopping rule.
    """

    initial: Values
    given: Values
    fixed: Values
    nu_bounds: Values
    gate_prior_scale: Values
    tol: Values


class Estimate(NamedTuple):
    """What an estimation found.

    Attributes:
        theta: parameters in the user's units [p].
        loglik: log-likelihood there, without the prior.
        gradient: of the mean objective in standardised units [p].
        information: observed information in standardised units, with the prior's precision [p, p].
        outer_product: sum of weight g g^T over the rows' scores g, in the same units [p, p].
        to_user: derivatives of the user's parameters by the standardised ones [p, p].
        from_user: its inverse [p, p].
        movable: entries that are neither fixed nor held at a bound [p].
        flags: which statuses hold.
        converged: whether the best start's stopping rule was met.
        em_trace, trace: the objective after every iteration of the best start, NaN past the end.
        em_iterations, iterations: of the best start.
        start_values: objective reached from every start [s].
        start_iterations: iterations of every start, of both phases [s].
        start_converged: of every start [s].
        n_agree: starts within 0.01 of the best.
        facts: numbers for the status's message.
    """

    theta: Values
    loglik: Values
    gradient: Values
    information: Values
    outer_product: Values
    to_user: Values
    from_user: Values
    movable: Values
    flags: Flags
    converged: Values
    em_trace: Values
    trace: Values
    em_iterations: Values
    iterations: Values
    start_values: Values
    start_iterations: Values
    start_converged: Values
    n_agree: Values
    facts: dict[str, Values]


class Ends(NamedTuple):
    """Where every start leads.

    Attributes:
        theta: in the user's units [s, p].
        standardised: the same in standardised units [s, p].
        value: objective [s].
        effective: least number of rows that reach a prompt [s].
        iterations: of both phases [s].
        converged: whether the stopping rule was met [s].
    """

    theta: Values
    standardised: Values
    value: Values
    effective: Values
    iterations: Values
    converged: Values
