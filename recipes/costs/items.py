"""The items that a model consists of: embedding, mixers, feed-forward blocks, and the end with norm, head and loss.

Each item holds everything from one residual sum to the next, so that a pipeline can be cut between any two.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_zb.planning.costs import LayerCost, LayerRole
from recipes.costs.device import Device, Kind
from recipes.costs.operations import (
    BF16,
    Operation,
    causal_attention,
    causal_convolution,
    cross_entropy,
    elementwise,
    exchange,
    expert_linear,
    linear,
    lookup,
    norm,
    residual,
    state_space_scan,
)

GRADIENT_BYTES, OPTIMIZER_BYTES = 4, 12
"""For each parameter: an fp32 gradient; Adam's fp32 copy and two moments, which the devices of a node share."""


@dataclass(frozen=True, slots=True)
class Item:
    """One item of a model, for one microbatch of a given number of tokens.

    Args:
        name: within the model.
        operations: what it does.
        role: stacked item, or an end.
    """

    name: str
    operations: tuple[Operation, ...]
    role: LayerRole = LayerRole.LAYER

    @property
    def parameters(self) -> int:
        """Trained numbers, experts of all devices included."""
        return sum(o.parameters for o in self.operations)

    def flops(self, part: str) -> float:
        """FLOPs of `"forward"`, `"backward_input"` or `"backward_weight"`."""
        moves = (Kind.MEMORY, Kind.EXCHANGE)
        return sum(getattr(o, part) for o in self.operations if o.kind not in moves)

    def cost(self, device: Device, tokens: int, width: int) -> LayerCost:
        """What planning needs to know of it.

        Args:
            device: gives times, and the node that shares experts and optimizer states.
            tokens: of a microbatch.
            width: of what it sends on.
        """
        held = sum(o.parameters / (device.node if o.sharded else 1) for o in self.operations)
        return LayerCost(
            name=self.name,
            forward=self._seconds("forward", device),
            backward_input=self._seconds("backward_input", device),
            backward_weight=self._seconds("backward_weight", device),
            activation_bytes=sum(o.saved_bytes for o in self.operations),
            weight_stash_bytes=sum(o.stash_bytes for o in self.operations),
            parameter_bytes=BF16 * held,
            output_bytes=BF16 * tokens * width,
            role=self.role,
            state_bytes=held * (BF16 + GRADIENT_BYTES + OPTIMIZER_BYTES / device.node),
        )

    def _seconds(self, part: str, device: Device) -> float:
        return sum(device.seconds(o.kind, getattr(o, part)) for o in self.operations)


def embedding(tokens: int, vocabulary: int, width: int) -> Item:
    """The table of token embeddings."""
    return Item("embedding", (lookup(tokens, vocabulary, width),), LayerRole.PROLOGUE)


def head(tokens: int, vocabulary: int, width: int) -> Item:
    """Final norm, output projection and loss; also for models that tie it to the embedding, since the ends of a pipeline
    hold the table twice."""
    operations = (norm(tokens, width), linear(tokens, width, vocabulary), cross_entropy(tokens, vocabulary))
    return Item("head", operations, LayerRole.EPILOGUE)


def self_attention(
    name: str, tokens: int, width: int, heads: int, kv_heads: int, head_width: int,
    window: int | None = None, sandwiched: bool = False, head_norms: bool = False,
) -> Item:  # fmt: skip
    """Grouped-query attention.

    Args:
        name: of the item.
        tokens: of the sequence.
        width: of the model.
        heads: query heads.
        kv_heads: key and value heads.
        head_width: of each.
        window: of sliding attention; None for full.
        sandwiched: a second norm behind the block.
        head_norms: norms of queries and keys.
    """
    queries, keys = heads * head_width, kv_heads * head_width
    rotated = elementwise(
        tokens, queries + keys, reads=1, writes=1, saves=int(head_norms), parameters=2 * head_width * head_norms
    )
    operations = [
        norm(tokens, width),
        linear(tokens, width, queries + 2 * keys),
        rotated,
        causal_attention(tokens, heads, head_width, head_width, 2 * keys, window),
        linear(tokens, queries, width),
        *([norm(tokens, width)] if sandwiched else []),
        residual(tokens, width),
    ]
    return Item(name, tuple(operations))


