import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_zb.model.side_channels import AttributeList
from lightning_zb.planning.placement import wave
from tests.model.driver import Pipeline, assert_bitwise
from tests.model.hugging_face import CausalLanguageModel, texts
from tests.model.modules import Block, LanguageModel, tokens


class Gathering(Block):
    def forward(self, x, scale):
        gate = self.up(x)
        self.gathered.append(gate.softmax(-1))
        return super().forward(x, scale)


class GatheringModel(LanguageModel):
    """Multiplies means over all layers in its auxiliary loss, like a load-balancing loss."""

    def __init__(self):
        super().__init__(4)
        self.blocks = nn.ModuleList(Gathering() for _ in range(4))

    def training_step(self, batch, batch_idx):
        self.gathered = [self.embed(batch)]  # what stands here before the layers run stays where it is
        for block in self.blocks:
            block.__dict__["gathered"] = self.gathered
        logits = self.head(self.norm(self.run_blocks(self.gathered[0])))
        mean = torch.stack(self.gathered[1:]).mean((0, 1, 2))
        return F.cross_entropy(logits.flatten(0, 1), batch.flatten()) + mean.square().sum()


@pytest.mark.parametrize("counts", [[2, 1, 1, 2], [1, 2, 2, 1], [4, 2]])
def test_a_users_list_rides_along(counts):
    torch.manual_seed(0)
    placement = wave(len(counts) // 2)
    assert_bitwise(GatheringModel(), tokens(2), counts, placement, side_channels=lambda m: (AttributeList(m, "gathered"),))


def test_without_the_channel_the_loss_differs():
    torch.manual_seed(0)
    with pytest.raises(AssertionError, match="losses"):
        assert_bitwise(GatheringModel(), tokens(2), [2, 1, 1, 2], wave(2))


def test_a_channel_that_is_no_list_says_so():
    module = LanguageModel(4)
    module.gathered = ()
    with pytest.raises(TypeError, match='side channel "gathered" is a tuple; make it a list'):
        Pipeline(module, [3, 3], side_channels=lambda m: (AttributeList(m, "gathered"),)).train(tokens(1))


@pytest.mark.parametrize("counts", [[2, 1, 1, 2], [1, 2, 2, 1], [5, 1]])
@pytest.mark.parametrize("padded", [False, True])
def test_router_logits_of_mixtral_are_bitwise(counts, padded):
    module = CausalLanguageModel("mixtral", output_router_logits=True, router_aux_loss_coef=0.5)
    assert_bitwise(module, texts(2, padded=padded), counts, wave(len(counts) // 2))


def test_hidden_states_are_refused():
    module = CausalLanguageModel("llama", output_hidden_states=True)
    with pytest.raises(ValueError, match="set it to False under a pipeline"):
        Pipeline(module, [2, 1, 1, 2]).train(texts(1))
