"""The all-gather of ZeRO stage 3 in 8 bits: `fully_shard(model, encode=Fp8Gather())`.

An FP8 layer rounds its weight to 8 bits before it multiplies. So the weight may as well be rounded before it travels:
1 byte a number in place of bfloat16's 2, and the layer gets the numbers that it would have made itself. Everything else
(norms, embedding, head) travels as before. What a rank sends for one flat buffer:

    (N-1) x (n + b·o) bytes      n: numbers of a rank's piece; b: bytes of one in the gathered dtype; o: how many of
                                 them, at most on a rank, are not for FP8 layers (their codes are sent too, as zeros)

A scale is that of a whole matrix, or of a block of it. A rank has a piece of the flat buffer, which takes no notice of
where rows and blocks end. So the ranks find the largest |w| of their pieces of all blocks and take the maximum over the
group: one all-reduce of 4 bytes a block, for all matrices together, after each change of the weights. All ranks know
all scales then, and the codes travel without them. (torchao's `precompute_float8_dynamic_scale_for_fsdp` does so for
scales of whole matrices; a call for each weight would be a latency for each.)

Scales of the step before would cut off, silently, what has grown beyond them. That the weights have changed is seen in
two ways: an optimizer's hook, and PyTorch's count of changes of a tensor (`_version`), for loading and the like. The
count alone is not enough: the fused optimizers of `torch.optim` don't raise it.

The layer gets the numbers in the gathered dtype, and the scale, and rounds again: what has 8 bits already stays as it
is. That holds for any scale, in float32 and bfloat16: their rounding error is far below half a unit of 8 bits. (With
float16 it doesn't: the smallest codes times a scale are below its range.) Where the product of backward needs other
blocks than that of forward (ROW, TILE), it rounds what has been rounded before, which changes results slightly; TENSOR
and SQUARE serve both.
"""

from __future__ import annotations

import copy
import weakref

import torch
import torch.nn.functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook

from course_lib.fp8.delayed_scaling import DelayedQuantizer, max_over_ranks
from course_lib.fp8.quantization import Quantized, block_amax, blocks_of, dequantize, quantize
from course_lib.fp8.quantizers import Quantizer
from course_lib.zero.sharded_parameters import Encoding, ShardedParameters


def weight_quantizer(places: list[tuple]) -> Quantizer | None:
    """Who quantizes the parameter at these places (full name, module, name there); None: nobody does."""
    for _, module, name in places:
        if name == "weight" and hasattr(module, "quantizers"):
            return module.quantizers.weight
    return None


