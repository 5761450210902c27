"""Which orders are levelled, how far and in which turn; see `levelling`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from lightning_zb.planning.instance import Instance, measure
from lightning_zb.planning.levelling import level
from lightning_zb.planning.random_stream import below, uniform

_WORK_OF_A_PIECE = 25_000_000  # passes that one levelling runs
_PIECES_OF_A_TURN, _PIECES_FOR_NEW = 10, 8
_HOT = (0.05, 0.15, 0.4)  # its first temperatures
_RUN_PER_LOOK = 8  # passes that levelling runs in the time in which the annealer looks at one
_KEPT = 4  # orders that wait for their turn


class Leveller:
    """Levels new orders and the best one in turn.

    Args:
        instance: the problem.
        least: lower bound of the span in seconds.
        own_start: 1 for step_time, 0 for makespan.
        stream: state of the random stream, advanced.
    """

    def __init__(self, instance: Instance, least: float, own_start: float, stream: np.ndarray) -> None:
        self._instance = instance
        self._least = least
        self._own_start = own_start
        self._stream = stream
        self._waiting: list[tuple[float, np.ndarray]] = []
        self._new: tuple[float, np.ndarray] | None = None
        self._best: tuple[float, np.ndarray] | None = None
        self._pieces = 0

    def add(self, cost: float, order: np.ndarray) -> None:
        """Let an order wait for its turn, with the few best.

        Args:
            cost: its span.
            order: that runs and fits.
        """
        self._waiting = sorted([*self._waiting, (cost, order)], key=lambda pair: pair[0])[:_KEPT]

    def run(self, work: int, best: Callable[[], np.ndarray]) -> Iterator[np.ndarray]:
        """Level a piece of work at a time: most pieces for one new order, some for the best, then for the next new one.

        Each piece goes on from what the one before made of the same order, unless that is worse.

        Args:
            work: in passes that the annealer looks at.
            best: the best order of all by now.

        Yields:
            What each piece made.
        """
        work *= _RUN_PER_LOOK
        pieces = max(1, work // _WORK_OF_A_PIECE)
        for _ in range(pieces):
            turn = self._pieces % _PIECES_OF_A_TURN
            self._pieces += 1
            if turn == 0 and self._waiting:
                self._new = self._waiting.pop(0)
            is_new = turn < _PIECES_FOR_NEW and self._new is not None
            if is_new:
                before = self._new
            else:
                order = best()
                before = self._measured(order)
                if self._best is not None and self._best[0] <= before[0]:
                    before = self._best
            assert before is not None
            after = self._measured(self._levelled(*before, work // pieces))
            if is_new:
                self._new = min(after, before, key=lambda pair: pair[0])
            else:
                self._best = min(after, before, key=lambda pair: pair[0])
            yield after[1]

    def _levelled(self, cost: float, order: np.ndarray, work: int) -> np.ndarray:
        levelled = order.copy()
        target = self._least + (0.45 + 0.5 * uniform(self._stream)) * (cost - self._least)
        hot = _HOT[below(self._stream, len(_HOT))]
        level(self._instance, levelled, self._stream, work, target, hot, 0.005, self._own_start)
        return levelled

    def _measured(self, order: np.ndarray) -> tuple[float, np.ndarray]:
        return measure(self._instance, order, self._own_start), order
