"""Replace parts of a running library: code of functions, methods, attributes of classes, Triton kernels.

Each change is recorded as a function that undoes it. Anything that torch.compile and Triton have compiled from the old
parts is dropped.
"""

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

from course_kit.exercises.cells import CellError

MISSING = object()
CLASS_CELL = "__answer_class__"  # a function that a class is compiled with
# Attributes that Python, or the metaclass, makes for each class.
NOT_COPIED = {"__dict__", "__weakref__", "__module__", "__qualname__", "__doc__", "__firstlineno__", "_backward_cls"}
NOT_COPIED |= {"__static_attributes__", "__annotate__", "__annotate_func__", "__annotations_cache__"}
OF_A_FUNCTION = "__code__", "__defaults__", "__kwdefaults__", "__doc__", "__annotations__"
Undo = Callable[[], object]


def is_kernel(value: Any) -> bool:
    """Return True for a function that Triton compiles or interprets."""
    return str(type(value).__module__).partition(".")[0] == "triton"


def raw(value: Any) -> types.FunctionType | None:
    """Return the plain function under the decorators of `value`; None if there is none."""
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


def swap_code(current: types.FunctionType, mine: types.FunctionType, undo: list[Undo]) -> None:
    """Let the library's function run another function's code. The undo drops attributes that are set in between."""
    before, stored = {name: getattr(current, name) for name in OF_A_FUNCTION}, dict(vars(current))

    def restore() -> None:
        for name, value in before.items():
            setattr(current, name, value)
        vars(current).clear()
        vars(current).update(stored)

    mine = forwarding(mine) if mine.__code__.co_freevars else mine
    for name in OF_A_FUNCTION:
        setattr(current, name, getattr(mine, name))
    undo.append(restore)


def forwarding(mine: Callable) -> types.FunctionType:
    """Return a function that calls another one and has no closure, so that its code can be swapped in."""

    def forward(*args, _to=mine, **kwargs):
        return _to(*args, **kwargs)

    forward.__doc__, forward.__annotations__ = mine.__doc__, getattr(mine, "__annotations__", {})
    return cast(types.FunctionType, forward)


def lead_to(current: Any, mine: Any, undo: list[Undo]) -> None:
    """Let a function of the library that is to be rebound call the new one, wherever a reference to it is kept. The
    library's decorators stay on it.
    """
    function = raw(current)
    if isinstance(current, type) or is_kernel(current) or function is None or function.__code__.co_freevars:
        return
    swap_code(function, forwarding(mine if function is current else raw(mine) or mine), undo)
    clear_cache(current, undo)


def clear_cache(function: Any, undo: list[Undo]) -> None:
    """Clear the results that functools.cache keeps."""
    if clear := getattr(function, "cache_clear", None):
        clear()
        undo.append(clear)


def clear_caches(module: types.ModuleType) -> None:
    """Clear the results that functools.cache keeps for a module's functions: replaced parts may have computed them."""
    for value in list(vars(module).values()):
        if clear := getattr(value, "cache_clear", None):
            clear()


def holds_cell(made: Any) -> bool:
    """Return True if a class is still a class after its decorators."""
    return isinstance(made, type) and CLASS_CELL in vars(made)


def take_class_cell(made: type) -> types.CellType:
    """Return the closure cell through which the methods of a class find it, for `super()` and `__class__`, and remove
    the function CLASS_CELL that gives access to it.
    """
    cell = vars(made)[CLASS_CELL].__closure__[0]
    delattr(made, CLASS_CELL)
    return cell


