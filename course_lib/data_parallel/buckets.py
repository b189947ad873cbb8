"""Buckets: gradients that share a flat buffer and one all-reduce, which starts as soon as all of them are ready.

Backward computes the last layers' gradients first, so buckets are filled from the last parameter to the first. The
last bucket cannot be hidden: no computation is left. Buckets take no extra memory: gradients are views of them.
(Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB, §3.2.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn

from course_lib.single_gpu.placement import placement_of

# By mode: whether buckets hold up to bucket_mb (else one parameter each), and whether they start during backward.
MODES = {"naive": (False, False), "overlap": (False, True), "bucket": (True, True)}


# exercise 04.5
def make_buckets(parameters: Iterable[nn.Parameter], bucket_bytes: float) -> list[list[nn.Parameter]]:
    """Return lists of the parameters whose gradients are reduced together.

    Buckets are filled from the last parameter to the first. A bucket holds at most `bucket_bytes`, and is full when the
    next parameter of its kind would exceed that; a parameter larger than `bucket_bytes` has a bucket to itself. Only
    parameters of one dtype, device and `reduce_group` share a bucket. The buckets are in the order in which backward
    completes them: by the parameter that each bucket took last.
    """
    position = {parameter: i for i, parameter in enumerate(reversed(list(parameters)))}
    buckets: list[list[nn.Parameter]] = []
    filling: dict[tuple, tuple[list[nn.Parameter], int]] = {}  # by kind: the bucket to fill next, and its bytes
    for parameter in position:
        kind = (parameter.dtype, parameter.device, placement_of(parameter).reduce_group)
        bucket, size = filling.get(kind, (None, 0))
        if bucket is None or size + parameter.nbytes > bucket_bytes:
            bucket, size = [], 0
            buckets.append(bucket)
        bucket.append(parameter)
        filling[kind] = bucket, size + parameter.nbytes
    return sorted(buckets, key=lambda bucket: position[bucket[-1]])


def default_bucket_mb(ranks: int) -> int:
    """Return the default MB of a bucket: 25, or 1 per rank if more, as a ring sends a bucket in one chunk per rank."""
    return max(25, ranks)


class Bucket:
    """Gradients that one all-reduce sums: views of a flat buffer [all their elements, then a flag for each parameter].

    The summed flag tells a rank without a gradient whether another rank had one. Gradients are multiplied by `scale`
    before the sum. reduce_dtype: the dtype of the scaling, the transfer and the sum, in a copy; the result is rounded
    back.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        group: dist.ProcessGroup | None,
        scale: float,
        reduce_dtype: torch.dtype | None = None,
    ):
        self.parameters, self.group = parameters, group
        first, numels = parameters[0], [parameter.numel() for parameter in parameters]
        self.flat = torch.zeros(sum(numels) + len(numels), dtype=first.dtype, device=first.device)
        *slices, self.flags = self.flat.split([*numels, len(numels)])
        strides = [torch.empty_like(parameter, device="meta").stride() for parameter in parameters]
        views = (each.as_strided(p.shape, s) for each, p, s in zip(slices, parameters, strides, strict=True))
        self.views = dict(zip(parameters, views, strict=True))
        self.reduce_dtype = reduce_dtype or first.dtype
        in_place = self.reduce_dtype == first.dtype  # gradients are scaled when they are stored, else in the copy
        self.scale, self.copy_scale = (scale, 1.0) if in_place else (1.0, scale)  # before the sum: FP16 may overflow
        self.missing = set(parameters)  # parameters that have no final gradient yet
        self.work: dist.Work | None = None
        self.sent: torch.Tensor | None = None

    def store(self, parameter: nn.Parameter, scale: float) -> None:
        """Move the gradient, times `scale`, to the buffer, and make `parameter.grad` a view of it."""
        view, gradient = self.views[parameter], parameter.grad
        assert gradient is not None
        if gradient is not view:  # fresh from backward: zero_grad() has dropped the view
            torch.mul(gradient, scale, out=view)
            parameter.grad = view
        elif scale != 1.0:  # backward has accumulated into the view
            view.mul_(scale)

    def outgoing(self) -> torch.Tensor:
        """Return the tensor to reduce: the buffer itself, or a scaled copy if `reduce_dtype` is another dtype."""
        if self.reduce_dtype == self.flat.dtype:
            return self.flat
        return self.flat.to(self.reduce_dtype).mul_(self.copy_scale)

    # exercise 04.6
    def launch(self) -> None:
        """Start the all-reduce of this bucket, and do not wait for it.

        Keep its work in `self.work`, and the tensor that is sent in `self.sent`. Each flag is 1, but 0 for a parameter
        in `self.missing` without a gradient, which takes part with zeros. If such a parameter has a gradient, from an
        earlier micro-batch, it takes part with that, stored with `self.scale`.
        """
        self.flags.fill_(1)
        for i, parameter in enumerate(self.parameters if self.missing else ()):
            if parameter in self.missing and parameter.grad is not None:
                self.store(parameter, self.scale)
            elif parameter in self.missing:
                self.views[parameter].zero_()
                self.flags[i] = 0
        self.sent = self.outgoing()
        self.work = dist.all_reduce(self.sent, group=self.group, async_op=True)

    def finish(self) -> None:
        """Wait for the all-reduce. A parameter that only other ranks used gets their mean; the `.grad` of a parameter
        that no rank used stays None. The host reads a flag only for parameters that this rank has not used.
        """
        assert self.work is not None and self.sent is not None, "finish() before launch()"
        self.work.wait()
        if self.sent is not self.flat:
            self.flat.copy_(self.sent)
        for i, parameter in enumerate(self.parameters if self.missing else ()):
            if parameter.grad is None and self.flags[i] > 0:
                parameter.grad = self.views[parameter]
        self.missing = set(self.parameters)
        self.work = self.sent = None


