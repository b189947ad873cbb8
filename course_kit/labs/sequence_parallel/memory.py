"""Bytes that a rank saves for backward, for Korthikanti's GPT layer and for the course's model."""

from __future__ import annotations

import csv
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import course_lib
from course_kit.labs.sequence_parallel.drift import swap_gates
from course_kit.labs.sequence_parallel.models import batch_of, split_model
from course_lib.recompute.modes import Recomputed, retained_bytes
from course_lib.single_gpu.model import PRESETS, ModelConfig
from course_lib.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear, project_together
from course_lib.tensor_parallel.vocabulary import vocab_parallel_cross_entropy


def published_scaling() -> list[dict[str, str]]:
    """Return the rows of data/tp_scaling.csv: published runs at tp 2 to 32, without and with sequence parallelism."""
    path = Path(course_lib.__file__).parents[1] / "data" / "tp_scaling.csv"
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


class SplitGPTLayer(nn.Module):
    """LayerNorm, attention, dropout; LayerNorm, GELU MLP of 4h, dropout; the matrices split over `group`."""

    def __init__(self, hidden: int, heads: int, group: dist.ProcessGroup):
        super().__init__()
        linear = functools.partial(nn.Linear, bias=False)
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(2))
        self.qkv = nn.ModuleList(ColumnParallelLinear(linear(hidden, hidden), group) for _ in range(3))
        self.out, self.down = (RowParallelLinear(linear(n * hidden, hidden), group) for n in (1, 4))
        self.up = ColumnParallelLinear(linear(hidden, 4 * hidden), group)
        self.heads, self.core = heads // group.size(), Recomputed(self.attend)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Return causal attention with dropout of the local heads; all [b, s, a/t, d]."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        future = torch.full((q.shape[2], q.shape[2]), -torch.inf, dtype=q.dtype).triu(1)
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5 + future
        return (torch.native_dropout(scores.softmax(-1), 0.1, True)[0] @ v).transpose(1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layers = [cast(ColumnParallelLinear, layer) for layer in self.qkv]
        q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in project_together(self.norms[0](x), layers))
        x = x + torch.native_dropout(self.out(self.core(q, k, v).flatten(-2)), 0.1, True)[0]
        return x + torch.native_dropout(self.down(F.gelu(self.up(self.norms[1](x)))), 0.1, True)[0]


def gpt_saved_bytes(
    group: dist.ProcessGroup,
    sequence_parallel: bool,
    layers: int = 3,
    b: int = 2,
    s: int = 128,
    h: int = 64,
    a: int = 4,
) -> float:
    """Return the bytes that a rank saves for some layers in BF16, in sbh per layer, with recomputed scores."""
    stack = nn.Sequential(*(SplitGPTLayer(h, a, group) for _ in range(layers))).bfloat16()
    if sequence_parallel:
        swap_gates(stack)
    x = torch.randn(b, s // group.size() if sequence_parallel else s, h, dtype=torch.bfloat16, requires_grad=True)

    def forward() -> torch.Tensor:
        out = stack(x)
        time.sleep(0.02)  # gloo's threads release the last tensor
        return out

    # x existed before and does not count; the last layer's output, of the same size, counts instead
    return retained_bytes(stack, forward) / (layers * b * s * h)


def saved_bytes(model: nn.Module, forward: Callable[[], torch.Tensor]) -> int:
    """Return the bytes of the storages that forward() saves for backward, without the model's parameters."""
    parameters = {p.untyped_storage()._cdata for p in model.parameters()}
    storages: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in parameters:
            storages[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = forward()  # noqa: F841  (it holds the graph, so that no storage appears twice)
    return sum(storages.values())


def saved_by_rank(
    group: dist.ProcessGroup,
    sequence_parallel: bool,
    config: ModelConfig = PRESETS["small"],
    batch: int = 4,
    seq: int = 128,
) -> int:
    """On a rank: bytes that a forward of the split model saves for backward."""
    model, (inputs, targets) = split_model(config, group, sequence_parallel), batch_of(config, batch, seq)
    return saved_bytes(model, lambda: vocab_parallel_cross_entropy(model(inputs), targets, group, config.vocab))
