"""The loads and stores of a compiled kernel: which thread accesses which element, and how wide.

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
SourcePosition = tuple[str, int, int]  # a function's full name, line counted from its `def` (1), column
Bases = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Access:
    """One load, store or atomic operation on global memory. Bit i of the index of a register, lane or warp moves the
    element that it holds by bases[i] along each dimension of the block, by XOR (Triton's linear layouts); a scalar has
    no bases.
    """

    operation: str  # tt.load, tt.store, …
    call: SourcePosition  # of the call in the source
    shape: tuple[int, ...]  # of the block
    registers: Bases
    lanes: Bases
    warps: Bases
    bytes_per_thread: int  # of one instruction; 16 is the most


def find_accesses(ttgir: str, ptx: str, sources: dict[str, Source], target: GPUTarget) -> list[Access]:
    """Return every access of the compiled kernel, in the order of the compiler's text. Repeated accesses (a pipelined
    loop has its loads twice) count once. An access in a function that is called with addresses of several alignments
    is listed with each width.
    """
    lines = [line for line in ttgir.splitlines() if OPERATION.search(line)]
    shapes = [tuple(map(int, re.findall(r"(\d+)x", group(r": \(?tensor<[\dx]+", line, 0)))) for line in lines]
    positions, widths, calls = locations(ttgir), instruction_bytes(ptx), memory_calls(sources)
    accesses: list[Access] = []
    for line, shape, bases in zip(lines, shapes, layouts(ttgir, shapes, target), strict=True):
        position = positions[group(r"loc\((#loc\d*)\)\s*$", line)]
        # an instruction's position is where the last argument of its call begins; another call may begin there, as in
        # tl.store(x, tl.load(y) + 1)
        enclosing = [call for call in calls if call[0] == position[0] and call[1] < position[1:] <= call[2]]
        name, first, _ = max(enclosing, key=lambda call: call[1])  # the innermost
        operation, (registers, lanes, warps) = group(OPERATION, line), bases
        accesses += [
            Access(operation, (name, *first), shape, registers, lanes, warps, width)
            for width in sorted(widths[position])
        ]
    return list(dict.fromkeys(accesses))


def group(pattern: str | re.Pattern[str], text: str, number: int = 1) -> str:
    """Return a group of a pattern's first match in a text; "" if the pattern does not match."""
    match = re.search(pattern, text)
    return match[number] if match else ""


def layouts(ttgir: str, shapes: list[tuple[int, ...]], target: GPUTarget) -> list[tuple[Bases, Bases, Bases]]:
    """Return the bases of the registers, lanes and warps of each access, by the compiler's own conversion to linear
    layouts.
    """
    context = ir.context()
    ir.load_dialects(context)
    CUDABackend(target).load_dialects(context)
    with tempfile.NamedTemporaryFile("w", suffix=".ttgir") as file:
        file.write(ttgir)
        file.flush()
        module = ir.parse_mlir_module(file.name, context)
    builder = gluon_ir.GluonOpBuilder(context)
    all_bases: list[tuple[Bases, Bases, Bases]] = []

    def visit(operation) -> None:
        if operation.get_name() not in OPERATIONS:
            return
        shape = shapes[len(all_bases)]
        if not shape:  # a scalar
            all_bases.append(((), (), ()))
            return
        layout = builder.get_gluon_layout_from_tensor(operation.get_operand(0))
        linear = builder.to_linear_layout(layout._to_ir(builder), list(shape))
        registers, lanes, warps = (
            tuple(map(tuple, bases)) for bases in (linear.reg_bases, linear.lane_bases, linear.warp_bases)
        )
        all_bases.append((registers, lanes, warps))

    module.walk(visit)
    return all_bases


def locations(ttgir: str) -> dict[str, SourcePosition]:
    """Return the source position of each location name in the text: of the innermost call if functions were inlined."""
    texts = dict(re.findall(r"^(#loc\d*) = loc\((.*)\)$", ttgir, flags=re.MULTILINE))

    def position_of(name: str) -> SourcePosition | None:
        text = texts[name]
        if match := re.match(r'"(.*)":(\d+):(\d+)', text):
            return match[1], int(match[2]), int(match[3])
        inner = re.search(r"#loc\d*", text)
        return position_of(inner[0]) if inner else None

    positions = {name: position_of(name) for name in texts}
    return {name: position for name, position in positions.items() if position is not None}


def instruction_bytes(ptx: str) -> dict[SourcePosition, set[int]]:
    """Return the bytes that a thread moves by one instruction, for each source position that accesses global memory."""
    files = dict(re.findall(r'^\s*\.file\s+(\d+) "(.*?)"', ptx, flags=re.MULTILINE))
    widths: dict[SourcePosition, set[int]] = {}
    position: SourcePosition = "", 0, 0
    for line in ptx.splitlines():
        if move := re.match(r"\s*\.loc\s+(\d+) (\d+) (\d+)", line):
            position = files[move[1]], int(move[2]), int(move[3])
        elif wide := ASYNCHRONOUS.search(line):
            widths.setdefault(position, set()).add(int(wide[1], 0))
        elif wide := INSTRUCTION.search(line):
            widths.setdefault(position, set()).add(int(wide[1] or 1) * int(wide[2]) // 8 * int(wide[3] or 1))
    return widths


def memory_calls(sources: dict[str, Source]) -> list[tuple[str, tuple[int, int], tuple[int, int]]]:
    """Return the function and the first and last position (line, column) of each call of tl.load, tl.store and the
    atomics.
    """
    return [
        (name, (node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0))
        for name, source in sources.items()
        for node in ast.walk(ast.parse(source["text"]))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CALLS
    ]
