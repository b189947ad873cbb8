"""The all-gather of ZeRO stage 3 in 8 bits: `fully_shard(model, encode=Fp8Gather())`.

An FP8 layer rounds its weight to 8 bits before it multiplies, so the weight may as well be rounded before it travels:
1 byte per element instead of bfloat16's 2, and the layer gets the values that it would have computed itself. Everything
else (norms, embedding, head) travels as before. A rank sends for one flat buffer:

    (N-1) x (n + b·o) bytes      n: elements of a rank's shard; b: bytes per element in the gathered dtype; o: the
                                 largest number of them on a rank that are not for FP8 layers (their codes are sent
                                 too, as zeros)

A scale belongs to a full matrix, or to a block of it. A rank's shard of the flat buffer ignores where rows and blocks
end. So each rank finds the largest |w| that its shard has of every block, and the ranks take the maximum over the
group: one all-reduce of 4 bytes per block, for all matrices at once, after each change of the weights. All ranks then
know all scales, and the codes travel without them. (torchao's `precompute_float8_dynamic_scale_for_fsdp` does so for
scales of full matrices; a call for each weight would cost a latency for each.)

Scales of the previous step would silently saturate values that have grown beyond them. A change of the weights is
detected in two ways: by an optimizer's hook, and by PyTorch's count of a tensor's changes (`_version`), for loading and
the like. The count alone is not enough: the fused optimizers of `torch.optim` do not raise it.

The layer gets the values in the gathered dtype, and the scale, and rounds again, which does not change values that have
8 bits already. This holds for any scale, in float32 and bfloat16: their rounding error is far below half a unit of 8
bits. (It does not hold in float16: the smallest codes times a scale are below its range.) If the matmul of backward
needs other blocks than the forward matmul (ROW, TILE), it rounds rounded values, which changes results slightly; TENSOR
and SQUARE serve both.
"""

from __future__ import annotations

import copy
import weakref

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook

from course_lib.fp8.delayed_scaling import DelayedQuantizer, max_over_ranks
from course_lib.fp8.linear import LayerQuantizers
from course_lib.fp8.quantization import Quantized, block_amax, blocks_of, dequantize, quantize
from course_lib.fp8.quantizers import Quantizer
from course_lib.zero.parameters import Slot
from course_lib.zero.sharded_parameters import Encoding, ShardedParameters


def weight_quantizer(slots: list[Slot]) -> Quantizer | None:
    """Return the quantizer of the parameter in these slots (full name, module, local name), or None."""
    for _, module, name in slots:
        if name == "weight" and isinstance(quantizers := getattr(module, "quantizers", None), LayerQuantizers):
            return quantizers.weight
    return None


def gathered_scale(quantizer: Quantizer) -> torch.Tensor:
    """Return the scale of the full weight, which `Fp8Gather.refresh` has computed."""
    assert quantizer.gathered_scale is not None
    return quantizer.gathered_scale


