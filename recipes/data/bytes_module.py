"""A Lightning data module that cuts text into windows of bytes: a token is a byte, and there are no special tokens."""

from __future__ import annotations

from collections.abc import Callable

import lightning as L
import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from recipes.data.corpus import Corpus


class Windows(Dataset[dict[str, Tensor]]):
    """Windows of equal length that do not overlap, as input ids and labels of a causal language model.

    Args:
        tokens: the text to cut, one dimension.
        length: tokens of a window.
        num_windows: keep so many, evenly spread over the text; None keeps all.

    Raises:
        ValueError: the text is shorter than one window.
    """

    def __init__(self, tokens: np.ndarray, length: int, num_windows: int | None = None) -> None:
        num_whole = len(tokens) // length
        if num_whole == 0:
            raise ValueError(f"{len(tokens)} tokens of text are less than one window; set data.sequence_length below {length}")
        windows = tokens[: num_whole * length].reshape(num_whole, length)
        if num_windows is not None and num_windows < num_whole:
            windows = windows[np.arange(num_windows) * num_whole // num_windows]
        self._windows = windows

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.from_numpy(self._windows[index].astype(np.int64))
        # The model shifts the labels itself, as causal language models of transformers do.
        return {"input_ids": ids, "labels": ids}


class ByteDataModule(L.LightningDataModule):
    """Byte-level text for language models.

    Args:
        read: reads the corpus.
        sequence_length: bytes of a window.
        batch_size: windows of a batch; with accumulate_grad_batches a batch is one microbatch.
        num_validation_windows: windows of the validation text to use, evenly spread; None uses all.
        num_workers: processes that prepare batches.
        seed: of the order of training windows.
    """

    def __init__(
        self,
        read: Callable[[], Corpus],
        sequence_length: int = 128,
        batch_size: int = 4,
        num_validation_windows: int | None = 128,
        num_workers: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.read = read
        self.sequence_length = sequence_length
        self.batch_size = batch_size
        self.num_validation_windows = num_validation_windows
        self.num_workers = num_workers
        self.seed = seed
        self._train: Windows | None = None
        self._validation: Windows | None = None

    def setup(self, stage: str) -> None:
        if self._train is not None:
            return
        corpus = self.read()
        rank_zero_info(f"Data: {corpus}")
        self._train = Windows(self.encode(corpus.train), self.sequence_length)
        self._validation = Windows(self.encode(corpus.validation), self.sequence_length, self.num_validation_windows)

    def encode(self, text: bytes) -> np.ndarray:
        """Turn text into tokens: here a token is a byte."""
        return np.frombuffer(text, dtype=np.uint8)

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        assert self._train is not None
        # Its own generator: the order depends on the seed alone, on every device alike.
        order = torch.Generator().manual_seed(self.seed)
        return DataLoader(
            self._train,
            batch_size=self.batch_size,
            shuffle=True,
            drop_last=True,
            generator=order,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
        )

    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        assert self._validation is not None
        return DataLoader(self._validation, batch_size=self.batch_size)
