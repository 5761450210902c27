"""What layers, transfers and devices cost: the input of every plan. Times in seconds, sizes in bytes.

A cost model is measured (by the profiler) or written down; planning never looks at anything else of a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, unique

from lightning_zb.planning.placement import Partition


@unique
class LayerRole(str, Enum):
    """Whether an item is one of the stacked layers or rides at an end of the model."""

    PROLOGUE = "prologue"  # what runs before the stack: embeddings, positional tables
    LAYER = "layer"
    EPILOGUE = "epilogue"  # what runs after it: final norm, head, loss


@dataclass(frozen=True, slots=True)
class LayerCost:
    """Cost of one layer for one microbatch.

    Args:
        name: the layer's name in the model.
        forward: seconds of F.
        backward_input: seconds of B.
        backward_weight: seconds of W.
        activation_bytes: M_B, held from F to B.
        weight_stash_bytes: M_W, held from B to W.
        parameter_bytes: parameters, constant.
        output_bytes: what F sends to the next layer and B receives back.
        role: stacked layer, or prologue or epilogue.
        state_bytes: parameters, gradients, optimizer state and rollback copies together; None where not known.
        workspace_bytes: what a pass holds only while it runs, by pass kind value (`"F"`, `"B"`, `"W"`). The layers of a
            chunk follow each other in F and B, so that the largest counts, but W holds the gradients of all.
        backward: seconds of BW, which saves what splitting costs; None where it is B + W.
        transient_bytes: what B holds for a moment beyond M_B and M_W: it stashes gradients before it gives activations back.
    """

    name: str
    forward: float
    backward_input: float
    backward_weight: float
    activation_bytes: float = 0.0
    weight_stash_bytes: float = 0.0
    parameter_bytes: float = 0.0
    output_bytes: float = 0.0
    role: LayerRole = LayerRole.LAYER
    state_bytes: float | None = None
    workspace_bytes: dict[str, float] = field(default_factory=dict)
    backward: float | None = None
    transient_bytes: float = 0.0

    @property
    def work(self) -> float:
        """Seconds of F, B and W together."""
        return self.forward + self.backward_input + self.backward_weight

    @property
    def whole_backward(self) -> float:
        """Seconds of BW."""
        return self.backward_input + self.backward_weight if self.backward is None else self.backward


@dataclass(frozen=True, slots=True)
class PassOverhead:
    """Seconds that a pass takes besides its layers, whatever they are: what one more chunk costs a microbatch.

    Each F runs the code before the layers again, and every pass has host work and messages. BW is one pass, as B is.

    Args:
        forward: of F.
        backward_input: of B, or of BW.
        backward_weight: of W.
    """

    forward: float = 0.0
    backward_input: float = 0.0
    backward_weight: float = 0.0

    @property
    def work(self) -> float:
        """Seconds of F, B and W together."""
        return self.forward + self.backward_input + self.backward_weight

    @property
    def by_kind(self) -> dict[str, float]:
        """Seconds of each kind of pass: F, B, W and BW."""
        return {"F": self.forward, "B": self.backward_input, "W": self.backward_weight, "BW": self.backward_input}


@dataclass(frozen=True, slots=True)
class Link:
    """A transfer of n bytes takes latency + n / bandwidth seconds."""

    latency: float = 0.0
    bandwidth: float = float("inf")

    def seconds(self, num_bytes: float) -> float:
        return self.latency + num_bytes / self.bandwidth


@dataclass(frozen=True, slots=True)
class Reduction:
    """Gradients of a chunk are added over the replicas of a pipeline once its last W has run (first paper, Appendix A).

    Reductions of one device follow each other beside its passes, and its step ends when the last has ended.

    Args:
        num_replicas: pipelines that train in parallel, at least 1.
        link: between neighbours in the ring of replicas.
    """

    num_replicas: int
    link: Link = Link()

    def seconds(self, num_bytes: float) -> float:
        """Seconds of a ring all-reduce: each of 2(D-1) rounds moves a D-th of the bytes."""
        rounds = 2 * (self.num_replicas - 1)
        return rounds * self.link.seconds(num_bytes / self.num_replicas) if rounds else 0.0


@dataclass(frozen=True, slots=True)
class ChunkCost:
    """Cost of one chunk for one microbatch on a device of speed 1; fields as in `LayerCost`."""

    forward: float
    backward_input: float
    backward_weight: float
    activation_bytes: float = 0.0
    weight_stash_bytes: float = 0.0
    parameter_bytes: float = 0.0
    output_bytes: float = 0.0
    state_bytes: float = 0.0
    backward: float | None = None
    transient_bytes: float = 0.0

    @property
    def work(self) -> float:
        return self.forward + self.backward_input + self.backward_weight

    @property
    def whole_backward(self) -> float:
        return self.backward_input + self.backward_weight if self.backward is None else self.backward

    @property
    def saved_by_fusing(self) -> float:
        """Seconds that one BW takes less than B and W apart; 0 where nothing is known, negative where it takes more."""
        return self.backward_input + self.backward_weight - self.whole_backward


@dataclass(frozen=True, slots=True)
class CostModel:
    """Everything planning knows of a model and the machine it runs on.

    Args:
        layers: one cost for each layer, in model order.
        link: one link for all ordered pairs, or a matrix `link[source][destination]`.
        device_speed: relative speed of each device (2.0 halves its times); None where all are equal.
        reduction: of gradients over replicas; None where there is one pipeline.
        overhead: of each pass, on a device of speed 1; none where it is not known.
    """

    layers: tuple[LayerCost, ...]
    link: Link | tuple[tuple[Link, ...], ...] = Link()
    device_speed: tuple[float, ...] | None = None
    reduction: Reduction | None = None
    overhead: PassOverhead = PassOverhead()

    def speed(self, device: int) -> float:
        return 1.0 if self.device_speed is None else self.device_speed[device]

    def link_between(self, source: int, destination: int) -> Link:
        return self.link if isinstance(self.link, Link) else self.link[source][destination]

    def transfer_seconds(self, source: int, destination: int, num_bytes: float) -> float:
        """Seconds from the end of a pass to the moment its output can be used; 0 on the same device."""
        return 0.0 if source == destination else self.link_between(source, destination).seconds(num_bytes)

    def reduction_seconds(self, chunk: ChunkCost) -> float:
        """Seconds to reduce a chunk's gradients, which are as large as its parameters."""
        return 0.0 if self.reduction is None else self.reduction.seconds(chunk.parameter_bytes)

    def chunk(self, layers: Sequence[int]) -> ChunkCost:
        """The cost of a run of layers, its passes' overhead included; what it sends is the output of its last layer."""
        items, overhead = [self.layers[i] for i in layers], self.overhead
        splits = all(c.backward is None for c in items) and overhead.backward_weight == 0.0
        return ChunkCost(
            forward=sum((c.forward for c in items), overhead.forward),
            backward_input=sum((c.backward_input for c in items), overhead.backward_input),
            backward_weight=sum((c.backward_weight for c in items), overhead.backward_weight),
            activation_bytes=sum(c.activation_bytes for c in items),
            weight_stash_bytes=sum(c.weight_stash_bytes for c in items),
            parameter_bytes=sum(c.parameter_bytes for c in items),
            output_bytes=items[-1].output_bytes,
            state_bytes=sum(c.parameter_bytes if c.state_bytes is None else c.state_bytes for c in items),
            backward=None if splits else sum((c.whole_backward for c in items), overhead.backward_input),
            transient_bytes=max(c.transient_bytes for c in items),
        )

    def workspace_bytes(self, layers: Sequence[int]) -> float:
        """The most that one pass of a run of layers holds only while it runs; see `LayerCost`."""
        parts = [self.layers[i].workspace_bytes for i in layers]
        one = max((size for part in parts for kind, size in part.items() if kind != "W"), default=0.0)
        return max(one, sum(part.get("W", 0.0) for part in parts))

    def chunks(self, partition: Partition) -> tuple[ChunkCost, ...]:
        return tuple(self.chunk(layers) for layers in partition.chunks)

    @property
    def num_stacked_layers(self) -> int:
        """Layers of the stack, without what runs before and after it."""
        return sum(layer.role is LayerRole.LAYER for layer in self.layers)

    @property
    def activation_bytes(self) -> float:
        """M_B of the whole model for one microbatch: the memory budget 1.0."""
        return sum(c.activation_bytes for c in self.layers)
