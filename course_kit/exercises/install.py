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
import sys
import traceback
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

from course_kit.exercises.cells import CellError, ExportedCell, read
from course_kit.exercises.fits import ANNOTATIONS, check_fits, find, imported, is_method, static_names
from course_kit.exercises.swap import (
    CLASS_CELL,
    MISSING,
    Undo,
    change_class,
    clear_cache,
    clear_caches,
    forget_compiled,
    holds_cell,
    is_kernel,
    lead_to,
    out_of_reach,
    raw,
    rebind,
    set_attribute,
    swap_code,
    take_back,
    take_class_cell,
)


class Answer(NamedTuple):
    """The answer to one exercise: its cells as (source, file name that errors show)."""

    exercise: str
    cells: tuple[tuple[str, str], ...]


_installed: dict[str, tuple[Answer, list[Undo]]] = {}  # of this process, by exercise
_replaced: dict[tuple, str] = {}  # (module, class, name) of a definition: the exercise whose answer is in its place
_added: dict[tuple[str, str], list[tuple]] = {}  # (module, name) that the library has not: (exercise, import) of each


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
    """Put the reference of an exercise back. Raises AssertionError where the answer itself asks for it."""
    if exercise in _installed:
        files = {file for _, file in _installed[exercise][0].cells}
        for frame, _ in traceback.walk_stack(sys._getframe()):
            if frame.f_code.co_filename in files and frame.f_globals.get("__name__", "").startswith("course_lib."):
                raise AssertionError("your code asks for the reference: write it yourself")
        _, undo = _installed.pop(exercise)
        take_back(undo)
        forget_compiled()


def sync(answers: list[Answer]) -> None:
    """Have the library of this process, a rank's, run these answers and no others."""
    wanted = {answer.exercise: answer for answer in answers}
    for exercise, (answer, _) in list(_installed.items()):
        if wanted.get(exercise) != answer:
            uninstall(exercise)
    for answer in [answer for exercise, answer in wanted.items() if exercise not in _installed]:
        install(answer)


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
        whole = cell.module, None, cell.cls
        parts = [each for each in _replaced if each[:2] == (cell.module, key[2]) and _replaced[each] != exercise]
        for other in [each for each in (key, whole, *parts) if each in _replaced]:
            of, theirs = ".".join(filter(None, other[1:])), _replaced[other]
            raise CellError(f"cell {cell.name} defines {key[2]}, and {of} is exercise {theirs}'s: leave it out here")
        _replaced[key] = exercise
        undo.append(lambda key=key: _replaced.pop(key))


def add(module: types.ModuleType, name: str, value: Any, cell: ExportedCell, exercise: str, undo: list[Undo]) -> None:
    """Give a module a name that it has not. Several answers may bring the same import; the last one takes it along."""
    owners = _added.setdefault((module.__name__, name), [])
    brought = next((imported(piece.node, name) for piece in cell.others if name in piece.names), None)
    if owners and (brought is None or owners[0][1] != brought):
        raise CellError(
            f"cell {cell.name}: your answer to {owners[0][0]} has brought another {name} there: choose another name"
        )
    owners.append((exercise, brought))
    setattr(module, name, value)

    def drop():
        owners.remove((exercise, brought))
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
    forget_globals(module, cell, undo)
    undo.append(lambda: clear_caches(module))
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
            set_attribute(owner, name, value, undo)
        elif name in swapped:
            swap_code(raw(there), raw(value), undo)
            clear_cache(there, undo)
        elif isinstance(there, type) and isinstance(value, type):
            change_class(there, value, undo)
        else:
            lead_to(there, value, undo)
            rebind(there, value, undo)
    for name, found in made.class_cells.items():
        if isinstance(there := getattr(module, name), type):
            found.cell_contents = there
    clear_caches(module)


def forget_globals(module: types.ModuleType, cell: ExportedCell, undo: list[Undo]) -> None:
    """Note for the undo what a module has under the names that the cell's functions write by `global`."""
    nodes = [node for piece in cell.definitions.values() for node in ast.walk(piece.node)]
    for name in {name for node in nodes if isinstance(node, ast.Global) for name in node.names}:
        undo.append(lambda name=name, value=vars(module).get(name, MISSING): restore(vars(module), {name: value}))


def restore(known: dict, before: dict[str, Any]) -> None:
    """Put values back into a namespace; MISSING stands for none."""
    for name, value in before.items():
        known.pop(name, None) if value is MISSING else known.update({name: value})


class Made(NamedTuple):
    """What executing a cell has made."""

    definitions: dict[str, Any]
    helpers: dict[str, Any]  # and imports, constants
    class_cells: dict[str, types.CellType]  # by class: where its new methods find it


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
    classes = [node for node in body if isinstance(node, ast.ClassDef) and node.name in (cell.cls, *targets)]
    for node in classes:
        node.body = [*node.body, *ast.parse(f"def {CLASS_CELL}(): return __class__").body]
    code = compile(ast.fix_missing_locations(ast.Module(body, [])), file, "exec", flags=ANNOTATIONS, dont_inherit=True)
    names = {name for piece in pieces for name in piece.names} - methods | ({cell.cls} if methods else set())
    before = {name: known.get(name, MISSING) for name in names | {"__annotations__"}}
    try:
        exec(code, known)
        after = {name: known[name] for name in names if name in known}
    finally:
        restore(known, before)
    class_cells = {node.name: take_class_cell(after[node.name]) for node in classes if holds_cell(after[node.name])}
    cls = after.pop(cell.cls, None) if methods else None
    made = {private(name, cell.cls): vars(cls)[private(name, cell.cls)] for name in methods}
    if not cell.cls:
        own = {name for piece in cell.definitions.values() for name in piece.names} & targets
        made = {name: after.pop(name) for name in own}
    static = static_names(ast.parse(inspect.getsource(module)))
    return Made(made, {name: value for name, value in after.items() if name not in static}, class_cells)


def private(name: str, cls: str) -> str:
    """The name that a method has in its class: `_Bucket__join` of `__join`."""
    return f"_{cls.lstrip('_')}{name}" if name.startswith("__") and not name.endswith("__") else name


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
