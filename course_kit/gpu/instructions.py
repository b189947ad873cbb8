"""The instructions that the loops of a compiled kernel execute, by kind, and the clocks of an SM that they take.

Attention's matmuls run on tensor cores, the rest runs elsewhere. Which of the two a tile keeps busy longer cannot be
read off the source, but can be read off the machine code (SASS), which `nvdisasm` of Triton's wheel prints on any
machine. In one clock an SM does at most

    tensor cores         2,048 FLOPs in 16 bits on an A100, 4,096 on an H100
    special functions    16: 2^x, 1/x, log2 x
    float32 units        64 multiply-adds, sums or products on an A100, 128 on an H100
    any instruction      128 of a thread: each of 4 schedulers starts one for the 32 threads of a warp

(CUDA C++ Programming Guide, throughput of arithmetic instructions; whitepapers of A100 and H100: 256 and 512
multiply-adds per clock in each of 4 tensor cores.) A score costs 4 d FLOPs and one power of 2: with d = 128 on an H100
512/4096 = 1/8 clock of tensor cores, and 1/16 of special functions. Powers therefore take half as long as matmuls, in
parallel or, if nothing overlaps, after them (FlashAttention-3, Shah et al. 2024, §3.1); with d = 64, just as long. Any
other instruction per score takes 1/128.

An iteration of the loop takes at least the longest of these times, which it reaches if all units work in parallel. If a
warp waits for its matmul and no other warp fills the gap, the times of tensor cores and instructions add up. Waits for
memory come on top.
"""

import itertools
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass

import triton

from course_kit.gpu.compiled import Compiled
from course_lib.kernels.gpus import GPU, WARP

KINDS = {
    "matmuls": ("HGMMA", "QGMMA", "IGMMA", "HMMA", "QMMA", "IMMA", "DMMA"),  # on tensor cores
    "special": ("MUFU",),
    "float32": ("FADD", "FMUL", "FFMA"),
    "maxima": ("FMNMX",),
    "choices": ("FSEL", "SEL", "FSETP", "ISETP", "UISETP", "USEL", "PLOP3"),  # comparisons too
    "conversions": ("F2FP", "F2F", "F2I", "I2F", "I2FP", "FRND"),
    "shuffles": ("SHFL", "MOVM", "REDUX"),
    "shared": ("LDS", "LDSM", "STS", "STSM", "ATOMS"),
    "copies": ("LDGSTS", "UTMALDG", "UTMASTG", "UBLKCP"),  # from memory straight to shared memory
    "memory": ("LDG", "STG", "LD", "ST", "ATOM", "ATOMG", "RED", "REDG"),
    "spills": ("LDL", "STL"),
    "waits": ("BAR", "DEPBAR", "WARPGROUP", "LDGDEPBAR", "SYNCS", "MEMBAR", "FENCE", "WARPSYNC"),
}
OTHER = "other"
INSTRUCTION_LINE = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\w*)((?:\.\w+)*)(.*?);")
LABEL_LINE = re.compile(r"(\.L\w+):")
MATMUL_SHAPES = {"884": (8, 8, 4), "1688": (16, 8, 8), "16816": (16, 8, 16), "16832": (16, 8, 32)}  # of a warp
TENSOR_FLOPS_PER_CLOCK = {(8, 0): 2048, (9, 0): 4096}  # of an SM, 16-bit inputs, by compute capability
SPECIAL_PER_CLOCK = 16  # of an SM


@dataclass(frozen=True)
class Instruction:
    """One instruction of the machine code, without its predicate: an instruction that is predicated off takes its slot
    too.
    """

    operation: str  # FFMA
    variant: str  # .FTZ
    operands: str


@dataclass(frozen=True)
class LoopMix:
    """The instructions that a warp executes in one iteration of a loop, without its inner loops: how many of each kind.

    sometimes: instructions that a branch may skip. matmul_flops: of a warp's unconditional matmuls.
    """

    always: Counter[str]
    sometimes: Counter[str]
    matmul_flops: int

    def per_score(self, kind: str, warps: int, scores: int) -> float:
        """Return a thread's instructions per score, for a block of `warps` warps with `scores` per iteration."""
        return self.always[kind] * warps * WARP / scores


def machine_code(compiled: Compiled) -> str:
    """Return the kernel as the GPU executes it, in NVIDIA's assembly language."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.cubin)
        file.flush()
        disassembler = [triton.knobs.nvidia.nvdisasm.path, "-c", "--no-dataflow", file.name]
        return subprocess.run(disassembler, capture_output=True, text=True, check=True).stdout


def parse(code: str) -> tuple[list[Instruction], dict[str, int]]:
    """Return all instructions, and for each label the index of the instruction that follows it."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in code.splitlines():
        if match := LABEL_LINE.match(line):
            labels[match[1]] = len(instructions)
        elif match := INSTRUCTION_LINE.match(line):
            instructions.append(Instruction(*match.groups()))
    return instructions, labels


def find_jumps(instructions: list[Instruction], labels: dict[str, int]) -> list[tuple[int, int]]:
    """Return the indices (from, to) of every branch to a label."""
    jumps = []
    for number, instruction in enumerate(instructions):
        target = re.search(r"\.L\w+", instruction.operands)
        if instruction.operation == "BRA" and target:
            jumps.append((number, labels[target[0]]))
    return jumps


