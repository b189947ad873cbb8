"""scripts/make_workbook.py: what a learner gets, and that no update loses or mixes a cell of theirs. Needs no GPU."""

import copy
import json
import os
import platform
import random
import re
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import nbformat
import pytest

import make_workbook
import tiny_course
from tiny_course import code, read, text

RESULT = {"output_type": "stream", "name": "stdout", "text": ["mine\n"]}


class Course:
    """A folder with the course's notebooks and a learner's workbook."""

    def __init__(self, folder: Path):
        self.notebooks, self.workbook = folder / "notebooks", folder / "workbook"
        self.file = self.workbook / "01_tiny.ipynb"

    def publish(self, cells: list[dict]) -> None:
        """The course's next version."""
        tiny_course.write(self.notebooks / "01_tiny.ipynb", cells)

    def change(self, cell_id: str, source: str) -> None:
        """The course's next version, with another source in one cell."""
        cells = read(self.notebooks / "01_tiny.ipynb")["cells"]
        next(cell for cell in cells if cell["id"] == cell_id)["source"] = source
        self.publish([nbformat.from_dict(cell) for cell in cells])

    def update(self) -> list[str]:
        """What a learner reads when they update."""
        return list(make_workbook.make_workbook(self.notebooks, self.workbook))

    def cells(self) -> dict[str, dict]:
        """The cells of the learner's notebook, by id."""
        return {cell["id"]: cell for cell in read(self.file)["cells"]}

    def save(self, cells: list[dict]) -> None:
        """The learner's notebook as JupyterLab saves it, with the metadata that it adds."""
        saved = {**read(self.file), "cells": cells}
        saved["metadata"]["language_info"] = {"name": "python", "version": "3.13"}
        self.file.write_text(json.dumps(saved, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


@pytest.fixture
def course(tmp_path):
    made = Course(tmp_path)
    made.publish(tiny_course.cells())
    assert made.update() == ["01_tiny: handed out"]
    return made


def edited(course: Course, **sources: str) -> list[dict]:
    """The learner's cells with other sources in some; `ex_01_1` stands for ex-01-1."""
    cells = course.cells()
    for name, source in sources.items():
        cells[name.replace("_", "-")]["source"] = source
    return list(cells.values())


def snapshot(folder: Path) -> dict[str, tuple]:
    """Every file of a folder: its bytes and when they were written."""
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


def test_the_blank_has_no_solutions_and_everything_else(course):
    source = {cell["id"]: cell for cell in tiny_course.cells()}
    blank = course.cells()
    assert list(blank) == list(source)
    stub = "    # YOUR CODE HERE\n    raise NotImplementedError()"
    first = '#| export tiny.numbers\ndef double(number):\n    """Twice the number."""'
    assert blank["ex-01-1"]["source"] == f"{first}\n{stub}"
    assert blank["ex-01-3"]["source"] == "# How many twos make ten?\n# YOUR CODE HERE\nraise NotImplementedError()"
    for name in ("title", "setup", "hint-1", "check-01-1", "measure", "recap"):
        assert blank[name]["source"] == source[name]["source"]
    assert blank["check-01-1"]["metadata"]["editable"] is False, "a check is locked in JupyterLab"
    assert "editable" not in blank["ex-01-1"]["metadata"]
    assert blank["recap"]["metadata"]["tags"] == ["cheatsheet"]
    nbformat.validate(nbformat.read(course.file, as_version=4))


def test_the_blank_has_no_outputs(course):
    cells = tiny_course.cells()
    for cell in cells:
        if cell["cell_type"] == "code":
            cell["outputs"], cell["execution_count"] = [nbformat.from_dict(RESULT)], 3
    course.publish(cells)
    course.file.unlink()
    course.update()
    codes = [cell for cell in course.cells().values() if cell["cell_type"] == "code"]
    assert codes and all(cell["outputs"] == [] and cell["execution_count"] is None for cell in codes)


def test_a_second_update_touches_no_file(course):
    before = snapshot(course.workbook)
    assert course.update() == ["01_tiny: up to date"]
    assert snapshot(course.workbook) == before

    course.save(edited(course, ex_01_1="def double(n): return n + n"))
    course.change("title", "## 01 · Other numbers")
    assert course.update() == ["01_tiny: updated"]
    before = snapshot(course.workbook)
    assert course.update() == ["01_tiny: up to date"]
    assert snapshot(course.workbook) == before


def next_version() -> list[dict]:
    """The course's cells with one changed, one dropped, one new and two in another order."""
    cells = {cell["id"]: cell for cell in tiny_course.cells()}
    cells["title"]["source"] = "## 01 · Other numbers"
    cells["check-01-1"]["source"] += "\n    assert double(0) == 0, 'twice nothing is nothing'"
    cells["recap"]["metadata"]["tags"] = ["cheatsheet", "long"]
    del cells["measure"]
    names = [*cells]
    names[2], names[3] = names[3], names[2]
    return [text("new", "A new paragraph."), *(cells[name] for name in names)]


def test_who_changed_nothing_gets_exactly_the_new_version(course):
    course.publish(next_version())
    assert course.update() == ["01_tiny: updated"]
    updated = course.file.read_bytes()
    course.file.unlink()
    course.update()
    assert course.file.read_bytes() == updated


def test_who_only_opened_and_saved_gets_exactly_the_new_cells(course):
    course.save(list(course.cells().values()))
    course.publish(next_version())
    assert course.update() == ["01_tiny: updated"]
    updated = read(course.file)
    assert updated["metadata"].pop("language_info")["version"] == "3.13"
    course.file.unlink()
    course.update()
    fresh = read(course.file)
    assert fresh["metadata"].pop("language_info")["version"] == platform.python_version()
    assert fresh == updated


def test_a_cell_the_learner_changed_stays_whole_and_the_rest_is_updated(course):
    cells = edited(course, ex_01_1="def double(number):\n    return number + number  # mine")
    cells[3].update(outputs=[RESULT], execution_count=4)
    course.save(cells)
    course.publish(next_version())
    assert course.update() == ["01_tiny: updated"], "the course did not change the learner's cell: nothing to name"
    assert course.cells()["ex-01-1"] == cells[3]
    assert course.cells()["title"]["source"] == "## 01 · Other numbers"
    assert course.cells()["recap"]["metadata"]["tags"] == ["cheatsheet", "long"]
    assert "new" in course.cells() and "measure" not in course.cells()


def test_a_cell_both_changed_is_the_learners_and_is_named(course):
    mine = 'def double(number):\n    """Twice the number."""\n    return number + number\n'
    course.save(edited(course, ex_01_1=mine))
    course.change("ex-01-1", tiny_course.DOUBLE.replace("Twice the number", "The number, twice"))
    course.change("title", "## 01 · Other numbers")
    [line] = course.update()
    assert course.cells()["ex-01-1"]["source"] == mine
    assert course.cells()["title"]["source"] == "## 01 · Other numbers"
    assert line.startswith("01_tiny: updated; yours is kept") and line.endswith("is left out: cell 4 (ex-01-1)")
    assert course.update() == ["01_tiny: up to date"], "a change that was left out is named once"


def test_both_making_the_same_change_is_no_conflict(course):
    course.save(edited(course, title="## 01 · Other numbers"))
    course.change("title", "## 01 · Other numbers")
    assert course.update() == ["01_tiny: updated"]


def test_outputs_stay_where_the_source_stays(course):
    cells = edited(course)
    for cell in cells:
        if cell["cell_type"] == "code":
            cell.update(outputs=[RESULT], execution_count=2)
    course.save(cells)
    course.change("measure", "measured = 5")
    course.update()
    assert course.cells()["setup"]["outputs"] == [RESULT] and course.cells()["setup"]["execution_count"] == 2
    assert course.cells()["measure"]["outputs"] == [], "an output of the old source would mislead"


def test_a_cell_of_another_kind_or_with_a_picture_counts_as_changed(course):
    cells = edited(course)
    cells[0]["attachments"] = {"picture.png": {"image/png": "aGVsbG8="}}
    cells[8] = {key: value for key, value in cells[8].items() if key not in ("outputs", "execution_count")}
    cells[8]["cell_type"] = "raw"
    course.save(cells)
    course.change("title", "## 01 · Other numbers")
    course.change("measure", "measured = 5")
    [line] = course.update()
    assert course.cells()["title"] == cells[0] and course.cells()["measure"] == cells[8]
    assert line.endswith("cell 1 (title), cell 9 (measure)")


def test_both_sides_metadata_changes_are_merged(course):
    cells = edited(course)
    cells[0]["metadata"] = {"collapsed": True}
    course.save(cells)
    changed = tiny_course.cells()
    changed[0]["metadata"] = {"tags": ["first"]}
    course.publish(changed)
    course.update()
    assert course.cells()["title"]["metadata"] == {"collapsed": True, "tags": ["first"]}


def test_a_deleted_cell_stays_deleted_and_is_named_once_the_course_changes_it(course):
    course.save([cell for cell in edited(course) if cell["id"] not in ("hint-1", "measure")])
    course.change("title", "## 01 · Other numbers")
    assert course.update() == ["01_tiny: updated"]
    assert not {"hint-1", "measure"} & set(course.cells())
    course.change("measure", "measured = 5")
    [line] = course.update()
    assert "measure" not in course.cells() and line.endswith("measure, which you deleted")


def test_a_cell_the_course_dropped_stays_where_the_learner_changed_it(course):
    course.save(edited(course, measure="print('mine')"))
    course.publish([cell for cell in tiny_course.cells() if cell["id"] not in ("measure", "hint-1")])
    [line] = course.update()
    assert course.cells()["measure"]["source"] == "print('mine')" and "hint-1" not in course.cells()
    assert list(course.cells()).index("measure") == list(course.cells()).index("ex-01-3") + 1
    assert line.endswith("cell 8 (measure), which the course dropped")


def test_added_and_moved_cells_stay_where_the_learner_put_them(course):
    cells = edited(course)
    cells.insert(0, code("top", "import math"))
    cells.insert(5, text("note", "My note, after the first exercise."))
    recap = cells.pop()
    cells.insert(1, recap)
    course.save(cells)
    changed = tiny_course.cells()
    changed.insert(4, text("fresh", "A second hint, before the check."))
    changed[-1]["source"] = "| no | table |"
    course.publish(changed)
    assert course.update() == ["01_tiny: updated"], "moving a cell is not changing it"
    names = list(course.cells())
    assert names[:3] == ["top", "recap", "title"]
    assert names[names.index("ex-01-1") + 1] == "note"
    assert names.index("ex-01-1") < names.index("fresh") < names.index("check-01-1")
    assert course.cells()["recap"]["source"] == "| no | table |"
    assert course.cells()["note"]["source"] == "My note, after the first exercise."


@pytest.mark.parametrize("minor", [4, 5])
def test_cells_without_ids_are_recognised(course, minor):
    """An older editor drops every id: exercises are known by their nbgrader metadata, other cells by their text."""
    cells = edited(course, ex_01_1="def double(n): return n + n")
    cells.insert(4, text("note", "My own note."))
    course.save([{key: value for key, value in cell.items() if key != "id"} for cell in cells])
    saved = {**read(course.file), "nbformat_minor": minor}
    course.file.write_text(json.dumps(saved))
    course.change("title", "## 01 · Other numbers")
    assert course.update() == ["01_tiny: updated"]
    sources = [cell["source"] for cell in course.cells().values()]
    assert sources[3:5] == ["def double(n): return n + n", "My own note."]
    assert sources[0] == "## 01 · Other numbers" and len(sources) == len(tiny_course.cells()) + 1
    assert "ex-01-1" in course.cells()
    nbformat.validate(nbformat.read(course.file, as_version=4))


def test_an_id_used_twice_loses_neither_cell(course):
    cells = edited(course, title="mine, first", ex_01_1="def double(n): return n + n")
    cells.insert(1, {**cells[0], "source": "mine, second"})
    cells.insert(5, {**cells[4], "source": "def double(n): return 2 * n"})
    course.save(cells)
    course.change("setup", "from course_kit.checks import check")
    course.update()
    assert len(course.cells()) == len(cells), "every id is used once"
    assert [cell["source"] for cell in course.cells().values()] == [
        "from course_kit.checks import check" if cell["id"] == "setup" else cell["source"] for cell in cells
    ]


def test_an_exercise_pasted_under_a_new_id_is_still_that_exercise(course):
    cells = edited(course, ex_01_1="def double(n): return n + n")
    cells[3]["id"] = "0a1b2c3d"
    course.save(cells)
    course.change("ex-01-1", tiny_course.DOUBLE.replace("Twice", "Two times"))
    [line] = course.update()
    assert course.cells()["ex-01-1"]["source"] == "def double(n): return n + n" and len(course.cells()) == len(cells)
    assert line.endswith("cell 4 (ex-01-1)")


def test_an_answer_goes_to_the_module_that_the_course_has_moved_it_to(course):
    """Directives and the places of imports are the course's, all else is the learner's, and nothing is left out."""
    given = tiny_course.DOUBLE.replace("def", "from course_lib.numbers import two\n\n\ndef", 1)
    course.change("ex-01-1", given)
    course.update()
    mine = "#| export tiny.numbers\nfrom course_lib.numbers import two\n\n\ndef double(n):\n    return n * two"
    course.save(edited(course, ex_01_1=mine, ex_01_2="#| export my.own\ndef half(n): return n / 2"))
    moves = {"#| export tiny.numbers": "#| export tiny.doubles", "course_lib.numbers": "course_lib.tiny.numbers"}
    for old, new in moves.items():
        given, mine = given.replace(old, new, 1), mine.replace(old, new, 1)
    course.change("ex-01-1", given)
    assert course.update() == ["01_tiny: updated"]
    assert course.cells()["ex-01-1"]["source"] == mine
    assert course.cells()["ex-01-2"]["source"].startswith("#| export my.own\n")


@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        b'{"cells": [{"cell_type": "code", "sou',
        b"\xff\xfe\x00",
        b"[1, 2]",
        b"{}",
        b'{"cells": [3]}',
        b'{"cells": [{"source": "x"}]}',
        b'{"cells": 5}',
    ],
)
def test_a_damaged_notebook_is_kept_aside_untouched(course, damaged):
    fresh = course.file.read_bytes()
    for number in (1, 2):
        course.file.write_bytes(damaged)
        [line] = course.update()
        aside = course.workbook / f"01_tiny.ipynb.broken-{number}"
        assert aside.read_bytes() == damaged
        assert course.file.read_bytes() == fresh
        assert line.startswith("01_tiny: handed out afresh, since") and str(aside) in line and "\n" not in line
    assert (course.workbook / "01_tiny.ipynb.broken-1").read_bytes() == damaged, "the first one is not overwritten"


