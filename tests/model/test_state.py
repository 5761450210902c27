import copy

import pytest
import torch

from lightning_zb.model import state
from lightning_zb.planning.placement import cyclic, wave
from tests.model.driver import Pipeline, plain_losses
from tests.model.modules import LanguageModel, tokens


def trained(placement, counts, tied=False):
    """A pipeline and the plain module after two AdamW steps."""
    torch.manual_seed(0)
    module = LanguageModel(4, tied=tied)
    module.register_buffer("seen", torch.arange(3))
    pipeline = Pipeline(module, counts, placement)
    optimizers = [torch.optim.AdamW(d.module.parameters(), lr=1e-2) for d in pipeline.devices]
    plain = copy.deepcopy(module)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for step in range(2):
        _, gradients = plain_losses(plain, tokens(2, seed=step))
        pipeline.train(tokens(2, seed=step))
        for model, optimizer, found in [
            (plain, plain_optimizer, gradients),
            *[(d.module, o, d.gradients) for d, o in zip(pipeline.devices, optimizers, strict=True)],
        ]:
            for name, p in model.named_parameters():
                p.grad = found.get(name)
            optimizer.step()
            optimizer.zero_grad()
    return pipeline, optimizers, plain, plain_optimizer


def gathered(parts):
    """A gather that returns all devices' parts to device 0."""
    return lambda part: parts


def collect(function, arguments):
    """Call a consolidating function as every device would and return what the first gets."""
    parts = []
    for args in arguments:
        function(*args, lambda part: parts.append(part))
    return function(*arguments[0], gathered(parts))


def assert_same(a, b):
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
        assert a.dtype == b.dtype
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert a == b


@pytest.mark.parametrize("tied", [False, True])
def test_consolidated_state_is_the_plain_one(tied):
    pipeline, optimizers, plain, plain_optimizer = trained(wave(2), [2, 1, 1, 2], tied)
    whole = collect(state.consolidated_state_dict, [(d.module, d.ownership) for d in pipeline.devices])
    assert_same(whole, dict(plain.state_dict()))
    assert_same(collect(state.consolidated_optimizer_state, [(o,) for o in optimizers]), plain_optimizer.state_dict())


def test_plain_state_loads_into_another_placement_and_back():
    _, _, plain, plain_optimizer = trained(wave(2), [2, 1, 1, 2])
    torch.manual_seed(1)
    other = Pipeline(LanguageModel(4), [1, 2, 2, 1], cyclic(4))
    for device in other.devices:
        device.module.register_buffer("seen", torch.zeros(3, dtype=torch.int64))
    optimizers = [torch.optim.AdamW(d.module.parameters(), lr=1.0) for d in other.devices]
    for device, optimizer in zip(other.devices, optimizers, strict=True):
        ownership = device.ownership
        state.load_own_state(device.module, ownership, plain.state_dict(), strict=False)
        kept = ownership.own_parameters()
        optimizer.load_state_dict(state.own_optimizer_state(optimizer, kept, plain_optimizer.state_dict()))
        assert all(p.is_meta or id(p) in {id(q) for q in ownership.own_parameters()} for p in optimizer.state)
    merged = collect(state.consolidated_optimizer_state, [(o,) for o in optimizers])
    assert_same(merged, plain_optimizer.state_dict())
    losses, _ = plain_losses(plain, tokens(2))
    assert all(torch.equal(a, b) for a, b in zip(losses, other.train(tokens(2)), strict=True))


def test_strict_loading_names_what_does_not_fit():
    module = LanguageModel(2)
    device = Pipeline(module, [2, 2], cyclic(2)).devices[0]
    broken = dict(module.state_dict())
    del broken["head.weight"]
    broken["tail.weight"] = torch.zeros(1)
    with pytest.raises(RuntimeError, match=r"missing keys \['head.weight'\], unexpected keys \['tail.weight'\]"):
        state.load_own_state(device.module, device.ownership, broken)


def test_a_key_that_nobody_holds_is_an_error():
    with pytest.raises(RuntimeError, match='no device holds "b"'):
        state.merge_states(["a", "b"], [{"a": 1}, {}])
