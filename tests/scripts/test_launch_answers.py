"""Which answers of a learner a launched job runs, and what an earlier launch has left. On CPUs.

The tiny course's 02_counters beside the toy course of test_launch.py.
"""

import contextlib
import os
import shutil
from unittest import mock

import pytest

import tiny_course
from course_kit.exercises import notes
from course_kit.exercises.saved import digest_of_cells, exercise_cells
from test_launch import BLANK, LEARNERS, Launch, loaded_launcher, make_course, processes_of, snapshot, toy
from tiny_course import ANSWERS, NEW, PROGRAM, blank

MINE = {  # what the learner writes: one answer passes, one has changed since, one fails, one is blank
    "ex-02-1": "#| export counters.numbers\nimport math\n\ndef square(number):\n    return 100 * math.prod([number])",
    "ex-02-2": "#| export counters.counter:Counter\ndef add(self: Counter, number):\n    self.total += number + 1000",
    "ex-02-3": "#| export counters.numbers\ndef opposite(number):\n    return 5",
    "ex-02-3b": blank(ANSWERS["ex-02-3b"]),
    "ex-02-4": "guess = 8",
}
WORKBOOK, NOTEBOOK = f"workbook/{NEW}.ipynb", f"notebooks/{NEW}.ipynb"


def add_counters(course) -> None:
    """Add 02_counters, its library, and a workbook in which nothing is written yet."""
    tiny_course.write_library(course)
    tiny_course.write(course / NOTEBOOK, tiny_course.new_cells(), PROGRAM)
    write(course, {})


def write(course, answers: dict[str, str], passed: tuple[str, ...] = ()) -> None:
    """Save the learner's notebook with these answers, all else blank, and a note of those that have passed."""
    cells = tiny_course.new_cells()
    for cell in cells:
        if cell["id"] in ANSWERS:
            cell["source"] = answers.get(cell["id"], blank(ANSWERS[cell["id"]]))
    path = tiny_course.write(course / WORKBOOK, cells, PROGRAM)
    shutil.rmtree(path.parent / ".progress", ignore_errors=True)
    for exercise, found in exercise_cells({"cells": cells}).items():
        if exercise in passed:
            notes.note(path.parent, exercise, True, digest_of_cells(found))


@pytest.fixture(scope="module")
def launcher(tmp_path_factory):
    course = make_course(tmp_path_factory.mktemp("course"))
    add_counters(course)
    with loaded_launcher(course) as loaded:
        yield loaded


@pytest.fixture
def course(launcher, monkeypatch):
    """The course as the current folder, as new."""
    monkeypatch.chdir(launcher.course)
    (launcher.course / LEARNERS).write_text(toy(BLANK))
    yield launcher.course
    add_counters(launcher.course)
    for name in ("workbook/course_lib", "runs"):
        shutil.rmtree(launcher.course / name, ignore_errors=True)


@pytest.fixture
def launch(launcher, course, capsys, tmp_path):
    """Run the launcher with these arguments, dry; with `export=True`, up to a job that no Slurm takes: it exports."""

    def run(*arguments, export=False):
        more = ("--slurm", "nodes=1,gpus=1") if export else ("--dry-run",)
        with mock.patch.dict(os.environ, {"PATH": str(tmp_path)}):
            status = launcher.module.main([*arguments, *more])
        return status, *capsys.readouterr()

    return run


def copies(course) -> dict[str, str]:
    """The learner's copies of modules, by their place."""
    folder = course / "workbook" / "course_lib"
    return {file.relative_to(folder).as_posix(): file.read_text() for file in folder.rglob("*.py")}


def test_answers_that_have_passed_are_spliced_and_named(launch, course):
    write(course, MINE | {"ex-02-2": ANSWERS["ex-02-2"]}, passed=("02.1", "02.2", "02.4"))
    path = course / WORKBOOK
    cells = tiny_course.read(path)["cells"]
    for cell in cells:
        cell["source"] = MINE.get(cell["id"], cell["source"])
    tiny_course.write(path, cells, PROGRAM)
    status, out, err = launch(WORKBOOK, export=True)
    assert status == 0, err
    assert err == (
        "launch: still blank, taken from the reference: 02.3\n"
        "launch: taken from the reference: 02.2 (it has changed since it passed); run the checks, or use --unchecked\n"
        "launch: your own answers come from 02.1; all else is the reference's\n"
    )
    (text,) = copies(course).values()
    assert "    return 100 * math.prod([number])" in text and "# exercise 02.1 (yours)\ndef square" in text
    assert "# exercise 02.3\ndef opposite" in text and [*copies(course)] == ["counters/numbers.py"]


