"""scripts/doctor.py: what it says of a machine is what the course does there. Absences are planted; needs no GPU."""

import ast
import re
import shutil
import subprocess
import sys
import types
import warnings
from collections import namedtuple
from pathlib import Path

import pytest

import doctor
from tiny_course import ROOT

SCRIPT = ROOT / "scripts" / "doctor.py"
CARD = "NVIDIA H100 80GB HBM3, 81559 MiB, 550.54.15"


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """A machine without a program: PATH is an empty folder, which is returned."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.setenv(name, str(tmp_path))
    for name in ("CXX", "TRITON_INTERPRET"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(doctor, "DRIVERS", (str(folder / "driver"),))
    return folder


def program(file: Path, says: str) -> None:
    """A program that says it."""
    file.write_text(f"#!/bin/sh\necho '{says}'\n")
    file.chmod(0o755)


def machine(cuda=None, cards=(), driver=None) -> types.SimpleNamespace:
    """What `import torch` would give: built for CUDA `cuda`, with GPUs that it can use; `driver`: what it warns of."""

    def is_available():
        if driver:
            warnings.warn(driver, stacklevel=2)
        return bool(cards)

    gpu = types.SimpleNamespace(
        is_available=is_available, device_count=lambda: len(cards), get_device_properties=lambda number: cards[number]
    )
    mps = types.SimpleNamespace(is_available=lambda: False)
    version = types.SimpleNamespace(cuda=cuda, hip=None)
    return types.SimpleNamespace(
        __version__="2.13.0", version=version, cuda=gpu, backends=types.SimpleNamespace(mps=mps)
    )


def gpu(major: int, minor: int) -> types.SimpleNamespace:
    return types.SimpleNamespace(name="GPU", total_memory=80 * 2**30, major=major, minor=minor)


def facts(found) -> str:
    return "\n".join(f"{name} {fact}" for name, fact in found if name)


def troubles(found) -> str:
    return "\n".join(fact for name, fact in found if name is None)


def test_any_python_3_reads_it():
    ast.parse(SCRIPT.read_text(), feature_version=(3, 7))
    assert not re.search(r"\bmatch \w+:|capture_output=|text=True|removeprefix|removesuffix", SCRIPT.read_text())


def test_before_there_is_an_environment(bare):
    """With the Python that the environment would be made with, and no program on the path."""
    copy = bare.parent / "scripts" / "doctor.py"
    copy.parent.mkdir()
    shutil.copy(SCRIPT, copy)
    said = subprocess.run(
        [sys._base_executable, "-I", "-S", copy], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    for line in ("PyTorch       not yet", "nvcc          none", "C++ compiler  none", "Slurm         none"):
        assert line in said.splitlines()
    assert "This Python lacks the course. 'make lab' makes .venv" in said and "Traceback" not in said


@pytest.mark.parametrize("version, words", [((3, 9), "too old"), ((3, 14), "too new")])
def test_a_python_that_the_course_does_not_run_on(monkeypatch, version, words):
    monkeypatch.setattr(doctor.sys, "version_info", (*version, 0))
    assert f"Python {version[0]}.{version[1]} is {words}: the course needs" in troubles(doctor.look_python(False))


def test_python_without_what_makes_environments(monkeypatch):
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    assert "sudo apt install python3-venv" in troubles(doctor.look_python(False))


def test_a_small_machine(monkeypatch):
    Usage = namedtuple("Usage", "free")
    monkeypatch.setattr(doctor.os, "sched_getaffinity", lambda _: {0}, raising=False)
    monkeypatch.setattr(doctor, "number_in", lambda path: 2 * 2**30)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: Usage(3e9))
    said = troubles(doctor.look_machine(False))
    assert "One core" in said and "Less than 4 GiB of memory" in said and "make lab CPU=1" in said
    assert "disk" not in troubles(doctor.look_machine(True)), "the environment is there already"
    monkeypatch.setattr(doctor.platform, "system", lambda: "Darwin")
    assert "CUDA" not in troubles(doctor.look_machine(False))


def test_a_container_with_less_cores_than_its_machine(monkeypatch):
    monkeypatch.setattr(doctor.os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    for quota, cores in ((250000, 2), (50000, 1), (None, 64)):
        monkeypatch.setattr(doctor, "number_in", lambda path: quota if "cpu" in path else None)
        assert f"cores: {cores}," in facts(doctor.look_machine(True))


def test_tools_are_found_where_notebook_12_finds_them(bare, monkeypatch):
    """What raises CannotBuild there is named here, and the other way round."""
    torch = pytest.importorskip("torch")
    from course_lib.kernels import cpp

    monkeypatch.setattr(cpp.cpp_extension, "CUDA_HOME", None)
    looks = {
        cpp.require_compiler: lambda: doctor.look_compiler(False),
        cpp.require_torch_compile: lambda: doctor.look_compiler(True),
        cpp.find_nvcc: lambda: doctor.look_nvcc(torch),
    }

    def agree(missing):
        for needs, look in looks.items():
            if needs in missing:
                with pytest.raises(cpp.CannotBuild):
                    needs()
            else:
                needs()
            assert bool(troubles(look())) == (needs in missing), needs.__name__

    agree(missing=set(looks))
    program(bare / "nvcc", "Cuda compilation tools, release 13.0, V13.0.88")
    program(bare / "c++", "c++ 12.2.0")
    monkeypatch.setattr(doctor.sysconfig, "get_paths", lambda: {"include": str(bare)})
    monkeypatch.setattr(cpp.sysconfig, "get_path", lambda name: str(bare))
    agree(missing={cpp.require_torch_compile})
    (bare / "Python.h").touch()
    agree(missing=set())
    assert "CUDA 13.0" in facts(doctor.look_nvcc(torch))


def test_no_gpu(bare):
    found = list(doctor.look_gpu(machine()))
    assert facts(found) == "GPU none" and "No NVIDIA GPU" in troubles(found) and "recorded runs" in troubles(found)
    assert "TRITON_INTERPRET" not in troubles(found)


def test_drivers_are_those_that_course_lib_looks_for():
    names = re.search(r"for name in \((.*?)\)", (ROOT / "course_lib" / "__init__.py").read_text())[1]
    assert [f"/dev/{name}" for name in re.findall(r"\w+", names)] == [*doctor.DRIVERS]


def test_a_driver_of_no_gpu_that_pytorch_can_use(bare, monkeypatch):
    """As of WSL without NVIDIA's GPU, or of AMD's graphics: course_lib leaves kernels to a GPU there."""
    (bare / "driver").touch()
    said = troubles(doctor.look_gpu(machine()))
    assert "Set TRITON_INTERPRET=1, or" in said and f"a GPU's driver ({bare / 'driver'})" in said
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "TRITON_INTERPRET" not in troubles(doctor.look_gpu(machine()))


def test_a_gpu_that_pytorch_is_not_built_for(bare):
    program(bare / "nvidia-smi", CARD)
    said = troubles(doctor.look_gpu(machine()))
    assert CARD in said and "make lab without CPU=1" in said


def test_a_gpu_whose_driver_is_too_old(bare):
    program(bare / "nvidia-smi", CARD)
    said = troubles(doctor.look_gpu(machine("13.0", driver="The NVIDIA driver on your system is too old")))
    assert f"({CARD}), and PyTorch cannot use it: The NVIDIA driver on your system is too old" in said


def test_one_gpu_and_two(bare):
    one, two = (list(doctor.look_gpu(machine("13.0", [gpu(9, 0)] * n))) for n in (1, 2))
    assert "NCCL needs a GPU for each rank" in troubles(one) and not troubles(two)
    assert facts(two) == "\n".join(2 * ["GPU GPU, 80 GiB, compute capability 9.0"])
    assert "without FP8" in troubles(doctor.look_gpu(machine("13.0", [gpu(8, 0)] * 2)))


def test_nvcc_of_another_cuda_than_pytorchs(bare):
    program(bare / "nvcc", "Cuda compilation tools, release 12.4, V12.4.131")
    said = troubles(doctor.look_nvcc(machine("13.0", [gpu(9, 0)])))
    assert said.startswith("nvcc is of CUDA 12, PyTorch of CUDA 13") and not troubles(doctor.look_nvcc(machine("12.6")))


def test_what_is_missing_in_the_environment(bare, monkeypatch):
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    assert "nothing runs without it" in troubles(doctor.look_torch(*doctor.loaded("torch")))
    assert "12, 12b, 13 and 14b stop" in troubles(doctor.look_triton(None))
    assert all(extra in troubles(doctor.look_packages()) for extra in ("[lab]", "[hf]"))
    assert "course_lib is not installed" in troubles(doctor.look_clone())
    assert "does not submit" in troubles(doctor.look_slurm())


def test_a_module_that_is_there_and_does_not_load(monkeypatch, tmp_path):
    (tmp_path / "cut_short.py").write_text("raise OSError('libcudart.so.13: cannot open shared object file\\nmore')")
    monkeypatch.syspath_prepend(tmp_path)
    assert doctor.loaded("cut_short") == (None, "does not load: libcudart.so.13: cannot open shared object file")


def test_a_library_of_another_clone_is_named(monkeypatch, tmp_path):
    assert not troubles(doctor.look_clone())
    monkeypatch.setattr(doctor, "ROOT", str(tmp_path))
    assert f"course_lib comes from {ROOT}, and this is {tmp_path}" in troubles(doctor.look_clone())


def test_all_of_it_on_this_machine(capsys):
    doctor.main()
    said = capsys.readouterr().out
    names = [line.split("  ")[0] for line in said.splitlines()]
    for name in ("machine", "Python", "PyTorch", "GPU", "NCCL", "Triton", "nvcc", "C++ compiler", "Slurm"):
        assert name in names
    assert "What will not work here, and why:" in said or "All of the course works here." in said
