"""Activation recomputation and gradient accumulation: the same gradients from less memory, for more time.

Bytes that a GPT layer keeps in 16-bit precision (Korthikanti et al. 2022, §4): sbh(34 + 5as/h) without recomputation,
34 sbh with selective (attention's scores are computed again), 2 sbh with full (only the layer's input is kept; Chen et
al. 2016). `memory.activation_bytes` has the formulas of this course's model. What it costs in FLOPs: `profiling`.

`accumulate` adds up the gradients of micro-batches, weighted by their tokens: the gradient of the whole batch, with the
activations of one micro-batch. batch = micro_batch x accumulation steps.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from course_lib.recompute.any_model import check_blocks, recompute_modules
from course_lib.recompute.profiling import hfu, profiler, step_flops
from course_lib.single_gpu import training as single_gpu
from course_lib.single_gpu.model import Transformer
from course_lib.single_gpu.profile import MemoryProfile


class Recomputed:
    """A function of which only the arguments, and the outputs that `policy` saves, are kept for backward, which runs it
    again.

    Without a policy no `context_fn` is passed: torch.compile cannot trace `noop_context_fn`, checkpoint's default, if
    it is read from an attribute.
    """

    def __init__(self, function, policy=None):
        self.function = function
        self.settings: dict[str, Any] = {"use_reentrant": False}
        if policy is not None:
            self.settings["context_fn"] = functools.partial(create_selective_checkpoint_contexts, policy)

    def __call__(self, *arguments, **keywords):
        return checkpoint(self.function, *arguments, **self.settings, **keywords)


aten = torch.ops.aten
FUSED_ATTENTION = {
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
}


def keep_fused_attention(ctx, operation, *args, **kwargs) -> CheckpointPolicy:
    """Policy: save the outputs of fused attention kernels, compute everything else again."""
    save = operation in FUSED_ATTENTION
    return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE


# exercise 02.4
def apply_recompute(model: nn.Module, mode: str, policy: Callable | None = None) -> nn.Module:
    """Recompute activations in each of `model.blocks`, or in each module of an nn.ModuleList of any model; replaces an
    earlier mode. Returns the model.

    mode: "none"; "selective" computes attention's scores again, or what `policy` does not keep (a function, see
    torch.utils.checkpoint.create_selective_checkpoint_contexts); "full" keeps each block's input alone. Raises
    ValueError for another mode, for a policy with another mode than selective, and for selective without a policy on a
    ModuleList; TypeError for a model with other blocks.
    """
    if mode not in ("none", "selective", "full"):
        raise ValueError(f"mode {mode!r}: it is none, selective or full")
    if policy is not None and mode != "selective":
        raise ValueError(f"a policy belongs to mode selective, not {mode}")
    if isinstance(model, nn.ModuleList):
        return recompute_modules(model, mode, policy, Recomputed)
    check_blocks(model)
    blocks: Any = model.blocks
    for block in blocks:
        attention = block.attention
        block.__dict__.pop("forward", None)
        if isinstance(attention.core, Recomputed):
            attention.core = attention.core.function
        if mode == "full" or policy is not None:
            block.forward = Recomputed(block.forward, policy)
        elif mode == "selective":
            attention.core = Recomputed(attention.core, keep_fused_attention)
    return model


def retained_bytes(module: nn.Module, forward) -> int:
    """Return the bytes that `forward()` makes on the module's device and leaves alive for backward, its result
    included; older tensors, such as parameters, do not count.
    """
    with MemoryProfile(module) as profile:
        result = forward()  # noqa: F841  (it holds the graph)
        profile.mark("kept")
    level = profile.peak("kept")  # the phase has no operation of its own: its peak is the level before it
    return level["activations"] + level["temporary"]


# exercise 02.6
def keep_matmuls(ctx, operation, *args, **kwargs) -> CheckpointPolicy:
    """Policy for blocks: save the outputs of matmuls with weights and of fused attention (MUST_SAVE), and compute the
    rest, which is cheap, again.
    """
    matmuls = aten.mm.default, aten.addmm.default, aten._grouped_mm.default  # the last: of experts (notebook 08)
    save = operation in FUSED_ATTENTION or operation in matmuls
    return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE


IGNORED = -100  # a target that is not trained on; F.cross_entropy leaves it out


def summed_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the sum of the cross-entropies in float32, a scalar. logits: [b, s, v]; targets: [b, s]."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")


# exercise 02.8
def accumulate(
    model: nn.Module,
    micro_batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
    dtype: torch.dtype = torch.float32,
    tokens: torch.Tensor | float | None = None,
    loss_of: Callable[..., torch.Tensor] = summed_loss,
) -> torch.Tensor:
    """Add to .grad the gradient of the mean loss over all target tokens of `micro_batches`, one after the other.

    micro_batches: (inputs, targets), each [b, s]; targets of IGNORED do not count. dtype: of the matmuls (autocast).
    tokens: what the sum of the losses is divided by (None: the number of targets, or 1 if there is none).
    loss_of(what the model returns, targets): the sum of the losses. Returns the mean loss, a detached float32 scalar on
    the device, without reading a value on the host. Raises ValueError if there is no micro-batch and no `tokens`.
    """
    micro_batches = list(micro_batches)
    if tokens is None and not micro_batches:
        raise ValueError("no micro-batch: there is nothing to learn from")
    if tokens is None:
        tokens = torch.stack([(targets != IGNORED).sum() for _, targets in micro_batches]).sum().clamp(min=1)
    total = torch.zeros((), device=next(model.parameters()).device)
    for inputs, targets in micro_batches:
        with torch.autocast(inputs.device.type, dtype, enabled=dtype != torch.float32):
            logits = model(inputs)
        part = loss_of(logits, targets) / tokens
        part.backward()
        total = total + part.detach()
    return total


# exercise 02.9
@contextlib.contextmanager
def fp32_gradients(model: nn.Module) -> Iterator[dict[nn.Parameter, torch.Tensor]]:
    """Add up gradients in float32: `with fp32_gradients(model) as sums:`; sums[parameter] has the parameter's shape.

    Each .grad goes to its sum, and is None again, as soon as backward has made it. Sums begin at zero: gradients from
    before the `with` are dropped. Parameters that require no gradient are left out.
    """
    sums = {p: torch.zeros_like(p, dtype=torch.float32) for p in model.parameters() if p.requires_grad}

    def move(parameter):
        sums[parameter].add_(parameter.grad)
        parameter.grad = None

    model.zero_grad()
    handles = [parameter.register_post_accumulate_grad_hook(move) for parameter in sums]
    try:
        yield sums
    finally:
        for handle in handles:
            handle.remove()


def options(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the program's options. Touches nothing; an unknown or impossible one ends the program with status 2."""
    parser = single_gpu.training_parser("recompute", "Train with recomputation and gradient accumulation.")
    modes = ["none", "selective", "matmuls", "full"]
    old_names = {"products": "matmuls"}
    parser.add_argument(
        "--recompute",
        default="none",
        type=lambda mode: old_names.get(mode, mode),
        choices=modes,
        help="matmuls: save their outputs",
    )
    single_gpu.add_micro_batch(parser)
    parser.add_argument("--trace", type=single_gpu.out_file, help="a file for the trace of steps 3 to 5")
    args = single_gpu.parse(parser, argv)
    if args.trace and args.steps < 5:
        parser.error("--trace records steps 3 to 5: --steps must be 5 or more")
    return args


