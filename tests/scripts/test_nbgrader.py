"""nbgrader releases and grades what `make course` writes: who solves a part gets the points of that part. Needs no GPU.

Whole notebooks are graded, without the cells that no check depends on: a submission may lack them.
"""

import collections
import json
import os
import re
import sys
import time
from pathlib import Path

import psutil
import pytest
from nbformat.v4 import new_notebook
from nbgrader.preprocessors import Execute

import tiny_course
from course_kit.checks.grading import RunEveryCell
from course_kit.exercises.saved import exercise_cells
from exercises import BLANK, exercise_name, exercises
from make_course import make_course, nbgrader_at
from make_workbook import GOES_ON, blank_notebook
from needed_cells import needed_cells
from tiny_course import NEW, ROOT, read, text

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
WITH_RANKS = "14b_fp8"  # the cheapest one
LEFT_S = 60  # at most, until the ranks of a graded notebook have ended
DIES = "#| export tiny.numbers\nimport os\ndef double(number):\n    os._exit(1)"
HANGS = """#| export tiny.numbers
import time
def half(number):
    while True:
        try:
            time.sleep(3600)
        except KeyboardInterrupt:
            pass"""
WARNS = """#| export tiny.numbers
import sys
def double(number):
    print("close to overflow", file=sys.stderr)
    return number * 2"""
pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SAWarning")  # nbgrader's own


@pytest.fixture(scope="module", autouse=True)
def environment(tmp_path_factory):
    """nbgrader starts `alembic` by its name alone; kernels need the library, and keep to a folder of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", os.path.dirname(sys.executable), prepend=os.pathsep)
        patch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("of-kernels")))
        yield


class Course:
    """A course in a folder, and its teacher's nbgrader."""

    def __init__(self, notebooks: Path, folder: Path, settings: str = ""):
        self.folder = folder
        list(make_course(notebooks, folder))
        with open(folder / "nbgrader_config.py", "a", encoding="utf-8") as config:
            config.write(settings)
        self.nbgrader = nbgrader_at(folder)

    def released(self, name: str) -> dict:
        """What nbgrader hands out."""
        return read(self.folder / "release" / name / f"{name}.ipynb")

    def answered(self, name: str, answers: dict[str, str]) -> dict:
        """The released notebook with the sources of some of its cells, by id."""
        released = self.released(name)
        cells = [{**cell, "source": answers.get(cell["id"], cell["source"])} for cell in released["cells"]]
        return {**released, "cells": cells}

    def solutions(self, name: str) -> dict[str, str]:
        """The reference's exercises, by cell id and in their order."""
        source = read(self.folder / "source" / name / f"{name}.ipynb")
        return {cell["id"]: cell["source"] for cells in exercise_cells(source).values() for cell in cells}

    def points(self, name: str, submissions: dict[str, dict]) -> dict[str, dict[str, float]]:
        """What nbgrader gives each student's notebook, by check."""
        found = {}
        for student, notebook in submissions.items():
            folder = self.folder / "submitted" / student / name
            folder.mkdir(parents=True)
            (folder / f"{name}.ipynb").write_text(json.dumps(notebook), encoding="utf-8")
            result = self.nbgrader.autograde(name, student)
            assert result["success"], result.get("error") or result.get("log")
            with self.nbgrader.gradebook as gradebook:
                (graded,) = gradebook.find_submission(name, student).notebooks
                found[student] = {grade.name: grade.score for grade in graded.grades}
        return found

    def failures(self, name: str, student: str) -> list[str]:
        """The errors in a graded notebook, by cell."""
        graded = read(self.folder / "autograded" / student / name / f"{name}.ipynb")
        outputs = [(cell["id"], output) for cell in graded["cells"] for output in cell.get("outputs", [])]
        return [f"{name}: {output['evalue']}" for name, output in outputs if output["output_type"] == "error"]


def worth(notebook: dict) -> dict[str, int]:
    """The points of each check."""
    checks = [cell for cell in notebook["cells"] if exercise_name(cell, "check")]
    return {cell["id"]: cell["metadata"]["nbgrader"]["points"] for cell in checks}


