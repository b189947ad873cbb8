"""Work that succeeds on all ranks or on none, and a process group on the host."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import TypeVar, cast

import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

from course_lib.checkpoint.files import CheckpointError, DamagedError
from course_lib.single_gpu.errors import one_line_message

try:
    import resource
except ImportError:  # on Windows
    resource = None  # type: ignore[assignment]  # allow_connections looks

Result = TypeVar("Result")
FAILURES = (Exception, CheckpointException)  # torch.distributed.checkpoint's exception is a BaseException


def one_line(error: BaseException, rank: int) -> str:
    """Return one line about an error of this rank, or of another one that torch.distributed.checkpoint reports."""
    if isinstance(error, CheckpointException):
        rank, (cause, _) = next(iter(error.failures.items()))
        return one_line(cause, rank)
    text = one_line_message(error)
    return text if isinstance(error, CheckpointError) else f"rank {rank}: {type(error).__name__}: {text}"


def gather_or_raise(group: dist.ProcessGroup | None, work: Callable[[], Result]) -> list[Result]:
    """Return the results of `work` on all ranks, which are pickled. Collective. group: None is the default group.

    Raises CheckpointError, on all ranks, if `work` fails on one of them.
    """
    failure, result = None, None
    try:
        result = work()
    except FAILURES as error:
        kind = DamagedError if isinstance(error, DamagedError) else CheckpointError
        failure = kind, one_line(error, dist.get_rank(group))
    by_rank: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(by_rank, (failure, result), group=group)
    for failure, _ in by_rank:
        if failure:
            kind, line = failure
            raise kind(line)
    return [result for _, result in by_rank]


def run_or_raise(group: dist.ProcessGroup | None, work: Callable[[], Result]) -> Result:
    """Return the result of `work` on this rank, which is not sent to others. Collective. See gather_or_raise."""
    results: list[Result] = []
    gather_or_raise(group, lambda: results.append(work()))
    return results[0]


def first_or_raise(group: dist.ProcessGroup | None, work: Callable[[], Result]) -> Result:
    """Return rank 0's result of `work` on all ranks; the others do not run it. Collective. See gather_or_raise."""
    first = dist.get_rank(group) == 0
    return cast(Result, gather_or_raise(group, lambda: work() if first else None)[0])


GLOO_FILES, SPARE_FILES = 3, 64  # that a gloo group opens beside its connections; that may be opened later


def allow_connections(ranks: int) -> None:
    """Raise this process's soft limit of open files to the needs of a gloo group of so many ranks: one file per rank.

    Raises CheckpointError if the hard limit is too low. Does nothing on a system without such limits.
    """
    if resource is None:
        return
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (math.inf if limit == resource.RLIM_INFINITY else limit for limit in limits)
    needed = len(os.listdir("/dev/fd")) + ranks + GLOO_FILES
    raised = int(min(needed + SPARE_FILES, hard))
    try:
        if hard < needed:
            raise ValueError
        if soft < raised:
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, limits[1]))
    except (OSError, ValueError):  # some systems have a limit below the hard one
        raise CheckpointError(
            f"a gloo group of {ranks:,} ranks needs {needed:,} open files in rank {dist.get_rank()}, "
            f"and its hard limit is {hard:,}: raise it (ulimit -n) where the job is started"
        ) from None


def host_group() -> dist.ProcessGroup:
    """Return a new gloo group of all ranks. Collective. Raises CheckpointError, on all ranks, if one of them may not
    open as many files as the group needs (n + 3 for n ranks).
    """
    gather_or_raise(None, lambda: allow_connections(dist.get_world_size()))
    return dist.new_group(backend="gloo")
