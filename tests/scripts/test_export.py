"""scripts/export.py: course_lib is what the notebooks say, and every way it may not be is named. Needs no GPU."""

import functools
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
from tiny_course import ROOT, code, text

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
SPLICED = [path for path in NOTEBOOKS if export.program_of(export.read_notebook(path))]  # into modules written by hand
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


def plain_line(line: str) -> str:
    """A line without what export changes in it: where the library is imported from, and spaces at its end."""
    return re.sub(r"from (course_lib|\.)[\w.]*?(\w*) import", r"from \2 import", line).rstrip()


@pytest.mark.parametrize("path", [path for path in NOTEBOOKS if path not in SPLICED], ids=lambda path: path.stem)
def test_every_exported_line_leads_back_to_its_cell(path, monkeypatch):
    monkeypatch.setattr(export, "read_notebook", functools.cache(export.read_notebook))  # once, not for each line
    notebook = export.read_notebook(path)
    cells = dict(export.exported_cells(notebook))
    for module in export.module_texts(notebook, path):
        file = export.module_file(export.LIBRARY, module)
        content = file.read_text(encoding="utf-8")
        lines = content.splitlines()
        heading = next(number for number, line in enumerate(lines, start=1) if export.BLOCK.match(line))
        for number, line in enumerate(lines, start=1):
            found = export.locate(file, number, content)
            if number <= heading or export.BLOCK.match(line) or not line.strip():
                continue
            assert found, f"{file.name}, line {number} leads nowhere: {line}"
            where, cell_number, cell_id, cell_line = found
            source = cells[cell_number]["source"].splitlines()
            assert (where, cell_id) == (path, cells[cell_number]["id"])
            assert plain_line(source[cell_line - 1]) == plain_line(line), f"{file.name}, line {number}"


@pytest.mark.parametrize("path", SPLICED, ids=lambda path: path.stem)
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
                    found = re.sub(r"(self|cls): \w+", r"\1", cells[cell_id][cell_line - 1].strip())
                    assert found == line, f"{file.name}, line {number}, of {cell_id}"
    assert not ids, "nothing leads back to these cells"


# A tiny course with every fault in turn.


@pytest.fixture
def tiny(tmp_path):
    """A project whose library is in step: its folder."""
    tiny_course.write(
        tmp_path / "notebooks" / "01_tiny.ipynb",
        [
            *tiny_course.cells(),
            code("more-docstring", '#| export pack.more\n"""A second module."""'),
            code("more-import", "#| export pack.more\nfrom course_lib.tiny import double"),
            code("more-four", "#| export pack.more\nfour = double(2)"),
        ],
    )
    export.write_modules(export.library_texts(tmp_path / "notebooks"), tmp_path / "course_lib")
    return tmp_path


def replace(file: Path, old: str, new: str) -> None:
    """Replace a text that must be there."""
    content = file.read_text(encoding="utf-8")
    assert old in content
    file.write_text(content.replace(old, new), encoding="utf-8")


def swap_first_blocks(file: Path) -> None:
    """Write the first two blocks of a module in the other order."""
    top, *parts = re.split(r"(?m)^(?=# %% \S+\.ipynb #)", file.read_text(encoding="utf-8"))
    file.write_text(top + "".join([parts[1], parts[0], *parts[2:]]), encoding="utf-8")


def cut_block(file: Path, cell_id: str) -> None:
    """Take the block of a cell out of a module."""
    parts = re.split(r"(?m)^(?=# %% \S+\.ipynb #)", file.read_text(encoding="utf-8"))
    file.write_text("".join(part for part in parts if f"#{cell_id}\n" not in part), encoding="utf-8")


def faults(project: Path) -> list[str]:
    return export.differences(export.library_texts(project / "notebooks"), project / "course_lib")


def test_a_library_in_step_has_no_differences(tiny):
    assert faults(tiny) == []
    library = tiny / "course_lib"
    assert sorted(str(file.relative_to(library)) for file in library.rglob("*.py")) == ["pack/more.py", "tiny.py"]


