"""What passes hold only while they run, from the figures of CUDA's allocator."""

from __future__ import annotations

import torch

Part = tuple[int, str]
"""A chunk, and "F", "B" or "W"."""


class Workspace:
    """The most bytes that each chunk's F, B and W had beyond what was allocated before and after.

    The allocator counts on the host, so nothing is synchronised. Its record of the peak starts anew with every pass.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = 0
        self.bytes: dict[Part, float] = {}
        """By part; the largest over microbatches."""

    def begin(self) -> None:
        """A part starts."""
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before = torch.cuda.memory_allocated(self._device)

    def end(self, part: Part) -> None:
        """The part is over."""
        stays = max(self._before, torch.cuda.memory_allocated(self._device))
        own = float(torch.cuda.max_memory_allocated(self._device) - stays)
        self.bytes[part] = max(self.bytes.get(part, 0.0), own)

    def of_chunk(self, chunk: int) -> dict[str, float]:
        """Bytes by part of a chunk."""
        return {name: size for (c, name), size in self.bytes.items() if c == chunk}


def workspace_of(device: torch.device) -> Workspace | None:
    """The meter of a device; None on a CPU, whose allocators do not tell."""
    return Workspace(device) if device.type == "cuda" else None
