"""Where there is no GPU, the library has Triton interpret kernels: in its own process, and in no child of that."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="kernels run on the GPU")

CHILD = """
import subprocess, sys
child = [sys.executable, "-c", "import os; print(os.environ.get('TRITON_INTERPRET'), end=' ')"]
"""
SOFTMAX = """
import torch, triton
from course_lib.kernels.fused_softmax import softmax
print(triton.knobs.runtime.interpret, flush=True)
if triton.knobs.runtime.interpret:
    x = torch.randn(3, 50)
    torch.testing.assert_close(softmax(x), x.softmax(-1))
subprocess.run(child)
"""


def run(code: str, value: str | None = None) -> list[str]:
    """The words that a process prints, TRITON_INTERPRET being as the user has set it."""
    environment = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT)} | ({} if value is None else {"TRITON_INTERPRET": value})
    done = subprocess.run([sys.executable, "-c", CHILD + code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_the_choice_stays_in_the_process():
    light = "import course_lib; print({'torch', 'triton'} & set(sys.modules), flush=True); subprocess.run(child)"
    assert run(light + SOFTMAX) == ["set()", "None", "True", "None"]


def test_triton_may_have_been_imported_before():
    """Its own functions, such as tl.sum and tl.max, are interpreted all the same."""
    assert run("import torch._dynamo, triton.language as tl" + SOFTMAX) == ["True", "None"]


@pytest.mark.parametrize("value, interpreted", [("1", "True"), ("0", "False")])
def test_the_value_of_the_user_stays(value, interpreted):
    assert run("import course_lib" + SOFTMAX, value) == [interpreted, value]


def test_a_script_may_choose_the_interpreter():
    """As a rank on the CPU does beside a GPU, whatever the user has set for the other processes."""
    assert run("import course_lib; course_lib.interpret_kernels()" + SOFTMAX, "0") == ["True", "0"]


@pytest.mark.parametrize(
    "value, patched", [("1", "course_lib.kernels.interpreter"), ("0", "triton.runtime.interpreter")]
)
def test_the_interpreter_is_patched_only_where_kernels_are_interpreted(value, patched):
    """Whichever of the three packages is imported, also on its own."""
    code = "import importlib, sys; importlib.import_module('{}'); from triton.runtime import interpreter; "
    code += "print(interpreter._patch_lang.__module__)"
    for module in ("course_lib.kernels.sectors", "course_lib.flash_attention.first", "course_lib.fp8.rounding"):
        assert run(code.format(module), value) == [patched], module


def test_without_triton():
    code = "sys.modules['triton'] = None; import course_lib, course_lib.single_gpu.model; print('imported')"
    assert run(code) == ["imported"]


def test_another_assignment_to_a_knob_writes_the_environment_as_ever():
    assign = "import course_lib, os, triton; triton.knobs.cache.home_dir = '/elsewhere'"
    assert run(assign + "; print(os.environ['TRITON_HOME'])") == ["/elsewhere"]
