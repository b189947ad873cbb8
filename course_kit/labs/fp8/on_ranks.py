"""FP8 models on ranks for notebook 14b: split by tensor parallelism, and under ZeRO-3 with an FP8 all-gather."""

from __future__ import annotations

import dataclasses
from typing import cast

import torch
import torch.nn.functional as F

from course_kit.typed import grad_of, transformer_blocks
from course_lib.collectives.traffic import count_traffic
from course_lib.fp8.gather import Fp8Gather
from course_lib.fp8.program import apply_fp8
from course_lib.fp8.quantizers import Quantizer
from course_lib.fp8.recipes import RECIPES, by_blocks, per_tensor
from course_lib.single_gpu import model as plain_model
from course_lib.single_gpu.model import MLP, ModelConfig, Transformer
from course_lib.tensor_parallel.model import apply_tensor_parallel
from course_lib.zero.sharded_models import fully_shard


def split_gradients(config: ModelConfig, share_amax: bool | None, tokens: torch.Tensor) -> tuple[float, torch.Tensor]:
    """Return the loss, in float64, and the gradient of one weight or of its local shard.

    share_amax: True if the ranks have common scales; None: in one process.
    """
    model = Transformer(config)
    if share_amax is not None:
        apply_tensor_parallel(model, gather_logits=True)
    apply_fp8(model.double(), dataclasses.replace(RECIPES["nanotron"], casts=per_tensor()))
    if share_amax is False:
        for quantizer in (module for module in model.modules() if isinstance(module, Quantizer)):
            quantizer.splits = ()
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    return loss.item(), grad_of(cast(MLP, transformer_blocks(model)[0].mlp).up_proj.weight)


def sharded_losses(
    config: ModelConfig, dtype: torch.dtype, in_fp8: bool, steps: int, tokens: torch.Tensor
) -> tuple[list[float], dict[str, int]]:
    """Return the losses of an FP8 model under ZeRO-3, and the bytes that this rank sends in the last step, by
    collective. in_fp8: gather weights in 8 bits.
    """
    model = apply_fp8(Transformer(config), dataclasses.replace(RECIPES["DeepSeek-V3"], casts=by_blocks()))
    sharded = fully_shard(model, compute_dtype=dtype, encode=Fp8Gather() if in_fp8 else None)
    optimizer, losses = torch.optim.AdamW(sharded.parameters(), lr=2e-3), []
    for _ in range(steps):
        with count_traffic() as traffic:
            step_loss = plain_model.loss(sharded(tokens[:, :-1]), tokens[:, 1:])
            step_loss.backward()
            sharded.finish()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(step_loss.item())
    bytes_sent: dict[str, int] = {}
    for record in traffic.records:
        bytes_sent[record.collective] = bytes_sent.get(record.collective, 0) + record.bytes
    return losses, bytes_sent