def accumulated_step(micro_batch: int, model, optimizer, inputs, targets, dtype=torch.float32, max_norm=1.0):
    """Run one step like `single_gpu.train_step`, but micro_batch sequences at a time."""
    optimizer.zero_grad()
    parts = zip(inputs.split(micro_batch), targets.split(micro_batch), strict=True)
    step_loss = accumulate(model, list(parts), dtype)
    nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    return step_loss


def main(argv: list[str] | None = None) -> list[dict]:
    """Train as the options say; print one line per step, write the records to --out, and return them."""
    args, configs = options(argv), []
    policy = keep_matmuls if args.recompute == "matmuls" else None
    mode = "selective" if policy else args.recompute

    def build(config, seed):
        configs.append(config)
        return apply_recompute(Transformer(config, seed), mode, policy)

    with profiler(args.trace) if args.trace else contextlib.nullcontext() as prof:

        def step(*inputs):
            step_loss = accumulated_step(args.micro_batch, *inputs)
            if prof:
                prof.step()
            return step_loss

        records = single_gpu.run(args, step, build)
    if peak := single_gpu.peak_flops():
        flops = step_flops(configs[0], args.batch, args.seq, mode)
        needed, executed = (hfu(count, records[-1]["step_s"], peak) for count in flops)
        print(f"last step, FLOPs counted exactly: MFU {needed:.1%}, HFU {executed:.1%}")
    return records
