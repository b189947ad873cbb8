"""Every exercise of every notebook of the old shape: its check advises on the blank, catches wrong answers and passes
right ones. (test_answers.py tries those of the new shape.)

A notebook runs once, in one kernel: its checks and the cells that they depend on (`needed_cells`), those tagged
measurement left out; nbmake runs all of it. At each check the exercise is put in blank, then as each wrong answer of
`wrong_answers/NN.py`, and the check must fail every time; then with each right answer of `right_answers/NN.py`, the
same in another style, and it must pass. Then the notebook's own objects are put back: they are tried where there is no
right answer, and else nbmake tries them. An answer is the whole source of the exercise's cell, under a heading
`# %% 01.2 what is wrong with it`, or what is other about it. How long each check took is in the report of the suite.
Needs no GPU.
"""

import ast
import json
import os
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from jupyter_client.manager import start_new_kernel

import tiny_course
from exercises import exercise_name, exercises
from export import chapter, program_of, read_notebook
from make_workbook import blank_notebook
from needed_cells import bound_names, needed_cells
from tiny_course import ROOT, code
from verdicts import Failure, answer_faults, blank_faults
from written_answers import read_answers

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
OLD_SHAPE = [path for path in NOTEBOOKS if not program_of(read_notebook(path))]
WRONG, RIGHT = (ROOT / "tests" / kind for kind in ("wrong_answers", "right_answers"))
CELL_LIMIT_S = 100  # against a hang: none takes a tenth of it
HANGS_S = 1.5  # the deadline of an answer that is said to hang: a learner's is longer, and nobody learns from this one

# Runs in the kernel: what the last cell raised, as the fields of Failure. Nobody reads the tracebacks, and in colour
# they take longer than most checks.
LAST_ERROR = f"""
get_ipython().run_line_magic("xmode", "Minimal")

def _last_error():
    import sys

    sys.path.append({str(Path(__file__).parent)!r})
    from verdicts import failure_of
    sys.path.pop()
    failure = failure_of(sys.last_value)
    return [failure.is_verdict, failure.is_advice, failure.kind, failure.message]
"""


class Kernel:
    """One kernel that runs the cells of a notebook."""

    def __init__(self, folder: Path, project: Path):
        path = os.pathsep.join(filter(None, [str(project), os.environ.get("PYTHONPATH")]))
        self.check_seconds = {}
        self.manager, self.client = start_new_kernel(
            cwd=str(folder),
            env={**os.environ, "PYTHONPATH": path},
            extra_arguments=["--HistoryManager.enabled=False"],  # a database, written to for each cell
        )
        self.run(LAST_ERROR)

    def run(self, source: str) -> Failure | None:
        """Run a cell. `self.remarks` holds what it wrote to stderr or left as its value."""
        self.remarks = []

        def note(message):
            kind, content = message["msg_type"], message["content"]
            if kind == "execute_result" or kind == "stream" and content["name"] == "stderr":
                self.remarks.append(content.get("text") or "a value")

        try:
            reply = self.client.execute_interactive(
                source, allow_stdin=False, stop_on_error=False, timeout=CELL_LIMIT_S, output_hook=note
            )
        except TimeoutError:
            self.manager.interrupt_kernel()
            return Failure(False, False, "TimeoutError", f"no end after {CELL_LIMIT_S} s")
        return self.last_error() if reply["content"]["status"] == "error" else None

    def run_check(self, check: str, name: str, what: str) -> Failure | None:
        """Run a check, and note how long it took on an answer."""
        start = time.perf_counter()
        failure = self.run(check)
        self.check_seconds[f"check {name}, {what}"] = time.perf_counter() - start
        return failure

    def last_error(self) -> Failure:
        """What the cell that has just failed raised."""
        reply = self.client.execute_interactive(
            "", silent=True, allow_stdin=False, user_expressions={"error": "_last_error()"}, timeout=CELL_LIMIT_S
        )
        return Failure(*ast.literal_eval(reply["content"]["user_expressions"]["error"]["data"]["text/plain"]))


@contextmanager
def kernel(folder: Path, project: Path):
    """A kernel that runs in a folder beside the project's data, as a workbook's does."""
    workbook = folder / "workbook"
    workbook.mkdir()
    for name in ("data", "benchmarks"):
        (folder / name).symlink_to(project / name)
    running = Kernel(workbook, project)
    try:
        yield running
    finally:
        running.client.stop_channels()
        running.manager.shutdown_kernel(now=True)


