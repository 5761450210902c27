"""The split backward keeps every bit on transformers' own layers: experts, state-space, latent attention, tied weights."""

import pytest
import torch

from tests.execution.split_comparison import assert_same_bits

pytest.importorskip("transformers")

from tests.execution.tiny_families import CONFIGURATIONS, build, loss_of

QUICK = ("gpt2", "mixtral", "nemotron_h", "bamba")


@pytest.mark.parametrize("family", QUICK)
def test_family(family):
    assert_same_bits(build(family), loss_of, num_microbatches=2)


@pytest.mark.parametrize("experts", ["eager", "batched_mm"])
def test_experts(experts):
    assert_same_bits(build("mixtral", experts), loss_of, num_microbatches=2)


@pytest.mark.parametrize("family", QUICK)
def test_family_under_autocast(family):
    assert_same_bits(build(family), loss_of, num_microbatches=2, autocast=True)


@pytest.mark.parametrize("experts", ["eager", "batched_mm", "grouped_mm"])
def test_checkpointing_recomputes_each_block_once(experts):
    model = build("mixtral", experts)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    calls = [0]
    model.model.layers[1].self_attn.register_forward_pre_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
    assert_same_bits(model, loss_of, num_microbatches=2, allowed=("bmm",))
    assert calls[0] == 2 * (2 + 2)  # plain and split, two microbatches, F and one recomputation each


@pytest.mark.slow
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("family", sorted(CONFIGURATIONS))
def test_every_family(family, autocast):
    assert_same_bits(build(family), loss_of, num_microbatches=2, autocast=autocast)


@pytest.mark.slow
@pytest.mark.parametrize("experts", ["eager", "batched_mm"])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v2", "deepseek_v3", "jamba", "nemotron_h", "granitemoehybrid"])
def test_every_experts_implementation(family, experts):
    assert_same_bits(build(family, experts), loss_of, num_microbatches=2)


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(CONFIGURATIONS))
def test_every_family_in_bfloat16(family):
    assert_same_bits(build(family).to(torch.bfloat16), loss_of, num_microbatches=2)
