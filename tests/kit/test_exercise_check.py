"""course_kit.checks.frame: `check("01.1")` from the cells that were run to the library, and back after a failure.

The exercises here are made up: a check module and targets of their own, over functions of the library.
"""

import json
import sys
import types

import pytest

from course_kit.checks import CheckFailed, check, frame, reference, setup
from course_kit.exercises.install import installed, uninstall
from course_lib.single_gpu import model

LOSS = "#| export single_gpu.model\ndef loss(logits, targets):\n    {}\n"
FORWARD = "#| export single_gpu.model:MLP\ndef forward(self: MLP, x):\n    {}\n"
TARGETS = {
    "91.1": {"single_gpu.model": ["loss"]},
    "91.2": {"single_gpu.model": ["apply_rope"], "single_gpu.model:MLP": ["forward"]},
}


def check_loss():
    assert model.loss(1, 2) == 3, "the sum of both"


def check_both():
    assert model.MLP.forward(None, 2) == 3 and model.apply_rope() == 4, "3 and 4"


def check_guess(guess, limit):
    assert guess < limit, "too many"


# As a check of the course, it lies in course_kit.
space = {"model": model}
exec(
    compile("def compiled_check():\n    model.loss(1, 2) + 1", f"{frame.PROJECT}/course_kit/checks/x.py", "exec"), space
)
compiled_check = space["compiled_check"]
CHECKS = {"91.1": check_loss, "91.2": check_both, "91.3": check_guess}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The folder of the learner's notebook; afterwards the reference is in place."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(frame, "targets_by_exercise", lambda: TARGETS)
    monkeypatch.setattr(frame, "check_module", lambda exercise: exercise if exercise in CHECKS else None)
    monkeypatch.setattr(frame, "check_function", CHECKS.get)
    yield tmp_path
    for answer in installed():
        uninstall(answer.exercise)


def run(exercise: str, *sources: str, **namespace) -> None:
    frame.run(exercise, [(source, f"cell {number}") for number, source in enumerate(sources, 1)], namespace)


def note(folder, exercise: str) -> dict:
    return json.loads((folder / ".progress" / f"{exercise}.json").read_text())


def test_an_answer_that_passes_stays_in_the_library(folder, capsys):
    run("91.1", LOSS.format("return logits + targets"))
    assert capsys.readouterr().out == "91.1 passes; the library runs your loss\n"
    assert model.loss(2, 3) == 5
    assert note(folder, "91.1")["passed"] and note(folder, "91.1")["digest"]
    with reference("91.1"), pytest.raises(AttributeError):
        model.loss(2, 3)
    assert model.loss(2, 3) == 5
    with pytest.raises(ValueError, match="91.7 is not an exercise"), reference("91.7"):
        pass


@pytest.mark.parametrize(
    "body, words",
    [
        ("return logits - targets", "Exercise 91.1: the sum of both"),
        ("# YOUR CODE HERE\n    raise NotImplementedError()", "still blank"),
        ("return 1 / 0", "your code raised ZeroDivisionError: division by zero"),
        (
            "return np.add(logits, targets)",
            "line 3: course_lib.single_gpu.model, where your code runs, has no np: a typo",
        ),
        ("return loss(logits, targets)", "calls itself without end"),
        ("return logits +", "line 3: syntax error"),
    ],
    ids=range(6),
)
def test_a_failing_answer_puts_the_reference_back_also_after_one_that_passed(folder, body, words):
    code = model.loss.__code__
    run("91.1", LOSS.format("return logits + targets"))
    with pytest.raises(CheckFailed) as failed:
        run("91.1", LOSS.format(body))
    assert words in str(failed.value) and str(failed.value).startswith("Exercise 91.1")
    assert model.loss.__code__ is code and not installed()
    assert note(folder, "91.1")["passed"] is False


def test_an_error_names_the_lines_of_the_learners_cell():
    source = LOSS.format("return divided(logits)") + "\n\ndef divided(x):\n    return x / 0\n"
    with pytest.raises(CheckFailed) as failed:
        run("91.1", source)
    told = str(failed.value).split("\n")
    assert told[0] == "Exercise 91.1: your code raised ZeroDivisionError: division by zero"
    assert "cell 1, line 7: return x / 0" in told[1] and "cell 1, line 3: return divided(logits)" in told[2]
    with pytest.raises(CheckFailed, match="an assertion of yours fails\n  cell 1, line 3: assert logits > 5"):
        run("91.1", LOSS.format("assert logits > 5"))


def test_an_error_in_the_check_asks_what_the_answer_returns(monkeypatch):
    monkeypatch.setitem(CHECKS, "91.1", compiled_check)
    with pytest.raises(CheckFailed) as failed:
        run("91.1", LOSS.format("pass"))
    assert "the check met TypeError: unsupported operand" in str(failed.value) and "\n" not in str(failed.value)


def test_one_exercise_in_a_cell():
    both = LOSS.format("return logits + targets") + "\n\ndef apply_rope():\n    return 4\n"
    with pytest.raises(CheckFailed, match="one exercise in a cell: apply_rope belongs to 91.2"):
        run("91.1", both)


def test_two_targets_are_two_cells_with_one_check(capsys):
    rope = "#| export single_gpu.model\ndef apply_rope():\n    return 4\n"
    run("91.2", FORWARD.format("return x + 1"), rope)
    assert capsys.readouterr().out == "91.2 passes; the library runs your apply_rope and MLP.forward\n"
    with pytest.raises(CheckFailed, match="begins with '#| export single_gpu.model:MLP'"):
        run("91.2", rope)
    with pytest.raises(CheckFailed, match="defines apply_ropes, and the exercise asks for apply_rope"):
        run("91.2", FORWARD.format("return x + 1"), rope.replace("rope()", "ropes()"))
    assert not installed()


