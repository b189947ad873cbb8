"""course_kit.widgets.cell_bars: a cell that says that it takes long has a bar, which is gone when the cell ends."""

import json
import re
import signal
import subprocess
import sys

import pytest
from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.interactiveshell import InteractiveShell

from course_kit.widgets import cell_bars
from tiny_course import ROOT

LONG = "#| export x.y\n# Measured: two, and two more, about 40 s\n"


@pytest.fixture
def shell(monkeypatch):
    """An IPython shell that shows bars, drawn a hundred times a second; `shell.shown`: what it has displayed."""
    monkeypatch.setattr(cell_bars, "TICK_S", 0.01)
    made = InteractiveShell.instance()
    publisher = CapturingDisplayPublisher()
    monkeypatch.setattr(made, "display_pub", publisher)
    made.shown = publisher.outputs
    cell_bars.show_bars(made)
    yield made
    InteractiveShell.clear_instance()


@pytest.mark.parametrize(
    "body, passes", [("import time; time.sleep(0.2)", True), ("1 / 0", False), ("raise KeyboardInterrupt", False)]
)
def test_a_long_cell_has_a_bar_and_leaves_none(shell, body, passes, capsys):
    assert shell.run_cell(LONG + body).success == passes
    first, *others, last = shell.shown
    words, bar = first["data"]["text/plain"].split("\n")
    assert words == "Measured: two, and two more" and bar.endswith("| 0 of about 40 s on two cores")
    assert last["data"] == {} and all(output["update"] for output in (*others, last))
    assert others or not passes, "it is drawn anew while the cell runs"
    assert len({output["transient"]["display_id"] for output in shell.shown}) == 1


def test_another_cell_has_none(shell):
    for source in ("x = 1", "# Measured: quick", "x = 1\n# later, about 40 s", "x = 1  # text, about 40 s", ""):
        assert shell.run_cell(source).success and shell.shown == []


def test_a_second_cell_has_a_bar_of_its_own(shell):
    shell.run_cell(LONG + "x = 1")
    shell.run_cell(LONG + "x = 2")
    assert [output["data"] == {} for output in shell.shown if output["data"] == {} or not output["update"]] == [
        False, True, False, True,
    ]  # fmt: skip
    for number in range(20):
        shell.run_cell(LONG + f"x = [1] * {number}")
    names = [output["transient"]["display_id"] for output in shell.shown if not output["update"]]
    assert len(set(names)) == len(names) == 22, "or one would be drawn over an earlier cell, too"


def test_a_bar_whose_end_was_interrupted_goes_with_the_next_cell(shell, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(cell_bars.Bar, "take_away", lambda bar: signal.raise_signal(signal.SIGINT))
        shell.run_cell(LONG + "x = 1")
    assert shell.shown[-1]["data"] != {}
    shell.run_cell("x = 2")
    assert shell.shown[-1]["data"] == {}


def test_without_a_kernel_there_are_none_and_no_error():
    """In a process that has ipykernel, as a server has, and in IPython's terminal, where each drawing would stay."""
    source = """
import sys, ipykernel
import course_kit
from IPython.core.interactiveshell import InteractiveShell
InteractiveShell.instance()
del sys.modules["course_kit"]
import course_kit
assert "course_kit.widgets.cell_bars" not in sys.modules"""
    subprocess.run([sys.executable, "-c", source], check=True, timeout=300)


def test_every_cell_that_says_so_is_read_as_long():
    """The comment stands where the bar looks for it, in a notebook whose set-up imports course_kit."""
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        cells = json.loads(path.read_text())["cells"]
        sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
        said = [source for source in sources if re.search(r"^# .*, about \d+ s\b", source, re.MULTILINE)]
        assert all(cell_bars.LONG_CELL.match(source) for source in said), path.name
        assert not said or any("from course_kit" in source for source in sources[: sources.index(said[0])]), path.name
