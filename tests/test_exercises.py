"""Every exercise of every notebook: its check advises on the blank, catches wrong answers and passes the solution.

A notebook runs once, in one kernel, up to its last check, without the cells tagged measurement (nbmake runs all of it).
At each check the exercise is put in blank, then as each wrong answer of `wrong_answers/NN.py`, and the check must fail
every time; then the notebook's own objects are put back, and it must pass. A wrong answer is the whole source of the
exercise's cell, under a heading `# %% 01.2 what is wrong with it`. Needs no GPU.
"""

import ast
import dis
import json
import os
import re
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from jupyter_client.manager import start_new_kernel

import tiny_course
from exercises import exercise_name, exercises
from export import read_notebook
from make_workbook import blank_notebook
from tiny_course import ROOT, code

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
ANSWERS = ROOT / "tests" / "wrong_answers"
HEADING = re.compile(r"^# %% (\d\d\.\d+) (\S.*)$")
CELL_LIMIT_S, CHECK_LIMIT_S, TRIES = 100, 10, 3

# Runs in the kernel: what the last cell raised, as the fields of Failure. `check` raises an AssertionError of its own
# kind for every error; where the one behind it is no assertion, the answer crashed and the check only reported it. A
# timeout is a verdict too: the check's deadline caught an answer that hangs, and where each rank waits is the advice.
LAST_ERROR = """
def _last_error():
    import sys

    error = sys.last_value
    behind = None if type(error) is AssertionError else error.__cause__ or error.__context__
    is_advice = isinstance(error, AssertionError)
    is_verdict = is_advice and isinstance(behind or error, (AssertionError, TimeoutError))
    return [is_verdict, is_advice, type(behind if is_advice and behind else error).__name__, str(error)]
"""


@dataclass
class Failure:
    """How a cell failed."""

    is_verdict: bool  # an assertion of the check's own, or its deadline
    is_advice: bool  # an assertion, whatever lies behind it
    kind: str  # the type of the error, or of the one behind it
    message: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.message.splitlines()[0] if self.message else 'without a message'}"

    def words(self) -> int:
        """How many words the message has, the exercise's name left out."""
        return len(re.findall(r"\w+", re.sub(r"^Exercise \d\d\.\d+", "", self.message)))


class Kernel:
    """One kernel that runs the cells of a notebook."""

    def __init__(self, folder: Path, project: Path):
        path = os.pathsep.join(filter(None, [str(project), os.environ.get("PYTHONPATH")]))
        self.manager, self.client = start_new_kernel(cwd=str(folder), env={**os.environ, "PYTHONPATH": path})
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


def read_answers(file: Path, names: list[str]) -> tuple[dict[str, list[tuple[str, str]]], list[str]]:
    """The wrong answers of a file, as (what is wrong, source), by exercise; and what is the matter with the file."""
    answers, faults = {name: [] for name in names}, []
    if not file.exists():
        return answers, [f"{file.name} is missing: it holds the wrong answers that the checks must catch"]
    for block in re.split(r"(?m)^(?=# %%)", file.read_text(encoding="utf-8"))[1:]:
        heading, _, source = block.partition("\n")
        found = HEADING.match(heading)
        if not found:
            faults.append(f"{file.name}: '{heading}' is no heading such as '# %% 01.2 counts the head twice'")
        elif found[1] not in answers:
            faults.append(f"{file.name}: there is no exercise {found[1]}")
        else:
            answers[found[1]].append((found[2], source.strip()))
    few = {name: len(given) for name, given in answers.items() if len(given) < 3}
    return answers, faults + [f"{name} has {count} wrong answers; it needs 3 or more" for name, count in few.items()]


def bound_names(source: str) -> set[str]:
    """The names that a cell binds; none for one that does not compile, which will say so when it runs."""
    try:
        instructions = dis.get_instructions(compile(source, "cell", "exec"))
    except SyntaxError:
        return set()
    return {one.argval for one in instructions if one.opname in ("STORE_NAME", "STORE_GLOBAL")}


def up_to_the_last_check(cells: list[dict]) -> list[dict]:
    """The cells on which a check may depend: those tagged measurement only measure and draw."""
    last = max((number for number, cell in enumerate(cells) if exercise_name(cell, "check")), default=-1)
    return [cell for cell in cells[: last + 1] if "measurement" not in cell["metadata"].get("tags", [])]


