"""Every exercise of every notebook: its check advises on the blank, catches wrong answers and passes right ones.

All of it in this process, and on the ranks that it shares with the checks: no kernel. Each check is tried on the blank
that a learner gets, on each wrong answer of `wrong_answers/NN.py`, which must fail, and on each right answer of
`right_answers/NN.py`, which must pass (`written_answers.py` says how they are written; nbmake tries the solutions).
Each time the library is afterwards what it was. How long each check took is in the report of the suite. Needs no GPU.
"""

import __future__

import contextlib
import inspect
import io
import json
import linecache
import re
import signal
import sys
import time
import types
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

import tiny_course
from course_kit.checks import frame
from course_kit.exercises import install
from course_kit.exercises.saved import exercise_cells
from course_kit.ranks import calls
from exercises import exercise_name
from export import chapter, read_notebook
from make_workbook import blank_notebook
from needed_cells import needed_cells
from one_value import ONE_VALUE
from recorded_calls import kernels_record, recording, with_one_value
from tiny_course import ROOT, code
from verdicts import Failure, answer_faults, blank_faults, failure_of
from written_answers import AnswerError, expanded, read_answers, solution

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
WRONG, RIGHT = (ROOT / "tests" / kind for kind in ("wrong_answers", "right_answers"))
CHECK_LIMIT_S = 100  # against a hang: none takes a tenth of it
HANGS_S = 1.5  # the deadline of an answer that is known to hang; a learner's is longer
FLAGS = __future__.annotations.compiler_flag


