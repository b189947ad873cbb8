"""Turn errors in a check into advice: the next step and the line of the learner's code, without the check's stack."""

import contextlib
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch

from course_kit.exercises.cells import CellError

KIT = str(Path(__file__).resolve().parents[1])


class CheckFailed(AssertionError):
    """An exercise that is not solved yet; the message says what to do, and where an answer raised. Jupyter shows it
    without the stack of the check, which would push it off the screen.
    """

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


def is_report(error: BaseException) -> bool:
    """Return whether an error names its line and cause itself, as rank errors do (notebook 03): a stack would hide
    them.
    """
    return hasattr(error, "_render_traceback_")


def raised_in_kernel(error: BaseException) -> BaseException:
    """Return the error behind those of the interpreter of kernels, which wraps one for each call between kernels."""
    while type(error).__name__ == "InterpreterError" and error.__cause__ is not None:
        error = error.__cause__
    return error


def shorten_kernel_errors() -> None:
    """Have notebooks show an error in an interpreted kernel as its message and the line, without Triton's stack."""
    if "triton.runtime" in sys.modules:
        from triton.runtime.errors import InterpreterError

        def shown(error: BaseException) -> list[str]:
            cause = raised_in_kernel(error)
            return [f"{type(cause).__name__}: {cause}{at_line(error, anywhere=True)}"]

        InterpreterError._render_traceback_ = shown  # type: ignore[attr-defined]


@contextlib.contextmanager
def advice(exercise: str, in_library: bool = False) -> Iterator[None]:
    """Raise every error as CheckFailed, with advice. PyTorch's generator has the same seed in each run."""
    try:
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            try:
                yield
            except Exception as error:  # PyTorch 2.11 leaves a checkpoint's contexts open to the end of its frames
                traceback.clear_frames(error.__traceback__)
                raise
    except NotImplementedError:
        raise CheckFailed(
            f"Exercise {exercise} is still blank: write your code where it says YOUR CODE HERE, run it, then run this"
        ) from None
    except NameError as error:
        if in_library:
            raise CheckFailed(f"Exercise {exercise}: {error}{at_line(error)}") from error
        hint = "" if is_report(error) else ". Run the exercise's cell first, and the cells above it"
        raise CheckFailed(f"Exercise {exercise}: {error}{hint}") from None
    except (AssertionError, CellError) as error:
        message = str(error)
        if in_library and not message:
            message = f"an assertion of yours fails{at_line(error)}"
        raise CheckFailed(f"Exercise {exercise}: {message}") from None
    except Exception as error:
        at = at_line(error, anywhere=(cause := raised_in_kernel(error)) is not error)
        message = str(error) if is_report(cause) else f"{type(cause).__name__}: {cause}"
        who = "" if is_report(cause) else "your code raised " if at else "the check met "
        extra = "" if at or is_report(cause) else ". Does your code return what its docstring says?"
        raise CheckFailed(f"Exercise {exercise}: {who}{message}{extra}{at}") from error


def at_line(error: BaseException, anywhere: bool = False) -> str:
    """Return the line of the learner's or the library's code that raised an error, and the calls that led there, on a
    line of its own; "" if the error says so itself (but for `anywhere`), or if neither was running.
    """
    from course_kit.ranks.outcome import frames_to
    from course_kit.ranks.report import is_course_code, where

    stack = [
        [frame.filename, frame.lineno, frame.name] for frame in frames_to(error) if not frame.filename.startswith(KIT)
    ]
    if is_report(error) and not anywhere or not any(is_course_code(str(file)) for file, *_ in stack):
        return ""
    return f"\n  {where(stack)}"
