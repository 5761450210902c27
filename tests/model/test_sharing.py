import torch
from torch import nn

from lightning_zb.model.interception import Interception
from lightning_zb.model.layers import find_layers
from lightning_zb.model.ownership import move_to, outside_parameters, release, take_ownership
from lightning_zb.model.sharing import SharedParameter, ends_to_release, shared_across_devices, shared_parameters
from lightning_zb.model.windows import windows
from lightning_zb.planning.placement import Partition, cyclic, wave
from tests.model.driver import Pipeline, plain_losses
from tests.model.modules import LanguageModel, SequentialModule, tokens


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


def test_ends_learn_what_they_use():
    names = ["embed", "norm", "head", "unused", "tied"]
    assert ends_to_release(names, [True, False, False, False, True], [False, True, True, False, True]) == (
        {"norm", "head"},
        {"embed"},
        {"tied"},
    )


def test_releasing_keeps_training_right_and_optimizer_indices():
    torch.manual_seed(0)
    module = LanguageModel(2)
    pipeline = Pipeline(module, [1, 2, 1], cyclic(3))
    optimizers = [torch.optim.SGD(d.module.parameters(), lr=0.1) for d in pipeline.devices]
    pipeline.train(tokens(2))
    first, _, last = pipeline.devices
    names = [name for name, p in outside_parameters(first.module, first.stack) if p.requires_grad]
    frees_first, frees_last, both = ends_to_release(
        names, [n in first.gradients for n in names], [n in last.gradients for n in names]
    )
    assert (frees_first, frees_last, both) == (
        {"norm.weight", "norm.bias", "head.weight"},
        {"embed.weight", "positions"},
        set(),
    )
    first.ownership = release(first.module, first.ownership, frees_first, [optimizers[0]])
    last.ownership = release(last.module, last.ownership, frees_last, [optimizers[2]])
    assert sum(d.ownership.own_bytes for d in pipeline.devices) == first.ownership.total_bytes
    for device, optimizer in zip(pipeline.devices, optimizers, strict=True):
        flat = [p for group in optimizer.param_groups for p in group["params"]]
        assert all(a is b for a, b in zip(flat, device.module.parameters(), strict=True))
    losses, gradients = plain_losses(module, tokens(2))
    assert all(torch.equal(a, b) for a, b in zip(losses, pipeline.train(tokens(2)), strict=True))
    assert all(torch.equal(pipeline.gradients()[n], g) for n, g in gradients.items())


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