def without_needless_cells(notebook: dict) -> dict:
    """A notebook without the cells that no exercise and no check depends on."""
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    sources = [cell["source"] for cell in cells]
    asked = [place for place, cell in enumerate(cells) if exercise_name(cell, "ex") or exercise_name(cell, "check")]
    needed = [needed_cells(sources, place, {}) for place in asked]
    return {**notebook, "cells": [cells[place] for place in sorted(set().union(*needed))]}


def left_processes() -> list[list[str]]:
    """The processes that kernels of this module have left, after a while for them to end."""
    deadline = time.monotonic() + LEFT_S
    while True:
        every = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
        left = [command for command in every if os.environ["TMPDIR"] in " ".join(command)]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.2)


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    """The course that `make course` writes."""
    return Course(ROOT / "notebooks", tmp_path_factory.mktemp("course"))


def test_points_are_the_difficulty_that_stands_above_an_exercise(course):
    for path in NOTEBOOKS:
        notebook = read(path)
        prose = "\n".join(cell["source"] for cell in notebook["cells"] if cell["cell_type"] == "markdown")
        said = dict(re.findall(r"(?ms)^### Exercise (\d\d\.\d+) .*?^\*[^\n]*?Difficulty (\d) of 5", prose))
        expected = {f"check-{name.replace('.', '-')}": int(said[name]) for name in exercises(notebook)}
        assert worth(course.released(path.stem)) == expected, path.stem


def test_a_release_shows_no_solution(course):
    """Each line of a released cell stands in the reference outside its solutions, and there is no output at all."""
    for path in NOTEBOOKS:
        shown = collections.Counter()
        for cell in read(path)["cells"]:
            source = re.sub(r"(?ms)^\s*### BEGIN (SOLUTION|HIDDEN TESTS)$.*?^\s*### END \1$", "", cell["source"])
            shown.update(source.splitlines())
        cells = course.released(path.stem)["cells"]
        added = collections.Counter(line for cell in cells for line in cell["source"].splitlines()) - shown
        assert {line.strip() for line in added} == {"# YOUR CODE HERE", BLANK}, path.stem
        assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells), path.stem
        every = [cell for found in exercise_cells({"cells": cells}).values() for cell in found]
        assert all(BLANK in cell["source"] for cell in every), path.stem


def test_a_learner_cannot_edit_the_checks_of_a_release(course):
    for path in NOTEBOOKS:
        checks = [cell["metadata"] for cell in course.released(path.stem)["cells"] if exercise_name(cell, "check")]
        assert all(not (one["editable"] or one["deletable"]) and one["nbgrader"]["locked"] for one in checks), path.stem


def test_workbooks_hold_the_cells_that_nbgrader_releases(course):
    def without_points(metadata):  # which are part of the checksum; nor the tag by which Run All goes on in a workbook
        tags = [tag for tag in metadata.get("tags", []) if tag != GOES_ON]
        nbgrader = {**metadata.get("nbgrader", {}), "points": None, "checksum": None}
        return {**metadata, "tags": tags, "nbgrader": nbgrader}

    def shown(notebook):
        cells = notebook["cells"]
        return [(one["id"], one["cell_type"], one["source"], without_points(one["metadata"])) for one in cells]

    for path in NOTEBOOKS:
        assert shown(course.released(path.stem)) == shown(blank_notebook(path)), path.stem


