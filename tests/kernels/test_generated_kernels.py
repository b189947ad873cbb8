"""The kernels recorded in data/ are torch.compile's for an H100: written again they are the same, they compile for one,
and in Triton's interpreter they give F.elu and the RMSNorm. Without a GPU.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

from course_kit.checks.guard_bands import GuardBands, guarded
from course_kit.gpu.compiled import compile_kernel
from course_lib.kernels.elu import expm1
from generated_kernels import kernel_sources, plain_kernel, plain_source

ROOT = Path(__file__).parents[2]
interpreted_only = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="runs Triton's interpreter")


@triton.jit
def rsqrt(x):
    return tl.rsqrt(x)


INTERPRETED = SimpleNamespace(expm1=expm1, rsqrt=rsqrt)


def recorded(name: str) -> str:
    return (ROOT / "data" / f"inductor_{name}_h100.py.txt").read_text()


def kernel(name: str, functions):
    (source,) = kernel_sources(recorded(name)).values()
    return plain_kernel(source, functions)


@interpreted_only
@pytest.mark.parametrize("n", [1, 255, 1024, 2500])
def test_recorded_elu_is_elu(n):
    x = guarded(3 * torch.randn(n, generator=torch.Generator().manual_seed(n)))
    with GuardBands() as bands:
        out = torch.empty_like(x)
        kernel("elu", INTERPRETED)[(triton.cdiv(n, 1024),)](x, out, n, XBLOCK=1024)
    bands.check()
    torch.testing.assert_close(out, F.elu(x), rtol=3 * 2**-24, atol=0.0)


@interpreted_only
@pytest.mark.parametrize("block", [1024, 4096])
def test_recorded_norm_is_the_norm(block):
    generator = torch.Generator().manual_seed(0)
    x, residual = torch.randn(2, 3, 4096, generator=generator)
    weight = torch.randn(4096, generator=generator)
    total, out = torch.empty_like(x), torch.empty_like(x)
    norm = kernel("rms_norm", INTERPRETED)
    norm[(3,)](x, residual, weight, total, out, 3, 4096, XBLOCK=1, R0_BLOCK=block)
    assert total.equal(x + residual)
    torch.testing.assert_close(out, F.rms_norm(x + residual, (4096,), weight, 1e-5), rtol=1e-5, atol=1e-5)


def test_recorded_kernels_compile_for_an_h100():
    x = torch.empty(4096, dtype=torch.float32)
    elu = compile_kernel(kernel("elu", libdevice), x, x, 100_000_000, XBLOCK=1024)
    assert elu.spilled_bytes == 0 and elu.shared_bytes == 0
    assert elu.ptx.count("ld.global.v4.b32") == elu.ptx.count("st.global.v4.b32") == 2  # 8 elements a thread
    row = torch.empty(4096, dtype=torch.bfloat16)
    norm = kernel("rms_norm", libdevice)
    sizes = {"XBLOCK": 1, "R0_BLOCK": 4096, "num_warps": 16}
    assert compile_kernel(norm, row, row, row, row, row, 8192, 4096, **sizes).spilled_bytes == 0


def test_recorded_texts_are_the_generators(tmp_path):
    if any(f"torch {torch.__version__.split('+')[0]}" not in recorded(name) for name in ("elu", "rms_norm")):
        pytest.skip("recorded with another PyTorch")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, ROOT / "benchmarks" / "record_inductor.py", tmp_path]
    subprocess.run(command, check=True, env=environment, timeout=300)
    for name in ("elu", "rms_norm"):
        assert portable((tmp_path / f"inductor_{name}_h100.py.txt").read_text()) == portable(recorded(name))


def portable(code: str) -> str:
    """Without the day, the builds' names, the temporary folder, and the hash of Triton's own files on this machine."""
    return re.sub(r"# torch .*|# kernel path: .*|'backend_hash': '\w*'", "", code)


def test_kernels_of_a_text():
    assert list(kernel_sources(recorded("elu"))) == ["triton_poi_fused_elu_0"]
    with pytest.raises(ValueError, match="CPU"):
        kernel_sources("cpp_fused_elu_0 = async_compile.cpp_pybinding(...)")
    (source,) = kernel_sources(recorded("elu")).values()
    lines = [line for line in source.splitlines() if "xnumel = 100000000" not in line]
    assert plain_source(source).splitlines() == lines[lines.index("@triton.jit") :]