def cells_to_run(notebook: dict, solved: dict[str, dict], variants: dict[str, list[str]]) -> list[dict]:
    """The set-up, the checks and the code cells that these need; those tagged measurement only measure and draw."""
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    cells = [cell for cell in cells if "measurement" not in cell["metadata"].get("tags", [])]
    place = {cell["id"]: number for number, cell in enumerate(cells)}
    answers = {place[solved[name]["id"]]: sources for name, sources in variants.items()}
    needed = {place[cell["id"]] for cell in (*cells[:1], *solved.values())}
    for number, cell in enumerate(cells):
        if cell["id"] == "setup" or exercise_name(cell, "check"):
            needed |= needed_cells([cell["source"] for cell in cells], number, answers)
    return [cells[number] for number in sorted(needed)]


@contextmanager
def instead(kernel: Kernel, sources: list[str]):
    """A function that puts an answer in place of the solution, whose objects are put back at the end."""
    names = sorted(set().union(*map(bound_names, sources)))
    forget = f"[globals().pop(name, None) for name in {names}]\n"
    kernel.run(f"_solved = {{name: globals()[name] for name in {names} if name in globals()}}")
    yield lambda source: kernel.run(forget + source)
    kernel.run(forget + "globals().update(_solved)")


def wrong_faults(
    kernel: Kernel, name: str, solved: str, blank: str, answers: list[tuple[str, str]], check: str
) -> list[str]:
    """What is wrong with a check, tried on the blank and each wrong answer."""
    variants, faults = [("the blank", blank), *answers], []
    with instead(kernel, [solved, *(source for _, source in variants)]) as put:
        for what, source in variants:
            failure = put(source)
            if failure and (source != blank or failure.kind != "NotImplementedError"):
                faults.append(f"the cell of '{what}' fails by itself: {failure}")
                continue
            if "hangs" in what:
                kernel.run(f"_patience, ranks.timeout_s = ranks.timeout_s, {HANGS_S}")
            failure = kernel.run_check(check, name, what)
            if "hangs" in what:
                kernel.run("ranks.timeout_s = _patience")
            faults += blank_faults(failure) if source == blank else answer_faults(what, failure)
    return faults


def right_faults(
    kernel: Kernel, name: str, solved: str, answers: list[tuple[str, str]], check: str, note: Path
) -> list[str]:
    """What is wrong with a check, tried on right answers; `note` is the file it must write."""
    faults = []
    with instead(kernel, [solved, *(source for _, source in answers)]) as put:
        for what, source in answers:
            if failure := put(source):
                faults.append(f"the cell of '{what}' fails by itself: {failure}")
            else:
                faults += pass_faults(kernel, name, f"'{what}'", check, note)
    return faults


def pass_faults(kernel: Kernel, name: str, what: str, check: str, note: Path) -> list[str]:
    """What is wrong with how a check answers what is right."""
    if failure := kernel.run_check(check, name, what):
        return [f"{what} fails: {failure}"]
    faults = []
    if kernel.remarks:
        faults.append(f"nbgrader gives no points for a check that writes to stderr or has a value: {kernel.remarks[0]}")
    if not note.exists() or not json.loads(note.read_text())["passed"]:
        faults.append(f'its check does not note that it passes: with check("{name}")')
    return faults


