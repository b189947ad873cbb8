"""benchmarks/attention.py: what it compares and reports, interpreted at tiny sizes on a CPU; its figures need a GPU."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from course_kit.gpu.launches import record_launches
from course_lib.flash_attention import forward as flash_forward
from course_lib.flash_attention.operator import flash_attention
from course_lib.flash_attention.tiles import flops_backward, flops_forward

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CPU = torch.device("cpu")
KINDS = ("attention", "attention, 2/1", "attention, documents")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="here kernels are compiled: run the benchmark itself")


@pytest.fixture(autouse=True)
def on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.fixture
def attention(on_path):
    return __import__("attention")


@pytest.fixture
def attention_cases(on_path):
    return __import__("attention_cases")


@pytest.fixture
def kernel_runs(on_path):
    return __import__("kernel_runs")


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_ours_are_kernels_rivals_are_not_and_all_see_the_same_keys(attention, attention_cases, kernel_runs):
    """Forward of all columns, FlexAttention's masks among them: it has no backward here."""
    kernel = flash_forward.flash_forward_kernel.fn
    for case in (*attention_cases.cases(CPU, "cpu"), *attention.rungs(CPU, "cpu")):
        expected = case.exact(*kernel_runs.Method(None, case.make).inputs)[0].float()
        for column, method in case.methods.items():
            if column == "cuDNN":  # there is none
                continue
            inputs = [each.detach() for each in kernel_runs.Method(None, case.make).inputs]
            with record_launches() as launches:
                out = method(*inputs)
            torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
            assert bool(launches) == (column == "ours" or case.kernel == "rungs" and column != "flash"), column
            assert any(launch.kernel is kernel for launch in launches) == (column == "ours"), column


def test_the_reference_agrees_with_pytorch_in_float64(kernel_runs):
    torch.manual_seed(0)
    lengths, (q, k, v) = [5, 7], [torch.randn(1, 12, heads, 16, requires_grad=True) for heads in (4, 2, 2)]
    found = __import__("attention_exact").exact(lengths, True, q, k, v)
    assert all(each.dtype == torch.float64 for each in found)
    inputs = [each.detach().double().requires_grad_() for each in (q, k, v)]
    documents = zip(*(each.transpose(1, 2).split(lengths, 2) for each in inputs), strict=True)
    outs = [F.scaled_dot_product_attention(*document, is_causal=True, enable_gqa=True) for document in documents]
    out = torch.cat(outs, 2).transpose(1, 2)
    (gradient,) = kernel_runs.draw_gradients((q,))
    torch.testing.assert_close(found, [out.detach(), *torch.autograd.grad(out, inputs, gradient.double())])
    assert len(__import__("attention_exact").exact(lengths, True, *(each.detach() for each in (q, k, v)))) == 1


def test_all_columns_get_the_same_gradient_however_their_output_lies(kernel_runs):
    out = torch.empty(2, 3, 4, 5)
    turned = torch.empty(2, 4, 3, 5).transpose(1, 2)
    assert torch.equal(*(kernel_runs.draw_gradients((each,))[0] for each in (out, turned)))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda q, k, v: flash_attention(q, k, v, causal=False),
        lambda q, k, v: flash_attention(q, k, v + (v - v.detach())),  # the right output with twice v's gradient
    ],
)
def test_an_attention_that_is_wrong_is_not_timed(attention, attention_cases, kernel_runs, wrong):
    case = next(attention_cases.cases(CPU, "cpu"))
    case = replace(case, methods=case.methods | {"ours": wrong})
    with pytest.raises(ValueError, match="attention 2 x 20, 16, causal, ours: our results are off by"):
        kernel_runs.working(case, CPU, attention.ATTENTION)


def test_a_rung_that_is_wrong_is_not_timed(attention, kernel_runs):
    (case,) = attention.rungs(CPU, "cpu")
    case = replace(case, methods=case.methods | {"first": lambda q, k, v: flash_attention(q, k, v, causal=False)})
    with pytest.raises(ValueError, match="rungs 1 x 40, 16, causal, first: our results are off by"):
        kernel_runs.working(case, CPU, attention.LADDER)


def test_work_is_that_of_the_papers(attention_cases):
    """All pairs where all are seen; a half of them, without the half of the diagonal, where the mask is causal."""
    for case in attention_cases.cases(CPU, "cpu"):
        about = case.about
        lengths = about.get("lengths") or [about["s"]] * about["b"]
        for name, count in (("forward", flops_forward), ("backward", flops_backward)):
            exact, diagonal = (
                sum(count(1, s, t, about["heads"], about["head_dim"], about["causal"]) for s, t in pairs)
                for pairs in ([(s, s) for s in lengths], [(s, 1) for s in lengths])
            )
            assert case.work[name] == (exact - diagonal / 2 if about["causal"] else exact)


def test_sizes_for_a_gpu_are_those_of_the_aim(attention, attention_cases):
    sizes = attention_cases.SIZES["cuda"]
    sequences = {s for each in sizes["sequences"].values() for s in each}
    assert {2048, 4096, 8192, 16384} == set(sizes["sequences"][attention.AIM_HEAD])
    assert all(sizes["tokens"] % s == 0 for s in (*sequences, sizes["grouped"][0], sizes["rungs"][0]))
    assert sizes.keys() == attention_cases.SIZES["cpu"].keys()
    lengths = attention_cases.document_lengths(sizes["tokens"], sizes["documents"][0])
    assert sum(lengths) == sizes["tokens"] and len(lengths) == sizes["documents"][0] and min(lengths) > 0


def row_of(flash: float, cudnn: float, **changes) -> dict:
    """A row as `measure` makes it; flash, cudnn: our time by theirs."""
    row = {"kernel": "attention", "size": "x", "pass": "forward", "s": 4096, "head_dim": 128, "ms": {"flash": 1.0}}
    row |= {"ours_against": {"flash": flash, "cuDNN": cudnn}, "errors": {"ours": 1e-3, "flash": 2e-3, "math": 1e-3}}
    return row | changes


def test_what_misses_the_aim_is_said(attention):
    backward = {"pass": "backward"}
    fine = [row_of(1.0, 1.1), row_of(1.1, 2.0, **backward), row_of(2.0, 2.0, s=512), row_of(2.0, 2.0, head_dim=64)]
    assert attention.missed({"rows": fine + [{"kernel": "attention", "pass": "peak"}]}) == []
    slow, wrong = row_of(1.25, 1.25), row_of(1.0, 1.0, s=512, errors={"ours": 3e-3, "flash": 2e-3})
    assert attention.missed({"rows": [slow, row_of(1.25, 1.0, **backward), wrong]}) == [
        "attention x, forward: 0.80 of flash, the aim is 1.0",
        "attention x, forward: 0.80 of cuDNN, the aim is 0.85",
        "attention x, backward: 0.80 of flash, the aim is 0.9",
        "attention x: an error of 3.00e-03, SDPA's is 2.00e-03",
    ]
