"""scripts/clean.py: what it keeps of a notebook, and that JupyterLab has nothing to add when it opens one. No GPU."""

import copy
from pathlib import Path

import nbformat
import pytest
from ipykernel.ipkernel import IPythonKernel
from ipykernel.kernelspec import get_kernel_dict
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

import clean

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "notebooks").glob("*.ipynb"))


def an_unclean_notebook() -> nbformat.NotebookNode:
    outputs = [
        new_output("execute_result", {"text/plain": "<a.B at 0x7f00aa>", "image/png": "iVBOR\n"}, execution_count=7),
        new_output("display_data", {"image/png": "iVBOR"}, metadata={"image/png": {"width": 820, "height": 300}}),
        new_output("stream", text="one <f at 0x1> two <g at 0x22>\n"),
        new_output("display_data", {"image/svg+xml": "<svg/>\n"}, metadata={"needs_background": "light"}),
    ]
    kept = {"tags": ["measurement"], "nbgrader": {"grade": False}}
    more = {"scrolled": True, "trusted": True, "jupyter": {"source_hidden": True}}
    cells = [
        new_code_cell("x", id="x", execution_count=7, outputs=outputs, metadata=kept | more),
        new_markdown_cell("y", id="y", metadata={"tags": ["cheatsheet"], "collapsed": True}),
    ]
    kernel = {"display_name": "venv", "language": "python", "name": "python3"}
    metadata = {"course": {"nproc_per_node": 4}, "kernelspec": kernel, "toc": {}, "widgets": {"state": {}}}
    return new_notebook(cells=cells, metadata={**metadata, "language_info": {"name": "python", "version": "3.11.2"}})


def test_of_a_cell_stays_what_it_says_and_what_it_is():
    """Not how often it was run, where objects lay in memory, or what an editor notes of its view."""
    code, words = clean.clean(an_unclean_notebook()).cells
    assert code.metadata == {"tags": ["measurement"], "nbgrader": {"grade": False}}
    assert words.metadata == {"tags": ["cheatsheet"]} and code.execution_count is None
    assert [each.get("execution_count") for each in code.outputs] == [None] * 4
    assert code.outputs[0].data == {"text/plain": "<a.B>", "image/png": "iVBOR"}
    assert code.outputs[2].text == "one <f> two <g>\n"
    assert code.outputs[1].metadata == {"image/png": {"width": 820}}  # half its pixels
    assert code.outputs[3].data == {"image/svg+xml": "<svg/>\n"} and code.outputs[3].metadata == {}
    ours = clean.clean(an_unclean_notebook())
    assert clean.clean(copy.deepcopy(ours)) == ours
    nbformat.validate(ours)


def test_the_metadata_is_the_courses_and_what_the_kernel_says():
    """JupyterLab writes both when it opens a notebook; only the version depends on the Python that runs it."""
    found = clean.clean(an_unclean_notebook()).metadata
    said = {key: value for key, value in IPythonKernel.language_info.items() if key != "version"}
    assert set(IPythonKernel.language_info) - set(said) == {"version"}
    spec = get_kernel_dict()
    kernel = {"display_name": spec["display_name"], "language": spec["language"], "name": "python3"}
    kernel["display_name"] = kernel["display_name"].split(" [")[0]  # of some installations
    assert found == {"course": {"nproc_per_node": 4}, "kernelspec": kernel, "language_info": said}


def test_another_kernel_stays():
    notebook = an_unclean_notebook()
    notebook.metadata.kernelspec = {"display_name": "R", "language": "R", "name": "ir"}
    assert clean.clean(notebook).metadata.kernelspec.name == "ir" and "language_info" not in notebook.metadata


def test_it_writes_what_differs_and_a_bad_file_is_one_line(tmp_path, capsys):
    good, bad = tmp_path / "a.ipynb", tmp_path / "b.ipynb"
    nbformat.write(an_unclean_notebook(), good)
    bad.write_text("{}")
    before = good.read_bytes()
    assert clean.main([str(good), str(bad)]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1 and good.read_bytes() == before
    assert clean.main([str(good)]) == 0 and good.read_bytes() != before
    written = good.stat().st_mtime_ns
    assert clean.main([str(good)]) == 0 and good.stat().st_mtime_ns == written


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_courses_notebooks_are_clean(path):
    text = path.read_text(encoding="utf-8")
    assert nbformat.writes(clean.clean(nbformat.read(path, as_version=4))) + "\n" == text, "python scripts/clean.py"
