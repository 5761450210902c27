"""Layer costs assumed from parameter counts, for the first plan, before anything is measured.

Only ratios matter: a layer's matrix products grow with its weights, B and W of a product cost what F costs, an
embedding is a look-up in F and B. The unit is arbitrary; a layer holds one unit of memory from F to B and, as a
transformer's products do (first paper, section 3.2: 34 and 32), about as much from B to W.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from lightning_zb.planning.costs import CostModel, LayerCost, LayerRole

_SECONDS_PER_WEIGHT = 1e-9
_ACTIVE_EXPERTS = 2  # of a stack of expert weights (three dimensions), the usual top-2 routing


def assumed_costs(module: nn.Module, names: Sequence[str], layers: Sequence[nn.Module]) -> CostModel:
    """Costs for [prologue, layer 0, ..., layer L-1, epilogue].

    Args:
        module: the whole LightningModule.
        names: the layers' names.
        layers: the stacked layers, in order.
    """
    inside = {id(p) for layer in layers for p in layer.parameters()}
    outside = [m for m in module.modules() if not any(id(p) in inside for p in m.parameters())]
    embeddings = [m for m in outside if isinstance(m, nn.Embedding)]
    heads = [p for m in outside if isinstance(m, nn.Linear) for p in m.parameters(recurse=False) if p.dim() > 1]
    work = [_matrix_weights(layer.parameters()) for layer in layers]
    floor = max(1.0, 1e-2 * sum(work) / max(1, len(work)))
    table = sum(p.numel() for m in embeddings for p in m.parameters())
    prologue = LayerCost(
        "prologue", 0.0, 0.0, 0.02 * table * _SECONDS_PER_WEIGHT, role=LayerRole.PROLOGUE, parameter_bytes=_bytes(embeddings)
    )
    items = [prologue]
    for name, layer, weights in zip(names, layers, work, strict=True):
        seconds = max(weights, floor) * _SECONDS_PER_WEIGHT
        items.append(LayerCost(name, seconds, seconds, seconds, 1.0, 1.0, parameter_bytes=_bytes([layer])))
    seconds = sum(p.numel() for p in heads) * _SECONDS_PER_WEIGHT
    head_bytes = float(sum(p.numel() * p.element_size() for p in heads))
    items.append(LayerCost("epilogue", seconds, seconds, seconds, role=LayerRole.EPILOGUE, parameter_bytes=head_bytes))
    return CostModel(tuple(items))


def _matrix_weights(parameters: Iterable[nn.Parameter]) -> float:
    total = 0.0
    for p in parameters:
        if p.dim() == 3 and p.shape[0] > _ACTIVE_EXPERTS and p.shape[1] > 1:
            total += p.numel() * _ACTIVE_EXPERTS / p.shape[0]
        elif p.dim() >= 2:
            total += p.numel()
    return total


def _bytes(modules: Iterable[nn.Module]) -> float:
    return float(sum(p.numel() * p.element_size() for m in modules for p in m.parameters()))
