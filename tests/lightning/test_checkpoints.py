"""One consolidated file: key by key the plain Trainer's, and any number of devices continues from any other's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_zb.sharded_checkpoint import consolidate
from tests.lightning.fitting import Case, differences, run
from tests.lightning.processes import run_cases

_RUN: dict[str, Any] = {"size": 36, "batch_size": 2, "accumulate": 4, "shuffle": False, "model_options": {"groups": True}}


def checkpoint_differences(a: Any, b: Any, where: str = "checkpoint") -> list[str]:
    """Differences of two checkpoints, keys and their order included."""
    if isinstance(a, dict) and isinstance(b, dict):
        if list(a) != list(b):
            return [f"{where}: keys {list(a)} and {list(b)}"]
        return [d for key in a for d in checkpoint_differences(a[key], b[key], f"{where}.{key}")]
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return [d for i, (x, y) in enumerate(zip(a, b, strict=True)) for d in checkpoint_differences(x, y, f"{where}[{i}]")]
    if isinstance(a, torch.Tensor):
        return [] if torch.equal(a, b) and a.dtype == b.dtype else [where]
    return [] if a == b else [f"{where}: {a} and {b}"]


def _case(name: str, strategy: dict[str, Any] | None, epochs: int, **changes: Any) -> Case:
    return Case(
        name, "tokens", trainer={"max_epochs": epochs, "gradient_clip_val": 0.5}, strategy=strategy, **{**_RUN, **changes}
    )


CHAIN = [
    None,
    {"schedule": "zb-v", "virtual_devices": 2},
    {"schedule": "1f1b", "virtual_devices": 4},
    {"schedule": "zb-v", "virtual_devices": 4, "partition": [1, 1, 1, 1, 1, 1, 1, 1]},
    None,
]


@pytest.mark.parametrize("tied", [False, True])
def test_every_run_continues_the_one_before(tied, tmp_path):
    """Plain, V on two, sequential on four, V on four, plain: as if one plain run had gone on."""
    options = {"model_options": {"groups": True, "tied": tied}}
    whole = run(_case("whole", None, len(CHAIN), save=str(tmp_path / "whole.ckpt"), **options), tmp_path)
    resume = None
    for epoch, strategy in enumerate(CHAIN, start=1):
        path = str(tmp_path / f"{epoch}.ckpt")
        result = run(_case(f"part{epoch}", strategy, epoch, save=path, resume=resume, **options), tmp_path)
        resume = path
    result["log"], result["rates"] = whole["log"], whole["rates"]  # of the last epoch only
    assert differences([result], whole) == []
    a, b = (torch.load(tmp_path / f, weights_only=False) for f in ("whole.ckpt", f"{len(CHAIN)}.ckpt"))
    for key in ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch"):
        assert checkpoint_differences(a[key], b[key], key) == []


@pytest.mark.distributed
def test_processes_write_the_plain_checkpoint_and_resume(tmp_path):
    saved = [str(tmp_path / f"{name}.ckpt") for name in ("v", "sequential")]
    cases = [
        _case("v", {"schedule": "zb-v"}, 1, devices=2, save=saved[0]),
        _case("sequential", {"schedule": "1f1b"}, 2, devices=2, resume=saved[0], save=saved[1]),
    ]
    run_cases(cases, 2, tmp_path)
    for epochs, path in enumerate(saved, start=1):
        plain = str(tmp_path / f"plain{epochs}.ckpt")
        run(_case(f"plain{epochs}", None, epochs, save=plain), tmp_path / "plain")
        a, b = (torch.load(p, weights_only=False) for p in (plain, path))
        for key in ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch"):
            assert checkpoint_differences(a[key], b[key], key) == []


@pytest.mark.distributed
def test_sharded_directories_continue_on_any_plan_and_consolidate_to_the_plain_file(tmp_path):
    """V on two processes, sequential on the same two, four devices in this process, and the plain Trainer."""
    folders = [str(tmp_path / name) for name in ("v", "sequential", "four")]
    sharded = {"save_distributed_checkpoint": True}
    cases = [
        _case("v", {"schedule": "zb-v", **sharded}, 1, devices=2, save=folders[0]),
        _case("sequential", {"schedule": "1f1b", **sharded}, 2, devices=2, resume=folders[0], save=folders[1]),
    ]
    run_cases(cases, 2, tmp_path)
    for folder in folders[:2]:
        sizes = [sum(f.stat().st_size for f in Path(folder).glob(f"__{rank}_*.distcp")) for rank in range(2)]
        assert max(sizes) < 0.75 * sum(sizes), "a process wrote more than it holds"
    four = {"schedule": "1f1b", "virtual_devices": 4, **sharded}
    run(_case("four", four, 3, resume=folders[1], save=folders[2]), tmp_path)
    for epochs, folder in enumerate(folders, start=1):
        plain = str(tmp_path / f"plain{epochs}.ckpt")
        run(_case(f"plain{epochs}", None, epochs, save=plain), tmp_path / "plain")
        a, b = torch.load(plain, weights_only=True), consolidate(folder, weights_only=True)
        for key in ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch"):
            assert checkpoint_differences(a[key], b[key], key) == []
    torch.save(consolidate(folders[2]), tmp_path / "consolidated.ckpt")
    run(_case("plain4", None, 4, resume=str(tmp_path / "consolidated.ckpt")), tmp_path / "plain")


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("sharded", [False, True], ids=["file", "directory"])
def test_last_checkpoint_continues_on_other_numbers_of_devices_nodes_and_replicas(sharded, tmp_path):
    """P=2 on one node, P=4 on two, P=2 again; and D=2 goes on as D=1: each as the plain Trainer goes on from the same file."""
    options = {"save_distributed_checkpoint": sharded}
    begun = [
        _case("two", {"schedule": "zb-v", **options}, 1, devices=2, save_last=str(tmp_path / "two")),
        _case("replicas", {"schedule": "1f1b", "data_parallel_size": 2, **options}, 1, devices=2,
              save_last=str(tmp_path / "replicas")),
    ]  # fmt: skip
    run_cases(begun, 2, tmp_path)
    four = _case("four", {"schedule": "zb-v", **options}, 2, devices=2, resume=str(tmp_path / "two" / "last.ckpt"),
                 save_last=str(tmp_path / "four"))  # fmt: skip
    four = replace(four, trainer={**four.trainer, "num_nodes": 2})
    results = run_cases([four], 4, tmp_path / "nodes", num_nodes=2)
    back = [
        _case("back", {"schedule": "1f1b", **options}, 3, devices=2, resume=str(tmp_path / "four" / "last.ckpt")),
        _case("alone", {"schedule": "zb-v", **options}, 2, devices=2, resume=str(tmp_path / "replicas" / "last.ckpt")),
    ]
    results |= run_cases(back, 2, tmp_path)
    for case in (four, *back):
        assert case.resume is not None
        path = Path(case.resume)
        if sharded:
            path = tmp_path / f"{case.name}.ckpt"
            torch.save(consolidate(case.resume), path)
        trainer = {key: value for key, value in case.trainer.items() if key != "num_nodes"}
        plain = replace(case.plain(), name=f"{case.name}-plain", trainer=trainer, resume=str(path), save_last=None)
        expected = run(plain, tmp_path / "plain")
        assert expected["steps"] > 0
        assert differences(results[case.name], expected) == [], case.name


def test_an_incomplete_directory_is_refused_in_one_sentence(tmp_path):
    with pytest.raises(ValueError, match=r"not a complete checkpoint: it has no meta\.pt; name a directory"):
        run(_case("resumed", {"virtual_devices": 2}, 2, resume=str(tmp_path)), tmp_path)


def test_a_sharded_checkpoint_of_another_model_is_refused(tmp_path):
    folder = str(tmp_path / "small")
    options = {"virtual_devices": 2, "save_distributed_checkpoint": True}
    run(_case("small", options, 1, save=folder, model_options={"num_layers": 4}), tmp_path)
    with pytest.raises(RuntimeError, match="missing keys"):
        run(_case("large", {"virtual_devices": 2}, 2, resume=folder), tmp_path)


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    path = str(tmp_path / "small.ckpt")
    run(_case("small", None, 1, save=path, model_options={"num_layers": 4}), tmp_path)
    with pytest.raises(RuntimeError, match="missing keys"):
        run(_case("large", {"virtual_devices": 2}, 2, resume=path), tmp_path)
