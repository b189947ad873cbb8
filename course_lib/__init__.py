"""The library of the course: one package per technique. What an exercise builds is spliced in from its notebook."""

from __future__ import annotations

import importlib
import importlib.machinery
import os
import sys


class InterpreterFinder:
    """Import finder that has Triton interpret kernels: it sets the knob once `triton.knobs` is loaded, which is before
    Triton decorates functions of its own.
    """

    def find_spec(self, name, path=None, target=None):
        if name != "triton.knobs" or not (spec := importlib.machinery.PathFinder.find_spec(name, path)):
            return None
        load = spec.loader.exec_module

        def load_and_set(module) -> None:
            load(module)
            set_interpreted(module)

        spec.loader.exec_module = load_and_set
        return spec


def set_interpreted(knobs) -> None:
    """Set Triton's knob for the interpreter. By default an assignment to a knob writes the environment as well."""
    before, knobs.propagate_env = knobs.propagate_env, False
    knobs.runtime.interpret = True
    knobs.propagate_env = before


def interpret_kernels() -> None:
    """Run this process's Triton kernels in the interpreter, those decorated from now on. The environment stays as it
    is, so that child processes (a job on a GPU node, for one) choose for themselves.
    """
    knobs = sys.modules.get("triton.knobs")
    if knobs is None:
        sys.meta_path.insert(0, InterpreterFinder())
    elif not knobs.runtime.interpret:  # Triton is imported, by torch._dynamo for one: decorate its functions again
        set_interpreted(knobs)
        for module in ("triton.language.standard", "triton.language.random", "triton.language"):
            importlib.reload(importlib.import_module(module))


if "TRITON_INTERPRET" not in os.environ and not any(
    os.path.exists(f"/dev/{name}") for name in ("nvidiactl", "kfd", "dxg")
):
    interpret_kernels()