class NoEnd(BaseException):
    """A check that does not end. No Exception: the check would report it as one of the answer's."""


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise NoEnd inside after so many seconds."""

    def stop(signum, frame):
        raise NoEnd(f"no end after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def kernels_warnings() -> Iterator[None]:
    """Inside, warnings go to stderr by Python's own rules, and by those that a notebook's set-up makes."""
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        for kind in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
            warnings.simplefilter("ignore", kind)
        warnings.showwarning = lambda message, kind, *place: print(f"{kind.__name__}: {message}", file=sys.stderr)
        yield


@contextlib.contextmanager
def captured() -> Iterator[io.StringIO]:
    """Inside, what is printed is lost, and what goes to stderr is in the buffer."""
    said = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
        yield said


def execute(source: str, name: str, namespace: dict) -> Failure | None:
    """Run a cell as the kernel would, in a namespace."""
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
    try:
        with captured():
            exec(compile(source, name, "exec", FLAGS), namespace)
    except Exception as error:
        return failure_of(error)
    return None


def library_of(exercise: str) -> list:
    """What the library runs for an exercise: its definitions, and the code inside them."""
    found = []
    for target, names in frame.targets_by_exercise().get(exercise, {}).items():
        module, _, cls = target.partition(":")
        owner = install.library_module(module)
        owner = getattr(owner, cls) if cls else owner
        for value in map(vars(owner).get, names):
            inner = vars(value).items() if isinstance(value, type) else ()
            codes = [getattr(install.raw(each), "__code__", None) for each in (value, *(each for _, each in inner))]
            found += [value, *(each for _, each in inner if callable(each)), *codes]
    return found


def same(one: list, other: list) -> bool:
    return len(one) == len(other) and all(a is b for a, b in zip(one, other, strict=True))


class Trials:
    """Tries answers to the exercises of one notebook, in the folder of a workbook, with the notebook's set-up run."""

    def __init__(self, cells: list[dict], folder: Path):
        self.cells = [cell for cell in cells if cell["cell_type"] == "code"]
        self.folder, self.seconds, self.remarks = folder, {}, ""
        self.calls: dict[str, Path] = {}  # by exercise: where its functions have noted what they are called with
        self.setup = {"__name__": "__main__"}
        for cell in self.cells:
            if cell["id"] == "setup" and (failure := execute(cell["source"], "setup", self.setup)):
                raise RuntimeError(f"the set-up cell fails: {failure}")

    def prepared(self, exercise: str, ids: list[str], answers: list[list[str]]) -> dict:
        """The namespace in which an exercise is tried. One that is not exported may need names of cells before it, and
        its check what other cells measured; both are run. Raises RuntimeError where such a cell fails.
        """
        space = dict(self.setup)
        if exercise in frame.targets_by_exercise():
            return space
        places = {cell["id"]: number for number, cell in enumerate(self.cells)}
        parameters = ", ".join(inspect.signature(frame.check_function(exercise)).parameters)
        end = max(places[each] for each in ids) + 1
        sources = [cell["source"] for cell in self.cells[:end]] + [parameters]
        variants = {places[name]: [answer[number] for answer in answers] for number, name in enumerate(ids)}
        for number in sorted(needed_cells(sources, end, variants) - {end, *variants}):
            if self.cells[number]["id"] == "setup":
                continue
            if failure := execute(sources[number], self.cells[number]["id"], space):
                raise RuntimeError(f"cell {self.cells[number]['id']}, which it needs, fails: {failure}")
        return space

    def check(self, exercise: str, what: str, cells: list[str], space: dict) -> Failure | None:
        """Run the check of an exercise on the cells of an answer; they have been executed in `space`."""
        named = [(source, f"{exercise} {what}, cell {number}") for number, source in enumerate(cells, start=1)]
        start = time.perf_counter()
        patience = {each: each.timeout_s for each in calls._shared.values()}
        for each in patience if "hangs" in what else ():
            each.timeout_s = HANGS_S
        try:
            with captured() as said, limited(CHECK_LIMIT_S):
                frame.run(exercise, named, space)
            return None
        except (Exception, NoEnd) as error:
            return failure_of(error)
        finally:
            self.remarks = said.getvalue()
            self.seconds[f"check {exercise}, {what}"] = time.perf_counter() - start
            for each, seconds in patience.items():
                each.timeout_s = seconds

    def recorded(self, exercise: str, what: str, cells: list[str], space: dict) -> Failure | None:
        """The same, with notes of what the exercise's functions are called with."""
        folder = self.calls.setdefault(exercise, self.folder.parent / f"calls-{exercise}")
        folder.mkdir(exist_ok=True)
        with kernels_record(set(re.findall(r"\bdef (\w+)", "\n".join(cells))), folder):
            return self.check(exercise, what, [recording(source, folder) for source in cells], space)

    def faults(self, exercise: str, kind: str, what: str, cells: list[str], space: dict) -> list[str]:
        """What is wrong with a check, tried on one answer; kind: blank, wrong or right."""
        space, before = dict(space), library_of(exercise)
        shown = "the solution" if what == "the solution" else f"'{what}'"
        for number, source in enumerate(cells):
            failure = execute(source, f"{exercise} {what}, cell {number}", space)
            if failure and (kind != "blank" or failure.kind != "NotImplementedError"):
                return [f"the cell of {shown} fails by itself: {failure}"]
        if kind == "right" and exercise in frame.targets_by_exercise():
            failure = self.recorded(exercise, what, cells, space)
        else:
            failure = self.check(exercise, what, cells, space)
        found = []
        if kind == "right":
            found += [f"{shown} fails: {failure}"] if failure else self.pass_faults(exercise, shown, before)
            install.uninstall(exercise)
        else:
            found += blank_faults(failure) if kind == "blank" else answer_faults(what, failure)
        if install.installed() or not same(library_of(exercise), before):
            found.append(f"after {shown} the library is not what it was")
            install.sync([])
        return found

    def pass_faults(self, exercise: str, shown: str, before: list) -> list[str]:
        """What is wrong with how a check has answered what is right."""
        found = []
        if self.remarks:
            found.append(f"nbgrader gives no points for a check that writes to stderr: {self.remarks.splitlines()[0]}")
        note = self.folder / ".progress" / f"{exercise}.json"
        if not note.exists() or not json.loads(note.read_text())["passed"]:
            found.append(f"its check does not note that {shown} passes")
        is_there = exercise in [answer.exercise for answer in install.installed()]
        if is_there != (exercise in frame.targets_by_exercise()) or is_there and same(library_of(exercise), before):
            found.append(f"{shown} passes, and the library does not run it")
        return found


