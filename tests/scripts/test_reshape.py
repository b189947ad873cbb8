"""scripts/reshape.py: a workbook of an older course is updated, and no line of a learner is lost."""

import copy
import random
import textwrap

import nbformat
import pytest

import make_workbook
import tiny_course
from test_workbook import Course, random_edits, snapshot
from tiny_course import blank, code, read, text

NAME = f"{tiny_course.NEW}.ipynb"
SOLUTION = "    ### BEGIN SOLUTION\n    {}\n    ### END SOLUTION"
BASE = "#| export counters.counter\nclass CounterBase:\n    def __init__(self, total=0):\n        self.total = total"
OLD = {
    "ex-02-1": "#| export counters.numbers\nLIMIT = 3\n\n\ndef square(number):\n" + SOLUTION.format("return number**2"),
    "ex-02-2": '#| export\nclass Counter(CounterBase):\n    """Counts."""\n\n    def add(self, number):\n'
    + textwrap.indent(SOLUTION.format("self.total += number"), "    ")
    + "\n\n    def back(self):\n        return opposite(self.total)",
    "ex-02-3": "#| export\nimport math\n\n\ndef opposite(number):\n"
    + SOLUTION.format("return -number")
    + "\n\n\nclass Counter(Counter):\n    @staticmethod\n    def of(*parts):\n"
    + textwrap.indent(SOLUTION.format("return Counter(math.fsum(parts))"), "    "),
    "ex-02-4": "#| export\n# What is 3 squared?\n### BEGIN SOLUTION\nguess = 9\n### END SOLUTION",
}


def old_cells() -> list[dict]:
    """The notebook of an older course: given code in its cells, whole classes as exercises."""
    cells = [text("title", "## 02 · Counters, long ago")]
    cells += [code("setup", "#| default_exp counters.counter\nfrom course_kit.checks import check"), code("base", BASE)]
    for number in (1, 2, 3, 4):
        cells.append(code(f"ex-02-{number}", OLD[f"ex-02-{number}"]))
        cells.append(code(f"check-02-{number}", f'with check("02.{number}"):\n    assert True'))
    return cells


def solved(**changes: str) -> dict[str, str]:
    """The old cells as a learner solves them, `ex_02_1` for ex-02-1, with other texts in some."""
    answers = {name: source.replace("### BEGIN SOLUTION", "# mine").replace("### END SOLUTION", "# done")
               for name, source in OLD.items()}  # fmt: skip
    return answers | {name.replace("_", "-"): source for name, source in changes.items()}


class Reshaped(Course):
    """A learner's workbook of an older course, and its update."""

    def __init__(self, folder):
        super().__init__(folder)
        self.file = self.workbook / NAME
        tiny_course.write(self.notebooks / NAME, old_cells(), None)
        self.update()

    def learner(self, answers: dict[str, str], *more: dict) -> None:
        """Save the learner's notebook with other sources in some cells, and more cells at its end."""
        cells = self.cells()
        for name, source in answers.items():
            cells[name]["source"] = source
        self.save([*cells.values(), *more])

    def reshape(self) -> str:
        """Update to the new shape; what the learner reads."""
        tiny_course.write(self.notebooks / NAME, tiny_course.new_cells(), tiny_course.PROGRAM)
        (line,) = self.update()
        nbformat.validate(nbformat.read(self.file, as_version=4))
        return line

    def sources(self) -> dict[str, str]:
        return {name: cell["source"] for name, cell in self.cells().items()}


@pytest.fixture
def course(tmp_path):
    return Reshaped(tmp_path)


def test_who_changed_nothing_gets_exactly_the_new_notebook(course):
    assert course.reshape() == "02_counters: updated to a new shape"
    updated = course.file.read_bytes()
    course.file.unlink()
    course.update()
    assert course.file.read_bytes() == updated


def test_only_what_fails_until_it_is_solved_lets_run_all_go_on(course):
    course.reshape()
    tagged = {name for name, cell in course.cells().items() if "raises-exception" in cell["metadata"].get("tags", [])}
    assert tagged == {"check-02-1", "check-02-2", "check-02-3", "check-02-4", "ex-02-4"}


def test_a_workbook_that_is_older_than_the_library_is_named(course, monkeypatch, capsys):
    monkeypatch.setattr(make_workbook, "NOTEBOOKS", course.notebooks)
    monkeypatch.setattr(make_workbook, "WORKBOOK", course.workbook)
    tiny_course.write(course.notebooks / NAME, tiny_course.new_cells(), tiny_course.PROGRAM)
    assert make_workbook.main(["--missing"]) == 0
    assert capsys.readouterr().out.startswith(f"02_counters: {make_workbook.OLDER}\n")
    course.reshape()
    assert make_workbook.main(["--missing"]) == 0
    assert not capsys.readouterr().out


