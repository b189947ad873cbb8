"""Fold the cells of a notebook that a reader can leave closed and still follow: python scripts/fold.py NOTEBOOK ...

Of a folded cell JupyterLab shows the first line and what it printed or drew (`jupyter.source_hidden`); the tag
`hide-input` says the same to Sphinx. Folded are, by rule and never by hand: set-up, checks and what they need, given
code (it goes to course_lib, or begins with `# Given:`), widgets (`# Widget:`), code of figures that is longer than
FIGURE_LINES, and any cell longer than LONGEST. Open are all text, all exercises, the few lines that call what was
built, and cells tagged `show-input`: code that the text asks to be read. `make render` and scripts/edit.py fold, too.
"""

import re
import sys
from pathlib import Path

import nbformat

from export import ExportError, read_notebook, write_atomically

TAG, OPEN = "hide-input", "show-input"
FIGURE_LINES = 6
LONGEST = 40


def is_folded(cell: nbformat.NotebookNode) -> bool:
    """Whether the rule folds this cell."""
    if cell["cell_type"] == "markdown" or re.match(r"ex-\d\d-\d+$", cell["id"]):
        return False
    if OPEN in cell["metadata"].get("tags", []):
        return False
    if cell["cell_type"] == "raw" or cell["source"].lstrip().startswith("#| export"):
        return True
    if re.match(r"setup|check-|tools-|watch-", cell["id"]) or cell["source"].startswith(("# Given:", "# Widget:")):
        return True
    lines = len(cell["source"].splitlines())
    draws = any("image/png" in output.get("data", {}) for output in cell["outputs"])
    return lines > LONGEST or draws and lines > FIGURE_LINES


def mark(cell: nbformat.NotebookNode, folded: bool) -> None:
    """Fold the cell, or unfold it, in place. All its other metadata stays."""
    tags = [tag for tag in cell["metadata"].get("tags", []) if tag != TAG] + [TAG] * folded
    view = {key: value for key, value in cell["metadata"].get("jupyter", {}).items() if key != "source_hidden"}
    for key, value in (("tags", tags), ("jupyter", view | ({"source_hidden": True} if folded else {}))):
        cell["metadata"].pop(key, None)
        if value:
            cell["metadata"][key] = nbformat.from_dict(value)


def fold(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Fold and unfold the notebook's cells by the rule, in place; returns it."""
    for cell in notebook["cells"]:
        mark(cell, is_folded(cell))
    return notebook


def main(paths: list[str]) -> int:
    """Fold each notebook; 1 where one can't be read."""
    try:
        for path in map(Path, paths):
            read_notebook(path)
            write_atomically(path, nbformat.writes(fold(nbformat.read(path, as_version=4))) + "\n")
    except ExportError as error:
        print(f"fold: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