def test_a_damaged_notebook_with_a_checkpoint_names_it(course):
    checkpoint = course.workbook / ".ipynb_checkpoints" / "01_tiny-checkpoint.ipynb"
    checkpoint.parent.mkdir()
    shutil.copy(course.file, checkpoint)
    course.file.write_bytes(b'{"cells": [')
    assert str(checkpoint) in course.update()[0]


@pytest.mark.parametrize("damage", ["missing", "cut", "edited", "no stamp"])
def test_without_the_base_every_cell_of_the_learners_stays(course, damage):
    cells = edited(course, ex_01_1="def double(n): return n + n", title="My title")
    cells.insert(1, text("note", "My own note."))
    course.save(cells)
    [base] = (course.workbook / ".base").iterdir()
    if damage == "missing":
        shutil.rmtree(base.parent)
    elif damage == "cut":
        base.write_bytes(base.read_bytes()[:200])
    elif damage == "edited":
        base.write_text(base.read_text().replace("Twice and half", "My title"))
    else:
        saved = read(course.file)
        del saved["metadata"]["course"]["base"]
        course.file.write_text(json.dumps(saved))
    course.change("title", "## 01 · Other numbers")
    [line] = course.update()
    found = course.cells()
    assert [found[cell["id"]]["source"] for cell in cells] == [cell["source"] for cell in cells]
    assert "missing or damaged" in line and "cell 1 (title)" in line and "(ex-01-1)" in line
    assert course.update() == ["01_tiny: up to date"]


