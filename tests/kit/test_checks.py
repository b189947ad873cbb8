"""course_kit.checks.frame: an error in a learner's answer becomes advice, and a note for `make progress`. Needs no
GPU.
"""

import contextlib
import json
import os
import stat

import pytest
import torch
import torch.distributed as dist

from course_kit.checks import CheckFailed, frame
from course_kit.checks.watchers import SizesFit, late_results
from course_lib.collectives.into_tensor import all_gather_into_tensor, reduce_scatter_tensor


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The folder of the learner's notebook."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def note(folder, exercise: str = "01.3") -> dict:
    return json.loads((folder / ".progress" / f"{exercise}.json").read_text())


def check(function=lambda: None, exercise: str = "01.3") -> None:
    """Run a check function, that of an exercise whose answer is not exported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frame, "check_function", lambda _: function)
        patch.setattr(frame, "targets_by_exercise", lambda: {})
        frame.run(exercise, [], {})


def failing(error: BaseException) -> None:
    """Run a check in which `error` is raised."""

    def fail():
        raise error

    check(fail)


def test_a_check_that_holds_prints_one_line(folder, capsys):
    check()
    assert capsys.readouterr().out == "01.3 passes\n"
    assert note(folder)["exercise"] == "01.3" and note(folder)["passed"] is True


@pytest.mark.parametrize(
    "error, words",
    [
        (AssertionError("q should be [b, s, a, d]"), "Exercise 01.3: q should be [b, s, a, d]"),
        (NotImplementedError(), "still blank: write your code where it says YOUR CODE HERE"),
        (NameError("name 'saved_bytes' is not defined"), "name 'saved_bytes' is not defined. Run the exercise's cell"),
        (ZeroDivisionError("division by zero"), "your code raised ZeroDivisionError: division by zero"),
        (KeyError("bf8"), "your code raised KeyError: 'bf8'"),
        (RuntimeError("size mismatch"), "your code raised RuntimeError: size mismatch"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_an_error_becomes_advice(folder, capsys, error, words):
    with pytest.raises(CheckFailed) as failed:
        failing(error)
    assert words in str(failed.value) and "01.3" in str(failed.value)
    assert isinstance(failed.value, AssertionError)
    assert note(folder)["passed"] is False
    assert "passes" not in capsys.readouterr().out


@pytest.mark.parametrize("error", [AssertionError("no"), NotImplementedError(), NameError("no")])
def test_advice_hides_the_checks_own_traceback(error):
    with pytest.raises(CheckFailed) as failed:
        failing(error)
    assert failed.value.__suppress_context__ and failed.value.__cause__ is None


def test_a_crash_keeps_its_traceback():
    error = ZeroDivisionError()
    with pytest.raises(CheckFailed) as failed:
        failing(error)
    assert failed.value.__cause__ is error and "raise error" in str(failed.value), "the learner wants to see the line"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1)], ids=["Ctrl-C", "exit"])
def test_an_interrupt_is_no_advice(folder, error):
    with pytest.raises(type(error)):
        failing(error)
    assert note(folder)["passed"] is False


def test_the_last_result_counts(folder):
    with pytest.raises(CheckFailed):
        failing(AssertionError("no"))
    check()
    check(exercise="01.10")
    assert note(folder)["passed"] is True and note(folder, "01.10")["passed"] is True
    assert sorted(path.name for path in (folder / ".progress").iterdir()) == ["01.10.json", "01.3.json"]


def test_a_read_only_folder_does_not_matter(folder, capsys):
    folder.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        if os.geteuid() == 0:  # root may write everywhere, except into a file
            folder.chmod(stat.S_IRWXU)
            (folder / ".progress").write_text("a file where the folder should be")
        check()
        assert capsys.readouterr().out == "01.3 passes\n"
        with pytest.raises(CheckFailed, match="01.3: no"):
            failing(AssertionError("no"))
    finally:
        folder.chmod(stat.S_IRWXU)


def test_what_a_check_draws_is_the_same_in_each_run_and_changes_nothing_outside(folder):
    torch.manual_seed(1)
    wanted, drawn = torch.rand(2), []
    torch.manual_seed(1)
    for fails in (False, True):
        torch.rand(0 if drawn else 1)  # drawn between the runs

        def draw():
            drawn.append(torch.rand(3))
            assert not fails

        with contextlib.suppress(CheckFailed):
            check(draw)
    assert torch.equal(*drawn)
    assert torch.equal(torch.rand(1), wanted[1:])


@pytest.mark.parametrize("kind", [NotImplementedError, AssertionError, ValueError])
def test_what_failing_code_left_open_is_closed_though_its_error_is_kept(kind, tmp_path, monkeypatch):
    """As torch.utils.checkpoint of PyTorch 2.11 does where the function raises: a generator inside a `with`, in a frame
    that the error holds on to. A dispatch mode that stayed would see every later operation.
    """
    monkeypatch.chdir(tmp_path)
    opened = []

    @contextlib.contextmanager
    def mode():
        opened.append(1)
        try:
            yield
        finally:
            opened.pop()

    def generator():
        with mode():
            yield

    def checkpoint():
        started = generator()
        next(started)
        raise kind("a line")

    with pytest.raises(CheckFailed) as kept:
        check(checkpoint)
    assert not opened and kept.value.__traceback__


def sent_with(numel: int, dtype: torch.dtype) -> None:
    with SizesFit():
        all_gather_into_tensor(torch.empty(8), torch.ones(2))
        reduce_scatter_tensor(torch.empty(2), torch.ones(8))
        all_gather_into_tensor(torch.empty(numel, dtype=dtype), torch.ones(2))


@pytest.mark.parametrize("numel, dtype", [(6, torch.float32), (8, torch.bfloat16)])
def test_sizes_and_dtypes_are_compared_before_they_are_sent(numel, dtype, ranks):
    with pytest.raises(AssertionError) as caught:
        ranks(sent_with, numel, dtype)
    first = str(caught.value).splitlines()[0]
    assert first.endswith(
        f"the all-gather has an input of [2], torch.float32 and an output of [{numel}], {dtype}: "
        "in a group of 4 an input of [2] takes an output of [8], of the same dtype"
    )


def test_jupyter_shows_the_advice_and_the_line_where_the_learners_code_raised():
    with pytest.raises(CheckFailed) as blank:
        failing(NotImplementedError())
    assert blank.value._render_traceback_() == [f"CheckFailed: {blank.value}"]
    with pytest.raises(CheckFailed) as raised:
        check(lambda: 1 / 0)
    assert raised.value._render_traceback_() == [f"CheckFailed: {raised.value}"]
    assert str(raised.value).endswith(": check(lambda: 1 / 0)")
    assert isinstance(raised.value.__cause__, ZeroDivisionError)


def late_transfers() -> list:
    """On a rank: what is read before and after wait() of three transfers; of a fourth, in place, what is its own."""
    total, parts, piece, found = torch.ones(2), torch.empty(4), torch.empty(2), []
    with late_results() as works:
        started = [
            (total, dist.all_reduce(total, async_op=True)),
            (parts, all_gather_into_tensor(parts, torch.full((1,), dist.get_rank() + 1.0), async_op=True)),
            (piece, reduce_scatter_tensor(piece, torch.ones(8), async_op=True)),
        ]
        for output, work in started:
            early = output.isnan().all().item()
            work.wait()
            found.append((early, output.tolist()))
        in_place = torch.arange(4.0)
        own = in_place[dist.get_rank() :][:1]
        all_gather_into_tensor(in_place, own, async_op=True)
        at_once = torch.ones(1)
        dist.all_reduce(at_once)  # without async_op nothing is late
    return [*found, own.item(), int(in_place.isnan().sum()), at_once.item(), [w.name for w in works if not w.waited]]


def test_late_results_are_not_there_before_they_are_waited_for(ranks):
    for rank, found in enumerate(ranks(late_transfers)):
        results = (True, [4.0, 4.0]), (True, [1.0, 2.0, 3.0, 4.0]), (True, [4.0, 4.0])
        assert found == [*results, float(rank), 3, 4.0, ["all_gather"]]


def freed_too_early() -> None:
    values = torch.empty(4)
    with late_results():
        work = all_gather_into_tensor(values, torch.ones(1), async_op=True)
        values.untyped_storage().resize_(0)
        work.wait()


def test_memory_that_is_freed_before_a_late_result_arrives_is_an_error(ranks):
    with pytest.raises(AssertionError, match="the memory of an all_gather is freed before it is waited for"):
        ranks(freed_too_early)
