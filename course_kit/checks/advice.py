"""The frame round an exercise's check: an error becomes advice, and `.progress/` keeps the result."""

import contextlib
import json
import time
import traceback
from pathlib import Path

import torch


class CheckFailed(AssertionError):
    """An exercise that is not solved yet; the message says what to do. Jupyter shows it without the stack of the check,
    which would push it off the screen; where code of the learner's raised, that stack stands (`__cause__`).
    """

    def __getattr__(self, name: str):
        if name == "_render_traceback_" and self.__cause__ is None:
            return lambda: [f"{type(self).__name__}: {self}"]
        raise AttributeError(name)


def is_report(error: Exception) -> bool:
    """Whether an error tells its own place and cause, as those of ranks do (notebook 03); a stack would hide them."""
    return hasattr(error, "_render_traceback_")


@contextlib.contextmanager
def check(exercise: str):
    """Run the assertions of one exercise, such as "01.3". Raises CheckFailed with advice; prints one line where all
    hold. What they draw from PyTorch's generator is the same in each run.
    """
    passed = False
    try:
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            try:
                yield
            except Exception as error:  # PyTorch 2.11 leaves a checkpoint's contexts open to the end of its frames
                traceback.clear_frames(error.__traceback__)
                raise
        passed = True
    except NotImplementedError:
        raise CheckFailed(
            f"Exercise {exercise} is still blank: write your code where it says YOUR CODE HERE, run it, then run this"
        ) from None
    except NameError as error:
        advice = "" if is_report(error) else ". Run the exercise's cell first, and the cells above it"
        raise CheckFailed(f"Exercise {exercise}: {error}{advice}") from None
    except AssertionError as error:
        raise CheckFailed(f"Exercise {exercise}: {error}") from None
    except Exception as error:
        behind = None if is_report(error) else error
        raise CheckFailed(f"Exercise {exercise}: your code raised {type(error).__name__}: {error}") from behind
    finally:
        note = {"exercise": exercise, "passed": passed, "when": time.strftime("%Y-%m-%dT%H:%M:%S")}
        with contextlib.suppress(OSError):  # a read-only folder: the check still counts
            Path(".progress").mkdir(exist_ok=True)
            Path(".progress", f"{exercise}.json").write_text(json.dumps(note))
    print(f"{exercise} passes")