def blank_faults(failure: Failure | None) -> list[str]:
    """What is wrong with how a check answers a blank exercise."""
    if failure is None:
        return ["its check passes while it is blank"]
    if not failure.is_advice:
        return [f"blank, its check shows a bare error instead of advice: {failure}"]
    return [] if failure.words() >= 4 else [f"blank, its check does not say what to do: '{failure.message}'"]


def answer_faults(what: str, failure: Failure | None) -> list[str]:
    """What is wrong with how a check answers a wrong answer."""
    if failure is None:
        return [f"its check accepts the wrong answer '{what}'"]
    if not failure.is_verdict:
        return [f"the wrong answer '{what}' crashes instead of being caught: {failure}"]
    if failure.words() < 4:
        return [f"its check does not explain what is wrong with '{what}': '{failure.message}'"]
    return []


def timed_check(kernel: Kernel, check: str, what: str) -> tuple[Failure | None, list[str]]:
    """Run a check; how it first failed, and a fault where it was too slow every time: once may be the machine."""
    failures = []
    for _ in range(TRIES):
        start = time.perf_counter()
        failures.append(kernel.run(check))
        seconds = time.perf_counter() - start
        if seconds <= CHECK_LIMIT_S:
            return failures[0], []
    return failures[0], [f"its check took {seconds:.0f} s on {what}; {CHECK_LIMIT_S} s at most"]


def check_faults(kernel: Kernel, solved: str, blank: str, answers: list[tuple[str, str]], check: str) -> list[str]:
    """What is wrong with a check, tried on the blank and each wrong answer; the solution's objects are put back."""
    variants = [("the blank", blank), *answers]
    names = sorted(bound_names(solved).union(*(bound_names(source) for _, source in variants)))
    forget = f"[globals().pop(name, None) for name in {names}]\nNone"
    kernel.run(f"_solved = {{name: globals()[name] for name in {names} if name in globals()}}")
    faults = []
    for what, source in variants:
        kernel.run(forget)
        failure = kernel.run(source)
        if failure and (source != blank or failure.kind != "NotImplementedError"):
            faults.append(f"the cell of '{what}' fails by itself: {failure}")
            continue
        failure, slow = timed_check(kernel, check, what)
        faults += slow + (blank_faults(failure) if source == blank else answer_faults(what, failure))
    kernel.run(forget)
    kernel.run("globals().update(_solved)")
    return faults


def solution_faults(kernel: Kernel, check: str, note: Path) -> list[str]:
    """What is wrong with how a check answers the solution; `note` is the file it must write."""
    failure, faults = timed_check(kernel, check, "the solution")
    if failure:
        return [f"solved, its check fails: {failure}"]
    if kernel.remarks:
        faults.append(f"nbgrader gives no points for a check that writes to stderr or has a value: {kernel.remarks[0]}")
    if not note.exists() or not json.loads(note.read_text())["passed"]:
        faults.append(f'its check does not note that it passes: with check("{note.stem}")')
    return faults


def exercise_faults(path: Path, answers_file: Path, folder: Path, project: Path = ROOT) -> list[str]:
    """Run the notebook at `path` to its last check and try each; one line for each thing wrong with its exercises."""
    notebook = read_notebook(path)
    handed_out = {cell["id"]: cell["source"] for cell in blank_notebook(path)["cells"]}
    solved = exercises(notebook)
    answers, faults = read_answers(answers_file, list(solved))
    unchecked = set(solved)
    cells = up_to_the_last_check(notebook["cells"])
    with kernel(folder, project) as running:
        for number, cell in enumerate(cells, start=1):
            if cell["cell_type"] != "code":
                continue
            name = exercise_name(cell, "check")
            if name in solved:
                unchecked.discard(name)
                blank, check = handed_out[solved[name]["id"]], handed_out[cell["id"]]  # a learner sees no hidden tests
                found = check_faults(running, solved[name]["source"], blank, answers[name], check)
                note = folder / "workbook" / ".progress" / f"{name}.json"
                found += solution_faults(running, cell["source"], note)
                faults += [f"{name}: {fault}" for fault in found]
            elif failure := running.run(cell["source"]):
                return [*faults, f"cell {number} ({cell['id']}) fails: {failure}"]
    return faults + [f"{name}: no check" for name in sorted(unchecked)]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_check_fails_on_the_blank_catches_wrong_answers_and_passes_the_solution(path, tmp_path):
    faults = exercise_faults(path, ANSWERS / f"{path.stem[:2]}.py", tmp_path)
    assert not faults, "\n".join(["", *faults])


def test_every_file_of_wrong_answers_belongs_to_a_notebook():
    stray = {file.stem for file in ANSWERS.glob("*.py")} - {path.stem[:2] for path in NOTEBOOKS}
    assert not stray, f"wrong_answers/ has files for notebooks that are not there: {stray}"


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


