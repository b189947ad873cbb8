"""An installed copy of the library, as on a node: a wheel, and of all packages only the base dependencies.

All modules of course_lib import, the planner answers, and a fit says that it needs SciPy. No network.
"""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
BUILD = "import sys; from setuptools.build_meta import build_wheel; print(build_wheel(sys.argv[1]))"
INSTALL = "-m pip install --quiet --no-deps --no-index --disable-pip-version-check --no-compile --target"
NO_EXTRAS = """
import sys
sys.path.insert(0, sys.argv[1])
class NoExtras:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[2].split(","):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, NoExtras)
"""
IMPORT_ALL = """
import importlib, pkgutil
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
FIT = """
import csv
from course_lib.best_config.calibrate_program import main
from course_lib.best_config.clusters import CLUSTERS
from course_lib.best_config.planner import estimate
from course_lib.five_d.layouts import Layout
from course_lib.single_gpu.config import PRESETS
rows = []
for gpus in (8, 16, 64):
    for text in (f"dp{gpus},zero1", f"dp{gpus},zero3", f"dp{gpus // 2},tp2,sp,zero1", f"dp{gpus // 4},pp4,zero1",
                 f"dp{gpus // 8},tp8,sp,zero1,mb2", f"dp{gpus // 8},pp2,tp4,sp,zero1"):
        said = estimate(PRESETS["llama3.2-1B"], CLUSTERS["H100"], Layout.parse(text), 256, 4096)
        values = "llama3.2-1B", gpus // 8, text, 256, 4096, 1, float(said.step_s), float(said.peak_bytes)
        rows.append(values)
with open("runs.csv", "w", newline="") as file:
    csv.writer(file).writerows([("model", "nodes", "layout", "batch", "seq", "ok", "step_s", "peak_bytes"), *rows])
main(["runs.csv", "--out", "ours.toml"])
"""
# Packages that are imported under another name than they are installed by.
IMPORTED_AS = {"pyyaml": "yaml", "myst-nb": "myst_nb", "jupyterlab": "jupyterlab,jupyter_server,IPython,ipykernel"}


def extras() -> str:
    """The modules of the packages that only extras install, with commas between them."""
    names = {
        re.match(r"[\w.-]+", need)[0].lower() for line in PROJECT["optional-dependencies"].values() for need in line
    }
    return ",".join(IMPORTED_AS.get(name, name.replace("-", "_")) for name in sorted(names - {PROJECT["name"]}))


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Run Python code where the wheel is installed and nothing of the extras is."""
    pytest.importorskip("setuptools", minversion="77", reason="setuptools 77 or newer builds the wheel")
    folder = tmp_path_factory.mktemp("wheel")
    source, out = folder / "source", folder / "installed"
    for name in ("course_lib", "course_kit"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    built = subprocess.run([sys.executable, "-c", BUILD, str(folder)], cwd=source, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    command = [sys.executable, *INSTALL.split(), str(out), str(folder / built.stdout.splitlines()[-1])]
    done = subprocess.run(command, capture_output=True, text=True)
    if "No module named pip" in done.stderr:
        pytest.skip("this environment has no pip")
    assert done.returncode == 0, done.stderr

    def run(code: str, *arguments: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-I", "-c", NO_EXTRAS + code, str(out), extras(), *arguments]  # -I: no PYTHONPATH
        return subprocess.run(command, cwd=folder, capture_output=True, text=True)

    return run


def test_a_wheel_imports_and_plans(installed):
    assert {"jupyterlab", "scipy", "matplotlib", "torchao", "IPython"} <= {*extras().split(",")}
    asked = installed(IMPORT_ALL)
    assert asked.returncode == 0, asked.stderr
    modules = [*(ROOT / "course_lib").rglob("*.py")]
    assert asked.stdout.splitlines()[-1] == f"{len(modules) - 1} modules"  # all but course_lib itself
    assert "tokens/s" in asked.stdout


def test_a_fit_without_scipy_says_so_in_one_line(installed):
    asked = installed(FIT)
    assert asked.returncode == 2, asked.stderr
    assert asked.stderr.splitlines()[-1].endswith("No module named 'scipy'; a fit needs SciPy: pip install scipy")