def one_value_faults(calls: dict[str, Path], reasons: dict[str, str]) -> list[str]:
    """The parameters that have had one value, without a reason, and reasons that are not needed any more."""
    found = {
        f"{exercise} {f} {name}": value for exercise in calls for f, name, value in with_one_value(calls[exercise])
    }
    faults = [f"{name} has one value in its check, {value}: it could be ignored" for name, value in found.items()]
    needless = [name for name in reasons if name.split()[0] in calls and name not in found]
    return [fault for fault, name in zip(faults, found, strict=True) if name not in reasons] + [
        f"{name} has two values by now: take it off the list" for name in needless
    ]


@kernels_warnings()
def exercise_faults(
    path: Path, wrong: Path, right: Path, folder: Path, note_seconds=lambda what, seconds: None, reasons=None
) -> list[str]:
    """Try the checks of the notebook at `path`, in a folder; one line for each thing wrong with its exercises. reasons:
    of parameters that have one value; None: any may.
    """
    notebook, handed_out = read_notebook(path), exercise_cells(blank_notebook(path))
    solved = exercise_cells(notebook)
    checks = [exercise_name(cell, "check") for cell in notebook["cells"]]
    written = {}
    written["wrong"], faults = read_answers(wrong, list(solved), "wrong")
    written["right"], more_faults = read_answers(right, list(solved), "right")
    faults += more_faults
    trials = Trials(notebook["cells"], folder)
    for exercise, cells in solved.items():
        if exercise not in checks or frame.check_module(exercise) is None:
            faults.append(f"{exercise}: no check")
            continue
        sources = [cell["source"] for cell in cells]
        answers = [("blank", "the blank", [cell["source"] for cell in handed_out[exercise]])]
        if not written["right"][exercise]:  # the solution is tried where the notebook is run
            answers += [("right", "the solution", [solution(source) for source in sources])]
        for kind in ("wrong", "right"):
            for what, text in written[kind][exercise]:
                try:
                    answers.append((kind, what, expanded(text, sources)))
                except AnswerError as error:
                    faults.append(f"{exercise}: the {kind} answer '{what}': {error}")
        try:
            space = trials.prepared(exercise, [cell["id"] for cell in cells], [given for *_, given in answers])
        except RuntimeError as error:
            faults.append(f"{exercise}: {error}")
            continue
        for answer in answers:
            faults += [f"{exercise}: {fault}" for fault in trials.faults(exercise, *answer, space)]
    faults += [] if reasons is None else one_value_faults(trials.calls, reasons)
    for what, seconds in trials.seconds.items():
        note_seconds(what, seconds)
    return faults


