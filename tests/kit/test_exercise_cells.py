"""course_kit.exercises: cells that are exported, and the modules that they are spliced into. Needs no PyTorch."""

import ast
import json
import subprocess
import sys

import pytest

from course_kit.exercises import notes, saved
from course_kit.exercises.cells import CellError, digest, read
from course_kit.exercises.splice import line_in_cell, locate, owned, splice, without_owners

MODULE = '''"""A module."""

from __future__ import annotations

import math
from functools import cache

TWO = 2


def double(number):
    """Twice the number."""
    return TWO * number
    # half of what quadruple gives


# quadruple stands alone
@cache
def quadruple(number):
    return 4 * number


class Counter:
    """Counts."""

    def __init__(self):
        self.count = 0

    # exercise 01.2
    def add(self, more: int = 1) -> None:
        """Count."""
        self.count += more

    # at the end

    @staticmethod
    def zero():
        return 0


LAST = double(1)
'''


def definition(text: str, name: str) -> str:
    """Return the source of a definition, wherever it is in a module."""
    return next(ast.unparse(node) for node in ast.walk(ast.parse(text)) if getattr(node, "name", None) == name)


def spliced(source: str, owner: str = "exercise 01.1", learners: bool = False) -> str:
    return splice(MODULE, read(source, "ex-01-1"), owner, learners)


def test_a_function_takes_the_place_of_the_one_of_its_name_and_nothing_else_changes():
    source = (
        '#| export tiny\n### BEGIN SOLUTION\n### END SOLUTION\ndef double(number):\n    """New."""\n'
        "    ### BEGIN SOLUTION\n    return number + number\n    ### END SOLUTION\n    # a comment at its end\n"
        "\n# not its own\n"
    )
    text = splice(MODULE, read(source.replace("tiny", "tiny.mod"), "ex-01-1"), "exercise 01.1")
    new = (
        '# exercise 01.1\ndef double(number):\n    """New."""\n    return number + number\n    # a comment at its end\n'
    )
    old = '''def double(number):
    """Twice the number."""
    return TWO * number
    # half of what quadruple gives
'''
    assert text == MODULE.replace(old, new)


def test_decorators_belong_to_a_definition_and_comments_before_it_do_not():
    text = spliced("#| export a.b\ndef quadruple(number):\n    return 2 * number + 2 * number\n")
    assert "@cache" not in text and "# quadruple stands alone\n# exercise 01.1\ndef quadruple" in text


def test_a_method_is_indented_and_loses_the_annotation_that_says_whose_it_is():
    source = (
        '#| export a.b:Counter\ndef add(self: Counter, more: int = 1) -> None:\n    """Count.\n\n    On.\n    """\n'
        "    self.count = self.count + more\n\n\n@staticmethod\ndef zero():\n    return 0.0\n"
    )
    text = spliced(source, "exercise 01.2")
    assert '    # exercise 01.2\n    def add(self, more: int = 1) -> None:\n        """Count.\n\n        On.\n' in text
    assert (
        "    # at the end\n\n    # exercise 01.2\n    @staticmethod\n    def zero():\n        return 0.0\n\n\nLAST"
        in text
    )
    assert [(each.owner, each.label) for each in owned(text)] == [
        ("exercise 01.2", "Counter.add"),
        ("exercise 01.2", "Counter.zero"),
    ]
    assert text == splice(text, read(source, "ex-01-2"), "exercise 01.2"), "once more changes nothing"


def test_an_annotation_on_a_line_of_its_own_goes_too():
    source = "#| export a.b:Counter\ndef add(\n    self: Counter,\n    more: int = 1,\n) -> None:\n    pass\n"
    assert "    def add(\n        self,\n        more: int = 1,\n    ) -> None:" in spliced(source)


def test_a_whole_class_takes_the_place_of_the_one_of_its_name():
    text = spliced("#| export a.b\nclass Counter:\n    add = None\n")
    assert text.endswith("# exercise 01.1\nclass Counter:\n    add = None\n\n\nLAST = double(1)\n")


