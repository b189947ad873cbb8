"""What a compiled kernel executes: the instructions of its loops, by kind, and the clocks they take of an SM.

Attention's products run on tensor cores, the rest of it elsewhere. Which of them a tile keeps busy longer cannot be
read off the source; it can be off the machine code (SASS), which `nvdisasm` of Triton's wheel prints on any machine.
In one clock an SM does at most

    tensor cores         2,048 FLOPs in 16 bits on an A100, 4,096 on an H100
    special functions    16: 2^x, 1/x, log2 x
    float32 units        64 multiply-adds, sums or products on an A100, 128 on an H100
    any instruction      128 of a thread: each of 4 schedulers starts one for the 32 threads of a warp

(CUDA C++ Programming Guide, throughput of arithmetic instructions; whitepapers of A100 and H100: 256 and 512
multiply-adds a clock in each of 4 tensor cores.) A score costs 4 d FLOPs and one power of 2: with d = 128 on an H100
512/4096 = 1/8 clock of tensor cores, and 1/16 of special functions. So powers take half as long as products, beside
them or, where nothing overlaps, after them (FlashAttention-3, Shah et al. 2024, §3.1); with d = 64, just as long. Any
other instruction that there is for each score takes 1/128.

A turn of the loop takes at least the longest of these times: that, if all units work side by side. Where a warp waits
for its product before it goes on and no other warp fills the gap, tensor cores and instructions add up. Waiting for
memory comes on top.
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
    "products": ("HGMMA", "QGMMA", "IGMMA", "HMMA", "QMMA", "IMMA", "DMMA"),  # of matrices, on tensor cores
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
PRODUCT_SHAPES = {"884": (8, 8, 4), "1688": (16, 8, 8), "16816": (16, 8, 16), "16832": (16, 8, 32)}  # of a warp
TENSOR_FLOPS_PER_CLOCK = {(8, 0): 2048, (9, 0): 4096}  # of an SM, 16-bit inputs, by compute capability
SPECIAL_PER_CLOCK = 16  # of an SM


@dataclass(frozen=True)
class Instruction:
    """One instruction of the machine code, without its guard: one that a thread does not execute takes its slot too."""

    operation: str  # FFMA
    variant: str  # .FTZ
    operands: str


@dataclass(frozen=True)
class LoopMix:
    """What a warp executes in one turn of a loop, without the loops inside of it: how many instructions of each kind.

    sometimes: of instructions that a branch may jump over. product_flops: of a warp's products, always.
    """

    always: Counter[str]
    sometimes: Counter[str]
    product_flops: int

    def per_score(self, kind: str, warps: int, scores: int) -> float:
        """Instructions of a thread for each score, in a block of `warps` warps that works out `scores` a turn."""
        return self.always[kind] * warps * WARP / scores


def machine_code(compiled: Compiled) -> str:
    """The kernel as the GPU executes it, in NVIDIA's assembly language."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.cubin)
        file.flush()
        disassembler = [triton.knobs.nvidia.nvdisasm.path, "-c", "--no-dataflow", file.name]
        return subprocess.run(disassembler, capture_output=True, text=True, check=True).stdout


def parse(code: str) -> tuple[list[Instruction], dict[str, int]]:
    """All instructions, and for each label the number of the instruction it stands before."""
    instructions, labels = [], {}
    for line in code.splitlines():
        if found := LABEL_LINE.match(line):
            labels[found[1]] = len(instructions)
        elif found := INSTRUCTION_LINE.match(line):
            instructions.append(Instruction(*found.groups()))
    return instructions, labels


def find_jumps(instructions: list[Instruction], labels: dict[str, int]) -> list[tuple[int, int]]:
    """From and to of every branch to a label."""
    jumps = []
    for number, instruction in enumerate(instructions):
        target = re.search(r"\.L\w+", instruction.operands)
        if instruction.operation == "BRA" and target:
            jumps.append((number, labels[target[0]]))
    return jumps


def kind_of(instruction: Instruction) -> str:
    """Its kind in KINDS; OTHER for all the rest: addresses, counters, moves, branches."""
    return next((kind for kind, operations in KINDS.items() if instruction.operation in operations), OTHER)


