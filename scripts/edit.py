"""Edit a notebook as text instead of raw JSON.

    python scripts/edit.py text notebooks/01_single_gpu.ipynb > draft.py        # the notebook as text
    python scripts/edit.py notebook draft.py notebooks/01_single_gpu.ipynb      # the text as notebook

The text is jupytext's percent format. A cell's header holds its id, tags and nbgrader metadata:

    # %% id="mfu-plot" tags=["cheatsheet"]
    # %% [markdown] id="title"

An id `ex-01-2` makes a code cell an exercise and `check-01-2` its check: their nbgrader metadata follows from the id
and is in the text only if it differs. A cell without an id is given one. A cell, by its id, keeps its outputs as long
as its source is the same.
The notebook's metadata (its kernel) is kept; only `course` is in the text, as a header, and can be changed there. A
line of a cell that looks like a header is escaped with a backslash: `# \%%`.
"""

import re
import sys
from pathlib import Path

import jupytext
import nbformat

from clean import notebook_metadata
from course_kit.exercises.saved import CELL_ID
from export import ExportError, read_notebook, write_atomically

FORMAT = {"extension": ".py", "format_name": "percent", "comment_magics": False}
HEADER = r"%%|<codecell>|In\[[0-9 ]*\]"  # where a line of a comment begins so, jupytext begins a cell
FILTERS = {"cell_metadata_filter": "all", "notebook_metadata_filter": "course,-all"}


def nbgrader_metadata(cell: dict) -> dict | None:
    """Return nbgrader's metadata of an exercise (`ex-NN-M`, or its second cell, `ex-NN-Mb`) or a check (`check-NN-M`);
    None for any other cell.
    """
    kind = CELL_ID.fullmatch(cell["id"])
    if not kind or cell["cell_type"] != "code":
        return None
    exercise = kind["kind"] == "ex"
    points = {} if exercise else {"points": 1}
    return {
        "grade": not exercise,
        "grade_id": cell["id"],
        "locked": not exercise,
        **points,
        "schema_version": 3,
        "solution": exercise,
        "task": False,
    }


def escaped(cell: dict, back: bool = False) -> str:
    """Return a cell's source with header-like lines escaped by a backslash; back: unescaped."""
    comment = r"#[ \t]*" if cell["cell_type"] == "code" else ""  # other cells become comments as a whole
    drop, add = (r"\\", "") if back else ("", r"\\")
    return re.sub(rf"^([ \t]*{comment}){drop}(\\*(?:{HEADER}))", rf"\1{add}\2", cell["source"], flags=re.MULTILINE)


def alike(one: str, other: str) -> bool:
    """Return whether two sources are equal except for empty lines at their ends, which the text drops."""
    return one.rstrip("\n") == other.rstrip("\n")


def read(path: Path) -> nbformat.NotebookNode:
    """Return the notebook at `path`. Raises ExportError, with one line, if it is not a notebook."""
    read_notebook(path)
    return nbformat.read(path, as_version=4)


def to_text(notebook: nbformat.NotebookNode) -> str:
    """Return the notebook as text. Raises ValueError, naming the cell, if a cell would not survive the round trip."""
    course = {key: value for key, value in notebook.metadata.items() if key == "course"}
    draft = nbformat.v4.new_notebook(metadata={**course, "jupytext": FILTERS})
    for cell in notebook.cells:
        copy = nbformat.from_dict({**cell, "metadata": {"id": cell["id"], **cell.metadata}})
        if copy.metadata.get("nbgrader") == nbgrader_metadata(cell):
            copy.metadata.pop("nbgrader", None)
        copy.source = escaped(cell)
        draft.cells.append(copy)
    text = jupytext.writes(draft, fmt=FORMAT)
    back = jupytext.reads(text, fmt=FORMAT).cells
    for number, cell in enumerate(notebook.cells):
        if number >= len(back) or not alike(cell.source, escaped(back[number], back=True)):
            raise ValueError(f"cell {number + 1} ({cell.id}) does not fit into text")
    return text


def to_notebook(text: str, old: nbformat.NotebookNode | None = None) -> nbformat.NotebookNode:
    """Return the text as a notebook that replaces `old`. Raises ValueError, in a line, for a malformed cell header."""
    notebook = jupytext.reads(text, fmt=FORMAT)
    course = {key: value for key, value in notebook.metadata.items() if key == "course"}
    notebook.metadata = nbformat.from_dict({**notebook_metadata(old.metadata if old else {}), **course})
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    before = {cell["id"]: cell for cell in old.cells} if old else {}
    seen = {}
    for number, cell in enumerate(notebook.cells, start=1):
        if "title" in cell.metadata:
            raise ValueError(f"cell {number}: '{cell.metadata.title}' in its header is not of the form name=value")
        cell["id"] = str(cell.metadata.pop("id", cell["id"]))
        if not re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", cell["id"]):
            raise ValueError(f"cell {number}: '{cell['id']}' is no cell id: 1 to 64 letters, digits, - and _")
        if cell["id"] in seen:
            raise ValueError(f"cells {seen[cell['id']]} and {number} have the same id, {cell['id']}")
        seen[cell["id"]] = number
        cell.metadata.pop("lines_to_next_cell", None)
        cell["source"] = escaped(cell, back=True)
        if "nbgrader" not in cell.metadata and (metadata := nbgrader_metadata(cell)):
            cell.metadata["nbgrader"] = nbformat.from_dict(metadata)
        was = before.get(cell["id"])
        if was and was["cell_type"] == cell["cell_type"] and alike(was["source"], cell["source"]):
            cell.update({key: value for key, value in was.items() if key != "metadata"})
        elif was and "attachments" in was:
            cell["attachments"] = was["attachments"]
    nbformat.validate(notebook)
    return notebook


def main(argv: list[str]) -> int:
    """Run one of the two commands above. Returns 0, 1 after printing why it failed, or 2 for a wrong command line."""
    try:
        match argv:
            case ["text", source]:
                sys.stdout.write(to_text(read(Path(source))))
            case ["notebook", source, target]:
                target = Path(target)
                old = read(target) if target.exists() else None
                notebook = to_notebook(Path(source).read_text(encoding="utf-8"), old)
                write_atomically(target, nbformat.writes(notebook) + "\n")
            case _:
                print("usage: python scripts/edit.py text NOTEBOOK | notebook TEXT NOTEBOOK", file=sys.stderr)
                return 2
    except (ExportError, OSError, ValueError, nbformat.ValidationError) as error:
        print("edit:", *str(error).splitlines()[:1], file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
