"""Latency and bandwidth between devices, from a few ping-pongs on the way that payloads take."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from time import perf_counter, sleep

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zb.execution.channels import Channels
from lightning_zb.planning.costs import Link

_NUM_PINGS = 7
_SMALL = 64  # bytes: a transfer that is all latency
_SMALLEST_PAYLOAD, _LARGEST_PAYLOAD = 1 << 16, 1 << 24

Ping = Callable[[int, int], float]
"""Sends some bytes there and some back: (bytes there, bytes back) -> seconds of the round trip."""


def fit_links(ping: Ping, payload_bytes: int) -> tuple[Link, Link]:
    """The links there and back from round trips of small and of large messages.

    Half a small round trip is the latency; what a large message adds in one direction is its size over the bandwidth.

    Args:
        ping: makes one round trip.
        payload_bytes: size of the large messages.
    """
    for _ in range(2):  # connections and buffers are set up on first use
        ping(payload_bytes, payload_bytes)
    small = statistics.median(ping(_SMALL, _SMALL) for _ in range(_NUM_PINGS))
    there = statistics.median(ping(payload_bytes, _SMALL) for _ in range(_NUM_PINGS))
    back = statistics.median(ping(_SMALL, payload_bytes) for _ in range(_NUM_PINGS))
    return tuple(_link(small / 2, payload_bytes, large - small) for large in (there, back))  # type: ignore[return-value]


def _link(latency: float, num_bytes: int, seconds: float) -> Link:
    return Link(latency, num_bytes / seconds if seconds > 0 else float("inf"))


def measure_links(
    channels: Channels, payload_bytes: float, delay: Callable[[int, int, int], float] | None = None
) -> tuple[tuple[Link, ...], ...]:
    """Measure the pairs of devices that hold adjacent chunks, one at a time; every device calls it between steps.

    Nothing of a step is under way then, so the payloads' own groups are free.

    Args:
        channels: of this device.
        payload_bytes: what a transfer between chunks usually carries.
        delay: seconds by which (source, destination, bytes) is slowed down, to emulate a slower link.

    Returns:
        On every device the matrix of links, source by destination; pairs that do not communicate get the median link.
    """
    num_devices = len(channels.ranks)
    size = int(min(max(payload_bytes, _SMALLEST_PAYLOAD), _LARGEST_PAYLOAD))
    found: dict[tuple[int, int], Link] = {}
    for first, second in sorted({(min(pair), max(pair)) for pair in channels.data}):
        dist.barrier(channels.control)  # a pair that waits must not be timed
        if channels.device not in (first, second):
            continue
        wire = _Wire(channels, second if channels.device == first else first, delay)
        if channels.device == first:
            found[first, second], found[second, first] = fit_links(wire.ping, size)
            wire.stop()
        else:
            wire.answer()
    gathered: list[dict[tuple[int, int], Link]] = [{} for _ in range(num_devices)]
    dist.all_gather_object(gathered, found, group=channels.control)
    links = {pair: link for part in gathered for pair, link in part.items()}
    usual = _usual(list(links.values()))
    return tuple(tuple(Link() if a == b else links.get((a, b), usual) for b in range(num_devices)) for a in range(num_devices))


def _usual(links: Sequence[Link]) -> Link:
    """The median link; what is assumed of pairs that have nothing to say to each other yet."""
    if not links:
        return Link()
    return Link(statistics.median(link.latency for link in links), statistics.median(link.bandwidth for link in links))


class _Wire:
    """One end of a ping-pong. A message announces its size and that of the answer, so that one side decides alone."""

    def __init__(self, channels: Channels, peer: int, delay: Callable[[int, int, int], float] | None) -> None:
        self._outgoing, self._rank = channels.outgoing(peer)
        self._incoming, _ = channels.incoming(peer)
        self._delay = delay
        self._device, self._here, self._there = channels.buffer_device, channels.device, peer
        self._buffers: dict[int, Tensor] = {}

    def ping(self, there: int, back: int) -> float:
        """A round trip with messages of these bytes; its seconds."""
        self._send(self._sizes(there, back))
        self._receive_into(self._buffer(_SMALL))  # the other side has posted what follows
        start = perf_counter()
        self._send(self._buffer(there), slowed=True)
        self._receive_into(self._buffer(back))
        return perf_counter() - start

    def stop(self) -> None:
        """End the other side's `answer`."""
        self._send(self._sizes(0, 0))

    def answer(self) -> None:
        """Answer round trips until the other side stops."""
        sizes = self._sizes(0, 0)
        while True:
            self._receive_into(sizes)
            there, back = sizes.tolist()
            if not there:
                return
            buffer = self._buffer(there)
            work = dist.irecv(buffer, src=self._rank, group=self._incoming)
            self._send(self._buffer(_SMALL))
            assert work is not None
            work.wait()
            self._settle()
            self._send(self._buffer(back), slowed=True)

    def _sizes(self, there: int, back: int) -> Tensor:
        return torch.tensor([there, back], device=self._device)

    def _buffer(self, num_bytes: int) -> Tensor:
        return self._buffers.setdefault(num_bytes, torch.zeros(num_bytes, dtype=torch.uint8, device=self._device))

    def _send(self, tensor: Tensor, slowed: bool = False) -> None:
        if slowed and self._delay is not None:
            sleep(self._delay(self._here, self._there, tensor.numel()))
        dist.send(tensor, dst=self._rank, group=self._outgoing)

    def _receive_into(self, tensor: Tensor) -> None:
        dist.recv(tensor, src=self._rank, group=self._incoming)
        self._settle()

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def clock_offsets(channels: Channels) -> tuple[float, ...]:
    """For each device by how many seconds its host's `perf_counter` is ahead of the first device's.

    Hosts exchange readings over the control group; the shortest round trip of several bounds the error.
    """
    mine = 0.0
    for device in range(1, len(channels.ranks)):
        if channels.device == 0:
            for _ in range(_NUM_PINGS):
                _exchange_reading(channels, device)
        elif channels.device == device:
            readings = [_read_first(channels) for _ in range(_NUM_PINGS)]
            mine = min(readings)[1]
    gathered: list[float] = [0.0] * len(channels.ranks)
    dist.all_gather_object(gathered, mine, group=channels.control)
    by_rank = dict(zip(sorted(channels.ranks), gathered, strict=True))
    return tuple(by_rank[rank] for rank in channels.ranks)


def _exchange_reading(channels: Channels, device: int) -> None:
    reading = torch.zeros(1, dtype=torch.float64)
    dist.recv(reading, src=channels.ranks[device], group=channels.control)
    reading[0] = perf_counter()
    dist.send(reading, dst=channels.ranks[device], group=channels.control)


def _read_first(channels: Channels) -> tuple[float, float]:
    """A reading of the first device's clock: the round trip's seconds and this clock's lead."""
    reading = torch.zeros(1, dtype=torch.float64)
    start = perf_counter()
    dist.send(reading, dst=channels.ranks[0], group=channels.control)
    dist.recv(reading, src=channels.ranks[0], group=channels.control)
    end = perf_counter()
    return end - start, (start + end) / 2 - float(reading)
