"""Cases of a trial on a rank, how close a result has to be, and errors that name the case."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

CLOSE = {torch.float32: 1e-5, torch.bfloat16: 0.03}  # how far apart rounding may take a result and what is expected

REFUSED_GRADIENTS = re.compile(
    r"function (\w+)Backward (returned an (?:incorrect number of gradients (\(.*\))|invalid gradient .*))",
    re.IGNORECASE,
)


def all_cases(group: dist.ProcessGroup, trial: Callable, cases: list[tuple]) -> list:
    """On a rank: return trial(group, *case) of each case."""
    return [trial(group, *case) for case in cases]


@contextlib.contextmanager
def in_case(what: str) -> Iterator[None]:
    """Turn an error of PyTorch inside into an AssertionError that says in which case it came. It keeps the line where
    the error came up; gradients that autograd refuses have none, and the method that returned them is named instead.
    """
    try:
        yield
    except (RuntimeError, IndexError) as error:
        if isinstance(error, NotImplementedError):
            raise  # the exercise is blank
        refused = REFUSED_GRADIENTS.match(str(error))
        if not refused:
            raise AssertionError(f"{what}: {error}") from error
        cls, wrong, counts = refused.groups()
        if counts:
            wrong += ": one for each argument of forward, None where there is no gradient"
        raise AssertionError(f"{what}: {cls}.backward {wrong}") from None


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, such as "1 copy" and "2 copies"."""
    plural = noun[:-1] + "ies" if noun.endswith("y") else noun + "s"
    return f"{number} {noun if number == 1 else plural}"
