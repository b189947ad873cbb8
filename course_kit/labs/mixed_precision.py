"""Labs of notebook 14: small gradients, training in 16 bits with and without masters, loss scale and float32 sums."""

from __future__ import annotations

import copy
import functools
import math
import time
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from course_kit.labs.single_gpu import text_tokens
from course_kit.typed import grad_of
from course_lib.mixed_precision.masters import LossScaler, MasterWeights, mixed_step
from course_lib.single_gpu.data import TokenBatches
from course_lib.single_gpu.model import PRESETS, ModelConfig, Transformer
from course_lib.single_gpu.model import loss as cross_entropy
from course_lib.single_gpu.training import ADAMW, adamw, decay_groups, train_step

BATCH, SEQ, STEPS, LR = 4, 32, 51, 3e-3  # of the runs in 16 bits
ALONE = BATCH * SEQ / 2**20  # makes a batch's gradients as small as in a batch of 2^20 tokens: 2^-13
WARM_UP = 50  # steps of training before a measurement
CONFIG = ModelConfig(vocab=256, hidden=64, layers=2, heads=4, kv_heads=2, ffn_hidden=192)

Batch = tuple[torch.Tensor, torch.Tensor]  # inputs and targets, [b, s]
Step = Callable[..., torch.Tensor]  # step(model, optimizer, inputs, targets) returns the loss


def batches_of_text(steps: int = STEPS) -> list[Batch]:
    """Return inputs and targets [4, 32] of each step, the same for every run."""
    batches = TokenBatches(text_tokens(400_000), BATCH, SEQ)
    return [next(batches) for _ in range(steps)]


def gradients_of(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return all gradients of one backward as a vector, in the parameters' dtype."""
    model.zero_grad()
    cross_entropy(model(inputs), targets).backward()
    return torch.cat([grad_of(parameter).flatten() for parameter in model.parameters()])


def micro_batch_gradients() -> torch.Tensor:
    """Return the nonzero float32 gradients of a fresh model, scaled as in a batch of 2^20 tokens.

    Rows of the embedding without a token in the micro-batch are 0.
    """
    batch = next(TokenBatches(text_tokens(400_000), batch=16, seq=64))
    gradients = gradients_of(Transformer(CONFIG), *batch) * batch[0].numel() / 2**20
    return gradients[gradients != 0]


def loss_curve(model: nn.Module, optimizer, step: Step, batches: list[Batch]) -> list[float]:
    """Return the loss of each step, up to the first NaN."""
    losses = []
    for inputs, targets in batches:
        losses.append(step(model, optimizer, inputs, targets).item())
        if math.isnan(losses[-1]):
            break
    return losses


def plain_curve(dtype: torch.dtype, batches: list[Batch], **options) -> list[float]:
    """Return the losses of training with weights, gradients and moments all of one dtype; options: AdamW's."""
    model = Transformer(PRESETS["debug"]).to(dtype)
    settings: dict[str, Any] = ADAMW | options
    return loss_curve(model, torch.optim.AdamW(decay_groups(model), LR, **settings), train_step, batches)


def master_curve(dtype: torch.dtype, batches: list[Batch], scaler: LossScaler | None = None) -> list[float]:
    """Return the losses with weights and gradients of 16 bits, and masters and moments in float32."""
    model = Transformer(PRESETS["debug"]).to(dtype)
    optimizer = MasterWeights(decay_groups(model), torch.optim.AdamW, lr=LR, **ADAMW)
    return loss_curve(model, optimizer, functools.partial(mixed_step, scaler), batches)


def smoothed(curve: list[float], width: int = 10) -> list[float]:
    """Return, for each step, the mean of the last `width` losses, or of all losses so far if there are fewer."""
    windows = (curve[max(0, end - width) : end] for end in range(1, len(curve) + 1))
    return [sum(window) / len(window) for window in windows]


def half_step(batch: Batch) -> dict[str, float]:
    """Return shares of the parameters after one step with all of Adam's state in FP16: "v is 0", "v is 0, m is not"
    and "weight is inf or NaN".
    """
    model = Transformer(PRESETS["debug"]).half()
    settings: dict[str, Any] = ADAMW | {"fused": False}
    optimizer = torch.optim.AdamW(decay_groups(model), LR, **settings)
    train_step(model, optimizer, *batch)
    states = [optimizer.state[parameter] for parameter in model.parameters()]
    first, second = (torch.cat([state[name].flatten() for state in states]) for name in ("exp_avg", "exp_avg_sq"))
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    masks = {"v is 0": second == 0, "v is 0, m is not": (second == 0) & (first != 0)}
    masks["weight is inf or NaN"] = ~weights.isfinite()
    return {name: each.float().mean().item() for name, each in masks.items()}


def trained(batches: list[Batch]) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a float32 model and its AdamW after a few steps."""
    model = Transformer(PRESETS["debug"])
    optimizer = adamw(model, LR)
    loss_curve(model, optimizer, train_step, batches[:WARM_UP])
    return model, optimizer


def unmoved_by_rate(batches: list[Batch], rates: list[float]) -> dict[float, list[float]]:
    """Return the share of weights that a step does not change, [BF16, FP16], by learning rate.

    The step is computed in float32, from a trained model whose weights have been rounded.
    """
    model, optimizer = trained(batches)
    shares: dict[float, list[float]] = {}
    for rate in rates:
        shares[rate] = []
        for dtype in (torch.bfloat16, torch.float16):
            later, later_optimizer = copy.deepcopy((model, optimizer))
            for parameter in later.parameters():
                parameter.data.copy_(parameter.detach().to(dtype))
            before = [parameter.detach().to(dtype) for parameter in later.parameters()]
            for group in later_optimizer.param_groups:
                group["lr"] = rate
            train_step(later, later_optimizer, *batches[WARM_UP])
            pairs = zip(before, later.parameters(), strict=True)
            unmoved = torch.cat([(old == new.detach().to(dtype)).flatten() for old, new in pairs])
            shares[rate].append(unmoved.float().mean().item())
    return shares


def underflow_by_batch(batches: list[Batch], tokens_of_batch: list[int]) -> dict[int, tuple[float, float]]:
    """Return the shares of the FP16 gradient that are 0, and subnormal, by the tokens that the loss is divided by."""
    model, _ = trained(batches)
    half, (inputs, targets), shares = copy.deepcopy(model).half(), batches[WARM_UP], {}
    nonzero = gradients_of(model, inputs, targets) != 0
    for tokens in tokens_of_batch:
        half.zero_grad()
        (cross_entropy(half(inputs), targets) * (targets.numel() / tokens)).backward()
        magnitudes = torch.cat([grad_of(parameter).flatten() for parameter in half.parameters()])[nonzero].abs()
        subnormal = (magnitudes > 0) & (magnitudes < torch.finfo(torch.float16).tiny)
        shares[tokens] = ((magnitudes == 0).float().mean().item(), subnormal.float().mean().item())
    return shares


def sixteen_bit_curves(batches: list[Batch]) -> dict[str, list[float]]:
    """Return the losses in 16 bits with and without masters and loss scale, by name.

    With FP16 and masters the gradients are as small as in a batch of 2^20 tokens: a loss scale of ALONE makes them so.
    """
    return {
        "FP16, masters": master_curve(torch.float16, batches, LossScaler(ALONE, interval=10**9)),
        "FP16, masters, loss scale": master_curve(torch.float16, batches, LossScaler(ALONE * 2.0**16, interval=20)),
        "all BF16": plain_curve(torch.bfloat16, batches),
        "BF16, masters": master_curve(torch.bfloat16, batches),
    }


def small_rate_curves(batches: list[Batch], rate: float = 3e-5, steps: int = 25) -> dict[str, list[float]]:
    """Return the losses on one batch over and over, from a trained model, at a small learning rate, by name."""
    start, _ = trained(batches)
    again, curves = [batches[WARM_UP]] * steps, {}
    for name, dtype in (("FP32", torch.float32), ("all BF16", torch.bfloat16)):
        model = copy.deepcopy(start).to(dtype)
        curves[name] = loss_curve(model, adamw(model, rate), train_step, again)
    model = copy.deepcopy(start).bfloat16()
    optimizer = MasterWeights(decay_groups(model), torch.optim.AdamW, lr=rate, **ADAMW)
    curves["BF16, masters"] = loss_curve(model, optimizer, functools.partial(mixed_step, None), again)
    return curves


class HalfNorm(nn.Module):
    """RMSNorm with squares and their mean in the dtype of x, as in naive code. x: [..., h]."""

    def __init__(self, norm: nn.RMSNorm):
        super().__init__()
        assert norm.eps is not None
        self.weight, self.eps = norm.weight, norm.eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x divided by the root of its mean square, times the weight."""
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + self.eps) * self.weight