def tiny_faults(tmp_path: Path, cells: list[dict], answers: str | None = GOOD_ANSWERS) -> list[str]:
    """What the harness finds in a tiny notebook."""
    path = tiny_course.write(tmp_path / "notebooks" / "01_tiny.ipynb", cells)
    if answers is not None:
        (tmp_path / "01.py").write_text(answers)
    return exercise_faults(path, tmp_path / "01.py", tmp_path)


def test_the_harness_finds_nothing_wrong_with_good_exercises(tmp_path):
    cells = tiny_course.cells()
    cells.insert(5, code("keep", "first = double"))
    cells.insert(9, code("same", "assert double is first and double(2) == 4, 'the notebook goes on as before'"))
    cells += exercise(4, "x = 1", "if x != 1: raise TimeoutError('rank 1 still waits for rank 0, in send')")
    hangs = "".join(f"# %% 01.4 hangs\nx = {number}\n" for number in (2, 3, 4))
    assert tiny_faults(tmp_path, cells, GOOD_ANSWERS + hangs) == []


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
    ("x = 1", "assert x == 2, 'it should be two'", ["x = 3"] * 3, "solved, its check fails: AssertionError: Exercise"),
    ("x = 1", "assert x == 1, 'it should be one'", ["x = 2"] * 2, "has 2 wrong answers; it needs 3 or more"),
    (
        "x = 1",
        "import time; time.sleep(0.6 * (globals().get('x') == 3)); assert x == 1, 'it should be one'",
        ["x = 3"] + ["x = 2"] * 2,
        "its check took 1 s on answer 0",
    ),
    (
        "x = 1",
        "import warnings; warnings.warn('old'); assert x == 1, 'it should be one'",
        ["x = 2"] * 3,
        "nbgrader gives no points for a check that writes to stderr",
    ),
]


def test_the_harness_finds_every_planted_fault(tmp_path, monkeypatch):
    monkeypatch.setattr("test_exercises.CHECK_LIMIT_S", 0.5)
    cells, answers = [code("setup", "from course_lib.checks import check")], ""
    for number, (solved, assertion, wrong, _) in enumerate(PLANTED, start=1):
        cells += exercise(number, solved, assertion)
        answers += "".join(f"# %% 01.{number} answer {i}\n{source}\n" for i, source in enumerate(wrong))
    faults = tiny_faults(tmp_path, cells, answers)
    for number, (_, _, _, expected) in enumerate(PLANTED, start=1):
        mine = [fault for fault in faults if fault.startswith((f"01.{number}:", f"01.{number} "))]
        assert any(expected in fault for fault in mine), f"expected '{expected}', found {mine}"


def test_the_harness_finds_faults_round_the_exercises(tmp_path):
    cells = [
        code("setup", "from course_lib.checks import check"),
        *exercise(1, "x = 1", "assert x == 1, 'it should be one'", name="01.7"),
        code("ex-01-2", "### BEGIN SOLUTION\nx = 1\n### END SOLUTION"),
        code("check-01-2", "assert x == 1, 'it should be one'"),
        code("between", "1 / 0"),
        *exercise(3, "x = 1", "assert x == 1, 'it should be one'"),
    ]
    answers = "# %% 01.1 a\nx = 2\n# %% 01.1 b\nx = 3\n# %% 01.1 c\nx = 4\n# %% 01.9 d\nx = 5\n# %% wrong\nx = 6\n"
    faults = tiny_faults(tmp_path, cells, answers + "".join(f"# %% 01.2 {i}\nx = {i}\n" for i in (2, 3, 4)))
    for expected in (
        "01.py: there is no exercise 01.9",
        "01.py: '# %% wrong' is no heading such as",
        '01.1: its check does not note that it passes: with check("01.1")',
        "01.2: blank, its check shows a bare error instead of advice: NameError",
        "01.3 has 0 wrong answers",
        "cell 6 (between) fails: ZeroDivisionError: division by zero",
    ):
        assert any(fault.startswith(expected) for fault in faults), f"expected '{expected}', found {faults}"


def test_the_harness_finds_missing_answers_and_a_missing_check(tmp_path):
    cells = [code("ex-01-1", "### BEGIN SOLUTION\nx = 1\n### END SOLUTION")]
    assert tiny_faults(tmp_path, cells, answers=None) == [
        "01.py is missing: it holds the wrong answers that the checks must catch",
        "01.1: no check",
    ]
