"""`lightning-zb consolidate`: from a checkpoint directory to the plain file, and on to a Hugging Face folder."""

from __future__ import annotations

import torch

from lightning_zb.cli import main
from tests.lightning.fitting import Case, run
from tests.lightning.models import ConfiguredModule
from tests.lightning.test_checkpoints import checkpoint_differences


def _saved(folder, strategy=None) -> str:
    path = str(folder / ("directory" if strategy else "plain.ckpt"))
    run(Case("run", "configured", {"family": "llama"}, {"max_epochs": 1}, strategy, size=8, shuffle=False, save=path), folder)
    return path


def test_the_file_is_the_plain_trainers_and_exports_to_hugging_face(tmp_path, capsys):
    from transformers import AutoModelForCausalLM

    directory = _saved(tmp_path, {"schedule": "zb-v", "virtual_devices": 2, "save_distributed_checkpoint": True})
    assert main(["consolidate", directory, str(tmp_path / "file.ckpt")]) == 0
    assert f"written to {tmp_path / 'file.ckpt'}" in capsys.readouterr().out
    plain, mine = torch.load(_saved(tmp_path)), torch.load(tmp_path / "file.ckpt")
    for key in ("state_dict", "optimizer_states", "lr_schedulers", "global_step", "epoch"):
        assert checkpoint_differences(plain[key], mine[key], key) == []
    module = ConfiguredModule("llama")
    module.configure_model()
    module.load_state_dict(mine["state_dict"])
    module.model.save_pretrained(tmp_path / "exported")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported").state_dict()
    assert all(torch.equal(value, exported[key.removeprefix("model.")]) for key, value in plain["state_dict"].items())


def test_wrong_input_is_one_sentence(tmp_path, capsys):
    file = str(tmp_path / "file.ckpt")
    assert main(["consolidate", str(tmp_path / "none"), file]) == 2
    assert main(["consolidate", str(tmp_path), file]) == 2
    assert main(["consolidate", str(tmp_path), str(tmp_path)]) == 2
    assert main(["consolidate", str(tmp_path), str(tmp_path / "no" / "file.ckpt")]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 4
    for error, part in zip(errors, ("not a directory", "no meta.pt", "is a folder", "there is no folder"), strict=True):
        assert part in error


def test_pickled_objects_are_read_only_on_demand(tmp_path, capsys):
    directory = _saved(tmp_path, {"virtual_devices": 2, "save_distributed_checkpoint": True})
    meta = torch.load(f"{directory}/meta.pt")
    torch.save({**meta, "note": Case("odd", "tokens")}, f"{directory}/meta.pt")
    assert main(["consolidate", directory, str(tmp_path / "file.ckpt")]) == 2
    assert "write --trust" in capsys.readouterr().err
    assert main(["consolidate", directory, str(tmp_path / "file.ckpt"), "--trust"]) == 0