def whole_rows(piece: torch.Tensor, first: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Elements of a matrix with so many columns, from number `first` on, as rows [rows, columns] with zeros where the
    piece begins and ends within one; and the rows' numbers.
    """
    start, end = first % columns, -(first + len(piece)) % columns
    rows = F.pad(piece, (start, end)).view(-1, columns)
    return rows, torch.arange(len(rows), device=piece.device) + first // columns


def span_amax(piece: torch.Tensor, first: int, shape: torch.Size, block: tuple[int, int]) -> torch.Tensor:
    """The largest finite |x| that a piece has of each block of a matrix: [blocks of rows, blocks of columns], float32;
    0 where the piece has nothing of a block.
    """
    down, across, rows_of_block, _ = blocks_of(shape, block)
    amax = torch.zeros(down, across, device=piece.device)
    if len(piece):
        rows, numbers = whole_rows(piece, first, shape[1])
        by_row = block_amax(rows, (1, block[1]))  # [rows, blocks of columns]
        places = (numbers // rows_of_block)[:, None].expand_as(by_row)
        amax.scatter_reduce_(0, places, by_row, "amax")
    return amax


def span_codes(piece: torch.Tensor, first: int, shape: torch.Size, quantizer: Quantizer) -> torch.Tensor:
    """A piece of a matrix in 8 bits, by the scales that the quantizer has been given."""
    dtype, block = quantizer.cast.dtype, quantizer.cast.block
    rows, numbers = whole_rows(piece, first, shape[1])
    scale = quantizer.gathered_scale[numbers // blocks_of(shape, block)[2]]  # [rows, blocks of columns]
    values = quantize(rows, dtype, (1, block[1]), scale=scale).values
    start = first % shape[1]
    return values.flatten()[start : start + len(piece)]


class Fp8Payload:
    """What travels for the parameters of a `part` of which some are weights in 8 bits.

    quantizers: of each such weight, by its number. A payload has the other parameters' elements, in the gathered dtype and
    filled up to as many as the rank with most has, then a code for each element of the piece.
    """

    def __init__(self, part: ShardedParameters, quantizers: dict[int, Quantizer], gather: Fp8Gather):
        self.part, self.quantizers, self.gather = part, quantizers, gather
        self.seen_by = [copy.copy(part.layout) for _ in range(part.layout.world_size)]
        for rank, layout in enumerate(self.seen_by):
            layout.rank = rank
        others = [i for i in range(len(part.layout.shapes)) if i not in quantizers]
        spans = [[layout.span(i) for i in others] for layout in self.seen_by]
        self.most = max(sum(last - first for first, last in each) for each in spans)

    @property
    def header(self) -> int:
        """Bytes before the codes."""
        return self.most * self.part.buffer.values.itemsize

    def amaxes(self) -> dict[Quantizer, torch.Tensor]:
        """Of each weight what this rank has of its blocks' amax."""
        pieces, layout = self.part.layout.local_views(self.part.shard), self.part.layout
        return {
            quantizer: span_amax(pieces[i], layout.span(i)[0], layout.shapes[i], quantizer.cast.block)
            for i, quantizer in self.quantizers.items()
        }

    def encode(self, shard: torch.Tensor) -> torch.Tensor:
        """The payload of this rank's piece, bytes. Collective where the weights have changed."""
        self.gather.refresh()
        layout, values = self.part.layout, self.part.buffer.values
        length = self.header + len(shard)
        payload = shard.new_zeros(length + -length % values.itemsize, dtype=torch.uint8)
        pieces, codes = layout.local_views(shard), layout.local_views(payload[self.header : length])
        for i, quantizer in self.quantizers.items():
            if len(pieces[i]):
                own = span_codes(pieces[i], layout.span(i)[0], layout.shapes[i], quantizer)
                codes[i].copy_(own.view(torch.uint8))
        others = torch.cat([shard[:0], *(piece for i, piece in enumerate(pieces) if i not in self.quantizers)])
        payload[: self.header].view(values.dtype)[: len(others)].copy_(others)
        return payload

    def decode(self, payloads: torch.Tensor, out: torch.Tensor) -> None:
        """Write all values [ranks, numbers of a piece] of all ranks' payloads [ranks, bytes]."""
        codes = payloads[:, self.header : self.header + out.shape[1]].reshape(-1)
        whole = self.part.layout.views(out.view(-1))
        for i, quantizer in self.quantizers.items():
            values = self.part.layout.views(codes.view(quantizer.cast.dtype))[i]
            whole[i].copy_(dequantize(Quantized(values, quantizer.gathered_scale, quantizer.cast.block), out.dtype))
        for layout, payload, row in zip(self.seen_by, payloads, out, strict=True):
            pieces = [piece for i, piece in enumerate(layout.local_views(row)) if i not in self.quantizers]
            sizes = [len(piece) for piece in pieces]
            others = payload[: self.header].view(out.dtype)[: sum(sizes)].split(sizes)
            for piece, values in zip(pieces, others, strict=True):
                piece.copy_(values)


class Fp8Gather:
    """Gathers the weights of FP8 layers in 8 bits: `fully_shard(apply_fp8(model, recipe), encode=Fp8Gather())`.

    One for each model. Called with what fully_shard has in a flat buffer; None where no FP8 layer has a weight in it.
    """

    def __init__(self):
        self.payloads: list[Fp8Payload] = []
        self.seen: list[int] | None = None  # how often everything had changed when scales were found; None: once more
        weak = weakref.ref(self)
        handle = register_optimizer_step_post_hook(lambda optimizer, *_: weak().after_step(optimizer))
        weakref.finalize(self, handle.remove)

    def __call__(self, part: ShardedParameters) -> Encoding | None:
        """How a flat buffer travels. Raises ValueError for a weight that does not lie in memory row by row."""
        found = {i: weight_quantizer(places) for i, places in enumerate(part.slots)}
        quantizers = {i: quantizer for i, quantizer in found.items() if quantizer is not None}
        if not quantizers or part.shard.itemsize == 1:
            return None
        if turned := [part.slots[i][0][0] for i in quantizers if part.layout.strides[i][1] != 1]:
            raise ValueError(f"{turned[0]} does not lie in memory row by row")
        self.payloads.append(Fp8Payload(part, quantizers, self))
        self.seen = None
        return Encoding(self.payloads[-1].encode, self.payloads[-1].decode)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """The weights have changed, if they are this optimizer's."""
        own = {piece for payload in self.payloads for piece in payload.part.sharded_params}
        if not own.isdisjoint(p for group in optimizer.param_groups for p in group["params"]):
            self.seen = None

    def changes(self) -> list[int]:
        """How often the pieces, and the histories of delayed scales, have been changed in ways that PyTorch counts; and
        whether amax are recorded, as in training.
        """
        quantizers = [quantizer for payload in self.payloads for quantizer in payload.quantizers.values()]
        delayed = [quantizer for quantizer in quantizers if isinstance(quantizer, DelayedQuantizer)]
        tensors = [payload.part.shard for payload in self.payloads] + [quantizer.history for quantizer in delayed]
        return [*(tensor._version for tensor in tensors), *(quantizer.training for quantizer in delayed)]

    @torch.no_grad()
    def refresh(self) -> None:
        """Give all quantizers their weights' scales, where they may have changed. Collective then, over each group that a
        weight is split over: one all-reduce for all weights.
        """
        changes = self.changes()
        if changes == self.seen:
            return
        amaxes, over = {}, {}
        for payload in self.payloads:
            amaxes |= payload.amaxes()
            for quantizer in payload.quantizers.values():
                for group in (payload.part.layout.group, *quantizer.groups()):
                    over.setdefault(group, []).append(amaxes[quantizer])
        for group, tensors in over.items():
            max_over_ranks(tensors, group)
        for quantizer, amax in amaxes.items():
            quantizer.gathered_scale = quantizer.next_scale(amax)
        self.seen = changes
