"""The decoder: embedding, layers of attention and a dense or sparse feed-forward, output head."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from moe_jax.core import FeedForward, Routing, SparseMoE
from moe_jax.core.gates import STATE
from moe_jax.language.attention import CACHE, Attention, RMSNorm
from moe_jax.language.config import LanguageModelConfig
from moe_jax.sharding import ExpertParallel, constrain

STREAM = ("batch", None, None)
"""Logical axes of the residual stream [batch, length, model]."""


class Layer(nn.Module):
    """x + attention(norm x), then x + feed_forward(norm x), the latter dense or sparse."""

    config: LanguageModelConfig
    kind: str
    deterministic: bool
    parallel: ExpertParallel | None = None

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "batch length model"],
        tokens: Int[Array, "batch length"],
        segment_ids: Int[Array, "batch length"],
        positions: Int[Array, "batch length"],
    ) -> tuple[Float[Array, "batch length model"], Routing | None]:
        """Returns the new residual stream, and the routing if the layer is sparse."""
        config = self.config
        dtype = jnp.dtype(config.dtype)
        down_scale = (2.0 * config.num_layers) ** -0.5
        normed = RMSNorm(dtype=dtype, name="attention_norm")(x)
        attended = Attention(config, name="attention")(normed, segment_ids, positions)
        x = x + attended.astype(x.dtype)
        normed = RMSNorm(dtype=dtype, name="feed_forward_norm")(x)
        if self.kind == "dense":
            out = FeedForward(
                hidden_dim=config.hidden_dim,
                activation=config.activation,
                gated=config.gated,
                dtype=dtype,
                down_scale=down_scale,
                name="feed_forward",
            )(normed)
            return x + out.astype(x.dtype), None
        out, routing = SparseMoE(
            num_experts=config.num_experts,
            num_selected=config.num_selected,
            hidden_dim=config.expert_hidden_dim,
            num_shared_experts=config.num_shared_experts,
            router=config.router,
            router_options=config.router_options,
            capacity_factor=config.capacity_factor,
            capacity_priority=config.capacity_priority,
            dropout_rate=config.expert_dropout,
            activation=config.activation,
            gated=config.gated,
            dtype=dtype,
            down_scale=down_scale,
            exchange=self.parallel,
            name="moe",
        )(normed, segment_ids > 0, token_ids=tokens, deterministic=self.deterministic)
        return x + out.astype(x.dtype), routing


class Period(nn.Module):
    """The layers of one repetition of the pattern; the body of the scan over layers."""

    config: LanguageModelConfig
    kinds: tuple[str, ...]
    deterministic: bool
    parallel: ExpertParallel | None = None

    @nn.compact
    def __call__(
        self, x: Array, tokens: Array, segment_ids: Array, positions: Array
    ) -> tuple[Array, tuple[Routing, ...]]:
        """Returns the new residual stream, and the routing of the sparse layers in order."""
        routings = []
        mesh = None if self.parallel is None else self.parallel.mesh
        for index, kind in enumerate(self.kinds):
            layer = _rematerialised(Layer, self.config.remat)(
                self.config, kind, self.deterministic, self.parallel, name=f"layer_{index}"
            )
            x, routing = layer(constrain(x, STREAM, mesh), tokens, segment_ids, positions)
            if routing is not None:
                routings.append(routing)
        return x, tuple(routings)


class LanguageModel(nn.Module):
    """Decoder-only language model over packed documents.

    Parameters: `embedding` [vocab, model], `blocks_i` the layers of one run of equal periods with a
    leading axis over its repetitions, `final_norm`, and `head` [model, vocab] unless tied. Routers
    with state keep it in collection `router_state`, laid out likewise.

    Attributes:
        config: shape.
        parallel: mesh over which batch, experts and parameters are split, under `jax.jit`; None for
            one device.
    """

    config: LanguageModelConfig
    parallel: ExpertParallel | None = None

    @property
    def mesh(self) -> Mesh | None:
        """Over which it is split; None for one device."""
        return None if self.parallel is None else self.parallel.mesh

    @nn.compact
    def __call__(
        self,
        tokens: Int[Array, "batch length"],
        segment_ids: Int[Array, "batch length"] | None = None,
        positions: Int[Array, "batch length"] | None = None,
        *,
        deterministic: bool = True,
    ) -> tuple[Float[Array, "batch length vocab"], Routing | None]:
        """Scores the next token at every place.

        Args:
            tokens: ids in [0, vocab_size).
            segment_ids: document of each token within its row; 0 is padding. One document a row if
                None.
            positions: place of each token in its document; counted along the row if None.
            deterministic: False while training, see `SparseMoE`; what draws takes the random
                streams `router` and `dropout`.

        Returns:
            Logits in float32, and the routing of the sparse layers stacked along a leading axis
            (None if there are none).

        Raises:
            ValueError: naming the argument whose shape or type does not fit.
        """
        config = self.config
        dtype = jnp.dtype(config.dtype)
        _check_tokens(tokens, segment_ids, positions)
        if segment_ids is None:
            segment_ids = jnp.ones_like(tokens)
        if positions is None:
            index = jnp.arange(tokens.shape[1], dtype=jnp.int32)
            positions = jnp.broadcast_to(index[None, :], tokens.shape)
        spread = config.model_dim**-0.5 if config.tie_embeddings else 1.0
        embedding = self.param(
            "embedding",
            nn.initializers.normal(spread),
            (config.vocab_size, config.model_dim),
            jnp.float32,
        )
        x = embedding[tokens]
        routings = []
        for run, (kinds, repeats) in enumerate(layer_runs(config.layer_kinds)):
            x, stacked = _repeated(repeats, config.scan_layers)(
                config, kinds, deterministic, self.parallel, name=f"blocks_{run}"
            )(x, tokens, segment_ids, positions)
            if stacked:
                routings.append(_in_layer_order(stacked))
        x = constrain(x, STREAM, self.mesh)
        x = RMSNorm(dtype=dtype, name="final_norm")(x)
        if config.tie_embeddings:
            head = embedding.T
        else:
            shape = (config.model_dim, config.vocab_size)
            head = self.param("head", nn.initializers.lecun_normal(), shape, jnp.float32)
        logits = jnp.dot(x, head.astype(dtype), preferred_element_type=jnp.float32)
        if not routings:
            return logits, None
        return logits, jax.tree.map(lambda *parts: jnp.concatenate(parts), *routings)


def _check_tokens(tokens: Array, segment_ids: Array | None, positions: Array | None) -> None:
    """Outside the tests nothing checks the annotations."""
    if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer) or tokens.shape[1] == 0:
        raise ValueError(
            f"tokens {tokens.shape} of type {tokens.dtype}: expected ids [batch, length]; "
            "tokens[None] makes a batch of one text"
        )
    for name, values in (("segment_ids", segment_ids), ("positions", positions)):
        if values is not None and values.shape != tokens.shape:
            raise ValueError(f"{name} {values.shape} does not fit tokens {tokens.shape}")


def layer_runs(kinds: tuple[str, ...]) -> list[tuple[tuple[str, ...], int]]:
    """Cuts a sequence of layer kinds into runs of a repeated period, each the longest it can be.

    For example dense, sparse, sparse, sparse gives [((dense,), 1), ((sparse,), 3)], and
    dense, sparse, dense, sparse gives [((dense, sparse), 2)].
    """
    runs = []
    start = 0
    while start < len(kinds):
        best = (kinds[start : start + 1], 1)
        for period in range(1, (len(kinds) - start) // 2 + 1):
            unit = kinds[start : start + period]
            repeats = 1
            while kinds[start + repeats * period : start + (repeats + 1) * period] == unit:
                repeats += 1
            if repeats > 1 and repeats * period > len(best[0]) * best[1]:
                best = (unit, repeats)
        runs.append(best)
        start += len(best[0]) * best[1]
    return runs


def _repeated(repeats: int, scan: bool) -> type[nn.Module]:
    return nn.scan(
        Period,
        variable_axes={"params": 0, STATE: 0, CACHE: 0},
        split_rngs={"params": True, "router": True, "dropout": True},
        in_axes=(nn.broadcast, nn.broadcast, nn.broadcast),
        length=repeats,
        # Unrolling keeps the parameters' layout, so a checkpoint serves both ways of compiling.
        unroll=1 if scan else repeats,
    )


def _rematerialised(layer: type[nn.Module], remat: str) -> type[nn.Module]:
    if remat == "none":
        return layer
    policy = jax.checkpoint_policies.dots_saveable if remat == "dots" else None
    return nn.remat(layer, policy=policy)


def _in_layer_order(stacked: tuple[Routing, ...]) -> Routing:
    """Merges the scan's [repeats, ...] records of each place in the period into [layers, ...]."""
    return jax.tree.map(
        lambda *parts: jnp.stack(parts, axis=1).reshape(-1, *parts[0].shape[1:]), *stacked
    )
