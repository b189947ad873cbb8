"""Training in 16 bits: float32 master weights, a dynamic loss scale, sums in float32.

A 16-bit model is half as large, and a GPU multiplies its matrices 8 to 16 times as fast as float32's. Naive 16-bit
training loses in three places what is too small (Micikevicius et al. 2018, Mixed Precision Training, §3):

    weights    a step of less than half a unit in the last place changes nothing. Numbers from 1 to 2 lie 2^-7 apart
               in BF16, 2^-10 in FP16: 1 - 0.001 is 1 in BF16. So the optimizer keeps and updates float32 copies, and
               the model gets them rounded (`MasterWeights`).
    gradients  FP16 ends at 2^-24 = 6e-8, and most of a large model's gradients are not far from it. So the loss is
               multiplied by a scale S, all gradients grow by S, and are divided by S in float32 (`LossScaler`). BF16
               has float32's range and needs no scale.
    sums       a running sum of ones stops at 2,048 in FP16 and at 256 in BF16, where 1 is half a unit and ties go to
               even. Norms, softmax and the loss are summed in float32, and so are gradients of several micro-batches.

The order matters: gradients to float32, divided by S, clipped, step. Clipped before the division, the norm is S times
too large, and every step is cut down. Divided in FP16, the small ones are lost again.

S is as large as it may be: too large, and gradients are inf or nan. That step is skipped and S halved; after `interval`
good steps S doubles. Whether to skip is known on the device alone, so the host doesn't ask: the optimizer's kernel
reads `found_inf` and leaves weights, moments and step counter as they are. It costs nothing where the step is one
kernel.

Bytes a parameter with Adam: 2 weights + 2 gradients + 4 gradients in float32 + 4 master + 8 moments = 20, and 16 if
each float32 gradient lives no longer than its update. 16 is what float32 training takes: mixed precision saves time and
activations, no memory for states.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from course_lib.single_gpu.model import loss
from course_lib.single_gpu.placement import placement_of


class MasterWeights:
    """`optimizer_cls` on float32 copies of 16-bit `parameters`; a float32 parameter is its own master.

    parameters: parameters, or parameter groups, as for torch's optimizers.
    After backward: accumulate_into_master(), clip `master_parameters`, step(), zero_grad(). `param_groups` are the optimizer's.
    The state is the optimizer's and the masters. Raises ValueError for parameters that float32 doesn't hold.
    """

    def __init__(self, parameters: Iterable[nn.Parameter | dict], optimizer_cls: type[torch.optim.Optimizer], **kwargs):
        groups = list(parameters)
        if groups and not isinstance(groups[0], dict):
            groups = [{"params": groups}]
        groups = [group | {"params": [p for p in group["params"] if p.requires_grad]} for group in groups]
        self.weights = [weight for group in groups for weight in group["params"]]
        if wrong := {p.dtype for p in self.weights} - {torch.float16, torch.bfloat16, torch.float32}:
            raise ValueError(f"float32 master weights are for parameters of 16 bits, not {wrong.pop()}")
        self.master_parameters = [nn.Parameter(weight.detach().float()) for weight in self.weights]
        for weight, master in zip(self.weights, self.master_parameters, strict=True):
            master.__dict__.update(weight.__dict__)  # how the weight is sharded, and over whom its norm is summed
        masters = iter(self.master_parameters)
        groups = [group | {"params": [next(masters) for _ in group["params"]]} for group in groups]
        self.optimizer = optimizer_cls(groups, **kwargs)
        self.param_groups = self.optimizer.param_groups

    # exercise 14.3
    def accumulate_into_master(self) -> None:
        """Add the 16-bit gradients to the masters' and drop them. Called for each micro-batch, it sums in float32."""
        for weight, master in zip(self.weights, self.master_parameters, strict=True):
            if weight.grad is not None:
                grad, weight.grad = weight.grad.float(), None
                master.grad = grad if master.grad is None else master.grad + grad

    # exercise 14.3
    @torch.no_grad()
    def step(self) -> None:
        """Take the gradients, update the masters, round them to the weights: to nearest, ties to even."""
        self.accumulate_into_master()
        self.optimizer.step()
        torch._foreach_copy_(self.weights, self.master_parameters)

    def zero_grad(self) -> None:
        """Drop the gradients of the weights and of the masters."""
        for parameter in (*self.weights, *self.master_parameters):
            parameter.grad = None

    def state_dict(self) -> dict:
        """The optimizer's state, and the masters: rounded weights don't bring them back."""
        return {"optimizer": self.optimizer.state_dict(), "master": [m.detach() for m in self.master_parameters]}

    @torch.no_grad()
    def load_state_dict(self, state: dict) -> None:
        """Go on where `state` was taken, weights included. Raises ValueError where it belongs to other parameters."""
        if [m.shape for m in state["master"]] != [m.shape for m in self.master_parameters]:
            raise ValueError("the state's master weights have other shapes than these parameters")
        self.optimizer.load_state_dict(state["optimizer"])
        torch._foreach_copy_(self.master_parameters, state["master"])
        torch._foreach_copy_(self.weights, self.master_parameters)


