"""Builds a model on the meta device and later gives values only to what this device holds, equal to an ordinary build.

Everything done to tensors while the model is built is recorded, on meta. Random numbers are drawn as they would be, into
scratch memory, and the generator's state before each draw is kept. Replaying then runs only what leads to the wanted
tensors: their values and the generators' states are those of the whole model built in one place, and never more than one
unwanted tensor exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from lightning_zb.model.layers import LayerStack
from lightning_zb.model.ownership import Ownership

_META = torch.device("meta")
_IS_META = Tensor.is_meta.__get__  # type: ignore[attr-defined]
_DEVICE = Tensor.device.__get__


@dataclass(frozen=True, slots=True)
class _Ref:
    """A recorded tensor: where it lies in which storage."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class _Entry:
    """One recorded operator.

    Args:
        function: the operator; None for values that existed when the recording met them.
        args: its arguments, tensors as `_Ref`.
        kwargs: its keywords, likewise.
        outputs: the tensors that it returns, None in place of those that lie in known storages.
        reads: storages of its tensor arguments.
        writes: storages that it changes or makes.
        generator: what it draws random numbers from; None for other operators.
        state: the generator's state before it.
    """

    function: Callable[..., Any] | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[_Ref | None, ...]
    reads: frozenset[int]
    writes: frozenset[int]
    generator: torch.Generator | None = None
    state: Tensor | None = None


