"""Random streams that do not depend on where a layer runs.

Code of a layer draws from a stream keyed by (seed, step, microbatch, layer), the step's own code between layers from
streams keyed by (seed, step, microbatch, number of layers passed). A device that skips a layer passes through the same
seeds, so every placement, schedule and number of devices draws the same numbers.

A layer's seed derives from the seed the generator was last given. Recomputation (activation checkpointing) restores
that state before it enters the layer again, so it draws the same numbers without being told which microbatch it is.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

_TAG = 0x2D21 << 48  # marks the seeds given here, so that a layer called outside any stream leaves the generators alone
_TAG_MASK = 0xFFFF << 48
_LOW_48 = (1 << 48) - 1
_LOW_64 = (1 << 64) - 1


def _mix(seed: int, key: int) -> int:
    """The next seed of a chain (splitmix64); its low 32 bits matter most: torch's CPU generator reads no others."""
    z = (seed * 0xBF58476D1CE4E5B9 + key * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) & _LOW_64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _LOW_64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _LOW_64
    return _TAG | ((z ^ (z >> 31)) & _LOW_48)


class RandomStreams:
    """Seeds torch, numpy and Python for the passes of one device.

    Args:
        seed: the run's seed, equal on all devices of a pipeline; replicas of data parallelism take different ones.
        device: the device whose CUDA generator is seeded along with the CPU's; the CPU alone otherwise.
    """

    def __init__(self, seed: int, device: torch.device | None = None) -> None:
        self._seed = seed & _LOW_48
        self._cuda = device if device is not None and device.type == "cuda" else None
        self._is_preserving = False

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Afterwards all generators are as they were; around a whole step, since numpy alone takes longer than a short pass."""
        if self._is_preserving:
            yield
            return
        torch_state, numpy_state, python_state = torch.default_generator.get_state(), np.random.get_state(), random.getstate()
        cuda_state = torch.cuda.get_rng_state(self._cuda) if self._cuda is not None else None
        self._is_preserving = True
        try:
            yield
        finally:
            self._is_preserving = False
            torch.default_generator.set_state(torch_state)
            np.random.set_state(numpy_state)
            random.setstate(python_state)
            if self._cuda is not None and cuda_state is not None:
                torch.cuda.set_rng_state(cuda_state, self._cuda)

    @contextmanager
    def microbatch(self, step: int, microbatch: int) -> Iterator[None]:
        """Inside, the step's code draws from the microbatch's stream.

        Args:
            step: counts optimizer steps, or evaluation batches; training and evaluation use disjoint numbers.
            microbatch: microbatch of the step.
        """
        with self.preserved():
            self._reseed(_mix(_mix(self._seed, step), microbatch))
            yield

    def enter_layer(self, layer: int) -> int:
        """Switch to the layer's stream.

        Args:
            layer: first position of the layer in the stack.

        Returns:
            The seed of the stream that was left, for `leave_layer`.
        """
        outside = torch.default_generator.initial_seed()
        self._reseed(_mix(outside, 2 * layer))
        return outside

    def leave_layer(self, layer: int, outside: int) -> None:
        """Switch to the stream of the step's code after a layer."""
        self._reseed(_mix(outside, 2 * layer + 1))

    def pass_layer(self, layer: int) -> None:
        """What entering and leaving a layer does to the step's stream, for a layer that runs elsewhere."""
        self.leave_layer(layer, torch.default_generator.initial_seed())

    @contextmanager
    def replayed_layer(self, layer: int) -> Iterator[None]:
        """A layer called outside a pass: the stream of its pass where it is recomputed, else no change.

        Recomputation restores torch's generators itself.
        """
        outside = torch.default_generator.initial_seed()
        if outside & _TAG_MASK != _TAG:
            yield
            return
        numpy_state, python_state = np.random.get_state(), random.getstate()
        try:
            self._reseed(_mix(outside, 2 * layer))
            yield
        finally:
            np.random.set_state(numpy_state)
            random.setstate(python_state)

    def _reseed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)
        random.seed(seed)
        if self._cuda is not None:
            torch.cuda.default_generators[self._cuda.index or 0].manual_seed(seed)