@pytest.fixture
def workbook(tmp_path, monkeypatch) -> Iterator[Path]:
    """The folder of a workbook beside the project's data; this process works in it. Ranks end with the test."""
    folder = tmp_path / "workbook"
    folder.mkdir()
    for name in ("data", "benchmarks"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(folder)
    yield folder
    for ranks in calls._shared.values():
        ranks.close()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_check_fails_on_the_blank_catches_wrong_answers_and_passes_right_ones(path, workbook, record_property):
    wrong, right = (kind / f"{chapter(path)}.py" for kind in (WRONG, RIGHT))
    faults = exercise_faults(path, wrong, right, workbook, note_seconds=record_property, reasons=ONE_VALUE)
    assert not faults, "\n".join(["", *faults])


# The harness itself, on tiny notebooks.

LIBRARY = """
TWO = 2

# exercise 01.1
def double(number):
    return TWO * number


class Counter:
    def __init__(self):
        self.count = 0

    # exercise 01.2
    def add(self, more=1):
        self.count += more
"""
DOUBLE = """#| export tiny_package.sums
def double(number):
    ### BEGIN SOLUTION
    return TWO * number
    ### END SOLUTION"""
ADD = """#| export tiny_package.sums:Counter
def add(self: Counter, more=1):
    ### BEGIN SOLUTION
    self.count += more
    ### END SOLUTION"""


@pytest.fixture
def tiny_faults(tmp_path, workbook, monkeypatch):
    """A function that says what the harness finds in a tiny notebook: of exercises as (cell, check function), and texts
    of answers. Exercises 01.1 and 01.2 may be the functions of a tiny package of the library.
    """
    package = tmp_path / "library" / "tiny_package"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "sums.py").write_text(LIBRARY)
    monkeypatch.setattr("course_lib.__path__", [*sys.modules["course_lib"].__path__, str(package.parent)])
    targets = {"01.1": {"tiny_package.sums": ["double"]}, "01.2": {"tiny_package.sums:Counter": ["add"]}}

    def faults(exercises: list[tuple[str, types.FunctionType]], wrong: str, right: str | None = None) -> list[str]:
        numbered = {f"01.{number}": each for number, each in enumerate(exercises, start=1)}
        cells, of_library = [code("setup", "TWO = 2\nclass Counter: pass")], {}
        for name, (source, check) in numbered.items():
            number = name.removeprefix("01.")
            cells.append(code(f"ex-01-{number}", source))
            cells += [code(f"check-01-{number}", f'check("{name}")')] if check else []
            of_library |= {name: targets[name]} if source.startswith("#| export") else {}
        path = tiny_course.write(tmp_path / "notebooks" / "01_tiny.ipynb", cells)
        files = tmp_path / "wrong.py", tmp_path / "right.py"
        if right is None:
            right = "".join(f"# %% {name} it\n{without_marks(source)}\n" for name, (source, _) in numbered.items())
        for file, text in zip(files, (wrong, right), strict=True):
            file.write_text(text)
        monkeypatch.setattr(frame, "check_module", lambda exercise: numbered[exercise][1])
        monkeypatch.setattr(frame, "check_function", lambda exercise: numbered[exercise][1])
        monkeypatch.setattr(frame, "targets_by_exercise", lambda: of_library)
        return exercise_faults(path, *files, workbook)

    yield faults
    install.sync([])
    for name in [name for name in sys.modules if name.startswith("course_lib.tiny_package")]:
        del sys.modules[name]


def without_marks(source: str) -> str:
    """The whole text of a solution, as an answer has it."""
    return solution(source).removeprefix(source.split("\n")[0] + "\n" if source.startswith("#| export") else "")


def test_a_parameter_with_one_value_in_its_check_is_told(tmp_path):
    """Of functions and methods; a call with another value is enough, as is a reason."""
    source = "#| export a.b\nclass Sums:\n    def add(self, one, other=2, *more):\n        return one + other"
    space: dict = {}
    exec(recording(source, tmp_path), space)
    for one in (1, 5):
        space["Sums"]().add(one)
    told = one_value_faults({"01.1": tmp_path}, {"01.1 Sums.add more": "is empty", "01.1 Sums.add one": "is 1"})
    assert told == [
        "01.1 Sums.add other has one value in its check, 2: it could be ignored",
        "01.1 Sums.add one has two values by now: take it off the list",
    ]


def sums() -> types.ModuleType:
    """The module of the tiny package, as a check calls it."""
    return install.library_module("tiny_package.sums")


def check_double():
    assert sums().double(3) == 6, "double(3) should be six"
    assert sums().double(5) == 10, "double(5) should be ten"


def check_add():
    counter = sums().Counter()
    counter.add()
    counter.add(3)
    assert counter.count == 4, f"1 and 3 more make four, not {counter.count}"


GOOD_ANSWERS = """
Text before the first heading is no answer.

# %% 01.1 adds two
return TWO * number => return TWO + number
# %% 01.1 the number itself
TWO * =>
# %% 01.1 fake: remembers
def double(number):
    return {3: 6}.get(number, 0)
# %% 01.2 adds one more
    self.count += more
=>
    self.count += more
    self.count += 1
# %% 01.2 adds nothing
+= more => += 0
# %% 01.2 always one
def add(self: Counter, more=1):
    self.count += 1
# %% 01.3 too few
guess = 4
# %% 01.3 too many
5 => 6
# %% 01.3 none
guess = None
"""


def check_guess(guess):
    assert guess == 5, "it should be five"


