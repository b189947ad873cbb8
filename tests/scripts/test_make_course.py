"""`make course` brings a course up to date, and overwrites neither what a teacher has changed nor what has submissions.
Needs no GPU.
"""

import json
import os
import sys

import pytest

import make_course
import tiny_course
from tiny_course import text

HEADINGS = """### Exercise 01.1 · a
*★ Difficulty 1 of 5 · 2 minutes*

### Exercise 01.2 · b
*Difficulty {} of 5 · 3 minutes*"""
LAST = "\n\n### Exercise 01.3 · c\n*Difficulty 3 of 5 · 2 minutes*"
NAMES = "01_left", "02_changed", "03_handed_in"
pytestmark = pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SAWarning")  # nbgrader's own


def write_notebooks(folder, difficulty=2, more=LAST, names=NAMES):
    """Notebooks that are alike, with an exercise of this difficulty."""
    for name in names:
        headings = text("headings", HEADINGS.format(difficulty) + more)
        tiny_course.write(folder / f"{name}.ipynb", [headings, *tiny_course.cells()])


@pytest.fixture
def notebooks(tmp_path, monkeypatch):
    """The folder of the notebooks that a course is made of."""
    monkeypatch.setattr(make_course, "NOTEBOOKS", tmp_path / "notebooks")
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable), prepend=os.pathsep)
    write_notebooks(tmp_path / "notebooks")
    return tmp_path / "notebooks"


def points(file) -> dict[str, int]:
    """The points of a notebook's checks, by id."""
    metadata = {cell["id"]: cell["metadata"].get("nbgrader", {}) for cell in tiny_course.read(file)["cells"]}
    return {name: found["points"] for name, found in metadata.items() if "points" in found}


def contents(folder) -> dict:
    """Every file of a folder, byte by byte."""
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()} if folder.is_dir() else {}


def test_an_update_leaves_a_teachers_changes_and_what_has_submissions(notebooks, tmp_path, capsys):
    course = tmp_path / "my course"

    def run() -> list[str]:
        assert make_course.main([str(course)]) == 0, capsys.readouterr().err
        return capsys.readouterr().out.splitlines()

    def files(name):
        return [course / kind / name / f"{name}.ipynb" for kind in ("source", "release")]

    assert run() == [f"{name}: written, 3 checks, 6 points" for name in NAMES]
    for name in NAMES:
        assert [points(file) for file in files(name)] == [{"check-01-1": 1, "check-01-2": 2, "check-01-3": 3}] * 2
    assert (course / "release" / "data" / "dp_scaling.csv").exists()

    before = contents(course)
    assert run() == [f"{name}: up to date" for name in NAMES]
    assert contents(course) == before

    files("01_left")[1].write_text('{"cells": [')  # as a kill or a full disk may leave it
    assert run() == [f"{name}: up to date" for name in NAMES] and points(files("01_left")[1])

    changed = tiny_course.read(files("02_changed")[0])
    changed["cells"][1]["source"] += "\nMy own words."
    files("02_changed")[0].write_text(json.dumps(changed), encoding="utf-8")
    with open(course / "nbgrader_config.py", "a") as config:
        config.write("c.Execute.timeout = 5\n")
    handed_in = course / "submitted" / "ada" / "03_handed_in" / "03_handed_in.ipynb"
    handed_in.parent.mkdir(parents=True)
    handed_in.write_text("{}")
    write_notebooks(notebooks, difficulty=4)
    before = contents(course)
    assert run() == [
        "01_left: written, 3 checks, 8 points",
        "02_changed: you have changed it: yours stays, and the course's new one is left out",
        "03_handed_in: has submissions (1): it stays, and the course's new one is left out",
    ]
    assert [points(file)["check-01-2"] for file in files("01_left")] == [4, 4]
    differ = {file for file, bytes in contents(course).items() if before.get(file) != bytes}
    assert differ - {course / "gradebook.db"} == set(files("01_left"))


def other_files(folder):
    folder.mkdir()
    (folder / "thesis.tex").write_text("mine")


def other_course(folder):
    folder.mkdir()
    (folder / "nbgrader_config.py").write_text("c = get_config()\n")


def broken_settings(folder):
    folder.mkdir()
    (folder / "nbgrader_config.py").write_text(make_course.CONFIG + "c.Execute.timeout = sixty\n")


def broken_source(folder):
    folder.mkdir()
    (folder / "nbgrader_config.py").write_text(make_course.CONFIG)
    (folder / "source" / "01_left").mkdir(parents=True)
    (folder / "source" / "01_left" / "01_left.ipynb").write_text('{"cells": [')


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda folder: folder.write_text("mine"), "is no folder"),
        (other_files, "holds something else"),
        (other_course, "is another nbgrader course"),
        (broken_settings, "NameError: name 'sixty' is not defined"),
        (broken_source, "is not a notebook, or is cut short"),
    ],
)
def test_a_folder_that_is_something_else_is_one_clear_line(notebooks, tmp_path, capsys, make, said):
    folder = tmp_path / "folder"
    make(folder)
    before = contents(tmp_path)
    assert make_course.main([str(folder)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith("course: ") and said in error
    assert contents(tmp_path) == before


def test_an_exercise_without_a_difficulty_is_named(notebooks, tmp_path, capsys):
    write_notebooks(notebooks, more="", names=NAMES[1:2])
    assert make_course.main([str(tmp_path / "course")]) == 2
    assert "the heading of exercise 01.3 does not say how difficult it is" in capsys.readouterr().err
    assert not (tmp_path / "course").exists()


def test_a_folder_that_cannot_be_copied_is_told(notebooks, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(make_course, "ROOT", tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "gone.csv").symlink_to("nowhere")
    assert make_course.main([str(tmp_path / "course")]) == 2
    assert "gone.csv" in capsys.readouterr().err
