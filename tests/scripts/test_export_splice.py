"""scripts/export.py with notebooks of the new shape: cells spliced into a hand-written library, or one line."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import export
from export import ROOT

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
    """A project of one module, written by hand, and one notebook of the new shape."""
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
    """0 in step, 1 with a line for each difference, 2 with one line where it cannot export; then nothing is written."""
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
    assert run().returncode == 0 and file.stat().st_mtime_ns == before, "what is in step is not written again"
    save(project, DOUBLE, ADD.replace("total =", "total ="), DOUBLE)
    failed = run()
    assert failed.returncode == 2 and failed.stderr.count("\n") == 1 and "both export double" in failed.stderr
    assert file.read_text() == text
