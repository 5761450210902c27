"""Small, ordinary LightningModules: nothing in them knows of pipelines."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn

from tests.lightning.optimizers import OPTIMIZERS

VOCABULARY, LENGTH, HIDDEN = 64, 12, 32


class Tokens(torch.utils.data.Dataset):
    """Deterministic token sequences; some easy ones, so that gradient norms vary."""

    def __init__(self, size: int = 48) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(0, VOCABULARY, (LENGTH,), generator=generator)
        if index % 5 == 0:
            ids[:] = 7
        return {"input_ids": ids, "labels": ids.clone()}


class RaggedTokens(Tokens):
    """Pairs of sequences of three lengths: with a batch size of two, batch after batch has another shape."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        length = LENGTH - 4 * (index // 2 % 3)
        return {name: ids[:length] for name, ids in super().__getitem__(index).items()}


class SplitTokens(torch.utils.data.IterableDataset):
    """Every second sequence, by the rank of the process that reads, as sharded web datasets do; without a length."""

    def __init__(self, size: int) -> None:
        self.data = Tokens(size)

    def __iter__(self):
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        return (self.data[i] for i in range(rank % 2, self.data.size, 2))


class Vectors(torch.utils.data.Dataset):
    def __init__(self, size: int = 48) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(8, generator=generator)
        return x, x.sum(0, keepdim=True)


class Trained(L.LightningModule):
    """AdamW with a step-wise schedule; the loss is logged by step and epoch.

    Args:
        groups: two parameter groups with values of their own.
        lr: learning rate.
        poisoned_step: at which step one gradient is NaN when the optimizer is about to step.
        overflowing_steps: at which steps that gradient is infinite as it comes out of the backward pass.
        scales: what the loss is multiplied with, step by step and over again: decides which steps clip.
        warmup: the learning rate grows over four steps instead of falling.
        optimizer: class name in torch.optim, or in `OPTIMIZERS`.
        optimizer_options: besides the learning rate.
    """

    def __init__(
        self,
        groups: bool = False,
        lr: float = 3e-3,
        poisoned_step: int | None = None,
        overflowing_steps: tuple[int, ...] = (),
        scales: tuple[float, ...] = (1.0,),
        warmup: bool = False,
        optimizer: str = "AdamW",
        optimizer_options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.optimizer, self.optimizer_options = optimizer, optimizer_options or {}
        self.groups, self.lr, self.poisoned_step, self.overflowing_steps = groups, lr, poisoned_step, overflowing_steps
        self.scales, self.warmup = scales, warmup

    def on_fit_start(self) -> None:
        if self.overflowing_steps:
            next(p for n, p in self.named_parameters() if n == "net.layers.3.up.weight").register_hook(self._overflow)

    def _overflow(self, gradient: torch.Tensor) -> torch.Tensor:
        if self.global_step in self.overflowing_steps:
            gradient = gradient.clone()
            gradient[0, 0] = float("inf")
        return gradient

    def on_before_optimizer_step(self, optimizer) -> None:
        if self.global_step == self.poisoned_step:  # as an overflow in one layer would
            gradient = next(p for n, p in self.named_parameters() if n == "net.layers.3.up.weight").grad
            if gradient is not None:
                gradient[0, 0] = float("nan")

    def loss(self, batch) -> torch.Tensor:
        raise NotImplementedError

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        if len(self.scales) > 1:
            loss = loss * self.scales[self.global_step % len(self.scales)]
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), prog_bar=True)

    def configure_optimizers(self):
        parameters = [p for p in self.parameters() if p.requires_grad]
        if self.groups:
            decay, plain = [p for p in parameters if p.dim() > 1], [p for p in parameters if p.dim() <= 1]
            parameters = [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0, "lr": self.lr / 2}]
        kind = OPTIMIZERS.get(self.optimizer) or getattr(torch.optim, self.optimizer)
        optimizer = kind(parameters, lr=self.lr, **self.optimizer_options)
        factor = (lambda step: min(1.0, (step + 1) / 4)) if self.warmup else (lambda step: 0.9**step)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class SequentialModule(Trained):
    """A plain nn.Sequential; `frozen` freezes its first layers."""

    def __init__(self, num_blocks: int = 8, frozen: int = 0, **kwargs) -> None:
        super().__init__(**kwargs)
        blocks = [nn.Sequential(nn.Linear(8 if i == 0 else 16, 16), nn.Tanh()) for i in range(num_blocks - 1)]
        self.model = nn.Sequential(*blocks, nn.Linear(16, 1))
        for block in self.model[:frozen]:
            block.requires_grad_(False)

    def loss(self, batch):
        x, y = batch
        return F.mse_loss(self.model(x), y)


