"""Runs the user's own step, chunk by chunk: the ChunkRunner of a LightningModule."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lightning_zb.model.interception import ChunkEnd, Interception
from lightning_zb.model.layer_recorder import LayerRecorder, observing
from lightning_zb.model.sharing import shared_parameters
from lightning_zb.model.windows import Window


class StepRunner:
    """Implements `lightning_zb.execution.protocols.ChunkRunner` on the step methods of a LightningModule.

    Args:
        module: the LightningModule.
        interception: of its layers.
        windows: of all chunks, in model order.
        chunks: the chunks of this device.
    """

    def __init__(
        self,
        module: nn.Module,
        interception: Interception,
        windows: Sequence[Window],
        chunks: Sequence[int],
    ) -> None:
        self._module = module
        self._interception = interception
        self._windows = tuple(windows)
        self._chunks = tuple(chunks)
        self._context: Callable[[], AbstractContextManager[Any]] = nullcontext
        self._method = "training_step"
        self._microbatches: Sequence[tuple[Any, ...]] = ()
        self._step = 0
        self._divisor: int | None = None
        self.scale_loss: Callable[[Tensor], Tensor] | None = None
        """A loss scaler's; asked when a loss is there, since the scale may still move during the warm-up."""
        self.recorder: LayerRecorder | None = None
        """Takes the times of layers; None unless profiling."""
        self.shared = shared_parameters(module, interception.stack, windows, chunks)
        self.tied: dict[nn.Parameter, tuple[int, ...]] = {}
        self.losses: dict[int, Tensor] = {}
        """Undivided, detached losses of the last chunk by microbatch."""
        self.outputs: dict[int, Any] = {}
        """What the step returned on the last chunk by microbatch; in training for the last microbatch only, detached."""

    def begin(
        self,
        microbatches: Sequence[tuple[Any, ...]],
        *,
        step: int,
        method: str = "training_step",
        divisor: int | None = 1,
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """Set the microbatches of the next step; what the step before left is dropped.

        Args:
            microbatches: for each the positional arguments of the step method.
            step: keys the random streams: optimizer steps in training, other numbers in evaluation.
            method: name of the step method.
            divisor: what losses are divided by, accumulate_grad_batches; None in evaluation, where the last chunk
                returns what the step method returns.
            context: what each F runs in: the precision plugin's forward context.
        """
        self._microbatches, self._step, self._method, self._divisor = microbatches, step, method, divisor
        self._context = context
        self.losses, self.outputs = {}, {}

    def forward(self, chunk: int, microbatch: int, received: Any) -> Any:
        """Run F; see `ChunkRunner.forward`."""
        window, args = self._windows[chunk], self._microbatches[microbatch]
        self._set_batch(args)
        streams = self._interception.streams
        drawing = nullcontext() if streams is None else streams.microbatch(self._step, microbatch)
        muted = nullcontext() if window.is_last else self._muted()
        with (
            muted,
            drawing,
            self._context(),
            observing(self.recorder, chunk),
            self._interception.chunk(window, received, StepRunner.forward.__code__, self.recorder) as running,
        ):
            result = None
            try:
                result = getattr(self._module, self._method)(*args)
            except ChunkEnd:
                pass
            except Exception:
                if not running.ended:  # else user code failed on the unwinding itself; the output is complete
                    raise
            running.check_complete()
        return self._finish(microbatch, result) if window.is_last else running.output

    def signature(self, microbatch: int) -> Hashable:
        """The step method, and shapes and dtypes of the microbatch's tensors."""
        return self._method, tuple((tuple(t.shape), t.dtype) for t in tensors_of(self._microbatches[microbatch]))

    def shared_parameters(self) -> dict[nn.Parameter, tuple[int, ...]]:
        """Parameters used by several chunks of this device, with those chunks."""
        return {p: chunks for p, chunks in self.shared.items() if p not in self.tied}

    def tied_parameters(self) -> dict[nn.Parameter, tuple[int, ...]]:
        """Parameters that chunks on other devices use too, with all those chunks."""
        return self.tied

    def _finish(self, microbatch: int, result: Any) -> Any:
        if self._divisor is None:
            self.outputs[microbatch] = result
            return result
        loss = result["loss"] if isinstance(result, Mapping) and "loss" in result else result
        if not isinstance(loss, Tensor):
            raise TypeError(
                f"{self._method} returned {type(result).__name__}; under a pipeline every microbatch needs a loss: "
                'return a tensor or a dict with "loss" (a zero that depends on the output skips a microbatch)'
            )
        self.losses[microbatch] = loss.detach()
        if microbatch == len(self._microbatches) - 1:  # holding every microbatch's logits would cost memory
            self.outputs[microbatch] = _detached(result)
        loss = loss / self._divisor
        return loss if self.scale_loss is None else self.scale_loss(loss)

    def _set_batch(self, args: tuple[Any, ...]) -> None:
        """`self.log` weighs by the batch size of the running microbatch, not of the last one that was fetched."""
        trainer = getattr(self._module, "_trainer", None)
        results = trainer._results if trainer is not None else None
        if results is not None:
            results.batch, results.batch_size = args[0] if args else None, None

    @contextmanager
    def _muted(self) -> Iterator[None]:
        """Only the last chunk logs; step code before the layers runs once for each chunk."""
        attributes = self._module.__dict__
        before: dict[str, Any] = {name: attributes[name] for name in ("log", "log_dict") if name in attributes}
        attributes["log"] = attributes["log_dict"] = _ignore
        try:
            yield
        finally:
            del attributes["log"], attributes["log_dict"]
            attributes.update(before)


def _ignore(*args: Any, **kwargs: Any) -> None:
    pass


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, Mapping):
        return {key: _detached(item) for key, item in value.items()}
    return value


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors of a batch, whatever holds them: mappings, sequences, dataclasses, objects with attributes."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [t for item in value.values() for t in tensors_of(item)]
    if isinstance(value, (list, tuple)):
        return [t for item in value for t in tensors_of(item)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [t for field in dataclasses.fields(value) for t in tensors_of(getattr(value, field.name))]
    if hasattr(value, "__dict__") and not isinstance(value, (type, torch.nn.Module)):
        return [t for item in vars(value).values() for t in tensors_of(item)]
    return []