def test_values_come_from_the_notebook(folder, capsys):
    run("91.3", "guess = 3", guess=3, limit=4)
    assert capsys.readouterr().out == "91.3 passes\n"
    assert note(folder, "91.3")["passed"]
    with pytest.raises(CheckFailed, match="Exercise 91.3: too many"):
        run("91.3", guess=5, limit=4)
    with pytest.raises(CheckFailed, match="Exercise 91.3: there is no guess yet"):
        run("91.3", limit=4)


class Shell:
    """What `check` wants of a kernel: the cells that were run."""

    class compile:
        @staticmethod
        def get_code_name(raw, code, number):
            return f"file-{number}.py"

        @staticmethod
        def format_code_name(file):
            return ("Cell", f"In[{file[5:-3]}]") if file.startswith("file-") else None

    def __init__(self, *sources: str, **names):
        texts = ["", *sources]
        self.history_manager = types.SimpleNamespace(input_hist_raw=texts, input_hist_parsed=texts)
        self.user_ns = names

    def here(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: self))


def test_the_last_cell_that_was_run_for_a_target_is_the_answer(monkeypatch, capsys):
    right, wrong = LOSS.format("return logits + targets"), LOSS.format("return 0")
    Shell(wrong, right, "model.loss(1, 2)", FORWARD.format("return 1")).here(monkeypatch)
    check("91.1")
    assert "91.1 passes" in capsys.readouterr().out
    Shell(right, wrong).here(monkeypatch)
    with pytest.raises(CheckFailed, match="the sum of both"):
        check("91.1")


@pytest.mark.parametrize(
    "cells, words",
    [
        ([], "run the exercise's cell first: it begins with '#| export single_gpu.model' and defines loss"),
        (
            [LOSS.format("return logits + targets"), "def loss(a, b): return a + b"],
            "the first line of the exercise's cell should be '#| export single_gpu.model': In[2] has no such line",
        ),
        (
            [LOSS.format("return 1").replace("_gpu.model", "_gpu.models")],
            "In[1] begins with '#| export single_gpu.models'",
        ),
        (
            [LOSS.format("return 1").replace("#| export", "#|export")],
            "In[1]: '#|export single_gpu.model' is not a directive",
        ),
        (
            ["#| export single_gpu.model\nloss = lambda a, b: a + b"],
            "In[1] is exported and defines no function or class",
        ),
        ([LOSS.format("return 1").replace("loss", "lost")], "defines lost, and the exercise asks for loss"),
        (
            ["# mine\n" + LOSS.format("return logits + targets")],
            "In[1], line 2: '#| export single_gpu.model' must be the first",
        ),
        ([LOSS.format("return 1)")], "In[1], line 3: syntax error"),
    ],
    ids=range(8),
)
def test_a_cell_that_is_not_there_or_wrong_is_told_in_one_line(monkeypatch, folder, cells, words):
    Shell(*cells).here(monkeypatch)
    with pytest.raises(CheckFailed) as failed:
        check("91.1")
    assert (
        words in str(failed.value) and "\n" not in str(failed.value) and str(failed.value).startswith("Exercise 91.1: ")
    )
    assert not installed()


def test_an_answer_that_was_not_run_again_stays_passed(monkeypatch, folder):
    run("91.1", LOSS.format("return logits + targets"))
    Shell().here(monkeypatch)
    with pytest.raises(CheckFailed, match="run the exercise's cell first"):
        check("91.1")
    assert model.loss(2, 3) == 5 and note(folder, "91.1")["passed"]


def test_outside_of_a_notebook_there_is_nothing_to_check(monkeypatch):
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    with pytest.raises(CheckFailed, match="this is not a notebook"):
        check("91.1")


def test_answers_that_have_passed_are_installed_again(folder, capsys):
    """After a restart of the kernel: those of the cells as saved; changed, failing and unfit ones are left out."""
    cells = {"ex-91-1": LOSS.format("return logits + targets"), "ex-91-2": FORWARD.format("return x + 1")}
    cells["ex-91-2b"] = "#| export single_gpu.model\ndef apply_rope():\n    return 4\n"

    def save(**changed):
        cells.update({name.replace("_", "-"): source for name, source in changed.items()})
        notebook = {"cells": [{"id": i, "cell_type": "code", "source": s, "metadata": {}} for i, s in cells.items()]}
        (folder / "91_x.ipynb").write_text(json.dumps(notebook))

    def restart():
        for answer in installed():
            uninstall(answer.exercise)
        setup("91")
        return [answer.exercise for answer in installed()]

    save()
    assert restart() == []
    run("91.1", cells["ex-91-1"])
    run("91.2", cells["ex-91-2b"], cells["ex-91-2"])
    capsys.readouterr()
    assert restart() == ["91.1", "91.2"]
    assert capsys.readouterr().out == "The library runs your answers that have passed: 91.1, 91.2\n"
    assert model.loss(2, 3) == 5 and model.apply_rope() == 4
    save(ex_91_2=FORWARD.format("return x + 2"))
    assert restart() == ["91.1"]
    assert "Changed since they passed, or not saved then: 91.2." in capsys.readouterr().out
    save(ex_91_1=LOSS.format("return logits +"))
    assert restart() == []
    (folder / "91_x.ipynb").write_text("{")
    assert restart() == []
