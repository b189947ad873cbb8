"""The exercises of the notebooks: a solution, or how far a learner has come.

    python scripts/exercises.py solution 01.3    # the reference's solution of exercise 01.3
    python scripts/exercises.py progress         # what passes, fails, or was not tried yet

A check notes its result in `.progress/` beside the learner's notebook; nothing leaves the machine.
"""

import json
import re
import sys
from pathlib import Path

from export import NOTEBOOKS, ROOT, ExportError, kept_lines, read_notebook

PROGRESS = ROOT / "workbook" / ".progress"
CELL_ID = re.compile(r"(ex|check)-(\d\d)-(\d+)")
STARRED = re.compile(r"^### Exercise (\d\d\.\d+) .*\n\*★", re.MULTILINE)  # those of the short path
STATES = "passes", "fails", "not tried"
BLANK = "raise NotImplementedError()"  # nbgrader's, in an exercise that has no answer yet


def exercise_name(cell: dict, kind: str) -> str | None:
    """The name, such as "01.3", of the exercise that a cell is ("ex") or checks ("check"); None for another cell."""
    found = CELL_ID.fullmatch(cell.get("id", ""))
    return f"{found[2]}.{found[3]}" if found and found[1] == kind and cell["cell_type"] == "code" else None


def exercises(notebook: dict) -> dict[str, dict]:
    """The exercise cells of a notebook by name, in their order."""
    names = [(exercise_name(cell, "ex"), cell) for cell in notebook["cells"]]
    return {name: cell for name, cell in names if name}


def starred(notebook: dict) -> set[str]:
    """The names of the exercises on the short path."""
    texts = ("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "markdown")
    return {name for text in texts for name in STARRED.findall(text)}


def solution(name: str, notebooks: Path) -> str:
    """The reference's cell for the exercise `name`, without markers. ExportError with one line where there is none."""
    if not re.fullmatch(r"\d\d\.\d+", name):
        raise ExportError(f"'{name}' is no exercise; name it as its heading does, such as 01.3")
    paths, others = sorted(notebooks.glob(f"{name[:2]}*_*.ipynb")), []  # a chapter may have two parts
    for path in paths:
        found = exercises(read_notebook(path))
        if name in found:
            code = "\n".join(text for _, text in kept_lines(found[name]["source"]))
            return f"# Exercise {name}, from {path.name}, cell {found[name]['id']}\n{code}\n"
        others += found
    if not paths:
        raise ExportError(f"there is no notebook {name[:2]} in {notebooks}")
    names = " and ".join(path.name for path in paths)
    raise ExportError(f"there is no exercise {name} in {names}, but there are {' '.join(others) or 'none'}")


def blank_again(path: Path) -> set[str]:
    """The exercises of a workbook's notebook whose cells are blank: what a check noted of an earlier answer is over."""
    try:
        return {name for name, cell in exercises(read_notebook(path)).items() if BLANK in cell["source"]}
    except (OSError, ValueError, ExportError):  # there is none, or it is not readable
        return set()


def state(name: str, folder: Path) -> str:
    """What the last run of an exercise's check noted in `folder`: one of STATES."""
    try:
        return "passes" if json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))["passed"] else "fails"
    except (OSError, ValueError, KeyError, TypeError):
        return "not tried"


def progress(notebooks: Path, folder: Path) -> str:
    """For each notebook, how many exercises pass, and the names of those in each state; ★: on the short path."""
    lines = []
    for path in sorted(notebooks.glob("*.ipynb")):
        names = {kind: [] for kind in STATES}
        notebook = read_notebook(path)
        short, blank = starred(notebook), blank_again(folder.parent / path.name)
        for name in exercises(notebook):
            found = "not tried" if name in blank else state(name, folder)
            names[found].append(f"{name}★" if name in short else name)
        lines.append(f"{path.stem}: {len(names['passes'])} of {sum(map(len, names.values()))} exercises pass")
        lines += [f"  {kind:9}  {' '.join(names[kind])}" for kind in STATES if names[kind]]
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    """Print what was asked for. 0: printed; 2: not, one line says why."""
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
