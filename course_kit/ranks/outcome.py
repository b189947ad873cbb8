"""The outcome that a rank sends back: the pickled result, or a report of its error and of where the error occurred."""

import os
import re
import sys
import time
import traceback

MAX_RESULT_MIB = 128
LOST_PEER = re.compile(
    "closed by peer|reset by peer|Broken pipe|remote process|communicator was aborted|is not connected"
)
HERE = os.path.dirname(__file__)


def pickled_result(result) -> bytes:
    """Return the result as bytes. Raises ValueError if it cannot be pickled or is larger than MAX_RESULT_MIB."""
    import cloudpickle

    try:
        pickled = cloudpickle.dumps(result)
    except Exception as error:
        raise ValueError(f"the result (of type {type(result).__name__}) can't be sent back: {error}") from None
    if len(pickled) > MAX_RESULT_MIB * 2**20:
        size = f"{len(pickled) / 2**20:.0f} MiB"
        raise ValueError(
            f"the result is too large: {size}, and the limit is {MAX_RESULT_MIB} MiB; return a slice or a sum"
        )
    return pickled


def frames_of(thread: int) -> list[traceback.FrameSummary]:
    """Return the frames of a running thread, outermost first. Reads no file: each read would give the thread the lock
    back.
    """
    walk = list(traceback.walk_stack(sys._current_frames()[thread]))
    return [traceback.FrameSummary(f.f_code.co_filename, n, f.f_code.co_name, lookup_line=False) for f, n in walk[::-1]]


def stack(frames: list[traceback.FrameSummary]) -> list:
    """Return [file, line, function] of each frame outside this folder, outermost first, from the call on."""
    in_here = [os.path.dirname(frame.filename) == HERE for frame in frames]
    called = range(in_here.index(True) if any(in_here) else 0, len(frames))
    return [[frames[i].filename, frames[i].lineno, frames[i].name] for i in called if not in_here[i]]


def frames_to(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the frames of an error, outermost first. For an error that was raised `from` another, they lead to where
    the other one was raised.
    """
    frames = list(traceback.extract_tb(error.__traceback__))
    while (cause := error.__cause__) and (before := traceback.extract_tb(cause.__traceback__)):
        caught_in = before[0].filename, before[0].name
        same = [i for i, frame in enumerate(frames) if (frame.filename, frame.name) == caught_in]
        frames[same[-1] if same else len(frames) :] = before
        error = cause
    return frames


def describe(error: BaseException) -> dict:
    """Return a rank's report of its error."""
    import cloudpickle

    try:
        text = str(error).split("\nException raised from ")[0].strip()  # what follows is torch's C++ stack
    except Exception:
        text = "(its text can't be read)"
    try:
        kind = cloudpickle.dumps(type(error))
    except Exception:
        kind = cloudpickle.dumps(RuntimeError)
    return {
        "error": f"{type(error).__name__}: {text}" if text else type(error).__name__,
        "kind": kind,
        "stack": stack(frames_to(error)),
        "time_ns": time.time_ns(),
        "lost_peer": isinstance(error, RuntimeError) and bool(LOST_PEER.search(text)),
    }
