"""Training in 16 bits: float32 master weights, a dynamic loss scale, sums in float32.

A 16-bit model is half as large, and a GPU multiplies its matrices 8 to 16 times as fast as in float32. Naive 16-bit
training loses small numbers in three places (Micikevicius et al. 2018, Mixed Precision Training, §3):

    weights    an update of less than half a unit in the last place changes nothing. Numbers from 1 to 2 are 2^-7 apart
               in BF16, 2^-10 in FP16: 1 - 0.001 is 1 in BF16. The optimizer therefore keeps and updates float32
               copies, and the model gets them rounded (`MasterWeights`).
    gradients  FP16 ends at 2^-24 = 6e-8, and most of a large model's gradients are close to it. The loss is therefore
               multiplied by a scale S, which scales all gradients, and they are divided by S in float32
               (`LossScaler`). BF16 has float32's range and needs no scale.
    sums       a running sum of ones stops at 2,048 in FP16 and at 256 in BF16, where 1 is half a unit and ties go to
               even. Norms, softmax and the loss are summed in float32, and so are gradients of several micro-batches.

The order matters: gradients to float32, divided by S, clipped, step. Clipped before the division, the norm is S times
too large, and every step is cut down. Divided in FP16, the small ones are lost again.

S should be as large as possible: if it is too large, gradients are inf or nan. Then the step is skipped and S halved;
after `interval` good steps S doubles. Only the device knows if a step must be skipped, and the host does not wait for
it: the optimizer's kernel reads `found_inf` and leaves weights, moments and step counter unchanged. It costs nothing if
the step is one kernel.

Bytes per parameter with Adam: 2 weights + 2 gradients + 4 gradients in float32 + 4 master + 8 moments = 20, and 16 if
each float32 gradient is freed after its update. float32 training takes 16 as well: mixed precision saves time and
activation memory, but no memory for states.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from course_lib.single_gpu.model import loss
from course_lib.single_gpu.placement import placement_of


class MasterWeights:
    """An `optimizer_cls` on float32 copies of 16-bit `parameters`; a float32 parameter is its own master.

    parameters: parameters or parameter groups, as for torch's optimizers.
    After backward: accumulate_into_master(), clip `master_parameters`, step(), zero_grad(). `param_groups` are the
    optimizer's. The state is the optimizer's and the masters. Raises ValueError for parameters of other dtypes.
    """

    def __init__(self, parameters: Iterable[nn.Parameter | dict], optimizer_cls: type[torch.optim.Optimizer], **kwargs):
        given = list(parameters)
        plain = bool(given) and not isinstance(given[0], dict)  # parameters, not groups
        groups = cast("list[dict[str, Any]]", [{"params": given}] if plain else given)
        groups = [group | {"params": [p for p in group["params"] if p.requires_grad]} for group in groups]
        self.weights: list[torch.Tensor] = [weight for group in groups for weight in group["params"]]
        if wrong := {p.dtype for p in self.weights} - {torch.float16, torch.bfloat16, torch.float32}:
            raise ValueError(f"float32 master weights are for parameters of 16 bits, not {wrong.pop()}")
        self.master_parameters: list[torch.Tensor] = [nn.Parameter(weight.detach().float()) for weight in self.weights]
        for weight, master in zip(self.weights, self.master_parameters, strict=True):
            master.__dict__.update(weight.__dict__)  # the weight's placement
        masters = iter(self.master_parameters)
        groups = [group | {"params": [next(masters) for _ in group["params"]]} for group in groups]
        self.optimizer = optimizer_cls(groups, **kwargs)
        self.param_groups = self.optimizer.param_groups

    # exercise 14.3
    def accumulate_into_master(self) -> None:
        """Add the 16-bit gradients to the masters' float32 gradients, and drop them. Call it after each micro-batch."""
        for weight, master in zip(self.weights, self.master_parameters, strict=True):
            if weight.grad is not None:
                grad, weight.grad = weight.grad.float(), None
                master.grad = grad if master.grad is None else master.grad + grad

    # exercise 14.3
    @torch.no_grad()
    def step(self) -> None:
        """Accumulate the gradients, update the masters, and round them into the weights: to nearest, ties to even."""
        self.accumulate_into_master()
        self.optimizer.step()
        torch._foreach_copy_(self.weights, self.master_parameters)

    def zero_grad(self) -> None:
        """Drop the gradients of the weights and of the masters."""
        for parameter in (*self.weights, *self.master_parameters):
            parameter.grad = None

    def state_dict(self) -> dict:
        """Return the optimizer's state and the masters, which cannot be recovered from the rounded weights."""
        return {"optimizer": self.optimizer.state_dict(), "master": [m.detach() for m in self.master_parameters]}

    @torch.no_grad()
    def load_state_dict(self, state: dict) -> None:
        """Restore a state_dict, and with it the weights. Raises ValueError if it belongs to other parameters."""
        if [m.shape for m in state["master"]] != [m.shape for m in self.master_parameters]:
            raise ValueError("the state's master weights have other shapes than these parameters")
        self.optimizer.load_state_dict(state["optimizer"])
        torch._foreach_copy_(self.master_parameters, state["master"])
        torch._foreach_copy_(self.weights, self.master_parameters)


