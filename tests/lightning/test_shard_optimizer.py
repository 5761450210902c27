"""Optimizer state divided among replicas: the bits of the same run with all of it everywhere, at a share of the bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_zb.model.layers import find_layers
from lightning_zb.model.shard_places import shard_places
from lightning_zb.sharded_checkpoint import consolidate
from tests.lightning.fitting import Case, differences
from tests.lightning.models import MODELS
from tests.lightning.processes import run_cases
from tests.lightning.test_checkpoints import checkpoint_differences

_KEYS = ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch")
_COMMON: dict[str, Any] = {"size": 36, "batch_size": 2, "accumulate": 2}


def _case(name: str, schedule: str, devices: int, clip: float | None = 0.5, epochs: int = 2, **changes: Any) -> Case:
    strategy = {"schedule": schedule, "data_parallel_size": 2, **changes.pop("strategy", {})}
    trainer = {"gradient_clip_val": clip, "max_epochs": epochs}
    model_options = {"groups": True, **changes.pop("model_options", {})}
    return Case(name, "tokens", model_options, trainer, strategy, devices=devices, **{**_COMMON, **changes})


def _sharded(case: Case) -> Case:
    assert case.strategy is not None
    return replace(case, name=f"{case.name}-sharded", strategy={**case.strategy, "shard_optimizer": True})


def _joined(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One result for each device: the weights of the first replica, the optimizer states of both."""
    half = len(parts) // 2
    joined = []
    for a, b in zip(parts[:half], parts[half:], strict=True):
        assert all(torch.equal(w, b["weights"][n]) for n, w in a["weights"].items())
        assert not set(a["optimizer"]) & set(b["optimizer"]), "both replicas keep a state"
        joined.append({**a, "optimizer": {**a["optimizer"], **b["optimizer"]}})
    return joined


def _whole(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """One result of a run in which every replica keeps all states."""
    half = parts[: len(parts) // 2]
    merged = {key: {n: v for part in half for n, v in part[key].items()} for key in ("weights", "optimizer", "buffers")}
    return {**parts[0], **merged}


@pytest.mark.parametrize("name", ["tokens", "sequential"])
def test_layers_are_divided_about_evenly_and_alike_on_every_process(name):
    module = MODELS[name]()
    stack = find_layers(module)
    places = shard_places(module, stack, 2)
    sizes = {n: p.numel() for n, p in module.named_parameters()}
    assert set(places) == set(sizes)
    for start in range(0, len(stack), 2):
        names = [f"{stack.names[i]}.{n}" for i in (start, start + 1) for n, _ in stack.modules[i].named_parameters()]
        loads = [sum(sizes[n] for n in names if places[n] == replica) for replica in range(2)]
        assert max(loads) - min(loads) <= max(sizes[n] for n in names)
    with torch.device("meta"):
        assert shard_places(MODELS[name](), stack=find_layers(meta := MODELS[name]()), num_replicas=2).keys() == places.keys()
        assert shard_places(meta, find_layers(meta), 2) == places


def test_what_thaws_later_is_divided_too():
    module = nn.Module()
    module.layers = nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in range(4)])
    for layer in module.layers[:2]:
        layer.requires_grad_(False)
    places = shard_places(module, find_layers(module, "layers"), 2)
    assert list(places.values()) == [0, 1, 0, 1]


def _compare(cases: list[Case], results: dict[str, list[dict[str, Any]]]) -> None:
    """Each case against its sharded one, bits and bytes; the last pass over bytes where devices hold other layers."""
    for case in cases:
        theirs, mine = results[case.name], results[f"{case.name}-sharded"]
        assert differences(_joined(mine), _whole(theirs)) == [], case.name
        kept = [[part["statistics"]["optimizer_bytes"] for part in parts] for parts in (mine, theirs)]
        assert sum(kept[0]) == pytest.approx(sum(kept[1]) / 2, rel=0.01), case.name
        if mine[0]["partition"] == theirs[0]["partition"]:
            assert all(part < 0.6 * whole for part, whole in zip(*kept, strict=True)), case.name


@pytest.mark.distributed
def test_sharded_state_keeps_every_bit_of_the_run_without(tmp_path: Path):
    """Two pipelines of two devices; clipping that comes and goes, with steps taken back; a checkpoint while one is pending."""
    case = replace(_EXACT, checkpoint=(2, str(tmp_path / "whole.ckpt")))
    sharded = replace(_sharded(case), checkpoint=(2, str(tmp_path / "sharded.ckpt")))
    results = run_cases([case, sharded], 4, tmp_path)
    _compare([case], results)
    rollbacks = [part["statistics"]["rollbacks"] for part in results[sharded.name]]
    assert sum(rollbacks[:2]) > 0
    assert rollbacks[:2] == rollbacks[2:]
    assert any(part["was_pending"] for part in results[sharded.name])
    a, b = (torch.load(tmp_path / f"{name}.ckpt", weights_only=False) for name in ("whole", "sharded"))
    for key in _KEYS:
        assert checkpoint_differences(a[key], b[key], key) == []


