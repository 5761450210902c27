"""Side channels: what layers gather for the loss besides what they return, carried along with the payload.

Hugging Face collects router logits of all layers by hooks and multiplies means over them in the load-balancing loss; a
user's model may append auxiliary losses to a list. Neither can be summed layer by layer, so the gathered values travel
from chunk to chunk, with their gradients, and the last chunk's own code finds the list that an unsplit model has.
"""

from __future__ import annotations

import sys
from typing import Any, Protocol

from torch import nn


class SideChannel(Protocol):
    """Lists that the layers append to while they run."""

    def lists(self) -> dict[str, list[Any]]:
        """The lists of the running step, by name."""
        ...


class AttributeList:
    """A list attribute that the layers append to, emptied by the user's step before the layers run.

    Args:
        module: the LightningModule.
        path: dotted name of the attribute, for example "model.aux_losses".
    """

    def __init__(self, module: nn.Module, path: str) -> None:
        owner, _, name = path.rpartition(".")
        try:
            self._owner, self._name, self._path = module.get_submodule(owner), name, path
        except AttributeError as error:
            raise ValueError(
                f'side_channels="{path}": {type(module).__name__} has no module "{owner}"; '
                'write the dotted name of the list, for example "model.aux_losses"'
            ) from error

    def lists(self) -> dict[str, list[Any]]:
        value = getattr(self._owner, self._name, None)
        if not isinstance(value, list):
            raise TypeError(
                f'side channel "{self._path}" is a {type(value).__name__}; '
                "make it a list that the step empties and the layers append to"
            )
        return {self._path: value}


class CapturedOutputs:
    """The outputs that Hugging Face models collect by hooks (router logits, attentions); nothing for other models."""

    def lists(self) -> dict[str, list[Any]]:
        capturing = sys.modules.get("transformers.utils.output_capturing")
        collector = capturing._active_collector.get() if capturing is not None else None
        if not collector:
            return {}
        if "hidden_states" in collector:
            raise ValueError(
                "output_hidden_states=True asks for states that other devices hold; set it to False under a pipeline"
            )
        return {name: values for name, values in collector.items() if isinstance(values, list)}


class SideChannels:
    """Moves the side channels of one pass.

    Args:
        channels: the channels of the model.
    """

    def __init__(self, channels: tuple[SideChannel, ...]) -> None:
        self._channels = channels
        self._lists: dict[str, list[Any]] = {}
        self._lengths: dict[str, int] = {}

    def open(self) -> None:
        """Called when the step reaches the first layer: what the lists hold now stays out of the payload."""
        self._lists = {name: values for channel in self._channels for name, values in channel.lists().items()}
        self._lengths = {name: len(values) for name, values in self._lists.items()}

    def inject(self, received: dict[str, list[Any]]) -> None:
        """Hand over what the layers of earlier chunks gathered."""
        for name, values in received.items():
            self._lists[name].extend(values)

    def collect(self) -> dict[str, list[Any]]:
        """What the layers have gathered since the step reached the first one, that of earlier chunks included."""
        return {name: values[self._lengths[name] :] for name, values in self._lists.items()}