class Kernel(torch.autograd.Function):
    """A fused kernel as mamba_ssm and Transformer Engine have them: one backward for input and weights."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        output = torch.tanh(x @ weight.t() + bias)
        ctx.save_for_backward(x, weight, output)
        return output

    @staticmethod
    def backward(ctx, gradient):
        x, weight, output = ctx.saved_tensors
        inner = gradient * (1 - output**2)
        return inner @ weight, inner.t() @ x, inner.sum(0)


class KernelLayer(nn.Module):
    """A linear operator, and another one within a whole kernel; `fused=False` leaves the kernel out."""

    def __init__(self, fused: bool = True) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 24, bias=False), nn.Linear(24, 8, bias=False)
        self.kernel = nn.Linear(24, 24) if fused else None

    def forward(self, x):
        inner = self.up(x)
        if self.kernel is not None:
            inner = Kernel.apply(inner, self.kernel.weight, self.kernel.bias)
        return x + self.down(inner)


class KernelModule(Trained):
    """Layers with whole kernels and without, in turn."""

    def __init__(self, num_layers: int = 4, **kwargs) -> None:
        super().__init__(**kwargs)
        self.layers = nn.ModuleList(KernelLayer(fused=i % 2 == 0) for i in range(num_layers))
        self.head = nn.Linear(8, 1)

    def loss(self, batch):
        x, y = batch
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(self.head(x), y)


class Block(nn.Module):
    """Pre-norm attention and MLP; an MLP that stands twice in it is the layer used twice."""

    def __init__(self, dropout: float, twice: bool, batch_norm: bool = False) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(HIDDEN) if batch_norm else None
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)
        self.dropout, self.twice = nn.Dropout(dropout), twice

    def mlp(self, x):
        return self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, 4, d // 4).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        x = x + self.dropout(self.out(attended))
        if self.batch_norm is not None:
            x = self.batch_norm(x.flatten(0, 1)).view_as(x)
        x = x + self.mlp(x)
        return x + self.mlp(x) if self.twice else x


class LanguageModel(nn.Module):
    def __init__(
        self,
        num_layers: int,
        tied: bool,
        dropout: float,
        twice: bool,
        raw_positions: bool,
        functional_head: bool,
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.positions = nn.Parameter(torch.randn(LENGTH, HIDDEN)) if raw_positions else nn.Embedding(LENGTH, HIDDEN)
        self.layers = nn.ModuleList(Block(dropout, twice, batch_norm) for _ in range(num_layers))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.functional_head = functional_head
        if functional_head:
            self.head = nn.Identity()
        elif tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids):
        where = self.positions if isinstance(self.positions, nn.Parameter) else self.positions(torch.arange(ids.shape[1]))
        x = self.embedding(ids) + where
        for layer in self.layers:
            x = layer(x)
        x = self.head(self.norm(x))
        return F.linear(x, self.embedding.weight) if self.functional_head else x


class TokenModule(Trained):
    """Embedding, layers, norm and head, written by hand."""

    def __init__(
        self,
        num_layers=8,
        tied=False,
        dropout=0.0,
        twice=False,
        raw_positions=False,
        functional_head=False,
        batch_norm=False,
        frozen=0,
        **kwargs,
    ) -> None:
        super().__init__(**kwargs)
        self.net = LanguageModel(num_layers, tied, dropout, twice, raw_positions, functional_head, batch_norm)
        if frozen:
            self.net.embedding.requires_grad_(False)
            for layer in self.net.layers[:frozen]:
                layer.requires_grad_(False)

    def loss(self, batch):
        logits = self.net(batch["input_ids"])
        return F.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), batch["labels"][:, 1:].reshape(-1))


class Adapted(nn.Module):
    """A frozen linear layer and a trained update of rank 2, as LoRA adds it."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.a, self.b = nn.Linear(inner.in_features, 2, bias=False), nn.Linear(2, inner.out_features, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x):
        return self.inner(x) + self.b(self.a(x))