@pytest.mark.parametrize(
    "plant, named",
    [
        (
            lambda lib, nbs: replace(lib / "tiny.py", "return 2 * number", "return number + number"),
            "tiny.py and 01_tiny.ipynb, cell ex-01-1 differ",
        ),
        (
            lambda lib, nbs: replace(nbs / "01_tiny.ipynb", "return number / 2", "return number * 0.5"),
            "tiny.py and 01_tiny.ipynb, cell ex-01-2 differ",
        ),
        (
            lambda lib, nbs: replace(lib / "tiny.py", "return 2 * number", "return 2 * number\n\nthree = 3"),
            "tiny.py and 01_tiny.ipynb, cell ex-01-1 differ",
        ),
        (lambda lib, nbs: cut_block(lib / "tiny.py", "ex-01-2"), "tiny.py and 01_tiny.ipynb, cell ex-01-2 differ"),
        (
            lambda lib, nbs: replace(nbs / "01_tiny.ipynb", '"id": "ex-01-2"', '"id": "ex-01-4"'),
            "tiny.py and 01_tiny.ipynb, cell ex-01-4 differ",
        ),
        (
            lambda lib, nbs: replace(lib / "pack" / "more.py", "A second module", "Another"),
            "pack/more.py and docstring and imports at the top differ",
        ),
        (lambda lib, nbs: swap_first_blocks(lib / "tiny.py"), "tiny.py holds the cells in another order"),
        (lambda lib, nbs: (lib / "pack" / "more.py").unlink(), "pack/more.py is missing: run 'make export'"),
        (lambda lib, nbs: (lib / "own.py").write_text("# %% nbs/09.ipynb #a\n"), "own.py is exported by no notebook"),
    ],
)
def test_a_planted_difference_is_named_with_its_cell(tiny, plant, named):
    plant(tiny / "course_lib", tiny / "notebooks")
    assert named in faults(tiny)
    export.write_modules(export.library_texts(tiny / "notebooks"), tiny / "course_lib")
    assert [line for line in faults(tiny) if "own.py" not in line] == [], "an export mends it"


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


def test_export_drops_directives_and_markers_and_nothing_else(tiny):
    assert (
        (tiny / "course_lib" / "tiny.py")
        .read_text()
        .endswith(
            'def double(number):\n    """Twice the number."""\n    return 2 * number\n\n'
            f"# %% {export.os.path.relpath(tiny, export.LIBRARY)}/notebooks/01_tiny.ipynb #ex-01-2\n"
            'def half(number):\n    """Half of the number."""\n    return number / 2\n'
        )
    )
    more = (tiny / "course_lib" / "pack" / "more.py").read_text()
    assert more.startswith('"""A second module."""\n') and "from ..tiny import double" in more


def test_a_notebook_with_a_title_and_a_bare_export_is_exported(tmp_path):
    """nbdev itself takes a markdown cell that starts with '# ' into the default module."""
    cells = [text("top", "# 01 · A title\n\nText."), *tiny_course.cells()]
    path = tiny_course.write(tmp_path / "01_tiny.ipynb", cells)
    made = export.module_texts(export.read_notebook(path), path)["tiny"]
    assert "A title" not in made and "def double" in made


def test_a_located_line_skips_directives_and_markers(tmp_path):
    path = tiny_course.write(tmp_path / "notebooks" / "01_tiny.ipynb", tiny_course.cells())
    texts = export.module_texts(export.read_notebook(path), path, library=tmp_path / "course_lib")
    export.write_modules(texts, tmp_path / "course_lib")
    file = tmp_path / "course_lib" / "tiny.py"
    lines = file.read_text().splitlines()
    assert export.locate(file, lines.index("    return 2 * number") + 1) == (path, 4, "ex-01-1", 5)
    assert export.locate(file, lines.index("def half(number):") + 1) == (path, 6, "ex-01-2", 2)
    assert export.locate(file, 1) is None


