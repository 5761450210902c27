"""Pipeline layouts as Megatron-LM writes them (`--pipeline-model-parallel-layout`), such as `Et*3|(tt|)*29,m|L`.

The part that is read: `E` (embedding), `t` (a layer), `m` (a layer too, of multi-token prediction), `L` (final norm, head
and loss), `|` between stages, round brackets around a group, `*n` after an item or a group to repeat it, and commas and
blanks, which mean nothing. Stages stand in model order and go to the devices 0, 1, ..., P-1, 0, 1, ... in turn. A stage
without items cannot run here; two at the same place are an error.
"""

from __future__ import annotations

import re

from lightning_zb.planning.costs import CostModel, LayerRole
from lightning_zb.planning.placement import Partition, Placement, cyclic

_GROUP = re.compile(r"\(([^()]*)\)(?:\*(\d+))?")
_REPEATED = re.compile(r"([EtmL])\*(\d+)")
_LAYOUT = re.compile(r"[EtmL|(),*\d\s]+")
_LETTERS = {LayerRole.PROLOGUE: "E", LayerRole.LAYER: "t", LayerRole.EPILOGUE: "L"}


def is_layout(text: str) -> bool:
    """Whether a text that says how to cut layers is a layout, and not one of the words `even`, `balanced` and `auto`."""
    return "|" in text or bool(re.search("[EtmL]", text) and _LAYOUT.fullmatch(text))


def read_layout(text: str, costs: CostModel, num_devices: int) -> tuple[Partition, Placement]:
    """The partition and placement of a layout.

    Args:
        text: the layout.
        costs: whose items it cuts; `E` and `L` are its prologue and epilogue, which both may be several items.
        num_devices: P.

    Raises:
        ValueError: the layout cannot be read or is not one of these items and devices.
    """
    stages = _expanded(text).split("|")
    for number, stage in enumerate(stages):
        if not stage:
            raise ValueError(f"layout {text!r} has no items in stage {number}; give it one or take a '|' away")
    if len(stages) % num_devices:
        raise ValueError(
            f"layout {text!r} has {len(stages)} stages for {num_devices} devices; write a multiple of {num_devices}"
        )
    roles = [layer.role for layer in costs.layers]
    width = {"E": roles.count(LayerRole.PROLOGUE), "L": roles.count(LayerRole.EPILOGUE), "t": 1, "m": 1}
    flat = "".join(stages)
    wanted = "E" * bool(width["E"]) + "t" * costs.num_stacked_layers + "L" * bool(width["L"])
    if flat.replace("m", "t") != wanted:
        raise ValueError(
            f"layout {text!r} has the items {_short(flat)}, but the model has {_short(wanted)}: "
            "one E, each layer as a t or m, one L, in this order"
        )
    return Partition.from_counts([sum(width[item] for item in stage) for stage in stages]), cyclic(
        num_devices, len(stages) // num_devices
    )


def write_layout(partition: Partition, placement: Placement, costs: CostModel) -> str:
    """The layout of a partition, as `read_layout` reads it.

    Args:
        partition: of the items of `costs`.
        placement: chunks on the devices 0, 1, ..., P-1 in turn.
        costs: whose items it cuts.

    Raises:
        ValueError: chunks are placed otherwise, or an end of several items is cut apart.
    """
    p = placement.num_devices
    if placement != cyclic(p, max(1, placement.num_chunks // p)):
        raise ValueError(
            f"placement {list(placement.devices)} has no layout: its chunks do not go to the devices 0 to {p - 1} in turn; "
            "write a plan file instead"
        )
    stages: list[str] = []
    seen: set[str] = set()
    for chunk in partition.chunks:
        letters = ""
        for letter in (_LETTERS[costs.layers[i].role] for i in chunk):
            if letter == "t" or not letters.endswith(letter):
                letters += letter
        cut_apart = seen & (set(letters) - {"t"})
        if cut_apart:
            raise ValueError(
                f"the partition cuts {min(cut_apart)!r} apart, which a layout cannot say; write a plan file instead"
            )
        seen |= set(letters)
        stages.append(re.sub(r"t{2,}", lambda match: f"t*{len(match[0])}", letters))
    return "|".join(stages)


def _expanded(text: str) -> str:
    plain = re.sub(r"[,\s]", "", text)
    while (group := _GROUP.search(plain)) is not None:
        plain = plain[: group.start()] + group[1] * int(group[2] or 1) + plain[group.end() :]
    plain = _REPEATED.sub(lambda match: match[1] * int(match[2]), plain)
    strange = re.sub(r"[EtmL|]", "", plain)
    if strange[:1] in ("(", ")"):
        other = ")" if strange[0] == "(" else "("
        raise ValueError(f"layout {text!r} has a {strange[0]!r} without its {other!r}; write a group as (tt|)*2")
    if strange:
        raise ValueError(f"layout {text!r} has {strange[0]!r}, which is not one of E, t, m, L, |, (...), *n and commas")
    return plain


def _short(items: str) -> str:
    return " ".join(f"{m[0][0]}*{len(m[0])}" for m in re.finditer(r"E+|t+|m+|L+", items)) or "none"
