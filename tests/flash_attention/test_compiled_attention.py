"""Every configuration of the attention kernels compiles for an A100 and an H100, within their shared memory, with loads
of 16 bytes, products on the tensor cores that do not wait for each other, and no spills but the known. Triton's
compiler, on the CPU; pytest -s prints the table.
"""

import re
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import NamedTuple

import pytest
import torch
import triton

from compiled_once import compile_launches
from course_kit.gpu.ablations import undone
from course_kit.gpu.compiled import Compiled
from course_kit.gpu.launches import Launch
from course_lib.flash_attention.backward import (
    DELTA_ROWS,
    KEY_CONFIGURATIONS,
    QUERY_CONFIGURATIONS,
    delta_kernel,
    key_gradient_kernel,
    query_gradient_kernel,
)
from course_lib.flash_attention.forward import (
    FORWARD_CONFIGURATIONS,
    flash_forward_kernel,
    head_sizes,
    strides_of,
    wide_enough,
)
from course_lib.flash_attention.one_pass import ONE_PASS_CONFIGURATIONS, gradient_kernel
from course_lib.kernels.gpus import GPUS, occupancy

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="interpreted kernels are compiled apart")
GPUS_BY_CAPABILITY = {80: GPUS["A100"], 90: GPUS["H100"]}
WIDEST = 16  # bytes that a thread moves by one instruction
SERIALIZED = "C7515"  # NVIDIA's assembler: each product on the tensor cores waits for the one before
TUNED = {
    flash_forward_kernel: FORWARD_CONFIGURATIONS,
    query_gradient_kernel: QUERY_CONFIGURATIONS,
    key_gradient_kernel: KEY_CONFIGURATIONS,
    gradient_kernel: ONE_PASS_CONFIGURATIONS,
}
# Products of a tile: scores and out; scores, dp and dq; scores, dp, dk and dv; scores, dp, dk, dv and dq.
PRODUCTS = {"flash_forward_kernel": 2, "query_gradient_kernel": 3, "key_gradient_kernel": 4, "gradient_kernel": 5,
            "delta_kernel": 0}  # fmt: skip
# Known exceptions, in bytes a thread, and no more than these, by kernel, GPU, and (block_q, block_k, warps). The
# autotuner measures, and takes others; backward in one walk, whose sums are many, is measured against two walks.
SPILLED = {
    ("flash_forward_kernel", 90, (128, 64, 4)): 508,
    ("flash_forward_kernel", 90, (128, 128, 8)): 24,
    ("key_gradient_kernel", 90, (64, 64, 4)): 536,
    ("key_gradient_kernel", 90, (64, 64, 8)): 72,
    ("key_gradient_kernel", 90, (64, 128, 8)): 184,
    ("flash_forward_kernel", 80, (128, 64, 4)): 412,
    ("flash_forward_kernel", 80, (128, 128, 8)): 132,
    ("key_gradient_kernel", 80, (64, 64, 4)): 420,
    ("key_gradient_kernel", 80, (64, 64, 8)): 8,
    ("key_gradient_kernel", 80, (64, 128, 8)): 2820,
    ("query_gradient_kernel", 80, (64, 64, 4)): 36,
    ("query_gradient_kernel", 80, (128, 64, 8)): 1528,
    ("query_gradient_kernel", 80, (128, 128, 8)): 3048,
    ("query_gradient_kernel", 90, (128, 128, 8)): 8,
    ("gradient_kernel", 90, (64, 64, 4)): 540,
    ("gradient_kernel", 90, (64, 64, 8)): 76,
    ("gradient_kernel", 90, (64, 128, 8)): 248,
    ("gradient_kernel", 80, (64, 64, 4)): 80,
    ("gradient_kernel", 80, (64, 128, 8)): 40,
}


class Use(NamedTuple):
    """What attention is compiled for; `first`: only in the first configuration of each kernel."""

    capability: int
    dtype: torch.dtype
    head_dim: int
    causal: bool = True
    packed: bool = False
    first: bool = False


HALF = torch.bfloat16
USES = [
    Use(90, HALF, 128),
    Use(80, HALF, 128),
    Use(90, HALF, 64),
    Use(80, HALF, 64, first=True),
    Use(90, HALF, 128, causal=False, first=True),
    Use(90, HALF, 128, packed=True, first=True),
    Use(90, torch.float16, 96, first=True),
    Use(90, torch.float16, 128, packed=True, causal=False, first=True),
    Use(80, HALF, 64, packed=True, first=True),
    Use(80, torch.float16, 64, causal=False, first=True),
    Use(90, torch.float32, 64, first=True),
]


