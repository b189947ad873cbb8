"""CUDA C++ without a GPU: `compiled` runs a kernel's own source on the CPU, by cuda_on_cpu.h, and
`check_with_nvcc` has the compiler read a launcher with all of PyTorch's headers.
"""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch.utils.cpp_extension import include_paths

needs_gcc = pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
needs_nvcc = pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")


def compiled(source: str, launches: dict[str, str], folder: Path) -> ctypes.CDLL:
    """The library of `source` with a function int NAME_on_cpu(grid x, y, block x, y, ARGUMENTS) for each kernel.

    launches: parameters of each kernel, as C++, by its name.
    """
    functions = []
    for name, parameters in launches.items():
        names = ", ".join(each.split()[-1].lstrip("*") for each in parameters.split(","))
        functions.append(
            f'extern "C" int {name}_on_cpu(unsigned gx, unsigned gy, unsigned bx, unsigned by, {parameters}) {{\n'
            f"    return launch({{gx, gy}}, {{bx, by}}, [&] {{ {name}({names}); }});\n}}\n"
        )
    file = folder / "kernels.cpp"
    file.write_text("\n".join(['#include "cuda_on_cpu.h"', source, *functions]))
    library = folder / "kernels.so"
    command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", f"-I{Path(__file__).parent}", file, "-o", library]
    subprocess.run(command, check=True)
    return ctypes.CDLL(library)


def pointer(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def check_with_nvcc(source: str, folder: Path) -> None:
    """nvcc's front end reads all of a source, host code too; linking it would take PyTorch for CUDA."""
    (folder / "operators.cu").write_text(source)
    command = ["nvcc", "-ptx", "-arch=sm_90", "-std=c++20", "-DTORCH_EXTENSION_NAME=course", "operators.cu"]
    found = subprocess.run(command + [f"-I{path}" for path in include_paths()], cwd=folder, capture_output=True)
    assert found.returncode == 0, found.stderr.decode()
