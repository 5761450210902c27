"""Stand-ins for the modules before the layers (embeddings, positional tables), on chunks that do not run them.

The user's code derives masks, positions and rotary tables from what these modules return, so they return real zeros of
the right shape, dtype and device, found by running the module's own forward once on fake tensors for each input shape.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_map

from lightning_zb.model.interception import Interception, restore_forward
from lightning_zb.model.layers import LayerStack


def outside_modules(module: nn.Module, stack: LayerStack) -> list[tuple[str, nn.Module]]:
    """Modules with parameters that neither belong to a layer nor contain one, in module order, parents first."""
    inside = {id(m) for layer in stack.modules for m in layer.modules()}
    return [
        (name, m)
        for name, m in module.named_modules()
        if next(m.parameters(), None) is not None and not any(id(child) in inside for child in m.modules())
    ]


class PrologueStubs:
    """Dispatchers on the modules outside the stack; active before the layers in chunks that are not the first.

    Args:
        module: the LightningModule.
        interception: of its layers.
        device: where parameters that this device does not hold would be.
    """

    def __init__(self, module: nn.Module, interception: Interception, device: torch.device) -> None:
        self.interception = interception
        self.probing = False
        self._device = device
        self._modules = outside_modules(module, interception.stack)
        self.install()

    def install(self) -> None:
        """Put a dispatcher in the place of each module's `forward`."""
        for name, m in self._modules:
            m.__dict__["forward"] = _Outside(self, name, m, m.forward)

    def remove(self) -> None:
        """Give the modules their own `forward` back."""
        for _, m in self._modules:
            restore_forward(m)

    def stood_in(self) -> list[str]:
        """Names of the modules that a stand-in was returned for: they run before the layers."""
        return [name for name, m in self._modules if m.__dict__["forward"].has_stood_in]

    @contextmanager
    def probe(self) -> Iterator[None]:
        """Inside, modules run their own code."""
        self.probing = True
        try:
            yield
        finally:
            self.probing = False

    def fake_state(self, module: nn.Module) -> dict[str, Tensor]:
        """Parameters and buffers for a probe; called inside a fake mode."""
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        return {
            name: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=self._device if t.is_meta else t.device)
            for name, t in tensors.items()
        }


class _Probe(nn.Module):
    """Calls a module's original forward, without the module's own hooks: they run on the stand-in."""

    def __init__(self, module: nn.Module, original: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self.original = module, original

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.original(*args, **kwargs)


class _Outside:
    """The `forward` of a module outside the stack: the original, or a stand-in of what it returns."""

    def __init__(self, stubs: PrologueStubs, name: str, module: nn.Module, original: Callable[..., Any]) -> None:
        self.stubs, self.name, self.module, self.original = stubs, name, module, original
        self._shapes: dict[Hashable, Any] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        running = self.stubs.interception.running
        if running is None or not running.stubbing or self.stubs.probing:
            return self.original(*args, **kwargs)
        likes = self._likes(args, kwargs)
        return tree_map(lambda x: running.stand_in(x) if isinstance(x, Tensor) else x, likes)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        return copy.deepcopy(self.original, memo)

    @property
    def has_stood_in(self) -> bool:
        """Whether a stand-in was returned for this module."""
        return bool(self._shapes)

    def _likes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module's return value with one-element tensors expanded to the right shapes in place of the real ones."""
        leaves, spec = tree_flatten((args, kwargs))
        described = tuple((x.shape, x.dtype, x.device) if isinstance(x, Tensor) else x for x in leaves)
        key = (
            self.module.training,
            torch.is_autocast_enabled("cpu"),
            torch.is_autocast_enabled("cuda"),
            str(spec),
            repr(described),
        )
        if key not in self._shapes:
            self._shapes[key] = self._probe(args, kwargs)
        return self._shapes[key]

    def _probe(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        mode = FakeTensorMode(allow_non_fake_inputs=True)

        def fake(x: Any) -> Any:
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) if isinstance(x, Tensor) else x

        try:
            with torch.no_grad(), self.stubs.probe(), mode:
                fake_args, fake_kwargs = tree_map(fake, (args, kwargs))
                state = {f"module.{name}": t for name, t in self.stubs.fake_state(self.module).items()}
                result = functional_call(_Probe(self.module, self.original), state, fake_args, fake_kwargs)
        except Exception as error:
            raise RuntimeError(
                f'module "{self.name}" runs before the pipelined layers and '
                f"its output shape cannot be found without its weights: {error}"
            ) from error
        return tree_map(lambda x: _describe(x) if isinstance(x, Tensor) else x, result)


def _describe(fake: Tensor) -> Tensor:
    return torch.empty((), dtype=fake.dtype, device=fake.device).expand(tuple(fake.shape))
