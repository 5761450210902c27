"""Processes of a pipeline: started, watched, and ended together.

Lightning's script launcher kills the parent with SIGKILL when a child fails and its children repeat a whole Hydra
multirun. Here a failing process shows its own traceback, the others end within seconds with an error that names it,
and under Hydra each job of a sweep has fresh children, a fresh port and its own overrides only.
"""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.fabric.utilities.imports import _IS_INTERACTIVE
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_zb.first_failure import OtherRankFailed, follows_from_a_lost_peer, note_failure

GRACE_SECONDS = 5.0
"""How long a process may take to end by itself after another one failed."""

_STARTED_BY = "LIGHTNING_ZB_STARTED_BY"
"""Tells a process that a launcher started the id of the one that did."""
_LAUNCH_VARIABLES = ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_running: list[PipelineScriptLauncher] = []
_runs = count()
"""Numbers fits and evaluations of a script; every rank runs the same ones."""


class PipelineScriptLauncher(_SubprocessScriptLauncher):
    """Runs this script once more for each further device."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.job = _hydra_job()
        if _running:
            self.procs = _running[-1].procs  # another Trainer of the script started them

    @property
    def is_interactive_compatible(self) -> bool:
        return self.num_processes == 1 or self.cluster_environment.creates_processes_externally  # then it starts none

    def launch(self, function: Callable, *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Start the children, then call the function here; a failure on any side ends all sides."""
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            self._call_children_scripts()
            _running.append(self)
        _set_num_threads_if_needed(num_processes=self.num_processes)
        run = next(_runs)
        watch = _ChildWatch(self.procs)
        watch.start()
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            watch.stop()
            first = note_failure(error, run)
            killed = _find_killed(self.procs)
            end_children(self.procs, GRACE_SECONDS)
            if killed is not None and isinstance(error, Exception):
                rank, name = killed
                raise ChildProcessError(f"the process of rank {rank} was ended by {name}") from error
            if first is not None and follows_from_a_lost_peer(error):
                raise OtherRankFailed(first) from error
            if follows_from_a_lost_peer(error) and _is_orphan():
                rank = self.cluster_environment.node_rank() * self.num_processes
                raise OtherRankFailed(
                    f"the process of rank {rank} ended without a word, as SIGKILL ends one (the kernel's, where memory ran out)"
                ) from error
            if isinstance(error, SIGTERMException):
                error.code = 128 + signal.SIGTERM  # Lightning's ends with 0, as if all were well
            raise
        finally:
            watch.stop()

    def _call_children_scripts(self) -> None:
        if self.num_processes * self.num_nodes == 1:
            return  # and leave the environment alone: variables set here would make the next job wait for ranks
        self._check_can_spawn_children()
        environment = self.cluster_environment
        os.environ.update(
            MASTER_ADDR=environment.main_address,
            MASTER_PORT=str(environment.main_port),
            NODE_RANK=str(environment.node_rank()),
            LOCAL_RANK=str(environment.local_rank()),
            WORLD_SIZE=str(self.num_processes * self.num_nodes),
        )
        for local_rank in range(1, self.num_processes):
            command, directory = _child_command(local_rank)
            variables = {**os.environ, "LOCAL_RANK": str(local_rank), _STARTED_BY: str(os.getpid())}
            self.procs.append(subprocess.Popen(command, env=variables, cwd=directory))


class PipelineProcessLauncher(_MultiProcessingLauncher):
    """Spawns or forks the processes, for notebooks and tests; the parent gets the whole model's weights back."""

    def _wrapping_function(self, *args: Any, **kwargs: Any) -> None:
        try:
            super()._wrapping_function(*args, **kwargs)
        except Exception as error:  # the parent shows the traceback of the process whose end it sees first
            first = note_failure(error)
            if first is not None and follows_from_a_lost_peer(error):
                raise OtherRankFailed(first) from error
            raise

    def _collect_rank_zero_results(self, trainer: Any, results: Any) -> Any:
        # the parent copies lightning_module.state_dict() back: without consolidation it would get meta tensors
        weights = self._strategy.lightning_module_state_dict()
        trainer.lightning_module.state_dict = lambda *args, **kwargs: weights
        collected = super()._collect_rank_zero_results(trainer, results)
        dist.barrier()
        dist.destroy_process_group()  # spawned children run no atexit handlers; gloo aborts at exit otherwise
        return collected

    def _recover_results_in_main_process(self, worker_output: Any, trainer: Any) -> None:
        if worker_output.weights_path is not None:
            _build_here(trainer, worker_output.weights_path)
        super()._recover_results_in_main_process(worker_output, trainer)


def make_launcher(strategy: Any, environment: Any, start_method: Any) -> PipelineScriptLauncher | PipelineProcessLauncher:
    """The launcher for a way to start processes; what a Hydra job before this one started ends first.

    Args:
        strategy: whose processes they are.
        environment: the cluster's, which may have started them already.
        start_method: as `ZeroBubbleStrategy` takes it.
    """
    if start_method != "popen":
        return PipelineProcessLauncher(strategy, start_method=start_method)
    if _IS_INTERACTIVE and strategy.num_processes > 1 and not environment.creates_processes_externally:
        return PipelineProcessLauncher(strategy, start_method="fork")  # there is no script to run again
    finish_previous_job()
    return PipelineScriptLauncher(environment, strategy.num_processes, strategy.num_nodes)


