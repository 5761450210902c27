"""torch.distributed.pipelining's own runtime on one of our orders."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from lightning_zb.planning.placement import Placement
from lightning_zb.planning.schedule import Schedule
from tests.execution.pipeline_models import Model, make_microbatches

LETTERS = {"F": "F", "B": "I", "W": "W", "BW": "B"}


class Stage(nn.Module):
    """One chunk of a `Model` as a module of its own; the last one stops at the logits."""

    def __init__(self, model: Model, chunk: int) -> None:
        super().__init__()
        self.embedding = model.embedding if chunk == 0 else None
        self.block = model.blocks[chunk]
        self.head = model.head if chunk == model.num_chunks - 1 else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(x if self.embedding is None else self.embedding(x))
        return x if self.head is None else self.head(x)


def train_with_torch(rank: int, schedule: Schedule, placement: Placement, csv: str) -> dict[str, Tensor]:
    """Gradients of this rank after one step of torch's runtime."""
    torch.manual_seed(0)
    model = Model(placement.num_chunks)
    if rank == 0:
        rows = (",".join(f"{p.chunk}{LETTERS[p.kind.value]}{p.microbatch}" for p in order) for order in schedule.orders)
        Path(csv).write_text("\n".join(rows))
    torch.distributed.barrier()
    stages = [PipelineStage(Stage(model, c), c, placement.num_chunks, torch.device("cpu")) for c in placement.chunks_of(rank)]
    count = schedule.num_microbatches

    def loss(logits: Tensor, ids: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()) / count

    runtime = _PipelineScheduleRuntime(stages, count, loss_fn=loss, scale_grads=False)
    runtime._load_csv(csv)
    ids = torch.cat(make_microbatches(count))
    runtime.step(*([ids] if rank == placement.devices[0] else []), target=ids)
    torch.distributed.barrier()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
