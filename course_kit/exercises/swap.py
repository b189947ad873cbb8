"""Exchange parts of a library that runs: functions' code, methods, classes' attributes, Triton's kernels.

Each change is noted as a function that undoes it. What torch.compile and Triton have made of old parts is forgotten.
"""

import ast
import contextlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from course_kit.exercises.cells import CellError

MISSING = object()
CLASS_CELL = "__answer_class__"  # a function that a class is compiled with
# What Python, or the class's own metaclass, makes of each class anew.
NOT_COPIED = {"__dict__", "__weakref__", "__module__", "__qualname__", "__doc__", "__firstlineno__", "_backward_cls"}
NOT_COPIED |= {"__static_attributes__", "__annotate__", "__annotate_func__", "__annotations_cache__"}
OF_A_FUNCTION = "__code__", "__defaults__", "__kwdefaults__", "__doc__", "__annotations__"
Undo = Callable[[], None]


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


def set_attribute(owner: Any, name: str, value: Any, undo: list[Undo]) -> None:
    """Set an attribute of a module or a class."""
    before = vars(owner).get(name, MISSING)
    setattr(owner, name, value)
    undo.append(lambda: delattr(owner, name) if before is MISSING else setattr(owner, name, before))


def swap_code(there: types.FunctionType, mine: types.FunctionType, undo: list[Undo]) -> None:
    """Let the library's function do what another one does. What is then stored in it goes with the undo."""
    before, stored = {name: getattr(there, name) for name in OF_A_FUNCTION}, dict(vars(there))

    def put_back():
        for name, value in before.items():
            setattr(there, name, value)
        vars(there).clear()
        vars(there).update(stored)

    mine = forwarding(mine) if mine.__code__.co_freevars else mine
    for name in OF_A_FUNCTION:
        setattr(there, name, getattr(mine, name))
    undo.append(put_back)


def forwarding(mine: Callable) -> types.FunctionType:
    """A function that calls another one, and whose code can be swapped in: it has no closure."""

    def forward(*args, _to=mine, **kwargs):
        return _to(*args, **kwargs)

    forward.__doc__, forward.__annotations__ = mine.__doc__, getattr(mine, "__annotations__", {})
    return forward


def lead_to(there: Any, mine: Any, undo: list[Undo]) -> None:
    """Let a function of the library that is to be rebound lead to the new one, wherever else it was kept. Decorators
    that the library's has stay on it there.
    """
    function = raw(there)
    if isinstance(there, type) or is_kernel(there) or function is None or function.__code__.co_freevars:
        return
    swap_code(function, forwarding(mine if function is there else raw(mine) or mine), undo)
    clear_cache(there, undo)


def clear_cache(function: Any, undo: list[Undo]) -> None:
    """Forget results that functools.cache keeps."""
    if clear := getattr(function, "cache_clear", None):
        clear()
        undo.append(clear)


def clear_caches(module: types.ModuleType) -> None:
    """Forget the results that functools.cache keeps of a module's functions: they may come from what was exchanged."""
    for value in list(vars(module).values()):
        if clear := getattr(value, "cache_clear", None):
            clear()


def holds_cell(made: Any) -> bool:
    """Whether a decorator has left a class a class."""
    return isinstance(made, type) and CLASS_CELL in vars(made)


def take_class_cell(made: type) -> types.CellType:
    """The cell in which the methods of a class find it, as `super()` and `__class__`: of `CLASS_CELL`, which goes."""
    cell = vars(made)[CLASS_CELL].__closure__[0]
    delattr(made, CLASS_CELL)
    return cell


def change_class(there: type, mine: type, undo: list[Undo]) -> None:
    """Give the library's class the attributes and the bases of another one."""
    if type(mine) is not type(there) or "__slots__" in vars(mine):
        raise CellError(f"class {there.__name__} can have no other metaclass here, and no __slots__")
    bases = there.__bases__
    if bases != mine.__bases__:
        try:
            there.__bases__ = mine.__bases__
        except TypeError:
            names = ", ".join(base.__name__ for base in bases)
            raise CellError(f"class {there.__name__} must derive from {names}") from None
        undo.append(lambda: setattr(there, "__bases__", bases))
    for name in [name for name in vars(there) if name not in vars(mine) and name not in NOT_COPIED]:
        before = vars(there)[name]
        delattr(there, name)
        undo.append(lambda name=name, before=before: setattr(there, name, before))
    for name, value in vars(mine).items():
        if name not in NOT_COPIED:
            set_attribute(there, name, value, undo)


def our_modules() -> list[types.ModuleType]:
    """The modules of the course that this process has imported."""
    return [
        module
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] in ("course_lib", "course_kit") and module is not None
    ]


def replace_object(old: Any, new: Any) -> None:
    """Replace an object by another one in each module of the course that has it."""
    for module in our_modules():
        for name in [name for name, value in vars(module).items() if value is old]:
            setattr(module, name, new)


def rebind(there: Any, mine: Any, undo: list[Undo], runs: bool = True) -> None:
    """Put an object in place of another one, in each module of the course that has it.

    runs: False where no kernel runs before that is undone, so that there is nothing to forget.
    """
    of_triton = runs and (is_kernel(there) or is_kernel(mine))
    if of_triton:
        undo.append(forget_kernels)  # when all of them are back
    undo.append(lambda: replace_object(mine, there))  # in modules imported in the meantime
    for module in our_modules():
        for name in [name for name, value in vars(module).items() if value is there]:
            set_attribute(module, name, mine, undo)
    if of_triton:
        forget_kernels()


def forget_compiled() -> None:
    """Have torch.compile look at functions anew."""
    if dynamo := sys.modules.get("torch._dynamo"):
        dynamo.reset()


def forget_kernels() -> None:
    """Forget what Triton has compiled, tuned and rewritten: a compiled kernel keeps the functions that it calls."""
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    kernels: dict[int, bool] = {}  # by type: there are many values, and few types
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").partition(".")[0] in ("triton", "torch"):
            continue
        for value in list(getattr(module, "__dict__", {}).values()):
            kind = id(type(value))
            if kind not in kernels:
                kernels[kind] = is_kernel(value)
            while kernels[kind] and is_kernel(value) and not isinstance(value, types.ModuleType):
                if isinstance(value, JITFunction):
                    value.hash = None
                    value.used_global_vals = {}
                    value.device_caches.clear()
                elif isinstance(value, Autotuner):
                    value.cache.clear()
                elif hasattr(type(value), "rewritten_fn"):
                    value.rewritten_fn.pop(value.fn, None)
                value = getattr(value, "fn", None)


def take_back(undo: list[Undo]) -> None:
    """Undo changes, the last one first."""
    while undo:
        undo.pop()()


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
