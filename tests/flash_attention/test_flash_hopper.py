"""course_lib.flash_attention.hopper: attention by TMA is exact, and what it compiles to for sm_90. Interpreted, or on
Hopper.
"""

import dataclasses
import re
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.runtime.interpreter import InterpreterBuilder

from compiled_once import compile_launches
from course_kit.checks.kernels import run_guarded
from course_kit.gpu.ablations import undone
from course_kit.gpu.launches import record_launches
from course_lib.context_parallel.blocks import plain_forward
from course_lib.flash_attention import hopper as flash_hopper
from course_lib.flash_attention import operator as flash_attention
from course_lib.flash_attention.hopper import (
    HOPPER_CONFIGURATIONS,
    hopper_attention,
    hopper_forward_kernel,
    suits_hopper,
)
from course_lib.kernels.gpus import GPUS
from warp_groups import moved_twice

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.bfloat16, torch.float16) if DEVICE == "cuda" else (torch.bfloat16, torch.float16, torch.float32)
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}  # of the largest value
pytestmark = pytest.mark.skipif(
    DEVICE == "cuda" and torch.cuda.get_device_capability()[0] != 9, reason="this GPU is not a Hopper"
)
HEAD_DIM = 16 if DEVICE == "cpu" else 128  # on a GPU the split kernel is for more than 64
both_ideas = pytest.mark.parametrize("overlapped", [False, True])


def inputs(queries=70, keys=70, heads=2, kv_heads=1, head_dim=HEAD_DIM, dtype=torch.float16, batch=1):
    """q, k, v as views of wider rows: what lies between the heads is not theirs."""
    torch.manual_seed(0)
    sizes = [(queries, heads), (keys, kv_heads), (keys, kv_heads)]
    return [(2 * torch.randn(batch, s, a, head_dim + 8, device=DEVICE)).to(dtype)[..., :head_dim] for s, a in sizes]


def skip_where_refused(head_dim, overlapped):
    if DEVICE == "cuda" and not overlapped and head_dim <= 64:
        pytest.skip("on a GPU the split kernel is for heads of more than 64")


def assert_exact(q, k, v, causal, overlapped, scale=None):
    def run(*tensors):
        return hopper_attention(*tensors, causal=causal, scale=scale, overlapped=overlapped)

    skip_where_refused(q.shape[3], overlapped)
    out, lse = (x.cpu() for x in run_guarded(hopper_forward_kernel, run, q, k, v))
    factor = 1.0 if scale is None else scale * q.shape[-1] ** 0.5
    wanted, wanted_lse = plain_forward(q.cpu().double() * factor, k.cpu().double(), v.cpu().double(), causal)
    assert out.dtype == q.dtype and lse.dtype == torch.float32
    of_scores = 8 * torch.finfo(torch.float32).eps * wanted_lse.abs().max().item()  # that an exponential makes larger
    bound = (TOLERANCE[q.dtype] + of_scores) * v.abs().max().item()
    torch.testing.assert_close(out.double(), wanted, rtol=0, atol=bound)
    torch.testing.assert_close(lse.double(), wanted_lse.transpose(1, 2), rtol=1e-5, atol=1e-5)


@both_ideas
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_exact_with_ragged_ends_and_shared_heads(dtype, causal, overlapped):
    assert_exact(*inputs(150, 150, 4, 2, dtype=dtype), causal, overlapped)


@both_ideas
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "shape",
    [
        {"queries": 140, "keys": 40},
        {"queries": 40, "keys": 140},
        {"queries": 1, "keys": 1},
        {"queries": 128, "keys": 128, "batch": 2},  # whole tiles: no mask where it is not causal
        {"head_dim": 24},  # in tiles of 32, zeros at the end
        {"head_dim": 128, "queries": 20, "keys": 20},
    ],
)
def test_exact_in_other_shapes(shape, causal, overlapped):
    assert_exact(*inputs(**shape), causal, overlapped)


@both_ideas
@pytest.mark.parametrize("scale", [1e-3, 30.0])
def test_scale_and_large_scores(scale, overlapped):
    assert_exact(*inputs(dtype=DTYPES[-1]), True, overlapped, scale)


