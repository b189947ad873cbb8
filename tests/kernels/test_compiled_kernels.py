"""Every kernel of the course's operators compiles for an A100 and an H100, in registers and shared memory that they
have, without spills, and with loads as wide as there are. Triton's compiler, on the CPU; pytest -s prints the table.
"""

import contextlib
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import prod
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import triton
from triton.runtime.interpreter import InterpretedFunction

from compiled_once import compile_launches
from course_kit.gpu.compiled import Compiled, request
from course_kit.gpu.instructions import main_loop
from course_kit.gpu.launches import Launch, record_launches
from course_lib.kernels import fused_norm
from course_lib.kernels.elu import elu
from course_lib.kernels.fused_adamw import adamw_step
from course_lib.kernels.fused_loss import linear_cross_entropy
from course_lib.kernels.fused_norm import rms_norm
from course_lib.kernels.fused_rope import rope
from course_lib.kernels.fused_softmax import softmax
from course_lib.kernels.fused_swiglu import swiglu
from course_lib.kernels.gpus import GPU, GPUS, Occupancy, occupancy
from course_lib.kernels.matmul import CONFIGURATIONS, matmul_kernel

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="interpreted kernels are compiled apart")
GPUS_BY_CAPABILITY = {80: GPUS["A100"], 90: GPUS["H100"]}
WIDEST = 16  # bytes that a thread moves by one instruction
LARGE = 256  # elements of a block
PRODUCTS = {80: CONFIGURATIONS[:5], 90: CONFIGURATIONS}  # on the A100 those with the largest tiles, and the first
DTYPES = [torch.bfloat16, torch.float32]
# Known exceptions, in bytes a thread, and no more than these: kernel, operator, dtype.
SPILLED = {
    ("norm_backward_kernel", "norm + 16384", "bfloat16"): 180,
    # 1,704 on the A100, whose shared memory has no room for a second stage; 180 on the H100
    ("norm_backward_kernel", "norm + 16384", "float32"): 1704,
    ("long_norm_forward_kernel", "norm + 32768", "float32"): 16 if triton.__version__ < "3.7" else 0,
    ("matmul_kernel", "matmul", "bfloat16"): 60 if triton.__version__ < "3.7" else 4,  # one configuration, on the A100
}


def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, requires_grad=dtype.is_floating_point)


def backward(out) -> None:
    sum(part.float().sum() for part in (out if isinstance(out, tuple) else (out,))).backward()


def run_norm(dtype: torch.dtype, hidden: int, residual: bool) -> None:
    x, weight = zeros(2, hidden, dtype=dtype), zeros(hidden, dtype=dtype)
    backward(rms_norm(x, weight, 1e-5, zeros(2, hidden, dtype=dtype) if residual else None))