def exercise_faults(
    path: Path, wrong: Path, right: Path, folder: Path, project: Path = ROOT, note_seconds=lambda what, seconds: None
) -> list[str]:
    """Run the checks of the notebook at `path` and try each; one line for each thing wrong with its exercises."""
    notebook = read_notebook(path)
    handed_out = {cell["id"]: cell["source"] for cell in blank_notebook(path)["cells"]}
    solved = exercises(notebook)
    wrong_answers, faults = read_answers(wrong, list(solved), "wrong")
    right_answers, more_faults = read_answers(right, list(solved), "right")
    faults += more_faults
    unchecked = set(solved)
    variants = {
        name: [handed_out[solved[name]["id"]], *(source for _, source in wrong_answers[name] + right_answers[name])]
        for name in solved
    }
    with kernel(folder, project) as running:
        for cell in cells_to_run(notebook, solved, variants):
            name = exercise_name(cell, "check")
            if name in solved:
                unchecked.discard(name)
                blank, check = handed_out[solved[name]["id"]], handed_out[cell["id"]]  # a learner sees no hidden tests
                source, note = solved[name]["source"], folder / "workbook" / ".progress" / f"{name}.json"
                found = wrong_faults(running, name, source, blank, wrong_answers[name], check)
                if right_answers[name]:
                    found += right_faults(running, name, source, right_answers[name], cell["source"], note)
                else:
                    found += pass_faults(running, name, "the solution", cell["source"], note)
                faults += [f"{name}: {fault}" for fault in found]
            elif failure := running.run(cell["source"]):
                return [*faults, f"cell {cell['id']} fails: {failure}"]
        for what, seconds in running.check_seconds.items():
            note_seconds(what, seconds)
    return faults + [f"{name}: no check" for name in sorted(unchecked)]


@pytest.mark.parametrize("path", OLD_SHAPE, ids=lambda path: path.stem)
def test_every_check_fails_on_the_blank_catches_wrong_answers_and_passes_right_ones(path, tmp_path, record_property):
    wrong, right = (kind / f"{chapter(path)}.py" for kind in (WRONG, RIGHT))
    faults = exercise_faults(path, wrong, right, tmp_path, note_seconds=record_property)
    assert not faults, "\n".join(["", *faults])


@pytest.mark.parametrize("folder", [WRONG, RIGHT], ids=lambda folder: folder.name)
def test_every_file_of_answers_belongs_to_a_notebook(folder):
    stray = {file.stem for file in folder.glob("*.py")} - {chapter(path) for path in NOTEBOOKS}
    assert not stray, f"{folder.name}/ has files for notebooks that are not there: {stray}"


# The harness itself, on a tiny notebook. `check` here is the course's own.

CHECKED = 'with check("{name}"):\n    {assertion}'
GOOD_ANSWERS = """
Text before the first heading is no answer.

# %% 01.1 adds two
def double(number):
    return number + 2
# %% 01.1 the number itself
def double(number):
    return number
# %% 01.1 fake: remembers
def double(number):
    return {3: 6}.get(number, 0)
# %% 01.2 whole numbers only
def half(number):
    return number // 2
# %% 01.2 double
def half(number):
    return double(number)
# %% 01.2 nothing
half = lambda number: 0
# %% 01.3 too few
guess = 4
# %% 01.3 too many
guess = 6
# %% 01.3 none
guess = 0
"""


def tiny_faults(
    tmp_path: Path, cells: list[dict], wrong: str | None = GOOD_ANSWERS, right: str | None = ""
) -> list[str]:
    """What the harness finds in a tiny notebook. right: answers besides the solutions; None: there is no file."""
    path = tiny_course.write(tmp_path / "notebooks" / "01_tiny.ipynb", cells)
    files = tmp_path / "wrong.py", tmp_path / "right.py"
    if right is not None:
        solutions = exercises({"cells": cells}).items()
        right += "".join(f"# %% {name} the solution\n{cell['source']}\n" for name, cell in solutions)
    for file, text in zip(files, (wrong, right)):
        if text is not None:
            file.write_text(text)
    return exercise_faults(path, *files, tmp_path)


def test_the_harness_finds_nothing_wrong_with_good_exercises(tmp_path):
    cells = tiny_course.cells()
    cells.insert(5, code("keep", "first = double"))
    cells.insert(9, code("same", "same = double is first and double(2) == 4"))
    cells.insert(10, code("unneeded", "double = 1 / 0"))
    cells += exercise(4, "x = 1", "if x != 1: raise TimeoutError('rank 1 still waits for rank 0, in send')")
    cells += exercise(5, "y = 1", "assert same, 'the notebook goes on as before'; assert y == 1, 'it should be one'")
    more = "".join(f"# %% 01.4 hangs\nx = {number}\n# %% 01.5 no\ny = {number}\n" for number in (2, 3, 4))
    right = "# %% 01.1 a sum\ndouble = lambda number: number + number\n# %% 01.3 of two numbers\nguess = 2 + 3\n"
    assert tiny_faults(tmp_path, cells, GOOD_ANSWERS + more, right) == []