@both_ideas
@pytest.mark.skipif(DEVICE == "cuda", reason="counts in the interpreter")
def test_tiles_that_no_query_sees_are_not_loaded(overlapped):
    q, k, v = inputs(512, 512, heads=1)
    loaded = []

    def counting(self, *arguments, load=InterpreterBuilder.create_descriptor_load):
        loaded.append(1)
        return load(self, *arguments)

    with mock.patch.object(InterpreterBuilder, "create_descriptor_load", counting):
        hopper_attention(q, k, v, overlapped=overlapped)
    seen = sum(last // 64 for last in (128, 256, 384, 512))
    assert len(loaded) == 4 + 2 * seen  # q once for each tile of queries; k and v


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("overlapped", [False, True])
def test_every_configuration_fits_a_hopper_without_spills(overlapped, head_dim):
    skip_where_refused(head_dim, overlapped)
    with record_launches() as launches:
        hopper_attention(*inputs(256, 256, heads=1, head_dim=head_dim, dtype=torch.bfloat16), overlapped=overlapped)
    (launch,) = launches
    choices = HOPPER_CONFIGURATIONS[overlapped]
    every = compile_launches([dataclasses.replace(launch, meta=launch.meta | each.all_kwargs()) for each in choices])
    for each, made in zip(choices, every, strict=True):
        assert made.spilled_bytes == 0 and made.shared_bytes <= GPUS["H100"].shared_bytes_per_block, each


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda q, k, v: (q[..., 4:12], k[..., :8], v[..., :8]), "q has strides .* from address"),
        (lambda q, k, v: (q.transpose(1, 3).contiguous().transpose(1, 3), k, v), "q has strides"),
        (lambda q, k, v: (q, k, torch.cat([v, v], -1)[..., ::2]), "v has strides"),
        (lambda q, k, v: (q, torch.zeros(1, 70, 1, 20, device=DEVICE).half()[..., :16], v), "k has strides"),
        (lambda q, k, v: (q, k[:, :1].expand_as(k), v), "k has strides"),
        (lambda q, k, v: [x[..., :12] for x in (q, k, v)], "multiple of 16 bytes"),
        (lambda q, k, v: (q, k[:, :0], v[:, :0]), "at least one"),
        (lambda q, k, v: (q, k, v[:, :9]), "tokens"),
        (lambda q, k, v: (q[:, :, :1], k.repeat(1, 1, 2, 1), v.repeat(1, 1, 2, 1)), "divides the query heads"),
        (lambda q, k, v: (q.double(), k.double(), v.double()), "float64"),
        (lambda q, k, v: (q, k, v.bfloat16()), "bfloat16"),
        (lambda q, k, v: [x.repeat(1, 1, 1, 16) for x in (q, k, v)], "at most 128"),
        (lambda q, k, v: (q[0], k[0], v[0]), "expected"),
    ],
)
def test_what_tma_cannot_read_is_refused(change, message):
    with record_launches() as launches, pytest.raises(ValueError, match=message):
        hopper_attention(*change(*inputs(head_dim=16)), overlapped=True)
    assert not launches


@pytest.fixture(scope="module")
def compiled():
    """By (head size, overlapped), of either 16-bit type, causal: what the compiler makes for sm_90."""
    choices = {
        (64, False): torch.bfloat16,
        (64, True): torch.float16,
        (128, False): torch.float16,
        (128, True): torch.bfloat16,
    }
    if DEVICE == "cuda":
        del choices[64, False]
    with record_launches() as launches:
        for (head_dim, overlapped), dtype in choices.items():
            hopper_attention(*inputs(128, 128, head_dim=head_dim, dtype=dtype), overlapped=overlapped)
    return dict(zip(choices, compile_launches(launches), strict=True))


def loop_of(compiled) -> str:
    """The loop over the tiles of keys in the compiler's intermediate form, of the first warps that multiply."""
    loops = re.findall(r"scf\.for(.*?)scf\.yield", compiled.ttgir, flags=re.DOTALL)
    return next(loop for loop in loops if "ttng.warp_group_dot " in loop)


