"""The device that the analytic costs are for: what it does in a second, by kind of operation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, unique

from lightning_zb.planning.costs import Link


@unique
class Kind(Enum):
    """What bounds an operation's time."""

    MATMUL = "matmul"  # one dense product, FLOPs
    GROUPED = "grouped"  # products of many experts with few tokens each, FLOPs
    ATTENTION = "attention"  # fused attention, FLOPs
    SCAN = "scan"  # chunked state-space scan, FLOPs
    MEMORY = "memory"  # elementwise work, lookups, reductions: bytes read and written
    EXCHANGE = "exchange"  # all-to-all within a node: bytes sent


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator, and how it is joined to others.

    Args:
        name: in words.
        capacity: bytes of memory.
        peak: FLOP/s of a dense bf16 product for kinds that compute; bytes/s for those that move data.
        efficiency: the share of the peak that an operation of the kind reaches.
        link: to the device that holds the next chunk.
        node: devices that share a node: experts and optimizer states are sharded over them.
    """

    name: str
    capacity: float
    peak: Mapping[Kind, float]
    efficiency: Mapping[Kind, float]
    link: Link
    node: int

    def seconds(self, kind: Kind, amount: float) -> float:
        """Time of so many FLOPs or bytes."""
        return amount / (self.peak[kind] * self.efficiency[kind])


_FLOPS, _MEMORY, _NVLINK = 989e12, 3.35e12, 200e9

H800 = Device(
    name="NVIDIA H800 SXM",
    capacity=80e9,
    peak={
        Kind.MATMUL: _FLOPS,
        Kind.GROUPED: _FLOPS,
        Kind.ATTENTION: _FLOPS,
        Kind.SCAN: _FLOPS,
        Kind.MEMORY: _MEMORY,
        Kind.EXCHANGE: _NVLINK,
    },
    efficiency={
        Kind.MATMUL: 0.65,
        Kind.GROUPED: 0.45,
        Kind.ATTENTION: 0.40,
        Kind.SCAN: 0.12,
        Kind.MEMORY: 0.80,
        Kind.EXCHANGE: 0.70,
    },
    link=Link(latency=20e-6, bandwidth=0.8 * 50e9),
    node=8,
)
"""The device of the second paper's testbed: dense bf16 peak, HBM3, NVLink at 200 GB/s a direction, one 400 Gb/s network card a
device. Efficiencies are what public kernels are known to reach on this generation at a few thousand tokens; see README.md."""
