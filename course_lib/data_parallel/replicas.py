"""Data parallelism: each rank has the whole model and its own part of the batch; gradients are averaged every step.

The mean over N ranks of their gradients is the gradient of the mean loss over all their batches (of equal size), so N
ranks that start from the same weights take the same step as one process with the N-fold batch. What it costs is an
all-reduce: with K bytes of gradients a rank sends 2 (N-1)/N K a step, however small its batch. Three ways to pay:

    naive     an all-reduce for each parameter, after backward        the network is idle, then the device is
    overlap   the same, each as soon as its gradient is there         hidden behind backward; a latency a parameter
    bucket    gradients share flat buffers, an all-reduce for each    hidden too, and few large messages

In `DataParallel` they differ in two facts, `buckets.MODES`; the program runs naive and overlap by the lines of `naive`.
(Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB, §3.2.)
"""

from __future__ import annotations

import argparse
import hashlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from course_lib.data_parallel import naive
from course_lib.data_parallel.buckets import MODES, Reducer
from course_lib.recompute.modes import IGNORED, accumulate, summed_loss
from course_lib.single_gpu import training as single_gpu
from course_lib.single_gpu.model import Transformer
from course_lib.single_gpu.placement import placement_of


def descriptions(module: nn.Module, arguments: dict) -> list[tuple[str, str, tuple[int, ...] | None]]:
    """Of the arguments, and of each parameter and buffer: what must be the same on all ranks; which part of a split
    tensor it is (notebook 06); on which ranks that must be the same, those that reduce it together. None: on all.
    """
    own = [(f"arguments {arguments}", "", None)]
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        words = [name, str(list(tensor.shape)), str(tensor.dtype), tensor.device.type]
        words += ["to be trained"] if tensor.requires_grad else []
        reduce_group = placement_of(tensor).reduce_group
        words += [f"reduced over {reduce_group.size()} ranks"] if reduce_group else []
        shard = placement_of(tensor).tensor_shard  # other parts of one tensor have the same shape
        part = f" from index {shard.start} of {shard.full_size}" if shard else ""
        own.append((" ".join(words), part, reduce_group and tuple(dist.get_process_group_ranks(reduce_group))))
    return own


def short_hash(what) -> bytes:
    """8 bytes of what `what` prints as, the same in every process."""
    return hashlib.sha256(repr(what).encode()).digest()[:8]


def hashes_agree(own: list[tuple], group) -> bool:
    """Whether all ranks of the group say the same of what must be the same, by hashes. Collective; the same on all.

    A rank sends one hash of all words, and for each list of ranks that reduce tensors together one of their parts.
    """
    parts = {}
    for place, (_, part, peers) in enumerate(own):
        parts.setdefault(peers, []).append((place, part))
    hashes = {short_hash(peers): short_hash(its_parts) for peers, its_parts in parts.items()}
    of_all = [None] * dist.get_world_size(group)
    dist.all_gather_object(of_all, {"words": short_hash([words for words, *_ in own])} | hashes, group)
    firsts = {}
    return all(firsts.setdefault(key, value) == value for hashes in of_all for key, value in hashes.items())


def check_same_model(module: nn.Module, group, arguments: dict) -> None:
    """Raise the same ValueError on all ranks of the group where one's arguments, parameters or buffers differ from the
    first one's: in name, shape, dtype, device, in being frozen, in the size of their reduce_group, or, from others in
    it, in the part that they are of a split tensor (notebook 06). Descriptions are sent only where their hashes differ.
    """
    own = descriptions(module, arguments)
    if hashes_agree(own, group):
        return
    ranks, of_all = dist.get_process_group_ranks(group), [None] * dist.get_world_size(group)
    dist.all_gather_object(of_all, own, group)
    alike = {}  # the first rank with a tensor, among those that reduce it together, and the part that it has
    for rank, other in zip(ranks, of_all, strict=True):
        for place, both in enumerate(zip_longest(other, of_all[0], fillvalue=("nothing more", "", None))):
            (theirs, part, peers), (firsts, firsts_part, _) = both
            first, its_part = alike.setdefault((place, peers), (rank, part))
            if theirs != firsts:
                raise ValueError(
                    f"the ranks differ: rank {rank} has {theirs}{part}, where rank {ranks[0]} has {firsts}{firsts_part}"
                )
            if part != its_part:
                raise ValueError(
                    f"the ranks differ: rank {rank} has {theirs}{part}, where rank {first} has {theirs}{its_part}"
                )


def default_bucket_mb(ranks: int) -> int:
    """Return the default MB of a bucket: 25, or 1 per rank if more, since a ring cuts it into a piece for each rank."""
    return max(25, ranks)