@pytest.mark.parametrize("head_dim", [64, 128])
@both_ideas
def test_compiles_to_tma_and_asynchronous_products_without_spills(compiled, head_dim, overlapped):
    skip_where_refused(head_dim, overlapped)
    made = compiled[head_dim, overlapped]
    assert made.spilled_bytes == 0 and made.shared_bytes <= 227 * 1024
    assert "serialized" not in made.report  # products that wait for one another, by the assembler's own warning
    assert "wgmma.mma_async" in made.ptx
    assert re.search(r"cp\.async\.bulk\.tensor\.2d\.shared", made.ptx)  # tiles in
    assert re.search(r"cp\.async\.bulk\.tensor\.2d\.global\.shared", made.ptx)  # and out
    assert {access.operation for access in made.accesses} == {"tt.store"}  # lse; all else by TMA


@pytest.mark.parametrize("head_dim", [64, 128])
def test_warps_are_specialised(compiled, head_dim):
    skip_where_refused(head_dim, False)
    made = compiled[head_dim, False]
    assert made.num_warps == 12
    producer, *consumers = re.split(r"\n\s+partition\d+\(", made.ttgir[made.ttgir.index("ttg.warp_specialize(") :])
    assert "ttng.async_tma_copy_global_to_local" in producer and "ttng.warp_group_dot" not in producer
    assert len(consumers) == 2
    for consumer in consumers:
        assert consumer.count("ttng.warp_group_dot ") == 2 and "async_tma_copy_global_to_local" not in consumer
        assert re.search(rf"-> tensor<64x{head_dim}xf32", consumer)  # half of the 128 queries
    assert "setmaxnreg.dec" in made.ptx and "setmaxnreg.inc" in made.ptx


@pytest.mark.parametrize("head_dim", [64, 128])
def test_rows_of_the_second_consumer_move_once(compiled, head_dim):
    skip_where_refused(head_dim, False)
    """They moved twice on the first GPU: the compiler moves the number that the descriptors begin at, in place."""
    assert not moved_twice(compiled[head_dim, False])


def test_rows_counted_from_what_descriptors_begin_at_move_twice():
    """The control. When this fails Triton is mended, and the kernel needs its rows but once."""
    q, k, v = inputs(128, 128, head_dim=128, dtype=torch.float16)
    with record_launches() as launches:
        hopper_attention(q, k, v)
    kernel = undone(hopper_forward_kernel, {"row = first_row + tl": "row = first_query + tl"})
    (made,) = compile_launches([dataclasses.replace(launch, kernel=kernel) for launch in launches])
    assert moved_twice(made)


def test_heads_of_64_are_not_for_the_split_kernel_on_a_gpu():
    with FakeTensorMode():
        for head_dim, overlapped in ((64, False), (64, True), (128, False)):
            q = torch.ones(1, 8, 2, head_dim, dtype=torch.float16, device="cuda")
            refused = head_dim == 64 and not overlapped
            message = "heads of 64: split into warps" if refused else "is not a Hopper GPU"
            with (
                mock.patch.multiple(
                    torch.cuda,
                    get_device_capability=lambda device: (8, 0),
                    get_device_name=lambda device: "NVIDIA A100",
                ),
                pytest.raises(ValueError, match=message),
            ):
                flash_hopper.check_hopper_inputs(q, q, q, None, overlapped)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_product_with_values_is_under_way_during_the_softmax(compiled, head_dim):
    skip_where_refused(head_dim, False)
    steps = r"ttng\.warp_group_dot_wait|ttng\.warp_group_dot(?= )|math\.exp2"
    of_scores, wait, of_values, *softmax = re.findall(steps, loop_of(compiled[head_dim, True]))
    assert (of_scores, wait, of_values) == ("ttng.warp_group_dot", "ttng.warp_group_dot_wait", "ttng.warp_group_dot")
    assert softmax and set(softmax) == {"math.exp2"}

    *before, last = re.findall(steps, loop_of(compiled[head_dim, False]))  # specialised: products one by one
    assert before[0] == last == "ttng.warp_group_dot" and "math.exp2" in before


# Where flash_attention takes it. The CPU plays a Hopper GPU.


@pytest.fixture
def timed(monkeypatch):
    """The ways that are timed, in order; the fastest is the one that `timed.fastest` names."""
    found = mock.Mock(names=[], fastest="")

    def do_bench(run, **settings):
        with record_launches() as launches:
            run()
        found.names.append(launches[0].name)
        return launches[0].name != found.fastest

    monkeypatch.setattr(flash_attention, "FASTEST", {})
    monkeypatch.setattr(flash_attention, "suits_hopper", lambda q, k, v: True)
    monkeypatch.setattr(flash_attention.triton.testing, "do_bench", do_bench)
    return found


