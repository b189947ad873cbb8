"""A kernel as text, with all functions that it calls, to send it to a process that cannot unpickle it."""

import ast
import importlib
import inspect
import linecache
import textwrap
import types
from typing import Any, TypedDict

import triton
import triton.language as tl
from triton.runtime.jit import ConstexprFunction, KernelInterface


class Source(TypedDict):
    """One function's text, from its `def` on, and the meaning of the names in it."""

    name: str
    module: str
    text: str
    file: str
    line: int  # of the `def`
    decorator: str  # Triton's: jit, or constexpr_function
    modules: dict[str, str]
    constants: dict[str, Any]
    functions: dict[str, str]  # full names


def full_name(kernel) -> str:
    """Return a kernel's name with its module: two modules may have helpers of the same name."""
    return f"{kernel.fn.__module__}.{kernel.fn.__qualname__}"


def sources(kernel, functions: dict[str, Source] | None = None) -> dict[str, Source]:
    """Return the sources of the kernel and of all functions that it calls, the kernel's first, by `full_name`."""
    functions = {} if functions is None else functions
    function = kernel.fn
    lines, first = inspect.getsourcelines(function)
    tree = ast.parse(textwrap.dedent("".join(lines))).body[0]
    above = tree.lineno - 1  # lines of decorators
    text = textwrap.dedent("".join(lines[above:]))
    source = functions[full_name(kernel)] = Source(
        name=function.__name__,
        module=function.__module__,
        text=text,
        file=inspect.getsourcefile(function) or "",
        line=first + above,
        decorator="constexpr_function" if isinstance(kernel, ConstexprFunction) else "jit",
        modules={},
        constants={},
        functions={},
    )
    for name in {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}:
        value = function.__globals__.get(name)
        if isinstance(value, types.ModuleType):
            source["modules"][name] = value.__name__
        elif isinstance(value, tl.constexpr):
            source["constants"][name] = value.value
        elif isinstance(value, (KernelInterface, ConstexprFunction)):
            source["functions"][name] = full_name(value)
            if full_name(value) not in functions:
                sources(value, functions)
    return functions


def rebuild(functions: dict[str, Source]):
    """Return the kernel again, to be compiled or interpreted as this process does. Each function is alone in a file of
    its full name, from line 1 on, so the compiler's locations name the function.
    """
    spaces, made = {}, {}
    for name, source in functions.items():
        # the compiler tells functions of the same name apart by their module; the interpreter looks for tl in each
        space = spaces[name] = {"__name__": source["module"], "triton.language": tl}
        space |= {alias: importlib.import_module(module) for alias, module in source["modules"].items()}
        space |= {alias: tl.constexpr(value) for alias, value in source["constants"].items()}
        text = source["text"]
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)  # Triton reads the text there
        exec(compile(text, name, "exec"), space)
        made[name] = getattr(triton, source["decorator"])(space[source["name"]])
    for name, source in functions.items():
        spaces[name] |= {alias: made[called] for alias, called in source["functions"].items()}
    return made[next(iter(functions))]
