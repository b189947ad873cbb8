"""Let the library of this process run an answer: install it, put the reference back, say what is installed.

The source of a cell is compiled in the namespace of the library's module, with the cell's file name and lines. So a
check tests what the export writes, and an error shows the learner's line. What then happens depends on the kind:

    function        the code object of the library's own function is swapped: aliases, registries and partials follow
    method          set on the class
    class           attribute by attribute; the class itself stays, with all its instances
    Triton kernel   set on its module and wherever else a module holds it; what Triton has compiled is forgotten

Meanwhile the reference is out of reach: while the cell's text is executed, its targets raise. A function kept from that
moment, to be called later, is no way round an exercise.
"""

import ast
import contextlib
import importlib
import inspect
import linecache
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

from course_kit.exercises.cells import CellError, ExportedCell, read
from course_kit.exercises.splice import ANNOTATIONS, check_fits, find, is_method, static_names
from course_kit.exercises.swap import (
    MISSING,
    Undo,
    change_class,
    clear_cache,
    forget_compiled,
    is_kernel,
    own_class,
    raw,
    rebind,
    set_attribute,
    swap_code,
)


class Answer(NamedTuple):
    """The answer to one exercise: its cells as (source, file name that errors show)."""

    exercise: str
    cells: tuple[tuple[str, str], ...]


_installed: dict[str, tuple[Answer, list[Undo]]] = {}  # of this process, by exercise
_replaced: dict[tuple, str] = {}  # (module, class, name) of a definition: the exercise whose answer is in its place
_added: dict[tuple[str, str], list[str]] = {}  # (module, name) that the library has not: the exercises that brought it


def installed() -> list[Answer]:
    """The answers that this process's library runs, in the order in which they came."""
    return [answer for answer, _ in _installed.values()]


def install(answer: Answer) -> None:
    """Have the library run an answer, in place of the reference or of an earlier one.

    Raises CellError where the cells do not fit the library, and whatever their text raises when it is executed; then
    the reference is in place.
    """
    uninstall(answer.exercise)
    undo: list[Undo] = []
    try:
        for source, file in answer.cells:
            put_cell(read(source, file), file, answer.exercise, undo)
    except BaseException:
        take_back(undo)
        raise
    _installed[answer.exercise] = answer, undo
    forget_compiled()


def uninstall(exercise: str) -> None:
    """Put the reference of an exercise back."""
    if exercise in _installed:
        _, undo = _installed.pop(exercise)
        take_back(undo)
        forget_compiled()


def sync(answers: list[Answer]) -> None:
    """Have the library of this process, a rank's, run these answers and no others."""
    wanted = {answer.exercise: answer for answer in answers}
    for exercise, (answer, _) in list(_installed.items()):
        if wanted.get(exercise) != answer:
            uninstall(exercise)
    for exercise in wanted.keys() - _installed.keys():
        install(wanted[exercise])


@contextlib.contextmanager
def without(exercise: str) -> Iterator[None]:
    """The reference of an exercise, inside; afterwards the answer that was installed, if one was."""
    before = _installed.get(exercise)
    uninstall(exercise)
    try:
        yield
    finally:
        if before and exercise not in _installed:
            install(before[0])


def take_back(undo: list[Undo]) -> None:
    """Undo changes, the last one first."""
    while undo:
        undo.pop()()


def library_module(name: str) -> types.ModuleType:
    """The module of the library that a directive names. Raises CellError where there is none."""
    try:
        return importlib.import_module(f"course_lib.{name}")
    except ModuleNotFoundError as error:
        if error.name and f"course_lib.{name}".startswith(error.name):
            raise CellError(f"there is no module course_lib.{name}") from None
        raise


def claim(cell: ExportedCell, exercise: str, names: list[str], undo: list[Undo]) -> None:
    """Keep in mind whose these definitions are. Raises CellError where another exercise's answer is in their place."""
    for key in [(cell.module, cell.cls, name) for name in names]:
        if key in _replaced:
            raise CellError(
                f"cell {cell.name} defines {key[2]}, which is exercise {_replaced[key]}'s: leave it out here"
            )
        _replaced[key] = exercise
        undo.append(lambda key=key: _replaced.pop(key))


def add(module: types.ModuleType, name: str, value: Any, cell: ExportedCell, exercise: str, undo: list[Undo]) -> None:
    """Give a module a name that it has not. Several answers may bring the same import; the last one takes it along."""
    owners = _added.setdefault((module.__name__, name), [])
    if owners and vars(module).get(name) is not value:
        raise CellError(
            f"cell {cell.name}: your answer to {owners[0]} has brought another {name} there: choose another name"
        )
    owners.append(exercise)
    setattr(module, name, value)

    def drop():
        owners.remove(exercise)
        if not owners:
            delattr(module, name)

    undo.append(drop)


