"""Text as bytes: what is read, what is held out, how it is cut."""

from __future__ import annotations

import hashlib
from functools import partial
from itertools import pairwise
from pydoc_data.topics import topics

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recipes.data import ByteDataModule, read_folder, read_standard_library
from recipes.data.bytes_module import Windows


def test_folder_is_read_whole_and_in_the_order_of_names(topics_folder):
    corpus = read_folder(str(topics_folder), hold_out_every=10)
    texts = [topics[name].encode() for name in sorted(topics, key=lambda name: f"{name}.txt")]
    assert corpus.num_files == len(texts)
    assert corpus.sha256 == hashlib.sha256(b"".join(texts)).hexdigest()
    assert corpus.validation == b"".join(texts[9::10])
    assert corpus.num_validation_files == len(texts[9::10])
    assert len(corpus.train) + len(corpus.validation) == sum(map(len, texts))


def test_hidden_and_binary_files_are_left_out(tmp_path):
    for name, content in {"a.txt": b"one", "b.md": b"two", ".hidden": b"three", "c.bin": b"4\x00", "empty.txt": b""}.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_bytes(b"five")
    corpus = read_folder(str(tmp_path))
    assert (corpus.train, corpus.validation, corpus.num_files) == (b"one", b"two", 2)


def test_standard_library_is_large_and_without_its_tests():
    corpus = read_standard_library()
    assert corpus.num_files > 400
    assert len(corpus.train) > 5_000_000
    assert 0.02 < len(corpus.validation) / len(corpus.train) < 0.1
    assert b"class DictReader" in corpus.train + corpus.validation  # csv.py
    assert b"class Test_Csv(" not in corpus.train + corpus.validation  # test/test_csv.py


def test_bad_folders_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"data\.path='nowhere'"):
        read_folder("nowhere")
    (tmp_path / "only.txt").write_text("text")
    with pytest.raises(ValueError, match=r"1 text file\(s\); at least two"):
        read_folder(str(tmp_path))


@given(st.binary(min_size=1, max_size=200), st.integers(1, 20))
def test_windows_are_the_text_up_to_a_remainder(text, length):
    if len(text) < length:
        with pytest.raises(ValueError, match=r"data\.sequence_length"):
            Windows(np.frombuffer(text, np.uint8), length)
        return
    windows = Windows(np.frombuffer(text, np.uint8), length)
    joined = torch.cat([windows[index]["input_ids"] for index in range(len(windows))])
    assert bytes(joined.tolist()) == text[: len(text) // length * length]


@given(st.integers(1, 50), st.integers(1, 50))
def test_fewer_windows_are_spread_evenly(num_whole, num_windows):
    windows = Windows(np.arange(num_whole), 1, num_windows)
    chosen = [int(windows[index]["input_ids"]) for index in range(len(windows))]
    assert len(chosen) == min(num_whole, num_windows)
    gaps = {after - before for before, after in pairwise(chosen)}
    assert chosen[0] == 0
    assert not gaps or (min(gaps) >= 1 and max(gaps) - min(gaps) <= 1)


def test_order_depends_on_the_seed_alone(topics_folder):
    def first_batch(seed: int) -> torch.Tensor:
        module = ByteDataModule(partial(read_folder, str(topics_folder)), sequence_length=32, seed=seed)
        module.setup("fit")
        torch.rand(seed + 1)  # other draws must not matter
        return next(iter(module.train_dataloader()))["input_ids"]

    assert first_batch(0).shape == (4, 32)
    assert torch.equal(first_batch(0), first_batch(0))
    assert not torch.equal(first_batch(0), first_batch(1))