def exercise(number: int, solved: str, assertion: str, name: str = "") -> list[dict]:
    """An exercise that binds `x` and its check."""
    return [
        code(f"ex-01-{number}", f"### BEGIN SOLUTION\n{solved}\n### END SOLUTION"),
        code(f"check-01-{number}", CHECKED.format(name=name or f"01.{number}", assertion=assertion)),
    ]


# (solution, assertion, the three wrong answers, the fault that must be found)
PLANTED = [
    ("x = 1", "assert True", ["x = 2"] * 3, "its check passes while it is blank"),
    ("x = 1", "assert x", ["x = 2", "x = 0", "x = ''"], "its check accepts the wrong answer 'answer 0'"),
    ("x = 1", "assert x == 1", ["x = 2"] * 3, "its check does not explain what is wrong with 'answer 0'"),
    (
        "x = 1",
        "assert x + 0 == 1, 'it should be one'",
        ["x = None"] + ["x = 2"] * 2,
        "the wrong answer 'answer 0' crashes instead of being caught: TypeError",
    ),
    (
        "x = 1",
        "assert x == 1, 'it should be one'",
        ["x = y"] + ["x = 2"] * 2,
        "the cell of 'answer 0' fails by itself: NameError",
    ),
    (
        "x = 1",
        "assert x == 1, 'it should be one'",
        ["raise NotImplementedError"] + ["x = 2"] * 2,
        "the cell of 'answer 0' fails by itself: NotImplementedError",
    ),
    (
        "x = 1",
        "assert x == 1, 'it should be one'",
        ["x = = 2"] + ["x = 2"] * 2,
        "the cell of 'answer 0' fails by itself: SyntaxError",
    ),
    (
        "x = 1",
        "assert x == 1, 'it should be one'",
        ["z = 2"] + ["x = 2"] * 2,
        "the wrong answer 'answer 0' crashes instead of being caught: NameError",
    ),
    ("x = 1", "assert x == 2, 'it should be two'", ["x = 3"] * 3, "'the solution' fails: AssertionError: Exercise"),
    ("x = 1", "assert x == 1, 'it should be one'", ["x = 2"] * 2, "has 2 wrong answers; it needs 3 or more"),
    (
        "x = 1",
        "import time; time.sleep(60 * (globals().get('x') == 3)); assert x == 1, 'it should be one'",
        ["x = 3"] + ["x = 2"] * 2,
        "the wrong answer 'answer 0' crashes instead of being caught: TimeoutError: no end after 25 s",
    ),
    (
        "x = 1",
        "import warnings; warnings.warn('old'); assert x == 1, 'it should be one'",
        ["x = 2"] * 3,
        "nbgrader gives no points for a check that writes to stderr",
    ),
]


def test_the_harness_finds_every_planted_fault(tmp_path, monkeypatch):
    monkeypatch.setattr("test_exercises.CELL_LIMIT_S", 25)
    cells, answers = [code("setup", "from course_kit.checks import check")], ""
    for number, (solved, assertion, wrong, _) in enumerate(PLANTED, start=1):
        cells += exercise(number, solved, assertion)
        answers += "".join(f"# %% 01.{number} answer {i}\n{source}\n" for i, source in enumerate(wrong))
    right = "# %% 01.1 as a float\nx = 1.0\n# %% 01.2 otherwise\nx = 1\n# %% 01.3 more precise\nx = 1.01\n"
    faults = tiny_faults(tmp_path, cells, answers, right)
    assert any(fault.startswith("01.3: 'more precise' fails: AssertionError") for fault in faults), faults
    assert not any("as a float" in fault or "otherwise" in fault for fault in faults)
    for number, (_, _, _, expected) in enumerate(PLANTED, start=1):
        mine = [fault for fault in faults if fault.startswith((f"01.{number}:", f"01.{number} "))]
        assert any(expected in fault for fault in mine), f"expected '{expected}', found {mine}"


