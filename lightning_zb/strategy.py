"""`Trainer(strategy="zero_bubble")`: Lightning's calls translated to the pipeline's; no schedule is decided here."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.plugins.precision import HalfPrecision, Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn

from lightning_zb import hooks, metrics, precision, refusals, stopping
from lightning_zb.arguments import check_arguments
from lightning_zb.checkpointing import CheckpointingStrategy
from lightning_zb.data_agreement import share_random_state
from lightning_zb.launching import make_launcher
from lightning_zb.model.deferred_init import DeferredInit
from lightning_zb.model.layers import check_same_layers
from lightning_zb.own_callbacks import add_own_callbacks, replan_of
from lightning_zb.pipeline import Pipeline, PipelineOptions
from lightning_zb.plan_choice import PlanRequest
from lightning_zb.planning.budget import check_budget
from lightning_zb.planning.plan import Plan
from lightning_zb.replicas import BroadcastLoader, Replicas, share_out
from lightning_zb.step_gradients import StepGradients
from lightning_zb.stepping import PostValidation, StepRules


class ZeroBubbleStrategy(CheckpointingStrategy):
    """Trains an unchanged LightningModule as a zero-bubble pipeline over the Trainer's devices.

    Microbatches are the batches that Lightning accumulates: with `accumulate_grad_batches=m` the schedule of m
    microbatches runs on the last batch of each group. Weights, optimizer state and losses are bitwise those of the
    plain single-process Trainer.

    Args:
        schedule: `"auto"` finds partition, placement and order together, once the first steps have measured the layers (they
            run as zb-v); or a schedule's name (`zb-v`, `1f1b`, ...), or the path of a plan file.
        memory_budget: activation memory of a device: a multiple of what one microbatch of the whole model holds, a size
            such as `"40GiB"` for everything on the device, a list with one entry a device, or None for what is left
            (`auto` takes no more than 2.0 of it, beyond which next to nothing is gained).
        layers: dotted path of the container that holds the layers, or several paths; None to find it.
        side_channels: dotted name of a list, or of several, that layers append to and the step empties before they run
            (auxiliary losses): its entries travel along. What Hugging Face models gather needs no name.
        partition: layers to chunks: `"even"`, `"balanced"`, the number of layers of each chunk, or a layout as Megatron-LM
            writes it (`"Et*3|t*4|t*4|t*3L"`); None: what `auto` finds best, and even where the schedule was named.
        constraints: for schedule `"auto"`, what its cuts keep to: `{"together": [[a, b]], "first": [a], "alone": [a]}`: groups
            of layers that share a chunk, layers that begin one, layers that are one; by name, `"prologue"` or `"epilogue"`.
        costs: path of a costs file (as `lightning-zb profile` writes); None to assume costs from parameter counts.
        post_validation: `"exact"` steps before the norm of the whole model is known and rolls back where it clips;
            `"auto"` does so while gradients are not clipped; `"inplace"` needs no copy but is not bitwise; `"off"` waits.
        error_if_nonfinite: raise on every rank where the gradient norm is not finite, instead of skipping the step.
        save_distributed_checkpoint: write checkpoints as directories, in which every device writes what it holds.
        virtual_devices: run a pipeline of that many devices inside one process (`Trainer(devices=1)`), to try a plan or
            test a model without starting processes.
        start_method: `"popen"` runs the script again for each device; `"spawn"` and `"fork"` start functions. In a notebook
            `"popen"` means `"fork"`. Processes that torchrun or SLURM started are taken as they are.
        timeout: how long a transfer or collective may take, on gloo and NCCL alike, before its peer counts as lost and
            the run is given up: seconds, or a timedelta as Lightning's DDPStrategy takes it.
        process_group_backend: `"nccl"` or `"gloo"`; None: NCCL on CUDA, else gloo.
        data_parallel_size: replicas of the pipeline; the devices of all nodes are divided among them.
        shard_optimizer: divide optimizer state among the replicas (ZeRO stage 1): each keeps the state of its share of every
            device's parameters, steps it, and hands the values on; the bits stay. Nothing changes with one replica.
        data: `"read"`: every process reads its replica's batches; `"broadcast"`: one process of a pipeline reads them for
            all, for data that cannot be read alike everywhere.
        check_data_steps: in how many steps the devices compare checksums of their microbatches.
    """

    restore_checkpoint_after_setup = True

    def __init__(
        self,
        schedule: str = "auto",
        memory_budget: float | str | Sequence[float | str] | None = None,
        layers: str | Sequence[str] | None = None,
        side_channels: str | Sequence[str] = (),
        partition: str | Sequence[int] | None = None,
        constraints: Mapping[str, Sequence[Any]] | None = None,
        costs: str | Path | None = None,
        post_validation: str = "auto",
        error_if_nonfinite: bool = False,
        save_distributed_checkpoint: bool = False,
        virtual_devices: int | None = None,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        timeout: float | timedelta = 1800.0,
        process_group_backend: str | None = None,
        data_parallel_size: int = 1,
        shard_optimizer: bool = False,
        data: Literal["read", "broadcast"] = "read",
        check_data_steps: int = 2,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        check_arguments(locals())
        super().__init__(accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin)
        self._options = PipelineOptions(
            plan=PlanRequest(
                schedule=schedule,
                memory_budget=memory_budget if isinstance(memory_budget, float | int | str | None) else [*memory_budget],
                partition=partition,
                costs=costs,
                constraints=constraints,
            ),
            layers=layers,
            virtual_devices=virtual_devices,
            check_data_steps=check_data_steps,
            timeout=timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout),
            side_channels=(side_channels,) if isinstance(side_channels, str) else tuple(side_channels),
        )
        self.process_group_backend = process_group_backend
        self._post_validation = PostValidation(post_validation)
        self._error_if_nonfinite = error_if_nonfinite
        self._save_distributed_checkpoint = save_distributed_checkpoint
        self._start_method = start_method
        self.data_parallel_size = data_parallel_size
        self.shard_optimizer = shard_optimizer
        self._data = data
        self._pipeline: Pipeline | None = None
        self._deferred: DeferredInit | None = None
        self._queue: list[tuple[Any, ...]] = []
        self._gradients = StepGradients()

    # -- what the user reads ---------------------------------------------------------------------------------------

    @property
    def pipeline(self) -> Pipeline:
        """The running pipeline.

        Raises:
            RuntimeError: read before the Trainer set the strategy up.
        """
        if self._pipeline is None:
            raise RuntimeError("the pipeline exists once trainer.fit, validate, test or predict has set the strategy up")
        return self._pipeline

    @property
    def plan(self) -> Plan:
        """The plan that runs: partition, placement, schedule and what they promise."""
        return self.pipeline.plan

    @property
    def statistics(self) -> dict[str, Any]:
        """What this device did: passes executed by kind, bytes of own parameters, seconds waited, transfers."""
        return self.pipeline.statistics

    @property
    def plan_request(self) -> PlanRequest:
        """What was asked for: schedule, memory budget, partition, costs."""
        return self._options.plan

    @property
    def is_between_steps(self) -> bool:
        """Whether no microbatch of an unfinished step is queued."""
        return not self._queue

    def owns(self, parameter: nn.Parameter) -> bool:
        """True where this process holds and trains the parameter."""
        return self.pipeline.owns(parameter)

    # -- processes -------------------------------------------------------------------------------------------------

    def _configure_launcher(self) -> None:
        environment = self.cluster_environment
        assert environment is not None
        budget, world_size = self.plan_request.memory_budget, self.num_nodes * self.num_processes
        if self._options.virtual_devices is None and isinstance(budget, list):
            check_budget(budget, Replicas.of(world_size, self.data_parallel_size, 0).pipeline_size)
        self._launcher = make_launcher(self, environment, self._start_method)

    def connect(self, model: pl.LightningModule) -> None:
        refusals.check_automatic(model)
        super().connect(model)

    def setup_environment(self) -> None:
        super().setup_environment()
        self.open_connections(self._options.timeout)
        share_random_state(self.broadcast)
        module = self.lightning_module
        assert module is not None
        trainer: Any = module.trainer
        add_own_callbacks(trainer.callbacks, self.root_device)
        stopping.end_on_sigterm(trainer)
        if self.replicas.num_replicas == 1:  # what is logged is whole on the rank that logs it
            warnings.filterwarnings("ignore", message=".*sync_dist=True")
        hooks.adapt_hooks(module)
        hooks.adapt_callbacks(trainer)
        hooks.share_results(trainer)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_launcher": None}

    # -- set-up and tear-down --------------------------------------------------------------------------------------

    @property
    def precision_plugin(self) -> Precision:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        self._precision_plugin = None if plugin is None else precision.adopt(plugin, self)

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Around configure_model: what it builds has no memory yet; `setup` gives values to this device's part alone."""
        if self._pipeline is not None:
            yield
            check_same_layers(self._pipeline.module, self._pipeline.stack)
        elif self.replicas.pipeline_size == 1:
            yield
        else:
            self._deferred = DeferredInit(self.root_device)
            with self._deferred.recording():
                yield

    def setup(self, trainer: pl.Trainer) -> None:
        """Cut the model, place its chunks, and set optimizers up on what this process owns."""
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self.accelerator.setup(trainer)
        refusals.check_trainer(trainer, self.lightning_module)
        if self._pipeline is None:
            replan = replan_of(trainer.callbacks)  # type: ignore[attr-defined]
            halves = isinstance(self.precision_plugin, HalfPrecision)
            options = replace(self._options, plan=replace(self._options.plan, replan=replan, halves_parameters=halves))
            self._pipeline = Pipeline(
                options, self.lightning_module, self.replicas, self.peers, self.root_device, self.broadcast, self._deferred,
                self.shard_groups,
            )  # fmt: skip
            self._deferred = None  # frees the record
            rank_zero_info(self._pipeline.announcement)
        self._pipeline.attach()
        stopping.agree_on_stops(trainer, self.lightning_module)
        metrics.join_replicas(self.lightning_module, self.peers if self.has_loss else None)
        self.model = self.precision_plugin.convert_module(self.lightning_module)
        self.model_to_device()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            reads = refusals.reads_gradients(self.lightning_module)
            scaler = precision.scaler_of(self.precision_plugin)
            rules = StepRules(self._post_validation, reads, self._error_if_nonfinite, scaler)
            self._pipeline.end_steps(self.optimizers[0], rules)
        self.setup_precision_plugin()
        if trainer.state.fn == TrainerFn.FITTING:
            _optimizers_to_device(self.optimizers, self.root_device)
        share_random_state(self.broadcast)
        gc.collect()
        gc.freeze()  # a full collection walks all of torch, a third of a second, while the other devices wait

    def process_dataloader(self, dataloader: Any) -> Any:
        assert self.lightning_module is not None
        loader = share_out(dataloader, self.replicas, self.lightning_module.trainer)
        group = self.pipeline_group if self._data == "broadcast" else None
        return loader if group is None else BroadcastLoader(loader, self.replicas, group)

    def model_to_device(self) -> None:
        self.pipeline.move_to(self.root_device)

    def teardown(self) -> None:
        # not Strategy.teardown: it moves the whole module to the CPU, which foreign (meta) parameters cannot follow
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self.cluster_environment.teardown()
        if self.lightning_module is not None and self.lightning_module._trainer is not None:
            hooks.restore(self.lightning_module, self.lightning_module.trainer.callbacks)  # type: ignore[attr-defined]
        if self._pipeline is not None:
            if self._pipeline.ending is not None:
                self._pipeline.ending.close()
            self._pipeline.detach()
            self._pipeline.move_to(torch.device("cpu"))
            _optimizers_to_device(self.optimizers, torch.device("cpu"))
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # -- training --------------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Queue the batch as a microbatch; on the last one of the group run the schedule.

        Returns:
            On the loss rank what the user's training_step returned for the last microbatch (detached); zeros elsewhere
            and for queued batches, since Lightning skips a batch that returns None.
        """
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        self._queue.append((*args, *kwargs.values()))
        if trainer.fit_loop._should_accumulate():
            return torch.zeros((), device=self.root_device)
        microbatches, self._queue = self._queue, []
        with self._gradients.computing(self.lightning_module):
            output = self.pipeline.training_step(microbatches, self.precision_plugin.train_step_context)
        return torch.zeros((), device=self.root_device) if output is None else output

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Run the hooks around backward; the schedule has already computed the gradients."""
        assert self.lightning_module is not None
        self.pre_backward(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        self._gradients.enter()
        closure_loss = self.precision_plugin.post_backward(closure_loss, self.lightning_module)
        self.post_backward(closure_loss)
        return closure_loss

    def clip(self, optimizer: Any, max_value: float, algorithm: str) -> None:
        """Clip the whole model's gradients; see `precision.StepFinisher`."""
        assert self.pipeline.ending is not None
        self.pipeline.ending.clip(max_value, algorithm)

    def finish_step(self, optimizer: Any) -> None:
        """Update this device's parameters; see `precision.StepFinisher`."""
        self.pipeline.finish_step()

    def flush(self) -> None:
        """Finish a step that is still to be validated: call it before reading weights, optimizer state or gradients.

        Any rank may do so alone, unless `shard_optimizer` divides the state: then all do.
        Evaluation, checkpoints and the ends of epochs and of training do it by themselves.
        """
        if self._pipeline is not None:
            self._pipeline.flush()

    def abandon_step(self) -> None:
        """After an exception: leave validated weights, those of the last step if its validation still comes."""
        if self._pipeline is not None and self._pipeline.ending is not None:
            self._pipeline.ending.abandon()

    def on_exception(self, exception: BaseException) -> None:
        self.abandon_step()
        stopping.name_signal(exception, self.global_rank)

    # -- evaluation ------------------------------------------------------------------------------------------------

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        arguments = (*args, *kwargs.values())
        return self.pipeline.evaluate("validation_step", arguments, self.precision_plugin.val_step_context)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        arguments = (*args, *kwargs.values())
        return self.pipeline.evaluate("test_step", arguments, self.precision_plugin.test_step_context)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        arguments = (*args, *kwargs.values())
        return self.pipeline.evaluate("predict_step", arguments, self.precision_plugin.predict_step_context)
