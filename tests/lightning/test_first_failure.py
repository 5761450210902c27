"""Which failure of a job counts, and how it is told."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_zb.execution.transport import TransportError
from lightning_zb.first_failure import follows_from_a_lost_peer, note_failure


@pytest.fixture
def job() -> Iterator[None]:
    dist.init_process_group("fake", store=dist.HashStore(), rank=1, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError("first line\nsecond line"), "rank 1 failed first: ValueError: first line"),
        (RuntimeError("Caught Failure\nOriginal Traceback (most recent call last):\nFailure: its cause"), "Failure: its cause"),
        (SIGTERMException(), "rank 1 was ended by SIGTERM"),
        (KeyboardInterrupt(), "rank 1 was interrupted"),
    ],
)
def test_the_first_of_a_run_is_told_to_those_after_it(error, told, job):
    assert note_failure(error) is None
    assert str(note_failure(TransportError("device 1 does not answer"))).endswith(told)
    assert note_failure(KeyError("of the next fit"), run=1) is None


def test_the_line_of_the_users_code_is_part_of_it(job):
    try:
        torch.nn.Linear(2, 3)(torch.ones(1, 4))
    except RuntimeError as error:
        note_failure(error)
    told = str(note_failure(TransportError("device 1 does not answer")))
    assert re.search(r"mat1 and mat2 .* \(\S+test_first_failure.py, line \d+\)$", told), told


def test_alone_there_is_nobody_to_ask():
    assert note_failure(ValueError("mine")) is None


@pytest.mark.parametrize(
    ("error", "follows"),
    [
        (TransportError("device 1 has ended"), True),
        (dist.DistNetworkError("recvValue failed"), True),
        (RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("gloo"), False),
    ],
)
def test_what_follows_from_a_lost_peer(error, follows):
    assert follows_from_a_lost_peer(error) is follows