def test_the_harness_finds_faults_round_the_exercises(tmp_path):
    cells = [
        code("setup", "from course_kit.checks import check"),
        *exercise(1, "x = 1", "assert x == 1, 'it should be one'", name="01.7"),
        code("ex-01-2", "### BEGIN SOLUTION\nx = 1\n### END SOLUTION"),
        code("check-01-2", "assert x == 1, 'it should be one'"),
        code("between", "one = 1 / 0"),
        *exercise(3, "x = 1", "assert x == one, 'it should be one'"),
    ]
    answers = "# %% 01.1 a\nx = 2\n# %% 01.1 b\nx = 3\n# %% 01.1 c\nx = 4\n# %% 01.9 d\nx = 5\n# %% wrong\nx = 6\n"
    faults = tiny_faults(
        tmp_path, cells, answers + "".join(f"# %% 01.2 {i}\nx = {i}\n" for i in (2, 3, 4)), "# %% 01.8 of another\n"
    )
    for expected in (
        "wrong.py: there is no exercise 01.9",
        "right.py: there is no exercise 01.8",
        "wrong.py: '# %% wrong' is no heading such as",
        '01.1: its check does not note that it passes: with check("01.1")',
        "01.2: blank, its check shows a bare error instead of advice: NameError",
        "01.3 has 0 wrong answers",
        "cell between fails: ZeroDivisionError: division by zero",
    ):
        assert any(fault.startswith(expected) for fault in faults), f"expected '{expected}', found {faults}"


def test_the_harness_finds_missing_answers_and_a_missing_check(tmp_path):
    cells = [code("ex-01-1", "### BEGIN SOLUTION\nx = 1\n### END SOLUTION")]
    assert tiny_faults(tmp_path, cells, wrong=None, right=None) == [
        "wrong.py is missing: it holds the wrong answers that the checks must catch",
        "01.1: no check",
    ]


NEEDS = {
    "import": "import math",
    "twice": "def twice(x):\n    return FACTOR * x",
    "old": "FACTOR = 1 / 0",
    "new": "FACTOR = 2",
    "made": "made = [twice(n) for n in range(3)]",
    "shown": "print(made); math.seen = 1",
    "added": "made.append(made[0])",
    "set": "if made:\n    made[1] = math.pi",
    "unused": "class Unused:\n    size = FACTOR",
    "check": "assert made",
    "after": "made = None",
}


def needed(check: str, sources: dict[str, str], **variants: list[str]) -> set[str]:
    names = list(sources)
    others = {names.index(name): given for name, given in variants.items()}
    return {names[number] for number in needed_cells(list(sources.values()), names.index(check), others)}


def test_a_check_needs_the_cells_that_bind_and_change_what_it_names():
    expected = {"check", "set", "added", "made", "twice", "new", "import", "shown"}
    assert needed("check", NEEDS) == expected, "not the FACTOR that is bound again before twice is called"
    assert needed("check", NEEDS | {"made": "made = [twice(1)]\nFACTOR = 3"}) == expected
    assert needed("check", {**NEEDS, "check": "1 + 1"}) == {"check"}
    own = "for made in (1, 2):\n    print(made, [made for each in (3,)])"
    assert needed("check", {**NEEDS, "check": own}) == {"check"}, "it binds `made` before it looks it up"
    assert needed("check", {**NEEDS, "check": "made = [*made]"}) == expected


def test_a_class_body_runs_with_its_cell_and_a_function_when_it_is_called():
    sources = {"a": "A = 1", "c": "class C:\n    a = A\n    def f(self): return A", "b": "A = 2", "check": "C().f()"}
    assert needed("check", sources) == {"a", "b", "c", "check"}
    assert needed("check", {**sources, "c": "class C:\n    def f(self): return A"}) == {"a", "b", "c", "check"}


def test_wrong_answers_may_need_other_cells():
    sources = {"a": "a = 1", "b": "b = 2", "answer": "x = a", "check": "assert x"}
    assert needed("check", sources) == {"a", "answer", "check"}
    assert needed("check", sources, answer=["x = b", "x = = 2"]) == {"a", "b", "answer", "check"}


def test_a_crash_is_a_verdict_for_an_answer_that_may_crash_alone():
    died = Failure(False, True, "RankFailed", "Exercise 05.9: rank 0: its process died without a Python error: SIGSEGV")
    assert "crashes instead" in answer_faults("waits too late", died)[0]
    assert not answer_faults("waits too late, and may crash", died)
    own = Failure(False, True, "TypeError", "an error of its own")
    assert "crashes instead" in answer_faults("it may crash", own)[0]
