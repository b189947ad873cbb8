"""Report what this machine has, what will not work on it, and why: make doctor.

    python3 scripts/doctor.py

Any Python 3 runs it, with or without the environment (3.6 syntax, only the standard library, and PyTorch if
installed). It changes nothing. Its statements on notebooks follow their code: see `CannotBuild` in notebook 12,
`Ranks` in 03, `course_lib/__init__.py`.
"""

import importlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import textwrap
import warnings

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PYTHONS, OLDEST_TORCH = ((3, 11), (3, 12), (3, 13)), (2, 11)
DISK_GB = 10  # of the environment with PyTorch's CUDA build, and of what pip keeps of it
MEMORY_GIB = 4  # of notebook 10 (2 GiB with its eight ranks), JupyterLab, a browser and the system
DRIVERS = "/dev/nvidiactl", "/dev/kfd", "/dev/dxg"  # where there is one, course_lib/__init__.py has nothing interpreted
GiB = 2**30


def output_of(*command):
    """Return the output of a program, "" if it is missing or fails."""
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, universal_newlines=True, timeout=20
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def number_in(path):
    """Return the first number in a file of the kernel; None if there is none."""
    try:
        with open(path) as file:
            return int(re.match(r"\d+", file.read()).group())
    except (OSError, AttributeError):
        return None


def loaded(name):
    """Return (module, error) for a module that may be missing or fail to load."""
    if importlib.util.find_spec(name) is None:
        return None, "missing"
    try:
        return importlib.import_module(name), ""
    except Exception as error:  # a library of the system is missing, or the file is cut short
        return None, "does not load: {}".format(str(error).split("\n")[0][:200])


def look_python(in_environment):
    """Check this Python, and that it can create an environment."""
    version = sys.version_info[:2]
    yield "Python", "{}, {}".format(platform.python_version(), sys.prefix if in_environment else sys.executable)
    if version not in PYTHONS:
        yield None, (
            "Python {}.{} is too {}: the course needs 3.11, 3.12 or 3.13. Install one and name it: "
            "make lab PYTHON=python3.12"
        ).format(version[0], version[1], "old" if version < PYTHONS[0] else "new")
    elif not in_environment and importlib.util.find_spec("ensurepip") is None:
        yield None, "This Python cannot make environments: sudo apt install python3-venv"


def look_machine(in_environment):
    """Check cores, memory and disk, with the limits of a container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quota = number_in("/sys/fs/cgroup/cpu.max")  # microseconds of work in 0.1 s
    cores = min(cores, max(1, quota // 100000)) if quota else cores
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    memory = min(memory, number_in("/sys/fs/cgroup/memory.max") or memory)
    free = shutil.disk_usage(ROOT).free
    yield "machine", "{} {}, cores: {}, memory: {:.1f} GiB, free disk: {:.0f} GB".format(
        platform.system(), platform.machine(), cores, memory / GiB, free / 1e9
    )
    if cores < 2:
        yield None, "One core: everything runs; what is timed on several ranks says little."
    if memory < MEMORY_GIB * GiB:
        yield None, (
            "Less than {} GiB of memory: notebook 10 takes 2 with its eight ranks, and one of them may be killed. Shut "
            "down the kernels of other notebooks first."
        ).format(MEMORY_GIB)
    if not in_environment and free < DISK_GB * 1e9 and platform.system() != "Darwin":  # there is none for macOS
        yield None, "PyTorch's CUDA build needs {} GB of disk. Its CPU build is small: make lab CPU=1".format(DISK_GB)


def look_torch(torch, why):
    """Check PyTorch and the platform that it was built for."""
    if torch is None:
        yield "PyTorch", why
        yield None, "PyTorch {}: nothing runs without it. rm -rf .venv, then make lab".format(why)
        return
    if torch.version.cuda or torch.version.hip:
        built = "CUDA " + torch.version.cuda if torch.version.cuda else "ROCm " + torch.version.hip
    else:
        built = "the CPU" if platform.system() != "Darwin" else "macOS"
    yield "PyTorch", "{}, built for {}".format(torch.__version__, built)
    if tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST_TORCH:
        yield None, "PyTorch {} is older than {}.{}: the course's code does not run on it".format(
            torch.__version__, *OLDEST_TORCH
        )


def cards():
    """Return NVIDIA's GPUs as the driver lists them, without PyTorch."""
    return output_of("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader").splitlines()


