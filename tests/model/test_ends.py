import pytest
import torch
from torch import nn

from lightning_zb.model.ends import EndReport, settle_ends, split_by_use
from lightning_zb.planning.placement import cyclic
from tests.model.driver import Pipeline, plain_losses
from tests.model.modules import LanguageModel, tokens


class BackwardsModel(LanguageModel):
    """Its head is registered before the layers and its embedding after them; a statistic in each end."""

    def __init__(self, tied=False):
        super().__init__(2)
        blocks, embed, head = self.blocks, self.embed, self.head
        del self.blocks, self.embed, self.head
        self.head = nn.Sequential(nn.BatchNorm1d(5), head)
        self.blocks, self.embed = blocks, nn.Sequential(embed, nn.BatchNorm1d(5))
        if tied:
            self.head[1].weight = self.embed[0].weight


def settled(module, counts=(1, 2, 1)):
    """A pipeline after its first backward, ends settled, with its optimizers and what both ends use."""
    pipeline = Pipeline(module, list(counts), cyclic(len(counts)))
    optimizers = [torch.optim.SGD(d.module.parameters(), lr=0.1) for d in pipeline.devices]
    pipeline.train(tokens(2))
    ends = (pipeline.devices[0], pipeline.devices[-1])
    reports = []
    for device in ends:
        for name, p in device.module.named_parameters():
            p.grad = device.gradients.get(name)
        outside = [p for name, p in device.module.named_parameters() if not name.startswith("blocks.")]
        reports.append(EndReport(tuple(p.grad is not None for p in outside), tuple(device.stubs.stood_in())))
    shared = []
    for device, optimizer, own_report in zip(ends, (optimizers[0], optimizers[-1]), reports, strict=True):

        def exchange(report, own=own_report):
            assert report == own
            return reports[0], reports[1]

        result = settle_ends(
            device.module,
            device.stack,
            device.ownership,
            device.stubs,
            [optimizer],
            is_first_end=device is ends[0],
            exchange=exchange,
        )
        device.ownership = result.ownership
        shared.append(result.shared)
    for device in ends:
        for p in device.module.parameters():
            p.grad = None
    assert shared[0] == shared[1]
    return pipeline, optimizers, shared[0]


def test_each_end_keeps_what_it_uses_whatever_the_order_of_registration():
    torch.manual_seed(0)
    module = BackwardsModel()
    pipeline, optimizers, shared = settled(module)
    first, _, last = pipeline.devices
    assert shared == ()
    assert first.ownership.own_names() == ["positions", "embed.0.weight", "embed.1.weight", "embed.1.bias"]
    assert last.ownership.own_names() == ["norm.weight", "norm.bias", "head.0.weight", "head.0.bias", "head.1.weight"]
    assert sum(d.ownership.own_bytes for d in pipeline.devices) == first.ownership.total_bytes
    assert first.ownership.buffers == {"embed.1.running_mean", "embed.1.running_var", "embed.1.num_batches_tracked"}
    assert last.ownership.buffers == {"head.0.running_mean", "head.0.running_var", "head.0.num_batches_tracked"}
    for device, optimizer in zip(pipeline.devices, optimizers, strict=True):
        flat = [p for group in optimizer.param_groups for p in group["params"]]
        assert all(a is b for a, b in zip(flat, device.module.parameters(), strict=True))
    losses, gradients = plain_losses(module, tokens(2))
    assert all(torch.equal(a, b) for a, b in zip(losses, pipeline.train(tokens(2)), strict=True))
    assert all(torch.equal(pipeline.gradients()[n], g) for n, g in gradients.items())


def test_a_tied_weight_is_reported_by_both_ends():
    torch.manual_seed(0)
    pipeline, _, shared = settled(BackwardsModel(tied=True))
    assert shared == ("head.1.weight",)
    assert not pipeline.devices[0].module.embed[0].weight.is_meta
    assert not pipeline.devices[-1].module.head[1].weight.is_meta


@pytest.mark.parametrize("shift", [0, 1])
def test_what_nobody_used_stays_on_both(shift):
    names = ["a", "b", "c", "d"]
    first, last = [True, False, True, False], [False, True, True, False]
    by_first, by_last, both = split_by_use(names[shift:], first[shift:], last[shift:])
    assert (by_first, by_last, both) == (["a"][shift:], ["b"], ["c"])
