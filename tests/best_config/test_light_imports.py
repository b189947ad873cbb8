"""The planner answers without torch, scipy and transformers, and packages import their names at first use. CPU."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import course_lib

HEAVY = ("torch", "triton", "scipy", "transformers", "pandas", "matplotlib")
ROOT = Path(course_lib.__file__).parents[1]
PACKAGES = sorted(path.parent.name for path in (ROOT / "course_lib").glob("*/__init__.py"))
QUESTIONS = [
    "--preset llama3-8B --gpus 64 --batch 1024 --tokens 15e12",
    "--preset llama3-405B --batch 2048 --seq 8192 --layout dp128,pp16,tp8,sp,zero1 --json",
    "--preset debug --gpus 8 --experts 8 --top-k 2 --shared 1",
    "--preset llama3-8B --gpus 16 --layout dp2,cp4,tp2,ulysses --cluster H200 --fp8",
]


def heavy_modules(program: str) -> list[str]:
    """Return the modules of HEAVY that a program of Python has imported in a process of its own."""
    report = f"import sys\nprint(*(name for name in {HEAVY} if name in sys.modules), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", f"{program}\n{report}"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stderr.split()


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_planner_answers_without_heavy_modules(question):
    program = f"from course_lib.best_config.program import main\nmain({question.split()})"
    assert heavy_modules(program) == []


def test_plain_data_needs_no_torch():
    program = """
from course_lib.best_config import Cluster, estimate, search
from course_lib.five_d import Layout
from course_lib.pipeline import one_f_one_b, validate
from course_lib.single_gpu import PRESETS, ModelConfig, param_count, peak_flops
import course_lib.tensor_parallel, course_lib.zero
assert str(Layout.parse("dp2,tp4,sp")) == "dp2,tp4,sp" and param_count(PRESETS["debug"]) > 0
"""
    assert heavy_modules(program) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_has_the_names_of_its_all(package):
    module = importlib.import_module(f"course_lib.{package}")
    assert module.__all__ and set(module.__all__) <= set(dir(module))
    assert all(getattr(module, name) is not None for name in module.__all__)
    names: dict[str, object] = {}
    exec(f"from course_lib.{package} import *", names)
    assert set(module.__all__) <= set(names)


def test_an_unknown_name_of_a_package_is_an_error():
    with pytest.raises(ImportError, match="cannot import name 'ZeroOptimiser' from 'course_lib.zero'"):
        from course_lib.zero import ZeroOptimiser  # noqa: F401
    with pytest.raises(AttributeError, match="module 'course_lib.zero' has no attribute 'shard'"):
        importlib.import_module("course_lib.zero").shard


def test_a_replaced_function_is_replaced_in_its_package(monkeypatch):
    from course_lib import zero
    from course_lib.zero import sharded_models

    monkeypatch.setattr(sharded_models, "fully_shard", test_plain_data_needs_no_torch)
    assert zero.fully_shard is test_plain_data_needs_no_torch
