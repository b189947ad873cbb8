"""course_kit.gpu.transactions counts the sectors of Triton kernels as closed forms have it, and as a brute force over
the compiled layouts. Triton's interpreter and its compiler, on the CPU.
"""

import copy
import io
import itertools
import json
import linecache
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from compiled_once import compile_launches
from course_kit.gpu.accesses import Access
from course_kit.gpu.compiled import Compiled
from course_kit.gpu.launches import Launch, first_configuration, record_launches
from course_kit.gpu.sources import sources
from course_kit.gpu.transactions import count_interpreted, count_transactions, work
from course_lib.kernels.matmul import matmul
from course_lib.kernels.sectors import SECTOR_BYTES, Transactions

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="counts inside Triton's interpreter")
REPOSITORY = Path(__file__).resolve().parents[2]


@triton.jit
def copy_kernel(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + i, mask=i < n)
    tl.store(out + i, values, mask=i < n)


@triton.jit
def strided_kernel(x, out, stride, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i * stride))


@triton.jit
def two_on_a_line_kernel(x, y, out, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i) + tl.load(y + 2 * i))


@triton.jit
def gather_kernel(table, at, out, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(tl.load(at + i) + table))  # an address that begins with another load


@triton.jit
def transpose_kernel(x, out, SIDE: tl.constexpr):
    row, column = tl.arange(0, SIDE)[:, None], tl.arange(0, SIDE)[None, :]
    tile = tl.load(x + row * SIDE + column)
    tl.store(out + column * SIDE + row, tile)