def test_a_learners_imports_constants_and_helpers_stand_above_what_uses_them():
    source = (
        "#| export a.b:Counter\nimport math\nimport operator\nfrom itertools import chain as linked\n\n"
        "STEP = 3\nTRIAL = 4\n"
        "\n\ndef plus(a, b):\n    return operator.add(a, b) * STEP\n\n\ndef add(self: Counter, more=1):\n"
        "    self.count = plus(self.count, math.floor(more))\n    self.more()\n\n\ndef more(self):\n    return 1\n\n\n"
        "counter.add(3)\n"
    )
    text = spliced(source, "exercise 01.2 (yours)", learners=True)
    above = text[text.index("LAST") :] + text[text.index("class Counter") - 200 : text.index("class Counter")]
    assert "import operator\n\nSTEP = 3\n\n# exercise 01.2 (yours)\ndef plus(a, b):" in text
    assert "TRIAL" not in text and "linked" not in text and "counter.add" not in text, (
        "nothing of the library needs them"
    )
    assert text.count("import math\n") == 1 and "class Counter" not in above.split("LAST")[0]
    assert "    # exercise 01.2 (yours)\n    def more(self):" in text
    space = {}
    exec(text, space)
    counter = space["Counter"]()
    counter.add(2)
    assert counter.count == 6


@pytest.mark.parametrize(
    "source, words",
    [
        ("x = 1\n#| export a.b\ndef double(n): pass", "line 2: '#| export a.b' must be the first line"),
        ("\n#| export a.b\ndef double(n): pass", "line 2: '#| export a.b' must be the first line"),
        ("#| export a.b  # double\ndef double(n): pass", "is not a directive such as"),
        ("#|export a.b\ndef double(n): pass", "is not a directive such as"),
        ("#| export double\ndef double(n): pass", "is not a directive such as"),
        ("#| export a.b\ndef double(n)\n    pass", "line 2: syntax error: expected ':'"),
        ("#| export a.b\ndef double(n): return '\u2028'", "line 2 holds U+2028"),
        ("#| export a.b\ndef double(n): return '\f'", "line 2 holds U+000C"),
        ("#| export a.b\ndouble = 1", "defines no function or class"),
        ("#| export a.b\ndef double(n): pass\ndef double(n): pass", "defines double twice"),
        ("#| export a.b:Counter\nclass add: pass", "class add in a cell of methods of Counter"),
        ("#| export a.b\ndef double(n): pass; x = 1\ny = 2; z = 3", "two statements on one line"),
    ],
    ids=lambda value: None,
)
def test_a_cell_that_cannot_be_exported_is_told_in_one_line(source, words):
    with pytest.raises(CellError) as refused:
        read(source, "ex-01-1")
    assert words in str(refused.value) and "\n" not in str(refused.value) and "ex-01-1" in str(refused.value)


@pytest.mark.parametrize(
    "source, learners, words",
    [
        ("#| export a.b\ndef triple(n): pass", False, "has no triple to replace"),
        ("#| export a.b\ndef triple(n): pass", True, "no definition of that name to replace"),
        ("#| export a.b:Counter\ndef plus(self: Counter): pass", False, "has no Counter.plus to replace"),
        ("#| export a.b:Adder\ndef add(self: Adder): pass", True, "has no class Adder"),
        ("#| export a.b\nimport os\ndef double(n): return os", False, "line 2: an exported cell of a notebook holds"),
        ("#| export a.b\nTWO = 3\ndef double(n): return TWO", True, "already has TWO"),
        ("#| export a.b\nimport cmath as math\ndef double(n): return math", True, "already has math"),
        ("#| export a.b\nfrom os import *\ndef double(n): return name", True, "import names, not *"),
        (
            "#| export a.b\ndef double(n):\n    return np.add(n, n)",
            True,
            "line 3: course_lib.a.b, where your code runs",
        ),
        ("#| export a.b\ndef double(n):\n    def f():\n        return np\n    return f()", True, "has no np: a typo"),
        ("#| export a.b\ndef double(n, k=KEY): return n", True, "has no KEY: a typo"),
        (
            "#| export a.b:Counter\ndef cache(n): return n\ndef add(self: Counter): return cache(1)",
            True,
            "already has cache",
        ),
    ],
    ids=lambda value: None,
)
def test_a_cell_that_does_not_fit_its_module_is_told_in_one_line(source, learners, words):
    with pytest.raises(CellError) as refused:
        spliced(source, learners=learners)
    assert words in str(refused.value) and "\n" not in str(refused.value)