def step_unless(found_inf: torch.Tensor, optimizer: torch.optim.Optimizer | MasterWeights) -> None:
    """Call optimizer.step(), which changes no weight, moment or step counter if found_inf (a float32 scalar on the
    device) is 1. The host does not wait for its value. The optimizer is one of torch, or has one as `.optimizer`.

    Raises ValueError if the optimizer does not support it: torch's Adam and AdamW do if they are fused.
    """
    inner: Any = getattr(optimizer, "optimizer", optimizer)
    if not getattr(inner, "_step_supports_amp_scaling", False):
        raise ValueError(f"this {type(inner).__name__} cannot skip a step on the device; use fused=True")
    if isinstance(inner, torch.optim.SGD) and any(group["momentum"] for group in inner.param_groups):
        raise ValueError("torch's fused SGD has uninitialized momentum after a skipped first step; use AdamW")
    device = next(parameter for group in inner.param_groups for parameter in group["params"]).device
    inner.found_inf = found_inf.to(device)  # the CPU if the states are offloaded
    try:
        optimizer.step()
    finally:
        del inner.found_inf


class LossScaler(nn.Module):
    """The loss scale S and its schedule: scale(loss).backward(), unscale, clip, step, update; Micikevicius et al. §3.2.

    S is multiplied by `growth` after `interval` steps without inf and nan, and by `backoff` after a step with them.
    group: the ranks that skip a step together, all ranks of a model; None: this process alone. The state is buffers on
    the device, so that to(), state_dict() and load_state_dict() work as a module's. Raises ValueError for invalid
    settings.

    On several ranks: DataParallel has the same gradients on all ranks after finish(), and needs no group; fully_shard
    needs one; for a ZeroOptimizer, `zero.unscale_(scaler)` replaces unscale. ParallelModel trains in BF16, without one.
    """

    factor: torch.Tensor
    good_steps: torch.Tensor
    found_inf: torch.Tensor

    def __init__(
        self,
        initial: float = 2.0**16,
        growth: float = 2.0,
        backoff: float = 0.5,
        interval: int = 2000,
        group: dist.ProcessGroup | None = None,
    ):
        super().__init__()
        if not (initial > 0 and growth > 1 > backoff > 0 and interval >= 1):
            raise ValueError(f"scale {initial}, {growth} times it after {interval} steps, {backoff} times it after inf")
        self.growth, self.backoff, self.interval, self.group = growth, backoff, interval, group
        self.register_buffer("factor", torch.tensor(float(initial), dtype=torch.float32))  # S
        self.register_buffer("good_steps", torch.tensor(0, dtype=torch.int32))  # since the last change of S
        self.register_buffer("found_inf", torch.tensor(0.0), persistent=False)  # 1 if this step has an inf or nan

    def scale(self, step_loss: torch.Tensor) -> torch.Tensor:
        """Return the loss times S, in float32, to call backward on."""
        return step_loss.float() * self.factor

    # exercise 14.4
    @torch.no_grad()
    def unscale(self, parameters: Iterable[torch.Tensor]) -> None:
        """Divide all gradients by S, once per step, BEFORE they are clipped, and look for inf and nan; all ranks of the
        group call it. parameters: any iterable, such as model.parameters(), which can be iterated only once; those
        without a gradient are skipped. Raises ValueError for float16 gradients: divided by S they would underflow.
        """
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if any(gradient.dtype == torch.float16 for gradient in gradients):
            raise ValueError("a float16 gradient divided by the scale underflows; convert it to float32 first")
        inverse = self.factor.double().reciprocal().float()
        for gradient in gradients:
            torch.maximum(self.found_inf, (~gradient.isfinite()).any().float(), out=self.found_inf)
            gradient.mul_(inverse)
        if self.group is not None:
            dist.all_reduce(self.found_inf, dist.ReduceOp.MAX, self.group)

    def step(self, optimizer: torch.optim.Optimizer | MasterWeights) -> None:
        """Step the optimizer, or skip the step: see `step_unless`. Raises ValueError, before the step, for sharded
        gradients without a group, and for gradients of a ZeroOptimizer that have not been divided by S.
        """
        sharded = any(placement_of(p).flat_shard for group in optimizer.param_groups for p in group["params"])
        if sharded and self.group is None:
            raise ValueError("ranks with shards of one model skip a step together: pass them as LossScaler(group=...)")
        if not getattr(optimizer, "unscaled", True):
            raise ValueError("call zero.unscale_(scaler) first: a ZeroOptimizer's gradients are not in .grad")
        step_unless(self.found_inf, optimizer)

    # exercise 14.4
    @torch.no_grad()
    def update(self) -> None:
        """Set S for the next step: smaller after a skipped step, larger after `interval` good steps, but never inf.

        Counts the good steps, and resets `found_inf` to 0.
        """
        skipped, good_steps, factor = self.found_inf > 0, self.good_steps + 1, self.factor.double()
        due, grown = good_steps == self.interval, (factor * self.growth).float()
        unskipped = torch.where(due & grown.isfinite(), grown, self.factor)
        shrunk = (factor * self.backoff).float().clamp(min=2.0**-126)  # below it, 1 / S is inf
        self.factor.copy_(torch.where(skipped, shrunk, unskipped))
        self.good_steps.copy_(torch.where(skipped | due, 0, good_steps))
        self.found_inf.zero_()


def mixed_step(
    scaler: LossScaler | None,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | MasterWeights,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    dtype: torch.dtype = torch.float32,
    max_norm: float = 1.0,
) -> torch.Tensor:
    """Train one step on inputs and targets, each [b, s], as `single_gpu.train_step` does; return the loss, a scalar.

    Either a 16-bit model with MasterWeights, or a float32 model with a fused optimizer and a 16-bit `dtype` (autocast).
    scaler: None for BF16, whose gradients do not underflow.
    """
    optimizer.zero_grad()
    with torch.autocast(inputs.device.type, dtype, enabled=dtype != torch.float32):
        step_loss = loss(model(inputs), targets)
    (step_loss if scaler is None else scaler.scale(step_loss)).backward()
    if isinstance(optimizer, MasterWeights):
        optimizer.accumulate_into_master()
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if scaler is None:
        nn.utils.clip_grad_norm_(parameters, max_norm)
        optimizer.step()
    else:
        scaler.unscale(parameters)
        nn.utils.clip_grad_norm_(parameters, max_norm)
        scaler.step(optimizer)
        scaler.update()
    return step_loss.detach()
