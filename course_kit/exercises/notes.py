"""Notes on checks, in `.progress/` beside the notebook: they define what "solved" means.

A note holds the digest of the answer that passed. An exercise is solved if its note says "passed" for the current cell.
"""

import contextlib
import json
import time
from pathlib import Path

FOLDER = ".progress"
STATES = "passes", "fails", "changed", "not tried"  # changed: since it passed


def note(folder: Path, exercise: str, passed: bool, digest: str | None = None) -> None:
    """Note the result of a check in the folder of a notebook. A folder that cannot be written to gets no note."""
    what = {"exercise": exercise, "passed": passed, "when": time.strftime("%Y-%m-%dT%H:%M:%S")}
    with contextlib.suppress(OSError):
        (folder / FOLDER).mkdir(exist_ok=True)
        text = json.dumps(what | ({"digest": digest} if digest else {}))
        (folder / FOLDER / f"{exercise}.json").write_text(text, encoding="utf-8")


def state(folder: Path, exercise: str, digest: str) -> str:
    """Return the state, one of STATES, of an exercise whose cells have this digest."""
    try:
        record = json.loads((folder / FOLDER / f"{exercise}.json").read_text(encoding="utf-8"))
        if not record["passed"]:
            return "fails"
        return "passes" if record.get("digest") == digest else "changed"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "not tried"
