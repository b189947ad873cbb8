"""A teacher's nbgrader takes the notebooks as they are: solved, it gets every point, and blank none. Needs no GPU."""

import json
import os
import sys
from pathlib import Path

import pytest
from traitlets.config import Config

import tiny_course
from exercises import exercise_name, exercises
from make_workbook import blank_notebook
from tiny_course import ROOT, read

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SAWarning")  # nbgrader's own


def up_to_check(number: int, cells: list[dict]) -> list[dict]:
    """The cells that are graded: those up to so many checks, without what only measures and draws."""
    checks = [place for place, cell in enumerate(cells) if exercise_name(cell, "check")][:number]
    return [cell for cell in cells[: checks[-1] + 1] if "measurement" not in cell["metadata"].get("tags", [])]


class Teacher:
    """A teacher's folder with notebooks as an assignment, and nbgrader at its own defaults."""

    def __init__(self, folder: Path, *notebooks: Path):
        from nbgrader.apps import NbGraderAPI  # takes a second: other workers need not import it

        self.folder = folder
        self.api = NbGraderAPI(config=Config({"CourseDirectory": {"root": str(folder), "course_id": "course"}}))
        for path in notebooks:
            self.save(folder / "source" / "unit", path.stem, read(path))
        self.expect_success(self.api.generate_assignment("unit"))
        self.released = {path.stem: read(folder / "release" / "unit" / path.name) for path in notebooks}

    def save(self, folder: Path, name: str, notebook: dict) -> None:
        """Put a notebook where nbgrader looks for it."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.ipynb").write_text(json.dumps(notebook), encoding="utf-8")

    def expect_success(self, result: dict) -> None:
        """Fail with nbgrader's own words where a step failed."""
        assert result["success"], result.get("error") or result.get("log")

    def points(self, student: str, name: str, notebook: dict, checks: int) -> tuple[float, float]:
        """The points of a submission, and how many there are. What stands below so many checks is left out of it."""
        submission = {**notebook, "cells": up_to_check(checks, notebook["cells"])}
        self.save(self.folder / "submitted" / student / "unit", name, submission)
        self.expect_success(self.api.autograde("unit", student))
        with self.api.gradebook as gradebook:
            submission = gradebook.find_submission("unit", student)
            return submission.score, submission.max_score

    def solved(self, path: Path) -> dict:
        """The released notebook with the reference's solutions filled in."""
        solutions = {cell["id"]: cell["source"] for cell in exercises(read(path)).values()}
        released = self.released[path.stem]
        cells = [{**cell, "source": solutions.get(cell["id"], cell["source"])} for cell in released["cells"]]
        return {**released, "cells": cells}

    def failures(self, student: str, name: str) -> list[str]:
        """The cells of a graded notebook that raised or wrote to stderr, with the last line of it."""
        cells = read(self.folder / "autograded" / student / "unit" / f"{name}.ipynb")["cells"]
        outputs = [(cell["id"], output) for cell in cells for output in cell.get("outputs", [])]
        raised = [f"{name}: {output['evalue']}" for name, output in outputs if output["output_type"] == "error"]
        return raised + [f"{name}: {output['text']}" for name, output in outputs if output.get("name") == "stderr"]


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """nbgrader starts `alembic` by its name alone, and kernels need the library."""
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable), prepend=os.pathsep)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", path)


def assert_graded(teacher: Teacher, path: Path, checks: int) -> None:
    """Solved up to so many checks gets a point for each of them, blank gets none."""
    exercises_of_it = len(exercises(read(path)))
    score, most = teacher.points("solved", path.stem, teacher.solved(path), checks)
    assert most == exercises_of_it
    assert score == checks, teacher.failures("solved", path.stem)
    assert teacher.points("blank", path.stem, teacher.released[path.stem], checks) == (0, most)


def test_a_tiny_notebook_is_graded(tmp_path):
    path = tiny_course.write(tmp_path / "01_tiny.ipynb", tiny_course.cells())
    teacher = Teacher(tmp_path, path)
    assert_graded(teacher, path, 3)
    half_done = teacher.solved(path)
    half_done["cells"][3] = teacher.released[path.stem]["cells"][3]
    assert teacher.points("half-done", path.stem, half_done, 3) == (2, 3), "one exercise is blank"


def test_workbooks_hold_the_cells_that_nbgrader_releases(tmp_path):
    def shown(notebook):
        return [(cell["id"], cell["cell_type"], cell["source"], cell["metadata"]) for cell in notebook["cells"]]

    released = Teacher(tmp_path, *NOTEBOOKS).released
    for path in NOTEBOOKS:
        assert shown(released[path.stem]) == shown(blank_notebook(path)), path.stem


def test_a_notebook_of_the_course_is_graded(tmp_path):
    """Two exercises of the first one: that all checks fail on the blank and pass solved is in test_exercises."""
    assert_graded(Teacher(tmp_path, NOTEBOOKS[0]), NOTEBOOKS[0], 2)
