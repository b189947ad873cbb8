"""A course of two small notebooks, for the tests of the scripts.

01_tiny: two functions to write and a number to predict. 02_counters: functions, methods, an exercise in two cells and a
value, for a library of two modules and a program.
"""

import json
import re
import shutil
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from clean import notebook_metadata

ROOT = Path(__file__).resolve().parents[2]

EXERCISE = {"grade": False, "locked": False, "schema_version": 3, "solution": True, "task": False}
CHECK = {"grade": True, "locked": True, "points": 1, "schema_version": 3, "solution": False, "task": False}


def text(cell_id: str, source: str, **metadata) -> dict:
    """A markdown cell."""
    return new_markdown_cell(source, id=cell_id, metadata=metadata)


def code(cell_id: str, source: str) -> dict:
    """A code cell; an id `ex-01-2` makes it an exercise, `check-01-2` its check."""
    kind = {"ex": EXERCISE, "check": CHECK}.get(cell_id.split("-")[0])
    return new_code_cell(source, id=cell_id, metadata={"nbgrader": {"grade_id": cell_id, **kind}} if kind else {})


FUTURE = "from __future__ import annotations\n\n"
DOUBLE = '''#| export tiny.numbers
def double(number):
    """Twice the number."""
    ### BEGIN SOLUTION
    return 2 * number
    ### END SOLUTION'''

HALF = '''#| export tiny.numbers
def half(number):
    """Half of the number."""
    ### BEGIN SOLUTION
    return number / 2
    ### END SOLUTION'''


def cells() -> list[dict]:
    """The cells of 01_tiny, new ones at each call."""
    return [
        text("title", "## 01 · Numbers\n\nTwice and half."),
        code("setup", f'{FUTURE}from course_kit.checks import check, setup\n\nsetup("01")'),
        text("hint-1", "<details><summary>Hint</summary>\n\nAdd it to itself.\n\n</details>"),
        code("ex-01-1", DOUBLE),
        code("check-01-1", 'check("01.1")'),
        code("ex-01-2", HALF),
        code("check-01-2", 'check("01.2")'),
        code("ex-01-3", "# How many twos make ten?\n### BEGIN SOLUTION\nguess = 5\n### END SOLUTION"),
        code("measure", "measured = len(range(0, 10, 2))\nprint(measured)"),
        code("check-01-3", 'check("01.3")'),
        text(
            "recap",
            "| method | saves | costs | formula | use when | limit |\n|---|---|---|---|---|---|\n"
            "| doubling | time | nothing | $2n$ | always | memory |",
            tags=["cheatsheet"],
        ),
    ]


NEW = "02_counters"
PROGRAM = "counters.program"
LIBRARY = {
    "__init__": '"""The library of the tiny course."""\n',
    "tiny.__init__": '"""Arithmetic."""\n',
    "tiny.numbers": '''"""Twice and half."""

from __future__ import annotations


# exercise 01.1
def double(number):
    """Twice the number."""
    return 2 * number


# exercise 01.2
def half(number):
    """Half of the number."""
    return number / 2


def main(argv: list[str] | None = None) -> None:
    """Print twice the half of 3."""
    print(double(half(3)))
''',
    "counters.__init__": '"""Counting."""\n',
    "counters.numbers": '''"""Functions of one number."""

from __future__ import annotations


# exercise 02.1
def square(number: int) -> int:
    """The number times itself."""
    return number * number


# exercise 02.3
def opposite(number: int) -> int:
    """The number with the other sign."""
    return -number


def given(number: int) -> int:
    """The number, as it is."""
    return number
''',
    "counters.counter": '''"""A counter."""

from __future__ import annotations

from course_lib.counters import numbers


class Counter:
    """Counts what it is given."""

    def __init__(self, total: int = 0):
        self.total = total

    # exercise 02.2
    def add(self, number: int) -> None:
        """Count `number` as well."""
        self.total += number

    # exercise 02.3
    @staticmethod
    def of(*parts: int) -> Counter:
        """A counter of several numbers."""
        return Counter(sum(parts))

    def back(self) -> int:
        """What would bring it back to 0."""
        return numbers.opposite(self.total)
''',
    "counters.program": '''"""Counts on every rank, and adds up."""

from __future__ import annotations

import argparse

from course_lib.counters import counter, numbers


def options(argv: list[str] | None) -> argparse.Namespace:
    """The program's options."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--number", type=int, default=3)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Print what the counter says."""
    import torch.distributed as dist

    counted = counter.Counter.of(1, 2)
    counted.add(numbers.square(options(argv).number))
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {counted.total}, back {counted.back()}")
''',
}
ANSWERS = {
    "ex-02-1": '''#| export counters.numbers
def square(number: int) -> int:
    """The number times itself."""
    ### BEGIN SOLUTION
    return number * number
    ### END SOLUTION''',
    "ex-02-2": '''#| export counters.counter:Counter
def add(self: Counter, number: int) -> None:
    """Count `number` as well."""
    ### BEGIN SOLUTION
    self.total += number
    ### END SOLUTION''',
    "ex-02-3": '''#| export counters.numbers
def opposite(number: int) -> int:
    """The number with the other sign."""
    ### BEGIN SOLUTION
    return -number
    ### END SOLUTION''',
    "ex-02-3b": '''#| export counters.counter:Counter
@staticmethod
def of(*parts: int) -> Counter:
    """A counter of several numbers."""
    ### BEGIN SOLUTION
    return Counter(sum(parts))
    ### END SOLUTION''',
    "ex-02-4": "# What is 3 squared?\n### BEGIN SOLUTION\nguess = 9\n### END SOLUTION",
}
CHECKS = {
    "01_01": """from course_lib.tiny import numbers


def check():
    assert numbers.double(3) == 6, "twice 3 is 6"
    assert numbers.double(4) == 8, "twice 4 is 8"
""",
    "01_02": """from course_lib.tiny import numbers


def check():
    assert numbers.half(9) == 4.5
    assert numbers.half(3) == 1.5, "half of 3 has a fraction, 1.5"
""",
    "01_03": """def check(guess, measured):
    assert guess == measured, "count the twos: 2, 4, 6, 8, 10"
""",
    "02_01": """from course_lib.counters import numbers


def check():
    assert numbers.square(3) == 9, "3 times 3 is 9"
""",
    "02_02": """from course_lib.counters import counter


def check():
    found = counter.Counter(1)
    found.add(2)
    assert found.total == 3, "1 and 2 are 3"
""",
    "02_03": """from course_lib.counters import counter, numbers


def check():
    assert numbers.opposite(3) == -3, "the other sign"
    assert counter.Counter.of(1, 2).total == 3, "1 and 2 are 3"
""",
    "02_04": """def check(guess):
    assert guess == 9, "3 times 3"
""",
}