@pytest.mark.parametrize("name", ["01_single_gpu", WITH_RANKS])
def test_who_solves_a_part_gets_the_points_of_that_part(course, name):
    solutions = course.solutions(name)
    first_half = dict(list(solutions.items())[: len(solutions) // 2])
    submissions = {"solved": solutions, "blank": {}, "half": first_half}
    points = course.points(
        name, {student: without_needless_cells(course.answered(name, given)) for student, given in submissions.items()}
    )
    for student, given in submissions.items():
        every = worth(course.released(name))
        expected = {check: points if check.replace("check", "ex") in given else 0 for check, points in every.items()}
        assert points[student] == expected, course.failures(name, student)
    assert left_processes() == []


def test_what_one_exercise_does_costs_no_points_of_another(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    tiny_course.write_library(tmp_path)
    tiny_course.write_kit(tmp_path)
    cells = tiny_course.cells()
    parts = [f"### Exercise 01.{number} · a name\n*Difficulty {number} of 5 · 2 minutes*\n" for number in (1, 2, 3)]
    tiny_course.write(tmp_path / "notebooks" / "01_tiny.ipynb", [text("headings", "\n".join(parts)), *cells])
    course = Course(tmp_path / "notebooks", tmp_path / "course", "\nc.Execute.timeout = 10\n")
    solutions = course.solutions("01_tiny")
    unchecked = course.answered("01_tiny", solutions | {"ex-01-1": WARNS, "ex-01-3": "guess = 4"})
    for cell in unchecked["cells"]:
        if exercise_name(cell, "check"):
            cell["metadata"]["tags"] = ["measurement"]
    submissions = {
        "dies-and-hangs": course.answered("01_tiny", solutions | {"ex-01-1": DIES, "ex-01-2": HANGS}),
        "warns-quits-and-skips-checks": unchecked,
    }
    assert course.points("01_tiny", submissions) == {
        "dies-and-hangs": {"check-01-1": 0, "check-01-2": 0, "check-01-3": 3},
        "warns-quits-and-skips-checks": {"check-01-1": 1, "check-01-2": 2, "check-01-3": 0},
    }


def test_blank_and_broken_answers_cost_their_own_points_alone(tmp_path, monkeypatch):
    """Blank and broken answers, one that ends the kernel, and checks of a workbook, whose failures are let by, take no
    points from others: the reference stands for them.
    """
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    tiny_course.write_library(tmp_path)
    tiny_course.write_kit(tmp_path)
    tiny_course.write(tmp_path / "notebooks" / f"{NEW}.ipynb", tiny_course.new_cells(), tiny_course.PROGRAM)
    course = Course(tmp_path / "notebooks", tmp_path / "course")
    released = course.released(NEW)
    assert worth(released) == {"check-02-1": 1, "check-02-2": 2, "check-02-3": 3, "check-02-4": 4}
    assert not any(GOES_ON in cell["metadata"].get("tags", []) for cell in released["cells"])
    solutions = course.solutions(NEW)
    assert [*solutions] == ["ex-02-1", "ex-02-2", "ex-02-3", "ex-02-3b", "ex-02-4"]
    wrong = {
        "ex-02-1": "#| export counters.numbers\ndef square(number\n",
        "ex-02-2": "#| export counters.counter:Counter\ndef add(self: Counter, n):\n    import os\n    os._exit(1)",
        "ex-02-4": "# YOUR CODE HERE\nraise NotImplementedError()",
    }
    of_workbook = course.answered(NEW, solutions | wrong)
    for cell in of_workbook["cells"]:
        if exercise_name(cell, "check"):
            cell["metadata"]["tags"] = [GOES_ON]
    submissions = {
        "solved": course.answered(NEW, solutions),
        "blank": course.answered(NEW, {}),
        "wrong": of_workbook,
    }
    points = course.points(NEW, submissions)
    of = {name: [*found.values()] for name, found in points.items()}
    assert of["solved"] == [1, 2, 3, 4], course.failures(NEW, "solved")
    assert of["blank"] == [0, 0, 0, 0]
    assert of["wrong"] == [0, 0, 3, 0], course.failures(NEW, "wrong")


def test_a_graded_folder_whose_project_has_moved_gets_new_links(tmp_path, monkeypatch):
    monkeypatch.setattr(Execute, "preprocess", lambda self, nb, resources: (nb, resources))
    (tmp_path / "ada" / "01_tiny").mkdir(parents=True)
    (tmp_path / "ada" / "data").symlink_to(tmp_path / "where the project was")
    RunEveryCell().preprocess(new_notebook(), {"metadata": {"path": str(tmp_path / "ada" / "01_tiny")}})
    assert (tmp_path / "ada" / "data").resolve() == ROOT / "data"
