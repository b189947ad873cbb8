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
    """Return the exercise of a cell by its id: "06.2" for ex-06-2, and for ex-06-2b, the exercise's second target."""
    match = CELL_ID.fullmatch(cell_id or "")
    return f"{match['chapter']}.{match['number']}" if match and match["kind"] == kind else None


def exercise_digest(cells: list[ExportedCell]) -> str:
    """Return the digest of an exercise's cells, independent of their order."""
    return "-".join(cell.digest for cell in sorted(cells, key=lambda cell: cell.target))


def with_ids(cells: list[dict]) -> list[dict]:
    """Return the cells of a notebook. A code cell whose id an editor has dropped or replaced gets the id of its
    nbgrader metadata back, unless another cell has that id.
    """
    taken, restored = {cell.get("id") for cell in cells}, []
    for cell in cells:
        match cell:
            case {"cell_type": "code", "metadata": {"nbgrader": {"grade_id": str(graded)}}} if graded not in taken:
                taken.add(graded)
                restored.append({**cell, "id": graded})
            case _:
                restored.append(cell)
    return restored


def exercise_cells(notebook: dict, folder: Path | None = None) -> dict[str, list[dict]]:
    """Return the code cells of each exercise of a notebook, in their order.

    folder: the folder of the notebook. If it is given, a learner's copy of an exercise's only cell replaces the cell if
    it is the copy that has passed.
    """
    by_exercise: dict[str, list[dict]] = {}
    cells = [cell for cell in with_ids(notebook["cells"]) if cell.get("cell_type") == "code"]
    for cell in cells:
        if name := exercise_of(cell.get("id", "")):
            by_exercise.setdefault(name, []).append(cell)
    if folder is None:
        return by_exercise
    for name, (first, *others) in by_exercise.items():
        passed = state(folder, name, digest_of_cells([first]) or "unreadable") != "changed"
        copies = [] if others or passed else [cell for cell in cells if directive_of(cell) == directive_of(first) != ""]
        for copy in copies:
            if state(folder, name, digest_of_cells([copy]) or "unreadable") == "passes":
                by_exercise[name] = [{**copy, "id": first["id"]}]
    return by_exercise


def directive_of(cell: dict) -> str:
    """Return the export directive in the first line of a cell; "" if there is none."""
    line = plain("".join(cell["source"])).split("\n")[0].rstrip()
    return line if EXPORT.match(line) else ""


def digest_of_cells(cells: list[dict]) -> str | None:
    """Return the digest of an exercise's cells in a notebook; None if one of the cells cannot be read."""
    sources = [plain("".join(cell["source"])) for cell in cells]
    try:
        read_cells = [read(source, cell.get("id", "")) for source, cell in zip(sources, cells, strict=True)]
    except CellError:
        return None
    exported = [cell for cell in read_cells if cell is not None]
    return exercise_digest(exported) if len(exported) == len(cells) else "-".join(map(digest, sources))


def saved_answers(folder: Path, chapter: str) -> Iterator[tuple[str, list[tuple[str, str]], str]]:
    """Yield the answers of the notebook in a folder whose name begins with `chapter`: exercise, cells, digest.

    A cell is its source and the file name that its errors show. Unreadable notebooks and cells are left out. Among
    several notebooks (JupyterLab names copies 04_data_parallel-Copy1.ipynb) the course's own name counts.
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
        if answer_digest := digest_of_cells(cells):
            yield (
                exercise,
                [("".join(cell["source"]), f"{paths[0].name}, cell {cell['id']}") for cell in cells],
                answer_digest,
            )
