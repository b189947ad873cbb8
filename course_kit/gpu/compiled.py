"""Compile a Triton kernel for a GPU that this machine does not have, and read what the compiler decided.

Triton's compiler needs no GPU, only its wheel: it brings LLVM and NVIDIA's assembler. A laptop can therefore tell how
many registers a thread will hold, whether any spill to memory, how much shared memory a block needs, and which lane of
which warp loads which element. The last answer is the layout; `transactions` counts memory traffic with it.

The compiler runs in a process of its own, since the interpreter and the compiler cannot share one: Triton decides at
its import which of the two a `@triton.jit` function is. The kernels travel as source text.

    notebook's process (interpreter)          a second process (compiler)
    kernel, arguments  ── source, types ──▶   Python ▶ TTIR ▶ TTGIR (layouts) ▶ LLVM ▶ PTX ▶ cubin (registers)
    Compiled           ◀─────────────────
"""

import contextlib
import inspect
import io
import os
import pickle
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import triton
from triton._C.libtriton import native_specialize_impl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource

import course_lib
from course_kit.gpu.accesses import Access, find_accesses, group
from course_kit.gpu.launches import Launch, first_configuration
from course_kit.gpu.sources import Source, rebuild, sources

OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")
TENSOR_MEMORY = 512  # columns of 128 lanes x 32 bits, from compute capability 10 on (PTX ISA, tcgen05.alloc)


@dataclass(frozen=True)
class Compiled:
    """The compiler's result for one kernel. Spills are bytes that a thread writes to memory for lack of registers."""

    name: str
    capability: int
    registers: int  # per thread
    spilled_bytes: int  # per thread
    shared_bytes: int  # per block
    num_warps: int
    accesses: list[Access]
    ttgir: str
    ptx: str
    report: str  # the log of NVIDIA's assembler, with warnings
    cubin: bytes  # the machine code, as a GPU loads it


def compile_kernel(kernel, *args, capability: int = 90, **meta) -> Compiled:
    """Compile `kernel` for `capability`, specialized to these arguments as by a launch `kernel[grid](*args, **meta)`.

    `meta` has the kernel's constants, and num_warps and num_stages unless they are 4 and 3. Raises ValueError if the
    kernel does not compile: the first line says what is wrong, the lines below it show the compiler's location.
    """
    return compile_launches([Launch(kernel, (1,), args, meta)], capability)[0]


def compile_launches(launches: list[Launch], capability: int = 90) -> list[Compiled]:
    """Return the kernels of all these launches, compiled in one process. Raises ValueError as `compile_kernel`."""
    requests = [request(launch) for launch in launches]
    worker = subprocess.run(
        [sys.executable, "-c", "from course_kit.gpu.compiled import work; work()"],
        input=pickle.dumps((requests, capability)),
        capture_output=True,
        env={**os.environ, "TRITON_INTERPRET": "0"},
        cwd=Path(course_lib.__file__).parents[1],
        check=False,
    )
    if worker.returncode:
        raise ValueError(f"does not compile for sm_{capability}: {worker.stderr.decode().strip()}")
    return pickle.loads(worker.stdout)


class Request(TypedDict):
    """The request to the compiler's process for one kernel: no tensors, only their types and known values."""

    name: str
    sources: dict[str, Source]
    types: dict[str, str]  # by argument
    constants: dict[tuple[int, ...], Any]  # by the argument's index
    hints: dict[tuple[int, ...], list]  # by the argument's index: divisible by 16
    options: dict[str, int]  # num_warps, …


def request(launch: Launch) -> Request:
    """Return a launch's types, constants and hints as Triton's own launcher finds them: an integer 1 is a constant;
    addresses and integers divisible by 16 are marked, which allows wide loads.
    """
    kernel, meta = first_configuration(launch.kernel, launch.meta)
    named = {name: value for name, value in meta.items() if name in kernel.arg_names}
    try:
        bound = inspect.signature(kernel.fn).bind(*launch.args, **named)
    except TypeError as error:
        raise ValueError(f"{kernel.fn.__name__}: {error}") from None
    bound.apply_defaults()
    types: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    hints: dict[tuple[int, ...], list] = {}
    for number, (name, value) in enumerate(bound.arguments.items()):
        kind, hint = native_specialize_impl(CUDABackend, value, False, True, True)
        if kind == "constexpr" or "constexpr" in str(kernel.fn.__annotations__.get(name)):
            types[name], constants[(number,)] = "constexpr", value
        else:
            types[name], hints[(number,)] = kind, CUDABackend.parse_attr(hint or "")
    options = {name: meta[name] for name in OPTIONS if name in meta}
    return Request(
        name=kernel.fn.__name__,
        sources=sources(kernel),
        types=types,
        constants=constants,
        hints=hints,
        options=options,
    )


def work() -> None:
    """Run the compiler's process: read requests from standard input, write a `Compiled` for each to standard output."""
    requests, capability = pickle.load(sys.stdin.buffer)
    triton.knobs.compilation.always_compile = (
        True  # its cache is keyed by a kernel's text: it would return another file's locations
    )
    triton.runtime.cache.triton_key = lambda: ""  # the cache's name, for which Triton would read all of itself, 460 MB
    triton.knobs.nvidia.dump_ptxas_log = True  # NVIDIA's assembler says what it needed
    answers = []
    for wanted in requests:
        try:
            answers.append(compile_request(wanted, GPUTarget("cuda", capability, 32)))
        except Exception as error:  # the compiler raises many types; all are meant for the kernel's author
            sys.exit(f"{wanted['name']}: {error_text(error)}")
    pickle.dump(answers, sys.stdout.buffer)


def error_text(error: BaseException) -> str:
    """Return the message of an error and, in the lines below it, the location; an error in a function that the kernel
    calls is reported for that function.
    """
    while error.__cause__:
        error = error.__cause__
    *where, what = str(error).strip().splitlines() or [type(error).__name__]
    return "\n".join([what, *where])


def compile_request(wanted: Request, target: GPUTarget) -> Compiled:
    """Compile one kernel for `target`."""
    kernel = rebuild(wanted["sources"])
    source = ASTSource(kernel, wanted["types"], wanted["constants"], wanted["hints"])
    with contextlib.redirect_stdout(io.StringIO()) as report:
        made = triton.compile(source, target=target, options=wanted["options"])
    if (columns := getattr(made.metadata, "tmem_size", 0)) > TENSOR_MEMORY:  # Triton's launcher refuses it
        raise ValueError(f"it needs {columns} columns of tensor memory, and a multiprocessor has {TENSOR_MEMORY}")
    ttgir, ptx = made.asm["ttgir"], made.asm["ptx"]
    registers, spilled = registers_and_spills(report.getvalue())
    return Compiled(
        name=wanted["name"],
        capability=target.arch,
        registers=registers,
        spilled_bytes=spilled,
        shared_bytes=made.metadata.shared,
        num_warps=made.metadata.num_warps,
        accesses=find_accesses(ttgir, ptx, wanted["sources"], target),
        ttgir=ttgir,
        ptx=ptx,
        report=report.getvalue(),
        cubin=made.asm["cubin"],
    )


def registers_and_spills(report: str) -> tuple[int, int]:
    """Return the registers and the spilled bytes per thread in the report of NVIDIA's assembler."""
    return int(group(r"Used (\d+) registers", report)), int(group(r"(\d+) bytes spill stores", report))
