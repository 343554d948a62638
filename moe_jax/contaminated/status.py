"""How a fit ended: one word, and what to do about it."""

from typing import NamedTuple

from jaxtyping import Array

# In order of precedence: the first that holds is the status. The gate's limits are in standardised
# units of x; specification of the estimator, section 4.6.
STATUSES = (
    "nonfinite_frozen",
    "no_contamination",
    "all_contamination",
    "empty_expert",
    "gate_separated",
    "variance_floor",
    "flat_information",
    "max_iter",
    "ok",
)
MAX_GATE_NORM = 15.0
MAX_LOGIT = 30.0
MIN_EIGENVALUE = 1e-8


class Flags(NamedTuple):
    """Which statuses hold, each a boolean; several can."""

    nonfinite_frozen: Array
    no_contamination: Array
    all_contamination: Array
    empty_expert: Array
    gate_separated: Array
    variance_floor: Array
    flat_information: Array
    max_iter: Array
    ok: Array


_REMEDIES = {
    "nonfinite_frozen": "the frozen log-density is NaN or +inf at some row: see frozen.log_prob",
    "no_contamination": (
        "{gate:.2g} of {total:.6g} rows go to a prompt: the frozen model explains the data by "
        "itself; see test_no_contamination"
    ),
    "all_contamination": (
        "{frozen:.2g} of {total:.6g} rows stay with the frozen model: one expert explains the data "
        "by itself, so fit that one alone"
    ),
    "empty_expert": (
        "only {effective:.1f} effective points reach an expert of {location} location parameters: "
        "reduce them or fix tau"
    ),
    "gate_separated": (
        "x separates the prompt's rows (standardised |beta| {norm:.3g}, largest log-odds "
        "{logit:.3g}): the gate's coefficients are infinite; set gate_prior_scale=5 for finite ones"
    ),
    "variance_floor": (
        "the variance of an expert is at a bound of [{low:.3g}, {high:.3g}]: it may have fitted a "
        "few points exactly; see nu_bounds"
    ),
    "flat_information": (
        "the information matrix is singular (smallest eigenvalue {eigenvalue:.1e} at unit "
        "diagonal): some parameters are not determined, see diagnose().collinear_directions"
    ),
    "max_iter": "not converged after {iterations} iterations: raise max_iter",
    "ok": "",
}


def remedy(status: str, **facts: float | int) -> str:
    """One line that says what happened and what to do; empty if all is well."""
    return _REMEDIES[status].format(**facts)
