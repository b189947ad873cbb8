"""Records of an answer's work: multiplications, operators, values read on the host; exchanges that start and end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

READS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "bincount")


class Work(TorchDispatchMode):
    """Counts, inside: `multiplications` of matmuls, `operators` that run, `read`: values read on the host."""

    def __init__(self):
        super().__init__()
        self.multiplications, self.operators, self.read = 0, 0, []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # otherwise the first operator imports torch._dynamo: seconds on each rank
        return False

    def __enter__(self) -> Work:
        def noted(tensor):
            self.read.append("tolist")
            return tolist(tensor)

        tolist = torch.Tensor.tolist  # no operator
        self.patch = mock.patch.object(torch.Tensor, "tolist", noted)
        self.patch.start()
        return super().__enter__()

    def __exit__(self, *error):
        self.patch.stop()
        return super().__exit__(*error)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        name = function._schema.name.removeprefix("aten::")
        self.operators += 1
        if name in READS:
            self.read.append("item or bool" if name == "_local_scalar_dense" else name)
        if name == "index" and any(each is not None and each.dtype == torch.bool for each in args[1]):
            self.read.append("indexing by a mask")
        if name in ("mm", "bmm", "addmm", "baddbmm"):
            self.multiplications += out.numel() * args[name.startswith(("add", "bad"))].shape[-1]
        elif name == "_grouped_mm":  # rows [r, in] by [E, in, out], or [in, r] by [r, out]: r matmuls of a row
            self.multiplications += args[0].numel() * args[1].shape[-1]
        return out


class Additions(TorchDispatchMode):
    """Notes the dtypes of additions by index, inside."""

    def __init__(self):
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.removeprefix("aten::")
        if name.startswith(("index_add", "scatter_add", "index_put", "_index_put")):
            self.dtypes.add(args[0].dtype)
        return function(*args, **(kwargs or {}))


class NotedWork:
    """A work whose wait() is noted."""

    def __init__(self, work: dist.Work, events: list[str]):
        self.work, self.events = work, events

    def wait(self):
        self.events.append("wait")
        return self.work.wait()


@contextlib.contextmanager
def noted_exchanges() -> Iterator[list[str]]:
    """Note the "start" of each all-to-all inside, and the "wait" for it."""
    events, plain = [], dist.all_to_all_single

    def noted(*args, **kwargs):
        events.append("start")
        work = plain(*args, **kwargs)
        return NotedWork(work, events) if work else events.append("wait")

    with mock.patch.object(dist, "all_to_all_single", noted):
        yield events
