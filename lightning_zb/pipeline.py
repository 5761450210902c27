"""One process's share of a pipelined module: built from the module and a plan, it runs steps and evaluations.

This is where the floors meet: layers and windows (floor 3), programs and executors (floor 2), the plan (floor 1). The
strategy translates Lightning's calls into the few methods here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from time import perf_counter
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import nn

from lightning_zb.assignment import Assignment
from lightning_zb.data_agreement import check_agreement
from lightning_zb.execution.channels import Channels, open_channels
from lightning_zb.execution.data_parallel import GradientReducer
from lightning_zb.execution.optimizer_shards import OptimizerShards, state_bytes
from lightning_zb.execution.profiler import StepRecorder
from lightning_zb.execution.programs import Programs
from lightning_zb.execution.statistics import Statistics
from lightning_zb.local_devices import LocalDevices
from lightning_zb.model.deferred_init import DeferredInit, materialise
from lightning_zb.model.interception import Interception
from lightning_zb.model.layers import find_layers
from lightning_zb.model.ownership import move_to, take_ownership
from lightning_zb.model.randomness import RandomStreams
from lightning_zb.model.runner import StepRunner
from lightning_zb.model.shard_places import shard_places
from lightning_zb.model.sharing import parameters_of_chunks
from lightning_zb.model.side_channels import AttributeList
from lightning_zb.model.stubs import PrologueStubs
from lightning_zb.plan_choice import PlanRequest, choose_plan, needs_bytes
from lightning_zb.planning.plan import Plan
from lightning_zb.replicas import Replicas, ShardGroups
from lightning_zb.shared_gradients import Sharing
from lightning_zb.stepping import StepEnding, StepOwner, StepRules
from lightning_zb.switching import move_state

EVALUATION_STEPS = 1 << 40
"""Random streams of evaluation batches are numbered from here, training steps from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOptions:
    """Options of the strategy that shape the pipeline; see `ZeroBubbleStrategy`."""

    plan: PlanRequest
    layers: Any
    virtual_devices: int | None
    check_data_steps: int
    timeout: timedelta
    side_channels: tuple[str, ...] = ()