def new_cells() -> list[dict]:
    """The cells of 02_counters, new ones at each call."""
    return [
        text("title", "## 02 · Counters"),
        code("setup", f"{FUTURE}from course_kit.checks import check, setup\n\n"
             "from course_lib.counters import counter, numbers\nfrom course_lib.counters.counter import Counter\n\n"
             'setup("02")'),
        text("headings", "\n\n".join(
            f"### Exercise 02.{number} · a name\n*Difficulty {number} of 5 · 2 minutes*" for number in (1, 2, 3, 4))),
        *(code(name, ANSWERS[name]) for name in ("ex-02-1",)),
        code("check-02-1", 'check("02.1")'),
        code("use", "numbers.square(4)"),
        code("ex-02-2", ANSWERS["ex-02-2"]),
        code("check-02-2", 'check("02.2")'),
        code("ex-02-3", ANSWERS["ex-02-3"]),
        code("ex-02-3b", ANSWERS["ex-02-3b"]),
        code("check-02-3", 'check("02.3")'),
        code("ex-02-4", ANSWERS["ex-02-4"]),
        code("check-02-4", 'check("02.4")'),
    ]  # fmt: skip


def blank(source: str) -> str:
    """An exercise's source as it is handed out."""
    found = r"(?ms)^( *)### BEGIN SOLUTION\n.*?### END SOLUTION"
    return re.sub(found, r"\1# YOUR CODE HERE\n\1raise NotImplementedError()", source)


def write_library(folder: Path) -> Path:
    """Write the library of both notebooks to `folder`/course_lib; returns that."""
    for name, source in LIBRARY.items():
        file = (folder / "course_lib" / Path(*name.split("."))).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source, encoding="utf-8")
    return folder / "course_lib"


def write_kit(folder: Path) -> None:
    """Write a copy of course_kit to `folder`, with the checks of both notebooks in place of the course's."""
    ignore = shutil.ignore_patterns("__pycache__", "check_[0-9]*.py")
    kit = shutil.copytree(ROOT / "course_kit", folder / "course_kit", ignore=ignore)
    for name, source in CHECKS.items():
        file = kit / "checks" / ("tiny" if name.startswith("01") else "counters") / f"check_{name}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(source, encoding="utf-8")


def notebook(cells: list[dict], program: str | None = "tiny.numbers") -> nbformat.NotebookNode:
    """A notebook of these cells, with the metadata that a course notebook has. program: None for an older course."""
    course = {"nproc_per_node": 1} | ({"program": program} if program else {})
    return new_notebook(cells=cells, metadata=notebook_metadata({"course": course}))


def write(path: Path, cells: list[dict], program: str | None = "tiny.numbers") -> Path:
    """Write a notebook of these cells to `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(notebook(cells, program), indent=1) + "\n", encoding="utf-8")
    return path


def read(path: Path) -> dict:
    """The notebook at `path`, each source as one string."""
    found = json.loads(path.read_text(encoding="utf-8"))
    for cell in found["cells"]:
        cell["source"] = "".join(cell["source"])
    return found
