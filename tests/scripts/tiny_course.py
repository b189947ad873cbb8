"""A course of one small notebook, for the tests of the scripts: two functions to write and a number to predict."""

import json
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from clean import notebook_metadata

ROOT = Path(__file__).resolve().parents[2]

EXERCISE = {"grade": False, "locked": False, "schema_version": 3, "solution": True, "task": False}
CHECK = {"grade": True, "locked": True, "points": 1, "schema_version": 3, "solution": False, "task": False}


def text(cell_id: str, source: str, **metadata) -> dict:
    """A markdown cell."""
    return new_markdown_cell(source, id=cell_id, metadata=metadata)


def code(cell_id: str, source: str) -> dict:
    """A code cell; an id `ex-01-2` makes it an exercise, `check-01-2` its check."""
    kind = {"ex": EXERCISE, "check": CHECK}.get(cell_id.split("-")[0])
    return new_code_cell(source, id=cell_id, metadata={"nbgrader": {"grade_id": cell_id, **kind}} if kind else {})


DOUBLE = '''#| export
def double(number):
    """Twice the number."""
    ### BEGIN SOLUTION
    return 2 * number
    ### END SOLUTION'''

HALF = '''#| export
def half(number):
    """Half of the number."""
    ### BEGIN SOLUTION
    return number / 2
    ### END SOLUTION'''


def cells() -> list[dict]:
    """The cells of the tiny notebook, new ones at each call."""
    return [
        text("title", "## 01 · Numbers\n\nTwice and half."),
        code("setup", "#| default_exp tiny\nfrom course_kit.checks import check"),
        text("hint-1", "<details><summary>Hint</summary>\n\nAdd it to itself.\n\n</details>"),
        code("ex-01-1", DOUBLE),
        code(
            "check-01-1",
            'with check("01.1"):\n    assert double(3) == 6, "twice 3 is 6"\n    assert double(4) == 8, "twice 4 is 8"',
        ),
        code("ex-01-2", HALF),
        code(
            "check-01-2",
            'with check("01.2"):\n    ### BEGIN HIDDEN TESTS\n    assert half(9) == 4.5\n'
            '    ### END HIDDEN TESTS\n    assert half(3) == 1.5, "half of 3 has a fraction, 1.5"',
        ),
        code("ex-01-3", "# How many twos make ten?\n### BEGIN SOLUTION\nguess = 5\n### END SOLUTION"),
        code("measure", "measured = len(range(0, 10, 2))\nprint(measured, guess)"),
        code("check-01-3", 'with check("01.3"):\n    assert guess == measured, "count the twos: 2, 4, 6, 8, 10"'),
        text(
            "recap",
            "| method | saves | costs | formula | use when | limit |\n|---|---|---|---|---|---|\n"
            "| doubling | time | nothing | $2n$ | always | memory |",
            tags=["cheatsheet"],
        ),
    ]


def notebook(cells: list[dict]) -> nbformat.NotebookNode:
    """A notebook of these cells, with the metadata that a course notebook has."""
    return new_notebook(cells=cells, metadata=notebook_metadata({"course": {"nproc_per_node": 1}}))


def write(path: Path, cells: list[dict]) -> Path:
    """Write a notebook of these cells to `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(notebook(cells), indent=1) + "\n", encoding="utf-8")
    return path


def read(path: Path) -> dict:
    """The notebook at `path`, each source as one string."""
    found = json.loads(path.read_text(encoding="utf-8"))
    for cell in found["cells"]:
        cell["source"] = "".join(cell["source"])
    return found
