"""What ranks do together: work that has gone well on all of them or on none, and a process group on the host."""

from __future__ import annotations

import math
import os
from collections.abc import Callable

import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

from course_lib.checkpoint.files import CheckpointError, DamagedError
from course_lib.single_gpu.errors import one_line_message

try:
    import resource
except ImportError:  # on Windows
    resource = None


FAILURES = (Exception, CheckpointException)  # the latter, torch.distributed.checkpoint's, is a BaseException


def one_line(error: BaseException, rank: int) -> str:
    """What went wrong: an error of this rank, or (torch.distributed.checkpoint's) of another one."""
    if isinstance(error, CheckpointException):
        rank, (cause, _) = next(iter(error.failures.items()))
        return one_line(cause, rank)
    text = one_line_message(error)
    return text if isinstance(error, CheckpointError) else f"rank {rank}: {type(error).__name__}: {text}"


def told_and_kept(group: dist.ProcessGroup, work: Callable[[], tuple]) -> tuple:
    """`work` returns what this rank tells all, which is pickled, and what it keeps. A list of what all have told, and
    what this one keeps. Collective: has `work` failed on one rank, CheckpointError on all of them.
    """
    failure, told, kept = None, None, None
    try:
        told, kept = work()
    except FAILURES as error:
        failure = DamagedError if isinstance(error, DamagedError) else CheckpointError, one_line(error, group.rank())
    of_all: list = [None] * group.size()
    dist.all_gather_object(of_all, (failure, told), group=group)
    for failure, _ in of_all:
        if failure:
            kind, line = failure
            raise kind(line)
    return [told for _, told in of_all], kept


def together(group: dist.ProcessGroup, work: Callable[[], object]) -> list:
    """The results of `work` of all ranks. Collective: see told_and_kept."""
    return told_and_kept(group, lambda: (work(), None))[0]


def on_each(group: dist.ProcessGroup, work: Callable[[], object]) -> object:
    """The result of `work` of this rank, which no other one is sent. Collective: see told_and_kept."""
    return told_and_kept(group, lambda: (None, work()))[1]


OWN_FILES, SPARE_FILES = 3, 64  # of a gloo group, beside its connections; of what is opened later


def allow_connections(ranks: int) -> None:
    """Raise this process's soft limit of open files to what a gloo group of so many ranks takes: one for each of them.

    Raises CheckpointError where the hard limit is below that. Where there are no such limits nothing happens.
    """
    if resource is None:
        return
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft, hard = (math.inf if limit == resource.RLIM_INFINITY else limit for limit in limits)
    least = len(os.listdir("/dev/fd")) + ranks + OWN_FILES
    raised = min(least + SPARE_FILES, hard)
    try:
        if hard < least:
            raise ValueError
        if soft < raised:
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, limits[1]))
    except (OSError, ValueError):  # some systems have a limit below the hard one
        raise CheckpointError(
            f"a gloo group of {ranks:,} ranks takes {least:,} open files in rank {dist.get_rank()}, and its hard limit "
            f"is {hard:,}: raise it (ulimit -n) where the job is started"
        ) from None


def host_group() -> dist.ProcessGroup:
    """A new group of all ranks, on gloo. Collective. Raises CheckpointError, on all ranks, where one of them may not
    open as many files as that takes (n + 3 for n ranks).
    """
    together(dist.group.WORLD, lambda: allow_connections(dist.get_world_size()))
    return dist.new_group(backend="gloo")
