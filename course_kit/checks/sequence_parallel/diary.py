"""A diary of an answer's operations on a rank: matmuls, scores of attention, transfers and waits, in order."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

Event = tuple[str, int]


class Noted:
    """A work whose wait() is noted, with the place of its start."""

    def __init__(self, work: dist.Work, events: list[Event], word: str, start: int):
        self.work, self.events, self.word, self.start = work, events, word, start

    def wait(self, *args):
        self.events.append((f"wait {self.word}", self.start))
        return self.work.wait(*args)

    def __getattr__(self, name: str):
        return getattr(self.work, name)


class Diary(TorchDispatchMode):
    """Notes this rank's operations inside, in order, as `events` (word, number).

    ("matmul", multiplications); ("start gather", works to wait for) and ("wait gather", place of the start) and so
    on; ("attention", scores) of a block of attention, by NotedBlock.
    """

    MATMULS = {"mm": 0, "addmm": 1, "addmm_": 1, "bmm": 0}  # the position of a matmul's first factor
    SENDS = {"all_gather": "gather", "reduce_scatter": "scatter", "all_reduce": "sum", "batch_isend_irecv": "exchange"}
    SENDS |= {"all_gather_into_tensor": "gather", "reduce_scatter_tensor": "scatter"}
    SENDS |= {"all_gather_single": "gather", "reduce_scatter_single": "scatter"}  # as newer PyTorch calls them

    def __init__(self):
        super().__init__()
        self.events: list[Event] = []
        self.matmul_dtypes: set[torch.dtype] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # otherwise the first operator imports torch._dynamo: seconds on each rank
        return False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        name = function._schema.name.removeprefix("aten::")
        if name in self.MATMULS:
            self.events.append(("matmul", out.numel() * args[self.MATMULS[name]].shape[-1]))
            self.matmul_dtypes.add(args[self.MATMULS[name]].dtype)
        return out

    def sender(self, name: str):
        """Return a function of torch.distributed that notes its start and its wait."""
        plain, word = self.plain[name], self.SENDS[name]

        def send(*args, **kwargs):
            work, start = plain(*args, **kwargs), len(self.events)
            works = work if isinstance(work, list) else [work] * (work is not None)
            self.events.append((f"start {word}", len(works)))
            if not works:
                return self.events.append((f"wait {word}", start))
            noted = [Noted(each, self.events, word, start) for each in works]
            return noted if isinstance(work, list) else noted[0]

        return send

    def __enter__(self) -> Diary:
        self.plain = {name: getattr(dist, name) for name in self.SENDS if hasattr(dist, name)}
        for name in self.plain:
            setattr(dist, name, self.sender(name))
        return super().__enter__()

    def __exit__(self, *error):
        for name, plain in self.plain.items():
            setattr(dist, name, plain)
        return super().__exit__(*error)


def unfinished(events: list[Event]) -> int:
    """Return the number of works that have been started and never waited for."""
    starts = [(position, word, works) for position, (word, works) in enumerate(events) if word.startswith("start")]
    return sum(
        max(0, works - events.count((word.replace("start", "wait"), position))) for position, word, works in starts
    )


def total(events: list[Event], word: str) -> int:
    """Return the sum of the numbers of all events with this word."""
    return sum(number for event, number in events if event == word)
