"""What a check noted of an exercise, in `.progress/` beside the notebook: the one meaning of "solved".

A note has the digest of the answer that passed. An exercise is solved where it says "passed" of the cell as it stands.
"""

import contextlib
import json
import time
from pathlib import Path

FOLDER = ".progress"
STATES = "passes", "fails", "changed", "not tried"  # changed: since it passed


def note(folder: Path, exercise: str, passed: bool, digest: str | None = None) -> None:
    """Note in the folder of a notebook how a check ended. A folder that cannot be written to gets no note."""
    what = {"exercise": exercise, "passed": passed, "when": time.strftime("%Y-%m-%dT%H:%M:%S")}
    with contextlib.suppress(OSError):
        (folder / FOLDER).mkdir(exist_ok=True)
        text = json.dumps(what | ({"digest": digest} if digest else {}))
        (folder / FOLDER / f"{exercise}.json").write_text(text, encoding="utf-8")


def state(folder: Path, exercise: str, digest: str) -> str:
    """How an exercise stands whose cells have this digest: one of STATES."""
    try:
        found = json.loads((folder / FOLDER / f"{exercise}.json").read_text(encoding="utf-8"))
        if not found["passed"]:
            return "fails"
        return "passes" if found.get("digest") == digest else "changed"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "not tried"