class DeferredInit:
    """The record of how a model is built.

    Args:
        device: where an ordinary build would make the tensors, and where they are made in the end.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.peak_bytes = 0
        """Most bytes that recording or replaying has held at a time."""
        self._tape: list[_Entry] = []
        self._storages: dict[int, torch.UntypedStorage] = {}  # keeps them alive, so that no two have one key

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Inside, tensors are made on meta and what is done to them is recorded."""
        with _Recorder(self), _Disguise(self.device):  # initialisations skip what says that it is on meta
            yield

    @property
    def has_recorded(self) -> bool:
        """Whether anything was built."""
        return bool(self._tape)

    def knows(self, tensor: Tensor) -> bool:
        """Whether the tensor was made inside a recording."""
        return tensor.is_meta and _key(tensor) in self._storages

    def replay(self, wanted: Iterable[Tensor]) -> Callable[[Tensor], Tensor]:
        """Compute the values of some of the recorded tensors.

        Args:
            wanted: recorded meta tensors.

        Returns:
            Gives the real tensor of a wanted meta tensor; those that share memory on meta share it here.
        """
        values = self._values({_key(t) for t in wanted})
        return lambda t: _view(values[_key(t)], _describe(t), self.device)

    def _values(self, final: set[int]) -> dict[int, torch.UntypedStorage]:
        """Run what leads to these storages."""
        needed, live = set(final), []
        for entry in reversed(self._tape):
            if not needed:
                break
            if entry.writes & needed:
                live.append(entry)
                needed = (needed | entry.reads) - {ref.storage for ref in entry.outputs if ref is not None}
        live.reverse()
        last_use = {key: i for i, entry in enumerate(live) for key in (*entry.reads, *entry.writes)}
        values: dict[int, torch.UntypedStorage] = {}
        for i, entry in enumerate(live):
            self._run(entry, values)
            for key in entry.reads | entry.writes:
                if key not in final and last_use[key] == i:
                    values.pop(key, None)
        return values

    def record(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Write down an operator that ran on meta tensors, and draw its random numbers."""
        schema = function._schema  # type: ignore[attr-defined]
        reads = {_key(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        writes: set[int] = set()
        for position, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[position] if position < len(args) else kwargs.get(argument.name)
                writes.update(_key(t) for t in tree_leaves(value) if isinstance(t, Tensor))
        outputs: list[_Ref | None] = []
        for t in tree_leaves(result):
            new = isinstance(t, Tensor) and _key(t) not in self._storages
            outputs.append(_describe(t) if new else None)
            if new:
                self._storages[_key(t)] = t.untyped_storage()
                writes.add(_key(t))
        if not writes:
            return  # a view: its place in a known storage says all
        args, kwargs = tree_map(lambda x: _describe(x) if isinstance(x, Tensor) else x, (args, kwargs))
        entry = _Entry(function, args, kwargs, tuple(outputs), frozenset(reads), frozenset(writes))
        if torch.Tag.nondeterministic_seeded in function.tags:  # type: ignore[attr-defined]
            generator = kwargs.get("generator") or _default_generator(self.device)
            state = generator.get_state()
            self._run(entry, self._values(reads - writes))  # into scratch, to move the generator on
            entry = replace(entry, generator=generator, state=state)
        self._tape.append(entry)

    def constant(self, tensor: Tensor) -> Tensor:
        """The meta tensor that stands for one with values, which are kept."""
        stand_in = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_META)
        self._storages[_key(stand_in)] = stand_in.untyped_storage()
        key = frozenset({_key(stand_in)})
        self._tape.append(_Entry(None, (tensor.detach().clone(),), {}, (_describe(stand_in),), frozenset(), key))
        return stand_in

    @torch.no_grad()
    def _run(self, entry: _Entry, values: dict[int, torch.UntypedStorage]) -> None:
        def real(x: Any) -> Any:
            if isinstance(x, _Ref):
                if x.storage not in values:  # about to be written
                    values[x.storage] = torch.UntypedStorage(self._storages[x.storage].nbytes(), device=self.device)
                return _view(values[x.storage], x, self.device)
            return self.device if isinstance(x, torch.device) and x == _META else x

        args, kwargs = tree_map(real, (entry.args, entry.kwargs))
        if entry.function is None:
            results = [args[0].to(self.device)]
        else:
            with _drawing_from(entry.generator, entry.state):
                results = tree_leaves(entry.function(*args, **kwargs))
        for ref, result in zip(entry.outputs, results, strict=True):
            if ref is not None:
                if (result.stride(), result.storage_offset()) != (ref.stride, ref.offset):
                    result = torch.empty_strided(ref.size, ref.stride, dtype=ref.dtype, device=self.device).copy_(result)
                values[ref.storage] = result.untyped_storage()
        self.peak_bytes = max(self.peak_bytes, sum(storage.nbytes() for storage in values.values()))


class _Disguise(TorchFunctionMode):
    """Lets meta tensors claim another device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func == _IS_META:
            return False
        return self._device if func == _DEVICE and result == _META else result


class _Recorder(TorchDispatchMode):
    """Sends every tensor to meta and every operator to the record."""

    def __init__(self, deferred: DeferredInit) -> None:
        super().__init__()
        self._deferred = deferred

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.ops.aten.lift_fresh.default:  # torch.tensor(...): values are given
            return self._deferred.constant(args[0])
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        makes = any(argument.name == "device" for argument in func._schema.arguments)
        if not any(t.is_meta for t in tensors) if tensors else not makes:
            return func(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default:
            return func(self._deferred.replay([args[0]])(args[0]))
        if makes:
            kwargs["device"] = _META
        args, kwargs = tree_map(
            lambda x: self._deferred.constant(x) if isinstance(x, Tensor) and not x.is_meta else x, (args, kwargs)
        )
        result = func(*args, **kwargs)
        self._deferred.record(func, args, kwargs, result)
        return result


def materialise(module: nn.Module, stack: LayerStack, ownership: Ownership, deferred: DeferredInit) -> Ownership:
    """Give values to what this device holds of a module that was built inside a recording.

    Args:
        module: the LightningModule, after `take_ownership`.
        stack: its layers.
        ownership: what this device holds.
        deferred: how the module was built.

    Returns:
        The same ownership, with the real parameters.

    Raises:
        RuntimeError: a parameter of this device was built on meta outside the recording.
    """
    wanted = {
        id(p): (name, p) for (name, p), held in zip(ownership.parameters, ownership.held, strict=True) if held and p.is_meta
    }
    for name, p in wanted.values():
        if not deferred.knows(p):
            raise RuntimeError(f'parameter "{name}" has no values: build it in configure_model, or not on the meta device')
    others = _other_tensors(module, stack, ownership, deferred)
    real = deferred.replay([*(p for _, p in wanted.values()), *(t for _, _, t in others)])
    made = {key: _parameter(real(p), p) for key, (_, p) in wanted.items()}
    for _, p in ownership.parameters:
        if p.is_meta and id(p) not in made and p.untyped_storage().nbytes() < p.numel() * p.element_size():
            made[id(p)] = _parameter(torch.zeros((), dtype=p.dtype, device=deferred.device).expand(p.shape), p)
    for m in module.modules():
        for name, parameter in m._parameters.items():
            if parameter is not None and id(parameter) in made:
                m._parameters[name] = made[id(parameter)]
    for store, name, t in others:
        store[name] = real(t)
    return Ownership(tuple(module.named_parameters()), ownership.held, ownership.buffers)


def _other_tensors(
    module: nn.Module, stack: LayerStack, ownership: Ownership, deferred: DeferredInit
) -> list[tuple[dict[str, Any], str, Tensor]]:
    """Buffers and plain tensor attributes outside the layers and in this device's layers."""
    held = {id(p) for p in ownership.own_parameters()}
    own: set[int] = set()
    inside: set[int] = set()
    for name, layer in zip(stack.names, stack.modules, strict=True):
        inside.update(id(m) for m in layer.modules())
        if any(id(p) in held for p in layer.parameters()) or any(b.startswith(f"{name}.") for b in ownership.buffers):
            own.update(id(m) for m in layer.modules())
    return [
        (store, name, t)
        for m in module.modules()
        if id(m) in own or id(m) not in inside
        for store in (m._buffers, m.__dict__)
        for name, t in store.items()
        if isinstance(t, Tensor) and deferred.knows(t)
    ]


def _parameter(values: Tensor, like: nn.Parameter) -> nn.Parameter:
    parameter = nn.Parameter(values, requires_grad=like.requires_grad)
    parameter.__dict__.update(like.__dict__)
    return parameter


@contextmanager
def _drawing_from(generator: torch.Generator | None, state: Tensor | None) -> Iterator[None]:
    """Inside, the generator is at the recorded state; afterwards it is where it was."""
    if generator is None or state is None:
        yield
        return
    before = generator.get_state()
    generator.set_state(state)
    try:
        yield
    finally:
        generator.set_state(before)


def _default_generator(device: torch.device) -> torch.Generator:
    return torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _describe(tensor: Tensor) -> _Ref:
    return _Ref(_key(tensor), tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))


def _view(storage: torch.UntypedStorage, ref: _Ref, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=ref.dtype, device=device).set_(storage, ref.offset, ref.size, ref.stride)