def run_rope(dtype: torch.dtype, heads: int, head_dim: int) -> None:
    angles = torch.zeros(1, head_dim // 2, dtype=dtype)
    backward(rope(zeros(1, 1, heads, head_dim, dtype=dtype), angles, angles))


def run_loss(dtype: torch.dtype, vocab: int) -> None:
    hidden, weight = zeros(2, 8, dtype=dtype), zeros(vocab, 8, dtype=dtype)
    linear_cross_entropy(hidden, weight, torch.zeros(2, dtype=torch.int64), chunk_rows=2).backward()


def run_adamw(dtype: torch.dtype) -> None:
    """With gradients of `dtype`, and the copy in bfloat16 that goes with it."""
    master, exp_avg, exp_avg_sq = torch.zeros(3, 2048).unbind()
    weights = torch.zeros(2048, dtype=dtype) if dtype != torch.float32 else None
    adamw_step(master, torch.zeros(2048, dtype=dtype), exp_avg, exp_avg_sq, torch.ones(()), 1e-3, weights=weights)


# The widths of models, the most that a program holds of a row, and a row that goes by in blocks.
OPERATORS: dict[str, Callable[[torch.dtype], None]] = {
    "elu": lambda dtype: backward(elu(zeros(2, 4096, dtype=dtype))),
    "softmax 16384": lambda dtype: backward(softmax(zeros(2, 16384, dtype=dtype))),
    "softmax 32768": lambda dtype: backward(softmax(zeros(2, 32768, dtype=dtype))),
    "norm 4096": lambda dtype: run_norm(dtype, 4096, residual=False),
    "norm + 4096": lambda dtype: run_norm(dtype, 4096, residual=True),
    "norm + 16384": lambda dtype: run_norm(dtype, 16384, residual=True),
    "norm + 32768": lambda dtype: run_norm(dtype, 32768, residual=True),
    "swiglu 14336": lambda dtype: backward(swiglu(zeros(2, 14336, dtype=dtype), zeros(2, 14336, dtype=dtype))),
    "rope 32 x 128": lambda dtype: run_rope(dtype, 32, 128),
    "rope 3 x 80": lambda dtype: run_rope(dtype, 3, 80),
    "loss 128256": lambda dtype: run_loss(dtype, 128256),
    "adamw": run_adamw,
}


@dataclass
class Row:
    """A kernel as an operator would launch it on a GPU, and what the compiler made of it."""

    operator: str
    dtype: str
    capability: int
    launch: Launch
    made: Compiled | None = field(default=None, repr=False)

    def __str__(self) -> str:
        return f"{self.operator} {self.dtype} {self.launch.name} sm_{self.capability}"

    @property
    def occupancy(self) -> Occupancy:
        threads = 32 * self.made.num_warps
        return occupancy(GPUS_BY_CAPABILITY[self.capability], threads, self.made.registers, self.made.shared_bytes)

    def narrow(self) -> dict[int, int]:
        """Lines of the source with accesses of large blocks that are less wide than they could be, with their bytes.

        Small are single numbers, a row's statistics, a head's angles, and what a block of add_parts writes.
        """
        return {
            access.call[1]: access.bytes_per_thread
            for access in self.made.accesses
            if access.bytes_per_thread < WIDEST and prod(access.shape) >= LARGE
        }


@contextlib.contextmanager
def launches_on(gpu: GPU) -> Iterator[list[Launch]]:
    """Launches inside, with the settings for this GPU; no kernel runs, since results do not matter here."""
    asked = fused_norm.backward_resources
    has = SimpleNamespace(multi_processor_count=gpu.sms, shared_memory_per_block_optin=gpu.shared_bytes_per_block)
    with (
        mock.patch.object(InterpretedFunction, "run", lambda *args, **settings: None),
        mock.patch.object(torch.cuda, "get_device_properties", lambda device: has),
        mock.patch.object(fused_norm, "backward_resources", lambda _, *sizes: asked(torch.device("cuda"), *sizes)),
        record_launches() as launches,
    ):
        yield launches


def recorded_rows(capability: int) -> list[Row]:
    """All launches of all operators that the compiler would tell apart, and the configurations of the product."""
    found: dict[bytes, Row] = {}
    for name, run in OPERATORS.items():
        for dtype in DTYPES:
            if capability == 80 and dtype == torch.float32 and "norm" not in name:
                continue  # as on the H100; only the norm's settings depend on the GPU
            with launches_on(GPUS_BY_CAPABILITY[capability]) as launches:
                run(dtype)
            assert launches, f"{name} launched nothing"
            for launch in launches:
                row = Row(name, str(dtype).removeprefix("torch."), capability, launch)
                found.setdefault(pickle.dumps(request(launch)), row)
    half = torch.zeros(64, 64, dtype=torch.bfloat16)
    args = half, half, half, 64, 64, 64, *half.stride(), *half.stride()
    products = [Launch(matmul_kernel.fn, (1,), args, each.all_kwargs()) for each in PRODUCTS[capability]]
    return [*found.values(), *(Row("matmul", "bfloat16", capability, launch) for launch in products)]


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    found = {capability: recorded_rows(capability) for capability in GPUS_BY_CAPABILITY}
    for capability, rows in found.items():
        for row, made in zip(rows, compile_launches([row.launch for row in rows], capability), strict=True):
            row.made = made
    return [row for rows in found.values() for row in rows]


def test_every_kernel_of_the_operators_is_here(rows):
    names = {row.launch.name for row in rows}
    assert {
        "elu_kernel", "elu_backward_kernel", "softmax_forward_kernel", "softmax_long_forward_kernel",
        "softmax_backward_kernel", "softmax_long_backward_kernel", "norm_forward_kernel", "norm_backward_kernel",
        "long_norm_forward_kernel", "long_norm_backward_kernel", "add_parts_kernel", "swiglu_forward_kernel",
        "swiglu_backward_kernel", "rope_kernel", "cross_entropy_kernel", "adamw_kernel", "matmul_kernel",
    } == names  # fmt: skip


def test_table(rows):
    """Registers and spilled bytes of a thread, shared bytes of a block, widths of the accesses."""
    print(f"\n{'':<14}{'':<29}{'':<9}{'':>6} warps registers spilled  shared occupancy  bytes")
    for row in sorted(rows, key=lambda row: (row.operator, row.launch.name, row.dtype)):
        made, widths = row.made, sorted({access.bytes_per_thread for access in row.made.accesses})
        print(
            f"{row.operator:<14}{row.launch.name:<29}{row.dtype:<9}sm_{row.capability:<3} {made.num_warps:>5} "
            f"{made.registers:>9} {made.spilled_bytes:>7} {made.shared_bytes:>7} {row.occupancy.fraction:>9.0%}  "
            f"{'/'.join(map(str, widths))}"
        )


def test_registers_without_spills(rows):
    for row in rows:
        assert 0 < row.made.registers <= GPUS_BY_CAPABILITY[row.capability].max_registers_per_thread, row
    spilled = {(row.launch.name, row.operator, row.dtype): 0 for row in rows}
    for row in rows:
        name = row.launch.name, row.operator, row.dtype
        spilled[name] = max(spilled[name], row.made.spilled_bytes)
    assert not {name: most for name, most in spilled.items() if most > SPILLED.get(name, 0)}


def test_blackwell_takes_them_as_they_are(rows):
    """In bfloat16, with an H100's settings (a B200 has as much memory for a block): no spills but the known ones."""
    chosen = [row for row in rows if row.capability == 90 and row.dtype == "bfloat16"]
    made = compile_launches([row.launch for row in chosen], 100)
    spilled = {str(row): each.spilled_bytes for row, each in zip(chosen, made, strict=True) if each.spilled_bytes}
    assert spilled.keys() <= {str(row) for row in chosen if (row.launch.name, row.operator, row.dtype) in SPILLED}
    assert max(spilled.values(), default=0) <= 180, spilled
    assert all(each.shared_bytes <= GPUS["H100"].shared_bytes_per_block for each in made)


def test_blocks_fit_on_the_gpu(rows):
    for row in rows:
        assert row.made.shared_bytes <= GPUS_BY_CAPABILITY[row.capability].shared_bytes_per_block, row
        assert row.occupancy.blocks_per_sm > 0, row


def test_large_tensors_are_moved_16_bytes_at_a_time(rows):
    """At sizes that 16 divides, aligned as PyTorch's allocator aligns."""
    for row in rows:
        assert any(prod(access.shape) >= LARGE for access in row.made.accesses), row
        if row.launch.name == "adamw_kernel":  # four elements a thread: 16 bytes of float32, 8 of bfloat16
            assert set(row.narrow().values()) <= {8} and row.made.shared_bytes == 0, str(row)
        else:
            assert not row.narrow(), (str(row), row.narrow())


def test_products_in_every_configuration(rows):
    """What the autotuner may choose: tiles come 16 bytes at a time, and what runs ahead of the products fits."""
    found = [row for row in rows if row.launch.name == "matmul_kernel"]
    assert len(found) == sum(map(len, PRODUCTS.values()))
    for row in found:
        assert {access.bytes_per_thread for access in row.made.accesses} == {WIDEST}, row
        tiles = 2 * row.launch.meta["block_k"] * (row.launch.meta["block_m"] + row.launch.meta["block_n"])
        assert row.made.shared_bytes >= (row.launch.meta["num_stages"] - 1) * tiles, row
        if (row.capability, row.launch.meta["block_n"]) == (90, 256):
            assert main_loop(row.made).always.total() <= 140, "tiles' addresses move on; anew in each turn: 174"