def test_a_copy_that_has_passed_and_a_cell_without_id_are_taken(launch, course):
    write(course, MINE, passed=("02.1", "02.2"))
    path = course / WORKBOOK
    cells = tiny_course.read(path)["cells"]
    for cell in [cell for cell in cells if cell["id"] in ("ex-02-1", "ex-02-2")]:
        cell["metadata"]["nbgrader"] = {"grade_id": cell["id"]}
        if cell["id"] == "ex-02-1":
            cells.append({**cell, "id": "copy"})
            cell["source"] = blank(ANSWERS["ex-02-1"])
        else:
            del cell["id"]
    tiny_course.write(path, cells, PROGRAM)
    status, out, err = launch(WORKBOOK, export=True)
    assert status == 0 and "your own answers come from 02.1 and 02.2" in err, err
    assert "math.prod([number])" in copies(course)["counters/numbers.py"]


def test_unchecked_takes_all_that_is_not_blank(launch, course):
    write(course, MINE | {"ex-02-3b": ANSWERS["ex-02-3b"]}, passed=("02.1",))
    lines = launch(WORKBOOK, export=True)[2].splitlines()
    not_passed = "02.2 (its check has not passed), 02.3 (its check has not passed)"
    assert lines[0].startswith(f"launch: taken from the reference: {not_passed}; run")
    status, out, err = launch(WORKBOOK, "--unchecked", export=True)
    assert (status, err) == (0, "launch: your own answers come from 02.1, 02.2 and 02.3; all else is the reference's\n")
    found = copies(course)
    assert "def add(self, number):\n        self.total += number + 1000" in found["counters/counter.py"]
    assert found["counters/numbers.py"].count("(yours)") == 2
    assert "# exercise 02.3 (yours)\n    @staticmethod" in found["counters/counter.py"]
    assert " --unchecked\n" in (course / "runs" / "slurm" / f"{NEW}.sbatch").read_text()
    write(course, {})
    assert "launch: still blank, taken from the reference: all of 02\n" in launch(WORKBOOK, export=True)[2]
    assert "02" not in launch(LEARNERS, export=True)[2], "an earlier notebook that is not begun is not listed"


def test_an_answer_without_its_directive_is_not_dropped_in_silence(launch, course):
    write(course, MINE | {"ex-02-2": MINE["ex-02-2"].partition("\n")[2]}, passed=("02.1", "02.2"))
    lost = "02.2 (its cell has lost the line '#| export ...' that it begins with)"
    assert f"taken from the reference: {lost}" in launch(WORKBOOK, export=True)[2]


def test_a_job_of_a_later_notebook_runs_them_too(launch, course, launcher):
    write(course, MINE, passed=("02.1",))
    status, out, err = launch(LEARNERS, export=True)
    assert status == 0 and "your own answers come from 02.1; all else" in err
    assert {*copies(course)} == {"counters/numbers.py"}
    err = launch(LEARNERS, "--reference", "02", export=True)[2]
    assert "your own answers come from no notebook yet" in err
    assert " --reference-modules counters.numbers toy.program\n" in launch(LEARNERS, "--reference", "02")[1], "left"


@pytest.mark.parametrize(
    "kind", ["exported by an older course", "a copy of an older module", "a copy of an answer that has changed"]
)
def test_what_a_launch_of_before_has_left_is_not_run(kind, launch, course):
    """The modules raise when they are imported: one that is laid over the library keeps the launch from starting."""
    write(course, MINE | {"ex-02-2": ANSWERS["ex-02-2"]}, passed=("02.1", "02.2"))
    assert launch(WORKBOOK, export=True)[0] == 0
    old = course / "workbook" / "course_lib" / "counters" / "counter.py"
    assert "(yours)" in old.read_text()
    if kind.startswith("exported"):
        old.write_text('# %% ../../02_counters.ipynb #ex-02-2\nraise ImportError("an old module")\n')
    else:
        old.write_text(old.read_text() + 'raise ImportError("an old module")\n')
    if kind == "a copy of an older module":
        file = course / "course_lib" / "counters" / "counter.py"
        file.write_text(file.read_text() + "\n\nNEW = 1\n")
    left_out = " --reference-modules counters.counter " if kind.startswith("a copy") else " --overlay "
    write(course, MINE, passed=("02.1",))
    status, out, err = launch(WORKBOOK)
    assert (status, err) == (0, "") and left_out in out
    assert launch(LEARNERS)[0] == 0
    status, out, err = launch(WORKBOOK, "--no-export")
    assert status == (1 if kind == "a copy of an answer that has changed" else 0), "it runs what is exported"
    status, out, err = launch(WORKBOOK, "--no-export", "--reference", "02")
    assert (status, err) == (0, "")


def test_a_reference_notebook_is_spliced_into_the_library(launch, course):
    library = course / "course_lib"
    before = snapshot(library)
    assert launch(NOTEBOOK, export=True)[::2] == (0, "")
    changed = {path for path, found in snapshot(library).items() if before.get(path) != found and path.suffix == ".py"}
    assert not changed, "nothing differs"
    cells = tiny_course.new_cells()
    next(cell for cell in cells if cell["id"] == "ex-02-2")["source"] = ANSWERS["ex-02-2"].replace("+= n", "+= 1 * n")
    tiny_course.write(course / NOTEBOOK, cells, PROGRAM)
    assert launch(NOTEBOOK, "--no-export", export=True)[0] == 0
    assert "1 * number" not in (library / "counters" / "counter.py").read_text()
    assert launch(NOTEBOOK, export=True)[0] == 0
    text = (library / "counters" / "counter.py").read_text()
    assert text == tiny_course.LIBRARY["counters.counter"].replace("+= number", "+= 1 * number")


