"""Lazy exports of packages (PEP 562): a name is imported at its first use, so that `course_lib.five_d.Layout` needs no
torch.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable


def lazy_exports(package: str, names: dict[str, str]) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package. names: by module of course_lib, the names to export from it,
    separated by spaces.

    Nothing is cached: the exercises replace functions of the library, and a package has what its module has now.
    """
    module_of = {name: module for module, exported in names.items() for name in exported.split()}

    def get(name: str) -> object:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"course_lib.{module_of[name]}"), name)

    def directory() -> list[str]:
        return sorted({*vars(sys.modules[package]), *module_of})

    return get, directory
