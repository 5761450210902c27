"""Makes the strategy known to Lightning by its name, without importing Lightning first."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_REGISTRY_MODULE = "lightning.pytorch.strategies"


def register_with_lightning() -> None:
    """Register `zero_bubble`: at once where Lightning is imported already, else as soon as it has been."""
    module = sys.modules.get(_REGISTRY_MODULE)
    if hasattr(module, "StrategyRegistry"):
        _register(module)
    elif not any(isinstance(finder, _LightningFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _LightningFinder())


def _register(module: Any) -> None:
    module.StrategyRegistry.register("zero_bubble", _make, description="Zero-bubble pipeline parallelism", override=True)


def _make(**options: Any) -> Any:
    """The strategy; imported here because Lightning may still be in the middle of its own import when it is registered."""
    from lightning_zb.strategy import ZeroBubbleStrategy

    return ZeroBubbleStrategy(**options)


class _LightningFinder(MetaPathFinder):
    """Finds Lightning's registry as the other finders do, and has the strategy registered when it has been imported."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != _REGISTRY_MODULE:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next((spec for finder in others if (spec := finder.find_spec(fullname, path, target))), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _RegisteringLoader(spec.loader)
        return spec


class _RegisteringLoader(Loader):
    """Loads a module by its own loader, then registers."""

    def __init__(self, own: Loader) -> None:
        self._own = own

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._own  # nobody but the import system is to see this class
        if module.__spec__ is not None:
            module.__spec__.loader = self._own
        self._own.exec_module(module)
        _register(module)
