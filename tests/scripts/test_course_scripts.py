"""scripts/exercises.py and scripts/cheatsheet.py: a solution, a learner's progress, the summary. Needs no GPU."""

import json

import pytest

import cheatsheet
import exercises
import tiny_course
from tiny_course import text


@pytest.fixture
def notebooks(tmp_path, monkeypatch):
    """A folder with one notebook, which both scripts take for the course's."""
    folder = tmp_path / "notebooks"
    tiny_course.write(folder / "01_tiny.ipynb", tiny_course.cells())
    monkeypatch.setattr(exercises, "NOTEBOOKS", folder)
    monkeypatch.setattr(exercises, "PROGRESS", tmp_path / "workbook" / ".progress")
    monkeypatch.setattr(cheatsheet, "NOTEBOOKS", folder)
    monkeypatch.setattr(cheatsheet, "PAGE", tmp_path / "CHEATSHEET.md")
    return folder


def test_a_solution_is_the_references_cell_without_markers(notebooks, capsys):
    assert exercises.main(["solution", "01.1"]) == 0
    assert capsys.readouterr().out == (
        "# Exercise 01.1, from 01_tiny.ipynb, cell ex-01-1\n"
        'def double(number):\n    """Twice the number."""\n    return 2 * number\n'
    )
    assert exercises.main(["solution", "01.3"]) == 0
    assert capsys.readouterr().out.endswith("\n# How many twos make ten?\nguess = 5\n")


def test_a_chapter_in_two_notebooks_is_looked_through(notebooks, capsys):
    tiny_course.write(notebooks / "01b_more.ipynb", [tiny_course.code("ex-01-4", "four = 4")])
    assert exercises.main(["solution", "01.4"]) == 0
    assert capsys.readouterr().out == "# Exercise 01.4, from 01b_more.ipynb, cell ex-01-4\nfour = 4\n"
    assert exercises.main(["solution", "01.9"]) == 2
    assert " in 01_tiny.ipynb and 01b_more.ipynb, but there are 01.1 01.2 01.3 01.4" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name, message",
    [
        ("01.9", "exercises: there is no exercise 01.9 in 01_tiny.ipynb, but there are 01.1 01.2 01.3"),
        ("07.1", "exercises: there is no notebook 07 in "),
        ("1.3", "exercises: '1.3' is no exercise; name it as its heading does, such as 01.3"),
        ("", "exercises: '' is no exercise"),
        ("../1", "exercises: '../1' is no exercise"),
    ],
)
def test_an_unknown_exercise_is_one_line(notebooks, capsys, name, message):
    assert exercises.main(["solution", name]) == 2
    out, error = capsys.readouterr()
    assert error.startswith(message) and error.count("\n") == 1 and not out


def test_progress_names_what_passes_fails_and_was_not_tried(notebooks, capsys):
    assert exercises.main(["progress"]) == 0, "no check has run yet: there is no .progress folder"
    assert capsys.readouterr().out == "01_tiny: 0 of 3 exercises pass\n  not tried  01.1 01.2 01.3\n"

    folder = notebooks.parent / "workbook" / ".progress"
    folder.mkdir(parents=True)
    for name, passed in (("01.2", True), ("01.1", False), ("01.7", True)):
        (folder / f"{name}.json").write_text(json.dumps({"exercise": name, "passed": passed, "when": "2025-01-01"}))
    (folder / "01.3.json").write_text('{"passed": tr')
    assert exercises.main(["progress"]) == 0
    assert capsys.readouterr().out == (
        "01_tiny: 1 of 3 exercises pass\n  passes     01.2\n  fails      01.1\n  not tried  01.3\n"
    )


def test_progress_passes_over_what_was_noted_of_a_cell_that_is_blank_again(notebooks, capsys):
    workbook = notebooks.parent / "workbook"
    (workbook / ".progress").mkdir(parents=True)
    for name in ("01.1", "01.2"):
        (workbook / ".progress" / f"{name}.json").write_text('{"passed": true}')
    cells = [tiny_course.code("ex-01-1", "done = True")]
    cells += [tiny_course.code("ex-01-2", "# YOUR CODE HERE\nraise NotImplementedError()")]
    tiny_course.write(workbook / "01_tiny.ipynb", cells)
    assert exercises.main(["progress"]) == 0
    assert capsys.readouterr().out == "01_tiny: 1 of 3 exercises pass\n  passes     01.1\n  not tried  01.2 01.3\n"