class GradientBucket(Protocol):
    """A bucket as `Reducer` uses it: a `Bucket`, or a bucket of ZeRO (notebook 05)."""

    parameters: list[nn.Parameter]
    missing: set[nn.Parameter]
    scale: float

    def store(self, parameter: nn.Parameter, scale: float) -> None:
        """Take a gradient that backward has computed."""

    def launch(self) -> None:
        """Start the collective."""

    def finish(self) -> None:
        """Wait for the collective."""


class Reducer:
    """The buckets of a model. They start in the same order on all ranks, each after its predecessors; the first
    `launched` of them have started.

    Otherwise ranks that use different parameters would start different all-reduces, and wait for each other forever.
    names: the name of each parameter to reduce; for the other arguments see DataParallel.
    """

    buckets: Sequence[GradientBucket]
    bucket_of: dict[nn.Parameter, GradientBucket]

    def __init__(
        self,
        names: dict[nn.Parameter, str],
        group: dist.ProcessGroup,
        mode: str,
        bucket_mb: float,
        reduce_dtype: torch.dtype | None,
    ):
        self.names, self.launched, (in_buckets, self.launches_early) = names, 0, MODES[mode]
        lists = make_buckets(names, bucket_mb * 1e6 if in_buckets else 0)
        groups = [placement_of(each[0]).reduce_group or group for each in lists]
        self.buckets = [Bucket(p, g, 1 / group.size(), reduce_dtype) for p, g in zip(lists, groups, strict=True)]
        self.bucket_of = {parameter: bucket for bucket in self.buckets for parameter in bucket.parameters}

    def check_gradient(self, parameter: nn.Parameter) -> None:
        """Raise an error for a gradient that `add` cannot take: a sparse one, or a second final one before finish()."""
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise ValueError(f"{self.names[parameter]} has a sparse gradient: use a layer with sparse=False")
        if parameter not in self.bucket_of[parameter].missing:
            raise RuntimeError(
                f"a second gradient for {self.names[parameter]} before finish(): run all but a step's last backward in "
                "no_sync(), and use a parameter in one reentrant checkpoint only"
            )

    # exercise 04.7
    def add(self, parameter: nn.Parameter, final: bool) -> None:
        """Store a gradient that backward has made; if it is the step's final one, launch the buckets that are ready.

        The final gradient is stored with `bucket.scale`, gradients of earlier micro-batches with 1. With the final one
        the parameter leaves `bucket.missing`, in every mode, and every bucket that is complete starts, but only after
        all buckets before it; `self.launched` counts them. If `self.launches_early` is False, none starts here.
        """
        bucket = self.bucket_of[parameter]
        bucket.store(parameter, bucket.scale if final else 1.0)
        if final:
            bucket.missing.remove(parameter)
            while self.launches_early and self.launched < len(self.buckets) and not self.buckets[self.launched].missing:
                self.buckets[self.launched].launch()
                self.launched += 1

    @property
    def unfinished(self) -> bool:
        """True if a final gradient has been added since the last finish()."""
        return any(len(bucket.missing) < len(bucket.parameters) for bucket in self.buckets)

    def finish(self) -> None:
        """Launch the remaining buckets, and wait for all of them."""
        for bucket in self.buckets[self.launched :]:
            bucket.launch()
        for bucket in self.buckets:
            bucket.finish()
        self.launched = 0