def kind_of(instruction: Instruction) -> str:
    """Return the kind of an instruction in KINDS; OTHER for addresses, counters, moves and branches."""
    return next((kind for kind, operations in KINDS.items() if instruction.operation in operations), OTHER)


def flops_of(instruction: Instruction) -> int:
    """Return the FLOPs of a warp's matmul; four warps share the matmul of an HGMMA. A multiply-add counts 2."""
    if instruction.operation.endswith("GMMA"):
        rows, columns, inner = map(int, re.findall(r"\d+", instruction.variant)[:3])
        return 2 * rows * columns * inner // 4
    rows, columns, inner = MATMUL_SHAPES[instruction.variant.split(".")[1]]
    return 2 * rows * columns * inner


def instruction_mix(compiled: Compiled) -> list[LoopMix]:
    """Return the kernel's loops, in the order in which they begin: each is the code between a label and the last branch
    back to it. Functions that a loop calls do not count. Raises ValueError if two loops share code and neither
    contains the other.
    """
    instructions, labels = parse(machine_code(compiled))
    jumps = find_jumps(instructions, labels)
    ends: dict[int, int] = {}
    for source, target in jumps:
        if target < source:  # a branch to itself only fills the end of the code
            ends[target] = max(source, ends.get(target, 0))
    loops = [range(start, end + 1) for start, end in sorted(ends.items())]
    for first, second in itertools.combinations(loops, 2):
        if second.start < first.stop < second.stop:
            raise ValueError(f"{compiled.name}: two of its loops overlap, so instructions cannot be counted by loop")
    return [mix_of(loop, instructions, jumps, loops) for loop in loops]


def mix_of(loop: range, instructions: list[Instruction], jumps: list[tuple[int, int]], loops: list[range]) -> LoopMix:
    """Return the mix of one loop. jumps, loops: of the full kernel, in indices of instructions."""
    inner = [other for other in loops if other != loop and other.start in loop]
    skipped = [range(source + 1, target) for source, target in jumps if source in loop and source < target in loop]
    always, sometimes, flops = Counter[str](), Counter[str](), 0
    for number in loop:
        if any(number in other for other in inner):
            continue
        kind = kind_of(instructions[number])
        if any(number in block for block in skipped):
            sometimes[kind] += 1
            continue
        always[kind] += 1
        flops += flops_of(instructions[number]) if kind == "matmuls" else 0
    return LoopMix(always, sometimes, flops)


def main_loop(compiled: Compiled) -> LoopMix:
    """Return the loop with the most matmul FLOPs. Raises ValueError if no loop has a matmul."""
    loops = instruction_mix(compiled)
    if not any(loop.matmul_flops for loop in loops):
        raise ValueError(f"{compiled.name}: none of its loops has a matmul on tensor cores")
    return max(loops, key=lambda loop: loop.matmul_flops)


def loop_cycles(mix: LoopMix, gpu: GPU, warps: int) -> dict[str, float]:
    """Return the clocks of an SM for which one iteration of a block of `warps` warps keeps each unit busy, with matmuls
    in 16 bits and without instructions that a branch may skip. Raises ValueError for a GPU whose tensor cores are not
    in TENSOR_FLOPS_PER_CLOCK.
    """
    if gpu.compute_capability not in TENSOR_FLOPS_PER_CLOCK:
        raise ValueError(f"{gpu.name}: no figure for its tensor cores, only for compute capability 8.0 and 9.0")
    return {
        "tensor cores": mix.matmul_flops * warps / TENSOR_FLOPS_PER_CLOCK[gpu.compute_capability],
        "special functions": mix.always["special"] * warps * WARP / SPECIAL_PER_CLOCK,
        "float32 units": mix.always["float32"] * warps * WARP / gpu.cores_per_sm,
        "any instruction": mix.always.total() * warps / gpu.sub_partitions,
    }


def instruction_table(compiled: dict[str, Compiled], gpu: GPU) -> str:
    """Return a table with a row for each kernel, by name: a warp's instructions in one iteration of its main loop, by
    kind; the instructions that a branch may skip; registers and spilled bytes per thread; the clocks of `loop_cycles`.
    """
    kinds = ("matmuls", "special", "float32", "maxima", "choices")
    heads = [*kinds, "all", "skipped", "regs", "spills", "tensor", "special", "float32", "issued"]
    wide = max(map(len, compiled))
    widths = [max(len(head), len("1,024")) + 1 for head in heads]

    def row(name: str, cells: list) -> str:
        return f"{name:<{wide}}" + "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))

    groups = {"instructions of a warp per iteration": 7, "per thread": 2, "SM clocks per iteration": 4}
    ends = [*itertools.accumulate(groups.values())]
    titles = zip(groups, [0, *ends], ends, strict=False)
    rows = [" " * wide + "".join(f"{title:>{sum(widths[a:b])}}" for title, a, b in titles), row("", heads)]
    for name, kernel in compiled.items():
        mix = main_loop(kernel)
        counts = [*(mix.always[kind] for kind in kinds), mix.always.total(), mix.sometimes.total()]
        clocks = loop_cycles(mix, gpu, kernel.num_warps).values()
        cells = [*counts, kernel.registers, kernel.spilled_bytes, *clocks]
        rows.append(row(name, [f"{cell:,.0f}" for cell in cells]))
    return "\n".join(rows)