def test_a_damaged_copy_of_the_current_version_is_repaired(course):
    [base] = (course.workbook / ".base").iterdir()
    whole = base.read_bytes()
    base.write_bytes(whole[:100])
    assert course.update() == ["01_tiny: up to date"]
    assert base.read_bytes() == whole


def test_an_old_copy_saved_over_an_update_is_updated_again(course):
    """A browser tab that was open during the update saves what it has: the old version, with the learner's work."""
    old = course.file.read_bytes()
    course.publish(next_version())
    course.update()
    course.file.write_bytes(old)
    course.save(edited(course, ex_01_1="def double(n): return n + n"))
    course.change("title", "## 01 · The third version")
    assert course.update() == ["01_tiny: updated"]
    assert course.cells()["ex-01-1"]["source"] == "def double(n): return n + n"
    assert course.cells()["title"]["source"] == "## 01 · The third version"
    assert "new" in course.cells() and "measure" not in course.cells()


def test_a_notebook_saved_during_the_update_is_read_again(course, monkeypatch):
    course.publish(next_version())
    real = make_workbook.merge

    def merge_while_jupyterlab_saves(*notebooks):
        monkeypatch.setattr(make_workbook, "merge", real)
        course.save(edited(course, ex_01_1="def double(n): return n + n"))
        return real(*notebooks)

    monkeypatch.setattr(make_workbook, "merge", merge_while_jupyterlab_saves)
    assert course.update() == ["01_tiny: updated"]
    assert course.cells()["ex-01-1"]["source"] == "def double(n): return n + n" and "new" in course.cells()


