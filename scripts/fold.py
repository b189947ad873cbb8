"""Fold the cells of a notebook that a reader can leave closed and still follow: python scripts/fold.py NOTEBOOK ...

Of a folded cell JupyterLab shows the first line and what it printed or drew (`jupyter.source_hidden`); the tag
`hide-input` says the same to Sphinx. So the first line says what the cell is; where it is a directive, the names that
the cell makes are put behind it here. Folded are, by rule and never by hand: set-up, checks and what they need, given
code (it goes to course_lib, or begins with `# Given:`), widgets (`# Widget:`), code of figures that is longer than
FIGURE_LINES, and any cell longer than LONGEST. Open are all text, all exercises, the few lines that call what was
built, and cells tagged `show-input`: code that the text asks to be read. `make render` and scripts/edit.py fold, too.

In a notebook of the new shape (its metadata name a program) nothing but long code that draws is folded, and nothing is
put behind a directive.
"""

import ast
import re
import sys
from pathlib import Path

import nbformat

from course_kit.exercises.saved import exercise_of
from export import DIRECTIVE, ExportError, plain_directives, program_of, read_notebook, write_atomically

TAG, OPEN = "hide-input", "show-input"
FIGURE_LINES = 6
LONGEST = 40
WIDTH = 120


def is_folded(cell: nbformat.NotebookNode, new_shape: bool = False) -> bool:
    """Whether the rule folds this cell."""
    if cell["cell_type"] == "markdown" or exercise_of(cell["id"]):
        return False
    if OPEN in cell["metadata"].get("tags", []):
        return False
    if new_shape:
        return is_long_drawing(cell)
    if cell["cell_type"] == "raw" or cell["source"].lstrip().startswith("#| export"):
        return True
    if re.match(r"setup|check-|tools-|watch-", cell["id"]) or cell["source"].startswith(("# Given:", "# Widget:")):
        return True
    lines = len(cell["source"].splitlines())
    return lines > LONGEST or draws(cell) and lines > FIGURE_LINES


def draws(cell: nbformat.NotebookNode) -> bool:
    """Whether a picture is among the cell's outputs."""
    return any("image/png" in output.get("data", {}) for output in cell.get("outputs", []))


def is_long_drawing(cell: nbformat.NotebookNode) -> bool:
    """Whether a cell has many lines and draws: a figure, a widget (whose view is not kept), a measured picture."""
    if cell["cell_type"] != "code" or DIRECTIVE.match(cell["source"].split("\n")[0]):
        return False
    named = cell["source"].startswith(("# Figure", "# Widget"))
    return (named or draws(cell)) and len(cell["source"].splitlines()) > FIGURE_LINES


def says(source: str) -> str:
    """What an exported cell holds, in a few words: the names that it makes, or a docstring's first line, or imports."""
    try:
        body = ast.parse(source).body
    except SyntaxError:
        return ""
    names = [node.name for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    for node in body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names += [each.id for target in targets if target for each in ast.walk(target) if isinstance(each, ast.Name)]
    if names:
        return ", ".join(name for name in dict.fromkeys(names) if name not in ("_all_", "__all__")) or "public names"
    if text := ast.get_docstring(ast.Module(body, [])):
        return text.splitlines()[0]
    return "imports" if body else ""


def label(cell: nbformat.NotebookNode, folded: bool) -> None:
    """Let the first line of a folded cell that begins with a directive say what the cell holds; else, nothing."""
    first, *rest = plain_directives(cell["source"]).split("\n")
    if not DIRECTIVE.match(first) or cell["cell_type"] == "markdown":
        return
    words = "set-up" if cell["id"].startswith("setup") else says("\n".join(rest))
    if folded and words:
        first += f"  # {words}"
        first = first if len(first) <= WIDTH else first[: WIDTH - 2].rpartition(" ")[0].rstrip(",") + " …"
    cell["source"] = "\n".join([first, *rest])


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
    new_shape = program_of(notebook) is not None
    for cell in notebook["cells"]:
        folded = is_folded(cell, new_shape)
        mark(cell, folded)
        if not new_shape:
            label(cell, folded)
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
