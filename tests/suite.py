"""How the suite is run: which part of it, in what order, by which worker, and what it says of it.

    pytest --nbmake --parts -n 2 tests notebooks                   # all of it: make test
    pytest --nbmake --parts -n 2 --concerning zero tests notebooks # one notebook: make test K=zero

A unit is what one worker runs at a stretch: a notebook, a notebook's exercises, or a file of tests. The files that
start, kill and count processes are one unit, so that they do not meet.
"""

import ast
import collections
import contextlib
import functools
import gc
import re
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TESTS = Path(__file__).parent
# Modules of tests find each other and their helpers by bare names, from folder to folder; so do ranks, which take over
# the path. This folder, which pytest has put there for conftest.py, goes from it: with it tests/kernels would be a
# package `kernels`. transformers looks for one, imports it, and then benchmarks/kernels.py is not found any more.
sys.path[:] = [place for place in sys.path if place != str(TESTS)]
sys.path += sorted({str(file.parent) for file in TESTS.glob("*/[a-z]*.py")})
NOTEBOOKS = {path.stem.partition("_")[0]: path for path in sorted((ROOT / "notebooks").glob("*.ipynb"))}
SCRIPTS = "scripts"  # what concerns no notebook
EXERCISES = "tests/scripts/test_answers.py"
PROCESSES = "ranks launch slurm_real sweep survival course_scripts lab_browser setup".split()
# The longest notebooks, and their exercises.
LONGEST_FIRST = "10 09 11 07 06 08 05 03 04 10b 13 14b 12 12b 02 01 14".split()
with contextlib.suppress(ImportError):  # a GPU node may not have Jupyter
    import nbmake.nb_run

    from course_kit.local_kernel import LocalKernelManager

    nbmake.nb_run.NotebookClient = functools.partial(
        nbmake.nb_run.NotebookClient, kernel_manager_class=LocalKernelManager
    )
NOTEBOOK_S, EXERCISES_S, SLOW_CHECK_S = 60, 30, 3  # what is longer is told at the end


def unit(nodeid: str) -> str:
    """The unit of a test or a notebook."""
    file, _, name = nodeid.partition("::")
    if file.endswith(".ipynb"):
        return file
    if file == EXERCISES and (found := re.search(r"\[(\d\d\w?_\w+)\]$", name)):
        return f"exercises of {found[1]}"
    return "tests of processes" if re.sub(r"^test_", "", Path(file).stem) in PROCESSES else file


def exercises_of(name: str) -> str | None:
    """The number of the notebook whose exercises a unit is, or None."""
    found = re.match(r"exercises of (\w+?)_", name)
    return found[1] if found else None


def notebook_of(file: Path) -> str | None:
    """The number of the notebook that a file of tests concerns: that of the module of its folder's package that it is
    named after, or the last one that it imports from, of that package if it does; None for the tests of scripts, and of
    instruments that know no notebook.
    """
    named = re.sub(r"^test_|_ranks$", "", file.stem)
    package = ROOT / "course_lib" / file.parent.name
    own = package / ("__init__.py" if named == package.name else f"{named}.py")
    imported = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "course_lib":
            place = ROOT.joinpath(*node.module.split("."))
            imported += [place.with_suffix(".py"), *(place / f"{name.name}.py" for name in node.names)]
    for modules in ([own], [module for module in imported if package in module.parents], imported):
        if found := set(map(notebook_behind, filter(Path.exists, modules))) - {None}:
            return max(found)
    return None


def notebook_behind(module: Path) -> str | None:
    """The number of the notebook that exports to a module of the library, or else to its package; None for none."""
    package = module.parent.name
    return exporting_notebooks().get(f"{package}.{module.stem}") or exporting_notebooks().get(package)


@functools.cache
def exporting_notebooks() -> dict[str, str]:
    """The number of the first notebook that exports to each module and each package."""
    found = {}
    for number, path in NOTEBOOKS.items():
        for module, package in re.findall(r"#\| export ((\w+)\.\w+)", path.read_text(encoding="utf-8")):
            found.setdefault(module, number)
            found.setdefault(package, number)
    return found


def chosen_notebook(word: str) -> str:
    """The number of the one notebook whose name has `word`, or SCRIPTS. Raises UsageError for another word."""
    found = [number for number, path in NOTEBOOKS.items() if word in path.stem.split("_")]
    found = found or [number for number, path in NOTEBOOKS.items() if word in path.stem]
    if word == SCRIPTS or len(found) == 1:
        return found[0] if found else SCRIPTS
    names = ", ".join(path.stem for path in NOTEBOOKS.values())
    raise pytest.UsageError(f"'{word}' names {len(found)} notebooks: give a part of one of {names}, or {SCRIPTS}")


def pytest_addoption(parser):
    parser.addoption("--concerning", metavar="WORD", help="only what concerns the notebook with this in its name")
    parser.addoption("--parts", action="store_true", help="say when each part ends, and at the end how long it took")


def pytest_configure(config):
    word = config.getoption("concerning")
    config.chosen = chosen_notebook(word) if word else None
    if config.getoption("parts") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Parts(config), "parts")