def test_progress_marks_the_short_path(notebooks, capsys):
    """A heading without a star, and one that names another exercise in its text, mark nothing."""
    heading = "### Exercise 02.{} · a name\n*{}Difficulty 1 of 5 · 3 minutes*\n\nSee ### Exercise 02.2 · b\n*★"
    cells = [text(f"text-{number}", heading.format(number, star)) for number, star in ((1, "★ "), (2, ""))]
    cells += [tiny_course.code(f"ex-02-{number}", "done = True") for number in (1, 2)]
    tiny_course.write(notebooks / "02_more.ipynb", cells)
    assert exercises.main(["progress"]) == 0
    assert capsys.readouterr().out.endswith("02_more: 0 of 2 exercises pass\n  not tried  02.1★ 02.2\n")


def test_the_short_path_is_a_third_of_the_exercises_of_the_first_notebooks():
    for path in sorted((tiny_course.ROOT / "notebooks").glob("0[1-6]_*.ipynb")):
        notebook = exercises.read_notebook(path)
        names, short = set(exercises.exercises(notebook)), exercises.starred(notebook)
        assert short <= names and len(names) / 4 <= len(short) <= len(names) / 2, (path.name, sorted(short))


def test_progress_reads_what_a_check_writes(notebooks, tmp_path, monkeypatch, capsys):
    checks = pytest.importorskip("course_kit.checks.advice")
    (tmp_path / "workbook").mkdir()
    monkeypatch.chdir(tmp_path / "workbook")
    with checks.check("01.2"):
        pass
    with pytest.raises(AssertionError), checks.check("01.3"):
        raise NotImplementedError
    capsys.readouterr()
    assert exercises.main(["progress"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["  passes     01.2", "  fails      01.3", "  not tried  01.1"]


@pytest.mark.parametrize("argv", [[], ["solution"], ["progress", "01"], ["help"]])
def test_another_command_is_one_line(argv, capsys):
    assert exercises.main(argv) == 2
    assert capsys.readouterr().err == "usage: make solution EX=01.3, or make progress\n"


def test_the_cheatsheet_has_every_row_with_its_notebook(notebooks, capsys):
    recap = (
        r"Before.|not a row"
        "\n\n| Method | saves | costs | formula | use when | limit |\n|:--|--|--|--|--|--|\n"
        "| halving | space | time | $\\left\\|n\\right\\|/2$ | never | none |\n| other | a | b | c | d | |"
    )
    tiny_course.write(notebooks / "02_more.ipynb", [text("recap", recap, tags=["cheatsheet"]), text("x", "| a |")])
    assert cheatsheet.main([]) == 0
    assert capsys.readouterr().out == "CHEATSHEET.md: 3 methods\n"
    lines = cheatsheet.PAGE.read_text().splitlines()
    assert lines[0] == "# Cheatsheet"
    assert lines[4:] == [
        "| method | saves | costs | formula | use when | limit | notebook |",
        "|---|---|---|---|---|---|---|",
        "| doubling | time | nothing | $2n$ | always | memory | [01](notebooks/01_tiny.ipynb) |",
        r"| halving | space | time | $\left\|n\right\|/2$ | never | none | [02](notebooks/02_more.ipynb) |",
        "| other | a | b | c | d |  | [02](notebooks/02_more.ipynb) |",
    ]


@pytest.mark.parametrize(
    "recap, message",
    [
        ("No table.", "holds no table, or one without a row"),
        ("| method | saves | costs | formula | use when | limit |\n|---|---|---|---|---|---|", "holds no table"),
        ("| method | saves |\n|---|---|\n| a | b |", "has the columns method, saves; a recap has method, saves, costs"),
        (
            "| method | saves | costs | formula | use when | limit |\n|---|---|---|---|---|---|\n| a | b |",
            "has a row of 2 cells instead of 6: a",
        ),
    ],
)
def test_a_wrong_recap_is_named_and_nothing_written(notebooks, capsys, recap, message):
    tiny_course.write(notebooks / "02_more.ipynb", [text("recap", recap, tags=["cheatsheet"])])
    assert cheatsheet.main([]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"cheatsheet: 02_more.ipynb, cell recap {message}") and error.count("\n") == 1
    assert not cheatsheet.PAGE.exists()


def test_the_cheatsheet_is_in_step_with_the_notebooks():
    """The page itself: where this fails, run 'make cheatsheet'."""
    page, methods = cheatsheet.page(cheatsheet.NOTEBOOKS)
    standing = cheatsheet.PAGE.read_text(encoding="utf-8") if cheatsheet.PAGE.exists() else ""
    assert standing == page or not methods, "run 'make cheatsheet'"
