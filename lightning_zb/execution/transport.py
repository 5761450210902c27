"""Messages between devices: who posts, takes and sends what, and how layouts are agreed on.

A transport knows nothing of passes. The executor posts receives in the sender's order, takes messages by name and
sends packets; `DistributedTransport` moves them over torch.distributed, `LocalTransport` within one process.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_zb.execution.channels import Channels
from lightning_zb.execution.payload import Layout, Packet
from lightning_zb.execution.program import Message, Program
from lightning_zb.execution.statistics import Statistics


class TransportError(RuntimeError):
    """A transfer failed: a peer died or timed out, or two sides disagree on a layout."""


class PeerRestarted(Exception):
    """A message came empty: its sender starts the step again and will send it anew."""


class Transport(Protocol):
    """Moves packets between the devices of one pipeline."""

    @property
    def statistics(self) -> Statistics:
        """Where this device counts what it does: here messages and bytes, in the executor all else."""
        ...

    def begin(self, program: Program, signatures: Sequence[Hashable]) -> None:
        """Start a step.

        Args:
            program: what all devices execute.
            signatures: for each microbatch what its layouts depend on, equal on all devices.
        """
        ...

    def post(self, message: Message, source: int) -> None:
        """Allocate for a message and start receiving it; called in the sender's order."""
        ...

    def ready(self, message: Message) -> bool:
        """Whether `take` would return at once; always true where taking may block."""
        ...

    def take(self, message: Message, source: int) -> Packet:
        """The packet of a posted message; waits for it.

        Raises:
            PeerRestarted: the sender starts the step again and has never computed this message.
        """
        ...

    def send(self, message: Message, destination: int, packet: Packet) -> None:
        """Start sending a packet; the transport keeps it alive until it has arrived."""
        ...

    def arrived(self, message: Message) -> None:
        """The answer to a message came back, so its send is over: free it."""
        ...

    def restart(self) -> None:
        """Start the step again, leaving nothing under way that belongs to what was thrown away.

        Peers count on every message this device sends before its validation point, and have sent theirs or will send
        something in their place: the rest of ours goes out empty, all of theirs are received and dropped.
        """
        ...

    def finish(self) -> None:
        """End the step: nothing stays posted; sends of the step before are freed."""
        ...

    def close(self) -> None:
        """Wait until everything sent has arrived; a process that ends before takes its last messages with it."""
        ...


@dataclass(slots=True)
class _Posted:
    """A receive under way: its buffers and what to wait for."""

    layout: Layout
    buffers: list[Tensor]
    works: list[Any]


@dataclass(slots=True)
class _Sending:
    """A send under way: what to wait for and the memory it reads."""

    message: Message
    destination: int
    works: list[Any]
    buffers: list[Tensor]


