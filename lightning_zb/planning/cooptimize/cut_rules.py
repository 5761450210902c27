"""Which neighbouring items may be cut apart, which must be: what a user demands of a partition."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lightning_zb.planning.costs import CostModel
from lightning_zb.planning.placement import Partition

Item = int | str
"""An item of a cost model: its index, or its name where that is unique."""
Constraints = Mapping[str, Sequence]
"""`together`: groups of items that share a chunk; `first`: items that begin their chunk; `alone`: items that are one."""


@dataclass(frozen=True, slots=True)
class CutRules:
    """Demands on the cuts between items; cut i lies between the items i - 1 and i.

    Args:
        forbidden: cuts that no partition has.
        forced: cuts that every partition has.
    """

    forbidden: frozenset[int] = frozenset()
    forced: frozenset[int] = frozenset()

    def allows(self, partition: Partition) -> bool:
        """Whether a partition keeps to them."""
        cuts = {chunk[0] for chunk in partition.chunks[1:]}
        return self.forced <= cuts and not cuts & self.forbidden


def cut_rules(
    costs: CostModel,
    together: Iterable[Sequence[Item]] = (),
    first: Iterable[Item] = (),
    alone: Iterable[Item] = (),
) -> CutRules:
    """Read demands in terms of items.

    Args:
        costs: names the items.
        together: groups of items; all from the least to the largest of a group share a chunk.
        first: items that begin their chunk.
        alone: items that are a chunk of their own.

    Raises:
        ValueError: an item is unknown, a name is not unique, or two demands contradict each other.
    """
    num_items = len(costs.layers)
    forbidden: set[int] = set()
    for group in together:
        positions = [_position(item, costs) for item in group]
        forbidden.update(range(min(positions) + 1, max(positions) + 1))
    forced = {_position(item, costs) for item in first}
    for item in alone:
        position = _position(item, costs)
        forced.update((position, position + 1))
    forced -= {0, num_items}
    both = sorted(forced & forbidden)
    if both:
        names = costs.layers[both[0] - 1].name, costs.layers[both[0]].name
        raise ValueError(f"items {names[0]!r} and {names[1]!r} are to share a chunk and to be cut apart; drop one of the two")
    return CutRules(frozenset(forbidden), frozenset(forced))


def read_constraints(constraints: Constraints | None, costs: CostModel) -> CutRules:
    """The rules that a user's constraints are.

    Args:
        constraints: as users write them; None for none.
        costs: names the items.

    Raises:
        ValueError: as `cut_rules`; or a constraint has another name, or is no list.
    """
    given = dict(constraints or {})
    for name, items in given.items():
        groups = items if name == "together" and isinstance(items, Sequence) else [items]
        if name not in ("together", "first", "alone"):
            raise ValueError(f"constraint {name!r} is unknown; there are 'together', 'first' and 'alone'")
        if isinstance(items, str) or not all(isinstance(g, Sequence) and not isinstance(g, str) for g in groups):
            example = [["layers.0", "layers.1"]] if name == "together" else ["layers.0"]
            raise ValueError(
                f"constraint {name}={items!r} is no list of {'groups' if groups is items else 'items'}; write {example}"
            )
    return cut_rules(costs, **given)


def _position(item: Item, costs: CostModel) -> int:
    names = [layer.name for layer in costs.layers]
    if isinstance(item, int):
        if not 0 <= item < len(names):
            raise ValueError(f"item {item} is unknown; the {len(names)} items count from 0")
        return item
    if names.count(item) != 1:
        what = "is unknown" if item not in names else f"names {names.count(item)} items; write its index"
        raise ValueError(f"item {item!r} {what}; the items are {', '.join(dict.fromkeys(names))}")
    return names.index(item)
