"""What the functions of an answer are called with during its check, in this process and on ranks.

A parameter that has one value in the check may be ignored by an answer, or hard-coded: nobody would notice.
"""

import ast
import contextlib
import hashlib
import json
import os
import re
import types
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

NOT_PARAMETERS = {"self", "cls", "ctx"}
ENOUGH = 3  # values that are kept of each parameter
DEPTH = 6  # how far into a value its attributes and items are looked at
LARGE = 100_000  # elements: of larger tensors the shape counts
_kept: dict[tuple, set[str]] = {}  # of this process: what it has written, by (folder, function, parameter)


def recording(source: str, folder: Path) -> str:
    """A cell whose functions note what they are called with; kernels are left alone: see `kernels_record`."""
    tree, directive = ast.parse(source), source.split("\n")[0]
    for node in ast.walk(tree):
        for each in getattr(node, "body", []) if isinstance(node, (ast.Module, ast.ClassDef)) else ():
            if not isinstance(each, ast.FunctionDef) or is_kernel(each):
                continue
            name = f"{node.name}.{each.name}" if isinstance(node, ast.ClassDef) else each.name
            own = [arg.arg for arg in (*each.args.posonlyargs, *each.args.args, *each.args.kwonlyargs)]
            own += [arg.arg for arg in (each.args.vararg, each.args.kwarg) if arg]
            note = f"__import__('recorded_calls').record({str(folder)!r}, {name!r}, {own!r}, locals())"
            has_text = isinstance(each.body[0], ast.Expr) and isinstance(each.body[0].value, ast.Constant)
            each.body[has_text:has_text] = ast.parse(note).body
    return f"{directive}\n{ast.unparse(tree)}\n"


def is_kernel(function: ast.FunctionDef) -> bool:
    return any("jit" in ast.unparse(each) or "tunable" in ast.unparse(each) for each in function.decorator_list)


@contextlib.contextmanager
def kernels_record(names: set[str], folder: Path) -> Iterator[None]:
    """Inside, interpreted kernels with these names note what they are called with."""
    try:
        from triton.runtime.interpreter import GridExecutor, InterpretedFunction
    except ImportError:
        yield
        return
    before = {cls: cls.__call__ for cls in (GridExecutor, InterpretedFunction)}

    def noting(call):
        def noted(kernel, *args, **kwargs):
            function = kernel.fn
            if function.__name__ in names:
                own = list(function.__code__.co_varnames[: function.__code__.co_argcount])
                record(str(folder), function.__name__, own, dict(zip(own, args, strict=False)) | kwargs)
            return call(kernel, *args, **kwargs)

        return noted

    for cls, call in before.items():
        cls.__call__ = noting(call)
    try:
        yield
    finally:
        for cls, call in before.items():
            cls.__call__ = call


def record(folder: str, function: str, parameters: list[str], values: dict) -> None:
    """Note the values of a call's parameters, those that this process has not noted before."""
    if torch.compiler.is_compiling():
        return
    with _disable_current_modes():  # a check may count operators
        new = new_values(folder, function, parameters, values)
    if new:
        with open(f"{folder}/{os.getpid()}.calls", "a", encoding="utf-8") as file:
            file.writelines(json.dumps(each) + "\n" for each in new)


def new_values(folder: str, function: str, parameters: list[str], values: dict) -> list[list[str]]:
    """[function, parameter, digest, text] of each value that this process has not noted before."""
    new = []
    for name in parameters:
        kept = _kept.setdefault((folder, function, name), set())
        if name in NOT_PARAMETERS or len(kept) >= ENOUGH:
            continue
        seen = hashlib.sha1(seen_as(values.get(name)).encode()).hexdigest()
        if seen not in kept:
            kept.add(seen)
            new.append([function, name, seen, " ".join(seen_as(values.get(name)).split())[:80]])
    return new


def seen_as(value, depth: int = DEPTH) -> str:
    """A value as text: the same text means that the check would not notice one in place of the other."""
    if isinstance(value, torch.Tensor):
        content = ""
        plain = type(value) in (torch.Tensor, nn.Parameter) and value.is_contiguous() and value.numel() < LARGE
        if plain and value.untyped_storage().nbytes() >= value.nbytes:  # one that was freed has fewer
            with contextlib.suppress(Exception), torch.no_grad():  # of a copy: numpy() makes a storage unresizable
                content = hashlib.sha1(value.detach().clone().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        return f"{value.dtype} {tuple(value.shape)} {value.stride()} {value.requires_grad} {content}"
    if isinstance(value, (int, float, complex, str, bytes, type(None), torch.dtype, torch.device)):
        return repr(value)
    if isinstance(value, nn.Module):
        shapes = [f"{parameter.dtype} {tuple(parameter.shape)}" for parameter in value.parameters()]
        return f"{value!r} {value.training} {shapes}"
    if isinstance(value, dist.ProcessGroup):
        return str(dist.get_process_group_ranks(value))
    if isinstance(value, types.FunctionType):
        return f"{value.__module__}.{value.__qualname__} {value.__code__.co_firstlineno}"
    if isinstance(value, type) or depth == 0:
        return getattr(value, "__qualname__", type(value).__qualname__)
    if isinstance(value, dict):
        items = [f"{seen_as(key, depth - 1)}: {seen_as(item, depth - 1)}" for key, item in list(value.items())[:200]]
        return f"{type(value).__name__} {items}"
    if isinstance(value, (list, tuple, set, frozenset)):
        return f"{type(value).__name__} {[seen_as(item, depth - 1) for item in list(value)[:20]]}"
    if hasattr(value, "handle"):  # of an interpreted kernel
        return f"{value.dtype} {getattr(value.handle, 'data', '')}"
    if hasattr(value, "__dict__"):
        return f"{type(value).__qualname__} {seen_as(vars(value), depth - 1)}"
    return re.sub(r" at 0x\w+", "", f"{type(value).__qualname__} {value!r}")


def recorded(folder: Path) -> dict[tuple[str, str], set[str]]:
    """The values, by (function, parameter)."""
    found: dict[tuple[str, str], set[str]] = {}
    for file in folder.glob("*.calls"):
        for line in file.read_text(encoding="utf-8").splitlines():
            function, name, seen, text = json.loads(line)
            found.setdefault((function, name), set()).add((seen, text))
    return found


def with_one_value(folder: Path) -> list[tuple[str, str, str]]:
    """(function, parameter, its value) of each parameter that has had one value alone."""
    return [(*key, next(iter(values))[1]) for key, values in sorted(recorded(folder).items()) if len(values) == 1]