def check_arguments(module: nn.Module, mode: str, bucket_mb: float) -> None:
    """Raise ValueError where DataParallel can do nothing with its arguments."""
    if mode not in MODES:
        raise ValueError(f"mode {mode!r}: it is one of {', '.join(MODES)}")
    if not bucket_mb > 0:
        raise ValueError(f"bucket_mb {bucket_mb}: a bucket has a size above 0")
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if tensor.is_meta:
            raise ValueError(f"{name} is on the meta device: give it values before the model is wrapped")
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ValueError("the module has no parameter to train: nothing has a gradient to reduce")


def broadcast_from_first(module: nn.Module, group) -> None:
    """Give all ranks the parameters and buffers of the first rank of the group, or of a parameter's reduce_group."""
    for tensor in [*module.parameters(), *module.buffers()]:  # tied ones once
        values = tensor.detach().contiguous()
        dist.broadcast(values, group=placement_of(tensor).reduce_group or group, group_src=0)
        if not tensor.is_contiguous():
            tensor.detach().copy_(values)


class DataParallel(nn.Module):
    """Wraps `module`: `loss(dp(x)).backward(); dp.finish(); optimizer.step()` steps by the mean gradient over `group`.

    `mode`: see MODES; `bucket_mb`: MB (10**6 bytes) of gradients a bucket, see default_bucket_mb; `reduce_dtype`: see
    Bucket. All ranks start from the values of the group's first rank; what is frozen then is never reduced. A
    parameter's attribute `reduce_group`, where it has one, is the group in which its values and its gradient are the
    same; the sum over it is divided by the size of `group` all the same. Between backward and finish() gradients are in
    flight: leave them be.

    Raises ValueError, on all ranks, for senseless arguments, meta tensors, nothing to train, and ranks that differ.
    """

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup | None = None,
        mode: str = "bucket",
        bucket_mb: float | None = None,
        reduce_dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.module, self.group = module, group or dist.group.WORLD
        bucket_mb = default_bucket_mb(self.group.size()) if bucket_mb is None else bucket_mb
        check_same_model(module, self.group, {"mode": mode, "bucket_mb": bucket_mb, "reduce_dtype": reduce_dtype})
        check_arguments(module, mode, bucket_mb)
        broadcast_from_first(module, self.group)
        names = {parameter: name for name, parameter in module.named_parameters() if parameter.requires_grad}
        self.reducer = Reducer(names, self.group, mode, bucket_mb, reduce_dtype)
        self.synchronizes = True  # False inside no_sync()
        on_gradient = weakref.WeakMethod(self.on_gradient)  # so the parameters' hooks do not keep this wrapper alive
        handles = [p.register_post_accumulate_grad_hook(lambda p: on_gradient()(p)) for p in names]
        weakref.finalize(self, lambda: [handle.remove() for handle in handles])

    def on_gradient(self, parameter: nn.Parameter) -> None:
        """Called during backward, once `parameter.grad` is complete."""
        self.reducer.check_gradient(parameter)
        self.reducer.add(parameter, final=self.synchronizes)

    def forward(self, *args, **kwargs) -> Any:
        """What the module returns. Raises RuntimeError where a training step's gradients still wait for finish()."""
        if self.training and torch.is_grad_enabled() and self.reducer.unfinished:
            raise RuntimeError("forward after a backward without finish(): call finish() after a step's last backward")
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward adds up this rank's own gradients and sends nothing: for all micro-batches but the last."""
        before, self.synchronizes = self.synchronizes, False
        try:
            yield
        finally:
            self.synchronizes = before

    def finish(self) -> None:
        """After a step's last backward, on all ranks: each gradient becomes the mean over the group.

        A rank without a batch calls it too, and takes part with zeros. A second call sends everything once more, and
        leaves a mean as it is. Raises RuntimeError inside no_sync().
        """
        if not self.synchronizes:
            raise RuntimeError("finish() inside no_sync(): the step's last backward and finish() stand outside of it")
        self.reducer.finish()


