"""Tuning of one layout: the phase that costs most first, what does not help is rolled back."""

from __future__ import annotations

import time
from collections.abc import Iterator, Set
from dataclasses import dataclass

import numpy as np

from lightning_zb.planning.cooptimize.balancing import Loads, level
from lightning_zb.planning.cooptimize.layout import Layout
from lightning_zb.planning.cooptimize.moves import partition_moves, placement_moves, shaken
from lightning_zb.planning.cooptimize.phases import Phase, losses
from lightning_zb.planning.cooptimize.scoring import Score, Scorer

_PASSES_PER_MOVE = 500  # that could be placed in the time in which a layout is made of another
_GAIN = 1e-4  # a step must save this share of the step time


@dataclass(frozen=True, slots=True)
class Climb:
    """What tuning needs beside a layout.

    Args:
        scorer: judges layouts.
        loads: of the items.
        phases: that may change.
        alike: whether all devices are interchangeable.
        stream: of random numbers.
        deadline: `time.perf_counter()` after which to stop.
    """

    scorer: Scorer
    loads: Loads
    phases: Set[Phase]
    alike: bool
    stream: np.ndarray
    deadline: float | None = None

    def tune(self, start: Score, passes: int) -> Score:
        """Improve a layout until nothing helps or so many passes have been placed in all.

        Args:
            start: where to begin.
            passes: `Scorer.passes` at which to stop.
        """
        best = start
        floor = self.loads.floor * self.scorer.num_microbatches
        while not self._spent(passes) and best.estimate > floor * (1.0 + _GAIN):
            better = None
            for phase in losses(best.value, best.bound, best.work, floor):
                if phase in self.phases:
                    better = self._first_better(self._neighbours(best, phase), best, passes)
                if better is not None:
                    break
            if better is None:
                return best
            best = better
        return best

    def explore(self, start: Score, passes: int) -> Score:
        """Climb again and again from places near the best one, until so many passes have been placed."""
        best = start
        floor = self.loads.floor * self.scorer.num_microbatches
        while not self._spent(passes) and best.estimate > floor * (1.0 + _GAIN):
            layout = shaken(best.layout, self.loads, self.stream)
            self.scorer.passes += _PASSES_PER_MOVE
            if layout is None or not self.loads.allows(layout):
                continue
            if self.loads.of(layout).max() * self.scorer.num_microbatches >= best.estimate:
                continue
            score = self.scorer.score(layout)
            if score is None or score.bound >= best.estimate:
                continue
            found = self.tune(score, min(passes, self.scorer.passes + (passes - self.scorer.passes) // 4))
            if found.estimate < best.estimate:
                best = found
        return best

    def _neighbours(self, score: Score, phase: Phase) -> Iterator[Layout]:
        """The second paper's stop rule ends the moves of layers: devices idle alike up to the largest chunk's work."""
        if phase is Phase.PARTITION:
            layout = score.layout
            per_chunk = np.diff(self.loads.work[list(layout.cuts)]) / self.loads.speed[list(layout.devices)]
            if max(score.idle) - min(score.idle) >= per_chunk.max():
                yield from partition_moves(score, self.loads)
            yield level(self.loads, layout, self.stream)
        elif phase is Phase.PLACEMENT:
            yield from placement_moves(score, self.loads, self.stream, self.alike)

    def _first_better(self, layouts: Iterator[Layout], best: Score, passes: int) -> Score | None:
        ceiling = best.estimate * (1.0 - _GAIN)
        for layout in layouts:
            if self._spent(passes):
                return None
            self.scorer.passes += _PASSES_PER_MOVE
            if Phase.PARTITION not in self.phases and layout.counts != best.layout.counts:
                continue
            if not self.loads.allows(layout):
                continue
            if self.loads.of(layout).max() * self.scorer.num_microbatches >= ceiling:
                continue
            score = self.scorer.score(layout, ceiling)
            if score is not None and score.estimate < ceiling:
                return score
        return None

    def _spent(self, passes: int) -> bool:
        return self.scorer.passes >= passes or (self.deadline is not None and time.perf_counter() > self.deadline)