def test_a_notebook_the_course_drops_or_renames_stays_the_learners(course):
    before = course.file.read_bytes()
    (course.notebooks / "01_tiny.ipynb").rename(course.notebooks / "02_tiny.ipynb")
    assert course.update() == ["02_tiny: handed out", "01_tiny: the course has it no longer; yours stays as it is"]
    assert course.file.read_bytes() == before


def test_missing_writes_only_what_is_missing(course, monkeypatch, capsys):
    course.publish(next_version())
    tiny_course.write(course.notebooks / "02_more.ipynb", tiny_course.cells())
    before = snapshot(course.workbook)
    monkeypatch.setattr(make_workbook, "NOTEBOOKS", course.notebooks)
    monkeypatch.setattr(make_workbook, "WORKBOOK", course.workbook)
    assert make_workbook.main(["--missing"]) == 0
    assert capsys.readouterr().out == "02_more: handed out\n00_welcome: handed out\n"
    new = "02_more", "00_welcome", make_workbook.LAYOUT
    assert {path: kept for path, kept in snapshot(course.workbook).items() if not any(n in path for n in new)} == before
    assert make_workbook.main(["--mising"]) == 2
    assert capsys.readouterr().err == "usage: python scripts/make_workbook.py [--missing]\n"


@pytest.mark.parametrize("fault", ["marker", "id", "grade_id"])
def test_a_fault_in_the_course_changes_nothing(course, fault, monkeypatch, capsys):
    cells = tiny_course.cells()
    if fault == "marker":
        cells[3]["source"] = cells[3]["source"].replace("### END SOLUTION", "")
    elif fault == "grade_id":
        cells[5]["metadata"]["nbgrader"]["grade_id"] = "ex-01-1"
    course.publish(cells)
    if fault == "id":
        file = course.notebooks / "01_tiny.ipynb"
        file.write_text(file.read_text().replace('"id": "setup"', '"id": "title"'))
    tiny_course.write(course.notebooks / "00_first.ipynb", tiny_course.cells())
    before = snapshot(course.workbook)
    monkeypatch.setattr(make_workbook, "NOTEBOOKS", course.notebooks)
    monkeypatch.setattr(make_workbook, "WORKBOOK", course.workbook)
    assert make_workbook.main([]) == 2
    error = capsys.readouterr().err
    assert error.startswith("workbook: ") and "01_tiny.ipynb" in error and error.count("\n") == 1
    assert snapshot(course.workbook) == before