def padded_rows(shard: torch.Tensor, first: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a shard of a matrix, its elements from `first` on, as rows [rows, columns], and the rows' indices. Zeros
    pad the first and the last row, where the shard begins and ends within them.
    """
    start, end = first % columns, -(first + len(shard)) % columns
    rows = F.pad(shard, (start, end)).view(-1, columns)
    return rows, torch.arange(len(rows), device=shard.device) + first // columns


def shard_amax(shard: torch.Tensor, first: int, shape: torch.Size, block: tuple[int, int]) -> torch.Tensor:
    """Return the largest finite |x| of each block of a matrix within a shard: [blocks of rows, blocks of columns],
    float32; 0 for blocks that the shard does not touch.
    """
    down, across, rows_of_block, _ = blocks_of(shape, block)
    amax = torch.zeros(down, across, device=shard.device)
    if len(shard):
        rows, row_index = padded_rows(shard, first, shape[1])
        by_row = block_amax(rows, (1, block[1]))  # [rows, blocks of columns]
        block_index = (row_index // rows_of_block)[:, None].expand_as(by_row)
        amax.scatter_reduce_(0, block_index, by_row, "amax")
    return amax


def shard_codes(shard: torch.Tensor, first: int, shape: torch.Size, quantizer: Quantizer) -> torch.Tensor:
    """Return a shard of a matrix in 8 bits, by the scales of the full matrix."""
    dtype, block = quantizer.cast.dtype, quantizer.cast.block
    rows, row_index = padded_rows(shard, first, shape[1])
    scale = gathered_scale(quantizer)[row_index // blocks_of(shape, block)[2]]  # [rows, blocks of columns]
    values = quantize(rows, dtype, (1, block[1]), scale=scale).values
    start = first % shape[1]
    return values.flatten()[start : start + len(shard)]


class Fp8Payload:
    """The bytes that travel for the parameters of one flat buffer, some of which are weights in 8 bits.

    quantizers: of the weights in 8 bits, by index. A payload has the other parameters' elements in the gathered
    dtype, padded to the largest number of them on any rank, then a code for each element of the shard.
    """

    def __init__(self, params: ShardedParameters, quantizers: dict[int, Quantizer], gather: Fp8Gather):
        self.params, self.quantizers, self.gather = params, quantizers, gather
        self.layout_of_rank = [copy.copy(params.layout) for _ in range(params.layout.world_size)]
        for rank, layout in enumerate(self.layout_of_rank):
            layout.rank = rank
        others = [i for i in range(len(params.layout.shapes)) if i not in quantizers]
        spans = [[layout.span(i) for i in others] for layout in self.layout_of_rank]
        self.max_others = max(sum(last - first for first, last in each) for each in spans)

    @property
    def header(self) -> int:
        """Return the number of bytes before the codes."""
        return self.max_others * self.params.buffer.values.itemsize

    def local_amaxes(self) -> dict[Quantizer, torch.Tensor]:
        """Return the amax of each weight's blocks within this rank's shard."""
        layout = self.params.layout
        shards = layout.local_views(self.params.shard)
        return {
            quantizer: shard_amax(shards[i], layout.span(i)[0], layout.shapes[i], quantizer.cast.block)
            for i, quantizer in self.quantizers.items()
        }

    def encode(self, shard: torch.Tensor) -> torch.Tensor:
        """Return the payload of this rank's shard, in bytes. Collective if the weights have changed."""
        self.gather.refresh()
        layout, values = self.params.layout, self.params.buffer.values
        length = self.header + len(shard)
        payload = shard.new_zeros(length + -length % values.itemsize, dtype=torch.uint8)
        shards, codes = layout.local_views(shard), layout.local_views(payload[self.header : length])
        for i, quantizer in self.quantizers.items():
            if len(shards[i]):
                local_codes = shard_codes(shards[i], layout.span(i)[0], layout.shapes[i], quantizer)
                codes[i].copy_(local_codes.view(torch.uint8))
        others = torch.cat([shard[:0], *(each for i, each in enumerate(shards) if i not in self.quantizers)])
        payload[: self.header].view(values.dtype)[: len(others)].copy_(others)
        return payload

    def decode(self, payloads: torch.Tensor, out: torch.Tensor) -> None:
        """Write the values [ranks, elements of a shard] of all ranks' payloads [ranks, bytes] to out."""
        codes = payloads[:, self.header : self.header + out.shape[1]].reshape(-1)
        full = self.params.layout.views(out.view(-1))
        for i, quantizer in self.quantizers.items():
            values = self.params.layout.views(codes.view(quantizer.cast.dtype))[i]
            full[i].copy_(dequantize(Quantized(values, gathered_scale(quantizer), quantizer.cast.block), out.dtype))
        for layout, payload, row in zip(self.layout_of_rank, payloads, out, strict=True):
            shards = [shard for i, shard in enumerate(layout.local_views(row)) if i not in self.quantizers]
            sizes = [len(shard) for shard in shards]
            others = payload[: self.header].view(out.dtype)[: sum(sizes)].split(sizes)
            for shard, values in zip(shards, others, strict=True):
                shard.copy_(values)


class Fp8Gather:
    """Gathers the weights of FP8 layers in 8 bits: `fully_shard(apply_fp8(model, recipe), encode=Fp8Gather())`.

    Use one for each model. `fully_shard` calls it with the parameters of each flat buffer.
    """

    def __init__(self) -> None:
        self.payloads: list[Fp8Payload] = []
        self.scaled_version: list[int] | None = None  # `versions()` when scales were computed; None: they are stale
        weak = weakref.ref(self)

        def after_step(optimizer: torch.optim.Optimizer, *_) -> None:
            gather = weak()
            if gather is not None:
                gather.after_step(optimizer)

        weakref.finalize(self, register_optimizer_step_post_hook(after_step).remove)

    def __call__(self, params: ShardedParameters) -> Encoding | None:
        """Return the encoding of a flat buffer, or None if it holds no weight of an FP8 layer. Raises ValueError for a
        weight that is not stored row by row.
        """
        by_index = {i: weight_quantizer(slots) for i, slots in enumerate(params.slots)}
        quantizers = {i: quantizer for i, quantizer in by_index.items() if quantizer is not None}
        if not quantizers or params.shard.itemsize == 1:
            return None
        if by_column := [params.slots[i][0][0] for i in quantizers if params.layout.strides[i][1] != 1]:
            raise ValueError(f"{by_column[0]} does not lie in memory row by row")
        self.payloads.append(Fp8Payload(params, quantizers, self))
        self.scaled_version = None
        return Encoding(self.payloads[-1].encode, self.payloads[-1].decode)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Mark the scales as stale if the optimizer has parameters of this model."""
        shards = {shard for payload in self.payloads for shard in payload.params.sharded_params}
        if not shards.isdisjoint(p for group in optimizer.param_groups for p in group["params"]):
            self.scaled_version = None

    def versions(self) -> list[int]:
        """Return PyTorch's counts of changes of the shards and of the histories of delayed scales, and whether amaxes
        are recorded, as in training.
        """
        quantizers = [quantizer for payload in self.payloads for quantizer in payload.quantizers.values()]
        delayed = [quantizer for quantizer in quantizers if isinstance(quantizer, DelayedQuantizer)]
        tensors = [payload.params.shard for payload in self.payloads] + [quantizer.history for quantizer in delayed]
        return [*(tensor._version for tensor in tensors), *(quantizer.training for quantizer in delayed)]

    @torch.no_grad()
    def refresh(self) -> None:
        """Set the scales of all weights, if the weights may have changed. Then it is collective over each group that a
        weight is split over: one all-reduce for all weights.
        """
        versions = self.versions()
        if versions == self.scaled_version:
            return
        amaxes: dict[Quantizer, torch.Tensor] = {}
        by_group: dict[dist.ProcessGroup, list[torch.Tensor]] = {}
        for payload in self.payloads:
            amaxes |= payload.local_amaxes()
            for quantizer in payload.quantizers.values():
                for group in (payload.params.layout.group, *quantizer.groups()):
                    by_group.setdefault(group, []).append(amaxes[quantizer])
        for group, tensors in by_group.items():
            max_over_ranks(tensors, group)
        for quantizer, amax in amaxes.items():
            quantizer.gathered_scale = quantizer.next_scale(amax)
        self.scaled_version = versions
