"""Cases of a trial on a rank, how close a result has to be, and errors that name the case."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

CLOSE = {torch.float32: 1e-5, torch.bfloat16: 0.03}  # how far apart rounding may take a result and what is expected


def all_cases(group: dist.ProcessGroup, trial: Callable, cases: list[tuple]) -> list:
    """On a rank: trial(group, *case) of each case."""
    return [trial(group, *case) for case in cases]


@contextlib.contextmanager
def in_case(what: str) -> Iterator[None]:
    """Turn an error of PyTorch inside into an AssertionError that says in which case it came."""
    try:
        yield
    except (RuntimeError, IndexError) as error:
        if isinstance(error, NotImplementedError):
            raise  # the exercise is blank
        raise AssertionError(f"{what}: {error}") from None