def in_a_child(function) -> int:
    """Run `function` in a forked process; its exit status, or minus the signal that ended it. It shares our imports."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(function())
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_read_only_folder_is_one_line_and_changes_nothing(monkeypatch):
    with tempfile.TemporaryDirectory() as folder:  # pytest's own is closed to other users, one of whom we become
        os.chmod(folder, 0o755)
        course = Course(Path(folder))
        course.publish(tiny_course.cells())
        course.update()
        course.publish(next_version())
        monkeypatch.setattr(make_workbook, "NOTEBOOKS", course.notebooks)
        monkeypatch.setattr(make_workbook, "WORKBOOK", course.workbook)
        messages = Path(folder) / "messages"
        messages.touch()
        messages.chmod(0o666)

        def update_as_a_stranger():
            if os.geteuid() == 0:
                os.setuid(65534)  # root may write anywhere
            with open(messages, "w") as sys.stderr:
                return make_workbook.main([])

        folders = [course.workbook / ".base", course.workbook]
        before = snapshot(course.workbook)
        for path in folders:
            path.chmod(0o555)
        status = in_a_child(update_as_a_stranger)
        for path in folders:
            path.chmod(0o755)
        assert status == 2
        message = messages.read_text()
        assert message.startswith("workbook: Permission denied: ") and message.count("\n") == 1
        assert snapshot(course.workbook) == before


def kill_at_line(number: int, action) -> int:
    """Run `action` in a child that kills itself at the `number`th line it executes of the two scripts' writing code."""
    watched = {"write_atomically", "keep_base", "update", "hand_out", "set_aside"}

    def child():
        left = number

        def trace(frame, event, _):
            nonlocal left
            file, function = Path(frame.f_code.co_filename).name, frame.f_code.co_name
            if file not in ("make_workbook.py", "export.py") or function not in watched:
                return None
            if event == "line":
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
            return trace

        sys.settrace(trace)
        action()
        return 0

    return in_a_child(child)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.parametrize("start", ["nothing there", "a notebook", "a damaged notebook"])
