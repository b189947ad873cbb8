"""Triton's interpreter, made quick: on a laptop, kernels with helpers and sums run in a third of the time.

Before each call of a function in a kernel (`tl.sum` is one) it looks through Triton's language for what it has to
replace, and for each value it makes its type and shape anew. Imported, this module has it look once, replace once a
launch, and make each type once. The numbers are the same. On a GPU nothing is interpreted, and nothing changes.
"""

from __future__ import annotations

import functools
import inspect
import math

import triton
import triton.language as tl
from triton.runtime import interpreter


def replace_once_a_launch() -> None:
    """Look for what is replaced once in this process, and replace it once a launch."""
    replace = interpreter._patch_lang
    builtins_of = functools.cache(
        lambda place: [n for n, value in inspect.getmembers(place) if tl.core.is_builtin(value)]
    )

    def replace_builtins(place, builder, scope) -> None:
        for name in builtins_of(place):
            value = getattr(place, name)
            if tl.core.is_builtin(value):  # not replaced yet
                interpreter._patch_attr(place, name, value, builder, scope)

    def replace_in(function):
        if not tl.core.is_builtin(tl.load):  # a launch runs
            return interpreter._LangPatchScope()
        scope = replace(function)
        replace_builtins(tl.core, interpreter.interpreter_builder, scope)  # Triton's own functions look there
        interpreter._patch_lang_core(tl.core, scope)
        return scope

    interpreter._patch_builtin, interpreter._patch_lang = replace_builtins, replace_in


def make_types_once() -> None:
    """Keep the types of blocks, the shapes of tensors, and NumPy's types of Triton's: a kernel has few of them."""
    core, make_block, numpy_type = tl.core, tl.core.block_type.__init__, interpreter._get_np_dtype
    blocks, numpy_types = {}, {}

    def init_block(self, element_ty, shape) -> None:
        sizes = [size.value if isinstance(size, core.constexpr) else size for size in shape]
        key = (element_ty.name, getattr(element_ty, "address_space", None), *sizes)
        if key not in blocks:
            make_block(self, element_ty, shape)
            blocks[key] = vars(self).copy()
        vars(self).update(blocks[key])

    @functools.cache
    def numel_and_shape(sizes) -> tuple:
        return core.constexpr(math.prod(sizes)), core.tuple([core.constexpr(size) for size in sizes])

    def init_tensor(self, handle, type) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = numel_and_shape(tuple(type.shape) if type.is_block() else ())

    def known_numpy_type(triton_type):
        if triton_type.name not in numpy_types:
            numpy_types[triton_type.name] = numpy_type(triton_type)
        return numpy_types[triton_type.name]

    core.block_type.__init__, core.tensor.__init__ = init_block, init_tensor
    interpreter._get_np_dtype = known_numpy_type


if triton.knobs.runtime.interpret and hasattr(interpreter, "_LangPatchScope"):
    replace_once_a_launch()
    make_types_once()
