"""Data parallelism: each rank has the full model and its own shard of the batch; gradients are averaged every step.

The mean over N ranks of their gradients is the gradient of the mean loss over all their batches (of equal size), so N
ranks that start from the same weights take the same step as one process with the N-fold batch. The cost is an
all-reduce: with K bytes of gradients a rank sends 2 (N-1)/N K per step, however small its batch. Three ways to pay it:

    naive     one all-reduce per parameter, after backward          the network is idle, then the device is
    overlap   the same, each as soon as its gradient is ready       hidden behind backward; one latency per parameter
    bucket    gradients share flat buffers, one all-reduce each     hidden as well, in few large messages

In `DataParallel` they differ in two facts, `buckets.MODES`; the program runs naive and overlap with the functions of
`naive`. (Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB, §3.2.)
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from course_lib.data_parallel.buckets import MODES, Bucket, Reducer, default_bucket_mb
from course_lib.data_parallel.gradient_owner import LocalGradient, UpdatedTensor, module_gradients
from course_lib.data_parallel.same_model import broadcast_from_first, check_same_model
from course_lib.recompute.modes import IGNORED, accumulate, summed_loss


def check_arguments(module: nn.Module, mode: str, bucket_mb: float) -> None:
    """Raise ValueError for arguments that DataParallel cannot use."""
    if mode not in MODES:
        raise ValueError(f"mode {mode!r}: it is one of {', '.join(MODES)}")
    if not bucket_mb > 0:
        raise ValueError(f"bucket_mb {bucket_mb}: a bucket has a size above 0")
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if tensor.is_meta:
            raise ValueError(f"{name} is on the meta device: give it values before the model is wrapped")
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ValueError("the module has no parameter to train: nothing has a gradient to reduce")


class DataParallel(nn.Module):
    """Wraps `module`: `loss(dp(x)).backward(); dp.finish(); optimizer.step()` steps by the mean gradient over `group`.

    mode: see MODES; bucket_mb: MB (10**6 bytes) of gradients per bucket, see default_bucket_mb; reduce_dtype: see
    Bucket. All ranks start from the values of the group's first rank; parameters that are frozen then are never
    reduced. The `reduce_group` of a parameter's placement, if it has one, is the group whose ranks have the same values
    and the same gradient; the sum over it is still divided by the size of `group`. Between backward and finish()
    gradients are in flight: do not touch them.

    Raises ValueError, on all ranks, for invalid arguments, meta tensors, a module without trained parameters, and ranks
    that differ.
    """

    supports_no_sync = True

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup | None = None,
        mode: str = "bucket",
        bucket_mb: float | None = None,
        reduce_dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.module = module
        self.group = cast(dist.ProcessGroup, group or dist.group.WORLD)
        bucket_mb = default_bucket_mb(self.group.size()) if bucket_mb is None else bucket_mb
        check_same_model(module, self.group, {"mode": mode, "bucket_mb": bucket_mb, "reduce_dtype": reduce_dtype})
        check_arguments(module, mode, bucket_mb)
        broadcast_from_first(module, self.group)
        names = {parameter: name for name, parameter in module.named_parameters() if parameter.requires_grad}
        self.reducer = Reducer(names, self.group, mode, bucket_mb, reduce_dtype)
        self.synchronizes = True  # False inside no_sync()
        on_gradient = weakref.WeakMethod(self.on_gradient)  # the parameters' hooks must not keep this wrapper alive

        def hook(parameter: nn.Parameter) -> None:
            if (method := on_gradient()) is not None:
                method(parameter)

        handles = [parameter.register_post_accumulate_grad_hook(hook) for parameter in names]
        weakref.finalize(self, lambda: [handle.remove() for handle in handles])

    def on_gradient(self, parameter: nn.Parameter) -> None:
        """Take a gradient that is complete. Called by backward."""
        self.reducer.check_gradient(parameter)
        self.reducer.add(parameter, final=self.synchronizes)

    def forward(self, *args, **kwargs) -> Any:
        """Return the module's output. Raises RuntimeError if gradients of a training step wait for finish()."""
        if self.training and torch.is_grad_enabled() and self.reducer.unfinished:
            raise RuntimeError("forward after a backward without finish(): call finish() after a step's last backward")
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate this rank's gradients without reducing them: for all micro-batches but the last."""
        before, self.synchronizes = self.synchronizes, False
        try:
            yield
        finally:
            self.synchronizes = before

    def finish(self) -> None:
        """Wait for the gradients, after a step's last backward, on all ranks: each becomes the mean over the group.

        A rank without a batch calls it too, and takes part with zeros. A second call reduces everything once more, and
        leaves a mean unchanged. Raises RuntimeError inside no_sync().
        """
        if not self.synchronizes:
            raise RuntimeError("finish() inside no_sync(): call the step's last backward and finish() outside it")
        self.reducer.finish()

    def wait(self) -> None:
        """Return at once: every rank updates all parameters."""

    def all_gather_params(self) -> None:
        """Return at once: the optimizer updates the parameters themselves."""

    def updated_tensors(self) -> Iterator[UpdatedTensor]:
        """Yield the parameters."""
        for parameter in self.module.parameters():
            yield UpdatedTensor(parameter, [parameter])

    def local_gradients(self) -> list[LocalGradient]:
        """Return the gradients, after `finish()`."""
        return module_gradients(self.module)

    def full_weights(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Yield each parameter with itself."""
        for parameter in self.module.parameters():
            yield parameter, parameter.detach()

    def extra_memory(self) -> dict[str, list[torch.Tensor]]:
        """Return the flat buffers of the buckets."""
        return {"gradients": [bucket.flat for bucket in self.reducer.buckets if isinstance(bucket, Bucket)]}


# exercise 04.8
def parallel_accumulate(
    dp: DataParallel,
    micro_batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
    dtype: torch.dtype = torch.float32,
    loss_of: Callable[..., torch.Tensor] = summed_loss,
) -> torch.Tensor:
    """Run forward and backward of this rank's micro-batches, then `dp.finish()`: each gradient is the gradient of
    the mean loss over all target tokens of all micro-batches of all ranks.

    micro_batches: one or more of (inputs, targets), [b, s] each; dtype, loss_of: see `accumulate`. Gradients are
    sent once. Returns that loss, a float32 scalar, the same on all ranks; loss and gradients are 0 if no rank has a
    target.
    """
    micro_batches = list(micro_batches)
    tokens = torch.stack([(targets != IGNORED).sum() for _, targets in micro_batches]).sum().float()
    dist.all_reduce(tokens, group=dp.group)
    tokens = tokens.clamp(min=1) / dp.group.size()
    with dp.no_sync():
        total = accumulate(dp, micro_batches[:-1], dtype, tokens, loss_of)
    total = (total + accumulate(dp, micro_batches[-1:], dtype, tokens, loss_of)) / dp.group.size()
    dp.finish()
    dist.all_reduce(total, group=dp.group)
    return total


INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element


# exercise 04.10
def find_diverged_params(module: nn.Module, group: dist.ProcessGroup | None = None) -> list[str]:
    """Return the names of the parameters and buffers whose bits are not the same on all ranks of `group` (None: all).

    Returns the same list on all ranks. Sends at most 16 bytes per tensor: it compares a checksum, the bits of the
    elements as integers, weighted by their positions and summed modulo 2**64. No copy has more than 2**20 integers; the
    module does not change.
    """
    named, numbers = [*module.named_parameters(), *module.named_buffers()], []
    for _, tensor in named:
        number = torch.zeros((), dtype=torch.int64, device=tensor.device)
        for chunk in tensor.detach().contiguous().view(INTEGERS[tensor.element_size()]).flatten().split(2**20):
            positions = torch.arange(1, len(chunk) + 1, device=tensor.device)
            number = 31 * number + (chunk.long() * positions).sum()
        numbers.append(number)
    extremes = torch.stack(numbers + [-number for number in numbers])  # the largest, and minus the smallest
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    largest, smallest = extremes.chunk(2)
    return [name for (name, _), spread in zip(named, (largest + smallest).tolist(), strict=True) if spread != 0]


# exercise 04.11
def overlap_ratio(tokens: int, dp: int, bandwidth: float, peak: float, gradient_bytes: int = 2) -> float:
    """Return the time of the gradients' all-reduce divided by the time of the backward beside it; up to 1 it can be
    hidden.

    tokens: of one GPU's (last) micro-batch; bandwidth: bytes that a GPU sends per second (the bus bandwidth of
    notebook 03); peak: floating-point operations per second. The Ultra-Scale Playbook, appendix A3, corrected: the
    parameters cancel.
    """
    return gradient_bytes / (2 * tokens) * (dp - 1) / dp * peak / bandwidth