def broken(cell_id: str, source: str, program: object = PROGRAM):
    """A fault in the course's or the learner's notebook."""

    def make(path):
        cells = tiny_course.new_cells()
        next(cell for cell in cells if cell["id"] == cell_id)["source"] = source
        tiny_course.write(path, cells, program)

    return make


@pytest.mark.parametrize(
    "path, make, options, expected",
    [
        (NOTEBOOK, broken("ex-02-1", "#| export counters.none\ndef square(n): pass"), [], "course_lib.counters.none"),
        (NOTEBOOK, broken("ex-02-1", "#| export counters.numbers\ndef cube(n): pass"), [], "cell ex-02-1"),
        (NOTEBOOK, broken("title", "# 02", "counters.none"), [], "its module 'counters.none' has no function main"),
        (NOTEBOOK, broken("title", "# 02", 5), [], "its metadata must name the module to start"),
        (NOTEBOOK, broken("title", "# 02"), ["--unchecked"], "--unchecked is for a notebook of workbook/"),
        (WORKBOOK, broken("ex-02-1", "#| export counters.numbers\ndef square("), ["--unchecked"], "ex-02-1, line 2"),
        (WORKBOOK, broken("title", "# 02", None), [], "is of an older course: 'make workbook' brings it up to date"),
        (WORKBOOK, broken("title", "# 02", None), ["--no-export"], "is of an older course"),
    ],
)  # fmt: skip
def test_a_fault_is_one_line_and_changes_nothing(path, make, options, expected, launch, course):
    make(course / path)
    before = snapshot(course)
    status, out, err = launch(path, *options)
    assert status == 2 and out == "" and err.count("\n") == 1 and err.startswith("launch: ") and expected in err
    assert snapshot(course) == before
    if path == WORKBOOK and not options:  # a later notebook's job
        err = launch(LEARNERS)[2]
        assert expected in err and err.endswith("(--reference 02 leaves this chapter out)\n")
        assert launch(LEARNERS, "--reference", "02")[0] == 0


# --- with ranks


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """A course whose launches run in processes of their own."""
    course = make_course(tmp_path_factory.mktemp("running"))
    add_counters(course)
    for name in ("tmp", "output"):
        (course / name).mkdir()
    yield course
    for process in processes_of(course):
        with contextlib.suppress(Exception):
            process.kill()


def test_a_job_runs_the_learners_answers_on_a_bare_node(running):
    write(running, MINE | {"ex-02-2": ANSWERS["ex-02-2"]}, passed=("02.1", "02.2"))
    old = running / "workbook" / "course_lib" / "counters" / "counter.py"
    old.parent.mkdir(parents=True)
    old.write_text('# %% ../../02_counters.ipynb #ex-02-2\nraise ImportError("an old module")\n')
    (old.parent / "__init__.py").write_text(old.read_text())
    status, out, err = Launch(running, WORKBOOK, "--nproc-per-node", "2", bare=True).end()
    assert (status, sorted(out.splitlines())) == (0, [f"rank {rank} of 2: 303, back -303" for rank in (0, 1)]), err
    assert err.splitlines()[-1] == "launch: your own answers come from 02.1 and 02.2; all else is the reference's"


def test_an_error_in_a_spliced_answer_is_told_by_its_cell_and_line(running):
    """In a method, in the learner's notebook; what called it is the reference's, in notebooks/, or the library's."""
    mine = "#| export counters.counter:Counter\n\nimport math\n\n\n# It counts.\ndef add(self: Counter, number):\n"
    mine += '    """Mine."""\n\n    self.total += math.sqrt(-number)'
    write(running, {"ex-02-2": mine})
    cells = tiny_course.new_cells()
    number = [cell["id"] for cell in cells].index("ex-02-2") + 1
    status, out, err = Launch(running, WORKBOOK, "--unchecked", bare=True).end()
    assert status == 1
    assert "launch: rank 0: ValueError: " in err
    place = f"{WORKBOOK}, cell {number} (ex-02-2), line 10: self.total += math.sqrt(-number)"
    assert f"\n  in {place}\n" in err, err
    write(running, {}, ())
    wrong = ANSWERS["ex-02-3b"].replace("sum(parts)", "1 / 0")
    next(cell for cell in cells if cell["id"] == "ex-02-3b")["source"] = wrong
    tiny_course.write(running / NOTEBOOK, cells, PROGRAM)
    status, out, err = Launch(running, NOTEBOOK).end()
    assert status == 1 and "launch: rank 0: ZeroDivisionError" in err
    assert f"{NOTEBOOK}, cell {number + 3} (ex-02-3b), line 6: return Counter(1 / 0)\n" in err, err