class AdaptedModule(TokenModule):
    """Frozen but for the adapters, so W has little to do."""

    def __init__(self, **kwargs) -> None:
        super().__init__(**kwargs)
        self.requires_grad_(False)
        for layer in self.net.layers:
            layer.qkv, layer.up = Adapted(layer.qkv), Adapted(layer.up)


class HybridModule(Trained):
    """Nemotron-H in small: Mamba-2, MoE, attention and MLP layers of `transformers`, random weights."""

    def __init__(self, num_layers: int = 8, **kwargs) -> None:
        super().__init__(**kwargs)
        from transformers import AutoModelForCausalLM, NemotronHConfig

        pattern = ["mamba", "moe", "mamba", "attention", "mamba", "moe", "attention", "mlp"]
        config = NemotronHConfig(
            vocab_size=VOCABULARY, hidden_size=HIDDEN, layers_block_type=(pattern * 4)[:num_layers],
            num_attention_heads=2, num_key_value_heads=1, head_dim=16, intermediate_size=2 * HIDDEN,
            ssm_state_size=8, mamba_num_heads=4, mamba_head_dim=16, n_groups=1, chunk_size=16,
            n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=HIDDEN, moe_shared_expert_intermediate_size=HIDDEN,
            max_position_embeddings=64, pad_token_id=None, bos_token_id=1, eos_token_id=2, use_cache=False,
        )  # fmt: skip
        self.model = AutoModelForCausalLM.from_config(config).float()
        self.model.train()

    def loss(self, batch):
        return self.model(**batch).loss


class ConfiguredModule(Trained):
    """A Hugging Face model made in configure_model, as Lightning advises for models that one device cannot hold."""

    def __init__(self, family: str, **kwargs) -> None:
        super().__init__(**kwargs)
        self.family, self.model = family, None

    def configure_model(self) -> None:
        if self.model is None:
            from transformers import AutoModelForCausalLM

            from recipes.models.families import configuration

            config = configuration(self.family, 5, use_cache=False)
            self.model = AutoModelForCausalLM.from_config(config).float().train()

    def loss(self, batch):
        return self.model(**batch).loss


class RebuildingModule(ConfiguredModule):
    """Forgets to look whether its model exists."""

    def configure_model(self) -> None:
        self.model = None
        super().configure_model()


class CountingBlock(Block):
    """Its output depends on a buffer that every forward changes."""

    def forward(self, x):
        self.calls.add_(1)
        return super().forward(x) * (1 + 1e-3 * self.calls.item())


class SwitchingModule(TokenModule):
    """After some steps goes over to another plan, given as schedule and layer counts; nothing under the plain Trainer."""

    def __init__(self, switches: dict[int, tuple[str, list[int] | str]], **kwargs) -> None:
        super().__init__(**kwargs)
        self.switches = switches
        for layer in self.net.layers:
            layer.__class__ = CountingBlock
            layer.register_buffer("calls", torch.zeros(()))

    def on_train_batch_end(self, outputs, batch, batch_idx) -> None:
        from lightning_zb.planning.planner import make_plan

        strategy = self.trainer.strategy
        if self.trainer.global_step in self.switches and hasattr(strategy, "pipeline") and not strategy._queue:
            schedule, partition = self.switches.pop(self.trainer.global_step)
            plan = strategy.plan
            new = make_plan(plan.costs, plan.num_devices, plan.num_microbatches, schedule, partition=partition)
            strategy.pipeline.switch(new)
            assert strategy.plan is new

    def on_train_end(self) -> None:
        assert not self.switches or not hasattr(self.trainer.strategy, "pipeline")


MODELS = {"sequential": SequentialModule, "tokens": TokenModule, "hybrid": HybridModule, "switching": SwitchingModule}
MODELS |= {"kernels": KernelModule}
MODELS |= {"configured": ConfiguredModule, "rebuilding": RebuildingModule}
MODELS |= {"adapted": AdaptedModule, "ragged": TokenModule}


def dataset(model: str, size: int) -> torch.utils.data.Dataset:
    return {"sequential": Vectors, "kernels": Vectors, "ragged": RaggedTokens}.get(model, Tokens)(size)
