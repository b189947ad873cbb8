"""Delayed scaling: the scale of a matrix comes from the amaxes of the last steps (NVIDIA's Transformer Engine,
DelayedScaling).

With current scaling all of a matrix is read before its first element is rounded. With a scale that is known before, the
matrix is read once: quantized, and its amax recorded for the steps to come. `update_scales` ends a step.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from course_lib.fp8.casts import needs_operator, quantize_delayed
from course_lib.fp8.operands import Cast, Split, amax_of, has_kernels, with_transposed
from course_lib.fp8.quantization import TENSOR, Quantized
from course_lib.fp8.quantizers import Quantizer


class DelayedQuantizer(Quantizer):
    """Quantizes by the largest amax of the last `cast.history` steps: the scale is known before the matrix is read.

    amax [1]: the largest since the last `update`, evaluation excluded; history [steps]: those before it. While the
    history is empty, a matrix has its own scale. Raises ValueError for blocks.
    """

    amax: torch.Tensor
    history: torch.Tensor

    def __init__(self, cast: Cast, splits: tuple[Split, ...] = (), columnwise: bool = False):
        if cast.block != TENSOR:
            raise ValueError(f"delayed scaling works per tensor, not with blocks of {cast.block}")
        super().__init__(cast, splits, columnwise)
        self.updated = False  # until then the history may be empty, and the ranks must agree about the matrix itself
        self.history_known = False  # the host knows that the history has an amax above 0
        self.steps_until_check = 0  # until `update_scales` looks at the history again
        self.history_scale: tuple[torch.Tensor, int, torch.Tensor] | None = None  # history, its version, its scale
        self.register_buffer("amax", torch.zeros(1))
        self.register_buffer("history", torch.zeros(cast.history))

    def _load_from_state_dict(self, *args) -> None:
        """Load as nn.Module does; of a loaded history nothing is known."""
        super()._load_from_state_dict(*args)
        self.history_known, self.steps_until_check = False, 0

    def groups(self, transposed: bool = False) -> tuple[dist.ProcessGroup, ...]:
        return () if self.updated else super().groups(transposed)  # afterwards `update_scales` reduces over them

    def quantize_unscaled(self, x: torch.Tensor, columnwise: bool) -> Quantized:
        if not (self.history_known and has_kernels(x, self.cast.block)):
            return self.cast_by(self.next_scale(amax_of(x, self.groups())), x, columnwise)
        scale = self.scale_of_history(x)
        if not self.training:
            return self.cast_by(scale, x, columnwise)
        quantized, transpose, amax = quantize_delayed(x, scale, self.cast.dtype, columnwise)
        torch.maximum(self.amax, amax.view(1), out=self.amax)
        return quantized if transpose is None else with_transposed(quantized, transpose)

    def scale_of_history(self, x: torch.Tensor) -> torch.Tensor:
        """Return the scale of the recorded amaxes; x's own is not needed. Computed once per step, unless the operations
        on x are recorded.
        """
        capturing = x.is_cuda and torch.cuda.is_current_stream_capturing()  # a CUDA graph
        once = not (capturing or needs_operator(x.detach()) or torch.is_inference_mode_enabled())
        if once and self.history_scale is not None:
            history, version, scale = self.history_scale
            if history is self.history and version == history._version:
                return scale
        scale = self.next_scale(self.history.new_zeros(1, 1))
        self.history_scale = (self.history, self.history._version, scale) if once else None
        return scale

    # exercise 14.7
    def next_scale(self, amax: torch.Tensor) -> torch.Tensor:
        """Return the scale [1, 1] for a matrix whose largest magnitude is amax [1, 1]: the scale of the largest amax of
        the history, or of this one while the history is empty.

        In training, `self.amax` becomes the largest since the last `update`. Reads no value on the host; a second call
        with the same amax, as in recomputation, changes nothing.
        """
        if self.training:
            self.amax.copy_(torch.maximum(self.amax, amax.view(1)))  # a second time, in recomputation, changes nothing
        known = self.history.max()
        return super().next_scale(torch.where(known > 0, known, amax))

    # exercise 14.7
    @torch.no_grad()
    def update(self) -> None:
        """End a step: its amax, by now the maximum over all ranks, joins the history, and the oldest leaves.

        Afterwards `self.amax` is 0, and `self.updated` True. Reads no value on the host.
        """
        self.history.copy_(torch.cat([self.amax, self.history[:-1]]))
        self.amax.zero_()
        self.updated = True


def max_over_ranks(tensors: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Replace each element of the tensors by its maximum over the ranks, with one all-reduce."""
    joined = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(joined, dist.ReduceOp.MAX, group)
    for tensor, largest in zip(tensors, joined.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(largest.view_as(tensor))


def update_scales(model: nn.Module) -> None:
    """End a step for all delayed scales. Collective: one all-reduce over each group that matrices are split over, for
    all of them. In some steps the host waits for a GPU (`check_histories`).
    """
    delayed = [module for module in model.modules() if isinstance(module, DelayedQuantizer)]
    by_group: dict[dist.ProcessGroup, list[torch.Tensor]] = {}
    for quantizer in delayed:
        for split in quantizer.splits:
            by_group.setdefault(split.group, []).append(quantizer.amax)
    for group, amaxes in by_group.items():
        max_over_ranks(amaxes, group)
    check_histories([quantizer for quantizer in delayed if quantizer.amax.is_cuda])
    for quantizer in delayed:
        quantizer.update()
        quantizer.history_scale = None


def check_histories(quantizers: list[DelayedQuantizer]) -> None:
    """Set `history_known` for quantizers whose history is about to get an amax above 0, which stays in it for `history`
    steps. The host waits for the device once in `history` - 1 steps.
    """
    for quantizer in quantizers:
        quantizer.steps_until_check -= 1
    due = [quantizer for quantizer in quantizers if quantizer.steps_until_check < 0 and quantizer.cast.history > 1]
    newest_amaxes = torch.cat([quantizer.amax for quantizer in due]).tolist() if due else []
    for quantizer, newest in zip(due, newest_amaxes, strict=True):
        quantizer.history_known, quantizer.steps_until_check = newest > 0, quantizer.cast.history - 2
