"""An installed copy of the library: all modules of course_lib import from a wheel, and its planner answers."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILD = "import sys; from setuptools.build_meta import build_wheel; print(build_wheel(sys.argv[1]))"
IMPORT_ALL = """
import importlib, pkgutil, sys
sys.path.insert(0, sys.argv[1])
import course_lib
assert course_lib.__file__.startswith(sys.argv[1]), course_lib.__file__
names = [found.name for found in pkgutil.walk_packages(course_lib.__path__, "course_lib.")]
for name in names:
    if not name.endswith("__main__"):
        importlib.import_module(name)
from course_lib.best_config.tested import measured_layouts
assert len(measured_layouts().table)
from course_lib.best_config.program import main
main("--preset llama3-8B --cluster H100 --gpus 64 --batch 256".split())
extras = {"scipy", "matplotlib", "IPython", "ipywidgets", "jupyterlab", "torchao", "transformers"} & sys.modules.keys()
assert not extras, extras
print(len(names), "modules")
"""


def test_a_wheel_imports_and_plans(tmp_path):
    pytest.importorskip("setuptools", minversion="77", reason="setuptools 77 or newer builds the wheel")
    source, out = tmp_path / "source", tmp_path / "installed"
    for name in ("course_lib", "course_kit"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-c", BUILD, str(tmp_path)]
    built = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    zipfile.ZipFile(tmp_path / built.stdout.splitlines()[-1]).extractall(out)
    asked = subprocess.run(  # -I: no PYTHONPATH and no working directory
        [sys.executable, "-I", "-c", IMPORT_ALL, str(out)], cwd=tmp_path, capture_output=True, text=True
    )
    assert asked.returncode == 0, asked.stderr
    modules = [*(ROOT / "course_lib").rglob("*.py")]
    assert asked.stdout.splitlines()[-1] == f"{len(modules) - 1} modules"  # all but course_lib itself
    assert "tokens/s" in asked.stdout
