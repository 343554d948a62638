"""The sparse mixture-of-experts layer."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from moe_jax.core.experts import ExpertFFN, FeedForward
from moe_jax.core.permutation import combine, dispatch, sort_by_expert
from moe_jax.core.routing import Routing, check_num_selected, top_k_routing


class SparseMoE(nn.Module):
    """Each token goes to the experts its gate scores highest; none is dropped.

    y = sum_{e in S(x)} w_e(x) FFN_e(x) + sum_s FFN_s(x), with S(x) and w from `top_k_routing` on
    the logits x G, and s over the shared experts, which see every token.

    Parameters, float32: `gate` [model, experts], `experts` as in `ExpertFFN`, and
    `shared_experts` as in `FeedForward`.

    Attributes:
        num_experts: E.
        num_selected: K, experts a token goes to.
        hidden_dim: inner width of one expert.
        num_shared_experts: experts that see every token, besides the E.
        renormalize: see `top_k_routing`.
        activation, dtype, down_scale, implementation: see `ExpertFFN`.
    """

    num_experts: int
    num_selected: int
    hidden_dim: int
    num_shared_experts: int = 0
    renormalize: bool = True
    activation: str = "silu"
    dtype: jax.typing.DTypeLike = jnp.float32
    down_scale: float = 1.0
    implementation: str | None = None

    @nn.compact
    def __call__(
        self, x: Float[Array, "*batch model"], mask: Bool[Array, "*batch"] | None = None
    ) -> tuple[Float[Array, "*batch model"], Routing]:
        """Routes, applies the experts and combines.

        Args:
            x: tokens; leading axes are flattened for routing.
            mask: False for padding, whose output is 0 and which changes nothing else.

        Returns:
            The layer's output in the type of `x`, and the `Routing` of the flattened tokens.

        Raises:
            ValueError: if num_selected is not in [1, num_experts], or the mask does not fit x.
        """
        check_num_selected(self.num_selected, self.num_experts)
        tokens = x.reshape(-1, x.shape[-1])
        if mask is not None:
            # Checked before it is flattened: a transposed mask would fit and cover other tokens.
            if mask.shape != x.shape[:-1]:
                raise ValueError(
                    f"mask {mask.shape} does not fit x {x.shape}: expected {x.shape[:-1]}"
                )
            mask = mask.reshape(-1)
            # A NaN in padding would otherwise reach the weights' gradients as 0 NaN.
            tokens = jnp.where(mask[:, None], tokens, jnp.zeros_like(tokens))
        gate = self.param(
            "gate", nn.initializers.lecun_normal(), (x.shape[-1], self.num_experts), jnp.float32
        )
        gate_logits = jnp.dot(tokens.astype(jnp.float32), gate, precision="highest")
        routing = top_k_routing(
            gate_logits, self.num_selected, renormalize=self.renormalize, mask=mask
        )
        order = sort_by_expert(routing)
        experts = ExpertFFN(
            num_experts=self.num_experts,
            hidden_dim=self.hidden_dim,
            activation=self.activation,
            dtype=self.dtype,
            down_scale=self.down_scale,
            implementation=self.implementation,
            name="experts",
        )
        rows = experts(dispatch(tokens.astype(self.dtype), order), order.group_sizes)
        out = combine(rows, routing.combine_weight, order).astype(x.dtype)
        if self.num_shared_experts:
            # Shared experts side by side are one feed-forward network of their joint width.
            shared = FeedForward(
                hidden_dim=self.num_shared_experts * self.hidden_dim,
                activation=self.activation,
                dtype=self.dtype,
                down_scale=self.down_scale,
                name="shared_experts",
            )
            out = out + shared(tokens).astype(x.dtype)
        return out.reshape(x.shape), routing
