"""Planning beside training: who learns of the outcome when, and what errors become."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from lightning_zb.deliberation import Deliberation
from lightning_zb.execution.channels import Channels, open_channels
from lightning_zb.planning.placement import cyclic
from tests.execution.processes import run_processes
from tests.lightning.processes import ROOT

ENDS_EARLY = """
import sys, threading, time
import torch
from lightning_zb.deliberation import Deliberation

class Native(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        begun.set()
        for _ in range(100):
            time.sleep(0.005)
        return gradient

class EndsLate:
    def __del__(self, sleep=time.sleep):
        sleep(1)

begun = threading.Event()
sys.modules["ends_late"] = EndsLate()
Deliberation(lambda: Native.apply(torch.ones(1, requires_grad=True)).sum().backward(), None)
begun.wait()
raise CAUSE("of the user's code")
"""


def test_training_goes_on_while_it_thinks():
    done = threading.Event()
    deliberation = Deliberation(lambda: done.wait(10) and "plan", None)
    assert [deliberation.end_step() for _ in range(3)] == [None] * 3
    done.set()
    for _ in range(100):
        if (outcome := deliberation.end_step()) is not None:
            break
        time.sleep(0.01)
    assert outcome == "plan"


def test_one_that_waits_switches_at_the_step_after():
    deliberation = Deliberation(lambda: time.sleep(0.05) or "plan", None, waits=True)
    assert [deliberation.end_step() for _ in range(2)] == [None, "plan"]


def test_an_error_names_itself():
    def think():
        raise ZeroDivisionError("a layer without seconds")

    deliberation = Deliberation(think, None, waits=True)
    deliberation.end_step()
    with pytest.raises(RuntimeError, match="failed on rank 0: ZeroDivisionError: a layer without seconds"):
        deliberation.end_step()


@pytest.mark.parametrize(("cause", "code"), [("ValueError", 1), ("KeyboardInterrupt", -2)])
def test_a_script_that_ends_early_ends_with_its_own_cause(cause: str, code: int):
    """Here autograd stands for a compiler: native code that calls Python, and would abort where the interpreter has ended."""
    script = ENDS_EARLY.replace("CAUSE", cause)
    ended = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == code, ended.stderr
    assert ended.stderr.strip().splitlines()[-1].endswith("of the user's code")


def _runs(rank: int) -> list[tuple[list[object], list[float]]]:
    """Three runs, so that a busy machine may be late in some."""
    channels = open_channels(cyclic(2), [[0, 1]], torch.device("cpu"), timedelta(seconds=30))
    return [_steps(rank, channels) for _ in range(3)]


def _steps(rank: int, channels: Channels) -> tuple[list[object], list[float]]:
    """Steps of 50 ms whose last message comes from rank 0, as in a pipeline; rank 0 thinks until the fourth is over."""
    done = threading.Event()
    deliberation = Deliberation((lambda: done.wait() and {"a": 1}) if rank == 0 else None, channels.control)
    outcomes: list[object] = []
    seconds = []
    while not any(outcomes):
        number = torch.zeros(1)
        if rank == 0:
            time.sleep(0.05)
            dist.send(number, dst=1, group=channels.control)
        else:
            dist.recv(number, src=0, group=channels.control)
        start = time.perf_counter()
        outcomes.append(deliberation.end_step())
        seconds.append(time.perf_counter() - start)
        if len(outcomes) == 4:
            done.set()
    return outcomes, seconds


def _two_runs(rank: int) -> list[object]:
    """A run that ends before the outcome, then another one with the same groups."""
    channels = open_channels(cyclic(2), [[0, 1]], torch.device("cpu"), timedelta(seconds=30))
    never = Deliberation(threading.Event().wait if rank == 0 else None, channels.control)
    outcomes = [never.end_step() for _ in range(3)]
    never.close()
    second = Deliberation((lambda: "plan") if rank == 0 else None, channels.control, waits=True)
    return [*outcomes, second.end_step(), second.end_step()]


@pytest.mark.distributed
def test_a_run_that_ends_too_early_leaves_nothing_to_the_next():
    assert run_processes(_two_runs, 2) == [[None, None, None, None, "plan"]] * 2


@pytest.mark.distributed
def test_processes_learn_of_it_at_the_end_of_the_same_step():
    thinking, others = run_processes(_runs, 2)
    for (outcomes, _), (heard, _) in zip(thinking, others, strict=True):
        assert outcomes == heard == [None] * (len(heard) - 1) + [{"a": 1}]
        assert len(heard) > 5  # the word went out at the end of the fifth step at the earliest
    assert min(max(seconds) for _, seconds in thinking) < 0.04  # rank 0 never waits
    assert min(sorted(seconds)[-2] for _, seconds in others) < 0.04  # nor do others for its next step; one may be late once