def step_unless(found_inf: torch.Tensor, optimizer: torch.optim.Optimizer | MasterWeights) -> None:
    """optimizer.step(), which changes nothing where found_inf (a float32 scalar on the device) is 1: no weight, no
    moment, no step counter. The host doesn't learn which. The optimizer is one of torch, or has one as `.optimizer`.

    Raises ValueError where the optimizer can't: torch's Adam and AdamW can if they are fused.
    """
    inner = getattr(optimizer, "optimizer", optimizer)
    if not getattr(inner, "_step_supports_amp_scaling", False):
        raise ValueError(f"this {type(inner).__name__} can't skip a step on the device; fused=True makes one that can")
    if isinstance(inner, torch.optim.SGD) and any(group["momentum"] for group in inner.param_groups):
        raise ValueError("torch's fused SGD has uninitialized momentum after a skipped first step; take AdamW")
    device = next(parameter for group in inner.param_groups for parameter in group["params"]).device
    inner.found_inf = found_inf.to(device)  # the host if the states are offloaded
    try:
        optimizer.step()
    finally:
        del inner.found_inf


class LossScaler(nn.Module):
    """The loss scale S and its schedule: scale(loss).backward(), unscale, clip, step, update; Micikevicius et al. §3.2.

    S grows `growth` times after `interval` steps without inf and nan, and shrinks by `backoff` after one with. `group`:
    the ranks that skip a step together, all that share a model; None: this process alone. Its state is buffers on the
    device, so that to(), state_dict() and load_state_dict() are a module's. Raises ValueError for an impossible scale.

    On several ranks: DataParallel has the same gradients on all after finish(), and needs no group; fully_shard does;
    for a ZeroOptimizer, `zero.unscale_(scaler)` takes the place of unscale. ParallelModel trains in BF16, without one.
    """

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
        self.register_buffer("good_steps", torch.tensor(0, dtype=torch.int32))  # since S has changed
        self.register_buffer("found_inf", torch.tensor(0.0), persistent=False)  # 1: this step has an inf or nan

    def scale(self, step_loss: torch.Tensor) -> torch.Tensor:
        """The loss times S, in float32: what to call backward of."""
        return step_loss.float() * self.factor

    # exercise 14.4
    @torch.no_grad()
    def unscale(self, parameters: Iterable[torch.Tensor]) -> None:
        """Divide all gradients by S, once a step, BEFORE they are clipped, and look for inf and nan; all ranks of the
        group call it. parameters: in any iterable, model.parameters() too, which can be walked only once; those without
        a gradient are left out. Raises ValueError for float16 gradients: divided by S they would underflow again.
        """
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if any(gradient.dtype == torch.float16 for gradient in gradients):
            raise ValueError("a float16 gradient divided by the scale underflows; take it to float32 first")
        inverse = self.factor.double().reciprocal().float()
        for gradient in gradients:
            torch.maximum(self.found_inf, (~gradient.isfinite()).any().float(), out=self.found_inf)
            gradient.mul_(inverse)
        if self.group is not None:
            dist.all_reduce(self.found_inf, dist.ReduceOp.MAX, self.group)

    def step(self, optimizer: torch.optim.Optimizer | MasterWeights) -> None:
        """Step the optimizer, or skip: see `step_unless`. Raises ValueError, before the step, for sharded gradients
        without a group, and for gradients of a ZeroOptimizer that are not divided by S.
        """
        sharded = any(placement_of(p).flat_shard for group in optimizer.param_groups for p in group["params"])
        if sharded and self.group is None:
            raise ValueError("ranks with shards of one model skip a step together: LossScaler(group=...) says which")
        if not getattr(optimizer, "unscaled", True):
            raise ValueError("call zero.unscale_(scaler) first: a ZeroOptimizer's gradients are not in .grad")
        step_unless(self.found_inf, optimizer)

    # exercise 14.4
    @torch.no_grad()
    def update(self) -> None:
        """Set S for the next step: smaller after a skipped one, larger after `interval` good ones, but never inf.

        Counts the good steps, and sets `found_inf` to 0.
        """
        skipped, good_steps, factor = self.found_inf > 0, self.good_steps + 1, self.factor.double()
        due, grown = good_steps == self.interval, (factor * self.growth).float()
        kept = torch.where(due & grown.isfinite(), grown, self.factor)
        shrunk = (factor * self.backoff).float().clamp(min=2.0**-126)  # below it, 1 / S is inf
        self.factor.copy_(torch.where(skipped, shrunk, kept))
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
    """One step on inputs and targets, each [b, s], as `single_gpu.train_step`; returns the loss, a scalar.

    Either a 16-bit model with MasterWeights, or a float32 model with a fused optimizer and a 16-bit `dtype` (autocast).
    scaler: None for BF16, whose gradients don't underflow.
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
