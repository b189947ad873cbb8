"""The loads and stores of a compiled kernel: who loads what, and how wide.

Triton's program says what a block loads; the compiler decides which thread loads which element. Its intermediate form
(TTGIR) has the answer as a layout on each operation, its PTX the width of each instruction, and debug locations lead
from both back to the call in the source.
"""

import ast
import re
import tempfile
from dataclasses import dataclass

from triton._C.libtriton import gluon_ir, ir
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend

from course_kit.gpu.sources import Source

OPERATIONS = ("tt.load", "tt.store", "ttg.async_copy_global_to_local", "tt.atomic_rmw", "tt.atomic_cas")
CALLS = ("load", "store", "atomic_add", "atomic_max", "atomic_min", "atomic_cas", "atomic_xchg")
OPERATION = re.compile(rf"(?:^|\s)({'|'.join(map(re.escape, OPERATIONS))})\s")
INSTRUCTION = re.compile(r"\b(?:ld|st|atom|red)\.global[\w.:]*?(?:\.v(\d))?\.[a-z]+(\d+)(?:x(\d))?\s")
ASYNCHRONOUS = re.compile(r"\bcp\.async\.c[ag]\.shared\.global[\w.:]* \[.*?\], \[.*?\], (0x[0-9a-f]+|\d+)")
Place = tuple[str, int, int]  # a function's full name, line from its `def` on (1), column


@dataclass(frozen=True)
class Access:
    """One load, store or atomic of global memory. Bit i of a register's, lane's or warp's number moves the element that
    it holds by bases[i] along each dimension of the block, XOR by XOR (Triton's linear layouts); a scalar has none.
    """

    operation: str  # tt.load, tt.store, …
    call: Place  # of the call in the source
    shape: tuple[int, ...]  # of the block
    registers: tuple[tuple[int, ...], ...]
    lanes: tuple[tuple[int, ...], ...]
    warps: tuple[tuple[int, ...], ...]
    bytes_per_thread: int  # of one instruction; 16 is the most


def find_accesses(ttgir: str, ptx: str, sources: dict[str, Source], target: GPUTarget) -> list[Access]:
    """Every access of the compiled kernel, in the order of the compiler's text; one that it repeats (a pipelined loop
    has its loads twice) is there once. One in a function that is called for addresses of several alignments is there
    with each width.
    """
    lines = [line for line in ttgir.splitlines() if OPERATION.search(line)]
    shapes = [
        tuple(map(int, re.findall(r"(\d+)x", (re.search(r": \(?tensor<([\dx]+)", line) or [""])[0]))) for line in lines
    ]
    places, widths, calls = locations(ttgir), instruction_bytes(ptx), memory_calls(sources)
    found = []
    for line, shape, bases in zip(lines, shapes, layouts(ttgir, shapes, target), strict=True):
        place = places[re.search(r"loc\((#loc\d*)\)\s*$", line)[1]]
        # an instruction's place is where the last argument of its call begins: there another call may begin, as in
        # tl.store(x, tl.load(y) + 1)
        round_it = [call for call in calls if call[0] == place[0] and call[1] < place[1:] <= call[2]]
        name, first, _ = max(round_it, key=lambda call: call[1])  # the innermost
        for width in sorted(widths[place]):
            found.append(Access(OPERATION.search(line)[1], (name, *first), shape, *bases, width))
    return list(dict.fromkeys(found))


def layouts(ttgir: str, shapes: list[tuple[int, ...]], target: GPUTarget) -> list[tuple]:
    """Bases of registers, lanes and warps of each access, from the compiler's own conversion to linear layouts."""
    context = ir.context()
    ir.load_dialects(context)
    CUDABackend(target).load_dialects(context)
    with tempfile.NamedTemporaryFile("w", suffix=".ttgir") as file:
        file.write(ttgir)
        file.flush()
        module = ir.parse_mlir_module(file.name, context)
    builder = gluon_ir.GluonOpBuilder(context)
    found = []

    def visit(operation):
        if operation.get_name() not in OPERATIONS:
            return
        shape = shapes[len(found)]
        if not shape:  # a scalar
            found.append(((), (), ()))
            return
        layout = builder.get_gluon_layout_from_tensor(operation.get_operand(0))
        linear = builder.to_linear_layout(layout._to_ir(builder), list(shape))
        found.append(
            tuple(tuple(map(tuple, bases)) for bases in (linear.reg_bases, linear.lane_bases, linear.warp_bases))
        )

    module.walk(visit)
    return found


def locations(ttgir: str) -> dict[str, Place]:
    """Where each location name of the text leads: the innermost call's place where functions were inlined."""
    told = dict(re.findall(r"^(#loc\d*) = loc\((.*)\)$", ttgir, flags=re.MULTILINE))

    def place(name: str) -> Place | None:
        text = told[name]
        if found := re.match(r'"(.*)":(\d+):(\d+)', text):
            return found[1], int(found[2]), int(found[3])
        inner = re.search(r"#loc\d*", text)
        return place(inner[0]) if inner else None

    return {name: place(name) for name in told}


def instruction_bytes(ptx: str) -> dict[Place, set[int]]:
    """Bytes a thread moves by one instruction, for each place in the source that touches global memory."""
    files = dict(re.findall(r'^\s*\.file\s+(\d+) "(.*?)"', ptx, flags=re.MULTILINE))
    found, here = {}, None
    for line in ptx.splitlines():
        if move := re.match(r"\s*\.loc\s+(\d+) (\d+) (\d+)", line):
            here = files[move[1]], int(move[2]), int(move[3])
        elif wide := ASYNCHRONOUS.search(line):
            found.setdefault(here, set()).add(int(wide[1], 0))
        elif wide := INSTRUCTION.search(line):
            found.setdefault(here, set()).add(int(wide[1] or 1) * int(wide[2]) // 8 * int(wide[3] or 1))
    return found


def memory_calls(sources: dict[str, Source]) -> list[tuple[str, tuple[int, int], tuple[int, int]]]:
    """Function, first and last line and column of each call to tl.load, tl.store and the atomics."""
    found = []
    for name, source in sources.items():
        for node in ast.walk(ast.parse(source["text"])):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CALLS:
                found.append((name, (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)))
    return found