@dataclass
class Row:
    """A kernel in a configuration, as it would be launched, and what the compiler made of it."""

    use: Use
    launch: Launch
    made: Compiled | None = field(default=None, repr=False)

    def __str__(self) -> str:
        return f"{self.launch.name} {self.blocks} {self.use}"

    @property
    def blocks(self) -> tuple[int, ...]:
        meta = self.launch.meta
        return tuple(meta[name] for name in ("BLOCK_Q", "BLOCK_K", "num_warps") if name in meta)

    @property
    def blocks_per_sm(self) -> int:
        gpu = GPUS_BY_CAPABILITY[self.use.capability]
        return occupancy(gpu, 32 * self.made.num_warps, self.made.registers, self.made.shared_bytes).blocks_per_sm


def rows_of(use: Use) -> list[Row]:
    """Sizes are those of a model: 16 divides them and its strides, which is what lets loads be wide."""
    q, k = (torch.zeros(2, 16, heads, use.head_dim, dtype=use.dtype) for heads in (4, 2))
    lse, cu_seqlens = torch.zeros(2, 4, 16), torch.zeros(3, dtype=torch.int32) if use.packed else None
    shared = cu_seqlens, 16, 16, 2, 0.125, *strides_of(q, k, k), use.causal
    args = {
        flash_forward_kernel: (q, k, k, q, lse, *shared),
        query_gradient_kernel: (q, k, k, q, lse, lse, q, *shared),
        key_gradient_kernel: (q, k, k, q, lse, lse, k, k, *shared),
        gradient_kernel: (q, k, k, q, lse, lse, q.float(), k, k, *shared),
    }
    head = head_sizes(use.head_dim)
    found = [
        Launch(kernel.fn, (1,), args[kernel], configuration.all_kwargs() | head)
        for kernel, configurations in TUNED.items()
        for configuration in wide_enough(configurations, {"q": q})[: 1 if use.first else None]
        if kernel is not gradient_kernel or use.dtype != torch.float32  # which walks twice
    ]
    found.append(Launch(delta_kernel, (1,), (q, q, lse, cu_seqlens, 16), {"BLOCK_Q": DELTA_ROWS} | head))
    return [Row(use, launch) for launch in found]


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    found = list(chain.from_iterable(map(rows_of, USES)))
    for capability in GPUS_BY_CAPABILITY:
        chosen = [row for row in found if row.use.capability == capability]
        for row, made in zip(chosen, compile_launches([row.launch for row in chosen], capability), strict=True):
            row.made = made
    return found


def test_on_blackwell_products_are_tcgen05s_and_a_configuration_is_too_large():
    """The first configuration of each kernel. The autotuner leaves out what has no room in tensor memory."""
    found = rows_of(Use(90, HALF, 128, first=True))
    for row, made in zip(found, compile_launches([row.launch for row in found], 100), strict=True):
        assert ("tcgen05.mma" in made.ptx) == (row.launch.name != "delta_kernel"), row
        assert made.registers <= 255 and made.shared_bytes <= GPUS_BY_CAPABILITY[90].shared_bytes_per_block, row
    large = [row.launch for row in rows_of(Use(90, HALF, 128)) if row.launch.name == "gradient_kernel"]
    large = [launch for launch in large if (launch.meta["BLOCK_Q"], launch.meta["BLOCK_K"]) == (64, 128)]
    with pytest.raises(ValueError, match="gradient_kernel: it needs 576 columns of tensor memory"):
        compile_launches(large, 100)


@pytest.mark.nightly
def test_every_configuration_is_here_in_its_most_frequent_use(rows):
    found = {(row.launch.name, row.blocks) for row in rows if row.use == Use(90, HALF, 128)}
    wide = [each for tried in TUNED.values() for each in wide_enough(tried, {"q": torch.zeros(0).half()})]
    assert len(found) == 1 + len(wide) and {name for name, _ in found} == PRODUCTS.keys()


