"""`check("04.6")`: put an answer into the library on trial, run the exercise's assertions, keep it or take it out.

An error becomes advice, and `.progress/` keeps the result. The assertions are the function `check` of a module
`course_kit/checks/<package>/check_04_06.py`; of an exercise that is not exported its parameters are names of the
notebook.
"""

import contextlib
import functools
import importlib
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import course_lib
from course_kit.checks.advice import CheckFailed, advice, shorten_kernel_errors
from course_kit.exercises.cells import (
    LOOKS_LIKE_EXPORT,
    CellError,
    ExportedCell,
    bound,
    digest,
    parsed,
    plain,
    read,
)
from course_kit.exercises.fits import check_fits
from course_kit.exercises.install import Answer, install, library_module, uninstall, without
from course_kit.exercises.notes import note, state
from course_kit.exercises.renamed import rename_in_kernel, renamed
from course_kit.exercises.saved import exercise_digest, saved_answers
from course_kit.exercises.splice import owned

PROJECT = Path(__file__).resolve().parents[2]
LIBRARY = Path(course_lib.__file__).parent
EXERCISE = re.compile(r"\d\d\.\d+")
Cells = list[tuple[str, str]]  # (source, file name that errors show)


def check(exercise: str) -> None:
    """Check an exercise, such as "04.6": its answer goes into the library if it passes, and the reference if not.

    Prints one line if it passes, else raises CheckFailed with advice. Raises ValueError for an unknown exercise.
    """
    if check_module(exercise) is None:
        raise ValueError(f"there is no exercise {exercise!r}; name it as its heading does, such as 04.6")
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is None:
        raise CheckFailed(f'check("{exercise}") looks for your answer in a notebook, and this is not a notebook')
    with advice(exercise):  # an answer that was not run is none: what is noted of an earlier one, and installed, stays
        cells = cells_of(exercise, run_cells(shell))
    run(exercise, cells, shell.user_ns)


@contextlib.contextmanager
def reference(exercise: str) -> Iterator[None]:
    """Have the library run the reference of an exercise, inside, whatever answer has passed."""
    if exercise not in targets_by_exercise():
        raise ValueError(f"{exercise} is not an exercise whose answer goes into the library")
    with without(exercise):
        yield


def setup(chapter: str) -> None:
    """Install the answers of a notebook that have passed, as after a restart of its kernel. chapter: as "04".

    The notebook is the one in this folder whose name begins so, as it was saved. An answer that has changed since it
    passed, and one that no longer fits the library, is left out; the reference runs in its place.
    """
    shorten_kernel_errors()
    folder = Path.cwd()
    if folder == PROJECT / "notebooks":
        return  # it holds the reference alone
    if "IPython" in sys.modules and (shell := sys.modules["IPython"].get_ipython()):
        rename_in_kernel(shell)
    back, changed = [], []
    for exercise, cells, result in saved_answers(folder, chapter):
        how = state(folder, exercise, result) if exercise in targets_by_exercise() else None
        changed += [exercise] if how == "changed" else []
        if how == "passes":
            with contextlib.suppress(Exception):
                install(Answer(exercise, tuple(cells)))
                back.append(exercise)
    if back:
        print(f"The library runs your answers that have passed: {', '.join(back)}")
    if changed:
        print(
            f"Changed since they passed, or not saved then: {', '.join(changed)}. Run the cells and their checks again"
        )


@functools.cache
def check_module(exercise: str) -> str | None:
    """Return the name of the module that checks an exercise; None if there is none."""
    if not EXERCISE.fullmatch(exercise):
        return None
    chapter, number = exercise.split(".")
    files = sorted(Path(__file__).parent.glob(f"*/check_{chapter}_{int(number):02}.py"))
    return f"course_kit.checks.{files[0].parent.name}.{files[0].stem}" if files else None