def latent_attention(
    name: str, tokens: int, width: int, heads: int, plain_width: int, rotary_width: int, value_width: int, rank: int
) -> Item:
    """DeepSeek's attention, whose keys and values come from a narrow latent vector.

    Args:
        name: of the item.
        tokens: of the sequence.
        width: of the model.
        heads: of queries, keys and values.
        plain_width: of a head's part without rotation.
        rotary_width: of the rotated part, whose keys all heads share.
        value_width: of a head's values.
        rank: of the latent vector.
    """
    key_width = plain_width + rotary_width
    operations = (
        norm(tokens, width),
        linear(tokens, width, heads * key_width),
        linear(tokens, width, rank + rotary_width, shares_input=True),
        norm(tokens, rank),
        linear(tokens, rank, heads * (plain_width + value_width)),
        elementwise(tokens, heads * 2 * key_width, reads=1, writes=1),  # rotation, and keys put together
        causal_attention(tokens, heads, key_width, value_width, heads * (key_width + value_width), None),
        linear(tokens, heads * value_width, width),
        residual(tokens, width),
    )
    return Item(name, operations)


def gated_mlp(name: str, tokens: int, width: int, hidden: int, sandwiched: bool = False) -> Item:
    """A feed-forward block with a gate: three products."""
    operations = [
        norm(tokens, width),
        *_gated(tokens, width, hidden),
        *([norm(tokens, width)] if sandwiched else []),
        residual(tokens, width),
    ]
    return Item(name, tuple(operations))


def plain_mlp(name: str, tokens: int, width: int, hidden: int) -> Item:
    """A feed-forward block of two products with an activation between."""
    operations = (
        norm(tokens, width),
        linear(tokens, width, hidden),
        elementwise(tokens, hidden, reads=1, writes=1, saves=1),
        linear(tokens, hidden, width),
        residual(tokens, width),
    )
    return Item(name, operations)


def mixture(
    name: str, tokens: int, width: int, hidden: int, num_experts: int, chosen: int, num_shared: int, devices: int
) -> Item:
    """A mixture of experts, spread over the devices of a node, and experts that every token visits; load is even.

    Args:
        name: of the item.
        tokens: of a microbatch.
        width: of the model.
        hidden: of one expert.
        num_experts: to choose from.
        chosen: experts of a token.
        num_shared: experts of every token.
        devices: of a node.
    """
    rows = tokens * chosen
    operations = (
        norm(tokens, width),
        linear(tokens, width, num_experts, shares_input=True),
        *_gated(tokens, width, num_shared * hidden),
        elementwise(rows, width, reads=1, writes=1),  # rows sorted by expert
        exchange(rows, width, devices),
        expert_linear(rows, width, 2 * hidden, num_experts),
        elementwise(rows, hidden, reads=2, writes=1, saves=2),
        expert_linear(rows, hidden, width, num_experts),
        exchange(rows, width, devices),
        elementwise(rows, width, reads=1, writes=1 / chosen, saves=1),  # weighted sum of a token's experts
        residual(tokens, width),
    )
    return Item(name, operations)


def mamba2(
    name: str, tokens: int, width: int, heads: int, head_width: int, groups: int, state: int, kernel: int = 4, block: int = 128
) -> Item:
    """A Mamba-2 mixer.

    Args:
        name: of the item.
        tokens: of the sequence.
        width: of the model.
        heads: of the scan.
        head_width: of each.
        groups: that share B and C.
        state: width of a state.
        kernel: of the convolution.
        block: tokens that the scan takes at once.
    """
    inner, shared = heads * head_width, 2 * groups * state
    operations = (
        norm(tokens, width),
        linear(tokens, width, 2 * inner + shared + heads),
        causal_convolution(tokens, inner + shared, kernel),
        state_space_scan(tokens, inner, heads, groups, state, block),
        elementwise(tokens, inner, reads=2, writes=1, saves=2, parameters=inner),  # norm with a gate
        linear(tokens, inner, width),
        residual(tokens, width),
    )
    return Item(name, operations)


def _gated(tokens: int, width: int, hidden: int) -> tuple[Operation, ...]:
    return (
        linear(tokens, width, 2 * hidden),
        elementwise(tokens, hidden, reads=2, writes=1, saves=2),
        linear(tokens, hidden, width),
    )
