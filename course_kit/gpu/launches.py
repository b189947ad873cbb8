"""Records of kernel launches: a call with the right result may have launched no kernel.

A library function inside an operator called `fused_…` gives the right result, so checks look at the launches too.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from triton.runtime.autotuner import Autotuner
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction


@dataclass(frozen=True)
class Launch:
    """One launch of a Triton kernel with its arguments: enough to compile it, or to run it again."""

    kernel: Any  # JITFunction, or InterpretedFunction on a machine without a GPU
    grid: tuple[int, ...]
    args: tuple
    meta: dict[str, Any] = field(default_factory=dict)  # constants of the kernel and num_warps, num_stages

    @property
    def name(self) -> str:
        return self.kernel.fn.__name__


def first_configuration(kernel, meta: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the kernel under an autotuner, and `meta` with the first of its configurations; other kernels are returned
    unchanged.
    """
    if isinstance(kernel, Autotuner):
        return kernel.fn, kernel.configs[0].all_kwargs() | meta
    return kernel, dict(meta)


@contextlib.contextmanager
def record_launches() -> Iterator[list[Launch]]:
    """Yield a list that collects the launches of Triton kernels inside the context, in order."""
    launches: list[Launch] = []

    def recorded(run):
        def recording(kernel, *args, grid, warmup, **meta):
            result = run(kernel, *args, grid=grid, warmup=warmup, **meta)
            named = dict(zip(kernel.arg_names, args, strict=False)) | meta
            launches.append(Launch(kernel, tuple(grid(named) if callable(grid) else grid), args, meta))
            return result

        return recording

    with contextlib.ExitStack() as patches:
        for runner in (InterpretedFunction, JITFunction):
            patches.enter_context(mock.patch.object(runner, "run", recorded(runner.run)))
        yield launches