@functools.cache
def targets_by_exercise() -> dict[str, dict[str, list[str]]]:
    """Return, for each exercise of the library's owner comments, its definitions' names by directive ("a.b:Class")."""
    result: dict[str, dict[str, list[str]]] = {}
    for file in sorted(LIBRARY.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        for each in owned(text) if "# exercise " in text else ():
            module = ".".join(file.relative_to(LIBRARY).with_suffix("").parts)
            if each.exercise:
                target = module + (f":{each.cls}" if each.cls else "")
                result.setdefault(each.exercise, {}).setdefault(target, []).append(each.name)
    return result


def run_cells(shell) -> Cells:
    """Return the cells that a kernel has run, the last one first; their files are those that its errors name."""
    raws, codes = shell.history_manager.input_hist_raw, shell.history_manager.input_hist_parsed
    result = []
    for number in range(len(raws) - 1, 0, -1):
        name = shell.compile.get_code_name(raws[number], codes[number], number)
        result.append((raws[number], name))
    return result


def cells_of(exercise: str, executed: Cells) -> Cells:
    """Return, of the cells that were run, the last one for each target of an exercise."""
    targets = targets_by_exercise().get(exercise)
    if not targets:
        wanted = set(inspect.signature(check_function(exercise)).parameters)
        return [cell for cell in executed if wanted & names_of(cell[0])][:1]
    return [cell_for(target, names, executed) for target, names in targets.items()]


def names_of(source: str) -> set[str]:
    """Return the names that a cell binds at its top level."""
    try:
        return {name for node in parsed(source, "").body for name in bound(node)}
    except CellError:
        return set()


def cell_for(target: str, names: list[str], executed: Cells) -> tuple[str, str]:
    """Return the last cell that was run for a target and that has one of its names.

    Raises CheckFailed if there is none, or if a later cell looks like an answer to it, too.
    """
    directive = f"#| export {target}"
    closest = None
    for written, file in executed:
        source = renamed(plain(written))
        lines = source.split("\n")
        named = [re.sub(r"^\s*#\s*\|\s*export\W*", "", line).strip() for line in lines if LOOKS_LIKE_EXPORT.match(line)]
        defined = set(re.findall(r"^(?:async )?(?:def|class) (\w+)", source, re.MULTILINE))
        if target in named:
            if any(re.search(rf"(def|class) {name}\b|^{name} *[:=]", source, re.MULTILINE) for name in names):
                return written, file
            closest = closest or defined
        elif defined & {*names} and (not named or named[0] not in all_targets()):
            first = f"begins with '{lines[0].strip()}'" if named else "has no such line"
            raise CheckFailed(f"the first line of the exercise's cell should be '{directive}': {shown(file)} {first}")
    if closest and not closest & all_names(target):
        wrong = ", ".join(sorted(closest))
        raise CheckFailed(f"the cell '{directive}' defines {wrong}, and the exercise asks for {', '.join(names)}")
    raise CheckFailed(f"run the exercise's cell first: it begins with '{directive}' and defines {', '.join(names)}")


def all_targets() -> set[str]:
    """Return the targets that the directives of all exercises name."""
    return {target for targets in targets_by_exercise().values() for target in targets}


def all_names(target: str) -> set[str]:
    """Return the names that the exercises of one target define."""
    return {name for targets in targets_by_exercise().values() for name in targets.get(target, ())}


def check_function(exercise: str) -> Callable:
    """Return the function that checks an exercise."""
    module = check_module(exercise)
    assert module is not None
    return importlib.import_module(module).check


def run(exercise: str, cells: Cells, namespace: dict) -> None:
    """Check an answer: the cells (source, file that errors show) that hold it, and the names of its notebook.

    Prints one line and keeps the answer in the library, or puts the reference back and raises CheckFailed.
    """
    targets = targets_by_exercise().get(exercise, {})
    passed, of_cells = False, None
    uninstall(exercise)
    try:
        with advice(exercise, in_library=bool(targets)):
            if targets:
                answer = fitting(exercise, cells, targets)
                of_cells = exercise_digest(answer)
                with explaining(exercise, cells):
                    install(Answer(exercise, tuple(cells)))
                    check_function(exercise)()
            else:
                of_cells = "-".join(digest(source) for source, _ in cells)
                check_function(exercise)(**arguments(exercise, namespace))
        passed = True
    finally:
        if not passed:
            uninstall(exercise)
        note(Path(), exercise, passed, of_cells)
    names = " and ".join(labels(targets))
    print(f"{exercise} passes" + (f"; the library runs your {names}" if names else ""))


def labels(targets: dict[str, list[str]]) -> list[str]:
    """Return the definitions of targets, as "make_buckets" or "Bucket.launch"."""
    owners = {target: target.partition(":")[2] for target in targets}
    return [f"{owners[target]}.{name}".lstrip(".") for target, names in targets.items() for name in names]


def fitting(exercise: str, cells: Cells, targets: dict[str, list[str]]) -> list[ExportedCell]:
    """Return the cells, read, after a check that they have all that the exercise asks for and fit the library."""
    result = {}
    for source, file in cells:
        cell = read(source, shown(file))
        if cell is None or cell.target not in targets:
            raise CheckFailed(f"the first line of the cell should be '#| export {' or '.join(targets)}'")
        result[cell.target] = cell
    for target, names in targets.items():
        cell = result.get(target)
        if cell is None:
            raise CheckFailed(f"run the exercise's cell first: it begins with '#| export {target}'")
        if missing := [name for name in names if name not in cell.definitions]:
            raise CheckFailed(
                f"the cell defines {', '.join(cell.names)}, and the exercise asks for {missing[0]} too"
                if set(cell.names) & {*names}
                else f"the cell defines {', '.join(cell.names)}, and the exercise asks for {missing[0]}"
            )
        for other, theirs in targets_by_exercise().items():
            if other != exercise and (both := [name for name in theirs.get(target, ()) if name in cell.definitions]):
                raise CheckFailed(f"one exercise in a cell: {both[0]} belongs to {other}")
        check_fits(inspect.getsource(library_module(cell.module)), cell, learners=True)
    return list(result.values())


def shown(file: str) -> str:
    """Return a cell's file as its reader knows it: "In[5]"."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    label = shell.compile.format_code_name(file) if shell else None
    return label[1] if label else file


def arguments(exercise: str, namespace: dict) -> dict:
    """Return the names that the check of an exercise that is not exported takes from its notebook."""
    wanted = list(inspect.signature(check_function(exercise)).parameters)
    if missing := [name for name in wanted if name not in namespace]:
        raise CheckFailed(f"there is no {missing[0]} yet: write it in the exercise's cell, run that, then run this")
    return {name: namespace[name] for name in wanted}


@contextlib.contextmanager
def explaining(exercise: str, cells: Cells) -> Iterator[None]:
    """Explain an answer's error: its cell, the library's module that names are looked up in, or endless recursion."""
    try:
        yield
    except CellError as error:
        report = str(error)
        for _, file in cells:
            report = report.replace(file, shown(file))
        raise CellError(report) from None
    except NameError as error:
        if getattr(error, "name", None) and not hasattr(error, "_render_traceback_"):
            raise NameError(f"{error}, in the library's module, where your code runs") from error
        raise
    except RecursionError as error:
        names = {name for result in targets_by_exercise()[exercise].values() for name in result}
        stack = [(frame.filename, frame.name) for frame in traceback.extract_tb(error.__traceback__)[-40:]]
        files = {file for _, file in cells}
        if any(file in files and name in names for file, name in stack):
            again = "your code calls itself without end; the library's function of that name is yours now"
            raise AssertionError(again) from error
        raise
