"""scripts/edit.py: a notebook goes to text and back without a loss, and a wrong draft changes nothing. Needs no GPU."""

from pathlib import Path

import nbformat
import pytest

import edit

ROOT = Path(__file__).resolve().parents[2]

DRAFT = '''\
# ---
# jupyter:
#   course:
#     ranks: 4
# ---

# %% [markdown] id="title"
# # Where the memory goes
#
# $34sbh + 5as^2b$

# %% id="setup"
import torch

# %% id="ex-01-2" tags=["long"]
%matplotlib inline
def answer():
    """Say it."""
    ### BEGIN SOLUTION
    return 42  # cat or ls, a comment stays one
    ### END SOLUTION


# %% id="check-01-2" nbgrader={"grade": true, "grade_id": "other", "points": 3}
assert answer() == 42

# %% id="empty"

# %% id="shell" language="bash"
# echo a
'''


def write(folder: Path, draft: str, name: str = "a.ipynb") -> nbformat.NotebookNode:
    """The notebook that the script makes of `draft`, as it stands on disk."""
    (folder / "draft.py").write_text(draft, encoding="utf-8")
    assert edit.main(["notebook", str(folder / "draft.py"), str(folder / name)]) == 0
    return nbformat.read(folder / name, as_version=4)


def test_the_text_comes_back_as_it_was(tmp_path, capsys):
    write(tmp_path, DRAFT)
    capsys.readouterr()
    assert edit.main(["text", str(tmp_path / "a.ipynb")]) == 0
    assert capsys.readouterr().out == DRAFT


def test_the_notebook_comes_back_as_it_was(tmp_path):
    notebook = write(tmp_path, DRAFT)
    before = (tmp_path / "a.ipynb").read_bytes()
    write(tmp_path, edit.to_text(notebook))
    assert (tmp_path / "a.ipynb").read_bytes() == before


def test_ids_name_exercises_and_checks(tmp_path):
    bare = DRAFT.replace(' nbgrader={"grade": true, "grade_id": "other", "points": 3}', "")
    bare += '\n# %% id="ex-01-2b"\ndef more(): return 43\n'
    cells = {cell.id: cell for cell in write(tmp_path, bare).cells}
    assert cells["ex-01-2"].metadata.nbgrader == {
        "grade": False,
        "grade_id": "ex-01-2",
        "locked": False,
        "schema_version": 3,
        "solution": True,
        "task": False,
    }
    assert cells["check-01-2"].metadata.nbgrader == {
        "grade": True,
        "grade_id": "check-01-2",
        "locked": True,
        "points": 1,
        "schema_version": 3,
        "solution": False,
        "task": False,
    }
    assert cells["ex-01-2b"].metadata.nbgrader == cells["ex-01-2"].metadata.nbgrader | {"grade_id": "ex-01-2b"}
    assert cells["ex-01-2"].metadata.tags == ["long"]
    assert "nbgrader" not in cells["empty"].metadata


def test_outputs_and_kernel_stay_where_the_source_does(tmp_path):
    notebook = write(tmp_path, DRAFT)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [nbformat.v4.new_output("stream", text="hello")], 3
    notebook.metadata.kernelspec.name = "another"
    nbformat.write(notebook, tmp_path / "a.ipynb")

    moved = DRAFT.replace("ranks: 4", "ranks: 2").replace("== 42", "== 43") + "\n# %%\nnew = 1\n"
    after = write(tmp_path, moved)
    outputs = {cell.id: len(cell.outputs) for cell in after.cells if cell.cell_type == "code"}
    assert outputs["ex-01-2"] == outputs["shell"] == 1 and outputs["check-01-2"] == 0
    assert after.cells[-1].source == "new = 1" and after.cells[-1].id
    assert after.metadata.kernelspec.name == "another" and after.metadata.course == {"ranks": 2}


@pytest.mark.parametrize(
    "wrong, message",
    [
        (('id="empty"', 'id="title"'), "cells 1 and 5 have the same id, title"),
        (('id="empty"', 'id="a b"'), "cell 5: 'a b' is no cell id"),
        (('id="empty"', "empty"), "cell 5: 'empty' in its header is not of the form name=value"),
    ],
)
def test_a_wrong_draft_is_one_line_and_changes_nothing(tmp_path, capsys, wrong, message):
    write(tmp_path, DRAFT)
    before = (tmp_path / "a.ipynb").read_bytes()
    (tmp_path / "draft.py").write_text(DRAFT.replace(*wrong), encoding="utf-8")
    assert edit.main(["notebook", str(tmp_path / "draft.py"), str(tmp_path / "a.ipynb")]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and message in lines[0]
    assert (tmp_path / "a.ipynb").read_bytes() == before


def test_lines_that_look_like_headers_come_back(tmp_path):
    lines = ["# %% y", "#%%", "    # %% z", "# In[3]:", "# <codecell>", r"# \%% a", r"# \\%% b", r"\%% d", "In[4]"]
    made = nbformat.v4.new_code_cell, nbformat.v4.new_markdown_cell, nbformat.v4.new_raw_cell
    cells = [make("\n".join(["x = 1", *lines, "z = 1"]), id=f"cell-{i}") for i, make in enumerate(made)]
    cells[1].source += "\n%% c"
    cells += [make(line, id=f"line-{i}-{j}") for i, make in enumerate(made) for j, line in enumerate(lines)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    text = edit.to_text(notebook)
    back = edit.to_notebook(text)
    assert [(cell.cell_type, cell.source) for cell in back.cells] == [(cell.cell_type, cell.source) for cell in cells]
    assert edit.to_text(back) == text and "\n# \\%% y\n" in text


def test_a_cell_that_text_cannot_hold_is_named():
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("%% c", id="no-magic")])
    with pytest.raises(ValueError, match=r"cell 1 \(no-magic\)"):
        edit.to_text(notebook)


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_the_courses_notebooks_come_back(path):
    """With their outputs; an empty line at a cell's end may be lost."""
    notebook = nbformat.read(path, as_version=4)
    back = edit.to_notebook(edit.to_text(notebook), notebook)
    for cell in notebook.cells + back.cells:
        cell.source = cell.source.rstrip("\n")
    assert back == notebook
