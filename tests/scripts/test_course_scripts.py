"""scripts/exercises.py and scripts/cheatsheet.py: a solution, a learner's progress, the summary. Needs no GPU."""

import pytest

import cheatsheet
import exercises
import tiny_course
from course_kit.checks import CheckFailed, frame
from course_kit.exercises import notes
from course_kit.exercises.saved import digest_of_cells, exercise_cells
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
        "#| export tiny.numbers\n# Exercise 01.1, from 01_tiny.ipynb, cell ex-01-1\n"
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


def test_a_solution_in_two_cells_shows_both_to_be_pasted(notebooks, capsys):
    tiny_course.write(notebooks / f"{tiny_course.NEW}.ipynb", tiny_course.new_cells(), tiny_course.PROGRAM)
    assert exercises.main(["solution", "02.3"]) == 0
    assert capsys.readouterr().out == (
        "#| export counters.numbers\n# Exercise 02.3, from 02_counters.ipynb, cell ex-02-3\n"
        'def opposite(number: int) -> int:\n    """The number with the other sign."""\n    return -number\n'
        "\n\n"
        "#| export counters.counter:Counter\n# Exercise 02.3, from 02_counters.ipynb, cell ex-02-3b\n@staticmethod\n"
        'def of(*parts: int) -> Counter:\n    """A counter of several numbers."""\n    return Counter(sum(parts))\n'
    )
    assert exercises.main(["solution", "02.4"]) == 0
    assert capsys.readouterr().out.startswith("# Exercise 02.4, from 02_counters.ipynb, cell ex-02-4\n# What is 3")


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

    workbook = notebooks.parent / "workbook"
    tiny_course.write(workbook / "01_tiny.ipynb", tiny_course.cells())
    answers = exercise_cells({"cells": tiny_course.cells()})
    for name, passed in (("01.2", True), ("01.1", False)):
        notes.note(workbook, name, passed, digest_of_cells(answers[name]))
    notes.note(workbook, "01.7", True, "of an exercise that is gone")
    (workbook / ".progress" / "01.3.json").write_text('{"passed": tr')
    assert exercises.main(["progress"]) == 0
    assert capsys.readouterr().out == (
        "01_tiny: 1 of 3 exercises pass\n  passes     01.2\n  fails      01.1\n  not tried  01.3\n"
    )


def test_progress_ignores_what_was_noted_of_a_cell_that_is_blank_again(notebooks, capsys):
    workbook, cells = notebooks.parent / "workbook", tiny_course.cells()
    workbook.mkdir()
    for name, found in exercise_cells({"cells": cells}).items():
        notes.note(workbook, name, name != "01.3", digest_of_cells(found))
    cells[5]["source"] = tiny_course.blank(cells[5]["source"])
    tiny_course.write(workbook / "01_tiny.ipynb", cells)
    assert exercises.main(["progress"]) == 0
    assert capsys.readouterr().out == (
        "01_tiny: 1 of 3 exercises pass\n  passes     01.1\n  fails      01.3\n  not tried  01.2\n"
    )


def test_progress_tells_what_has_changed_since_it_passed(notebooks, capsys):
    """A note holds the digest of the answer that passed; that of an exercise in two cells speaks of both."""
    tiny_course.write(notebooks / f"{tiny_course.NEW}.ipynb", tiny_course.new_cells(), tiny_course.PROGRAM)
    workbook = notebooks.parent / "workbook"
    answers = {cell["id"]: cell for cell in tiny_course.new_cells()}

    def progress() -> list[str]:
        tiny_course.write(workbook / f"{tiny_course.NEW}.ipynb", [*answers.values()], tiny_course.PROGRAM)
        assert exercises.main(["progress"]) == 0
        return capsys.readouterr().out.partition("02_counters: ")[2].splitlines()

    changed, again = "  changed    ", " (since they passed: run their cells and checks again)"
    assert progress() == ["0 of 4 exercises pass", "  not tried  02.1 02.2 02.3 02.4"]
    for name, cells in exercise_cells({"cells": [*answers.values()]}).items():
        notes.note(workbook, name, name != "02.2", digest_of_cells(cells))
    assert progress() == ["3 of 4 exercises pass", "  passes     02.1 02.3 02.4", "  fails      02.2"]
    answers["ex-02-1"]["source"] += "\n\n    # a comment"
    answers["ex-02-3b"]["source"] = answers["ex-02-3b"]["source"].replace("sum(parts)", "sum(parts, 0)")
    answers["ex-02-4"]["source"] = "guess = 10"
    assert progress()[1:] == ["  passes     02.1", "  fails      02.2", f"{changed}02.3 02.4{again}"]
    answers["ex-02-1"]["source"] = "#| export counters.numbers\ndef square("
    answers["ex-02-4"]["source"] = tiny_course.blank(tiny_course.ANSWERS["ex-02-4"])
    assert progress()[1:] == ["  fails      02.2", f"{changed}02.1 02.3{again}", "  not tried  02.4"]
    for line in ("#| export", "x = 1"):  # a workbook of an older course: what its check noted has no digest
        answers["ex-02-1"]["source"] = f"{line}\ndef square(n): return n"
        notes.note(workbook, "02.1", True)
        assert "02.1" in progress()[-2]


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
    cells = {cell["id"]: cell["source"] for cell in tiny_course.cells()}
    tiny_course.write(tmp_path / "workbook" / "01_tiny.ipynb", tiny_course.cells())
    monkeypatch.chdir(tmp_path / "workbook")
    monkeypatch.setattr(frame, "check_function", lambda exercise: lambda guess: float(guess != 5) or None)
    monkeypatch.setattr(frame, "targets_by_exercise", lambda: {})
    frame.run("01.3", [(cells["ex-01-3"], "cell")], {"guess": 5})
    with pytest.raises(CheckFailed):
        frame.run("01.2", [(cells["ex-01-2"], "cell")], {})
    capsys.readouterr()
    assert exercises.main(["progress"]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["  passes     01.3", "  fails      01.2", "  not tried  01.1"]


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
