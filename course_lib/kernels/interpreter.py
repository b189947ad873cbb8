"""Patches that make Triton's interpreter quick: on a laptop, kernels with helpers and sums run in a third of the time.

Before each call of a function in a kernel (`tl.sum` is one) the interpreter searches Triton's language for what it has
to replace, and for each value it builds the type and the shape again. `install` makes it search once per process,
replace once per launch, and build each type once. The numbers are the same.

The package `course_lib.kernels` calls `install` when it is imported, and only where kernels are interpreted; every
kernel of the course comes from that package or imports it.
"""

from __future__ import annotations

import functools
import inspect
import math
from types import ModuleType
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def install() -> None:
    """Patch the interpreter of this process. A second call changes nothing, nor does a call if this version of
    Triton has other internals.
    """
    if hasattr(interpreter, "_LangPatchScope") and interpreter._patch_lang.__module__ != __name__:
        replace_once_per_launch()
        build_types_once()


def replace_once_per_launch() -> None:
    """Search for the functions to replace once per process, and replace them once per launch."""
    replace = interpreter._patch_lang
    builtin_names = functools.cache(
        lambda module: [name for name, value in inspect.getmembers(module) if tl.core.is_builtin(value)]
    )

    def replace_builtins(module: ModuleType, builder: Any, scope: Any) -> None:
        for name in builtin_names(module):
            value = getattr(module, name)
            if tl.core.is_builtin(value):  # not replaced yet
                interpreter._patch_attr(module, name, value, builder, scope)

    def replace_in(function: Any) -> Any:
        if not tl.core.is_builtin(tl.load):  # a launch is running
            return interpreter._LangPatchScope()
        scope = replace(function)
        replace_builtins(tl.core, interpreter.interpreter_builder, scope)  # where Triton's own functions look
        interpreter._patch_lang_core(tl.core, scope)
        return scope

    interpreter._patch_builtin, interpreter._patch_lang = replace_builtins, replace_in


def build_types_once() -> None:
    """Cache the types of blocks, the shapes of tensors, and the NumPy types of Triton's: a kernel has few of them."""
    core, build_block, numpy_type = tl.core, tl.core.block_type.__init__, interpreter._get_np_dtype
    blocks: dict[tuple, dict[str, Any]] = {}
    numpy_types: dict[str, Any] = {}

    def init_block(self, element_ty, shape) -> None:
        sizes = [size.value if isinstance(size, core.constexpr) else size for size in shape]
        key = (element_ty.name, getattr(element_ty, "address_space", None), *sizes)
        if key not in blocks:
            build_block(self, element_ty, shape)
            blocks[key] = vars(self).copy()
        vars(self).update(blocks[key])

    @functools.cache
    def numel_and_shape(sizes: tuple) -> tuple:
        return core.constexpr(math.prod(sizes)), core.tuple([core.constexpr(size) for size in sizes])

    def init_tensor(self, handle, type) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = numel_and_shape(tuple(type.shape) if type.is_block() else ())

    def cached_numpy_type(triton_type) -> Any:
        if triton_type.name not in numpy_types:
            numpy_types[triton_type.name] = numpy_type(triton_type)
        return numpy_types[triton_type.name]

    core.block_type.__init__, core.tensor.__init__ = init_block, init_tensor
    interpreter._get_np_dtype = cached_numpy_type
