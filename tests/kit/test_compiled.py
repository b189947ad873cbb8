"""course_kit.gpu.compiled says what NVIDIA's own tools say of a kernel; accesses and sources find its loads, and
its text with all that it calls. Triton's compiler, on the CPU.
"""

import importlib.util
import inspect
import os
import pickle
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

import compiled_once
from course_kit.gpu.accesses import Access
from course_kit.gpu.compiled import Compiled, compile_kernel, compile_launches, request
from course_kit.gpu.launches import Launch, record_launches
from course_kit.gpu.sources import rebuild, sources
from course_lib.kernels.elu import elu
from course_lib.kernels.gpus import GPUS
from course_lib.kernels.matmul import matmul

REPOSITORY = Path(__file__).resolve().parents[2]
SCALE = tl.constexpr(3.0)
pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="interpreted kernels are compiled apart")


@triton.jit
def scaled_kernel(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, SCALE * tl.load(x + i, mask=i < n), mask=i < n)


@triton.jit
def whole_row_kernel(x, out, n, BLOCK: tl.constexpr):
    """A row in registers, as long as it is: 16,384 elements in one warp are 512 a thread."""
    i = tl.arange(0, BLOCK)
    row = tl.load(x + i, mask=i < n, other=0.0)
    tl.store(out + i, row / tl.sum(row, axis=0), mask=i < n)