class Pipeline:
    """A module cut into chunks, and the executors of the devices that this process stands for.

    Foreign layers give up their memory here, so it must exist before the optimizers do.

    Args:
        options: how to plan and cut.
        module: the user's LightningModule, whole.
        replicas: where this process stands; each process of a pipeline is one device, unless virtual devices are asked for.
        peers: the processes that stand for the same device in all replicas; None for one replica.
        device: where its chunks run.
        broadcast: gives every process rank 0's value.
        deferred: how configure_model built the module without values; None where it has them all.
        shard_groups: over which replicas divide optimizer state; None where they do not.
    """

    def __init__(
        self,
        options: PipelineOptions,
        module: pl.LightningModule,
        replicas: Replicas,
        peers: dist.ProcessGroup | None,
        device: torch.device,
        broadcast: Callable[[Any], Any],
        deferred: DeferredInit | None = None,
        shard_groups: ShardGroups | None = None,
    ) -> None:
        world_size = replicas.num_replicas * replicas.pipeline_size
        if options.virtual_devices is not None and world_size > 1:
            raise ValueError(
                f"virtual_devices={options.virtual_devices} runs all devices in one process; "
                f"set Trainer(devices=1), not {world_size}"
            )
        self.module = module
        self.stack = find_layers(module, options.layers)
        num_devices = options.virtual_devices or replicas.pipeline_size
        num_microbatches = module.trainer.accumulate_grad_batches
        chosen = choose_plan(options.plan, module, self.stack, num_devices, num_microbatches, broadcast, replicas.rank == 0)
        self.announcement = chosen.announcement
        self._is_virtual = replicas.pipeline_size == 1
        self.replicas, self._peers, self.shard_groups = replicas, peers, shard_groups
        self.device, self.request, self._timeout = device, options.plan, options.timeout
        self._assign(chosen.plan)
        seed = broadcast(torch.initial_seed())  # what `seed_everything` set, else whatever torch drew
        self._streams = RandomStreams(seed + replicas.replica, device)
        gathered = tuple(AttributeList(module, path) for path in options.side_channels)
        self._interception = Interception(self.stack, self._streams, gathered)
        self.ownership = take_ownership(module, self.stack, self._assigned.own_windows)
        self._built_bytes = self.ownership.total_bytes
        if deferred is not None and deferred.has_recorded:
            self.ownership = materialise(module, self.stack, self.ownership, deferred)
            self._built_bytes = deferred.peak_bytes
        self._stubs = PrologueStubs(module, self._interception, device)
        self._is_attached = True
        self._shard_places = shard_places(module, self.stack, replicas.num_replicas)
        self._past = Statistics()
        self.ending: StepEnding | None = None
        self._start()
        self._unchecked_steps = 0 if self._is_virtual else options.check_data_steps
        self._num_evaluations = 0
        self.last_step_seconds = 0.0
        """Host seconds of the last training step's schedule, waits included."""
        self.last_step_was_recorded = False
        """Whether it was measured, which slows it down or runs it otherwise than planned."""

    def _assign(self, plan: Plan) -> None:
        """Which chunks of the plan this process runs."""
        self.plan = plan
        self._assigned = Assignment.of(plan, len(self.stack), None if self._is_virtual else self.replicas.local_rank)

    def _start(self) -> None:
        """Executors for the plan as it is assigned."""
        assigned = self._assigned
        runners = [StepRunner(self.module, self._interception, assigned.windows, chunks) for chunks in assigned.chunks]
        self._channels: Channels | None = None
        if not self._is_virtual:
            self._channels = open_channels(
                self.plan.placement, self.replicas.pipelines(assigned.ranks), self.device, self._timeout
            )
        self._local = LocalDevices(self.devices, runners, self._channels)
        self._sharing = Sharing(self.module, self.stack, assigned, runners)
        self._programs = Programs(self.plan)
        if self._peers is not None:
            alone = parameters_of_chunks(self.module, self.stack, assigned.windows)
            for executor in self._local.executors:
                executor.reducer = GradientReducer(self._peers, self.replicas.num_replicas, alone)

    # -- training --------------------------------------------------------------------------------------------------

    def training_step(self, microbatches: list[tuple[Any, ...]], context: Callable[[], Any]) -> Any:
        """Run the schedule; gradients accumulate in the parameters.

        Args:
            microbatches: for each the arguments of training_step.
            context: the precision's forward context.

        Returns:
            What training_step returned for the last microbatch, detached; None on ranks without the last chunk.
        """
        trainer = self.module.trainer
        if self._unchecked_steps:
            self._unchecked_steps -= 1
            group = None if self._channels is None else self._channels.control
            check_agreement(microbatches, trainer.train_dataloader, trainer.num_training_batches, group)
        for runner in self._local.runners:
            runner.begin(microbatches, step=trainer.global_step, divisor=trainer.accumulate_grad_batches, context=context)
        self.last_step_was_recorded = self._local.is_recorded
        start = perf_counter()
        self._last_program = self._programs.get(len(microbatches))
        with self._streams.preserved():
            self._local.run(self._last_program)
        self.last_step_seconds = perf_counter() - start
        executors = self._local.executors
        self.ownership = self._sharing.finish_step(executors, self._channels, self.ownership, self._stubs)
        if executors[0].reducer is not None:
            executors[0].reducer.finish(self.ownership.own_parameters())
        return self._local.output(len(microbatches) - 1)

    def end_steps(self, optimizer: torch.optim.Optimizer, rules: StepRules) -> None:
        """Say how training steps end, once the optimizer exists."""
        self._optimizer, self._rules = optimizer, rules
        self.ending = self._make_ending()

    def _make_ending(self) -> StepEnding:
        rules = self._rules
        for runner in self._local.runners:
            runner.scale_loss = None if rules.scaler is None else rules.scaler.scale
        owner = StepOwner(self._optimizer, self._own_buffers, self._sharing.is_copy, self._shards())
        return StepEnding(owner, self._local.executors, rules, self.plan, self._may_copy, self._past)

    @property
    def _may_copy(self) -> bool:
        """Whether steps may keep a copy to roll back to: not where a budget in bytes was filled without."""
        return self.ending is None or self.ending.copies or not needs_bytes(self.request.memory_budget)

    def finish_step(self) -> None:
        """Update this process's parameters, now or when the step is validated."""
        assert self.ending is not None
        self.ending.finish(self.finishing_order)

    @property
    def finishing_order(self) -> tuple[int, ...]:
        """Devices by the time at which they finish a step such as the last one."""
        return self._last_program.finishing_order

    def flush(self) -> None:
        """Finish a pending step, so that weights and optimizer state are final; see `OptimisticStep.flush` for who must."""
        if self.ending is not None:
            self.ending.flush()

    def _shards(self) -> OptimizerShards | None:
        """How replicas divide the optimizer's state of what this process holds now."""
        if self.shard_groups is None:
            return None
        named = self.module.named_parameters()
        return OptimizerShards(self.shard_groups.values, {p: self._shard_places[name] for name, p in named})

    def parameters_with_state(self) -> list[nn.Parameter]:
        """The parameters that this process holds and keeps optimizer state of, as other replicas may."""
        assert self.ending is not None
        return [p for p in self.ownership.own_parameters() if self.ending.keeps_state(p)]

    def _own_buffers(self) -> list[torch.Tensor]:
        return [b for name, b in self.module.named_buffers() if name in self.ownership.buffers and not b.is_meta]

    def evaluate(self, method: str, args: tuple[Any, ...], context: Callable[[], Any]) -> Any:
        """Run a validation, test or prediction step forward through the pipeline.

        Returns:
            What the step returned; None on ranks without the last chunk.
        """
        step = EVALUATION_STEPS + self._num_evaluations
        self._num_evaluations += 1
        for runner in self._local.runners:
            runner.begin([args], step=step, method=method, divisor=None, context=context)
        with self._streams.preserved():
            self._local.run(self._programs.get(1, forward_only=True))
        return self._local.output(0)

    # -- profiling and switching -----------------------------------------------------------------------------------

    @property
    def devices(self) -> tuple[int, ...]:
        """The devices of the pipeline that this process stands for."""
        return self._assigned.devices

    @property
    def channels(self) -> Channels | None:
        """Process groups of the pipeline; None where all its devices are in this process."""
        return self._channels

    def record(self, recorders: Sequence[StepRecorder] | None, runs_whole: bool | None = None) -> None:
        """Let the coming steps of `devices` be recorded, or no longer; see `LocalDevices.record`."""
        self._local.record(recorders, runs_whole)

    @property
    def joins_ends(self) -> bool:
        """Whether the first and the last chunk must stay on one device here: they share a parameter without a second name."""
        return not self._is_virtual and self._sharing.joins_ends

    @property
    def waiting_gradients(self) -> dict[nn.Parameter, int]:
        """For each parameter that other devices use too how many gradients of single microbatches wait here in a step."""
        return self._local.waiting_gradients

    def switch(self, plan: Plan) -> None:
        """From the next step on run another plan; called on all processes between two steps.

        Where partition or placement change, parameters, optimizer state and buffers move to the devices that need them.

        Args:
            plan: for the same layers, devices and number of microbatches.
        """
        self.flush()
        old = self.plan
        if (plan.partition, plan.placement) == (old.partition, old.placement):
            self.plan = plan
            self._programs = Programs(plan)
            if self.ending is not None:
                self.ending.replan(plan, self._may_copy)
            return
        channels, is_copy = self._channels, self._sharing.is_copy
        self._past = self._total()
        self._assign(plan)
        if channels is not None:
            self.ownership = move_state(
                self.module,
                self.stack,
                self.ownership,
                is_copy,
                self.module.trainer.optimizers,
                self._assigned.windows_by_rank,
                channels,
            )
        if self.ending is not None:
            self.ending.close()
        self._local.close()
        self._start()
        if self.ending is not None:
            self.ending = self._make_ending()

    def gather(self, value: Any) -> list[Any] | None:
        """The values of this pipeline's processes on its first, in the order of ranks, None elsewhere (a collective)."""
        if self._channels is None:
            return [value]
        parts: list[Any] | None = [None] * self.plan.num_devices if self.replicas.local_rank == 0 else None
        dist.gather_object(value, parts, dst=self.replicas.first_rank, group=self._channels.control)
        return parts

    # -- parameters ------------------------------------------------------------------------------------------------

    def owns(self, parameter: nn.Parameter) -> bool:
        """True where this process holds the parameter's values and answers for them (a tied copy has one owner)."""
        held = any(p is parameter for p in self.ownership.own_parameters())
        return held and not self._sharing.is_copy(parameter)

    def attach(self) -> None:
        """Intercept the module's calls again, where a run after the first one begins."""
        if not self._is_attached:
            self._interception.install()
            self._stubs.install()
            self._is_attached = True

    def detach(self) -> None:
        """Give the modules their own `forward` back, for whatever runs them next."""
        if self._is_attached:
            self._stubs.remove()
            self._interception.remove()
            self._is_attached = False

    def move_to(self, device: torch.device) -> None:
        """Move what this process holds; foreign parameters stay where they are, without memory."""
        move_to(self.module, device)

    # -- what happened ---------------------------------------------------------------------------------------------

    @property
    def statistics(self) -> dict[str, Any]:
        """What this process did so far: `Statistics`, plus bytes of parameters, optimizer state, building the model."""
        sizes = {"own_parameter_bytes": self.ownership.own_bytes, "parameter_bytes": self.ownership.total_bytes}
        sizes["built_bytes"] = self._built_bytes
        sizes["optimizer_bytes"] = sum(state_bytes(optimizer) for optimizer in self.module.trainer.optimizers)
        return {**self._total().as_dict(), **sizes}

    def _total(self) -> Statistics:
        return self._local.statistics.after(self._past)
