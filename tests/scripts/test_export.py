"""scripts/export.py: course_lib has what the notebooks export; a difference or a wrong cell is named. Needs no GPU."""

import functools
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import export
import tiny_course
from exercises import exercise_name, exercises
from make_workbook import blank_notebook
from tiny_course import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"
STUB = ["# YOUR CODE HERE", "raise NotImplementedError()"]


# The course itself.


def test_course_lib_is_in_step_with_the_notebooks():
    """Where this fails, run 'make export': each line names the module, the notebook and the cell."""
    assert export.differences(export.library_texts()) == []


def test_no_marker_reached_course_lib():
    for file in export.LIBRARY.rglob("*.py"):
        found = re.search(r"### (BEGIN|END) (SOLUTION|HIDDEN TESTS)|# YOUR CODE HERE", file.read_text(encoding="utf-8"))
        assert not found, f"{file.name} has a marker: {found[0]}"


def exercise_faults(notebook: dict) -> list[str]:
    """What is wrong with the exercises of a notebook: one line each, naming the cell."""
    faults, checked = [], []
    for cell in notebook["cells"]:
        name, kind = cell["id"], cell["metadata"].get("nbgrader", {})
        regions = [line.strip() for line in cell["source"].splitlines() if line.strip() in (BEGIN, END)]
        if exercise_name(cell, "ex"):
            if not regions or regions != [BEGIN, END] * (len(regions) // 2):
                faults.append(f"{name} needs a region from {BEGIN} to {END}; its markers: {regions or 'none'}")
            if not kind.get("solution") or kind["grade"] or kind["grade_id"] != name:
                faults.append(f"{name} is no solution cell of its name in nbgrader's metadata")
            if exercise_name(cell, "ex") in checked:
                faults.append(f"{name} stands after its check")
        elif regions or kind.get("solution"):
            faults.append(f"{name} has solution markers or metadata, and its id is not that of an exercise")
        if exercise_name(cell, "check"):
            checked.append(exercise_name(cell, "check"))
            if not kind.get("grade") or not kind["locked"] or not kind["points"] or kind["grade_id"] != name:
                faults.append(f"{name} is no locked, graded cell of its name, worth a point, in nbgrader's metadata")
        elif kind.get("grade"):
            faults.append(f"{name} is graded, and its id is not that of a check")
    names = list(exercises(notebook))
    faults += [f"exercise {name} has no check" for name in names if name not in checked]
    return faults + [f"check {name} has no exercise" for name in checked if name not in names]


@each_notebook
def test_every_exercise_has_markers_and_a_check(path):
    assert exercise_faults(export.read_notebook(path)) == []
    assert exercises(export.read_notebook(path)), "a notebook has exercises"


@each_notebook
def test_outside_its_region_a_blank_is_the_solved_cell(path):
    blank = {cell["id"]: cell["source"].split("\n") for cell in blank_notebook(path)["cells"]}
    solved = {cell["id"]: cell["source"].split("\n") for cell in export.read_notebook(path)["cells"]}
    assert list(blank) == list(solved)
    for name, lines in solved.items():
        expected, inside = [], False
        for line in lines:
            if line.strip() == BEGIN:
                inside = True
                expected += [line[: -len(BEGIN)] + stub for stub in STUB]
            elif line.strip() == END:
                inside = False
            elif not inside:
                expected.append(line)
        assert "### BEGIN HIDDEN TESTS" in expected or blank[name] == expected, f"cell {name}"


@each_notebook
def test_every_spliced_line_leads_back_to_its_cell(path, monkeypatch):
    """A line of a definition that a notebook owns is a line of that cell, without indentation and solution markers."""
    monkeypatch.setattr(export, "read_notebook", functools.cache(export.read_notebook))
    cells = {cell.get("id"): cell["source"].split("\n") for cell in export.read_notebook(path)["cells"]}
    ids = {cell.name for cell in export.spliced_cells(export.read_notebook(path), path)}
    for module in {cell.module for cell in export.spliced_cells(export.read_notebook(path), path)}:
        file = export.module_file(export.LIBRARY, module)
        content = file.read_text(encoding="utf-8")
        for each in export.owned(content):
            for number in range(each.start, each.end + 1):
                line = content.split("\n")[number - 1].strip()
                where, _, cell_id, cell_line = export.locate(file, number, content)
                if where == path and line:
                    ids.discard(cell_id)
                    found = re.sub(r"\b(self|cls): \w+", r"\1", cells[cell_id][cell_line - 1].strip())
                    assert found == line, f"{file.name}, line {number}, of {cell_id}"
    assert not ids, "nothing leads back to these cells"


@pytest.mark.parametrize(
    "plant, named",
    [
        (lambda cells: cells[3].update(source="def double(number):\n    return 2 * number"), "ex-01-1 needs a region"),
        (lambda cells: cells[3].update(source=cells[3]["source"].replace(END, "")), "ex-01-1 needs a region"),
        (
            lambda cells: cells[3].update(source=f"{END}\n" + cells[3]["source"] + f"\n{BEGIN}"),
            "ex-01-1 needs a region",
        ),
        (lambda cells: cells[3].update(source=cells[3]["source"] + f"\n{BEGIN}\nx = 1\n{END}"), None),
        (lambda cells: cells[3]["metadata"].clear(), "ex-01-1 is no solution cell"),
        (lambda cells: cells[3].update(id="double"), "double has solution markers"),
        (lambda cells: cells[4]["metadata"].clear(), "check-01-1 is no locked, graded cell"),
        (lambda cells: cells[4].update(id="look"), "exercise 01.1 has no check"),
        (lambda cells: cells.pop(4), "exercise 01.1 has no check"),
        (lambda cells: cells.pop(3), "check 01.1 has no exercise"),
        (lambda cells: cells.insert(6, cells.pop(4)), None),
        (lambda cells: cells.insert(3, cells.pop(4)), "ex-01-1 stands after its check"),
    ],
)
def test_a_planted_fault_of_an_exercise_is_named(plant, named):
    cells = tiny_course.cells()
    assert exercise_faults({"cells": cells}) == []
    plant(cells)
    found = exercise_faults({"cells": cells})
    assert any(named in line for line in found) if named else found == []


@pytest.mark.parametrize(
    "content, message",
    [
        (None, "no such file"),
        (b"", "cut short"),
        (b'{"cells": [', "cut short"),
        (b"\xff\xfe", "cut short"),
        (b"[]", "no list of cells"),
        (b'{"cells": 3}', "no list of cells"),
    ],
)
def test_what_is_no_notebook_is_one_line(tmp_path, content, message):
    path = tmp_path / "01_tiny.ipynb"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(export.ExportError) as caught:
        export.read_notebook(path)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(export.ExportError, match="is a folder"):
        export.read_notebook(tmp_path)


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    file = tmp_path / "module.py"
    file.write_text("old = 1\n")
    file.chmod(0o640)

    def fail(*arguments):
        raise OSError(28, "No space left on device")

    for step in ("fsync", "replace"):
        with monkeypatch.context() as patch, pytest.raises(OSError):
            patch.setattr(export.os, step, fail)
            export.write_atomically(file, "new = 2\n")
        assert file.read_text() == "old = 1\n" and list(tmp_path.iterdir()) == [file]
    with pytest.raises(UnicodeEncodeError):
        export.write_atomically(file, "half a pair: \ud83d")
    assert file.read_text() == "old = 1\n" and list(tmp_path.iterdir()) == [file]

    export.write_atomically(file, "new = 2\n")
    assert file.read_text() == "new = 2\n" and list(tmp_path.iterdir()) == [file]
    assert file.stat().st_mode & 0o777 == 0o640, "the file's own mode stays"


# A project of one module.

MODULE = '''"""Numbers."""

from __future__ import annotations


def double(number: float) -> float:
    """Twice the number."""
    return number * 2


class Counter:
    """Counts."""

    def add(self, more: int) -> None:
        self.count += more

    # exercise 01.9
    def gone(self) -> None:
        """Once an exercise."""
'''
DOUBLE = (
    '#| export tiny.numbers\ndef double(number: float) -> float:\n    """Twice the number."""\n'
    "    ### BEGIN SOLUTION\n\n    return number + number\n    ### END SOLUTION\n"
)
ADD = (
    "#| export tiny.numbers:Counter\ndef add(self: Counter, more: int) -> None:\n    ### BEGIN SOLUTION\n\n\n"
    "    total = self.count + more / more\n    self.count = total\n    ### END SOLUTION\n"
)


@pytest.fixture
def project(tmp_path) -> Path:
    """A project of one module and one notebook."""
    (tmp_path / "course_lib" / "tiny").mkdir(parents=True)
    (tmp_path / "course_lib" / "tiny" / "numbers.py").write_text(MODULE)
    save(tmp_path, DOUBLE, ADD)
    return tmp_path


def save(project: Path, *sources: str, name: str = "01_tiny.ipynb") -> None:
    """Write a notebook with these exercises."""
    cells = [
        {
            "id": f"ex-01-{n}",
            "cell_type": "code",
            "source": source,
            "metadata": {},
            "outputs": [],
            "execution_count": None,
        }
        for n, source in enumerate(sources, 1)
    ]
    course = {"course": {"program": "tiny.numbers"}}
    (project / "notebooks").mkdir(exist_ok=True)
    text = json.dumps({"cells": cells, "metadata": course, "nbformat": 4, "nbformat_minor": 5})
    (project / "notebooks" / name).write_text(text)


def exported(project: Path) -> str:
    """The module as the notebooks export it."""
    return export.library_texts(project / "notebooks")["tiny.numbers"]


def test_cells_take_the_place_of_definitions_and_stale_comments_go(project):
    text = exported(project)
    assert (
        '# exercise 01.1\ndef double(number: float) -> float:\n    """Twice the number."""\n\n    return number + '
        in text
    )
    assert "    # exercise 01.2\n    def add(self, more: int) -> None:\n\n\n        total" in text
    assert "exercise 01.9" not in text and "def gone" in text


def test_what_differs_is_named_and_formatting_is_no_difference(project):
    library = project / "course_lib"

    def differences():
        return export.differences(export.library_texts(project / "notebooks"), library)

    expected = {f"exercise {each}" for each in ("01.9 (Counter.gone)", "01.1 (double)", "01.2 (Counter.add)")}
    assert set(differences()) == {f"tiny/numbers.py and {each} differ" for each in expected}
    export.write_modules(export.library_texts(project / "notebooks"), library)
    assert differences() == []
    file = library / "tiny" / "numbers.py"
    file.write_text(export.formatted(file.read_text()))
    assert "-> None:\n\n        total" in file.read_text(), "as ruff format leaves it"
    assert differences() == []
    file.write_text(file.read_text().replace("number + number", "number * 2"))
    assert differences() == ["tiny/numbers.py and exercise 01.1 (double) differ"]
    file.write_text(
        file.read_text().replace("# exercise 01.1", "# exercise 01.7").replace("number * 2", "number + number")
    )
    assert any("01.7" in line for line in differences())


@pytest.mark.parametrize(
    "source, words",
    [
        (DOUBLE.replace("def double", "def triple"), "cell ex-01-1: course_lib.tiny.numbers has no triple to replace"),
        (DOUBLE.replace("tiny.numbers", "tiny.letters"), "there is no module course_lib.tiny.letters to export to"),
        (ADD.replace(":Counter", ":Adder"), "cell ex-01-1: course_lib.tiny.numbers has no class Adder"),
        (DOUBLE.replace("number + number", "number +"), "cell ex-01-1, line 6: syntax error"),
        ("# Twice\n" + DOUBLE, "cell ex-01-1, line 2: '#| export tiny.numbers' must be the first line of the cell"),
        (DOUBLE.replace("Twice the number", "Twice\f the number"), "cell ex-01-1, line 3 holds U+000C"),
        (DOUBLE.replace("Twice the number", "Twice\u2028 the number"), "cell ex-01-1, line 3 holds U+2028"),
        (
            DOUBLE.replace("number + number", "numpy.add(number, number)"),
            "line 6: course_lib.tiny.numbers, where your code",
        ),
        (DOUBLE + "import os\n\n\ndef double2(): return os\n", "has no double2 to replace"),
    ],
    ids=range(9),
)
def test_a_wrong_cell_is_told_in_one_line_and_nothing_is_written(project, source, words):
    save(project, source)
    with pytest.raises(export.ExportError) as refused:
        exported(project)
    assert words in str(refused.value) and "\n" not in str(refused.value) and "01_tiny.ipynb" in str(refused.value)


def test_two_owners_of_one_definition_are_told(project):
    save(project, DOUBLE, name="02_more.ipynb")
    with pytest.raises(
        export.ExportError, match="02_more.ipynb, cell ex-01-1 and 01_tiny.ipynb, cell ex-01-1 both export double"
    ):
        exported(project)


def test_a_line_of_the_library_leads_to_its_cell(project, monkeypatch):
    monkeypatch.setattr(export, "NOTEBOOKS", project / "notebooks")
    file = project / "course_lib" / "tiny" / "numbers.py"
    for text in (exported(project), export.formatted(exported(project))):
        file.write_text(text)
        line = 1 + text.split("\n").index("    return number + number")
        assert export.locate(file, line) == (project / "notebooks" / "01_tiny.ipynb", 1, "ex-01-1", 6)
        line = 1 + text.split("\n").index("        self.count = total")
        assert export.locate(file, line)[1:] == (2, "ex-01-2", 7)
        assert export.locate(file, 1) is None


def test_the_command_checks_and_mends(project):
    """0 in sync, 1 with a line for each difference, 2 with one line where it cannot export; then nothing is written."""
    (project / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "export.py", project / "scripts")
    file = project / "course_lib" / "tiny" / "numbers.py"

    def run(*arguments):
        command = [sys.executable, project / "scripts" / "export.py", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=300)

    found = run("--check")
    assert (found.returncode, found.stdout.count("\n")) == (1, 3) and file.read_text() == MODULE
    assert run().returncode == 0 and run("--check").returncode == 0
    text = file.read_text()
    assert text == export.formatted(text) and "# exercise 01.1\ndef double" in text
    before = file.stat().st_mtime_ns
    assert run().returncode == 0 and file.stat().st_mtime_ns == before, "what is in sync is not written again"
    save(project, DOUBLE, ADD.replace("total =", "total ="), DOUBLE)
    failed = run()
    assert failed.returncode == 2 and failed.stderr.count("\n") == 1 and "both export double" in failed.stderr
    assert file.read_text() == text
