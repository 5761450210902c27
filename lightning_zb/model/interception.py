"""Runs one chunk of the user's own step: layers outside the chunk's window are passed through or unwound from.

Nothing is replaced. Every layer gets an instance-level `forward` that looks at the running pass: a layer before the
window returns a stand-in, the last one before it returns the received payload; when the last layer of the window has
returned, the step is unwound with a BaseException that carries its return value, whole. Outside a pass (recomputation
in B, an unsplit model) the layer just runs.

Stand-ins depend on a sentinel whose gradient hook raises: a value that bypasses the layers (a skip connection from the
embedding, a residual added around a layer, a loss on intermediate states) is noticed in B instead of being wrong. Where
no gradient is recorded stand-ins are NaN, which shows in whatever they reach.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from lightning_zb.model.layer_recorder import LayerRecorder
from lightning_zb.model.layers import LayerStack
from lightning_zb.model.randomness import RandomStreams
from lightning_zb.model.side_channels import CapturedOutputs, SideChannel, SideChannels
from lightning_zb.model.windows import Window

_CHECKPOINT_FILE = torch.utils.checkpoint.__file__


class ChunkEnd(BaseException):
    """Unwinds the user's step once the chunk's output is known; no Exception, so that `except Exception` lets it by."""


def _refuse_bypass(gradient: Tensor) -> None:
    raise RuntimeError(
        "a value made before or between the pipelined layers reaches the loss without passing through them "
        "(a skip connection, a residual around a layer, a loss on intermediate states): "
        "make it part of what the layers take and return"
    )


class _HandOver(torch.autograd.Function):
    """The received leaf as a tensor that is no leaf, so that layers and the code around them may change it in place."""

    @staticmethod
    def forward(ctx: Any, received: Tensor) -> Tensor:
        return received.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def _handed_over(value: Any) -> Any:
    return _HandOver.apply(value) if isinstance(value, Tensor) and value.requires_grad else value


class Pass:
    """State of one running pass: F of a chunk on a microbatch.

    Args:
        window: what the chunk runs.
        num_layers: layers of the stack.
        received: payload of the chunk before; None for the first.
        side_channels: lists that travel with the payload.
        streams: random streams; None to leave the generators alone.
        caller: the code that runs the step, where looking for checkpoint frames stops.
        recorder: takes the layers' times; None unless profiling.
    """

    def __init__(
        self,
        window: Window,
        num_layers: int,
        received: Any,
        side_channels: SideChannels,
        streams: RandomStreams | None,
        caller: CodeType,
        recorder: LayerRecorder | None = None,
    ) -> None:
        self.window = window
        self.num_layers = num_layers
        self.position = 0  # the next layer of the stack
        self.stubbing = not window.is_first  # the step's code before the layers gets stand-ins
        self.ended = False
        self.output: Any = None
        self._value, self._side = received if received is not None else (None, {})
        self._sentinels: dict[torch.device, Tensor] = {}
        self._stand_in: Any = None
        self._side_channels = side_channels
        self._streams = streams
        self._caller = caller
        self._recorder = recorder
        self._pending: Any = None

    def stand_in(self, like: Tensor) -> Tensor:
        """Zeros (without gradients: NaN) in place of a tensor that this device does not compute.

        Args:
            like: gives shape, dtype and device.
        """
        if not (like.is_floating_point() or like.is_complex()):
            zeros = torch.zeros((), dtype=like.dtype, device=like.device).expand(like.shape)
        else:
            zeros = self._sentinel(like.device).to(like.dtype).expand(like.shape)
        return zeros.clone(memory_format=torch.contiguous_format)  # the user's code may change it in place

    def _sentinel(self, device: torch.device) -> Tensor:
        if device not in self._sentinels:
            tracked = torch.is_grad_enabled()
            self._sentinels[device] = torch.full((), 0.0 if tracked else torch.nan, device=device, requires_grad=tracked)
            if tracked:
                self._sentinels[device].register_hook(_refuse_bypass)
        return self._sentinels[device]

    def run_layer(self, layer: _Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the dispatcher of a layer does during the pass."""
        position, window = self.position, self.window
        if self.ended:  # the user's code swallowed the first one
            raise ChunkEnd
        if position not in layer.positions:
            self._refuse_order(layer)
        if position == 0:
            self._side_channels.open()
        if position < window.start:
            self.position += 1
            if self._streams is not None:
                self._streams.pass_layer(position)
            if self.position < window.start:
                return self._pass_through()
            if self._recorder is not None and self.position == self.num_layers:
                self._recorder.enter_epilogue()
            return self._deliver()
        if position == 0 and (self.stubbing or window.stop == 0) and self._inside_checkpoint():
            # recomputation would call the layer with what the stand-in became, not with what is handed over here
            raise RuntimeError(
                f'layer "{layer.name}" runs under torch.utils.checkpoint right after a chunk of the prologue alone; '
                "give the first chunk at least one layer, or checkpoint inside the layer's forward"
            )
        if position == window.stop and not window.is_last:
            self._end(self._pending if position else _first_tensor(args, kwargs))
        if _is_context_parallel():
            raise ValueError(
                f'layer "{layer.name}" runs under torch\'s context_parallel, which splits sequences over processes that run '
                "other layers of the pipeline; leave it out, smaller microbatches and activation checkpointing make room too"
            )
        if position == 0 and self.stubbing:
            self.stubbing = False
            self._side_channels.inject(self._side)
            args, kwargs = _with_first_tensor(args, kwargs, _handed_over(self._value))
        if self._recorder is not None:
            self._recorder.enter_layer(position, (args, kwargs))
        if self._streams is None:
            value = layer.original(*args, **kwargs)
        else:
            # the first position, as recomputation does: the stream that is left already tells two uses apart
            outside = self._streams.enter_layer(layer.positions[0])
            value = layer.original(*args, **kwargs)
            self._streams.leave_layer(position, outside)
        if self._recorder is not None:
            self._recorder.leave_layer(position, value)
        self.position += 1
        if self.position == window.stop and not window.is_last:
            if not self._inside_checkpoint():
                self._end(value)
            if window.stop == self.num_layers:
                raise RuntimeError(
                    f'layer "{layer.name}" runs under torch.utils.checkpoint and ends a chunk before the epilogue; '
                    "give the last chunk at least one layer, or checkpoint inside the layer's forward"
                )
            self._pending = value
        return value

    def check_complete(self) -> None:
        """Called when the step returned.

        Raises:
            RuntimeError: it did not run through the layers of the window.
        """
        if self.ended:
            return
        if self.position == 0:
            raise RuntimeError(
                "the step never reached the pipelined layers; name the stack that it runs, "
                'for example ZeroBubbleStrategy(layers="model.layers")'
            )
        if self.position != self.num_layers:
            raise RuntimeError(
                f"the step called {self.position} of the {self.num_layers} pipelined layers; it must call each once, in order"
            )

    def _end(self, value: Any) -> None:
        self.output = (value, self._side_channels.collect())
        self.ended = True
        raise ChunkEnd

    def _deliver(self) -> Any:
        self._inside_checkpoint()
        self.stubbing = False
        self._side_channels.inject(self._side)
        return tree_map(_handed_over, self._value)

    def _pass_through(self) -> Any:
        if self._stand_in is None:
            self._stand_in = tree_map(lambda x: self.stand_in(x) if isinstance(x, Tensor) else x, self._value)
        return self._stand_in

    def _inside_checkpoint(self) -> bool:
        """Whether the user's code runs this layer under torch.utils.checkpoint; looked at where a chunk starts and ends."""
        frame = sys._getframe(1)
        while frame is not None and frame.f_code is not self._caller:
            if frame.f_code.co_filename == _CHECKPOINT_FILE:
                if frame.f_code.co_name == "forward":  # CheckpointFunction.forward: no graph is recorded inside
                    raise RuntimeError(
                        "the layers run under reentrant activation checkpointing; "
                        "pass use_reentrant=False to torch.utils.checkpoint"
                    )
                return True
            frame = frame.f_back  # type: ignore[assignment]
        return False

    def _refuse_order(self, layer: _Layer) -> None:
        if self.position == self.num_layers and 0 in layer.positions:
            raise RuntimeError(
                "the step runs the pipelined layers twice; call them once per step, for example on the concatenated batch"
            )
        if self.position - 1 in layer.positions:
            raise RuntimeError(
                f'the step calls layer "{layer.name}" twice; put it into the container twice, or call it twice inside one layer'
            )
        raise RuntimeError(
            f'the step calls layer "{layer.name}" where layer number {self.position} of the stack comes next; '
            "call each once, in order"
        )


