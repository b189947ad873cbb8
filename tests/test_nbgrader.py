"""A teacher's nbgrader takes the notebooks as they are: solved, it gets every point, and blank none. Needs no GPU."""

import json
import os
import sys
from pathlib import Path

import pytest
from nbgrader.apps import NbGraderAPI
from traitlets.config import Config

import tiny_course
from exercises import exercise_name, exercises
from make_workbook import blank_notebook
from tiny_course import ROOT, read

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SAWarning")  # nbgrader's own


def up_to_the_last_check(cells: list[dict]) -> list[dict]:
    """The cells that are graded: what stands below the last check is not, nor what only measures and draws."""
    last = max((number for number, cell in enumerate(cells) if exercise_name(cell, "check")), default=-1)
    return [cell for cell in cells[: last + 1] if "measurement" not in cell["metadata"].get("tags", [])]


class Teacher:
    """A teacher's folder with one notebook as an assignment, and nbgrader at its own defaults."""

    def __init__(self, folder: Path, notebook: Path):
        self.folder, self.name, self.notebook = folder, notebook.stem, read(notebook)
        self.api = NbGraderAPI(config=Config({"CourseDirectory": {"root": str(folder), "course_id": "course"}}))
        self.save(folder / "source" / "unit", self.notebook)
        self.expect_success(self.api.generate_assignment("unit"))
        self.released = read(folder / "release" / "unit" / notebook.name)

    def save(self, folder: Path, notebook: dict) -> None:
        """Put a notebook where nbgrader looks for it."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{self.name}.ipynb").write_text(json.dumps(notebook), encoding="utf-8")

    def expect_success(self, result: dict) -> None:
        """Fail with nbgrader's own words where a step failed."""
        assert result["success"], result.get("error") or result.get("log")

    def points(self, student: str, notebook: dict) -> tuple[float, float]:
        """The points of a submission, and how many there are. What stands below the last check is left out of it."""
        submission = {**notebook, "cells": up_to_the_last_check(notebook["cells"])}
        self.save(self.folder / "submitted" / student / "unit", submission)
        self.expect_success(self.api.autograde("unit", student))
        with self.api.gradebook as gradebook:
            submission = gradebook.find_submission("unit", student)
            return submission.score, submission.max_score

    def solved(self) -> dict:
        """The released notebook with the reference's solutions filled in."""
        solutions = {cell["id"]: cell["source"] for cell in exercises(self.notebook).values()}
        cells = [{**cell, "source": solutions.get(cell["id"], cell["source"])} for cell in self.released["cells"]]
        return {**self.released, "cells": cells}

    def failures(self, student: str) -> list[str]:
        """The cells of a graded notebook that raised or wrote to stderr, with the last line of it."""
        cells = read(self.folder / "autograded" / student / "unit" / f"{self.name}.ipynb")["cells"]
        outputs = [(cell["id"], output) for cell in cells for output in cell.get("outputs", [])]
        raised = [f"{name}: {output['evalue']}" for name, output in outputs if output["output_type"] == "error"]
        return raised + [f"{name}: {output['text']}" for name, output in outputs if output.get("name") == "stderr"]


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """nbgrader starts `alembic` by its name alone, and kernels need the library."""
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable), prepend=os.pathsep)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", path)


def assert_graded(teacher: Teacher, number_of_exercises: int) -> None:
    """Solved gets a point for each exercise, blank gets none."""
    score, most = teacher.points("solved", teacher.solved())
    assert most == number_of_exercises
    assert score == most, teacher.failures("solved")
    assert teacher.points("blank", teacher.released) == (0, most)


def test_a_tiny_notebook_is_graded(tmp_path):
    teacher = Teacher(tmp_path, tiny_course.write(tmp_path / "01_tiny.ipynb", tiny_course.cells()))
    assert_graded(teacher, 3)
    half_done = teacher.solved()
    half_done["cells"][3] = teacher.released["cells"][3]
    assert teacher.points("half-done", half_done) == (2, 3), "one exercise is blank"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_workbook_holds_the_cells_that_nbgrader_releases(path, tmp_path):
    def shown(notebook):
        return [(cell["id"], cell["cell_type"], cell["source"], cell["metadata"]) for cell in notebook["cells"]]

    assert shown(Teacher(tmp_path, path).released) == shown(blank_notebook(path))


@pytest.mark.parametrize("path", NOTEBOOKS[:1], ids=lambda path: path.stem)
def test_the_first_notebook_solved_gets_every_point_and_blank_none(path, tmp_path):
    assert_graded(Teacher(tmp_path, path), len(exercises(read(path))))