@dataclass(slots=True)
class DistributedTransport:
    """Packets over torch.distributed point-to-point.

    On gloo neither `is_completed` of a send or a receive is of use before `wait`, and waiting for a send blocks until
    the peer posts its receive. So nothing polls: an activation's send is waited for when its gradient comes back,
    everything else one step later.

    Args:
        channels: the process groups of the pipeline.
        statistics: of this device; messages and bytes are counted here.
    """

    channels: Channels
    statistics: Statistics = field(default_factory=Statistics)
    _program: Program | None = None
    _signatures: Sequence[Hashable] = ()
    _layouts: dict[Hashable, Layout] = field(default_factory=dict)
    _requested: dict[int, deque[Message]] = field(default_factory=dict)
    _posted: dict[Message, _Posted] = field(default_factory=dict)
    _sending: dict[Message, _Sending] = field(default_factory=dict)
    _sent_before: list[_Sending] = field(default_factory=list)
    _num_posted: Counter[int] = field(default_factory=Counter)
    _num_sent: Counter[int] = field(default_factory=Counter)

    def begin(self, program: Program, signatures: Sequence[Hashable]) -> None:
        self._program, self._signatures = program, signatures
        self._num_posted.clear()
        self._num_sent.clear()

    def post(self, message: Message, source: int) -> None:
        self._num_posted[source] += 1
        self._requested.setdefault(source, deque()).append(message)
        self._post_known(source)

    def ready(self, message: Message) -> bool:
        return True

    def take(self, message: Message, source: int) -> Packet:
        while message not in self._posted:  # a message before it, or it, has a layout not yet negotiated
            first = self._requested[source][0]
            layout = self._receive_header(first, source)
            if layout is None:
                self._requested[source].popleft()
                raise PeerRestarted
            self._layouts[self._key(first)] = layout
            self._post_known(source)
        posted = self._posted.pop(message)
        self._wait_received(message, source, posted)
        restored = [
            layout.restore(buffer.to("cpu" if layout.on_host else self.channels.compute_device))
            for layout, buffer in zip(posted.layout.tensors, posted.buffers, strict=True)
        ]
        return Packet(posted.layout, tuple(restored))

    def send(self, message: Message, destination: int, packet: Packet) -> None:
        key = self._key(message)
        known = self._layouts.get(key)
        sending = _Sending(message, destination, [], [])
        if known is None:
            self._layouts[key] = packet.layout
            self._send_header(sending, packet.layout)
        elif known != packet.layout:
            raise TransportError(
                f"device {self.channels.device} hands {packet.layout} as {message} to device {destination}, but microbatches "
                f"of this shape had {known} before; hand over tensors of shapes that follow from the batch"
            )
        with self._naming(f"sending {message}", destination):
            for layout, tensor in zip(packet.layout.tensors, packet.tensors, strict=True):
                self._isend(sending, layout.contiguous_view(tensor))
        self._sending[message] = sending
        self._num_sent[destination] += 1
        self.statistics.messages += 1
        self.statistics.sent_bytes += packet.layout.num_bytes

    def arrived(self, message: Message) -> None:
        sending = self._sending.pop(message, None)
        if sending is not None:
            self._wait_for([sending])

    def restart(self) -> None:
        assert self._program is not None
        here = self.channels.device
        for (source, destination), messages in self._program.sequences.items():
            if source == here:
                for message in messages[self._num_sent[destination] : self._program.committed[source, destination]]:
                    self._send_nothing(message, destination)
        for (source, destination), messages in self._program.sequences.items():
            if destination == here:
                promised = messages[: self._program.committed[source, destination]]
                for message in promised[self._num_posted[source] :]:
                    self.post(message, source)
                for message in promised:
                    self._drop(message, source)
        self._sent_before += self._sending.values()
        self._sending = {}
        self._num_posted.clear()
        self._num_sent.clear()

    def finish(self) -> None:
        self._wait_for(self._sent_before)
        self._sent_before = list(self._sending.values())
        self._sending = {}

    def close(self) -> None:
        self.finish()
        self.finish()

    def _key(self, message: Message) -> Hashable:
        assert self._program is not None
        return self._program.forward_only, message.kind, message.chunk, self._signatures[message.microbatch]

    def _post_known(self, source: int) -> None:
        """Post as far as layouts are known; the data of a pair must be posted in the sender's order."""
        queue = self._requested[source]
        while queue and (layout := self._layouts.get(self._key(queue[0]))) is not None:
            message = queue.popleft()
            with self._naming(f"posting the receive of {message}", source):
                buffers = [t.empty(self.channels.buffer_device) for t in layout.tensors]
                group, rank = self.channels.incoming(source)
                works = [dist.irecv(buffer, src=rank, group=group) for buffer in buffers]
            self._posted[message] = _Posted(layout, buffers, works)

    def _drop(self, message: Message, source: int) -> None:
        """Receive a message, if it was not taken before, for nothing."""
        while message in self._requested[source]:
            first = self._requested[source][0]
            layout = self._receive_header(first, source)
            if layout is None:
                self._requested[source].popleft()
            else:
                self._layouts[self._key(first)] = layout
            self._post_known(source)
        posted = self._posted.pop(message, None)
        if posted is not None:
            self._wait_received(message, source, posted)

    def _send_nothing(self, message: Message, destination: int) -> None:
        """Send zeros in place of a message, or, where its layout was never negotiated, a header that says so."""
        layout = self._layouts.get(self._key(message))
        sending = _Sending(message, destination, [], [])
        if layout is None:
            self._send_header(sending, None)
        else:
            with self._naming(f"sending {message} empty", destination):
                for tensor in layout.tensors:
                    self._isend(sending, tensor.empty(self.channels.buffer_device).zero_())
        self._sent_before.append(sending)

    def _wait_received(self, message: Message, source: int, posted: _Posted) -> None:
        with self._naming(f"waiting for {message}", source):
            for work in posted.works:
                work.wait()

    def _isend(self, sending: _Sending, tensor: Tensor) -> None:
        group, rank = self.channels.outgoing(sending.destination)
        buffer = tensor.to(self.channels.buffer_device)
        sending.works.append(dist.isend(buffer, dst=rank, group=group))
        sending.buffers.append(buffer)

    def _wait_for(self, sendings: list[_Sending]) -> None:
        for sending in sendings:
            with self._naming(f"finishing the send of {sending.message}", sending.destination):
                for work in sending.works:
                    work.wait()

    def _send_header(self, sending: _Sending, layout: Layout | None) -> None:
        """Send a layout, size first; size 0 stands for a message that will not come."""
        data = torch.tensor(list(layout.to_bytes() if layout is not None else b""), dtype=torch.uint8)
        rank = self.channels.ranks[sending.destination]
        with self._naming(f"sending the layout of {sending.message}", sending.destination):
            for tensor in (torch.tensor([len(data)]), data)[: 1 + (layout is not None)]:
                sending.works.append(dist.isend(tensor, dst=rank, group=self.channels.control))
                sending.buffers.append(tensor)

    def _receive_header(self, message: Message, source: int) -> Layout | None:
        size = torch.zeros(1, dtype=torch.int64)
        rank = self.channels.ranks[source]
        with self._naming(f"waiting for the layout of {message}", source):
            dist.recv(size, src=rank, group=self.channels.control)
            if not size:
                return None
            data = torch.empty(int(size), dtype=torch.uint8)
            dist.recv(data, src=rank, group=self.channels.control)
        return Layout.from_bytes(data.numpy().tobytes())

    @contextmanager
    def _naming(self, doing: str, peer: int) -> Iterator[None]:
        """Turn an error of torch.distributed into one that names device, pass and peer."""
        try:
            yield
        except (RuntimeError, ValueError) as error:
            raise TransportError(
                f"device {self.channels.device} failed {doing}: device {peer} has ended or does not answer ({error})"
            ) from error


@dataclass(slots=True)
class LocalTransport:
    """Packets within one process: all devices share one mailbox."""

    mailbox: dict[Message, Packet]
    statistics: Statistics = field(default_factory=Statistics)

    def begin(self, program: Program, signatures: Sequence[Hashable]) -> None:
        pass

    def post(self, message: Message, source: int) -> None:
        pass

    def ready(self, message: Message) -> bool:
        return message in self.mailbox

    def take(self, message: Message, source: int) -> Packet:
        return self.mailbox.pop(message)

    def send(self, message: Message, destination: int, packet: Packet) -> None:
        self.mailbox[message] = packet
        self.statistics.messages += 1
        self.statistics.sent_bytes += packet.layout.num_bytes

    def arrived(self, message: Message) -> None:
        pass

    def restart(self) -> None:
        pass

    def finish(self) -> None:
        pass

    def close(self) -> None:
        pass
