"""Transfers that a rank has started and never waited for: the usual cause of a hang or of wrong numbers.

`watch` wraps the methods of a process group that start a transfer, and those by which one waits for it. Only the place
of each transfer is kept, no tensor and no work.
"""

from __future__ import annotations

import collections
import functools
import sys
from typing import Any

from course_kit.ranks.report import is_course_code

STARTS = (
    "allreduce allreduce_coalesced broadcast reduce scatter gather allgather allgather_coalesced _allgather_base"
    " allgather_into_tensor_coalesced all_gather_single all_gather_single_coalesced reduce_scatter _reduce_scatter_base"
    " reduce_scatter_tensor_coalesced reduce_scatter_single reduce_scatter_single_coalesced alltoall alltoall_base"
    " all_to_all_single send recv recv_anysource barrier"
).split()
WAITS = "wait", "synchronize", "get_future", "block_current_stream"
_open: dict[int, list] = {}  # [function, file, line] of each transfer, by the id of its work
_dropped: list[list] = []  # of those whose work was dropped, and its id given to another one


def watch() -> None:
    """Record the transfers of this process, from now on."""
    from torch.distributed import ProcessGroup, Work

    group: Any = ProcessGroup
    for name in STARTS:
        if hasattr(group, name):  # some are newer than others
            setattr(group, name, starting(getattr(group, name)))
    for name in WAITS:
        if hasattr(Work, name):
            setattr(Work, name, waiting(getattr(Work, name)))


def starting(method):
    @functools.wraps(method)
    def start(*args, **kwargs):
        work = method(*args, **kwargs)
        if work is not None:
            if id(work) in _open:
                _dropped.append(_open[id(work)])
            _open[id(work)] = location()
        return work

    return start


def waiting(method):
    @functools.wraps(method)
    def wait(work, *args, **kwargs):
        _open.pop(id(work), None)
        return method(work, *args, **kwargs)

    return wait


def location() -> list:
    """Return the function of torch.distributed that the course's code has called, and the file and line of the call."""
    frame, called = sys._getframe(2), ""
    while frame is not None and not is_course_code(frame.f_code.co_filename):
        name = frame.f_code.co_name
        called = called if name in ("wrapper", "inner") else name
        frame = frame.f_back  # type: ignore[assignment]
    return [called, frame.f_code.co_filename, frame.f_lineno] if frame else [called, "", 0]


def forget() -> None:
    """Forget the transfers of earlier calls."""
    _open.clear()
    _dropped.clear()


def unfinished() -> list:
    """Return [function, file, line, number] of the transfers that this process has not waited for so far."""
    counts = collections.Counter(tuple(each) for each in [*_dropped, *_open.values()])
    return [[*each, count] for each, count in counts.items()]
