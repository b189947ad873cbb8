"""A diary of an answer's operations on a rank: matmuls, all-reduces, waits, and new memory, in order."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Noted:
    """A work whose wait() is noted."""

    def __init__(self, work: dist.Work, events: list[tuple[str, int]]):
        self.work, self.events = work, events

    def wait(self, *args):
        self.events.append(("wait", 0))
        return self.work.wait(*args)

    def __getattr__(self, name: str):
        return getattr(self.work, name)


class Diary(TorchDispatchMode):
    """Notes this rank's operations inside, in order, as `events` (word, number); and the memory that operators make.

    ("matmul", multiplications), ("start", elements in it) of an all-reduce, ("wait", 0) for one.
    """

    MATMULS = {"mm": 0, "bmm": 0, "addmm": 1, "addmm_": 1, "baddbmm": 1}  # the position of a matmul's first factor

    def __init__(self):
        super().__init__()
        self.dtypes: set[torch.dtype] = set()  # of the matmuls
        self.events, self.made = [], {}  # made: new storages by address; they stay, so that no address recurs

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # otherwise the first operator imports torch._dynamo: seconds on each rank
        return False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        name = function._schema.name.removeprefix("aten::")
        if name in self.MATMULS:
            self.events.append(("matmul", out.numel() * args[self.MATMULS[name]].shape[-1]))
            self.dtypes.add(args[self.MATMULS[name]].dtype)
        given, result = (
            {t.untyped_storage()._cdata: t.untyped_storage() for t in tree_leaves(tree) if torch.is_tensor(t)}
            for tree in ((args, kwargs), out)
        )
        self.made |= {address: storage for address, storage in result.items() if address not in given}
        return out

    def all_reduce(self, tensor: torch.Tensor, *args, **kwargs):
        """dist.all_reduce, noted."""
        assert tensor.is_contiguous(), "an all-reduce of a tensor that is not contiguous: NCCL refuses it"
        self.events.append(("start", tensor.numel()))
        work = self.plain(tensor, *args, **kwargs)
        return self.events.append(("wait", 0)) if work is None else Noted(work, self.events)

    def __enter__(self) -> Diary:
        self.plain, dist.all_reduce = dist.all_reduce, self.all_reduce
        return super().__enter__()

    def __exit__(self, *error):
        dist.all_reduce = self.plain
        return super().__exit__(*error)

    def words(self) -> list[str]:
        """Return the text of all events."""
        return [word for word, _ in self.events]

    def total(self, word: str) -> int:
        """Return the sum of the numbers of all events with this word."""
        return sum(number for event, number in self.events if event == word)

    def sizes(self) -> list[int]:
        """Return the bytes of each storage that has been made."""
        return [storage.nbytes() for storage in self.made.values()]
