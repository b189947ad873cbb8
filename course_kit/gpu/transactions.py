"""Count the memory transactions of a kernel without a GPU.

A Triton kernel runs in the interpreter, which reports the loads and stores of each program. The compiled kernel's
layouts tell which lane of which warp holds which element, and how wide an instruction is (`accesses`). Together they
give the requests, and `sectors` counts the traffic of each. A kernel written thread by thread (`thread_blocks`) needs
no layouts.

The counts should equal Nsight Compute's `l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum` (with `_ldgsts` for
loads straight to shared memory) and `_st.sum`: sectors between the threads and the first cache. Savings by
the caches are not modeled; `distinct_sectors` is the lower bound.
"""

import contextlib
import functools
import io
import itertools
import os
import subprocess
import sys
import traceback
import types
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import triton
from triton.runtime import interpreter
from triton.runtime.jit import KernelInterface

import course_lib
from course_kit.gpu.accesses import Access, SourcePosition
from course_kit.gpu.compiled import Compiled, compile_kernel, error_text
from course_kit.gpu.launches import first_configuration
from course_kit.gpu.sources import Source, rebuild, sources
from course_lib.kernels.sectors import Transactions, shift
from course_lib.kernels.thread_blocks import run_blocks


def count_transactions(kernel, grid, *args, threads: tuple[int, ...] | None = None, capability: int = 90, **meta):
    """Run `kernel` on `grid` and count the sectors and lines that its loads and stores touch, warp by warp.

    kernel: a Triton kernel, launched as `kernel[grid](*args, **meta)` and laid out by the compiler for `capability`; or
    a function of a `Block` and `args`, with `threads` per block. The kernel writes to the tensors, on any device.
    Returns `Transactions` (for a function: `BlockTraffic`). Raises ValueError for a kernel that does not compile or has
    an access that the compiler lays out in several ways.
    """
    if not isinstance(kernel, KernelInterface):
        if threads is None:
            raise ValueError("a kernel written thread by thread needs `threads`, the size of a block")
        return run_blocks(kernel, grid, threads, *args)
    if any(tensor.is_meta for tensor in tensors_of(args, meta)):
        raise ValueError("a tensor on the meta device has no elements to load")
    kernel, meta = first_configuration(kernel, meta)
    compiled = compile_kernel(kernel, *args, capability=capability, **meta)
    if triton.knobs.runtime.interpret:
        return count_interpreted(kernel, sources(kernel), grid, args, meta, compiled)
    return count_elsewhere(kernel, grid, args, meta, compiled)


def count_interpreted(
    kernel, functions_by_name: dict[str, Source], grid, args: tuple, meta: dict, compiled: Compiled
) -> Transactions:
    """Launch a kernel in the interpreter, and count each access by the layout of the same call in the compiled kernel.
    The kernel belongs to these sources, or was rebuilt from them.
    """
    layouts = layouts_by_call(compiled)
    functions = {(file, s["name"]): name for name, s in functions_by_name.items() for file in (s["file"], name)}
    storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors_of(args, meta)}
    traffic = Transactions()

    def observe(kind: str, pointers, mask) -> None:
        call, line = current_call(functions, functions_by_name)
        access = layouts.get((call, tuple(pointers.data.shape) if pointers.data.size > 1 else ()))
        if access is None:
            traffic.removed.add(line)
            return
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        replicas = access.operation == "tt.load"
        elements = lanes_of(access, compiled.num_warps, size, replicas)  # [requests, touches]
        addresses, active = pointers.data.reshape(-1), np.broadcast_to(mask, pointers.data.shape).reshape(-1)
        if not active.any():
            return
        first = addresses[active][0]
        addresses = addresses + shift(storages[max(base for base in storages if base <= first)])
        traffic.of(kind, line).add(addresses[elements], active[elements], size)

    with observed(observe):
        kernel[grid](*args, **meta)
    return traffic


def tensors_of(args: tuple, meta: dict) -> list[torch.Tensor]:
    return [value for value in (*args, *meta.values()) if isinstance(value, torch.Tensor)]


def layouts_by_call(compiled: Compiled) -> dict[tuple, Access]:
    """Return each access by its call and the shape of the block, () for a scalar. Raises ValueError if one call in the
    source has several layouts in the compiled kernel: the interpreter does not tell which of them runs.
    """
    accesses: dict[tuple, Access] = {}
    for access in compiled.accesses:
        key = access.call, access.shape if np.prod(access.shape) > 1 else ()
        if key in accesses:
            function, line, _ = access.call
            raise ValueError(
                f"{compiled.name}: the compiler lays the access in line {line} of {function} out in several ways, for "
                "perhaps for several callers: write it out for each"
            )
        accesses[key] = access
    return accesses


