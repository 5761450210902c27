"""How layers are cut into chunks: by count, by cost, or as told."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from lightning_zb.planning.costs import CostModel, LayerRole
from lightning_zb.planning.placement import Partition, Placement

PartitionSpec = str | Sequence[int]


class TooFewLayers(ValueError):
    """A partition would have more chunks than the model has layers."""


def make_partition(spec: PartitionSpec, costs: CostModel, placement: Placement) -> Partition:
    """Cut the layers for a placement.

    Args:
        spec: `"even"`, `"balanced"`, or the number of layers of each chunk.
        costs: the layers, and the device speeds that `"balanced"` uses.
        placement: one chunk for each of its entries.

    Raises:
        ValueError: the specification is unknown or does not fit.
    """
    if spec == "even":
        return even(costs, placement.num_chunks)
    if spec == "balanced":
        return balanced(costs, placement)
    if isinstance(spec, str):
        raise ValueError(
            f"partition {spec!r} is unknown; write 'even', 'balanced' or a list of layer counts such as [3, 4, 4, 3]"
        )
    return from_layer_counts(spec, costs, placement.num_chunks)


def even(costs: CostModel, num_chunks: int) -> Partition:
    """Chunks of equal layer counts, the remainder going to the middle ones.

    What runs before the stack rides with the first chunk and what runs after it with the last, so these are the ones that
    should not get a layer more.

    Raises:
        TooFewLayers: there are fewer layers than chunks.
    """
    num_layers = costs.num_stacked_layers
    if num_layers < num_chunks:
        raise TooFewLayers(
            f"{num_chunks} chunks need at least {num_chunks} layers, the model has {num_layers}; "
            "use fewer devices or a schedule with fewer chunks per device"
        )
    base, remainder = divmod(num_layers, num_chunks)
    first_longer = (num_chunks - remainder) // 2
    counts = [base + (first_longer <= c < first_longer + remainder) for c in range(num_chunks)]
    return _with_ends(counts, costs)


def from_layer_counts(counts: Sequence[int], costs: CostModel, num_chunks: int) -> Partition:
    """Chunks of the given counts, which cover either the stacked layers (ends ride along) or all items.

    Raises:
        ValueError: there is not one count for each chunk, or the counts do not add up.
    """
    if len(counts) != num_chunks:
        raise ValueError(
            f"partition {list(counts)} has {len(counts)} chunks, the placement has {num_chunks}; write {num_chunks} counts"
        )
    num_layers, num_items = costs.num_stacked_layers, len(costs.layers)
    if sum(counts) == num_items:
        return Partition.from_counts(counts)
    if sum(counts) != num_layers:
        with_ends = f" (or to {num_items} with what runs before and after them)" if num_items > num_layers else ""
        raise ValueError(
            f"partition {list(counts)} covers {sum(counts)} layers; write counts that add up to {num_layers} layers{with_ends}"
        )
    return _with_ends(counts, costs)


def balanced(costs: CostModel, placement: Placement) -> Partition:
    """The contiguous cut whose largest chunk, F + B + W over its device's speed, is smallest (dynamic programming).

    Everything counts, embeddings and head too, so an end may become a chunk of its own.

    Raises:
        ValueError: there are fewer items than chunks.
    """
    num_items, num_chunks = len(costs.layers), placement.num_chunks
    if num_items < num_chunks:
        raise ValueError(f"{num_chunks} chunks need at least {num_chunks} layers, the model has {num_items}")
    prefix = np.concatenate([[0.0], np.cumsum([c.work for c in costs.layers])])
    # best[i]: the smallest largest chunk that the first i items can have in the chunks so far
    best = np.where(np.arange(num_items + 1) == 0, 0.0, np.inf)
    cuts = []
    for chunk in range(num_chunks):
        speed = costs.speed(placement.devices[chunk])
        largest = np.maximum(best[:, None], (prefix[None, :] - prefix[:, None] + costs.overhead.work) / speed)  # [cut, end]
        largest[np.tril_indices(num_items + 1)] = np.inf  # a chunk is not empty
        cuts.append(largest.argmin(axis=0))
        best = largest.min(axis=0)
    ends = [num_items]
    for cut in reversed(cuts):
        ends.append(int(cut[ends[-1]]))
    ends.reverse()
    return Partition.from_counts([b - a for a, b in pairwise(ends)])


def _with_ends(counts: Sequence[int], costs: CostModel) -> Partition:
    roles = [layer.role for layer in costs.layers]
    full = list(counts)
    full[0] += roles.count(LayerRole.PROLOGUE)
    full[-1] += roles.count(LayerRole.EPILOGUE)
    return Partition.from_counts(full)