def change_class(current: type, mine: type, undo: list[Undo]) -> None:
    """Give the library's class the attributes and the bases of another class."""
    if type(mine) is not type(current) or "__slots__" in vars(mine):
        raise CellError(f"class {current.__name__} cannot have another metaclass or __slots__ here")
    bases = current.__bases__
    if bases != mine.__bases__:
        try:
            current.__bases__ = mine.__bases__
        except TypeError:
            names = ", ".join(base.__name__ for base in bases)
            raise CellError(f"class {current.__name__} must derive from {names}") from None
        undo.append(lambda: setattr(current, "__bases__", bases))
    for name in [name for name in vars(current) if name not in vars(mine) and name not in NOT_COPIED]:
        before = vars(current)[name]
        delattr(current, name)
        undo.append(functools.partial(setattr, current, name, before))
    for name, value in vars(mine).items():
        if name not in NOT_COPIED:
            set_attribute(current, name, value, undo)


def our_modules() -> list[types.ModuleType]:
    """Return the modules of the course that this process has imported."""
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


def rebind(current: Any, mine: Any, undo: list[Undo], runs: bool = True) -> None:
    """Replace an object with another one in each module of the course that has it.

    runs: False if no kernel runs before the undo, so that there is nothing to forget.
    """
    of_triton = runs and (is_kernel(current) or is_kernel(mine))
    if of_triton:
        undo.append(forget_kernels)  # when all of them are back
    undo.append(lambda: replace_object(mine, current))  # in modules imported in the meantime
    for module in our_modules():
        for name in [name for name, value in vars(module).items() if value is current]:
            set_attribute(module, name, mine, undo)
    if of_triton:
        forget_kernels()


def forget_compiled() -> None:
    """Have torch.compile compile functions again."""
    if dynamo := sys.modules.get("torch._dynamo"):
        dynamo.reset()


def forget_kernels() -> None:
    """Drop everything that Triton has compiled, tuned and rewritten: a compiled kernel keeps the functions it calls."""
    kernels: dict[int, bool] = {}  # by type: there are many values and few types
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").partition(".")[0] in ("triton", "torch"):
            continue
        for value in list(getattr(module, "__dict__", {}).values()):
            kind = id(type(value))
            if kind not in kernels:
                kernels[kind] = is_kernel(value)
            if kernels[kind]:
                forget_kernel(value)


def forget_kernel(kernel: Any) -> None:
    """Drop the compiled forms of a kernel and of the kernels that it wraps."""
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    while is_kernel(kernel) and not isinstance(kernel, types.ModuleType):
        if isinstance(kernel, JITFunction):
            kernel.hash = None
            kernel.used_global_vals = {}
            kernel.device_caches.clear()
        elif isinstance(kernel, Autotuner):
            kernel.cache.clear()
        elif hasattr(type(kernel), "rewritten_fn"):
            kernel.rewritten_fn.pop(kernel.fn, None)
        kernel = getattr(kernel, "fn", None)


def take_back(undo: list[Undo]) -> None:
    """Undo changes, last one first."""
    while undo:
        undo.pop()()


@contextlib.contextmanager
def out_of_reach(module: types.ModuleType, owner: Any, targets: Iterable[str]) -> Iterator[None]:
    """Have the library's definitions of these names raise inside the context."""
    undo: list[Undo] = []
    try:
        for name in targets:
            current, stub = vars(owner)[name], refusal(name)
            function = None if owner is not module or is_kernel(current) else raw(current)
            if isinstance(current, type):
                for attribute, value in list(vars(current).items()):
                    if isinstance(value, (types.FunctionType, staticmethod, classmethod)):
                        set_attribute(current, attribute, staticmethod(stub), undo)
            elif function is not None and not function.__code__.co_freevars:
                swap_code(function, stub, undo)
            elif owner is module:
                rebind(current, stub, undo, runs=False)
            else:
                set_attribute(owner, name, stub, undo)
        yield
    finally:
        take_back(undo)


def refusal(name: str) -> types.FunctionType:
    """Return a function that replaces a target while a cell is executed. It has no closure, so its code can be swapped
    in.
    """
    text = f"{name} calls the library's {name}, stored under another name: write it yourself"
    space: dict = {}
    exec(f"def kept(*args, **kwargs):\n    raise AssertionError({text!r})", space)
    return space["kept"]