# exercise 04.8
def parallel_accumulate(
    dp: DataParallel,
    micro_batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
    dtype: torch.dtype = torch.float32,
    loss_of: Callable[..., torch.Tensor] = summed_loss,
) -> torch.Tensor:
    """Run forward and backward of this rank's micro-batches, then `dp.finish()`: each gradient is that of the mean loss
    over all target tokens of all micro-batches of all ranks.

    micro_batches: one or more of (inputs, targets), [b, s] each; dtype, loss_of: as of `accumulate`. Gradients are sent
    once. Returns that loss, a float32 scalar, the same on all ranks; 0, as the gradients, if no rank has a target.
    """
    micro_batches = list(micro_batches)
    tokens = sum((targets != IGNORED).sum() for _, targets in micro_batches).float()
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

    The same list on all ranks. Sends at most 16 bytes for each tensor: it compares a checksum, the bits of the elements
    as integers, weighted by their places and summed modulo 2**64. No copy has more than 2**20 integers; the module
    stays as it is.
    """
    named, numbers = [*module.named_parameters(), *module.named_buffers()], []
    for _, tensor in named:
        number = torch.zeros((), dtype=torch.int64, device=tensor.device)
        for piece in tensor.detach().contiguous().view(INTEGERS[tensor.element_size()]).flatten().split(2**20):
            places = torch.arange(1, len(piece) + 1, device=tensor.device)
            number = 31 * number + (piece.long() * places).sum()
        numbers.append(number)
    extremes = torch.stack(numbers + [-number for number in numbers])  # the largest, and minus the smallest
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    largest, smallest = extremes.chunk(2)
    return [name for (name, _), spread in zip(named, (largest + smallest).tolist(), strict=True) if spread != 0]


# exercise 04.11
def overlap_ratio(tokens: int, dp: int, bandwidth: float, peak: float, gradient_bytes: int = 2) -> float:
    """Return the time of the gradients' all-reduce over that of the backward beside it; up to 1 it can be hidden.

    tokens: of one GPU's (last) micro-batch; bandwidth: bytes that a GPU sends per second (the bus bandwidth of
    notebook 03); peak: floating-point operations per second. The Ultra-Scale Playbook, appendix A3, corrected: the
    parameters cancel.
    """
    return gradient_bytes / (2 * tokens) * (dp - 1) / dp * peak / bandwidth


def options(argv: list[str] | None = None) -> argparse.Namespace:
    """The program's options. Touches nothing; an unknown or impossible one ends the program with status 2."""
    parser = single_gpu.training_parser("data_parallel", "Train with data parallelism.")
    parser.add_argument("--mode", default="bucket", choices=list(MODES), help="naive, overlap: without DataParallel")
    parser.add_argument("--bucket-mb", type=float, help="MB of gradients a bucket (25, or 1 a rank if more)")
    parser.add_argument("--micro-batch", type=int, help="sequences at a time; all by default")
    parser.add_argument("--reduce-fp32", action="store_true", help="send and add gradients in float32")
    parser.add_argument("--check-every", type=int, default=100, help="steps between checks of the replicas; 0: never")
    chosen = single_gpu.parse(parser, argv)
    if chosen.mode != "bucket" and (chosen.bucket_mb is not None or chosen.reduce_fp32):
        parser.error(f"--bucket-mb and --reduce-fp32 are of buckets: --mode {chosen.mode} has none")
    chosen.micro_batch = chosen.batch if chosen.micro_batch is None else chosen.micro_batch
    if not 1 <= chosen.micro_batch <= chosen.batch:
        parser.error("--micro-batch must be 1 or more, and no more than --batch")
    if chosen.bucket_mb is not None and not chosen.bucket_mb > 0 or chosen.check_every < 0:
        parser.error("--bucket-mb must be above 0, and --check-every 0 or more")
    return chosen


def main(argv: list[str] | None = None) -> list[dict]:
    """Train as the options say. Rank 0 prints one line a step (its own tokens/s) and writes where --out says.

    Modes naive and overlap train the plain model, with the functions of `naive`; all ranks have made it with one seed.
    Returns the records. Needs the default process group. Raises RuntimeError where the replicas have drifted apart.
    """
    chosen, rank, world_size = options(argv), dist.get_rank(), dist.get_world_size()
    count, wait_for_gradients = 0, None

    def step(model, optimizer, inputs, targets, dtype=torch.float32, max_norm=1.0):
        nonlocal count
        count += 1
        optimizer.zero_grad()
        parts = list(zip(inputs.split(chosen.micro_batch), targets.split(chosen.micro_batch), strict=True))
        if chosen.mode == "bucket":
            step_loss = parallel_accumulate(model, parts, dtype)
        else:
            step_loss = naive.averaged_backward(model, parts, dtype, wait_for_gradients)
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        replica = getattr(model, "module", model)
        if chosen.check_every and count % chosen.check_every == 0 and (names := find_diverged_params(replica)):
            raise RuntimeError(f"step {count}: the ranks have different values of {', '.join(names[:3])}")
        return step_loss

    def build(config, seed):
        nonlocal wait_for_gradients
        model, reduce_dtype = Transformer(config, seed), torch.float32 if chosen.reduce_fp32 else None
        if chosen.mode == "bucket":
            return DataParallel(model, bucket_mb=chosen.bucket_mb, reduce_dtype=reduce_dtype)
        wait_for_gradients = naive.overlap_gradients(model) if chosen.mode == "overlap" else None
        return model

    return single_gpu.run(chosen, step, build, rank=rank, world_size=world_size)