def look_gpu(torch):
    """Check the GPUs: usable by PyTorch, or not and why, and the fallback."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        usable = torch is not None and torch.cuda.is_available()
    listed = cards()
    if usable:
        facts = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
        for card in facts:
            yield "GPU", "{}, {:.0f} GiB, compute capability {}.{}".format(
                card.name, card.total_memory / GiB, card.major, card.minor
            )
        if len(facts) == 1:
            yield None, (
                "One GPU: it runs the notebooks of one process. NCCL needs a GPU for each rank, so ranks are "
                "processes on the CPU, with gloo."
            )
        if torch.version.cuda and min((card.major, card.minor) for card in facts) < (8, 9):
            yield None, (
                "A GPU without FP8 (Ada, Hopper and later have it): notebook 14b multiplies in a wider type there. The "
                "results are right, the gain in time is missing."
            )
        return
    if torch is None:
        for card in listed or ["none"]:
            yield "GPU", card
        if listed:
            return
    elif torch.backends.mps.is_available():
        yield "GPU", "Apple's, through MPS"
    else:
        yield "GPU", "none that PyTorch can use" if listed else "none"
    if listed and torch.version.cuda is None:
        yield None, (
            "There is a GPU ({}), and this PyTorch cannot use it: it is the build for the CPU. For the other one: "
            "rm -rf .venv, then make lab without CPU=1"
        ).format(listed[0])
    elif listed:
        yield None, "There is a GPU ({}), and PyTorch cannot use it: {}".format(
            listed[0], str(warned[0].message).split("\n")[0] if warned else "torch.cuda.is_available() is False"
        )
    driver = next(filter(os.path.exists, DRIVERS), None)
    if driver and not os.environ.get("TRITON_INTERPRET"):
        yield None, (
            "Set TRITON_INTERPRET=1, or the kernels of notebooks 12 to 14b fail: where there is a GPU's driver ({}), "
            "they are not interpreted otherwise."
        ).format(driver)
    if not listed:
        yield None, (
            "No NVIDIA GPU: ranks are processes on the CPU, with gloo, and Triton's kernels (notebooks 12 to 14b) are "
            "interpreted. The results are right, times say nothing of a GPU. Figures of GPUs show recorded runs."
        )


def look_nccl(torch):
    """Check NCCL, which is part of PyTorch's CUDA build."""
    if torch is not None:
        has_nccl = torch.version.cuda and torch.distributed.is_available() and torch.distributed.is_nccl_available()
        yield "NCCL", ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else "none: gloo, which is in PyTorch"