def flops_of(instruction: Instruction) -> int:
    """Of a warp's product; an HGMMA is the product of four warps together. 2 for each multiply-add."""
    if instruction.operation.endswith("GMMA"):
        rows, columns, inner = map(int, re.match(r"\.(\d+)x(\d+)x(\d+)", instruction.variant).groups())
        return 2 * rows * columns * inner // 4
    rows, columns, inner = PRODUCT_SHAPES[instruction.variant.split(".")[1]]
    return 2 * rows * columns * inner


def instruction_mix(compiled: Compiled) -> list[LoopMix]:
    """The kernel's loops, in the order in which they begin: each is the code between a label and the last branch back
    to it. What a loop calls is not in it. Raises ValueError where two loops share code and neither is in the other.
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
            raise ValueError(f"{compiled.name}: two of its loops overlap, and no count by loops is right")
    return [mix_of(loop, instructions, jumps, loops) for loop in loops]


def mix_of(loop: range, instructions: list[Instruction], jumps: list[tuple[int, int]], loops: list[range]) -> LoopMix:
    """The mix of one loop; `jumps` and `loops` are those of the whole kernel, in numbers of instructions."""
    inner = [other for other in loops if other != loop and other.start in loop]
    skipped = [range(source + 1, target) for source, target in jumps if source in loop and source < target in loop]
    always, sometimes, flops = Counter(), Counter(), 0
    for number in loop:
        if any(number in other for other in inner):
            continue
        kind = kind_of(instructions[number])
        if any(number in block for block in skipped):
            sometimes[kind] += 1
            continue
        always[kind] += 1
        flops += flops_of(instructions[number]) if kind == "products" else 0
    return LoopMix(always, sometimes, flops)


def main_loop(compiled: Compiled) -> LoopMix:
    """The loop with the most products. Raises ValueError where no loop has one."""
    loops = instruction_mix(compiled)
    if not any(loop.product_flops for loop in loops):
        raise ValueError(f"{compiled.name}: no loop of it has a product on tensor cores")
    return max(loops, key=lambda loop: loop.product_flops)


def loop_cycles(mix: LoopMix, gpu: GPU, warps: int) -> dict[str, float]:
    """Clocks of an SM that one turn of a block of `warps` warps keeps each unit busy, products in 16 bits. Without what
    is executed only sometimes. Raises ValueError for a GPU whose tensor cores are not in TENSOR_FLOPS_PER_CLOCK.
    """
    if gpu.compute_capability not in TENSOR_FLOPS_PER_CLOCK:
        raise ValueError(f"{gpu.name}: no figure for its tensor cores, only for compute capability 8.0 and 9.0")
    return {
        "tensor cores": mix.product_flops * warps / TENSOR_FLOPS_PER_CLOCK[gpu.compute_capability],
        "special functions": mix.always["special"] * warps * WARP / SPECIAL_PER_CLOCK,
        "float32 units": mix.always["float32"] * warps * WARP / gpu.cores_per_sm,
        "any instruction": mix.always.total() * warps / gpu.sub_partitions,
    }


def instruction_table(compiled: dict[str, Compiled], gpu: GPU) -> str:
    """A row for each kernel, by name: instructions of a warp in a turn of its main loop, by kind; those of the part
    that a branch may skip; registers and spilled bytes of a thread; and the clocks of `loop_cycles`.
    """
    kinds = ("products", "special", "float32", "maxima", "choices")
    heads = [*kinds, "all", "skipped", "registers", "spills", "tensor", "special", "float32", "issued"]
    wide = max(map(len, compiled))
    rows = [
        f"{'':<{wide}}{'instructions of a warp in a turn':>63}{'of a thread':>20}{'clocks of an SM for a turn':>36}",
        " " * wide
        + "".join(f"{head:>9}" for head in heads[:7])
        + "".join(f"{head:>10}" for head in heads[7:9])
        + "".join(f"{head:>9}" for head in heads[9:]),
    ]
    for name, kernel in compiled.items():
        mix = main_loop(kernel)
        counts = [*(mix.always[kind] for kind in kinds), mix.always.total(), mix.sometimes.total()]
        clocks = loop_cycles(mix, gpu, kernel.num_warps).values()
        rows.append(
            f"{name:<{wide}}"
            + "".join(f"{count:>9,}" for count in counts)
            + f"{kernel.registers:>10}{kernel.spilled_bytes:>10}"
            + "".join(f"{clock:>9,.0f}" for clock in clocks)
        )
    return "\n".join(rows)