def test_answers_move_to_their_new_cells(course):
    course.learner(solved())
    assert course.reshape() == (
        "02_counters: updated to a new shape; your answers stand in their new cells, run the checks again: "
        "02.1, 02.2, 02.3"
    )
    found = course.sources()
    assert list(found) == [cell["id"] for cell in tiny_course.new_cells()]
    assert found["ex-02-1"] == (
        "#| export counters.numbers\ndef square(number):\n    # mine\n    return number**2\n    # done"
    )
    assert found["ex-02-2"] == (
        "#| export counters.counter:Counter\ndef add(self: Counter, number):\n    # mine\n    self.total += number\n"
        "    # done"
    )
    assert found["ex-02-3"].endswith("def opposite(number):\n    # mine\n    return -number\n    # done")
    assert found["ex-02-3b"] == (
        "#| export counters.counter:Counter\n@staticmethod\ndef of(*parts):\n    # mine\n"
        "    return Counter(math.fsum(parts))\n    # done"
    )
    assert found["ex-02-4"] == solved()["ex-02-4"].partition("\n")[2], "a value stays as it is"
    assert found["check-02-1"] == 'check("02.1")' and "setup(" in found["setup"]
    before = snapshot(course.workbook)
    assert course.update() == ["02_counters: up to date"]
    assert snapshot(course.workbook) == before


def test_what_is_still_blank_is_blank_in_the_new_shape(course):
    course.learner({"ex-02-1": solved()["ex-02-1"]})
    assert course.reshape().endswith("run the checks again: 02.1")
    found = course.sources()
    for name in ("ex-02-2", "ex-02-3", "ex-02-3b", "ex-02-4"):
        assert found[name] == blank(tiny_course.ANSWERS[name])


def test_what_else_a_learner_has_added_comes_along_and_the_old_cell_is_kept(course):
    mine = (
        "#| export\nimport functools\n\n\ndef helper(x):\n    return x\n\n\nclass Counter(CounterBase):\n"
        '    """Counts, says the learner."""\n\n    def add(self, number):\n        self.more(number)\n\n'
        "    def more(self, number):\n        self.total += helper(number)\n\n"
        "    @functools.cache\n    def back(self):\n        return -self.total"
    )
    course.learner(solved(ex_02_2=mine))
    assert course.reshape().endswith("02.1, 02.2, 02.3; what else you had changed is kept in raw cells: old-ex-02-2")
    found = course.sources()
    assert found["ex-02-2"] == (
        "#| export counters.counter:Counter\nimport functools\n\n\ndef helper(x):\n    return x\n\n\n"
        "def more(self: Counter, number):\n    self.total += helper(number)\n\n\n"
        "def add(self: Counter, number):\n    self.more(number)"
    )
    assert course.cells()["old-ex-02-2"]["cell_type"] == "raw" and found["old-ex-02-2"].endswith(f"\n\n{mine}")
    names = [*found]
    assert names.index("old-ex-02-2") == names.index("ex-02-2") + 1


@pytest.mark.parametrize("mine", ["#| export\ndef square(number:\n    return", "def other(): pass", "", "\0"])
def test_an_answer_that_cannot_be_taken_out_is_kept_whole(course, mine):
    course.learner({"ex-02-1": mine})
    assert course.reshape().endswith("to a new shape; what else you had changed is kept in raw cells: old-ex-02-1")
    found = course.sources()
    assert found["ex-02-1"] == blank(tiny_course.ANSWERS["ex-02-1"]) and found["old-ex-02-1"].endswith(f"\n\n{mine}")


def test_changed_code_of_the_course_is_kept_below_its_new_cell(course):
    own = code("mine", "print('my own')"), text("note", "A note.")
    course.learner({"setup": "import numpy", "base": "class CounterBase: pass", "check-02-2": "assert 1"}, *own)
    line = course.reshape()
    assert line.endswith("kept in raw cells: old-setup, old-base, old-check-02-2")
    found = course.sources()
    assert found["setup"].startswith("from __future__") and found["check-02-2"] == 'check("02.2")'
    for name, source in {"setup": "import numpy", "base": "class CounterBase: pass", "check-02-2": "assert 1"}.items():
        assert found[f"old-{name}"].endswith(source)
    assert found["mine"] == "print('my own')" and found["note"] == "A note." and "base" not in found
    assert course.cells()["mine"]["cell_type"] == "code"


def test_a_deleted_cell_stays_deleted(course):
    course.save([cell for name, cell in course.cells().items() if name != "ex-02-1"])
    course.reshape()
    assert "ex-02-1" not in course.cells() and "ex-02-2" in course.cells()