GOOD = [(DOUBLE, check_double), (ADD, check_add), ("### BEGIN SOLUTION\nguess = 5\n### END SOLUTION", check_guess)]


def test_the_harness_finds_nothing_wrong_with_good_exercises(tiny_faults):
    assert tiny_faults(GOOD, GOOD_ANSWERS) == []


def value(check: types.FunctionType) -> tuple[str, types.FunctionType]:
    """An exercise that binds `x`, and its check."""
    return "### BEGIN SOLUTION\nx = 1\n### END SOLUTION", check


def one(x, wanted=1, message="it should be one"):
    assert x == wanted, message


def warns(x):
    warnings.warn("old", stacklevel=1)
    one(x)


def sleeps(x):
    time.sleep(60 * (x == 3))
    one(x)


def installs(x):
    cell = "#| export tiny_package.sums\ndef double(number):\n    return 0"
    install.install(install.Answer("01.99", ((cell, "of another"),)))
    one(x)


# (check, the three wrong answers, the fault that must be found)
PLANTED = [
    (lambda: None, ["x = 2"] * 3, "its check passes while it is blank"),
    (lambda x: one(bool(x), True), ["x = 2", "x = 0", "x = ''"], "its check accepts the wrong answer 'answer 0'"),
    (lambda x: one(x, message=""), ["x = 2"] * 3, "its check does not explain what is wrong with 'answer 0'"),
    (
        lambda x: one(x + 0),
        ["x = None", "x = 2", "x = 2"],
        "the wrong answer 'answer 0' crashes instead of being caught: TypeError",
    ),
    (one, ["x = y", "x = 2", "x = 2"], "the cell of 'answer 0' fails by itself: NameError"),
    (one, ["x = = 2", "x = 2", "x = 2"], "the cell of 'answer 0' fails by itself: SyntaxError"),
    (one, ["raise NotImplementedError", "x = 2", "x = 2"], "the cell of 'answer 0' fails by itself: NotImplemented"),
    (installs, ["x = 2"] * 3, "after 'answer 0' the library is not what it was"),
    (lambda x: one(x, 2), ["x = 3"] * 3, "the solution fails: AssertionError: Exercise"),
    (one, ["x = 2"] * 2, "has 2 wrong answers; it needs 3 or more"),
    (sleeps, ["x = 3", "x = 2", "x = 2"], "the wrong answer 'answer 0' crashes instead of being caught: NoEnd: no end"),
    (warns, ["x = 2"] * 3, "nbgrader gives no points for a check that writes to stderr: UserWarning: old"),
    (one, ["1 =>", "y => 2", "x => 2 =>"], "the wrong answer 'answer 1': 'y' stands nowhere in the solution"),
    (None, ["x = 2"] * 3, "no check"),
]


def test_the_harness_finds_every_planted_fault(tiny_faults, monkeypatch):
    monkeypatch.setattr("test_answers.CHECK_LIMIT_S", 1)
    wrong, right = "", "# %% 01.3 more precise\nx = 1.01\n"
    for number, (_, answers, _) in enumerate(PLANTED, start=1):
        wrong += "".join(f"# %% 01.{number} answer {i}\n{text}\n" for i, text in enumerate(answers))
    faults = tiny_faults([value(check) for check, *_ in PLANTED], wrong, right)
    assert any(fault.startswith("01.3: 'more precise' fails: AssertionError") for fault in faults), faults
    for number, (_, _, expected) in enumerate(PLANTED, start=1):
        mine = [fault for fault in faults if fault.startswith((f"01.{number}:", f"01.{number} "))]
        assert any(expected in fault for fault in mine), f"expected '{expected}', found {mine}"


def test_the_harness_tells_whether_the_library_runs_what_has_passed(tiny_faults, monkeypatch):
    monkeypatch.setattr(install, "put_cell", lambda *args: None)
    faults = tiny_faults(GOOD[:1], GOOD_ANSWERS.replace("01.2", "01.1").replace("01.3", "01.1"))
    assert "01.1: 'it' passes, and the library does not run it" in faults