@triton.jit
def tile_kernel(x, out, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    at = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(out + at, tl.load(x + at))


def launches() -> dict[str, Launch]:
    x = torch.zeros(16384)
    half, size = x.bfloat16(), {"BLOCK": 1024}
    with record_launches() as made:
        elu(torch.ones(64))
        matmul(torch.ones(64, 64, dtype=torch.float16), torch.ones(64, 64, dtype=torch.float16))
    return {
        "fp32": Launch(scaled_kernel, (1,), (x, x, 1024), size),
        "bf16": Launch(scaled_kernel, (1,), (half, half, 1024), size),
        "odd": Launch(scaled_kernel, (1,), (x, x, 1023), size),
        "shifted": Launch(scaled_kernel, (1,), (x[1:], x, 1024), size),
        "one": Launch(scaled_kernel, (1,), (x, x, 1), size),
        "row": Launch(whole_row_kernel, (1,), (x, x, 16384), {"BLOCK": 16384, "num_warps": 16}),
        "spills": Launch(whole_row_kernel, (1,), (x, x, 16384), {"BLOCK": 16384, "num_warps": 1}),
        "few": Launch(whole_row_kernel, (1,), (x, x, 16384), {"BLOCK": 16384, "num_warps": 16, "maxnreg": 32}),
        "tile": Launch(tile_kernel, (1,), (x, x), {"ROWS": 8, "COLUMNS": 64, "num_warps": 2}),
        "elu": made[0],
        "matmul": made[1],
    }


CUBINS = """
import pickle, sys, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from course_kit.gpu.sources import rebuild
for number, wanted in enumerate(pickle.load(sys.stdin.buffer)):
    source = ASTSource(rebuild(wanted["sources"]), wanted["types"], wanted["constants"], wanted["hints"])
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=wanted["options"])
    open(f"{sys.argv[1]}/{number}.cubin", "wb").write(made.asm["cubin"])
"""


@pytest.fixture(scope="module")
def compiled() -> dict[str, Compiled]:
    given = launches()
    return dict(zip(given, compile_launches(list(given.values())), strict=True))


def test_registers_are_those_of_the_kernel_that_would_run(compiled, tmp_path):
    """cuobjdump of the cubin that Triton would load: REG the same, and local memory where there are spills."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(REPOSITORY)}
    question = pickle.dumps([request(launch) for launch in launches().values()])
    command = [sys.executable, "-c", CUBINS, tmp_path]
    subprocess.run(command, input=question, env=environment, check=True)
    for number, (name, made) in enumerate(compiled.items()):
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", tmp_path / f"{number}.cubin"]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found = {what: int(value) for what, value in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", report)}
        assert found["REG"] == made.registers, (name, report)
        assert (found["STACK"] > 0) == (made.spilled_bytes > 0), (name, report)


def test_spills_are_told(compiled):
    """512 numbers a thread do not fit in registers; 32 do, unless a thread may have no more than 32 registers."""
    spills = compiled["spills"]
    assert spills.registers <= 255 and spills.spilled_bytes >= 4 * (512 - spills.registers)
    assert compiled["row"].spilled_bytes == 0 and 32 < compiled["row"].registers <= 128
    assert compiled["few"].registers <= 32 and compiled["few"].spilled_bytes > 0
    assert compiled["spills"].num_warps == 1 and compiled["row"].num_warps == 16


def test_shared_memory_is_what_a_block_asks_for(compiled):
    """None for a copy; of a sum over 16 warps a number each; of a product the tiles that are under way."""
    assert compiled["fp32"].shared_bytes == 0
    assert 4 * 16 <= compiled["row"].shared_bytes <= 1024
    stages, tiles = 4, 2 * 64 * 32 * 2
    assert (stages - 1) * tiles <= compiled["matmul"].shared_bytes <= GPUS["H100"].shared_bytes_per_block


def test_layouts_of_known_kernels(compiled):
    """Neighbours in a thread, then in a lane, then in a warp; and how wide, by alignment of addresses and length."""
    load, store = compiled["fp32"].accesses
    assert (load.operation, store.operation) == ("tt.load", "tt.store") and load.shape == store.shape == (1024,)
    assert load.registers == ((1,), (2,), (512,)) and load.lanes == ((4,), (8,), (16,), (32,), (64,))
    assert load.warps == ((128,), (256,))
    wide = {name: [access.bytes_per_thread for access in made.accesses] for name, made in compiled.items()}
    assert wide["fp32"] == wide["bf16"] == wide["tile"] == [16, 16]
    assert wide["odd"] == [4, 4] and wide["shifted"] == [4, 16]
    assert compiled["bf16"].accesses[0].registers == ((1,), (2,), (4,))
    tile = compiled["tile"].accesses[0]  # rows of 64: 16 lanes of 4 elements, 2 rows a warp
    assert tile.lanes == ((0, 4), (0, 8), (0, 16), (0, 32), (1, 0)) and tile.warps == ((2, 0),)


def test_every_element_has_a_place(compiled):
    """The bases of a layout reach each element of the block, and those of no zero exactly once."""
    for made in compiled.values():
        for access in made.accesses:
            places = {(0,) * len(access.shape)}
            bases = [base for base in (*access.registers, *access.lanes, *access.warps) if any(base)]
            for base in bases:
                places |= {tuple(a ^ b for a, b in zip(place, base, strict=True)) for place in places}
            assert len(places) == torch.Size(access.shape).numel() == 2 ** len(bases)


def test_calls_are_those_of_the_source(compiled):
    """Function, line and column of `tl.load`, `tl.store`, as they stand in the source."""
    for name in ("tile", "elu"):
        found = sources(launches()[name].kernel)
        for access in compiled[name].accesses:
            function, line, column = access.call
            text = found[function]["text"].splitlines()[line - 1]
            assert text[column:].startswith({"tt.load": "tl.load(", "tt.store": "tl.store("}[access.operation])


def test_an_integer_of_1_is_a_constant(compiled):
    """As Triton's launcher has it: a mask of one element needs no argument."""
    assert "%n" not in compiled["one"].ttgir and "%n" in compiled["odd"].ttgir
    assert "tt.divisibility" in compiled["fp32"].ttgir.split("%n: i32")[1].split(")")[0]
    assert "tt.divisibility" not in compiled["odd"].ttgir.split("%n: i32")[1].split(")")[0]


def test_other_gpus_and_one_kernel_at_a_time(compiled):
    launch = launches()["fp32"]
    made = compile_kernel(launch.kernel, *launch.args, capability=80, **launch.meta)
    assert made.capability == 80 and ".target sm_80" in made.ptx and ".target sm_90" in compiled["fp32"].ptx
    assert made.accesses == compiled["fp32"].accesses and made.name == "scaled_kernel"


@pytest.mark.parametrize(
    "args, meta, words",
    [
        ((1,), {}, "missing a required argument: 'out'"),
        ((1, 2, 3), {}, "missing a required argument: 'BLOCK'"),
        ((1, 2, 3, 4, 5), {}, "too many positional arguments"),
        ((1, 2, 3), {"x": 4, "BLOCK": 8}, "multiple values for argument 'x'"),
    ],
)
def test_missing_arguments_are_one_line(args, meta, words):
    with pytest.raises(ValueError, match=f"scaled_kernel: {words}") as raised:
        compile_kernel(scaled_kernel, *args, **meta)
    assert "\n" not in str(raised.value)


# The text of a kernel.

HELPER = """import triton

@triton.jit
def helper(x):
    return x {}
"""
CALLER = """import triton
import triton.language as tl

@triton.jit
def caller_kernel(x, out):
    tl.store(out, plus(times(tl.load(x))))
"""


def module_of(folder: Path, name: str, text: str) -> types.ModuleType:
    file = folder / f"{name}.py"
    file.write_text(text)
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_helpers_of_one_name_stay_apart(tmp_path):
    """Two modules each have a `helper`, and the kernel calls both, under names of its own."""
    caller = module_of(tmp_path, "caller", CALLER)
    caller.plus = module_of(tmp_path, "one", HELPER.format("+ 3.0")).helper
    caller.times = module_of(tmp_path, "other", HELPER.format("* 5.0")).helper
    x, out = torch.full((1,), 2.0), torch.zeros(1)
    made = compile_kernel(caller.caller_kernel, x, out)
    assert "5.000000e+00" in made.ttgir and "3.000000e+00" in made.ttgir
    saved, linecache = dict(sys.modules["linecache"].cache), sys.modules["linecache"]
    try:
        rebuild(sources(caller.caller_kernel))[(1,)](x, out)
    finally:
        linecache.cache = saved
    assert out.item() == 13.0


def test_the_same_text_in_another_file_has_its_places_there(tmp_path):
    """As a notebook's cell after a restart. Triton's cache on disk knows a kernel by its text, and would answer with
    the places of the first file.
    """
    found = []
    for name in ("first", "second"):
        module = module_of(tmp_path, name, CALLER.replace("plus(times(tl.load(x)))", "tl.load(x)"))
        found.append(Launch(module.caller_kernel, (1,), (torch.zeros(1), torch.zeros(1))))
    for name, made in zip(("first", "second"), compile_launches(found), strict=True):
        assert {access.call for access in made.accesses} == {
            (f"{name}.caller_kernel", 2, 4),
            (f"{name}.caller_kernel", 2, 18),
        }


def test_an_access_is_a_value():
    """`find_accesses` tells repeated ones by equality; `transactions` keeps layouts by it."""
    access = Access("tt.load", ("f", 1, 2), (2,), ((1,),), (), (), 4)
    assert len({access, Access("tt.load", ("f", 1, 2), (2,), ((1,),), (), (), 4)}) == 1


def test_the_tests_compile_each_kernel_once(compiled, tmp_path, monkeypatch):
    """compiled_once.py: one answer for one content, from another folder too, and not for another content."""
    monkeypatch.setattr(compiled_once, "FOLDER", tmp_path)
    asked = []

    def compile_counted(launches, capability):
        asked.extend((launch.meta["BLOCK"], capability) for launch in launches)
        return [compiled["fp32"]] * len(launches)

    monkeypatch.setattr(compiled_once.compiled, "compile_launches", compile_counted)
    x = torch.zeros(16384)
    one, other = (Launch(scaled_kernel, (1,), (x, x, 1024), {"BLOCK": size}) for size in (1024, 512))
    assert compiled_once.compile_launches([one]) == compiled_once.compile_launches([one]) == [compiled["fp32"]]
    assert len(compiled_once.compile_launches([one, other])) == 2
    compiled_once.compile_launches([other], 80)
    assert asked == [(1024, 90), (512, 90), (512, 80)]

    text = "import triton\nimport triton.language as tl\nSCALE = tl.constexpr(3.0)\n\n\n" + inspect.getsource(
        scaled_kernel.fn
    )
    moved = {
        "same": "\n\n" + text,
        "changed": text.replace("3.0", "4.0"),
        "added": text.replace("x + i,", "x + i + 0,"),
    }
    names = {}
    for folder, body in {"first": text, **moved}.items():
        (tmp_path / folder).mkdir()
        kernel = module_of(tmp_path / folder, "scaled", body).scaled_kernel
        names[folder] = compiled_once.content(Launch(kernel, (1,), (x, x, 1024), {"BLOCK": 1024}), 90)
    assert names["first"] == names["same"] and len({*names.values()}) == 3
