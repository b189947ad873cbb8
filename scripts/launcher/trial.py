"""Try a program in this process before anything is written: import it and parse its options."""

import contextlib
import importlib
import importlib.abc
import importlib.util
import io
import sys
from collections.abc import Iterator

from export import LIBRARY, imported_as, module_file
from launcher.first_error import describe_report
from launcher.program import Program, parse
from launcher.reports import describe
from rank_entry import open_library


class UnwrittenModules(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Import finder for a program's modules: from their texts, under their future file names."""

    def __init__(self, program: Program):
        names = [name for name in program.texts if name not in program.reference_modules]
        self.texts = {imported_as(name): program.texts[name] for name in names}
        self.files = {imported_as(name): module_file(program.library, name) for name in names}

    def find_spec(self, name, path=None, target=None):
        if name not in self.texts:
            return None
        file, package = self.files[name], self.files[name].stem == "__init__"
        spec = importlib.util.spec_from_loader(name, self, origin=str(file), is_package=package)
        if package:
            spec.submodule_search_locations += [str(file.parent), str(LIBRARY.joinpath(*name.split(".")[1:]))]
        spec.has_location = True
        return spec

    def get_source(self, name):
        return self.texts[name]

    def get_code(self, name):
        return self.source_to_code(self.texts[name], str(self.files[name]))


def library_modules() -> dict[str, object]:
    """Return the modules of the library that this process has imported."""
    return {name: module for name, module in sys.modules.items() if name.split(".")[0] == LIBRARY.name}


@contextlib.contextmanager
def unwritten(program: Program) -> Iterator[None]:
    """Inside, the library is as the ranks will see it, without a write to disk; on exit, this process is restored."""
    before, path, finders, argv = library_modules(), sys.path[:], sys.meta_path[:], sys.argv
    for name in before:
        del sys.modules[name]
    try:
        open_library(program.overlay, program.reference_modules)
        sys.meta_path.insert(0, UnwrittenModules(program))
        yield
    finally:
        for name in library_modules():
            del sys.modules[name]
        sys.modules.update(before)
        sys.path[:], sys.meta_path[:], sys.argv = path, finders, argv


def try_options(program: Program, options: list[str]) -> str | None:
    """Let the program parse its options once. Returns None if it accepts them, or why and where its import failed.

    Raises LaunchError for an unknown option, SystemExit for --help.
    """
    with unwritten(program):
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # each rank will print it
                module = importlib.import_module(f"{LIBRARY.name}.{program.module}")
        except (Exception, SystemExit) as error:
            texts = {str(module_file(program.library, name)): text for name, text in program.texts.items()}
            return describe_report(describe(error) | {"rank": None}, texts)
        sys.argv = [f"{program.path.name} --", *options]  # the name in its help
        if hasattr(module, "options"):
            parse(module.options, options, program.path)
    return None
