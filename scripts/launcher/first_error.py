"""Find the rank that failed first, and the cell: the single report of a failed launch.

A rank that raises leaves a report; a rank that was killed leaves none. When one rank fails, the others lose their
connection to it and torchrun ends them, so most of what fails is a consequence. The cause is, in this order: the
earliest error that is not a lost connection; a rank that died without a report; the error that another node put into
the job's store; the earliest lost connection.
"""

import os
import signal
import socket
from pathlib import Path

from export import locate

MOST_CELLS = 6  # a recursion passes through the same ones a thousand times


def deaths(failures: dict, reports: list[dict]) -> list[tuple[int, str]]:
    """Return the ranks that died without a report, and how, except those that torchrun ended (SIGTERM)."""
    reported = {report["rank"] for report in reports}
    raised_reports = []
    for rank, failure in sorted(failures.items()):
        if rank in reported or failure.exitcode == -signal.SIGTERM:
            continue
        process = f"process {failure.pid}, local rank {failure.local_rank} on host {socket.gethostname()},"
        how = f"ended with exit status {failure.exitcode} and no Python error"
        if failure.exitcode < 0:
            how = f"was killed by signal {-failure.exitcode} ({signal.Signals(-failure.exitcode).name})"
        if failure.exitcode == -signal.SIGKILL:
            how += "; a machine that runs out of memory does this"
        raised_reports.append((rank, f"{process} {how}"))
    return raised_reports


def cause(failures: dict, reports: list[dict]) -> str:
    """Return the message for a failed launch. failures: torchrun's, by rank; reports: this node's, earliest first."""
    raised = [report for report in reports if not report["lost_peer"]]
    local = {report["rank"] for report in raised}
    elsewhere = [report["first"] for report in reports if report.get("first") and report["first"]["rank"] not in local]
    if raised and not elsewhere:
        return describe_report(raised[0])
    if died := deaths(failures, reports):
        return f"rank {died[0][0]}: {died[0][1]}"
    if elsewhere:
        return "rank {rank} on node {host} failed first: {headline} (that node tells more)".format(**elsewhere[0])
    return describe_report(reports[0]) if reports else "the ranks ended without saying why"


def describe_report(report: dict, texts: dict[str, str] | None = None) -> str:
    """Describe an error and the cells it passed through: the line that raised it, then the calls that led there. For a
    ValueError from the library, for an option for instance, only the message, unless it passed through a cell.

    texts: the content of modules that are not written yet, by file.
    """
    rank = "" if report["rank"] is None else f"rank {report['rank']}: "
    lines = [f"{rank}{report['headline']}{' (it lost another rank)' if report['lost_peer'] else ''}"]
    texts = texts or {}
    frames = [
        (cell_of(file, number, texts), file, number, line_of(texts[file], number) if file in texts else code)
        for file, number, code in reversed(report["frames"])
    ]
    cells = list(dict.fromkeys((cell, code) for cell, _, _, code in frames if cell))[:MOST_CELLS]
    refused = report.get("refusal") and not cells and in_library(frames[0][1])
    if frames and not frames[0][0] and not refused:
        lines.append(f"  inside {shown(frames[0][1])}, line {frames[0][2]}: {frames[0][3]}")
    for index, (cell, code) in enumerate(cells):
        lines.append(f"  {'called from' if index else 'in'} {cell}: {code}")
    return "\n".join(lines)


def line_of(text: str, number: int) -> str:
    """Return a line of a text, counted from 1, without its indentation."""
    return text.split("\n")[number - 1].strip()


def in_library(file: str) -> bool:
    """Return whether a file is a module of the library, or of one of its packages."""
    return "course_lib" in Path(file).parent.parts[-2:]


def cell_of(file: str, line: int, texts: dict[str, str]) -> str | None:
    """Return the notebook cell, and the line in it, that a module's line was exported from; None for other files."""
    if not in_library(file):
        return None
    try:
        location = locate(Path(file), line, texts.get(file))
    except (OSError, ValueError):  # a module without its notebook
        return None
    if location is None:
        return None
    notebook, number, cell_id, cell_line = location
    return f"{shown(notebook)}, cell {number} ({cell_id}), line {cell_line}"


def shown(path: str | Path) -> str:
    """Return a short but clear path: relative to site-packages or to the current folder, else absolute."""
    path = os.path.abspath(path)
    below = os.path.relpath(path)
    if "site-packages" in path:
        return path.split("site-packages" + os.sep)[-1]
    return path if below.startswith("..") else below