def kernels_of(q, k, v, causal=True) -> list[str]:
    with record_launches() as launches:
        out = flash_attention.flash_attention(q, k, v, causal)
    wanted, _ = plain_forward(*(x.cpu().double() for x in (q, k, v)), causal)
    assert (out.double().cpu() - wanted).abs().max() <= TOLERANCE[q.dtype] * v.abs().max().item()
    return [launch.name for launch in launches]


FORWARD, HOPPER = "flash_forward_kernel", "hopper_forward_kernel"


@pytest.mark.parametrize("faster", [FORWARD, HOPPER])
def test_flash_attention_takes_what_was_faster_here(faster, timed):
    """Both are timed once for a head size, a mask and a class of lengths; packed sequences are the plain kernel's, and
    so are all where runs have to repeat.
    """
    timed.fastest = faster
    q, k, v = (x.contiguous() for x in inputs())
    for causal, count in ((True, 2), (True, 2), (False, 4)):
        assert kernels_of(q, k, v, causal)[-1] == faster and len(timed.names) == count
    assert kernels_of(q, k, v) == [faster], "later calls measure nothing"
    assert set(timed.names) == {FORWARD, HOPPER} and len(flash_attention.FASTEST) == 2
    cu_seqlens = torch.tensor([0, 30, 70], dtype=torch.int32, device=DEVICE)
    with record_launches() as launches:
        flash_attention.flash_attention_varlen(q[0], k[0], v[0], cu_seqlens, 40)
    assert [launch.name for launch in launches] == [FORWARD]
    torch.use_deterministic_algorithms(True)
    try:
        assert kernels_of(q, k, v) == [FORWARD]
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(timed.names) == 4


@pytest.mark.parametrize("fault", ["fails", "wrong"])
def test_a_way_that_fails_or_is_wrong_is_not_taken_however_fast(fault, timed, monkeypatch):
    def faulty(*given):
        if fault == "fails":
            raise RuntimeError("no such instruction\nin line 7")
        out, lse = hopper_attention(*given[:3], causal=given[5], scale=given[6], overlapped=True)
        return 1.1 * out, lse

    timed.fastest = HOPPER
    monkeypatch.setattr(flash_attention, "launch_hopper", faulty)
    q, k, v = (x.contiguous() for x in inputs())
    with pytest.warns(UserWarning, match="faulty is not used: ") as warned:
        assert kernels_of(q, k, v)[-1] == FORWARD
    (line,) = [str(each.message) for each in warned if "faulty" in str(each.message)]  # Triton's interpreter warns, too
    assert "\n" not in line and timed.names == [FORWARD]
    assert kernels_of(q, k, v) == [FORWARD]


def test_without_a_query_or_a_key_both_ways_are_compared_as_well(timed):
    """Of no numbers nothing is the largest one."""
    empty = torch.zeros(1, 0, 2, 16, dtype=torch.float16, device=DEVICE)
    there = torch.ones(1, 5, 2, 16, dtype=torch.float16, device=DEVICE)

    def way(q):
        return q, there

    def same(q):
        return way(q)

    with mock.patch.object(flash_attention.triton.testing, "do_bench", lambda run, **settings: float(run() is None)):
        assert flash_attention.fastest((way, same), empty, 5, True, (empty,)) in (way, same)


def test_what_suits_hopper(monkeypatch):
    """On a GPU what hopper_attention takes; what it refuses is no error here."""
    assert suits_hopper(*(x.contiguous() for x in inputs())) == (DEVICE == "cuda")
    on_gpu = mock.Mock(is_cuda=True)
    monkeypatch.setattr(flash_hopper, "check_hopper_inputs", lambda *given: None)
    assert suits_hopper(on_gpu, on_gpu, on_gpu)
    monkeypatch.setattr(flash_hopper, "check_hopper_inputs", mock.Mock(side_effect=ValueError("heads of 256")))
    assert not suits_hopper(on_gpu, on_gpu, on_gpu)
