"""Gemma, DeepSeek and Nemotron-H in three sizes: the nine configurations that the second paper evaluates, as items.

Layers, vocabulary and hidden size are those of its table of model parameters; whatever the table leaves open has the
proportions of the published model of that family. README.md lists each assumption.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise

from lightning_zb.planning.costs import CostModel, LayerCost
from lightning_zb.planning.partitioning import balanced
from lightning_zb.planning.placement import cyclic
from recipes.costs.device import H800, Device
from recipes.costs.items import (
    Item,
    embedding,
    gated_mlp,
    head,
    latent_attention,
    mamba2,
    mixture,
    plain_mlp,
    self_attention,
)


@dataclass(frozen=True, slots=True)
class Configuration:
    """One model.

    Args:
        name: family and size.
        num_layers: L of the paper.
        vocabulary: V.
        width: H.
        items: its items for a number of tokens, on nodes of a number of devices.
        items_per_layer: how many items one of the L layers is.
    """

    name: str
    num_layers: int
    vocabulary: int
    width: int
    items: Callable[[Configuration, int, int], list[Item]]
    items_per_layer: int

    def costs(self, tokens: int, device: Device = H800) -> CostModel:
        """What it costs with microbatches of one sequence of so many tokens."""
        items = self.items(self, tokens, device.node)
        return CostModel(tuple(item.cost(device, tokens, self.width) for item in items), device.link)

    def even_counts(self, num_chunks: int) -> list[int] | None:
        """Items of each chunk when each gets as many whole layers as any other, a remainder going to the middle ones.

        None where there are fewer layers than chunks.
        """
        base, remainder = divmod(self.num_layers, num_chunks)
        if base == 0:
            return None
        longer = range((num_chunks - remainder) // 2, (num_chunks + remainder) // 2)
        return [self.items_per_layer * (base + (c in longer)) for c in range(num_chunks)]

    def balanced_counts(self, costs: CostModel, num_chunks: int) -> list[int] | None:
        """Items of each chunk when whole layers are cut so that the largest chunk is smallest; the ends ride along.

        None where there are fewer layers than chunks.
        """
        if self.num_layers < num_chunks:
            return None
        widths = [self.items_per_layer] * self.num_layers
        widths[0] += 1
        widths[-1] += 1
        ends = list(accumulate(widths, initial=0))
        layers = [costs.chunk(range(a, b)) for a, b in pairwise(ends)]
        whole = CostModel(tuple(LayerCost("", c.forward, c.backward_input, c.backward_weight) for c in layers))
        return [sum(widths[i] for i in chunk) for chunk in balanced(whole, cyclic(num_chunks)).chunks]


def gemma_items(config: Configuration, tokens: int, node: int) -> list[Item]:
    """Gemma 3: five layers that slide over 1024 tokens, then one that sees all; norms on both sides of a block."""
    width, head_width = config.width, 256
    heads = width // head_width
    items = [embedding(tokens, config.vocabulary, width)]
    for i in range(config.num_layers):
        window = None if i % 6 == 5 else 1024
        items.append(
            self_attention(
                f"layers.{i}.attention", tokens, width, heads, heads // 2, head_width, window, sandwiched=True, head_norms=True
            )
        )
        items.append(gated_mlp(f"layers.{i}.mlp", tokens, width, 4 * width, sandwiched=True))
    return [*items, head(tokens, config.vocabulary, width)]


def deepseek_items(config: Configuration, tokens: int, node: int) -> list[Item]:
    """DeepSeek with the widths of V2-Lite; the first layers are dense, as many of them as V3 has, 3 of 61."""
    width, num_dense = config.width, round(3 * config.num_layers / 61)
    items = [embedding(tokens, config.vocabulary, width)]
    for i in range(config.num_layers):
        items.append(latent_attention(f"layers.{i}.attention", tokens, width, 16, 128, 64, 128, 512))
        if i < num_dense:
            items.append(gated_mlp(f"layers.{i}.mlp", tokens, width, 10944))
        else:
            items.append(mixture(f"layers.{i}.experts", tokens, width, 1408, 64, 6, 2, node))
    return [*items, head(tokens, config.vocabulary, width)]


def nemotron_h_items(config: Configuration, tokens: int, node: int) -> list[Item]:
    """Nemotron-H with the proportions of the 8B model: one mixer or feed-forward block a layer."""
    width, items = config.width, [embedding(tokens, config.vocabulary, config.width)]
    for i, letter in enumerate(nemotron_h_pattern(config.num_layers)):
        if letter == "M":
            items.append(mamba2(f"layers.{i}.mamba", tokens, width, width // 32, 64, 8, 128))
        elif letter == "*":
            items.append(self_attention(f"layers.{i}.attention", tokens, width, width // 128, width // 512, 128))
        else:
            items.append(plain_mlp(f"layers.{i}.mlp", tokens, width, 21 * width // 4))
    return [*items, head(tokens, config.vocabulary, width)]


def nemotron_h_pattern(num_layers: int) -> str:
    """Mamba-2 (`M`) and feed-forward (`-`) in turn, an attention layer (`*`) for every 13 layers in the middle of each such
    stretch; 52 layers give the 24, 24 and 4 of the 8B model, though not all in its places."""
    num_attention = round(num_layers / 13)
    places = {round((k + 0.5) * num_layers / num_attention) for k in range(num_attention)}
    letters, turn = [], 0
    for i in range(num_layers):
        if i in places:
            letters.append("*")
        else:
            letters.append("M-"[turn % 2])
            turn += 1
    return "".join(letters)


_FAMILIES = {
    "gemma": (gemma_items, 1536, 2, {"small": (32, 256), "medium": (64, 512), "large": (128, 1024)}),
    "deepseek": (deepseek_items, 2048, 2, {"small": (16, 128), "medium": (32, 256), "large": (64, 512)}),
    "nemotron-h": (nemotron_h_items, 1024, 1, {"small": (28, 128), "medium": (56, 256), "large": (112, 512)}),
}

CONFIGURATIONS: Mapping[str, Configuration] = {
    f"{family}-{size}": Configuration(f"{family}-{size}", layers, vocabulary * 1024, width, items, items_per_layer)
    for family, (items, width, items_per_layer, sizes) in _FAMILIES.items()
    for size, (layers, vocabulary) in sizes.items()
}
"""By name, such as `gemma-small`."""
