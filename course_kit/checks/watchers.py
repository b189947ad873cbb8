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


class SizesFit(TorchDispatchMode):
    """Raises AssertionError where the tensors of an all-gather or a reduce-scatter do not fit together, before they are
    sent: gloo would say so in words of its own, on each rank in others.
    """

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        collective = {"c10d::_allgather_base_": "all-gather", "c10d::_reduce_scatter_base_": "reduce-scatter"}
        if name := collective.get(function._schema.name):
            output, given, n = *args[:2], dist.ProcessGroup.unbox(args[2]).size()
            pair = {"input": given, "output": output}
            short, long = pair if name == "all-gather" else reversed(pair)
            shape = pair[short].shape if pair[short].dim() else (1,)
            wanted = [n * shape[0], *shape[1:]]
            found = " and an ".join(f"{word} of {list(each.shape)}, {each.dtype}" for word, each in pair.items())
            assert list(pair[long].shape) == wanted and given.dtype == output.dtype, (
                f"the {name} has an {found}: "
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


def refused(function: Callable, *arguments) -> bool:
    """Whether function(*arguments) raises ValueError."""
    try:
        function(*arguments)
    except ValueError:
        return True
    return False
