"""Finds the stack of layers that a pipeline cuts in a LightningModule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

_EXAMPLE = 'ZeroBubbleStrategy(layers="model.layers")'


@dataclass(frozen=True, slots=True)
class LayerStack:
    """The layers that run one after another, each on what the one before returned.

    Args:
        path: dotted name of the container in the LightningModule; several are joined by commas.
        names: dotted name of each layer.
        modules: the layers in running order; a module may stand in it more than once.
    """

    path: str
    names: tuple[str, ...]
    modules: tuple[nn.Module, ...]

    def __len__(self) -> int:
        return len(self.modules)

    def positions(self) -> dict[nn.Module, tuple[int, ...]]:
        """Where each module stands in the stack."""
        found: dict[nn.Module, tuple[int, ...]] = {}
        for position, module in enumerate(self.modules):
            found[module] = (*found.get(module, ()), position)
        return found


def find_layers(module: nn.Module, layers: str | Sequence[str] | None = None) -> LayerStack:
    """The layer stack of a module.

    Args:
        module: the LightningModule.
        layers: dotted name of the container, or of several that run one after another; None to look for the one
            `nn.ModuleList` or `nn.Sequential` that holds more layers and more parameters than any other.

    Returns:
        The stack.

    Raises:
        ValueError: the name leads to no container, no container exists, or several come into question.
    """
    if layers is None:
        path = _widest_container(module)
        return _stack(module, [path])
    return _stack(module, [layers] if isinstance(layers, str) else list(layers))


def check_same_layers(module: nn.Module, stack: LayerStack) -> None:
    """Called when configure_model ran again, as it does in every fit, validate, test and predict.

    Args:
        module: the LightningModule.
        stack: its layers when they were cut.

    Raises:
        ValueError: it built another model, whose layers nobody cut.
    """
    modules = dict(module.named_modules(remove_duplicate=False))
    if any(modules.get(name) is not layer for name, layer in zip(stack.names, stack.modules, strict=True)):
        raise ValueError(
            "configure_model built the model a second time, and the weights trained so far would be lost; "
            "return where it exists: if self.model is not None: return"
        )


def _stack(module: nn.Module, paths: Sequence[str]) -> LayerStack:
    names: list[str] = []
    modules: list[nn.Module] = []
    for path in paths:
        try:
            container = module.get_submodule(path)
        except AttributeError as error:
            candidates = " or ".join(f'"{p}"' for p in _containers(module)) or "none found"
            raise ValueError(
                f'layers="{path}" names no module of {type(module).__name__}; its layer containers: {candidates}'
            ) from error
        if not isinstance(container, (nn.ModuleList, nn.Sequential, nn.ModuleDict)) or not len(container):
            raise ValueError(
                f'layers="{path}" is a {type(container).__name__}; '
                "name an nn.ModuleList, nn.Sequential or nn.ModuleDict that holds the layers"
            )
        # not named_children(): it leaves out the second place of a module that stands in the container twice
        for name, layer in container._modules.items():
            if layer is not None:
                names.append(f"{path}.{name}")
                modules.append(layer)
    return LayerStack(",".join(paths), tuple(names), tuple(modules))


def _containers(module: nn.Module) -> dict[str, nn.ModuleList | nn.Sequential]:
    """Containers with parameters that do not stand inside another one."""
    found: dict[str, nn.ModuleList | nn.Sequential] = {}

    def visit(parent: nn.Module, prefix: str) -> None:
        for name, child in parent.named_children():
            path = f"{prefix}{name}"
            if not isinstance(child, (nn.ModuleList, nn.Sequential)):
                visit(child, f"{path}.")
            elif next(child.parameters(), None) is not None:
                found[path] = child

    visit(module, "")
    return found


def _widest_container(module: nn.Module) -> str:
    sizes = {
        path: (sum(child is not None for child in container._modules.values()), sum(p.numel() for p in container.parameters()))
        for path, container in _containers(module).items()
    }
    if not sizes:
        raise ValueError(
            f"found no nn.ModuleList or nn.Sequential with parameters in {type(module).__name__}; "
            f"keep the layers in one and name it, for example {_EXAMPLE}"
        )
    widest = [path for path, size in sizes.items() if all(_at_least(size, other) for other in sizes.values())]
    if len(widest) != 1:
        listed = ", ".join(f'"{path}" ({num} layers, {numel:,} parameters)' for path, (num, numel) in sizes.items())
        raise ValueError(f"several layer stacks come into question: {listed}; name one, for example {_EXAMPLE}")
    return widest[0]


def _at_least(size: tuple[int, int], other: tuple[int, int]) -> bool:
    return size[0] >= other[0] and size[1] >= other[1]