@pytest.mark.nightly
def test_table(rows):
    """Registers and spilled bytes of a thread, shared bytes of a block, blocks of an SM."""
    print(f"\n{'':<22}{'block_q, block_k, warps':<24}{'':<30}registers spilled  shared blocks")
    for row in sorted(rows, key=lambda row: (row.launch.name, row.use[0], str(row.use), row.blocks)):
        made, use = row.made, row.use
        how = f"{str(use.dtype)[6:]} {use.head_dim}{' causal' * use.causal}{' packed' * use.packed}"
        print(
            f"{row.launch.name:<22}{str(row.blocks):<16}sm_{use.capability:<5}{how:<30}{made.registers:>9} "
            f"{made.spilled_bytes:>7} {made.shared_bytes:>7} {row.blocks_per_sm:>6}"
        )


@pytest.mark.skipif(triton.__version__ < "3.7", reason="the bounds are the pinned Triton's")
@pytest.mark.nightly
def test_registers_without_spills(rows):
    """float32 apart: its products are not for tensor cores, and thousands of multiply-adds."""
    for row in rows:
        assert 0 < row.made.registers <= GPUS_BY_CAPABILITY[row.use.capability].max_registers_per_thread, str(row)
        if row.use.dtype != torch.float32:
            most = SPILLED.get((row.launch.name, row.use.capability, row.blocks), 0)
            assert row.made.spilled_bytes <= most, (str(row), row.made.spilled_bytes)


@pytest.mark.nightly
def test_blocks_fit_on_the_gpu(rows):
    for row in rows:
        assert row.blocks_per_sm > 0, (str(row), row.made.shared_bytes)


@pytest.mark.nightly
def test_loads_and_stores_of_tiles_are_16_bytes_wide(rows):
    for row in rows:
        tiles = [access for access in row.made.accesses if len(access.shape) == 2]
        if row.use.capability < 90:  # which adds in memory number by number
            tiles = [access for access in tiles if access.operation != "tt.atomic_rmw"]
        assert tiles and {access.bytes_per_thread for access in tiles} == {WIDEST}, str(row)


@pytest.mark.nightly
def test_products_are_on_the_tensor_cores_and_do_not_wait_for_each_other(rows):
    """Each is there once: one loop, not one with a mask and one without. On the H100 they are those of warp groups; in
    float32, which is not cut to TF32, they are multiply-adds.
    """
    for row in rows:
        made, products, exact = row.made, PRODUCTS[row.launch.name], row.use.dtype == torch.float32
        by_warp, by_warp_group = made.ttgir.count(" tt.dot "), made.ttgir.count(" ttng.warp_group_dot ")
        on_groups = row.use.capability == 90 and not exact
        assert (by_warp, by_warp_group) == ((0, products) if on_groups else (products, 0)), str(row)
        instructions = "mma.sync" in made.ptx, "wgmma.mma_async.sync" in made.ptx
        assert instructions == (products > 0 and not on_groups and not exact, products > 0 and on_groups), str(row)
        assert "ptxas" in made.report and SERIALIZED not in made.report, str(row)


def splits(made: Compiled) -> set[str]:
    """How the warps of a block share the rows and the columns of its products on the tensor cores."""
    return set(re.findall(r"nvidia_mma<{.*?warpsPerCTA = (\[\d+, \d+\])", made.ttgir))


@pytest.mark.nightly
def test_warps_share_the_queries_and_not_the_keys(rows):
    """So that a row's maximum and sum are one warp's affair. On the A100 with BLOCK_Q >= head_dim, by Triton's rule."""
    forward = [row for row in rows if row.launch.name == "flash_forward_kernel" and row.use.dtype != torch.float32]
    forward = [row for row in forward if row.use.capability == 90 or row.blocks[0] >= row.use.head_dim]
    assert {row.use.capability for row in forward} == {80, 90}
    for row in forward:
        assert splits(row.made) == {f"[{row.blocks[2]}, 1]"}, str(row)


def test_the_compiler_does_not_look_past_a_transposition():
    """The control: with k as rows, and transposed, an A100's warps divide the keys."""
    transposed = undone(
        flash_forward_kernel,
        {
            "k_tile = load_columns(": "k_tile = load_rows(",
            "dot(q_tile, k_tile,": "dot(q_tile, tl.trans(k_tile),",
        },
    )
    wide = next(row.launch for row in rows_of(Use(80, HALF, 128)) if row.blocks == (128, 64, 8))
    assert "[8, 1]" not in splits(compile_launches([replace(wide, kernel=transposed)], 80)[0])
