"""The report of a failed rank: the error, its call stack, and the time by the rank's nanosecond clock."""

import json
import os
import re
import socket
import time
import traceback
from pathlib import Path

LOST_PEER = re.compile(
    "closed by peer|reset by peer|Broken pipe|remote process|communicator was aborted|is not connected"
)


def lost_peer(error: BaseException | None) -> bool:
    """Return whether `error`, or one of its causes, only reports a lost connection to another rank."""
    while error is not None:
        if isinstance(error, RuntimeError) and LOST_PEER.search(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def describe(error: BaseException) -> dict:
    """Return the error for torchrun ("message") and for the launcher (all other keys; frames outermost first)."""
    frames = [[frame.filename, frame.lineno, frame.line] for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) and error.filename:
        frames.append([error.filename, error.lineno, (error.text or "").strip()])
    text = str(error).split("\nException raised from ")[0].strip()  # what follows is torch's C++ stack
    headline = f"{type(error).__name__}: {text}" if text else type(error).__name__
    if isinstance(error, SystemExit) and isinstance(error.code, str):  # as in Python: a message for the user, no stack
        headline, frames = text, []
    now = time.time_ns()
    stack = "".join(traceback.format_exception(error)) if frames else headline
    details = {"py_callstack": stack, "timestamp": str(now // 10**9)}
    return {
        "message": {"message": headline, "extraInfo": details},
        "headline": headline,
        "time_ns": now,
        "rank": int(os.environ.get("RANK", "0")),
        "host": socket.gethostname(),
        "lost_peer": lost_peer(error),
        "refusal": isinstance(error, ValueError) and bool(frames) and frames[-1][2].startswith("raise "),
        "frames": frames,
    }


def write_report(report: dict, folder: Path | None) -> None:
    """Write a report to torchrun's error file and to the launcher's folder, each atomically: torchrun may kill us."""
    files = [Path(os.environ["TORCHELASTIC_ERROR_FILE"])] if os.environ.get("TORCHELASTIC_ERROR_FILE") else []
    files += [folder / f"{os.environ['LOCAL_RANK']}.json"] if folder else []
    for file in files:
        part = file.with_suffix(".part")
        part.write_text(json.dumps(report), encoding="utf-8")
        part.replace(file)


def read_reports(folder: Path) -> list[dict]:
    """Return the reports of the ranks of this node, earliest first by their own clocks."""
    reports = [json.loads(file.read_text(encoding="utf-8")) for file in folder.glob("*.json")]
    return sorted(reports, key=lambda report: report["time_ns"])