@functools.lru_cache
def lanes_of(access: Access, num_warps: int, size: int, replicas: bool) -> np.ndarray:
    """Return the flat indices of the block's elements that each request of a warp accesses: [requests, 32 lanes x
    elements].

    A thread's registers are accessed in groups of `bytes_per_thread`. If a block has fewer elements than the program
    has threads, several threads hold the same element: all of them load it (`replicas`), one stores it or copies it to
    shared memory.
    """
    if not np.prod(access.shape) > 1:  # a scalar: every warp loads it, one lane stores it
        return np.zeros((num_warps if replicas else 1, 1), dtype=np.int64)
    strides = np.cumprod((1, *access.shape[:0:-1]))[::-1]

    def elements(bases: tuple[tuple[int, ...], ...]) -> np.ndarray:
        steps = [int(np.dot(base, strides)) for base in bases]
        numbers = np.arange(2 ** len(steps))
        return functools.reduce(
            np.bitwise_xor, [(numbers >> i & 1) * step for i, step in enumerate(steps)], numbers * 0
        )

    registers = elements(tuple(base for base in access.registers if any(base)))
    warps = elements(tuple(base for base in access.warps if replicas or any(base)))
    lanes = elements(access.lanes)
    wide = access.bytes_per_thread // size
    groups = registers.reshape(-1, min(wide, len(registers)))
    touched = warps[:, None, None, None] ^ groups[None, :, None, :] ^ lanes[None, None, :, None]
    return touched.reshape(len(warps) * len(groups), -1)


def current_call(functions: dict[tuple[str, str], str], texts: dict[str, Source]) -> tuple[SourcePosition, str]:
    """Return the call that the interpreter executes in one of these functions (full names, by file and name), as
    `Access` names it, and its line as text.
    """
    frames = (frame for frame, _ in traceback.walk_stack(sys._getframe()))
    frame = next(f for f in frames if (f.f_code.co_filename, f.f_code.co_name) in functions)
    code = frame.f_code
    name = functions[code.co_filename, code.co_name]
    line, column = position(code, frame.f_lasti)
    line -= code.co_firstlineno - 1  # of the function
    text = texts[name]["text"].splitlines()[line - 1].strip()
    return (name, line, column), f"{texts[name]['line'] + line - 1}: {text}"


@functools.lru_cache
def position(code: types.CodeType, instruction: int) -> tuple[int, int]:
    """Return the line and column of an instruction."""
    line, _, column, _ = next(itertools.islice(code.co_positions(), instruction // 2, None))
    assert line is not None and column is not None  # source code is compiled with positions
    return line, column


@contextlib.contextmanager
def observed(observe) -> Iterator[None]:
    """Call `observe(kind, pointers, mask)` before each access of the interpreter inside the context."""
    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store
    update, swap = builder.create_atomic_rmw, builder.create_atomic_cas

    def observed_load(self, pointers, mask, *rest):
        observe("load", pointers, mask.data)
        return load(self, pointers, mask, *rest)

    def observed_store(self, pointers, value, mask, *rest):
        observe("store", pointers, mask.data)
        return store(self, pointers, value, mask, *rest)

    def observed_update(self, operation, pointers, value, mask, *rest):
        observe("atomic", pointers, mask.data)
        return update(self, operation, pointers, value, mask, *rest)

    def observed_swap(self, pointers, *rest):
        observe("atomic", pointers, True)
        return swap(self, pointers, *rest)

    with (
        mock.patch.object(builder, "create_masked_load", observed_load),
        mock.patch.object(builder, "create_masked_store", observed_store),
        mock.patch.object(builder, "create_atomic_rmw", observed_update),
        mock.patch.object(builder, "create_atomic_cas", observed_swap),
    ):
        yield


def count_elsewhere(kernel, grid, args: tuple, meta: dict, compiled: Compiled) -> Transactions:
    """Run `count_interpreted` in another process: on a machine with a GPU, this process compiles its kernels."""
    named = dict(zip(kernel.arg_names, args, strict=False)) | meta
    grid = tuple(grid(named) if callable(grid) else grid)
    question = io.BytesIO()
    torch.save((sources(kernel), grid, *on_host(args, meta), compiled), question)  # views stay views
    worker = subprocess.run(
        [sys.executable, "-c", "from course_kit.gpu.transactions import work; work()"],
        input=question.getvalue(),
        capture_output=True,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=Path(course_lib.__file__).parents[1],
        check=False,
    )
    if worker.returncode:
        raise ValueError(f"{kernel.fn.__name__} in the interpreter: {worker.stderr.decode().strip()}")
    traffic, written = torch.load(io.BytesIO(worker.stdout), weights_only=False)
    for mine, theirs in zip(tensors_of(args, meta), written, strict=True):
        mine.untyped_storage().copy_(
            theirs.untyped_storage()
        )  # works with any strides, and for a tensor that requires a gradient
    return traffic


def on_host(args: tuple, meta: dict) -> tuple[tuple, dict]:
    """Return both with their tensors on the CPU: with the same strides and gaps, and with shared storages."""
    storages: dict[int, torch.UntypedStorage] = {}

    def moved(x):
        if not isinstance(x, torch.Tensor):
            return x
        storage = x.untyped_storage()
        host = storages.setdefault(storage.data_ptr(), storage.cpu())
        return torch.empty(0, dtype=x.dtype).set_(host, x.storage_offset(), x.size(), x.stride())

    return tuple(moved(x) for x in args), {name: moved(x) for name, x in meta.items()}


def work() -> None:
    """Run the interpreter's process: read one question from standard input, write traffic and tensors to standard
    output.
    """
    question = torch.load(io.BytesIO(sys.stdin.buffer.read()), weights_only=False)
    functions, grid, args, meta, compiled = question
    try:
        traffic = count_interpreted(rebuild(functions), functions, grid, args, meta, compiled)
    except Exception as error:  # meant for the kernel's author, without the interpreter's frames
        sys.exit(error_text(error))
    answer = io.BytesIO()
    torch.save((traffic, tensors_of(args, meta)), answer)
    sys.stdout.buffer.write(answer.getvalue())
