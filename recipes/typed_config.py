"""Checks a configuration against the signatures of what it names, before anything is built."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, Union

from hydra.utils import get_object
from omegaconf import DictConfig, ListConfig, OmegaConf

_SCALARS = (bool, int, float, str, type(None))


def check_config(config: DictConfig) -> None:
    """Check every node that has a `_target_`: its keys are parameters, and plain values are of the declared types.

    Args:
        config: the composed configuration.

    Raises:
        ValueError: an unknown key or a value of another type; the message starts with the key.
    """
    for path, node in _targets(config, ()):
        target_name = node["_target_"]
        hints, takes_any = _parameters(get_object(target_name))
        for key, value in _items(node):
            name = ".".join((*path, key))
            if key.startswith("_"):
                continue
            if key not in hints and not takes_any:
                raise ValueError(f"{name}: {target_name} has no parameter {key!r}; it has {', '.join(hints)}")
            if isinstance(value, _SCALARS) and not _fits(value, hints.get(key, Any)):
                raise ValueError(f"{name}={value!r} is not {_describe(hints[key])}, which {target_name} wants")


def _targets(node: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], DictConfig]]:
    if isinstance(node, DictConfig):
        if "_target_" in node:
            yield path, node
        # What a key points to elsewhere is checked there, under its own name.
        for key, item in _items(node):
            if not OmegaConf.is_interpolation(node, key):
                yield from _targets(item, (*path, key))
    elif isinstance(node, ListConfig):
        for index, item in enumerate(node):
            yield from _targets(item, (*path, str(index)))


def _items(node: DictConfig) -> list[tuple[str, Any]]:
    return [(str(key), value) for key, value in node.items()]


def _parameters(target: Callable[..., Any]) -> tuple[Mapping[str, Any], bool]:
    """The parameters of a function or class with their types, and whether it takes any other keyword besides.

    A class that hands `**options` on to its base class has the base's parameters too.
    """
    hints: dict[str, Any] = {}
    classes = target.__mro__ if isinstance(target, type) else ()
    functions = [vars(cls)["__init__"] for cls in classes if "__init__" in vars(cls)] or [target]
    for function in functions:
        parameters = inspect.signature(function).parameters.values()
        try:
            types_of = typing.get_type_hints(function)
        except NameError:  # names imported for type checkers only
            types_of = {}
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name != "self"]
        hints = {p.name: types_of.get(p.name, Any) for p in named} | hints
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            return hints, False
    return hints, True


def _fits(value: Any, hint: Any) -> bool:
    if hint is Any:  # a class only since Python 3.11
        return True
    origin = typing.get_origin(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, choice) for choice in typing.get_args(hint))
    if origin is Literal:
        return value in typing.get_args(hint)
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint is None:
        return value is None
    if hint in _SCALARS:
        return isinstance(value, hint)
    # A scalar where an object is wanted is wrong, but what else a hint may say is the target's own business to check.
    return not isinstance(hint, type) or isinstance(value, hint)


def _describe(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "").replace("NoneType", "None")