def sums_curve(half_norms: bool, batches: list[Batch]) -> tuple[list[float], float]:
    """Return the losses in FP16 with masters and a loss scale, and S at the end. half_norms: norms sum in FP16."""
    model = Transformer(PRESETS["debug"]).half()
    for module in [model, *model.blocks] if half_norms else ():
        for name, child in list(module.named_children()):
            if isinstance(child, nn.RMSNorm):
                setattr(module, name, HalfNorm(child))
    optimizer, scaler = MasterWeights(decay_groups(model), torch.optim.AdamW, lr=LR, **ADAMW), LossScaler(2.0**12)
    curve = loss_curve(model, optimizer, functools.partial(mixed_step, scaler), batches)
    return curve, cast(torch.Tensor, scaler.factor).item()


def sum_in_turn(numbers: torch.Tensor) -> float:
    """Return the sum of some numbers, added one by one in their own dtype."""
    total = torch.zeros((), dtype=numbers.dtype)
    for number in numbers:
        total += number
    return total.item()


def torch_amp_curve(batches: list[Batch]) -> list[float]:
    """Return the losses with torch.autocast and torch.amp.GradScaler, as PyTorch's documentation has it."""
    model, scaler = Transformer(PRESETS["debug"]), torch.amp.GradScaler("cpu", 2.0**16, growth_interval=20)
    optimizer = adamw(model, LR)
    in_order = [parameter for group in optimizer.param_groups for parameter in group["params"]]  # of the norm

    def step(model: nn.Module, optimizer, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            step_loss = cross_entropy(model(inputs), targets)
        scaler.scale(step_loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(in_order, 1.0)
        scaler.step(optimizer)
        scaler.update()
        return step_loss.detach()

    return loss_curve(model, optimizer, step, batches)


def our_amp_curve(batches: list[Batch]) -> list[float]:
    """Return the losses with the same autocast and the course's LossScaler."""
    model, scaler = Transformer(PRESETS["debug"]), LossScaler(2.0**16, interval=20)
    optimizer = adamw(model, LR)
    step = functools.partial(mixed_step, scaler, dtype=torch.float16)
    return loss_curve(model, optimizer, step, batches)


def against_amp(batches: list[Batch]) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Return the losses and the ms per step of torch.amp and of ours, by name."""
    curves, taken = {}, {}
    for name, run in (("torch.amp", torch_amp_curve), ("ours", our_amp_curve)):
        start = time.perf_counter()
        curves[name] = run(batches)
        taken[name] = 1e3 * (time.perf_counter() - start) / len(batches)
    return curves, taken