def test_a_kill_at_any_line_loses_and_mixes_nothing(tmp_path, start):
    """Killed anywhere, the notebook is the old or the new one, and the next update gives what it would have given."""
    prepared = Course(tmp_path / "prepared")
    prepared.publish(tiny_course.cells())
    if start != "nothing there":
        prepared.update()
        prepared.save(edited(prepared, ex_01_1="def double(n): return n + n"))
    if start == "a damaged notebook":
        prepared.file.write_bytes(b'{"cells": [{"source": "mine')
    prepared.publish(next_version())

    def copy_of_it(name: str) -> Course:
        return Course(shutil.copytree(tmp_path / "prepared", tmp_path / name))

    def third_version(course: Course) -> dict:
        course.change("title", "## 01 · The third version")
        course.change("check-01-1", "assert double(1) == 2")
        course.update()
        return course.cells()

    whole = copy_of_it("whole")
    old = whole.file.read_bytes() if whole.file.exists() else None
    whole.update()
    new = whole.file.read_bytes()
    expected = third_version(whole)
    for number in range(1, 200):
        course = copy_of_it(f"killed-{number}")
        status = kill_at_line(number, course.update)
        broken = [path.read_bytes() for path in course.workbook.glob("*.broken-*")]
        if start == "a damaged notebook":
            assert broken == [old] or course.file.read_bytes() == old, "the learner's bytes are gone"
        if course.file.exists():
            assert course.file.read_bytes() in (old, new)
        else:
            assert start == "nothing there" or broken == [old]
        for base in course.workbook.glob(".base/*.ipynb"):
            nbformat.validate(nbformat.read(base, as_version=4))
        assert third_version(course) == expected
        if status == 0:
            break
        assert status == -signal.SIGKILL
    assert status == 0 and number > 20, "the update has come to its end, after many a kill"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_no_notebook_is_ever_opened_for_writing(course):
    """Each is replaced in one step, so that no reader and no kill meets half of one."""
    course.save(edited(course, ex_01_1="def double(n): return n + n"))
    course.publish(next_version())
    opened, replaced = [], []

    def watch(event, arguments):
        if event == "open" and str(arguments[0]).endswith(".ipynb") and arguments[2] & (os.O_WRONLY | os.O_RDWR):
            opened.append(arguments[0])
        if event == "os.rename" and str(arguments[1]).endswith(".ipynb"):
            replaced.append(arguments[1])

    def child():
        sys.addaudithook(watch)
        course.update()
        return 10 * len(opened) + len(replaced)

    assert in_a_child(child) == 2, "a base and a workbook, both by a rename"


def random_edits(cells: list[dict], chance: random.Random, who: str, learner: bool) -> list[dict]:
    """The cells after a few random edits, deletions, additions and moves; a learner also runs cells."""
    cells = copy.deepcopy(cells)
    for number in range(chance.randrange(6)):
        action = chance.choice(["edit", "delete", "add", "move", "run" if learner else "edit"])
        place = chance.randrange(len(cells) + 1)
        if action == "add":
            cells.insert(place, dict(code(f"{who}-{number}", f"# new, by {who}\n" + "pass\n" * chance.randrange(3))))
        elif place < len(cells):
            cell = cells[place]
            if action == "edit":
                lines = cell["source"].split("\n")
                lines[chance.randrange(len(lines))] = f"# {who}, edit {number}"
                cell["source"] = "\n".join(lines)
            elif action == "run":
                cell["outputs"], cell["execution_count"] = [{**RESULT, "text": [f"{who} {number}"]}], number
            else:
                cells.remove(cell)
                if action == "move":
                    cells.insert(chance.randrange(len(cells) + 1), cell)
    return cells


def some_cells(chance: random.Random) -> list[dict]:
    """Eight cells of one to four lines."""
    lengths = [chance.randrange(1, 5) for _ in range(8)]
    return [dict(code(f"cell-{i}", "\n".join(f"line {i} {j}" for j in range(n)))) for i, n in enumerate(lengths)]


def as_notebook(cells: list[dict], version: str) -> dict:
    return {"cells": cells, "metadata": {"course": {"base": version}}, "nbformat": 4, "nbformat_minor": 5}


