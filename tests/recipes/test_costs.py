"""The analytic costs: published sizes, known FLOP formulas, files that the command line reads."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from lightning_zb.planning.costs import LayerRole
from lightning_zb.planning.planfile import read_costs
from recipes.costs.__main__ import main
from recipes.costs.device import H800, Kind
from recipes.costs.items import (
    Item,
    embedding,
    gated_mlp,
    head,
    latent_attention,
    mamba2,
    mixture,
    plain_mlp,
    self_attention,
)
from recipes.costs.models import CONFIGURATIONS, nemotron_h_pattern
from recipes.costs.random_cases import Trait, random_case

TOKENS = 4096


def parameters(items: list[Item], tied: bool = False) -> int:
    total = sum(item.parameters for item in items)
    return total - items[0].parameters if tied else total


def test_gemma_3_1b_has_its_published_size():
    items = [embedding(TOKENS, 262144, 1152), head(TOKENS, 262144, 1152)]
    for i in range(26):
        items.append(self_attention(f"{i}", TOKENS, 1152, 4, 1, 256, sandwiched=True, head_norms=True))
        items.append(gated_mlp(f"{i}", TOKENS, 1152, 6912, sandwiched=True))
    assert parameters(items, tied=True) == 999_885_952


def test_deepseek_v2_lite_has_its_published_size():
    items = [embedding(TOKENS, 102400, 2048), head(TOKENS, 102400, 2048)]
    for i in range(27):
        items.append(latent_attention(f"{i}", TOKENS, 2048, 16, 128, 64, 128, 512))
        items.append(gated_mlp(f"{i}", TOKENS, 2048, 10944) if i < 1 else mixture(f"{i}", TOKENS, 2048, 1408, 64, 6, 2, 8))
    assert parameters(items) == 15_706_484_224


def test_nemotron_h_8b_has_its_published_size():
    letters = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
    items = [embedding(TOKENS, 131072, 4096), head(TOKENS, 131072, 4096)]
    for letter in letters:
        if letter == "M":
            items.append(mamba2("m", TOKENS, 4096, 128, 64, 8, 128))
        elif letter == "*":
            items.append(self_attention("a", TOKENS, 4096, 32, 8, 128))
        else:
            items.append(plain_mlp("f", TOKENS, 4096, 21504))
    assert parameters(items) == pytest.approx(8.1e9, rel=0.005)


def test_the_pattern_has_the_proportions_of_the_8b_model():
    letters = nemotron_h_pattern(52)
    assert (letters.count("M"), letters.count("-"), letters.count("*")) == (24, 24, 4)
    for config in CONFIGURATIONS.values():
        if config.name.startswith("nemotron"):
            assert len(nemotron_h_pattern(config.num_layers)) == config.num_layers


@pytest.mark.parametrize("tokens", [1024, 2048, 4096, 32768])
def test_training_takes_six_flops_a_parameter_and_token_and_attention(tokens: int):
    """6 N tokens for weight products, and 7 products of attention over half of the square (Kaplan et al., Dao)."""
    width, hidden, layers, vocabulary, heads = 1536, 6144, 8, 32768, 6
    items = [head(tokens, vocabulary, width)]
    for i in range(layers):
        items += [self_attention(f"{i}", tokens, width, heads, heads, 256), gated_mlp(f"{i}", tokens, width, hidden)]
    weights = layers * (4 * width**2 + 3 * width * hidden) + vocabulary * width
    attention = layers * 7 * tokens**2 * width
    total = sum(item.flops(part) for item in items for part in ("forward", "backward_input", "backward_weight"))
    assert total == pytest.approx(6 * weights * tokens + attention)
    assert sum(item.flops("backward_weight") for item in items) == pytest.approx(2 * weights * tokens)


def test_a_window_counts_the_pairs_it_leaves():
    tokens, window = 64, 16
    pairs = sum(min(i + 1, window) for i in range(tokens))
    core = self_attention("a", tokens, 128, 2, 2, 64, window).operations[3]
    assert core.kind is Kind.ATTENTION
    assert core.forward == pytest.approx(4 * pairs * 128, rel=0.05)  # the diagonal counts half in the closed form
    full = self_attention("a", tokens, 128, 2, 2, 64, None).operations[3]
    assert core.forward < full.forward == 2 * tokens**2 * 128


def test_experts_of_a_token_work_and_the_node_shares_their_weights():
    item = mixture("e", TOKENS, 2048, 1408, 64, 6, 2, 8)
    one_expert = 3 * 2048 * 1408
    assert item.flops("forward") == pytest.approx(2 * TOKENS * (8 * one_expert + 64 * 2048))
    held = 64 * one_expert / 8 + 2 * one_expert + 64 * 2048 + 2048
    cost = item.cost(H800, TOKENS, 2048)
    assert cost.parameter_bytes == pytest.approx(2 * held)
    assert cost.state_bytes == pytest.approx(7.5 * held)


@pytest.mark.parametrize("config", CONFIGURATIONS.values(), ids=str)
def test_each_configuration_has_the_papers_layers(config):
    costs = config.costs(TOKENS)
    roles = [layer.role for layer in costs.layers]
    assert roles == [LayerRole.PROLOGUE] + [LayerRole.LAYER] * (config.num_layers * config.items_per_layer) + [
        LayerRole.EPILOGUE
    ]
    assert all(layer.output_bytes == 2 * TOKENS * config.width for layer in costs.layers)
    assert all(
        c.backward_weight == pytest.approx(c.forward, rel=0.2) or c.backward_weight < c.forward for c in costs.layers[1:]
    )
    assert costs.layers[0].backward_input == 0.0 < costs.layers[0].backward_weight
    states = sum(layer.state_bytes for layer in costs.layers)
    assert states / 4 + max(layer.state_bytes for layer in costs.layers) < H800.capacity  # four devices can hold it


@pytest.mark.parametrize("family", ["gemma", "deepseek", "nemotron-h"])
def test_attention_grows_faster_than_the_rest_with_the_sequence(family: str):
    config = CONFIGURATIONS[f"{family}-small"]
    shares = []
    for tokens in (1024, 4096, 32768):
        layers = config.costs(tokens).layers
        shares.append(sum(c.forward for c in layers if "attention" in c.name) / sum(c.forward for c in layers))
    assert all(shorter < longer for shorter, longer in pairwise(shares))


def test_even_counts_cut_between_layers():
    assert CONFIGURATIONS["gemma-small"].even_counts(8) == [8] * 8
    assert CONFIGURATIONS["nemotron-h-small"].even_counts(8) == [3, 3, 4, 4, 4, 4, 3, 3]
    assert CONFIGURATIONS["deepseek-small"].even_counts(32) is None


def test_the_generator_writes_files_that_are_read_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    main(["deepseek-small", "--tokens", "2048", "--out", str(tmp_path)])
    assert "deepseek-small" in capsys.readouterr().out
    path = tmp_path / "deepseek-small-2048.json"
    assert len(json.loads(path.read_text())["layers"]) == 34
    assert read_costs(path) == CONFIGURATIONS["deepseek-small"].costs(2048)
    with pytest.raises(SystemExit):
        main(["gemma-tiny"])


@pytest.mark.parametrize("trait", Trait)
def test_random_cases_have_their_trait(trait: Trait):
    for seed in range(20):
        case = random_case(seed, trait)
        assert case == random_case(seed, trait)
        layers = case.costs.layers[1:-1]
        work = [layer.work for layer in layers]
        mean = sum(work) / len(work)
        forwards = [layer.forward for layer in layers]
        budgets = case.memory
        assert isinstance(budgets, list)
        assert (case.costs.device_speed is not None) == (trait is Trait.SLOW_DEVICE)
        assert (min(budgets) < max(budgets)) == (trait is Trait.TIGHT_DEVICE)
        assert (case.costs.layers[-1].work >= 9.9 * mean) == (trait is Trait.HEAD)
        assert (max(forwards) > min(forwards)) == (trait is Trait.SPREAD) or trait is Trait.KINDS
        assert max(forwards) <= (8.0 if trait is Trait.KINDS else 1.3 / 0.7) * min(forwards) * (1 + 1e-9)
        transfer = case.costs.transfer_seconds(0, 1, 8 * 2.0**20)
        stage = (sum(forwards) + case.costs.layers[-1].forward) / case.num_devices
        assert (transfer >= 0.29 * stage) == (trait is Trait.SLOW_LINKS)


def test_traits_are_drawn_where_none_is_named():
    names = {random_case(seed).name.split("/")[0] for seed in range(40)}
    assert len(names) > 15
