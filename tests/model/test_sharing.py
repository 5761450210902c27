import torch
from torch import nn

from lightning_zb.model.interception import Interception
from lightning_zb.model.layers import find_layers
from lightning_zb.model.ownership import move_to, take_ownership
from lightning_zb.model.sharing import SharedParameter, shared_across_devices, shared_parameters
from lightning_zb.model.windows import windows
from lightning_zb.planning.placement import Partition, cyclic, wave
from tests.model.modules import LanguageModel, SequentialModule


def cut(module, counts):
    stack = find_layers(module)
    return stack, windows(Partition.from_counts(counts), len(stack))


def test_tied_weights_are_shared_on_a_wave_and_reported_on_other_placements():
    module = LanguageModel(4, tied=True)
    stack, all_windows = cut(module, [2, 1, 1, 2])
    assert shared_parameters(module, stack, all_windows, wave(2).chunks_of(0)) == {module.embed.weight: (0, 3)}
    assert shared_parameters(module, stack, all_windows, wave(2).chunks_of(1)) == {}
    assert shared_across_devices(module, stack, all_windows, wave(2)) == ()
    assert shared_across_devices(module, stack, all_windows, cyclic(2, 2)) == (
        SharedParameter(("embed.weight", "head.weight"), (0, 3), (0, 1)),
    )


def test_a_weight_tied_between_layers_and_head():
    module = LanguageModel(4)
    module.head = nn.Linear(16, 8, bias=False)
    module.head.weight = module.blocks[1].down.weight
    stack, all_windows = cut(module, [2, 1, 1, 2])
    assert shared_across_devices(module, stack, all_windows, wave(2)) == (
        SharedParameter(("blocks.1.down.weight", "head.weight"), (0, 1, 3), (0, 1)),
    )


def test_layers_that_share_a_module():
    module = SequentialModule(4)
    module.model[2] = module.model[0]
    stack, all_windows = cut(module, [2, 1, 1, 2])
    shared = shared_across_devices(module, stack, all_windows, cyclic(4))
    assert [s.chunks for s in shared] == [(0, 2), (0, 2)]
    assert shared_parameters(module, stack, all_windows, cyclic(2, 2).chunks_of(0)) == {
        p: (0, 2) for p in module.model[0].parameters()
    }


def test_freed_parameters_keep_ties_flags_and_marks():
    module = LanguageModel(4, tied=True)
    module.embed.weight._no_decay = True
    module.blocks[0].norm.weight.requires_grad_(False)
    stack, all_windows = cut(module, [2, 1, 1, 2])
    ownership = take_ownership(module, stack, [all_windows[1]])
    assert module.embed.weight is module.head.weight
    assert module.embed.weight.is_meta
    assert module.embed.weight._no_decay
    assert not module.blocks[0].norm.weight.requires_grad
    assert not module.blocks[1].norm.weight.is_meta
    assert ownership.own_names() == [name for name, _ in module.named_parameters() if name.startswith("blocks.1.")]
    move_to(module, torch.device("cpu"))
    assert module.positions.untyped_storage().nbytes() == 4


def test_shared_modules_of_own_layers_stay():
    module = SequentialModule(4)
    module.model[2][0] = module.model[0][0]
    stack, all_windows = cut(module, [2, 1, 1, 2])
    take_ownership(module, stack, [all_windows[2]])
    assert not module.model[0][0].weight.is_meta
    assert module.model[1][0].weight.is_meta


def test_buffers_of_foreign_layers_go_and_others_stay():
    module = LanguageModel(4)
    module.register_buffer("table", torch.zeros(3))
    for block in module.blocks:
        block.register_buffer("count", torch.zeros(1))
    stack, all_windows = cut(module, [2, 1, 1, 2])
    ownership = take_ownership(module, stack, [all_windows[1]])
    assert not module.table.is_meta
    assert [block.count.is_meta for block in module.blocks] == [True, False, True, True]
    assert ownership.buffers == {"blocks.1.count"}
    assert Interception(stack).running is None