def assert_nothing_lost(base: list[dict], learner: list[dict], course: list[dict], merged: dict, left_out: list[str]):
    """What must hold of any merge."""
    names = [cell["id"] for cell in merged["cells"]]
    assert len(names) == len(set(names)), "an id stands twice"
    old, mine, new, now = ({cell["id"]: cell for cell in cells} for cells in (base, learner, course, merged["cells"]))
    changed = {name for name in mine if name not in old or mine[name]["source"] != old[name]["source"]}
    for name in changed:
        assert now[name] == mine[name], "a cell of the learner's is not there as they left it"
    for name in set(old) - set(mine):
        assert name not in now, "a cell the learner deleted is back"
    for name in set(now) - changed:
        assert now[name]["source"] == new[name]["source"], "a cell the learner left alone is not the course's"
        if name in mine and mine[name]["source"] == new[name]["source"]:
            assert now[name]["outputs"] == mine[name]["outputs"], "outputs of an unchanged cell are lost"
    assert set(new) - set(old) <= set(now), "a new cell of the course is missing"
    both = {
        name
        for name in set(old) & set(new)
        if old[name]["source"] != new[name]["source"]
        and (name not in mine or name in changed)
        and mine.get(name, {}).get("source") != new[name]["source"]
    }
    assert both == {name for name in left_out if name in new}, "a change was left out and not named, or named and not"
    if not changed and [*mine] == [*old]:
        assert names == [*new], "a learner who moved nothing has another order"


def test_random_edits_on_both_sides_lose_and_mix_nothing():
    for seed in range(600):
        chance = random.Random(seed)
        base = some_cells(chance)
        learner = base
        for version in range(3):  # each update starts from what the last one left
            learner = random_edits(learner, chance, f"learner{version}", learner=True)
            course = random_edits(base, chance, f"course{version}", learner=False)
            versions = as_notebook(base, "old"), as_notebook(copy.deepcopy(learner), "old"), as_notebook(course, "new")
            merged, left_out = make_workbook.merge(*versions)
            assert_nothing_lost(base, learner, course, merged, left_out)
            again, left_out = make_workbook.merge(as_notebook(course, "new"), merged, as_notebook(course, "new"))
            assert again == merged and not left_out, "a second merge changes something"
            base, learner = course, merged["cells"]


def test_random_edits_without_a_base_lose_nothing():
    for seed in range(300):
        chance = random.Random(seed)
        base = some_cells(chance)
        learner, course = (random_edits(base, chance, who, learner=who == "learner") for who in ("learner", "course"))
        merged, _ = make_workbook.merge(None, as_notebook(copy.deepcopy(learner), "?"), as_notebook(course, "new"))
        now = {cell["id"]: cell["source"] for cell in merged["cells"]}
        assert len(now) == len(merged["cells"])
        assert {cell["id"]: cell["source"] for cell in course} | {cell["id"]: cell["source"] for cell in learner} == now


def test_random_loss_of_ids_loses_no_text():
    for seed in range(300):
        chance = random.Random(seed)
        base = some_cells(chance)
        course = random_edits(base, chance, "course", learner=False)
        learner = random_edits(base, chance, "learner", learner=True)
        for cell in learner:
            match chance.randrange(4):
                case 0:
                    del cell["id"]
                case 1:
                    cell["id"] = chance.choice(base)["id"]
        old = {cell["source"] for cell in base}
        mine = [cell["source"] for cell in learner if cell["source"] not in old]
        versions = as_notebook(base, "old"), as_notebook(learner, "old"), as_notebook(course, "new")
        merged, _ = make_workbook.merge(*versions)
        now = [cell["source"] for cell in merged["cells"]]
        assert all(now.count(source) >= mine.count(source) for source in mine)
        assert len({cell["id"] for cell in merged["cells"]}) == len(now)


def split(course: Course) -> None:
    """The course's next version: from exercise 01.2 on, the notebook's cells stand in a second one."""
    cells = {cell["id"]: cell for cell in tiny_course.cells()}
    stay = ["title", "setup", "hint-1", "ex-01-1", "check-01-1", "recap"]
    cells["ex-01-2"]["source"] = cells["ex-01-2"]["source"].replace("tiny.numbers", "tiny.halves")
    course.publish([cells[name] for name in stay])
    second = [text("title", "## 01, part 2"), code("setup", "from course_kit.checks import check")]
    second += [cell for name, cell in cells.items() if name not in stay]
    tiny_course.write(course.notebooks / "01b_more.ipynb", second)


MINE = "#| export tiny.numbers\ndef half(number):\n    return number * 0.5"


