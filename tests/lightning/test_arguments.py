"""Arguments of the strategy that are of the wrong kind: one sentence with the value and what to write instead."""

from __future__ import annotations

from datetime import timedelta

import pytest

from lightning_zb import ZeroBubbleStrategy

_WRONG = [
    ("schedule", 5, 'the name of a schedule such as "zb-v"'),
    ("schedule", "", "the path of a plan file"),
    ("memory_budget", True, 'a size such as "40GiB"'),
    ("memory_budget", {"0": 1.0}, "a list of these"),
    ("layers", 3, "the dotted path"),
    ("layers", [], "a list of paths"),
    ("side_channels", 3, '"model.aux_losses"'),
    ("partition", [1.5, 6.5], "such as \\[3, 4\\]"),
    ("partition", [-1, 9], "at least one"),
    ("partition", 2, '"balanced"'),
    ("partition", "evn", '"even", "balanced"'),
    ("constraints", "a", '"alone"'),
    ("constraints", {"togeter": []}, '"together"'),
    ("costs", 5, "a costs file"),
    ("post_validation", "never", '"auto", "exact", "inplace" or "off"'),
    ("post_validation", ["off"], '"auto", "exact", "inplace" or "off"'),
    ("error_if_nonfinite", "no", "True or False"),
    ("save_distributed_checkpoint", 1, "True or False"),
    ("shard_optimizer", None, "True or False"),
    ("virtual_devices", 1.5, "1 or more"),
    ("virtual_devices", "two", "1 or more"),
    ("virtual_devices", 0, "1 or more"),
    ("start_method", "thread", '"popen", "spawn", "fork" or "forkserver"'),
    ("timeout", "long", "how many seconds"),
    ("timeout", 0, "more than 0"),
    ("timeout", float("nan"), "more than 0"),
    ("timeout", 1e300, "more than 0"),
    ("timeout", timedelta(seconds=-1), "more than 0"),
    ("process_group_backend", "mpi", '"nccl", "gloo" or None'),
    ("data_parallel_size", 0, "1 or more"),
    ("data_parallel_size", 2.0, "1 or more"),
    ("data", "share", '"read" or "broadcast"'),
    ("check_data_steps", -1, "0 for none"),
]


@pytest.mark.parametrize(("name", "value", "instead"), _WRONG, ids=[f"{name}={value!r}" for name, value, _ in _WRONG])
def test_a_wrong_argument_is_one_sentence(name: str, value, instead: str):
    with pytest.raises(ValueError, match=rf"^{name}=.* is not possible; write .*{instead}") as caught:
        ZeroBubbleStrategy(**{name: value})
    assert repr(value) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_right_is_taken():
    """Also what configuration files make of it."""
    for right in (
        {"schedule": "plan.json", "costs": "costs.json", "layers": ["a", "b"], "side_channels": ["a", "b"]},
        {"partition": [3, 5], "memory_budget": [1.0, "40GiB"], "virtual_devices": 2, "check_data_steps": 0},
        {"partition": "Et*3|t*4L", "memory_budget": 2, "timeout": timedelta(minutes=1), "process_group_backend": "gloo"},
        {"constraints": {"alone": ["epilogue"]}, "timeout": 0.5, "data_parallel_size": 2, "start_method": "spawn"},
    ):
        ZeroBubbleStrategy(**right)
    from omegaconf import OmegaConf

    ZeroBubbleStrategy(**OmegaConf.create({"partition": [3, 5], "memory_budget": [1.0, 1.5], "constraints": {"first": ["a"]}}))


def test_an_unknown_schedule_is_refused_before_processes_start():
    with pytest.raises(ValueError, match=r"'zbv' is unknown; known are .*1f1b.*zb-v"):
        ZeroBubbleStrategy(schedule="zbv")