def test_names_that_a_function_binds_or_builtins_have_are_no_missing_names():
    source = (
        "#| export a.b:Counter\ndef add(self: Counter, more=1):\n    import os\n    global seen\n"
        "    seen = [os for os in (1,)]\n"
        "    x: np.ndarray = max(seen)\n    return super().__init__(), __class__, double(x), self.__dict__\n"
    )
    assert definition(spliced(source, learners=True), "add").startswith("def add")


@pytest.mark.parametrize("gone", ["# exercise 01.2", "# notebook 13, cell attend-tiles", "# exercise 01.2 (yours)"])
def test_owner_comments_are_taken_out(gone):
    assert gone in MODULE.replace("# exercise 01.2", gone)
    assert without_owners(MODULE.replace("# exercise 01.2", gone)) == MODULE.replace("    # exercise 01.2\n", "")


def test_a_line_of_the_library_leads_to_the_line_of_the_cell():
    source = (
        '#| export a.b:Counter\n\ndef add(self: Counter, more=1):\n    """Count."""\n    ### BEGIN SOLUTION\n\n'
        "    x = 1\n"
        "    self.count += more / 0\n    ### END SOLUTION\n"
    )
    cell = read(source, "ex-01-2")
    text = splice(MODULE, cell, "exercise 01.2")
    for words in ("x = 1", "more / 0", "def add"):
        line = next(number for number, each in enumerate(text.split("\n"), 1) if words in each)
        place = locate(text, line)
        assert place[0].label == "Counter.add"
        assert words in source.split("\n")[line_in_cell(text, place, cell) - 1]
        other = text.replace('        """Count."""\n\n', '        """Count."""\n')  # as a formatter may leave it
        line = next(number for number, each in enumerate(other.split("\n"), 1) if words in each)
        assert words in source.split("\n")[line_in_cell(other, locate(other, line), cell) - 1]
    assert locate(text, 1) is None


def test_a_digest_is_of_the_code_alone():
    source = "#| export a.b\n\ndef double(n):\n    ### BEGIN SOLUTION\n    return 2 * n\n    ### END SOLUTION\n"
    cell = read(source, "ex-01-1")
    same = source.replace("    return", "    # twice\n\n    return").replace("### BEGIN SOLUTION", "")
    assert read(same + "\n\nprint(double(2))\n", "x").digest == cell.digest
    assert read(source.replace("\n", "\r\n"), "x").digest == cell.digest
    assert read(source.replace("2 * n", "n * 2"), "x").digest != cell.digest
    assert digest("a = 1\n# b\n\n") == digest("a = 1 \n") != digest("a = 2")