def test_what_a_learner_has_written_moves_with_its_cell_to_a_new_notebook(course):
    own = code("mine", "print('a cell of my own')")
    cells = edited(course, ex_01_1="double = lambda n: n + n", ex_01_2=MINE, measure="measured = 5")
    course.save([*cells[:6], own, *cells[6:]])
    split(course)
    assert course.update() == [
        "01b_more: handed out, with what you have written in its cells where they stood before",
        "01_tiny: updated",
    ]
    second = {cell["id"]: cell for cell in read(course.workbook / "01b_more.ipynb")["cells"]}
    assert second["ex-01-2"]["source"] == MINE.replace("tiny.numbers", "tiny.halves")
    assert second["measure"]["source"] == "measured = 5" and second["title"]["source"] == "## 01, part 2"
    assert "YOUR CODE HERE" in second["ex-01-3"]["source"]
    assert list(course.cells()) == ["title", "setup", "hint-1", "ex-01-1", "check-01-1", "mine", "recap"]
    assert course.cells()["ex-01-1"]["source"] == "double = lambda n: n + n"
    before = snapshot(course.workbook)
    assert course.update() == ["01_tiny: up to date", "01b_more: up to date"]
    assert snapshot(course.workbook) == before


def test_a_cell_that_moves_is_never_nowhere(course):
    course.save(edited(course, ex_01_2=MINE))
    split(course)
    steps = make_workbook.make_workbook(course.notebooks, course.workbook)
    assert next(steps).startswith("01b_more")
    steps.close()  # killed here
    assert course.cells()["ex-01-2"]["source"] == MINE, "it stands in both"
    course.save(edited(course, ex_01_2=MINE + " + 0"))  # and the old one is edited once more
    assert "01_tiny: updated; yours is kept" in course.update()[0]
    assert course.cells()["ex-01-2"]["source"] == MINE + " + 0"


def test_a_notebook_that_the_course_has_no_longer_stays_and_its_cells_move(course):
    course.save(edited(course, ex_01_2=MINE, title="## mine"))
    split(course)
    (course.notebooks / "01_tiny.ipynb").rename(course.notebooks / "01_numbers.ipynb")
    (course.workbook / "notes.ipynb").write_text(json.dumps(tiny_course.notebook([text("title", "my own notebook")])))
    before = course.file.read_bytes()
    assert course.update() == [
        "01_numbers: handed out",
        "01b_more: handed out, with what you have written in its cells where they stood before",
        "01_tiny: the course has it no longer; yours stays as it is",
    ]
    assert course.file.read_bytes() == before
    second = {cell["id"]: cell for cell in read(course.workbook / "01b_more.ipynb")["cells"]}
    assert second["ex-01-2"]["source"] == MINE.replace("tiny.numbers", "tiny.halves")


def test_the_welcome_page_is_updated_until_the_learner_changes_it(tmp_path):
    source, page = tmp_path / "welcome.md", tmp_path / "workbook" / "00_welcome.md"

    def hand_out(text, **how):
        source.write_text(text)
        return list(make_workbook.hand_out_page(source, page, **how))

    assert hand_out("one") == ["00_welcome: handed out"] and hand_out("one") == []
    assert hand_out("two", only_missing=True) == [] and page.read_text() == "one"
    assert hand_out("two") == ["00_welcome: updated"] and page.read_text() == "two"
    page.write_text("one")  # an old copy put back
    assert hand_out("three") == ["00_welcome: updated"]
    page.write_text("three, and a note of mine")
    assert hand_out("four") == [] and page.read_text() == "three, and a note of mine"


def test_the_first_layout_of_jupyterlab_is_handed_out_once(course, monkeypatch):
    """JupyterLab opens it from there, and writes the learner's own layout to the same file."""
    for name, folder in {"NOTEBOOKS": course.notebooks, "WORKBOOK": course.workbook}.items():
        monkeypatch.setattr(make_workbook, name, folder)
    layout = course.workbook / make_workbook.LAYOUT
    assert make_workbook.main([]) == 0 and "00_welcome.md" in layout.read_text()
    layout.write_text("mine")
    assert make_workbook.main([]) == 0 and layout.read_text() == "mine"


def test_what_the_welcome_page_names_is_there():
    page = make_workbook.WELCOME.read_text()
    links = re.findall(r"\]\((\S+\.ipynb)\)", page)
    assert links and all((make_workbook.NOTEBOOKS / link).exists() for link in links)
    targets = re.findall(r"^([a-z-]+):.*## ", (make_workbook.ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {*re.findall(r"`make ([a-z]+)", page)} <= {*targets}