class _Layer:
    """The `forward` of a layer: the original, or what the running pass says."""

    def __init__(self, interception: Interception, name: str, positions: tuple[int, ...], original: Callable[..., Any]) -> None:
        self.interception, self.name, self.positions, self.original = interception, name, positions, original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        running = self.interception.running
        if running is not None:
            return running.run_layer(self, args, kwargs)
        streams = self.interception.streams
        if streams is None:
            return self.original(*args, **kwargs)
        with streams.replayed_layer(self.positions[0]):
            return self.original(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        return copy.deepcopy(self.original, memo)  # a copied layer is an ordinary one


class Interception:
    """The layers of a module, intercepted from the start until `remove`, and again from `install` on.

    Args:
        stack: the layers.
        streams: random streams of the passes; None to leave the generators alone.
        side_channels: lists that travel with the payload besides what Hugging Face models collect.
    """

    def __init__(
        self, stack: LayerStack, streams: RandomStreams | None = None, side_channels: tuple[SideChannel, ...] = ()
    ) -> None:
        self.stack = stack
        self.streams = streams
        self.running: Pass | None = None
        self._side_channels = (CapturedOutputs(), *side_channels)
        self.install()

    def install(self) -> None:
        """Put a dispatcher in the place of each layer's `forward`."""
        for layer, positions in self.stack.positions().items():
            # a layer compiled in place (`layer.compile()`) is entered by another door, around its hooks and its forward
            door = "forward" if layer._compiled_call_impl is None else "_compiled_call_impl"
            # not setattr: wrapped modules redirect it
            layer.__dict__[door] = _Layer(self, self.stack.names[positions[0]], positions, getattr(layer, door))

    @contextmanager
    def chunk(self, window: Window, received: Any, caller: CodeType, recorder: LayerRecorder | None = None) -> Iterator[Pass]:
        """Run the step inside: what it calls of the layers belongs to one pass.

        Args:
            window: what the chunk runs.
            received: payload of the chunk before, None for the first.
            caller: code object of the function that calls the step.
            recorder: takes the layers' times; None unless profiling.
        """
        channels = SideChannels(self._side_channels)
        self.running = Pass(window, len(self.stack), received, channels, self.streams, caller, recorder)
        try:
            yield self.running
        finally:
            self.running = None

    def remove(self) -> None:
        """Give the layers their own `forward` back."""
        for layer in self.stack.positions():
            if isinstance(layer._compiled_call_impl, _Layer):
                layer.__dict__["_compiled_call_impl"] = layer._compiled_call_impl.original
            else:
                restore_forward(layer)


def _is_context_parallel() -> bool:
    """Whether `torch.distributed.tensor.experimental.context_parallel` has put its attention in place of torch's."""
    return str(getattr(F.scaled_dot_product_attention, "__module__", None)).startswith("torch.distributed")


def restore_forward(module: nn.Module) -> None:
    """Take an instance-level dispatcher off a module."""
    original = module.__dict__.pop("forward").original
    if getattr(original, "__self__", None) is not module:
        module.__dict__["forward"] = original


def _first_tensor_key(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | str:
    for position, value in enumerate(args):
        if isinstance(value, Tensor):
            return position
    if "hidden_states" in kwargs:
        return "hidden_states"
    for name, value in kwargs.items():
        if isinstance(value, Tensor):
            return name
    raise RuntimeError(
        "the first layer takes no tensor; a chunk of the prologue alone needs one, so give the first chunk a layer"
    )


def _first_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    key = _first_tensor_key(args, kwargs)
    return args[key] if isinstance(key, int) else kwargs[key]


def _with_first_tensor(args: tuple[Any, ...], kwargs: dict[str, Any], value: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    key = _first_tensor_key(args, kwargs)
    if isinstance(key, int):
        return (*args[:key], value, *args[key + 1 :]), kwargs
    return args, {**kwargs, key: value}
