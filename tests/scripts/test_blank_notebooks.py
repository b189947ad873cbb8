"""Every notebook as a learner gets it, run from top to bottom: only checks and blank values fail, each with advice.

Takes as long as the notebooks themselves: `make nightly`, once a night in CI. Needs no GPU.
"""

import os

import nbformat
import pytest
from nbclient import NotebookClient

from course_kit.exercises.cells import BLANK
from course_kit.local_kernel import LocalKernelManager
from exercises import exercise_name
from make_workbook import GOES_ON, blank_notebook
from tiny_course import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
CELL_LIMIT_S = 600
pytestmark = pytest.mark.nightly


def failure(cell: dict) -> str | None:
    """The error among the outputs of a cell, as "CheckFailed: Exercise 04.6 is ..."."""
    found = [each for each in cell.get("outputs", []) if each["output_type"] == "error"]
    return f"{found[0]['ename']}: {found[0]['evalue']}" if found else None


def is_as_expected(cell: dict, error: str | None) -> bool:
    """Whether a cell ends as it should while all exercises are blank: a check with advice, a value perhaps blank."""
    if name := exercise_name(cell, "check"):
        return error is not None and error.startswith(f"CheckFailed: Exercise {name}")
    may_be_blank = GOES_ON in cell["metadata"].get("tags", [])  # a function raises when it is called
    return error is None or may_be_blank and error.startswith("NotImplementedError")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_blank_notebook_runs_to_its_end(path, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    (tmp_path / "workbook").mkdir()
    for name in ("data", "benchmarks"):
        (tmp_path / name).symlink_to(ROOT / name)
    notebook = nbformat.from_dict(blank_notebook(path))
    resources = {"metadata": {"path": str(tmp_path / "workbook")}}
    how = {"kernel_manager_class": LocalKernelManager, "kernel_name": "python3", "timeout": CELL_LIMIT_S}
    NotebookClient(notebook, resources=resources, **how).execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert any(BLANK.search(cell.source) for cell in cells)
    for cell in cells:
        assert is_as_expected(cell, failure(cell)), f"{cell.id}: {failure(cell)}"