def look_nvcc(torch):
    """Check the CUDA C++ compiler, found as notebook 12 finds it."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    nvcc = shutil.which("nvcc") or shutil.which(os.path.join(home, "bin", "nvcc"))
    release = re.search(r"release (\d+)\.(\d+)", output_of(nvcc, "--version")) if nvcc else None
    yield "nvcc", "{}, CUDA {}.{}".format(nvcc, *release.groups()) if release else "none"
    gpu = torch is not None and torch.version.cuda and torch.cuda.is_available()
    if not release:
        yield None, (
            "No nvcc (NVIDIA's CUDA toolkit): notebook 12 says 'not compiled' where it compiles CUDA C++ for an H100{}."
            " Triton has a compiler of its own and needs none."
        ).format(", and builds its operator in C++ in place of CUDA C++" if gpu else "")
    elif gpu and release.group(1) != torch.version.cuda.split(".")[0]:
        yield None, (
            "nvcc is of CUDA {}, PyTorch of CUDA {}: notebook 12 builds its operator in C++ in place of CUDA C++."
        ).format(release.group(1), torch.version.cuda)


def look_triton(torch):
    """Check Triton, for the kernels of notebooks 12 to 14b."""
    triton, why = loaded("triton")
    yield "Triton", getattr(triton, "__version__", why)
    if triton is None:
        yield None, "Triton is {}{}: notebooks 12, 12b, 13 and 14b stop where they import it. All others run.".format(
            why, " (there is none for macOS)" if platform.system() == "Darwin" else ""
        )


def look_compiler(in_environment):
    """Check the requirements of C++ and torch.compile on the CPU, as notebook 12 does."""
    compiler = os.environ.get("CXX", "c++").split()[0]
    path = shutil.which(compiler)
    version = output_of(path, "--version").split("\n")[0] if path else ""
    yield "C++ compiler", "{}, {}".format(path, version) if path else "none"
    if not path:
        yield None, (
            "No C++ compiler ({} is not on the path): notebook 12 skips its cells of torch.compile and of C++. Debian: "
            "sudo apt install g++"
        ).format(compiler)
    elif in_environment and not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")):
        yield None, (
            "No headers of this Python (Python.h): notebook 12 skips its cells of torch.compile. Debian: "
            "sudo apt install python3-dev"
        )


def look_packages():
    """Check the optional packages of the course."""
    if importlib.util.find_spec("jupyterlab") is None:
        yield None, (
            "No JupyterLab: this environment has only what a node needs. For the notebooks: .venv/bin/pip install -e "
            "'.[lab]'"
        )
    if importlib.util.find_spec("transformers") is None:
        yield None, (
            "No transformers: notebooks 01, 08 and 10b skip their comparisons with it. .venv/bin/pip install -e '.[hf]'"
        )


def look_clone():
    """Return whether the library that notebooks import is this folder's."""
    facts = importlib.util.find_spec("course_lib")
    location = os.path.dirname(os.path.dirname(os.path.realpath(facts.origin))) if facts else None
    if location != os.path.realpath(ROOT):
        yield None, (
            "course_lib {}, and this is {}: rm -rf .venv here (of a link, the link alone goes), then make lab"
        ).format("comes from " + location if location else "is not installed", ROOT)


def look_slurm():
    """Check Slurm, for the launcher's --slurm."""
    version = output_of("sbatch", "--version")
    yield "Slurm", version or ("sbatch, not set up" if shutil.which("sbatch") else "none")
    if not version:
        yield None, "No Slurm: the launcher's --slurm writes the script for sbatch, and does not submit it."


def inspect_all(in_environment):
    """Yield everything in display order: (name, fact), or (None, what will not work and why)."""
    yield from look_machine(in_environment)
    yield from look_python(in_environment)
    torch = None
    if in_environment:
        torch, why = loaded("torch")
        yield from look_torch(torch, why)
    else:
        yield "PyTorch", "not yet"
    yield from look_gpu(torch)
    if in_environment:
        yield from look_nccl(torch)
        yield from look_triton(torch)
    yield from look_nvcc(torch)
    yield from look_compiler(in_environment)
    yield from look_slurm()
    if in_environment:
        yield from look_packages()
        yield from look_clone()


def main():
    """Print what this machine has, then what will not work and why."""
    in_venv = os.path.realpath(sys.prefix) == os.path.realpath(os.path.join(ROOT, ".venv"))
    in_environment = in_venv or importlib.util.find_spec("course_lib") is not None
    facts = list(inspect_all(in_environment))
    for name, fact in facts:
        if name:
            print("{:13} {}".format(name, fact))
    troubles = [fact for name, fact in facts if name is None]
    print("\nWhat will not work here, and why:" if troubles else "\nAll of the course works here.")
    for trouble in troubles:
        print(textwrap.fill(trouble, 100, initial_indent="- ", subsequent_indent="  "))
    if not in_environment:
        print("\nThis Python lacks the course. 'make lab' makes .venv with it; then 'make doctor' knows more.")


if __name__ == "__main__":
    main()