def put_cell(cell: ExportedCell, file: str, exercise: str, undo: list[Undo]) -> None:
    """Execute a cell's definitions and put them in place of the library's."""
    module = library_module(cell.module)
    text = inspect.getsource(module)
    check_fits(text, cell, learners=True)
    linecache.cache[file] = len(cell.source), None, cell.source.splitlines(keepends=True), file
    owner = getattr(module, cell.cls) if cell.cls else module
    targets = {name: piece.node for name, piece in cell.definitions.items() if find(text, name, cell.cls)}
    claim(cell, exercise, list(targets), undo)
    references = decorators(text, cell.cls)
    swapped = set()
    if not cell.cls:
        swapped = {name for name, node in targets.items() if can_swap(vars(module)[name], node, references.get(name))}
    with out_of_reach(module, owner, targets):
        made = execute(cell, file, module, {*targets}, swapped)
    for name, value in made.helpers.items():
        add(module, name, value, cell, exercise, undo)
    for name, value in made.definitions.items():
        there = vars(owner).get(name, MISSING)
        if cell.cls:
            own_class(value, made.cls, owner)
            set_attribute(owner, name, value, undo)
        elif name in swapped:
            swap_code(raw(there), raw(value), undo)
            clear_cache(there, undo)
        elif isinstance(there, type) and isinstance(value, type):
            change_class(there, value, undo)
        else:
            rebind(there, value, undo)


class Made(NamedTuple):
    """What executing a cell has made."""

    definitions: dict[str, Any]
    helpers: dict[str, Any]  # and imports, constants
    cls: type | None  # the class in which methods were compiled


def execute(cell: ExportedCell, file: str, module: types.ModuleType, targets: set[str], swapped: set[str]) -> Made:
    """Execute a cell's definitions in the namespace of a module, and leave that as it was.

    Methods are compiled in a class of the right name, so that `super()` and `self.__name` mean what they say. Of a
    function whose code is to be swapped the decorators are left out: the library's own stay on.
    """
    known = vars(module)
    for name in swapped:
        cell.definitions[name].node.decorator_list = []
    pieces = sorted([*cell.others, *cell.definitions.values()], key=lambda piece: piece.start)
    methods = set()
    if cell.cls:
        methods = {name for name, piece in cell.definitions.items() if belongs(piece.node, cell.cls, known)}
    body = [piece.node for piece in pieces if not methods & {*piece.names}]
    if methods:
        inside = [cell.definitions[name].node for name in cell.definitions if name in methods]
        wrapper = ast.parse(f"class {cell.cls}: pass").body[0]
        wrapper.body = inside
        body.append(ast.copy_location(wrapper, inside[0]))
    code = compile(ast.fix_missing_locations(ast.Module(body, [])), file, "exec", flags=ANNOTATIONS, dont_inherit=True)
    names = {name for piece in pieces for name in piece.names} - methods | ({cell.cls} if methods else set())
    before = {name: known.get(name, MISSING) for name in names}
    try:
        exec(code, known)
        after = {name: known[name] for name in names if name in known}
    finally:
        for name, value in before.items():
            known.pop(name, None) if value is MISSING else known.update({name: value})
    cls = after.pop(cell.cls, None) if methods else None
    made = {name: vars(cls)[name] for name in methods} if methods else {}
    if not cell.cls:
        own = {name for piece in cell.definitions.values() for name in piece.names} & targets
        made = {name: after.pop(name) for name in own}
    static = static_names(ast.parse(inspect.getsource(module)))
    return Made(made, {name: value for name, value in after.items() if name not in static}, cls)


def belongs(node: ast.stmt, cls: str, known: dict) -> bool:
    """Whether a function of a cell goes into the class, and is no helper beside it."""
    return node.name in vars(known[cls]) or is_method(node, cls)


def decorators(text: str, cls: str | None) -> dict[str, list[str]]:
    """The decorators of a module's functions, or of a class's, as source."""
    tree = ast.parse(text)
    holder = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == cls) if cls else tree
    return {
        node.name: list(map(ast.unparse, node.decorator_list))
        for node in holder.body
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    }


def can_swap(there: Any, node: ast.stmt, wanted: list[str] | None) -> bool:
    """Whether the code of the library's function can be swapped: it is a plain one inside, decorated as the cell's."""
    if isinstance(node, ast.ClassDef) or is_kernel(there) or wanted is None:
        return False
    function = raw(there)
    same = list(map(ast.unparse, node.decorator_list)) == wanted
    return same and function is not None and not function.__code__.co_freevars


@contextlib.contextmanager
def out_of_reach(module: types.ModuleType, owner: Any, targets: dict[str, ast.stmt]) -> Iterator[None]:
    """Meanwhile the library's own definitions of these names raise."""
    undo: list[Undo] = []
    try:
        for name in targets:
            there, stub = vars(owner)[name], refusal(name)
            function = None if owner is not module or is_kernel(there) else raw(there)
            if isinstance(there, type):
                for attribute, value in list(vars(there).items()):
                    if isinstance(value, (types.FunctionType, staticmethod, classmethod)):
                        set_attribute(there, attribute, staticmethod(stub), undo)
            elif function is not None and not function.__code__.co_freevars:
                swap_code(function, stub, undo)
            elif owner is module:
                rebind(there, stub, undo, runs=False)
            else:
                set_attribute(owner, name, stub, undo)
        yield
    finally:
        take_back(undo)


def refusal(name: str) -> types.FunctionType:
    """A function in place of a target, for a cell that keeps it. It has no closure: its code can be swapped in."""
    text = f"{name} calls the library's own {name}, kept under another name: write it yourself"
    space: dict = {}
    exec(f"def kept(*args, **kwargs):\n    raise AssertionError({text!r})", space)
    return space["kept"]