@triton.jit
def tile_kernel(x, out, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    there = (row < rows) & (column < columns)
    tile = tl.load(x + row * columns + column, mask=there, other=0.0)
    tl.store(out + row * columns + column, 2 * tile, mask=there)


@triton.jit
def one_number_kernel(x, out):
    program = tl.program_id(0)
    number = tl.load(x + program)
    tl.store(out + program, 2 * number)


@triton.jit
def atomics_kernel(x, total, highest, flags, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    values = tl.load(x + i)
    tl.atomic_add(total + 0 * i, values)
    tl.atomic_max(highest + i, values)
    tl.atomic_cas(flags + i, tl.zeros((BLOCK,), tl.int32), i)


@triton.jit
def fetch(x, i):
    return tl.load(x + i)


@triton.jit
def helper_kernel(x, out, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, fetch(x, i))


@triton.jit
def two_callers_kernel(x, out, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, fetch(x, i) + fetch(x, 2 * i))


@triton.jit
def unused_load_kernel(x, y, out, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    unused = tl.load(y + i)
    tl.store(out + i, tl.load(x + i))
    unused + 1


@triton.jit
def views_kernel(x, expanded, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n) + tl.load(expanded), mask=i < n)


@triton.jit
def fails_kernel(x, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK < 0, "this kernel is never right")


@triton.jit
def unknown_name_kernel(x, BLOCK: tl.constexpr):
    tl.store(x + tl.arange(0, BLOCK), nowhere)  # noqa: F821


@triton.jit
def calls_unknown_name_kernel(x, BLOCK: tl.constexpr):
    unknown_name_kernel(x, BLOCK)


CELL = """
import triton
import triton.language as tl
from course_lib.kernels.rounding import cast, widen

@triton.jit
def halve(x):
    return widen(x) / 2

@triton.jit
def cell_kernel(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = i < n
    tl.store(out + i, cast(halve(tl.load(x + i, mask=there)), out.dtype.element_ty), mask=there)
"""


def kernel_of_a_cell():
    """Return a kernel as a notebook has it: its source is in no file."""
    shell = InteractiveShell(config=Config(HistoryManager={"enabled": False}))
    shell.run_cell(CELL).raise_error()
    return shell.user_ns["cell_kernel"]


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def half_zeros(numel: int) -> torch.Tensor:
    return torch.zeros(numel, dtype=torch.bfloat16)


def matmul_launch() -> Launch:
    """As the operator launches it: two steps along k, one tile; under its autotuner."""
    with record_launches() as launches:
        matmul(random(64, 64, dtype=torch.float16), random(64, 64, dtype=torch.float16))
    return launches[0]


def launch_of_views() -> Launch:
    """Halves of one buffer, one read and one written, and an expanded leaf that wants a gradient; `out` by its name."""
    whole = torch.cat([torch.arange(32.0), torch.zeros(32)])
    ones = torch.ones(1, requires_grad=True).detach().expand(4).requires_grad_()
    return Launch(views_kernel, (1,), (whole[:32], ones), {"out": whole[32:], "n": 32, "BLOCK": 32})


def cases() -> dict[str, Launch]:
    """One launch of each kind; what it writes comes after what it reads."""
    at = torch.randint(0, 1000, (256,), generator=torch.Generator().manual_seed(0))
    integers = {"dtype": torch.int32}
    return {
        "fp32": Launch(copy_kernel, (2,), (random(2048), torch.zeros(2048), 2048), {"BLOCK": 1024}),
        "bf16": Launch(copy_kernel, (2,), (random(2048).bfloat16(), half_zeros(2048), 2048), {"BLOCK": 1024}),
        "odd": Launch(copy_kernel, (2,), (random(2048), torch.zeros(2048), 2047), {"BLOCK": 1024}),
        "shifted": Launch(copy_kernel, (1,), (random(1025)[1:], torch.zeros(1024), 1024), {"BLOCK": 1024}),
        "mask": Launch(copy_kernel, (1,), (random(1024), torch.zeros(1024), 112), {"BLOCK": 1024}),
        "small": Launch(copy_kernel, (3,), (random(192), torch.zeros(192), 192), {"BLOCK": 64}),
        "wide": Launch(copy_kernel, (1,), (random(1024), torch.zeros(1024), 1024), {"BLOCK": 1024, "num_warps": 8}),
        "stride 3": Launch(strided_kernel, (1,), (random(3072), torch.zeros(1024), 3), {"BLOCK": 1024}),
        "stride 8": Launch(strided_kernel, (1,), (random(8192), torch.zeros(1024), 8), {"BLOCK": 1024}),
        "two": Launch(two_on_a_line_kernel, (1,), (random(512), random(1024), torch.zeros(512)), {"BLOCK": 512}),
        "gather": Launch(gather_kernel, (1,), (random(1000), at, torch.zeros(256)), {"BLOCK": 256}),
        "transpose": Launch(transpose_kernel, (1,), (random(64, 64), torch.zeros(64, 64)), {"SIDE": 64}),
        "tile": Launch(
            tile_kernel, (1,), (random(5, 40), torch.zeros(5, 40), 5, 40), {"ROWS": 8, "COLUMNS": 64, "num_warps": 2}
        ),
        "number": Launch(one_number_kernel, (5,), (random(5), torch.zeros(5))),
        "atomics": Launch(
            atomics_kernel,
            (1,),
            (random(256), torch.zeros(1), torch.zeros(256), torch.zeros(256, **integers)),
            {"BLOCK": 256},
        ),
        "helper": Launch(helper_kernel, (1,), (random(512), torch.zeros(512)), {"BLOCK": 512}),
        "unused": Launch(unused_load_kernel, (1,), (random(512), random(512), torch.zeros(512)), {"BLOCK": 512}),
        "cell": Launch(
            kernel_of_a_cell(), (2,), (random(1024, dtype=torch.bfloat16), half_zeros(1024), 1024), {"BLOCK": 512}
        ),
        "views": launch_of_views(),
        "matmul": matmul_launch(),
    }


class Counted:
    """A launch, what the compiler made of it, and its traffic."""

    def __init__(self, launch: Launch, compiled: Compiled):
        self.launch, self.compiled = launch, compiled
        kernel, meta = first_configuration(launch.kernel, launch.meta)
        args, settings = copy.deepcopy((launch.args, meta))
        kernel[launch.grid](*args, **settings)
        self.expected = [x for x in (*args, *settings.values()) if torch.is_tensor(x)]
        self.traffic = count_interpreted(kernel, sources(kernel), launch.grid, launch.args, meta, compiled)
        self.written = [x for x in (*launch.args, *meta.values()) if torch.is_tensor(x)]

    def numbers(self, kind: str) -> tuple[int, int, int]:
        """Requests, sectors, lines."""
        counts = list(self.traffic.kinds(kind))
        return tuple(sum(getattr(count, what) for count in counts) for what in ("requests", "sectors", "lines"))


@pytest.fixture(scope="module")
def counted() -> dict[str, Counted]:
    launches = cases()
    made = compile_launches(list(launches.values()))
    return {name: Counted(launch, each) for (name, launch), each in zip(launches.items(), made, strict=True)}


def test_counting_changes_no_result(counted):
    for name, case in counted.items():
        for found, expected in zip(case.written, case.expected, strict=True):
            assert torch.equal(found, expected), name
    assert counted["atomics"].written[1].item() == pytest.approx(random(256).sum().item(), abs=1e-4)
    assert torch.equal(counted["transpose"].written[1], counted["transpose"].written[0].T)


@pytest.mark.parametrize(
    "name, kind, requests, sectors, lines",
    [
        # 16 bytes a lane: 512 bytes a request, 16 sectors, 4 lines
        ("fp32", "load", 16, 256, 64),
        ("fp32", "store", 16, 256, 64),
        ("bf16", "load", 8, 128, 32),
        ("bf16", "store", 8, 128, 32),
        # 16 does not divide n: 4 bytes a lane, 16 bytes apart, so each sector is moved four times; 2047 end in it
        ("odd", "load", 64, 1024, 256),
        ("odd", "store", 64, 1024, 256),
        # x begins 4 bytes past a line: one at a time, and lanes spread over 512 bytes touch another sector at times
        ("shifted", "store", 8, 128, 32),
        # 112 of 1,024: 28 lanes of the first warp
        ("mask", "load", 1, 14, 4),
        ("mask", "store", 1, 14, 4),
        # 64 elements for 128 threads: two warps load what the others do; one of two stores it
        ("small", "load", 12, 48, 12),
        ("small", "store", 6, 24, 6),
        ("wide", "load", 8, 128, 32),  # 8 warps
        # 8 elements apart, a sector for each; neighbouring lanes hold every fourth element, so a line for each too
        ("stride 8", "load", 32, 1024, 1024),
        # one number: all 4 warps load it, one lane stores it
        ("number", "load", 20, 20, 20),
        ("number", "store", 5, 5, 5),
        ("helper", "load", 4, 64, 16),
        ("unused", "load", 4, 64, 16),
        # 512 elements for 128 threads: of bfloat16 8 bytes a lane
        ("cell", "load", 8, 64, 16),
        ("cell", "store", 8, 64, 16),
        # two steps along k of two float16 tiles [64, 32]: rows of 64 bytes, 2 sectors of a, 4 of b at a time
        ("matmul", "load", 2 * 2 * 64 * 32 * 2 // 512, 2 * 2 * 64 * 32 * 2 // 32, None),
    ],
)
def test_closed_forms(counted, name, kind, requests, sectors, lines):
    found = counted[name].numbers(kind)
    assert found[:2] == (requests, sectors) and lines in (None, found[2])


def test_what_is_touched_once_at_least(counted):
    """Distinct sectors: closed forms that no layout can change."""
    for name, loaded, stored in (
        ("fp32", 256, 256),
        ("odd", 256, 256),
        ("mask", 14, 14),
        ("stride 3", 384, 128),
        ("stride 8", 1024, 128),
        ("two", 64 + 128, 64),
        ("transpose", 512, 512),
        ("tile", 25, 25),
        ("number", 1, 1),
    ):
        traffic = counted[name].traffic
        assert (traffic.distinct_sectors("load"), traffic.distinct_sectors("store")) == (loaded, stored), name
        assert sum(count.bytes for count in traffic.counts) <= SECTOR_BYTES * traffic.sectors()


# The same by brute force: the lanes as the text of TTGIR says it, not as the compiler's linear layouts do.


def blocked_layouts(ttgir: str) -> dict[str, dict[str, list[int]]]:
    found = {}
    for name, text in re.findall(r"^(#blocked\d*) = #ttg\.blocked<\{(.*)\}>", ttgir, flags=re.MULTILINE):
        parts = re.findall(r"(\w+) = \[([\d, ]+)\]", text)
        found[name] = {key: [int(number) for number in numbers.split(",")] for key, numbers in parts}
    return found


def requests_of(layout: dict[str, list[int]], shape: list[int], wide: int) -> list[np.ndarray]:
    """Flat numbers of the elements of each request of each warp: `wide` neighbours in a thread go out together."""
    size, lanes, warps = (np.array(layout[key]) for key in ("sizePerThread", "threadsPerWarp", "warpsPerCTA"))
    fast, whole = layout["order"][0], size * lanes * warps
    repeats = [range(max(1, side // int(tile))) for side, tile in zip(shape, whole, strict=True)]
    first = [range(0, int(n), wide if dim == fast else 1) for dim, n in enumerate(size)]
    found = []
    for repeat, warp, corner in itertools.product(
        itertools.product(*repeats), itertools.product(*map(range, warps)), itertools.product(*first)
    ):
        start = np.array(repeat) * whole + np.array(warp) * lanes * size + np.array(corner)
        own = [start + np.array(lane) * size for lane in itertools.product(*map(range, lanes))]
        own = np.repeat(np.array(own), wide, axis=0)
        own[:, fast] += np.tile(np.arange(wide), len(own) // wide)
        found.append(np.ravel_multi_index(tuple((own % shape).T), shape))
    return found


def brute_force(case: Counted, access: Access, which: int, tensor: torch.Tensor, touched: np.ndarray) -> int:
    """Sectors of an access, the `which`-th of its operation. touched: which element of `tensor` each of the block's is,
    -1 where it is masked off.
    """
    ttgir = case.compiled.ttgir
    line = [line for line in ttgir.splitlines() if f"{access.operation} " in line][which]
    shape = [int(side) for side in re.search(r"tensor<([\dx]+)x!tt", line)[1].split("x")]
    layout = blocked_layouts(ttgir)[re.search(r"#blocked\d*", line)[0]]
    offset = tensor.data_ptr() - tensor.untyped_storage().data_ptr()  # storages begin at a line
    sectors = 0
    for elements in requests_of(layout, shape, access.bytes_per_thread // tensor.element_size()):
        there = touched[elements][touched[elements] >= 0]
        sectors += len(set(((offset + there * tensor.element_size()) // SECTOR_BYTES).tolist()))
    return sectors


def test_brute_force_over_the_compiled_layout(counted):
    i, side = np.arange(1024), np.arange(64)
    rows, columns = np.arange(8)[:, None], np.arange(64)
    tile = np.where((rows < 5) & (columns < 40), 40 * rows + columns, -1)
    sectors = Counter()
    at, values = counted["gather"].launch.args[1].numpy(), counted["atomics"].launch.args[0].numpy()
    for name, operation, which, tensor, touched in (
        ("shifted", "tt.load", 0, 0, i),
        ("stride 3", "tt.load", 0, 0, 3 * i),
        ("two", "tt.load", 0, 0, i[:512]),
        ("two", "tt.load", 1, 1, 2 * i[:512]),
        ("gather", "tt.load", 0, 1, i[:256]),
        ("gather", "tt.load", 1, 0, at),
        ("transpose", "tt.load", 0, 0, 64 * side[:, None] + side),
        ("transpose", "tt.store", 0, 1, 64 * side[None, :] + side[:, None]),
        ("tile", "tt.load", 0, 0, tile),
        ("tile", "tt.store", 0, 1, tile),
        ("atomics", "tt.atomic_rmw", 0, 1, 0 * i[:256]),
        ("atomics", "tt.atomic_rmw", 1, 2, np.where(values >= 0, i[:256], -1)),
        ("atomics", "tt.atomic_rmw", 1, 2, np.where(values < 0, i[:256], -1)),
        ("atomics", "tt.atomic_cas", 0, 3, i[:256]),
    ):
        case = counted[name]
        kind = {"load": "load", "store": "store"}.get(operation[3:], "atomic")
        access = [each for each in case.compiled.accesses if each.operation == operation][which]
        function, line, _ = access.call
        key = name, kind, f"{sources(case.launch.kernel)[function]['line'] + line - 1}: "
        sectors[key] += brute_force(case, access, which, case.launch.args[tensor], touched.reshape(-1))
    for (name, kind, place), expected in sectors.items():
        (count,) = [each for each in counted[name].traffic.kinds(kind) if each.location.startswith(place)]
        assert count.sectors == expected, (name, count)


def test_what_is_not_coalesced_shows(counted):
    """A column, read element by element, uses an eighth. Both sides of a transpose are coalesced: the compiler gives
    them different lanes, and exchanges the elements through shared memory.
    """
    assert counted["stride 8"].traffic.efficiency("load") == 1 / 8 and counted["odd"].traffic.efficiency() < 1 / 4
    case = counted["transpose"]
    assert case.traffic.efficiency() == 1.0 and case.compiled.shared_bytes > 0
    load, store = case.compiled.accesses
    assert load.lanes != store.lanes and load.bytes_per_thread == store.bytes_per_thread == 16


def test_places_are_lines_of_the_source(counted):
    """Of a helper function its own line; of a notebook's cell the cell's; what the compiler removed is told apart."""
    (load,) = counted["helper"].traffic.kinds("load")
    assert load.location.endswith(": return tl.load(x + i)")
    for count in counted["cell"].traffic.counts:
        assert "cast(halve(tl.load(x + i, mask=there))" in count.location
    (removed,) = counted["unused"].traffic.removed
    assert removed.endswith(": unused = tl.load(y + i)")
    assert "removed by the compiler: " + removed in str(counted["unused"].traffic)
    assert all(not case.traffic.removed for name, case in counted.items() if name != "unused")


def test_pipelined_loads_are_asynchronous_and_of_the_first_configuration(counted):
    case = counted["matmul"]
    operations = {(access.operation, access.bytes_per_thread) for access in case.compiled.accesses}
    assert ("ttg.async_copy_global_to_local", 16) in operations and ("tt.load", 16) not in operations
    kernel = case.launch.kernel
    meta = first_configuration(kernel, case.launch.meta)[1]
    assert case.compiled.num_warps == meta["num_warps"] == 4 and case.launch.grid == (1,)


def test_a_count_is_one_call():
    x, out = random(1024), torch.zeros(1024)
    found = count_transactions(copy_kernel, lambda meta: (triton.cdiv(1024, meta["BLOCK"]),), x, out, 1024, BLOCK=512)
    assert (found.requests("load"), found.sectors("load")) == (8, 128) and torch.equal(x, out)
    assert found.efficiency() == 1.0


def count_where_kernels_are_compiled() -> None:
    """In a process that does not interpret: print what `count_transactions` says and what was written."""
    launch = launch_of_views()
    traffic = count_transactions(launch.kernel, launch.grid, *launch.args, **launch.meta)
    written = launch.meta["out"].untyped_storage().tolist()
    print(json.dumps([triton.knobs.runtime.interpret, str(traffic), traffic.distinct_sectors(), written]))


def test_where_kernels_are_compiled_the_counts_are_the_same(counted):
    """As on a machine with a GPU: this process compiles, others interpret; tensors are written here, views too."""
    call = "import test_transactions; test_transactions.count_where_kernels_are_compiled()"
    path = os.pathsep.join([str(REPOSITORY), *sys.path])
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": path}
    worker = subprocess.run([sys.executable, "-c", call], capture_output=True, text=True, env=environment)
    assert worker.returncode == 0, worker.stderr
    traffic, out = counted["views"].traffic, counted["views"].launch.meta["out"]
    written = out.untyped_storage().tolist()
    assert json.loads(worker.stdout) == [False, str(traffic), traffic.distinct_sectors(), written]
    assert torch.equal(out, torch.arange(1.0, 33.0))


def test_a_kernel_that_fails_in_the_other_process_says_so_in_a_line(counted, monkeypatch):
    x, question = random(64), io.BytesIO()
    torch.save((sources(fails_kernel), (1,), (x,), {"BLOCK": 64}, counted["fp32"].compiled), question)
    monkeypatch.setattr(linecache, "cache", dict(linecache.cache))  # that process knows only the kernel's lines
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(question.getvalue())))
    with pytest.raises(SystemExit) as ended:
        work()
    assert "this kernel is never right" in ended.value.code and "Traceback" not in ended.value.code


# Bad input.


def refusal(kernel, grid, *args, **settings) -> str:
    with pytest.raises(ValueError) as raised:
        count_transactions(kernel, grid, *args, **settings)
    return str(raised.value)


def test_a_kernel_that_does_not_compile_says_so_in_the_first_line():
    x = torch.ones(64)
    for kernel in (unknown_name_kernel, calls_unknown_name_kernel):
        what, *where = refusal(kernel, (1,), x, BLOCK=64).splitlines()
        assert what == f"does not compile for sm_90: {kernel.fn.__name__}: NameError('nowhere is not defined')"
        assert any("tl.store(x + tl.arange(0, BLOCK), nowhere)" in line for line in where)
        assert not any("Traceback" in line for line in where)
    assert torch.equal(x, torch.ones(64))


def test_wrong_calls_are_one_line_and_write_nothing():
    x, out = random(64), torch.zeros(512)
    for found, words in (
        (refusal(lambda block, x: None, (1,), x), "needs `threads`"),
        (refusal(copy_kernel, (1,), x, out, 64), "copy_kernel: missing a required argument: 'BLOCK'"),
        (refusal(copy_kernel, (1,), x, out.to("meta"), 64, BLOCK=64), "on the meta device"),
        (refusal(two_callers_kernel, (1,), random(1024), out, BLOCK=512), "the compiler lays the access in line"),
    ):
        assert words in found and "\n" not in found, found
    assert not out.any()


def test_nothing_is_counted_of_an_empty_grid(counted):
    launch, compiled = counted["small"].launch, counted["small"].compiled
    empty = count_interpreted(launch.kernel, sources(launch.kernel), (0,), launch.args, launch.meta, compiled)
    assert isinstance(empty, Transactions) and not empty.counts and empty.efficiency() == 1.0