@pytest.mark.parametrize(
    "source, message",
    [
        ("#| export\nx = 1\ndef broken(:\n    pass", "01_tiny.ipynb: cell 12 (late), line 3: syntax error"),
        ("#| export other\nx = (1,\n", "01_tiny.ipynb: cell 12 (late), line 2: syntax error"),
    ],
)
def test_a_syntax_error_is_named_by_cell_and_line(tiny, source, message):
    tiny_course.write(tiny / "notebooks" / "01_tiny.ipynb", [*tiny_course.cells(), code("late", source)])
    with pytest.raises(export.ExportError) as caught:
        export.library_texts(tiny / "notebooks")
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_syntax_error_in_a_cell_that_is_not_exported_does_not_matter(tiny):
    tiny_course.write(tiny / "notebooks" / "01_tiny.ipynb", [*tiny_course.cells(), code("magic", "%matplotlib inline")])
    assert "tiny" in export.library_texts(tiny / "notebooks")


def test_two_notebooks_may_not_export_to_one_module(tiny):
    shutil.copy(tiny / "notebooks" / "01_tiny.ipynb", tiny / "notebooks" / "02_more.ipynb")
    expected = "02_more.ipynb exports to '(tiny|pack.more)', a module of 01_tiny.ipynb"
    with pytest.raises(export.ExportError, match=expected):
        export.library_texts(tiny / "notebooks")


@pytest.mark.parametrize(
    "cells, message",
    [
        ([text("title", "# Nothing")], "has no cell marked '#| export'"),
        ([code("one", "#| export\nx = 1")], "has no '#| default_exp MODULE' line"),
    ],
)
def test_a_notebook_that_exports_nothing_is_one_line(tmp_path, cells, message):
    path = tiny_course.write(tmp_path / "01_tiny.ipynb", cells)
    with pytest.raises(export.ExportError) as caught:
        export.module_texts(export.read_notebook(path), path)
    assert message in str(caught.value) and str(path) in str(caught.value)


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


def test_an_export_writes_only_what_differs(tiny):
    library = tiny / "course_lib"
    before = {file: file.stat().st_mtime_ns for file in library.iterdir()}
    replace(library / "pack" / "more.py", "double(2)", "double(3)")
    export.write_modules(export.library_texts(tiny / "notebooks"), library)
    assert library / "tiny.py" in before and (library / "tiny.py").stat().st_mtime_ns == before[library / "tiny.py"]
    assert "double(2)" in (library / "pack" / "more.py").read_text()


def test_the_command_checks_mends_and_removes(tmp_path):
    """In a project of its own: 1 with a line for each difference, 0 after an export, 2 with one line where it fails."""
    tiny_course.write(tmp_path / "notebooks" / "01_tiny.ipynb", tiny_course.cells())
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "export.py", tmp_path / "scripts")
    (tmp_path / "course_lib").mkdir()
    own = tmp_path / "course_lib" / "by_hand.py"
    own.write_text("x = 1\n")
    (tmp_path / "course_lib" / "stray.py").write_text("# %% ../notebooks/09_gone.ipynb #a\nx = 1\n")

    def run(*arguments):
        command = [sys.executable, tmp_path / "scripts" / "export.py", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=300)

    found = run("--check")
    assert (found.returncode, found.stdout.splitlines()) == (
        1,
        ["stray.py is exported by no notebook", "tiny.py is missing: run 'make export'"],
    )
    assert {file.name for file in own.parent.iterdir()} == {"by_hand.py", "stray.py"}, "a check writes nothing"
    assert run().returncode == 0
    assert {file.name for file in own.parent.iterdir()} == {"by_hand.py", "tiny.py"}, "what is written by hand stays"
    assert run("--check").returncode == 0
    assert run("--chek").returncode == 2
    replace(tmp_path / "notebooks" / "01_tiny.ipynb", "def half(number)", "def half(number")
    failed = run()
    assert failed.returncode == 2 and failed.stderr.count("\n") == 1 and "cell 6 (ex-01-2), line 2" in failed.stderr
