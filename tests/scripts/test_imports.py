"""Who imports whom: `[tool.importlinter]` in pyproject.toml holds the floors of the house. Needs no GPU."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = (ROOT / "pyproject.toml").read_text()


@pytest.fixture
def lint(monkeypatch):
    """The exit status of import-linter in a folder."""
    cli = pytest.importorskip("importlinter.cli")

    def run(folder: Path) -> int:
        monkeypatch.chdir(folder)
        monkeypatch.syspath_prepend(str(folder))
        return cli.lint_imports(no_cache=True)

    return run


def test_nothing_looks_up(lint):
    assert lint(ROOT) == 0


@pytest.mark.parametrize(
    "place, imported",
    [("zero/shards", "a_kit.ranks"), ("zero/shards", "a_lib.five_d"), ("single_gpu/data", "a_lib.zero")],
)
def test_an_import_that_looks_up_is_found(place, imported, lint, tmp_path, capsys):
    """The contracts on packages, in a tree of empty ones, where one function imports what it may not."""
    layers = tomllib.loads(SETTINGS)["tool"]["importlinter"]["contracts"][-1]["layers"]
    packages = [f"a_lib/{name.strip()}" for layer in layers for name in layer.split(":")]
    for name in ("a_lib", "a_kit", "a_kit/ranks", *packages):
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / name / "__init__.py").touch()
    start = "[[tool.importlinter.contracts]]"
    head, *contracts = SETTINGS.partition("[tool.importlinter]")[2].split(start)
    contracts = [each for each in contracts if "import no torch" not in each]  # it names modules, and imports of theirs
    contracts = [re.sub(r"^ignore_imports = .*\n", "", each, flags=re.M) for each in contracts]
    contracts = start.join(["[tool.importlinter]" + head, *contracts])
    contracts = contracts.replace("course_lib", "a_lib").replace("course_kit", "a_kit")
    (tmp_path / "pyproject.toml").write_text(contracts)
    assert lint(tmp_path) == 0
    (tmp_path / "a_lib" / f"{place}.py").write_text(f"def step():\n    import {imported}\n    return {imported}\n")
    assert lint(tmp_path) == 1
    assert f"a_lib.{place.replace('/', '.')} -> {imported}" in capsys.readouterr().out


def test_the_library_needs_torch_triton_and_numpy_alone(tmp_path):
    """A cluster's node has no more, and the plan of `make gpu` prints there."""
    own = ["course_lib", "course_kit", *(path.stem for path in (ROOT / "benchmarks").glob("*.py"))]
    torchs = "torch torchgen functorch triton numpy sympy mpmath networkx jinja2 markupsafe filelock fsspec".split()
    torchs += ["typing_extensions", "setuptools", "pkg_resources", "_distutils_hack", "packaging"]
    (tmp_path / "sitecustomize.py").write_text(f"""
import sys
from importlib.machinery import PathFinder
class NothingElse:
    @staticmethod
    def find_spec(name, path=None, target=None):
        first = name.partition(".")[0]
        found = PathFinder.find_spec(name, path, target)
        there = first in sys.stdlib_module_names or first.startswith("_sysconfigdata") or first in {[*own, *torchs]}
        return found if there or "setuptools" in str(found) else None
sys.meta_path = [NothingElse if finder is PathFinder else finder for finder in sys.meta_path]
""")
    every_module = """
import importlib, pkgutil, course_lib
names = [found.name for found in pkgutil.walk_packages(course_lib.__path__, "course_lib.")]
assert len(names) > 100
for name in names:
    name.endswith("__main__") or importlib.import_module(name)
"""
    for command in (["-c", every_module], ["benchmarks/gpu.py", "--plan"]):
        places = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
        done = subprocess.run([sys.executable, *command], cwd=ROOT, env=places, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
