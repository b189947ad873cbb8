"""Show the solution of an exercise, or a learner's progress.

    python scripts/exercises.py solution 01.3    # the reference's solution of exercise 01.3
    python scripts/exercises.py progress         # exercises passed, failed, changed since they passed, or not tried yet

A check records its result in `.progress/` beside the learner's notebook; nothing leaves the machine.
"""

import re
import sys
from pathlib import Path

from course_kit.exercises import notes
from course_kit.exercises.cells import MARKER
from course_kit.exercises.saved import digest_of_cells, exercise_cells, exercise_of
from export import NOTEBOOKS, ROOT, ExportError, read_notebook

PROGRESS = ROOT / "workbook" / notes.FOLDER
STARRED = re.compile(r"^### Exercise (\d\d\.\d+) .*\n\*★", re.MULTILINE)  # the short path
BLANK = "raise NotImplementedError()"  # nbgrader's, in an exercise that has no answer yet


def exercise_name(cell: dict, kind: str) -> str | None:
    """Return the name, such as "01.3", of the exercise that a cell is ("ex") or checks ("check"), or None."""
    return exercise_of(cell.get("id", ""), kind) if cell["cell_type"] == "code" else None


def exercises(notebook: dict) -> dict[str, dict]:
    """Return a notebook's exercises by name, in order; for one in two cells (ex-06-2, ex-06-2b), the first cell."""
    return {name: cells[0] for name, cells in exercise_cells(notebook).items()}


def starred(notebook: dict) -> set[str]:
    """Return the names of the exercises on the short path."""
    texts = ("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "markdown")
    return {name for text in texts for name in STARRED.findall(text)}


def solution(name: str, notebooks: Path) -> str:
    """Return the reference's cells of an exercise, without markers. Raises ExportError, in a line, if it has none."""
    if not re.fullmatch(r"\d\d\.\d+", name):
        raise ExportError(f"'{name}' is no exercise; name it as its heading does, such as 01.3")
    paths, others = sorted(notebooks.glob(f"{name[:2]}*_*.ipynb")), []  # a chapter may have two parts
    for path in paths:
        notebook = read_notebook(path)
        cells = exercise_cells(notebook)
        if name in cells:
            return "\n\n".join(answer(name, path, cell) for cell in cells[name])
        others += cells
    if not paths:
        raise ExportError(f"there is no notebook {name[:2]} in {notebooks}")
    names = " and ".join(path.name for path in paths)
    raise ExportError(f"there is no exercise {name} in {names}, but there are {' '.join(others) or 'none'}")


def answer(name: str, path: Path, cell: dict) -> str:
    """Return a cell of a solution and its location. A directive stays its first line."""
    code = [line for line in cell["source"].split("\n") if not MARKER.match(line)]
    directive = [code.pop(0)] if code[0].startswith("#|") else []
    return "\n".join([*directive, f"# Exercise {name}, from {path.name}, cell {cell['id']}", *code, ""])


def learners_exercises(path: Path) -> dict[str, list[dict]]:
    """Return the exercise cells of a workbook's notebook by exercise; empty if it is missing or not readable."""
    try:
        return exercise_cells(read_notebook(path), path.parent)
    except (AttributeError, ExportError, OSError, TypeError, ValueError):
        return {}


def state(name: str, cells: list[dict], folder: Path) -> str:
    """Return the state of an exercise with these cells of a notebook in `folder`: one of notes.STATES."""
    if any(BLANK in cell["source"] for cell in cells):
        return "not tried"  # an earlier answer's result no longer holds
    return notes.state(folder, name, digest_of_cells(cells) or "unreadable")


def progress(notebooks: Path, folder: Path) -> str:
    """Return, per notebook, how many exercises pass and their names by state; ★: on the short path.

    folder: of the notes, beside the learner's notebooks.
    """
    lines = []
    for path in sorted(notebooks.glob("*.ipynb")):
        names = {kind: [] for kind in notes.STATES}
        notebook = read_notebook(path)
        short, mine = starred(notebook), learners_exercises(folder.parent / path.name)
        for name in exercises(notebook):
            cells = state(name, mine.get(name, []), folder.parent)
            names[cells].append(f"{name}★" if name in short else name)
        lines.append(f"{path.stem}: {len(names['passes'])} of {sum(map(len, names.values()))} exercises pass")
        hints = {"changed": " (since they passed: run their cells and checks again)"}
        lines += [f"  {kind:9}  {' '.join(names[kind])}{hints.get(kind, '')}" for kind in notes.STATES if names[kind]]
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    """Print the solution or the progress. Returns 0, or 2 after printing why not."""
    try:
        match sys.argv[1:] if argv is None else argv:
            case ["solution", name]:
                sys.stdout.write(solution(name, NOTEBOOKS))
            case ["progress"]:
                sys.stdout.write(progress(NOTEBOOKS, PROGRESS))
            case _:
                print("usage: make solution EX=01.3, or make progress", file=sys.stderr)
                return 2
    except ExportError as error:
        print(f"exercises: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
