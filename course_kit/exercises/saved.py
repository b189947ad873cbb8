"""The answers in a notebook as it was saved: its exercise cells, by exercise."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

from course_kit.exercises.cells import EXPORT, CellError, ExportedCell, digest, plain, read
from course_kit.exercises.notes import state

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
CELL_ID = re.compile(r"(?P<kind>ex|check)-(?P<chapter>\d\d)-(?P<number>\d+)(?P<part>[a-z]?)")


def exercise_of(cell_id: str, kind: str = "ex") -> str | None:
    """The exercise that a cell belongs to by its id: "06.2" for ex-06-2, and for ex-06-2b, its second target."""
    found = CELL_ID.fullmatch(cell_id or "")
    return f"{found['chapter']}.{found['number']}" if found and found["kind"] == kind else None


def exercise_digest(cells: list[ExportedCell]) -> str:
    """The digest of an exercise's cells, in whatever order."""
    return "-".join(cell.digest for cell in sorted(cells, key=lambda cell: cell.target))


def with_ids(cells: list[dict]) -> list[dict]:
    """The cells of a notebook: a code cell whose id an editor has dropped or replaced has that in its nbgrader metadata
    back, if no other cell has it.
    """
    taken, found = {cell.get("id") for cell in cells}, []
    for cell in cells:
        match cell:
            case {"cell_type": "code", "metadata": {"nbgrader": {"grade_id": str(graded)}}} if graded not in taken:
                taken.add(graded)
                cell = {**cell, "id": graded}
        found.append(cell)
    return found


def exercise_cells(notebook: dict, folder: Path | None = None) -> dict[str, list[dict]]:
    """The code cells of each exercise of a notebook, in their order.

    folder: that of the notebook. With it, a copy that a learner has made of an exercise's one cell stands for it if the
    copy is what has passed.
    """
    found: dict[str, list[dict]] = {}
    cells = [cell for cell in with_ids(notebook["cells"]) if cell.get("cell_type") == "code"]
    for cell in cells:
        if name := exercise_of(cell.get("id", "")):
            found.setdefault(name, []).append(cell)
    for name, (own, *more) in found.items() if folder else ():
        passed = state(folder, name, digest_of_cells([own]) or "unreadable") != "changed"
        copies = [] if more or passed else [cell for cell in cells if directive_of(cell) == directive_of(own) != ""]
        for copy in copies:
            if state(folder, name, digest_of_cells([copy]) or "unreadable") == "passes":
                found[name] = [{**copy, "id": own["id"]}]
    return found


def directive_of(cell: dict) -> str:
    """The export directive in the first line of a cell; "" where it has none."""
    first = plain("".join(cell["source"])).split("\n")[0].rstrip()
    return first if EXPORT.match(first) else ""


def digest_of_cells(cells: list[dict]) -> str | None:
    """The digest of an exercise's cells as a notebook holds them; None where one of them cannot be read."""
    sources = [plain("".join(cell["source"])) for cell in cells]
    try:
        exported = [read(source, cell.get("id", "")) for source, cell in zip(sources, cells)]
    except CellError:
        return None
    return exercise_digest(exported) if all(exported) else "-".join(map(digest, sources))


def saved_answers(folder: Path, chapter: str) -> Iterator[tuple[str, list[tuple[str, str]], str]]:
    """The answers of the notebook in a folder whose name begins with `chapter`: exercise, cells, digest.

    A cell is its source and a file name that errors in it show. What cannot be read is left out. Of several notebooks
    (JupyterLab's copies are 04_data_parallel-Copy1.ipynb) it is the one that the course has.
    """
    paths = sorted(folder.glob(f"{chapter}_*.ipynb"))
    of_course = [path for path in paths if (NOTEBOOKS / path.name).exists()]
    paths = of_course if len(paths) > 1 else paths
    if len(paths) != 1:
        return
    try:
        notebook = json.loads(paths[0].read_text(encoding="utf-8"))
        by_exercise = exercise_cells(notebook, folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return
    for exercise, cells in by_exercise.items():
        if found := digest_of_cells(cells):
            yield exercise, [("".join(cell["source"]), f"{paths[0].name}, cell {cell['id']}") for cell in cells], found