def pytest_ignore_collect(collection_path, config):
    """Do not even import what concerns other notebooks."""
    chosen = getattr(config, "chosen", None)
    if not chosen or collection_path.is_dir() or collection_path == ROOT / EXERCISES:
        return None
    if collection_path.suffix == ".ipynb":
        return True if collection_path != NOTEBOOKS.get(chosen) else None
    if collection_path.match("test_*.py"):
        return True if (notebook_of(collection_path) or SCRIPTS) != chosen else None
    return None


def pytest_collection_modifyitems(config, items):
    """What takes long comes first, so that no worker waits for it at the end: the tests of processes, which wait half
    of their time, beside the exercises and notebooks with most ranks; then the other notebooks, and the tests on ranks.
    """
    if config.chosen:  # of the exercises' file, which is collected whole
        concerns = {item: exercises_of(unit(item.nodeid)) in (None, config.chosen) for item in items}
        if config.chosen != SCRIPTS:
            concerns |= {item: False for item in items if unit(item.nodeid) == EXERCISES}
        config.hook.pytest_deselected(items=[item for item in items if not concerns[item]])
        items[:] = [item for item in items if concerns[item]]

    def place(item):
        name = unit(item.nodeid)
        number = exercises_of(name) or Path(name).suffix == ".ipynb" and Path(name).stem.partition("_")[0]
        if number in LONGEST_FIRST:
            return LONGEST_FIRST.index(number), name
        return -1 if name == "tests of processes" else len(LONGEST_FIRST) + ("_ranks." not in name), name

    items.sort(key=place)


def pytest_collection_finish():
    """A collection looks at what the tests make, not at PyTorch's million objects: an eighth of the tests' time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from xdist.scheduler import LoadScopeScheduling

    class ByUnit(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit(nodeid)

    config.option.loadscopereorder = False  # keep the order above
    return ByUnit(config, log)


class Parts:
    """Says when each unit has ended, and at the end how long all of them took."""

    def __init__(self, config):
        self.config, self.start = config, time.monotonic()
        self.left, self.seconds = collections.Counter(), collections.Counter()  # by unit: tests to come; seconds
        self.outcomes, self.tests, self.checks = collections.defaultdict(collections.Counter), {}, {}

    def say(self, text: str) -> None:
        seconds = int(time.monotonic() - self.start)
        self.config.get_terminal_writer().line(f"{seconds // 60:3}:{seconds % 60:02}  {text}", flush=True)

    def pytest_collection_finish(self, session):
        self.left = collections.Counter(unit(item.nodeid) for item in session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node, ids):
        self.left = collections.Counter(map(unit, ids))

    @pytest.hookimpl(wrapper=True)
    def pytest_report_teststatus(self):
        """No letters: a line for each unit says it."""
        category, _, word = yield
        return category, "", word

    def pytest_runtest_logreport(self, report):
        name = unit(report.nodeid)
        self.seconds[name] += report.duration
        self.tests[report.nodeid] = self.tests.get(report.nodeid, 0) + report.duration
        if report.failed:
            self.say(f"FAILED {report.nodeid}")
        if report.failed or report.skipped or report.when == "call":
            self.outcomes[name][report.outcome] += 1
        if report.when == "teardown":
            self.checks |= {what: value for what, value in report.user_properties if what.startswith("check ")}
            self.left[name] -= 1
            if self.left[name] == 0:
                counts = ", ".join(f"{count} {outcome}" for outcome, count in self.outcomes[name].items())
                ended = sum(count <= 0 for count in self.left.values())
                self.say(f"{ended:3} of {len(self.left)}  {name}: {counts}, {self.seconds[name]:.0f} s")

    def pytest_terminal_summary(self, terminalreporter):
        kinds = collections.Counter()
        for name, seconds in self.seconds.items():
            of_notebook = "the notebooks" if name.endswith(".ipynb") else "their exercises"
            kinds["the tests" if name.startswith("tests") else of_notebook] += seconds
        write = terminalreporter.write_line
        terminalreporter.section("where the time went")
        for name, seconds in kinds.most_common():
            write(f"{seconds:6.0f} s  {name}")
        write("The ten slowest tests:")
        for name, seconds in collections.Counter(self.tests).most_common(10):
            write(f"{seconds:6.0f} s  {name}")
        for what, limit in (("notebooks/", NOTEBOOK_S), ("exercises of", EXERCISES_S)):
            if over := [(name, s) for name, s in self.seconds.items() if name.startswith(what) and s > limit]:
                write(f"Over {limit} s, beside the other workers:")
                for name, seconds in sorted(over, key=lambda item: -item[1]):
                    write(f"{seconds:6.0f} s  {name}")
        slow = [(name, seconds) for name, seconds in self.checks.items() if seconds > SLOW_CHECK_S]
        if slow:
            write(f"Checks of exercises that took over {SLOW_CHECK_S} s:")
            for name, seconds in sorted(slow, key=lambda item: -item[1])[:10]:
                write(f"{seconds:6.1f} s  {name}")
