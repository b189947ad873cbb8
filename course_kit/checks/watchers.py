"""Watchers of an answer in a check: reads of a tensor's value on the host, results that arrive late, ranks made up, a
promised error.
"""

import contextlib
import re
from collections.abc import Callable, Iterator
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

READS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal")


class NoHostReads(TorchDispatchMode):
    """Raises AssertionError if a tensor's value is read on the host: a GPU would first have to finish its work."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        read = function._schema.name in READS
        assert not read, "a value is read on the host: no item(), no bool(), no `if` on a tensor"
        return function(*args, **(kwargs or {}))


class SizesFit(TorchDispatchMode):
    """Raises AssertionError if the tensors of an all-gather or a reduce-scatter do not match, before they are sent:
    gloo's own message differs from rank to rank.
    """

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        collective = {"c10d::_allgather_base_": "all-gather", "c10d::_reduce_scatter_base_": "reduce-scatter"}
        if name := collective.get(function._schema.name):
            output, given = args[:2]
            n = dist.ProcessGroup.unbox(args[2]).size()
            pair = {"input": given, "output": output}
            short, long = pair if name == "all-gather" else reversed(pair)
            shape = pair[short].shape if pair[short].dim() else (1,)
            wanted = [n * shape[0], *shape[1:]]
            sizes = " and an ".join(f"{word} of {list(each.shape)}, {each.dtype}" for word, each in pair.items())
            assert list(pair[long].shape) == wanted and given.dtype == output.dtype, (
                f"the {name} has an {sizes}: "
                f"in a group of {n} an {short} of {list(shape)} takes an {long} of {wanted}, of the same dtype"
            )
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def two_more_ranks(theirs: float) -> Iterator[list[tuple]]:
    """dist.all_reduce as if two more ranks had `theirs` in all places; yields (op, group) of each call."""
    calls = []

    def all_reduce(tensor: torch.Tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
        calls.append((op, group))
        tensor.copy_(tensor.clamp(min=theirs) if op == dist.ReduceOp.MAX else tensor + 2 * theirs)
        return mock.Mock() if async_op else None

    with mock.patch.object(dist, "all_reduce", all_reduce):
        yield calls


class LateWork:
    """A work whose result arrives with wait(): until then, NaN is in its place (for integers, the old values)."""

    def __init__(self, name: str, work: dist.Work, output: torch.Tensor, local: torch.Tensor):
        self.name, self.output, self.waited = name, output.data, False
        is_part = local is not output and local.untyped_storage()._cdata == output.untyped_storage()._cdata
        saved = local.detach().clone() if is_part else None  # an all-gather in place leaves this rank's part as it is
        work.wait()
        self.result = self.output.clone()
        if output.is_floating_point():
            self.output.fill_(torch.nan)
        if saved is not None:
            local.data.copy_(saved)

    def wait(self, *timeout) -> bool:
        """Copy the result to its place."""
        if not self.waited:
            self.waited = True
            assert self.output.untyped_storage().nbytes() or not self.output.numel(), (
                f"the memory of an {self.name} is freed before it is waited for"
            )
            self.output.copy_(self.result)
        return True

    def is_completed(self) -> bool:
        """Return whether it has been waited for."""
        return self.waited


@contextlib.contextmanager
def late_results() -> Iterator[list[LateWork]]:
    """Collectives with async_op whose results arrive only at wait(), as may happen on a GPU; yields their works.
    Results that are read too early are NaN, and `waited` shows which works are never waited for.
    """
    names = ["all_reduce", "all_gather_into_tensor", "all_gather_single"]  # _single: newer versions of PyTorch
    names += ["reduce_scatter_tensor", "reduce_scatter_single"]
    works, plain = [], {name: getattr(dist, name) for name in names if hasattr(dist, name)}

    def late(name: str) -> Callable:
        def start(output: torch.Tensor, *args, async_op: bool = False, **kwargs):
            work = plain[name](output, *args, async_op=async_op, **kwargs)
            if work is None or not async_op:
                return work
            local = args[0] if args and torch.is_tensor(args[0]) else output
            works.append(LateWork(re.sub("_(into_tensor|tensor|single)$", "", name), work, output, local))
            return works[-1]

        return start

    with contextlib.ExitStack() as patched:
        for name in plain:
            patched.enter_context(mock.patch.object(dist, name, late(name)))
        yield works


def refused(function: Callable, *arguments) -> bool:
    """Return whether function(*arguments) raises ValueError."""
    try:
        function(*arguments)
    except ValueError:
        return True
    return False
