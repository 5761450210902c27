"""Causal language models of the transformers library, from a configuration with random weights."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

from recipes.models.language_model import LanguageModel

if not torch.cuda.is_available():
    # Every process would advise to install CUDA kernels.
    transformers.logging.set_verbosity_error()


class TransformersLanguageModel(LanguageModel):
    """Any causal language model of transformers.

    Args:
        config: its configuration, which also says which model it is; weights are random.
        options: the optimizer's options, see LanguageModel.
    """

    def __init__(self, config: transformers.PreTrainedConfig, **options: Any) -> None:
        super().__init__(**options)
        self.model = transformers.AutoModelForCausalLM.from_config(config)

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return self.model(**batch).loss
