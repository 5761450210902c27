"""What single operations do in F, B and W, keep for later, and own: FLOPs and bytes for one microbatch of `tokens` tokens.

Activations and parameters are bf16. An operation keeps what its backward pass reads, as the usual fused kernels do; a tensor
that two operations read is kept by one of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from recipes.costs.device import Kind

BF16, FP32 = 2, 4


@dataclass(frozen=True, slots=True)
class Operation:
    """One kernel, or a few that always come together.

    Args:
        kind: whether the amounts are FLOPs or bytes, and what bounds them.
        forward: amount of F.
        backward_input: amount of B.
        backward_weight: amount of W.
        saved_bytes: kept from F to B.
        stash_bytes: kept from B to W.
        parameters: numbers that are trained.
        sharded: whether its parameters are spread over the devices of a node (experts).
    """

    kind: Kind
    forward: float
    backward_input: float
    backward_weight: float = 0.0
    saved_bytes: float = 0.0
    stash_bytes: float = 0.0
    parameters: int = 0
    sharded: bool = False


def linear(tokens: int, inputs: int, outputs: int, shares_input: bool = False) -> Operation:
    """A product with a weight: 2 x tokens x inputs x outputs FLOPs in each of F, B and W.

    Args:
        tokens: rows.
        inputs: width of the input.
        outputs: width of the output.
        shares_input: whether another operation keeps the input.
    """
    flops = 2.0 * tokens * inputs * outputs
    kept = 0 if shares_input else BF16 * tokens * inputs
    stash = kept + BF16 * tokens * outputs
    return Operation(Kind.MATMUL, flops, flops, flops, kept, stash, inputs * outputs)


def expert_linear(tokens: int, inputs: int, outputs: int, num_experts: int, shares_input: bool = False) -> Operation:
    """The same weight product with an expert for each row; `tokens` counts a token once for each expert that it goes to."""
    one = linear(tokens, inputs, outputs, shares_input)
    return Operation(
        Kind.GROUPED, one.forward, one.backward_input, one.backward_weight, one.saved_bytes, one.stash_bytes,
        num_experts * inputs * outputs, sharded=True,
    )  # fmt: skip


def causal_attention(tokens: int, heads: int, key_width: int, value_width: int, kv_width: int, window: int | None) -> Operation:
    """Fused causal attention, which keeps queries, keys, values and a sum per row and computes the scores again in B.

    Two products in F and five in B, over the keys that a token sees: half of the sequence, or its window.

    Args:
        tokens: of one sequence.
        heads: query heads.
        key_width: of one head's queries and keys.
        value_width: of one head's values.
        kv_width: of all keys and values together.
        window: keys that a token sees at most; None: all before it.
    """
    span = tokens if window is None else min(window, tokens)
    pairs = tokens * span - span * span / 2
    scores, mixing = 2.0 * pairs * heads * key_width, 2.0 * pairs * heads * value_width
    saved = BF16 * tokens * (heads * key_width + kv_width) + FP32 * tokens * heads
    return Operation(Kind.ATTENTION, scores + mixing, 3 * scores + 2 * mixing, saved_bytes=saved)


def state_space_scan(tokens: int, inner: int, heads: int, groups: int, state: int, block: int) -> Operation:
    """Mamba-2's scan in blocks: scores within a block, their mixing, block states, and what states add to outputs.

    B computes each product's two gradients, and the scores and states again.

    Args:
        tokens: of one sequence.
        inner: width of all heads.
        heads: each has its own decay.
        groups: that share B and C.
        state: width of a state.
        block: tokens of a block.
    """
    scores = 2.0 * tokens * block * groups * state
    mixing = 2.0 * tokens * block * inner
    states = 2.0 * tokens * state * inner
    forward = scores + mixing + 2 * states
    saved = BF16 * tokens * (inner + 2 * groups * state) + FP32 * tokens * heads
    return Operation(Kind.SCAN, forward, 2 * forward + scores + states, saved_bytes=saved, parameters=3 * heads)


def causal_convolution(tokens: int, channels: int, kernel: int) -> Operation:
    """A short depthwise convolution with bias and activation: reads and writes once; its weights' gradients are W."""
    moved = float(BF16 * tokens * channels)
    return Operation(Kind.MEMORY, 2 * moved, 3 * moved, 2 * moved, moved, 2 * moved, channels * (kernel + 1))


def elementwise(tokens: int, width: int, reads: float, writes: float, saves: float = 0.0, parameters: int = 0) -> Operation:
    """Work that is bound by memory.

    B reads what F has kept and the gradient of each output, and writes the gradient of each input.

    Args:
        tokens: rows.
        width: of a row.
        reads: tensors that F reads.
        writes: tensors that F writes.
        saves: tensors kept for B.
        parameters: trained numbers, such as a norm's scale; their gradient is part of B.
    """
    tensor = float(BF16 * tokens * width)
    forward, backward = (reads + writes) * tensor, (saves + writes + reads) * tensor
    return Operation(Kind.MEMORY, forward, backward, saved_bytes=saves * tensor, parameters=parameters)


def norm(tokens: int, width: int) -> Operation:
    """A root-mean-square norm."""
    return elementwise(tokens, width, reads=1, writes=1, saves=1, parameters=width)


def residual(tokens: int, width: int) -> Operation:
    """The sum with what went around a block; in B the two gradients are added."""
    return elementwise(tokens, width, reads=2, writes=1)


def lookup(tokens: int, vocabulary: int, width: int) -> Operation:
    """An embedding: F copies rows; W fills a dense gradient of the table and adds it to the sum over microbatches."""
    rows, table = float(BF16 * tokens * width), float(BF16 * vocabulary * width)
    return Operation(Kind.MEMORY, 2 * rows, 0.0, 4 * table + 2 * rows, 8.0 * tokens, 8.0 * tokens + rows, vocabulary * width)


def cross_entropy(tokens: int, vocabulary: int) -> Operation:
    """A fused loss over logits that stay in bf16: F reads them, B overwrites them with their gradient."""
    logits = float(BF16 * tokens * vocabulary)
    return Operation(Kind.MEMORY, logits, 2 * logits, saved_bytes=logits)


def exchange(tokens: int, width: int, devices: int) -> Operation:
    """An all-to-all of one row a token over the devices of a node, in F and, backwards, in B."""
    sent = BF16 * tokens * width * (devices - 1) / devices
    return Operation(Kind.EXCHANGE, sent, sent)
