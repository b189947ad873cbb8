"""Let the library of this process run an answer: install it, restore the reference, list what is installed.

The source of a cell is compiled in the namespace of the library's module, with the cell's file name and lines. A check
therefore tests what the export writes, and an error shows the learner's line. The rest depends on the kind:

    function        the code object of the library's function is swapped: aliases, registries and partials follow
    method          set on the class
    class           attribute by attribute; the class itself stays, with all its instances
    Triton kernel   set on its module and wherever else a module holds it; Triton's compiled kernels are dropped

While the cell's text is executed, the reference is inaccessible: its targets raise. A function that the cell stores at
that moment, to call it later, is no way around an exercise.
"""

import ast
import contextlib
import functools
import importlib
import inspect
import linecache
import sys
import traceback
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

from course_kit.exercises.cells import CellError, Definition, ExportedCell, read
from course_kit.exercises.fits import ANNOTATIONS, check_fits, find, imported, is_method, static_names
from course_kit.exercises.renamed import renamed
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
_replaced: dict[tuple, str] = {}  # (module, class, name) of a definition: the exercise whose answer replaces it
_added: dict[tuple[str, str], list[tuple]] = {}  # (module, name) unknown to the library: (exercise, import) of each


def installed() -> list[Answer]:
    """Return the answers that this process's library runs, in the order of their installation."""
    return [answer for answer, _ in _installed.values()]


def install(answer: Answer) -> None:
    """Have the library run an answer instead of the reference or of an earlier answer.

    Raises CellError if the cells do not fit the library, and any error that their text raises when it is executed; the
    reference is then back.
    """
    uninstall(answer.exercise)
    undo: list[Undo] = []
    try:
        for source, file in answer.cells:
            cell = read(source, file)
            assert cell is not None, "a cell without a directive"
            put_cell(cell, file, answer.exercise, undo)
    except BaseException:
        take_back(undo)
        raise
    _installed[answer.exercise] = answer, undo
    forget_compiled()


def uninstall(exercise: str) -> None:
    """Restore the reference of an exercise. Raises AssertionError if the answer itself asks for it."""
    if exercise in _installed:
        files = {file for _, file in _installed[exercise][0].cells}
        for frame, _ in traceback.walk_stack(sys._getframe()):
            if frame.f_code.co_filename in files and frame.f_globals.get("__name__", "").startswith("course_lib."):
                raise AssertionError("your code asks for the reference: write it yourself")
        _, undo = _installed.pop(exercise)
        take_back(undo)
        forget_compiled()


def sync(answers: list[Answer]) -> None:
    """Have the library of this process, a rank's, run exactly these answers."""
    wanted = {answer.exercise: answer for answer in answers}
    for exercise, (answer, _) in list(_installed.items()):
        if wanted.get(exercise) != answer:
            uninstall(exercise)
    for answer in [answer for exercise, answer in wanted.items() if exercise not in _installed]:
        install(answer)


@contextlib.contextmanager
def without(exercise: str) -> Iterator[None]:
    """Run the reference of an exercise inside the context; afterwards the answer that was installed, if any."""
    before = _installed.get(exercise)
    uninstall(exercise)
    try:
        yield
    finally:
        if before and exercise not in _installed:
            install(before[0])


def library_module(name: str) -> types.ModuleType:
    """Return the module of the library that a directive names. Raises CellError if it does not exist."""
    try:
        return importlib.import_module(f"course_lib.{name}")
    except ModuleNotFoundError as error:
        if error.name and f"course_lib.{name}".startswith(error.name):
            raise CellError(f"there is no module course_lib.{name}") from None
        raise


def claim(cell: ExportedCell, exercise: str, names: list[str], undo: list[Undo]) -> None:
    """Record which exercise owns these definitions. Raises CellError if another exercise's answer replaces them."""
    for key in [(cell.module, cell.cls, name) for name in names]:
        cls_key: tuple = cell.module, None, cell.cls
        methods = [each for each in _replaced if each[:2] == (cell.module, key[2]) and _replaced[each] != exercise]
        for other in [each for each in (key, cls_key, *methods) if each in _replaced]:
            of, theirs = ".".join(filter(None, other[1:])), _replaced[other]
            raise CellError(f"cell {cell.name} defines {key[2]}, and {of} is exercise {theirs}'s: leave it out here")
        _replaced[key] = exercise
        undo.append(functools.partial(_replaced.pop, key))


def add(module: types.ModuleType, name: str, value: Any, cell: ExportedCell, exercise: str, undo: list[Undo]) -> None:
    """Give a module a new name. Several answers may bring the same import; it is removed with the last of them."""
    owners = _added.setdefault((module.__name__, name), [])
    brought = next((imported(statement.node, name) for statement in cell.others if name in statement.names), None)
    if owners and (brought is None or owners[0][1] != brought):
        raise CellError(
            f"cell {cell.name}: your answer to {owners[0][0]} has added another {name} there: choose another name"
        )
    owners.append((exercise, brought))
    setattr(module, name, value)

    def drop() -> None:
        owners.remove((exercise, brought))
        if not owners:
            delattr(module, name)

    undo.append(drop)


