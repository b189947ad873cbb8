"""The errors that `Ranks` raises, with their reports: errors by rank, locations by cell and line."""

import contextlib
import importlib
import inspect
import io
import linecache
import os
import re
import sys
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from course_kit.exercises.splice import locate

MOST_CALLERS = 6  # that a report shows
PASSES_ON = (
    "__torch_dispatch__"  # of a mode that counts operators: it runs the operator that the frame before it has called
)


class Report(BaseException):
    """Mix-in for errors: a notebook shows only the message, without the stack of these modules."""

    def __str__(self) -> str:
        return str(self.args[0])

    def _render_traceback_(self) -> list[str]:
        traceback.clear_frames(self.__traceback__)  # the kernel keeps the last error, and frames keep what they hold
        return [f"{type(self).__name__}: {self}"]


class RankError(Report, RuntimeError):
    """A call on ranks that failed."""


class Interrupted(Report, KeyboardInterrupt):
    """An interrupt of a call on ranks by the interrupt button."""


class RanksHung(RankError, TimeoutError):
    """The ranks did not end in time."""


class BadCall(RankError, ValueError):
    """A request that `Ranks` cannot serve; nothing was run."""


def failed(kind: type, message: str) -> RankError:
    """Return a RankError that `except` also catches by the type of the rank's error."""
    plain = {"__init__": lambda self, *args: Exception.__init__(self, *args), "__str__": Report.__str__}
    try:
        both = type(f"RankFailed({kind.__name__})", (RankError, kind), plain)(message)
    except Exception:  # a type that cannot be a base class
        return RankError(message)
    return both if issubclass(kind, Exception) else RankError(message)  # a rank's SystemExit must not end the kernel


def is_course_code(file: str) -> bool:
    """Return True for a file of a notebook, the course or a learner, and False for a library or a check's tool."""
    library = ("site-packages", "dist-packages", os.path.dirname(os.__file__), "<frozen", "<string>", "<__array")
    return bool(file) and not any(part in file for part in (*library, "course_kit/checks/", "course_kit/labs/"))


def describe_line(file: str, line: int) -> str:
    """Return a line as the reader knows it: its cell or its file, its number and its text."""
    name = os.path.relpath(file) if file.startswith(os.getcwd()) else file
    if sys.modules.get("IPython"):
        shell = sys.modules["IPython"].get_ipython()
        label = shell.compile.format_code_name(file) if shell else None
        name = " ".join(label) if label else name
    parts = Path(file).parts
    if "course_lib" in parts[-3:-1]:  # the library, or a package of it
        name = "/".join(parts[parts.index("course_lib", len(parts) - 3) :]) + exported_from(file, line)
    code = linecache.getline(file, line).strip()
    return f"{name}, line {line}" + (f": {code}" if code else "")


def exported_from(file: str, line: int) -> str:
    """Return the exercise, or the notebook and the cell's id, that a line of `course_lib` comes from according to the
    comments in its module.
    """
    text = "".join(linecache.getlines(file))
    if definition := locate(text, line):
        return f" ({definition[0].owner})"
    for above in range(line, 0, -1):
        if mark := re.match(r"# %% \S*/(\S+\.ipynb) #(\S+)", linecache.getline(file, above)):
            return " ({}, cell {})".format(*mark.groups())
    return ""


def where(stack: list) -> str:
    """Return the location of a rank: the innermost line of course code, the function in which it waits, and its
    callers.
    """
    ours = [i for i, (file, _, _) in enumerate(stack) if is_course_code(file)]
    if not ours:
        if stack and "course_kit/checks/" in stack[-1][0]:
            return "in the check itself"
        return stack[-1][2] if stack else "outside any line"
    while len(ours) > 1 and stack[ours[-1]][2] == PASSES_ON:
        ours.pop()
    inner = ours[-1]
    called = [function for _, _, function in stack[inner + 1 :] if function not in ("wrapper", "inner")]
    called = called[: called.index(PASSES_ON)] if PASSES_ON in called else called
    text = (f"in {called[0]}, " if called else "") + describe_line(*stack[inner][:2])
    callers = [f"\n      called from {describe_line(*stack[i][:2])}" for i in reversed(ours[:-1])]
    if len(callers) > MOST_CALLERS:  # a recursion
        callers[MOST_CALLERS // 2 : -MOST_CALLERS // 2] = [f"\n      ... {len(callers) - MOST_CALLERS} more ..."]
    return "".join([text, *callers])


def location_of(report: dict, prefix: str) -> str:
    """Return `prefix` and the location of a rank's error; "" for a check's verdict, whose message is complete."""
    stack = report["stack"]
    if not stack or is_verdict(report):
        return ""
    return prefix + where(stack)


def is_verdict(report: dict) -> bool:
    """Return True if an error is an assertion of a check and no line of the reader's code led to it."""
    stack = report["stack"]
    asserted = report["error"].startswith("AssertionError") and "course_kit/checks/" in stack[-1][0]
    return asserted and not any(is_course_code(file) for file, _, _ in stack)


def pickled(value) -> bytes:
    """Pickle as cloudpickle.dumps does, and by name also the modules of a special type, such as
    torch.distributed.config.
    """
    import cloudpickle

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, each):
            if isinstance(each, types.ModuleType) and type(each) is not types.ModuleType:
                return importlib.import_module, (each.__name__,)
            return super().reducer_override(each)

    with io.BytesIO() as file:
        Pickler(file).dump(value)
        return file.getvalue()


def pickled_call(function: Callable, args: tuple, kwargs: dict) -> bytes:
    """Return the call as bytes. Raises BadCall, which names the object that cannot be pickled."""
    if not callable(function):
        raise BadCall(f"ranks(function, ...) runs a function, and {function!r} is not callable")
    try:
        return pickled((function, args, kwargs))
    except Exception as error:
        named = {f"argument {i}": arg for i, arg in enumerate(args, 1)} | kwargs
        path = next((reached for name, value in named.items() if (reached := culprit(name, value))), None)
        path = path or culprit(getattr(function, "__name__", "the function"), function)
        raise BadCall(f"{path} can't be sent to another process: {error}") from None


def culprit(name: str, value, seen: tuple = ()) -> str | None:
    """Return the object that keeps `value` from being pickled and the path to it; None if `value` can be pickled."""
    try:
        pickled(value)
        return None
    except Exception:
        used: dict[str, Any] = {}
        if isinstance(value, types.FunctionType) and value not in seen:
            used = used_by(value)
        elif isinstance(value, dict):
            used = {f"{name}[{key!r}]": item for key, item in value.items()}
        elif isinstance(value, (list, tuple)):
            used = {f"{name}[{i}]": item for i, item in enumerate(value)}
        inner = next((path for word, item in used.items() if (path := culprit(word, item, (*seen, value)))), None)
        reached = f" in {name}" if isinstance(value, types.FunctionType) else ""
        return f"{inner}{reached}" if inner else f"{name} (of type {type(value).__name__})"


def used_by(function: types.FunctionType) -> dict:
    """Return the objects that a function uses, by name: its defaults, variables of outer functions, globals."""
    codes, names = [function.__code__], set()
    for code in codes:  # grows: comprehensions and inner functions are constants of the enclosing code
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
        names |= set(code.co_names)
    parameters = inspect.signature(function).parameters.items()
    used = {name: parameter.default for name, parameter in parameters if parameter.default is not parameter.empty}
    used |= {name: function.__globals__[name] for name in sorted(names) if name in function.__globals__}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # not set yet
            used[name] = cell.cell_contents
    return used
