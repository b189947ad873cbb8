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
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from course_kit.exercises.cells import CellError, ExportedCell, read
from course_kit.exercises.splice import ANNOTATIONS, check_fits, is_method

MISSING = object()
# What Python, or the class's own metaclass, makes of each class anew.
NOT_COPIED = {"__dict__", "__weakref__", "__module__", "__qualname__", "__doc__", "__firstlineno__", "_backward_cls"}
NOT_COPIED |= {"__static_attributes__", "__annotate__", "__annotate_func__", "__annotations_cache__"}
Undo = Callable[[], None]


class Answer(NamedTuple):
    """The answer to one exercise: its cells as (source, file name that errors show)."""

    exercise: str
    cells: tuple[tuple[str, str], ...]


_installed: dict[str, tuple[Answer, list[Undo]]] = {}  # of this process, by exercise


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
            put_cell(read(source, file), file, undo)
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


def put_cell(cell: ExportedCell, file: str, undo: list[Undo]) -> None:
    """Execute a cell's definitions and put them in place of the library's."""
    module = library_module(cell.module)
    text = inspect.getsource(module)
    check_fits(text, cell, learners=True)
    linecache.cache[file] = len(cell.source), None, cell.source.splitlines(keepends=True), file
    owner = getattr(module, cell.cls) if cell.cls else module
    targets = {name: piece.node for name, piece in cell.definitions.items() if name in vars(owner)}
    references = decorators(text, cell.cls)
    swapped = set()
    if not cell.cls:
        swapped = {name for name, node in targets.items() if can_swap(vars(module)[name], node, references.get(name))}
    with out_of_reach(module, owner, targets):
        made = execute(cell, file, module, swapped)
    for name, value in made.helpers.items():
        set_attribute(module, name, value, undo)
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


def execute(cell: ExportedCell, file: str, module: types.ModuleType, swapped: set[str]) -> Made:
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
    targets = {name: after.pop(name) for name in cell.definitions if not cell.cls and before.get(name) is not MISSING}
    return Made(made | targets, {name: value for name, value in after.items() if before[name] is MISSING}, cls)


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


def is_kernel(value: Any) -> bool:
    """Whether it is a function that Triton compiles or interprets."""
    return str(type(value).__module__).partition(".")[0] == "triton"


def raw(value: Any) -> types.FunctionType | None:
    """The plain function inside what decorators have made of it; None where there is none."""
    while not isinstance(value, types.FunctionType) or hasattr(value, "__wrapped__"):
        inner = getattr(value, "__wrapped__", None) or getattr(value, "_init_fn", None)
        if inner is None:
            return None
        value = inner
    return value


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
                rebind(there, stub, undo)
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


def own_class(value: Any, made: type, cls: type) -> None:
    """Let the methods in an attribute know the library's class, not the one they were compiled in, as `__class__`."""
    functions = [value, *(getattr(value, name, None) for name in ("__func__", "fget", "fset", "fdel", "__wrapped__"))]
    for function in functions:
        function = getattr(function, "__wrapped__", function)
        for cell in getattr(function, "__closure__", None) or ():
            with contextlib.suppress(ValueError):  # empty
                if cell.cell_contents is made:
                    cell.cell_contents = cls


def set_attribute(owner: Any, name: str, value: Any, undo: list[Undo]) -> None:
    """Set an attribute of a module or a class."""
    before = vars(owner).get(name, MISSING)
    setattr(owner, name, value)
    undo.append(lambda: delattr(owner, name) if before is MISSING else setattr(owner, name, before))


def swap_code(there: types.FunctionType, mine: types.FunctionType, undo: list[Undo]) -> None:
    """Let the library's function do what another one does."""
    before = there.__code__, there.__defaults__, there.__kwdefaults__

    def put(code, defaults, kwdefaults):
        there.__code__, there.__defaults__, there.__kwdefaults__ = code, defaults, kwdefaults

    put(mine.__code__, mine.__defaults__, mine.__kwdefaults__)
    undo.append(lambda: put(*before))


def clear_cache(function: Any, undo: list[Undo]) -> None:
    """Forget results that functools.cache keeps."""
    if clear := getattr(function, "cache_clear", None):
        clear()
        undo.append(clear)


def change_class(there: type, mine: type, undo: list[Undo]) -> None:
    """Give the library's class the attributes and the bases of another one."""
    if there.__bases__ != mine.__bases__:
        before = there.__bases__
        try:
            there.__bases__ = mine.__bases__
        except TypeError:
            names = ", ".join(base.__name__ for base in before)
            raise CellError(f"class {there.__name__} must derive from {names}") from None
        undo.append(lambda: setattr(there, "__bases__", before))
    for name in [name for name in vars(there) if name not in vars(mine) and name not in NOT_COPIED]:
        before = vars(there)[name]
        delattr(there, name)
        undo.append(lambda name=name, before=before: setattr(there, name, before))
    for name, value in vars(mine).items():
        if name not in NOT_COPIED:
            own_class(value, mine, there)
            set_attribute(there, name, value, undo)


def our_modules() -> list[types.ModuleType]:
    """The modules of the course that this process has imported."""
    return [
        module
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] in ("course_lib", "course_kit") and module is not None
    ]


def rebind(there: Any, mine: Any, undo: list[Undo]) -> None:
    """Put an object in place of another one, in each module of the course that has it."""
    for module in our_modules():
        for name in [name for name, value in vars(module).items() if value is there]:
            set_attribute(module, name, mine, undo)


def forget_compiled() -> None:
    """Have torch.compile and Triton look at functions anew."""
    if dynamo := sys.modules.get("torch._dynamo"):
        dynamo.reset()
    if "triton.runtime.jit" in sys.modules:
        forget_kernels()


def forget_kernels() -> None:
    """Forget what Triton has compiled, tuned and rewritten: a compiled kernel keeps the functions that it calls."""
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").partition(".")[0] in ("triton", "torch"):
            continue
        for value in list(getattr(module, "__dict__", {}).values()):
            while is_kernel(value) and not isinstance(value, types.ModuleType):
                if isinstance(value, JITFunction):
                    value.hash = None
                    value.used_global_vals = {}
                    value.device_caches.clear()
                elif isinstance(value, Autotuner):
                    value.cache.clear()
                elif hasattr(type(value), "rewritten_fn"):
                    value.rewritten_fn.pop(value.fn, None)
                value = getattr(value, "fn", None)