def put_cell(cell: ExportedCell, file: str, exercise: str, undo: list[Undo]) -> None:
    """Execute a cell's definitions and replace the library's with them."""
    module = library_module(cell.module)
    text = inspect.getsource(module)
    check_fits(text, cell, learners=True)
    shown = renamed(cell.source)  # Triton reads a kernel here
    linecache.cache[file] = len(shown), None, shown.splitlines(keepends=True), file
    owner = getattr(module, cell.cls) if cell.cls else module
    targets = {name: cell.definitions[name].definition for name in cell.definitions if find(text, name, cell.cls)}
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
        current = vars(owner).get(name, MISSING)
        if cell.cls:
            set_attribute(owner, name, value, undo)
        elif name in swapped:
            function, answer = raw(current), raw(value)
            assert function is not None and answer is not None  # `can_swap` has seen to it
            swap_code(function, answer, undo)
            clear_cache(current, undo)
        elif isinstance(current, type) and isinstance(value, type):
            change_class(current, value, undo)
        else:
            lead_to(current, value, undo)
            rebind(current, value, undo)
    for name, class_cell in made.class_cells.items():
        if isinstance(cls := getattr(module, name), type):
            class_cell.cell_contents = cls
    clear_caches(module)


def forget_globals(module: types.ModuleType, cell: ExportedCell, undo: list[Undo]) -> None:
    """Note for the undo the values that a module has under the names that the cell's functions declare `global`."""
    nodes = [node for statement in cell.definitions.values() for node in ast.walk(statement.node)]
    names = {name for node in nodes if isinstance(node, ast.Global) for name in node.names}
    undo += [functools.partial(restore, vars(module), {name: vars(module).get(name, MISSING)}) for name in names]


def restore(known: dict, before: dict[str, Any]) -> None:
    """Restore values in a namespace; MISSING stands for an absent name."""
    for name, value in before.items():
        known.pop(name, None) if value is MISSING else known.update({name: value})


class Made(NamedTuple):
    """The results of executing a cell."""

    definitions: dict[str, Any]
    helpers: dict[str, Any]  # and imports, constants
    class_cells: dict[str, types.CellType]  # by class: where its new methods find it


def execute(cell: ExportedCell, file: str, module: types.ModuleType, targets: set[str], swapped: set[str]) -> Made:
    """Execute a cell's definitions in the namespace of a module, and leave the namespace as it was.

    Methods are compiled in a class of the right name, so that `super()` and `self.__name` work. A function whose code
    is to be swapped loses its decorators: the library's decorators stay.
    """
    known = vars(module)
    for name in swapped:
        cell.definitions[name].definition.decorator_list = []
    statements = sorted([*cell.others, *cell.definitions.values()], key=lambda statement: statement.start)
    methods: set[str] = set()
    if cell.cls:
        methods = {name for name in cell.definitions if belongs(cell.definitions[name].definition, cell.cls, known)}
    body = [statement.node for statement in statements if not methods & {*statement.names}]
    if methods:
        inside = [cell.definitions[name].node for name in cell.definitions if name in methods]
        wrapper = ast.parse(f"class {cell.cls}: pass").body[0]
        assert isinstance(wrapper, ast.ClassDef)
        wrapper.body = inside
        body.append(ast.copy_location(wrapper, inside[0]))
    classes = [node for node in body if isinstance(node, ast.ClassDef) and node.name in (cell.cls, *targets)]
    for node in classes:
        node.body = [*node.body, *ast.parse(f"def {CLASS_CELL}(): return __class__").body]
    code = compile(ast.fix_missing_locations(ast.Module(body, [])), file, "exec", flags=ANNOTATIONS, dont_inherit=True)
    names = {name for statement in statements for name in statement.names} - methods
    if cell.cls and methods:
        names.add(cell.cls)
    before = {name: known.get(name, MISSING) for name in names | {"__annotations__"}}
    try:
        exec(code, known)
        after = {name: known[name] for name in names if name in known}
    finally:
        restore(known, before)
    class_cells = {node.name: take_class_cell(after[node.name]) for node in classes if holds_cell(after[node.name])}
    if cell.cls:
        cls = after.pop(cell.cls, None) if methods else None
        made = {private(name, cell.cls): vars(cls)[private(name, cell.cls)] for name in methods}
    else:
        defined = {name for statement in cell.definitions.values() for name in statement.names} & targets
        made = {name: after.pop(name) for name in defined}
    static = static_names(ast.parse(inspect.getsource(module)))
    return Made(made, {name: value for name, value in after.items() if name not in static}, class_cells)


def private(name: str, cls: str) -> str:
    """Return the name that a method has in its class: `_Bucket__join` of `__join`."""
    return f"_{cls.lstrip('_')}{name}" if name.startswith("__") and not name.endswith("__") else name


def belongs(node: Definition, cls: str, known: dict) -> bool:
    """Return True if a function of a cell becomes a method of the class, and is not a helper beside it."""
    return node.name in vars(known[cls]) or is_method(node, cls)


def decorators(text: str, cls: str | None) -> dict[str, list[str]]:
    """Return the decorators of the functions of a module or of a class, as source."""
    tree = ast.parse(text)
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == cls]
    return {
        node.name: list(map(ast.unparse, node.decorator_list))
        for node in (classes[0] if cls else tree).body
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    }


def can_swap(current: Any, node: Definition, wanted: list[str] | None) -> bool:
    """Return True if the code of the library's function can be swapped: under its decorators, which match the cell's,
    it is a plain function.
    """
    if isinstance(node, ast.ClassDef) or is_kernel(current) or wanted is None:
        return False
    function = raw(current)
    same = list(map(ast.unparse, node.decorator_list)) == wanted
    return same and function is not None and not function.__code__.co_freevars
