"""What watches an answer in a check: reads of a tensor's value on the host, ranks made up, a promised error."""

import contextlib
from collections.abc import Callable, Iterator
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

READS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal")


class NoHostReads(TorchDispatchMode):
    """Raises AssertionError where a tensor's value is read on the host: a GPU would first have to finish its work."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        read = function._schema.name in READS
        assert not read, "a value is read on the host: no item(), no bool(), no `if` on a tensor"
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


def refused(function: Callable, *arguments) -> bool:
    """Whether function(*arguments) raises ValueError."""
    try:
        function(*arguments)
    except ValueError:
        return True
    return False