def test_a_class_takes_the_methods_that_a_learner_has_written(course, tmp_path):
    """The old cell has a base class that made the gap; the new one is the whole class."""
    old = "#| export\nclass Twice(TwiceBase):\n    @staticmethod\n    def backward(ctx, grad):\n" + textwrap.indent(
        SOLUTION.format("return 2 * grad"), "    "
    )
    twice, back = (textwrap.indent(SOLUTION.format(line), "    ") for line in ("return 2 * x", "return 2 * grad"))
    new = (
        f"#| export counters.numbers\nclass Twice(Function):\n    @staticmethod\n    def forward(ctx, x):\n{twice}\n\n"
        f"    @staticmethod\n    def backward(ctx, grad):\n{back}"
    )
    tiny_course.write(course.notebooks / NAME, [code("ex-02-1", old)], None)
    course.file.unlink()
    course.update()
    course.learner({"ex-02-1": old.replace("### BEGIN SOLUTION", "# mine").replace("### END SOLUTION", "")})
    tiny_course.write(course.notebooks / NAME, [code("ex-02-1", new)], tiny_course.PROGRAM)
    assert course.update()[0].endswith("run the checks again: 02.1")
    blanked = blank(new)
    assert course.sources() == {
        "ex-02-1": blanked[: blanked.index("    @staticmethod\n    def backward")]
        + "    @staticmethod\n    def backward(ctx, grad):\n        # mine\n        return 2 * grad"
    }
    whole = new.replace("### BEGIN SOLUTION", "# mine").replace("### END SOLUTION", "# done")
    course.learner({"ex-02-1": whole})
    assert course.update() == ["02_counters: up to date"] and course.sources() == {"ex-02-1": whole}


def test_without_the_base_nothing_is_lost(course):
    answers = solved()
    answers["ex-02-2"] = answers["ex-02-2"].replace("Counts", "My words")
    course.learner(answers)
    for base in (course.workbook / ".base").iterdir():
        base.unlink()
    line = course.reshape()
    assert "missing or damaged" in line and "02.1, 02.2, 02.3" in line
    everything = "\n".join(course.sources().values())
    for source in answers.values():
        assert all(line.strip() in everything for line in source.split("\n") if not line.startswith("#|"))
    assert "My words" in everything


def test_an_older_workbook_that_was_saved_over_the_update_is_updated_again(course):
    course.learner(solved())
    old = course.file.read_bytes()
    line = course.reshape()
    new = course.file.read_bytes()
    course.file.write_bytes(old)
    assert course.update() == [line] and course.file.read_bytes() == new


def test_cells_that_move_to_a_new_notebook_are_reshaped_too(course):
    course.learner(solved(ex_02_2="#| export\nclass Counter:\n    def add(self, number):\n        self.total = number"))
    cells = {cell["id"]: cell for cell in tiny_course.new_cells()}
    second = {name: cells.pop(name) for name in ("ex-02-2", "check-02-2")}
    tiny_course.write(course.notebooks / NAME, [*cells.values()], tiny_course.PROGRAM)
    tiny_course.write(course.notebooks / "02b_more.ipynb", [*second.values()], tiny_course.PROGRAM)
    assert course.update()[0] == "02b_more: handed out, with what you have written in its cells where they stood before"
    found = {cell["id"]: cell["source"] for cell in read(course.workbook / "02b_more.ipynb")["cells"]}
    assert [*found] == ["ex-02-2", "old-ex-02-2", "check-02-2"]
    assert found["ex-02-2"].endswith("def add(self: Counter, number):\n    self.total = number")


def test_random_edits_lose_no_line(tmp_path):
    """Each line that the learner has written, in code or text, is somewhere in the new notebook."""
    old = make_workbook.blank_notebook(tiny_course.write(tmp_path / "old.ipynb", old_cells(), None))
    new = tiny_course.write(tmp_path / "new.ipynb", tiny_course.new_cells(), tiny_course.PROGRAM)
    new = make_workbook.blank_notebook(new)
    answers = solved()
    for seed in range(300):
        chance = random.Random(seed)
        cells = copy.deepcopy(old["cells"])
        for cell in cells:
            if cell["id"] in answers and chance.random() < 0.7:
                cell["source"] = answers[cell["id"]]
        learner = {**old, "cells": random_edits(cells, chance, "learner", learner=True)}
        known = {cell["id"]: cell for cell in old["cells"]}
        base = old if chance.random() < 0.8 else None
        found = make_workbook.reshape(base, make_workbook.by_id(learner["cells"], known), new)
        merged, _ = make_workbook.merge(found.base, {**learner, "cells": found.cells}, new)
        now = "\n".join(cell["source"] for cell in merged["cells"])
        names = [cell["id"] for cell in merged["cells"]]
        assert len(names) == len(set(names))
        for cell in learner["cells"]:
            before = known.get(cell["id"], {"source": ""})["source"].split("\n")
            mine = [line.strip() for line in cell["source"].split("\n") if line not in before]
            lost = [line for line in mine if line not in now and "def " not in line]  # which are annotated
            assert not lost, (seed, cell["id"], lost)