def test_a_notebooks_answers_as_saved(tmp_path):
    def cell(name, source):
        return {"id": name, "cell_type": "code", "source": source.splitlines(keepends=True), "metadata": {}}

    cells = [
        cell("ex-06-2", "#| export a.b\ndef double(n): pass"),
        cell("ex-06-2b", "#| export a.c\ndef half(n): pass"),
        cell("ex-06-3", "guess = 3"),
        cell("ex-06-4", "#| export a.b\ndef double(n: pass"),
        cell("check-06-2", 'check("06.2")'),
    ]
    (tmp_path / "06_x.ipynb").write_text(json.dumps({"cells": cells}))
    found = {exercise: (sources, key) for exercise, sources, key in saved.saved_answers(tmp_path, "06")}
    assert list(found) == ["06.2", "06.3"]
    assert found["06.2"][0][1] == ("#| export a.c\ndef half(n): pass", "06_x.ipynb, cell ex-06-2b")
    assert found["06.2"][1] == saved.exercise_digest([read("".join(c["source"]), "") for c in cells[1::-1]])
    assert found["06.3"][1] == digest("guess = 3")
    (tmp_path / "06_y.ipynb").write_text("{")
    assert list(saved.saved_answers(tmp_path, "06")) == [], "which one is meant?"
    (tmp_path / "06_x.ipynb").rename(tmp_path / "06_tensor_parallel.ipynb")
    assert [name for name, *_ in saved.saved_answers(tmp_path, "06")] == ["06.2", "06.3"], "the one that the course has"


def exercise_cell(source: str, name: str | None = None, graded: str | None = None) -> dict:
    """Return a code cell as an editor saves it."""
    metadata = {"nbgrader": {"grade_id": graded}} if graded else {}
    return {"cell_type": "code", "source": source, "metadata": metadata} | ({"id": name} if name else {})


ONE = "#| export a.b\ndef double(n):\n    return {}\n"


def test_a_cell_without_its_id_is_known_by_its_nbgrader_metadata():
    """As editors leave it that drop ids, or give each part of a cell that was split a new one."""
    cells = [exercise_cell(ONE.format(1), graded="ex-06-2"), exercise_cell("x = 1", "new", "ex-06-2")]
    cells += [exercise_cell(ONE.format(3), "0af3", "ex-06-3"), exercise_cell("guess = 1", "ex-06-4", "ex-06-4")]
    cells += [{"cell_type": "code", "source": "", "metadata": None}, {"cell_type": "code", "source": ""}]
    found = saved.exercise_cells({"cells": cells})
    assert {name: [cell["source"] for cell in each] for name, each in found.items()} == {
        "06.2": [ONE.format(1)],
        "06.3": [ONE.format(3)],
        "06.4": ["guess = 1"],
    }
    assert [cell["id"] for each in found.values() for cell in each] == ["ex-06-2", "ex-06-3", "ex-06-4"]


def test_a_copy_of_a_cell_stands_for_it_if_the_copy_has_passed(tmp_path):
    cells = [exercise_cell(ONE.format(n), name, "ex-06-2") for n, name in enumerate(("ex-06-2", "copy-1", "copy-2"))]

    def answer() -> dict:
        (found,) = saved.exercise_cells({"cells": cells}, tmp_path)["06.2"]
        assert found["id"] == "ex-06-2"
        return found["source"]

    assert answer() == ONE.format(0)
    notes.note(tmp_path, "06.2", True, saved.digest_of_cells([cells[2]]))
    assert answer() == ONE.format(2)
    notes.note(tmp_path, "06.2", False, saved.digest_of_cells([cells[1]]))
    assert answer() == ONE.format(0), "no copy has passed"
    notes.note(tmp_path, "06.2", True, "another")
    assert answer() == ONE.format(0), "what has passed is gone"


def test_notes_say_of_which_answer_they_are(tmp_path):
    assert notes.state(tmp_path, "01.1", "abc") == "not tried"
    notes.note(tmp_path, "01.1", True, "abc")
    assert [notes.state(tmp_path, "01.1", each) for each in ("abc", "abd")] == ["passes", "changed"]
    notes.note(tmp_path, "01.1", False, "abc")
    assert notes.state(tmp_path, "01.1", "abc") == "fails"
    (tmp_path / ".progress" / "01.1.json").write_text("[]")
    assert notes.state(tmp_path, "01.1", "abc") == "not tried"


def test_reading_and_splicing_needs_no_torch():
    code = (
        "import sys, course_kit.exercises.splice, course_kit.exercises.saved, course_kit.exercises.notes; "
        "import course_kit.exercises.install; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
