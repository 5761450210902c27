"""A Lightning data module that cuts text into windows of a tokenizer's tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import transformers

from recipes.data.bytes_module import ByteDataModule
from recipes.data.corpus import Corpus


class TokenDataModule(ByteDataModule):
    """Text for language models, as the tokens of a tokenizer from a local folder.

    Args:
        read: reads the corpus.
        tokenizer: the folder.
        options: of windows and batches, see ByteDataModule; lengths count tokens.
    """

    def __init__(self, read: Callable[[], Corpus], tokenizer: str, **options: Any) -> None:
        super().__init__(read, **options)
        self.tokenizer = tokenizer

    def encode(self, text: bytes) -> np.ndarray:
        tokenizer = transformers.AutoTokenizer.from_pretrained(self.tokenizer, local_files_only=True)
        # One long text: the tokenizer's own limit of a sequence does not matter, it is cut into windows.
        ids = tokenizer(text.decode(errors="replace"), add_special_tokens=False, verbose=False)["input_ids"]
        return np.asarray(ids, dtype=np.int64)
