import pytest
import torch
from torch import nn

from lightning_zb.model.layers import find_layers
from lightning_zb.model.windows import Window, windows
from lightning_zb.planning.placement import Partition


class Nest(nn.Module):
    def __init__(self, **children):
        super().__init__()
        for name, child in children.items():
            setattr(self, name, child)


def linears(num, width=4):
    return [nn.Linear(width, width) for _ in range(num)]


def test_a_root_sequential_is_found():
    stack = find_layers(Nest(model=nn.Sequential(*linears(3))))
    assert stack.path == "model"
    assert stack.names == ("model.0", "model.1", "model.2")
    assert len(stack) == 3


def test_the_widest_container_wins_over_a_small_head_and_inner_containers():
    blocks = nn.ModuleList(nn.Sequential(*linears(9)) for _ in range(4))
    stack = find_layers(Nest(net=Nest(blocks=blocks, head=nn.Sequential(*linears(2)), acts=nn.ModuleList([nn.ReLU()] * 9))))
    assert stack.path == "net.blocks"


def test_several_paths_are_joined_in_order():
    stack = find_layers(Nest(a=nn.ModuleList(linears(2)), b=nn.ModuleDict({"x": nn.Linear(4, 4)})), ["a", "b"])
    assert stack.names == ("a.0", "a.1", "b.x")


def test_a_module_twice_in_the_container_has_two_positions():
    shared = nn.Linear(4, 4)
    stack = find_layers(Nest(model=nn.Sequential(shared, shared, nn.Linear(4, 4))))
    assert len(stack) == 3
    assert stack.positions()[shared] == (0, 1)


@pytest.mark.parametrize(
    ("module", "layers", "message"),
    [
        (Nest(a=nn.Linear(4, 4)), None, r'found no nn.ModuleList .* in Nest; .* ZeroBubbleStrategy\(layers="model.layers"\)'),
        (
            Nest(encoder=nn.ModuleList(linears(2)), decoder=nn.ModuleList(linears(2))),
            None,
            r'several layer stacks come into question: "encoder" \(2 layers, 40 parameters\), "decoder" .*; name one',
        ),
        (Nest(deep=nn.ModuleList(linears(3, 2)), wide=nn.ModuleList(linears(2, 9))), None, "several layer stacks"),
        (Nest(a=nn.ModuleList(linears(2))), "b.c", 'layers="b.c" names no module of Nest; its layer containers: "a"'),
        (Nest(a=nn.Linear(4, 4)), "a", 'layers="a" is a Linear; name an nn.ModuleList'),
    ],
)
def test_what_to_write_when_the_stack_is_not_clear(module, layers, message):
    with pytest.raises(ValueError, match=message):
        find_layers(module, layers)


def test_windows_of_a_partition_with_ends():
    assert windows(Partition.from_counts([2, 2, 1, 1]), 4) == (
        Window(0, 1, True, False),
        Window(1, 3, False, False),
        Window(3, 4, False, False),
        Window(4, 4, False, True),
    )
    assert windows(Partition.from_counts([1, 5]), 4) == (Window(0, 0, True, False), Window(0, 4, False, True))
    assert windows(Partition.from_counts([6]), 4) == (Window(0, 4, True, True),)


def test_a_partition_of_the_layers_alone_is_refused():
    with pytest.raises(ValueError, match="covers 4 items; a stack of 4 layers needs 6"):
        windows(Partition.from_counts([2, 2]), 4)


def test_meta_parameters_count():
    with torch.device("meta"):
        module = Nest(model=nn.Sequential(*linears(3)))
    assert find_layers(module).path == "model"
