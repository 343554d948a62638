"""Settings of a fit, and the two named ones."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class FitSettings:
    """How `fit_product_of_t` samples, updates and chooses experts.

    Attributes:
        rounds: fits, one after the other; before each but the first, experts are refreshed.
        iterations: updates a round.
        batch_size: B, samples an update, one gradient of log p each.
        sampler: "gibbs", a chain for each sample, carried from update to update; or "dirichlet",
            the paper's independent draws weighted by C_alpha(w).
        sweeps: Gibbs sweeps between updates.
        proximal: "identity", |alpha - alpha_t|^2 / eta_t as in the paper; or "diagonal",
            sum_k G_kk (alpha_k - alpha_tk)^2 / eta_t, which does not depend on the experts' scales.
        learning_rate: eta.
        schedule: "constant", eta_t = eta, or "decreasing", eta_t = eta / (t + 1).
        target_share: of a batch that is drawn of the candidates with weights p / proposal, roughly
            draws of the target, in place of q's. Samples of q alone do not see what q cuts off.
            Nothing where the experts are given, for there are no candidates then.
        score_clip: samples get the further weight 1 / (1 + |g|^2 / (score_clip D)) with g the score
            in whitened coordinates; None for none. Without it a funnel's neck decides.
        value_weight: weight of the variance over the batch of log p - log q, added to the Fisher
            divergence. Scores alone cannot tell the masses of modes that lie apart.
        average: whether a round ends with the mean of the second half of its exponents.
        least_freedom: lower bound on nu = 2 A - D over positive definite experts.
        whiten: whether the fit runs in coordinates in which the target is roughly white.
        placement: local experts' centres: "tempered", by importance resampling, or "jitter",
            normal about the modes with twice their Laplace scale, as the paper describes.
        local_experts: number of them, each with the Hessian of log p at its centre.
        local_scales: kappa, taken in turn: a local precision is -Hessian / kappa; "dof" stands for
            D + 5, with which a t of 5 degrees of freedom has the Hessian's curvature.
        ladder: whether broad experts about the centre belong to the choice.
        coordinate_experts: whether experts in single coordinates belong to the choice.
        match_iterations: iterations of batch and match for whitening, `batch_size` scores each.
        num_draws: draws of the fitted q that the result holds and diagnoses.
    """

    rounds: int = 2
    iterations: int = 60
    batch_size: int = 256
    sampler: str = "gibbs"
    sweeps: int = 1
    proximal: str = "diagonal"
    learning_rate: float = 1.0
    schedule: str = "constant"
    target_share: float = 0.5
    score_clip: float | None = 5.0
    value_weight: float = 0.0
    average: bool = True
    least_freedom: float = 0.5
    whiten: bool = True
    placement: str = "tempered"
    local_experts: int = 60
    local_scales: tuple[float | str, ...] = (1.0, "dof")
    ladder: bool = True
    coordinate_experts: bool = True
    match_iterations: int = 20
    num_draws: int = 4000

    def __post_init__(self) -> None:
        """Raises ValueError naming the setting that is out of its range."""
        for name in ("rounds", "iterations", "batch_size", "sweeps", "num_draws"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: expected at least 1")
        for name in ("learning_rate", "least_freedom"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)}: expected more than 0")
        for name in ("value_weight", "local_experts", "match_iterations"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}={getattr(self, name)}: expected at least 0")
        if not 0 <= self.target_share < 1:
            raise ValueError(f"target_share={self.target_share}: expected 0 <= target_share < 1")
        if self.score_clip is not None and not self.score_clip > 0:
            raise ValueError(f"score_clip={self.score_clip}: expected more than 0, or None")
        for name, choices in (
            ("sampler", ("gibbs", "dirichlet")),
            ("proximal", ("identity", "diagonal")),
            ("schedule", ("constant", "decreasing")),
            ("placement", ("tempered", "jitter")),
        ):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected one of {choices}")
        if not self.local_scales:
            raise ValueError("local_scales=(): expected at least one scale")


# The paper's update: Dirichlet samples, plain squared distance, experts jittered about the modes.
# Its numbers of experts, radii and step sizes are in an appendix that was not available; these are
# guesses.
PAPER = FitSettings(
    rounds=1,
    iterations=120,
    sampler="dirichlet",
    proximal="identity",
    target_share=0.0,
    score_clip=None,
    average=False,
    whiten=False,
    placement="jitter",
    local_scales=(1.0,),
    ladder=False,
    coordinate_experts=False,
    match_iterations=0,
)

# What measurements made of it: Gibbs chains, bounded weights, whitening, broad and coordinate
# experts, and a second choice of experts.
SAFEGUARDED = FitSettings()