def _build_here(trainer: Any, weights_path: str) -> None:
    """Let configure_model build the model in this process too, where the trained weights that come back need it.

    The processes that trained have built it, each its part; Lightning's own launcher drops weights without a place.
    """
    module = trainer.lightning_module
    trained = set(torch.load(weights_path, map_location="meta", weights_only=True))
    if is_overridden("configure_model", module) and trained - set(module.state_dict()):
        with torch.random.fork_rng(devices=[]), trainer.precision_plugin.module_init_context():
            module.configure_model()
    lost = sorted(trained - set(module.state_dict()))
    if lost:
        rank_zero_warn(
            f"{len(lost)} trained weights ({lost[0]} and so on) have no place in the model of this process, which started "
            "those that trained: build what hooks add in configure_model, or read the weights from a checkpoint"
        )


class _ChildWatch(threading.Thread):
    """Ends everything when a child fails and this process does not notice by itself (a dead peer breaks its transfers)."""

    def __init__(self, children: list[subprocess.Popen]) -> None:
        super().__init__(daemon=True, name="pipeline-child-watch")
        self._children = children
        self._stopped = threading.Event()

    def stop(self) -> None:
        self._stopped.set()

    def run(self) -> None:
        while not self._stopped.wait(0.25):
            failed = [(rank + 1, child) for rank, child in enumerate(self._children) if child.poll()]
            if not failed:
                continue
            rank, child = failed[0]
            how = f"with exit code {child.returncode}; its traceback is above"
            if child.returncode < 0:
                how = f"by {signal.Signals(-child.returncode).name}"
            print(f"[zero_bubble] the process of rank {rank} ended {how}", file=sys.stderr, flush=True)
            end_children(self._children, 1.0)
            if not self._stopped.wait(GRACE_SECONDS):
                print("[zero_bubble] this process still waits for it and is ended", file=sys.stderr, flush=True)
                os._exit(1)
            return


def end_children(children: list[subprocess.Popen], grace_seconds: float) -> None:
    """Wait for children to end by themselves, then kill what is left (Lightning catches SIGTERM, so SIGKILL)."""
    deadline = time.monotonic() + grace_seconds
    while time.monotonic() < deadline and any(child.poll() is None for child in children):
        time.sleep(0.05)
    for child in children:
        if child.poll() is None:
            child.kill()
            child.wait()


def _find_killed(children: list[subprocess.Popen]) -> tuple[int, str] | None:
    """The rank of a child that a signal ended (the kernel's, where memory ran out) and the signal's name.

    What broke here, a connection as a rule, is only what followed.
    """
    deadline = time.monotonic() + 0.2  # its connections break a moment before it has ended
    while True:
        for rank, child in enumerate(children, 1):
            code = child.poll()
            if code is not None and code < 0:
                return rank, signal.Signals(-code).name
        if time.monotonic() > deadline:
            return None
        time.sleep(0.02)


def _is_orphan() -> bool:
    """Whether the process that started this one, which waits for it however else it fails, has ended."""
    parent = os.environ.get(_STARTED_BY)
    deadline = time.monotonic() + 0.2  # its connections break a moment before it has ended
    while parent is not None and time.monotonic() < deadline:
        if os.getppid() != int(parent):
            return True
        time.sleep(0.02)
    return False


def finish_previous_job() -> None:
    """Before a Hydra job of a sweep starts its processes: end those of the job before and forget its rendezvous."""
    while _running and _running[-1].job != _hydra_job():
        previous = _running.pop()
        if dist.is_initialized():
            dist.destroy_process_group()
        end_children(previous.procs, 60.0)
        for name in _LAUNCH_VARIABLES:
            os.environ.pop(name, None)


@atexit.register
def _end_all() -> None:
    for launcher in _running:
        end_children(launcher.procs, 30.0)


def _hydra_job() -> tuple[str, str] | None:
    """What tells one Hydra job of this process from another; None outside Hydra."""
    if "hydra" not in sys.modules:
        return None
    from hydra.core.hydra_config import HydraConfig

    if not HydraConfig.initialized():
        return None
    config = HydraConfig.get()
    return (str(config.mode), config.runtime.output_dir)


def _child_command(local_rank: int) -> tuple[list[str], str | None]:
    """The command that repeats this script as another rank; under Hydra with this job's overrides as a single run."""
    import __main__

    spec = getattr(__main__, "__spec__", None)
    if spec is None and not os.path.isfile(sys.argv[0]):
        raise RuntimeError(
            f'start_method="popen" runs the script again for each device, but there is no script ({sys.argv[0]!r}); '
            'save it to a file, or write ZeroBubbleStrategy(start_method="fork")'
        )
    job = _hydra_job()
    if job is None:
        script = [sys.executable, os.path.abspath(sys.argv[0])] if spec is None else [sys.executable, "-m", spec.name]
        return [*script, *sys.argv[1:]], None
    from hydra.core.hydra_config import HydraConfig
    from hydra.utils import get_original_cwd, to_absolute_path

    config = HydraConfig.get()
    script = [sys.executable, to_absolute_path(sys.argv[0])] if spec is None else [sys.executable, "-m", spec.name]
    return [
        *script,
        "--config-name",
        str(config.job.config_name),
        *config.overrides.task,
        f'hydra.run.dir="{config.runtime.output_dir}"',
        "hydra.output_subdir=null",
        f"hydra.job.name={config.job.name}_rank{local_rank}",
    ], get_original_cwd()
