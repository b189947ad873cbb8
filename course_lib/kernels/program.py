"""The kernels of a transformer, applied to a model, and a training run with them.

    softmax, rms_norm (with the residual's sum), swiglu, rope       operators with a gradient, each one kernel each way
    linear_cross_entropy, adamw_step                                the loss without logits; the optimizer's step

`use_kernels(model)` lets a `Transformer` compute with them, in place: the same losses and gradients, less memory
traffic. Each kernel's module documents the bytes it moves and keeps for backward.
"""

from __future__ import annotations

import argparse
from typing import cast

import torch
from torch import nn

from course_lib.kernels.fused_loss import defer_head, linear_cross_entropy
from course_lib.kernels.fused_norm import FusedRMSNorm
from course_lib.kernels.fused_rope import rope
from course_lib.kernels.fused_swiglu import swiglu
from course_lib.single_gpu import model as plain_model
from course_lib.single_gpu import training as single_gpu
from course_lib.single_gpu.model import Transformer, need_transformer


class FusedBlock(plain_model.Block):
    """A layer that adds the attention's output to x in the kernel that normalizes the sum: one [b, s, h] less to move
    forward, two less backward.
    """

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *documents: torch.Tensor) -> torch.Tensor:
        """Return the layer's output [b, s, h] for x: [b, s, h]."""
        if not isinstance(self.mlp_norm, FusedRMSNorm):  # a later transform has replaced the norm
            return super().forward(x, cos, sin, *documents)
        normed, x = self.mlp_norm(self.attention(self.attention_norm(x), cos, sin, *documents), residual=x)
        return x + self.mlp(normed)


def use_kernels(model: nn.Module) -> nn.Module:
    """Let a `Transformer` compute norms, residual sums, rotary positions and SwiGLU by kernels, in place; return the
    model.

    Modules become their fused subclasses: parameters, their names, hooks and devices (meta too) do not change. The
    training program chooses loss and optimizer: `defer_head` with `linear_cross_entropy`, `FusedAdamW`. Call it before
    all transforms but apply_moe. It leaves alone matmuls, which the others split, and any norm or activation that
    another transform has replaced.

    Raises ValueError, and changes nothing, for a model whose blocks are recomputed already: they would keep their old
    forward.
    """
    need_transformer(model, "use_kernels", "FusedRMSNorm, rope and swiglu work in any model")
    if any("forward" in vars(block) for block in cast(Transformer, model).blocks):
        raise ValueError("a block's forward is replaced already, perhaps by apply_recompute: call use_kernels first")
    for module in model.modules():
        if type(module) is nn.RMSNorm:
            module.__class__ = FusedRMSNorm
        elif type(module) is plain_model.Block:
            module.__class__ = FusedBlock
        elif isinstance(module, plain_model.Attention) and module.rope is plain_model.apply_rope:
            module.rope = rope
        elif isinstance(module, plain_model.MLP) and module.activation is plain_model.swiglu:
            module.activation = swiglu
    return model


def options(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the program's options. Exits with status 2 for an unknown or impossible option."""
    parser = single_gpu.training_parser("kernels", "Train with fused kernels; without a GPU they are interpreted.")
    parser.add_argument("--plain", action="store_true", help="with PyTorch's own operations, to compare")
    if torch.cuda.is_available():
        parser.set_defaults(preset="SmolLM-135M", batch=8, seq=1024)
    else:  # the interpreter takes milliseconds per row
        parser.set_defaults(preset="debug", steps=3, batch=2, seq=16)
    return single_gpu.parse(parser, argv)


def kernel_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    dtype: torch.dtype = torch.float32,
    max_norm: float = 1.0,
) -> torch.Tensor:
    """Run `single_gpu.train_step` for a model whose head is deferred."""
    optimizer.zero_grad()
    with torch.autocast(inputs.device.type, dtype, enabled=dtype != torch.float32):
        step_loss = linear_cross_entropy(model(inputs), cast(nn.Linear, model.head).weight, targets)
    step_loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    return step_loss.detach()


def main(argv: list[str] | None = None) -> list[dict]:
    """Train as the options say: print one line per step, write the records to --out, and return them."""
    args = options(argv)
    if args.plain:
        return single_gpu.run(args)
    return single_gpu.run(args, kernel_step, lambda config, seed: defer_head(use_kernels(Transformer(config, seed))))