@pytest.mark.slow
@pytest.mark.distributed
def test_ties_new_partitions_and_in_place_rollback(tmp_path: Path):
    measuring = {"profile_steps": (2, 5), "replan": "partition", "background": False, "min_gain": -1.0}
    cases = [
        _case("tied", "1f1b", 4, clip=None, model_options={"tied": True}),
        _case("switched", "1f1b", 4, callback=measuring, epochs=3, strategy={"partition": [1, 7]}),
    ]
    inplace = replace(_sharded(_EXACT), name="inplace")
    assert inplace.strategy is not None
    inplace = replace(inplace, strategy={**inplace.strategy, "post_validation": "inplace"})
    results = run_cases([*cases, *map(_sharded, cases), _EXACT, inplace], 4, tmp_path)
    _compare(cases, results)
    assert results["switched-sharded"][0]["decisions"][0].change == "partition"
    planned = [results[name][0]["state_bytes"] for name in ("switched-sharded", "switched")]  # as measured in the run
    assert (
        0.75 <= planned[0] / planned[1] < 0.8
    )  # AdamW: 2 of 4 numbers a parameter are halved, each layer's larger half counts
    assert differences(_joined(results["inplace"]), _whole(results["exact"])) == []


@pytest.mark.distributed
def test_sharded_state_of_any_optimizer_is_that_of_lightnings_data_parallelism(tmp_path: Path):
    """One device for each replica; the checkpoint, as a file and as a directory, is Lightning's to the key."""
    directory = {"strategy": {"save_distributed_checkpoint": True}}
    adamw = _case("AdamW", "1f1b", 2, epochs=1, save=str(tmp_path / "file.ckpt"))
    folder = _case("folder", "1f1b", 2, epochs=1, save=str(tmp_path / "folder"), **directory)
    cases = [adamw] + [
        _case(f"{name}{index}", "1f1b", 2, epochs=1, size=8, model_options={"optimizer": name, "optimizer_options": options})
        for index, (name, options) in enumerate(_OPTIMIZERS)
    ]
    plain = [replace(c, name=f"{c.name}-plain", strategy=None, plain_strategy="ddp") for c in cases]
    plain[0] = replace(plain[0], save=str(tmp_path / "plain.ckpt"))
    results = run_cases([*map(_sharded, cases), _sharded(folder), *plain], 2, tmp_path)
    for case in cases:
        assert differences(_joined(results[f"{case.name}-sharded"]), results[f"{case.name}-plain"][0]) == [], case.name
    expected = torch.load(tmp_path / "plain.ckpt", weights_only=False)
    for checkpoint in (torch.load(tmp_path / "file.ckpt", weights_only=False), consolidate(tmp_path / "folder")):
        for key in _KEYS:
            assert checkpoint_differences(expected[key], checkpoint[key], key) == []


@pytest.mark.slow
@pytest.mark.distributed
def test_sharded_checkpoints_continue_on_other_numbers_of_replicas_and_devices(tmp_path: Path):
    """D=2 x P=1 to D=2 x P=2 and to D=1 x P=2, by file and by directory: as the unsharded run goes on."""
    saved = {name: str(tmp_path / name) for name in ("whole", "file", "folder")}
    options = {"whole": {}, "file": {"shard_optimizer": True}}
    options["folder"] = {**options["file"], "save_distributed_checkpoint": True}
    begun = [_case(name, "1f1b", 2, epochs=1, save=saved[name], strategy=options[name]) for name in saved]
    run_cases(begun, 2, tmp_path)
    for devices, replicas in ((4, 2), (2, 1)):
        (tmp_path / str(devices)).mkdir()
        cases = [
            _case(name, "zb-v", devices, resume=saved[name], strategy={**options[name], "data_parallel_size": replicas})
            for name in saved
        ]
        results = run_cases(cases, devices, tmp_path / str(devices))
        for name in ("file", "folder"):
            if replicas == 2:
                assert differences(_joined(results[name]), _whole(results["whole"])) == [], name
            else:
                assert differences(results[name], _whole([*results["whole"], *results["whole"]])) == [], name


_OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {}),
    ("SGD", {"momentum": 0.9, "nesterov": True, "foreach": True}),
    ("Adam", {"fused": True}),
    ("Adafactor", {}),
    ("Momentum8bit", {}),
    ("OneAtATime", {}),
]
_EXACT = _case("exact", "zb-v", 4, strategy={"post_validation": "exact"}, model_options={"scales": (1.0, 20.0, 0.05, 0.05)})
