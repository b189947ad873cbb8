"""course_lib.flash_attention.operator.flash_attention_varlen: sequences side by side are each as if alone, to the bit.
Interpreted, or GPU.
"""

import pytest
import torch
import triton

from attention_inputs import DEVICE, NAMES, Case, exact, inputs, rms, run
from course_kit.checks.guard_bands import GuardBands
from course_kit.checks.kernels import run_guarded
from course_kit.gpu.launches import record_launches
from course_lib.flash_attention.forward import flash_forward_kernel
from course_lib.flash_attention.operator import (
    flash_attention,
    flash_attention_varlen,
    flash_backward_operator,
    flash_operator,
    lengths_to_cu_seqlens,
    packed_attention,
)

torch.set_num_threads(1)
interpreted_only = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="watches Triton's interpreter")
LENGTHS = [9, 0, 1, 70]


def packed(lengths: list[int], longest: int | None = None):
    """An attention of packed rows, for `run`."""
    cu_seqlens, max_seqlen = lengths_to_cu_seqlens(lengths, DEVICE)

    def attend(q, k, v, case: Case):
        return flash_attention_varlen(q, k, v, cu_seqlens, longest or max_seqlen, case.causal, case.scale)

    return attend


def row_of(lengths: list[int], case: Case = Case(), dtype=torch.float32) -> list[torch.Tensor]:
    """The gradient of out, q, k, v, each [t, heads, d]."""
    return [x[0] for x in inputs(case._replace(b=1, s_q=sum(lengths), s_k=sum(lengths)), dtype)]


def alone(given, lengths: list[int], case: Case) -> list[torch.Tensor]:
    """out, dq, dk, dv of each sequence by itself, then side by side again."""

    def attend(q, k, v, case: Case):
        return flash_attention(q, k, v, case.causal, case.scale)

    pieces = zip(*(x[None].split(lengths, 1) for x in given), strict=True)
    return [torch.cat(parts, 1)[0] for parts in zip(*(run(attend, each, case) for each in pieces), strict=True)]


def same_bits(found, expected) -> bool:
    return all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


@pytest.mark.parametrize("case, dtype", [
    (Case(), torch.float32), (Case(causal=False), torch.bfloat16), (Case(d=24, scale=0.4), torch.float16),
])  # fmt: skip
def test_each_sequence_is_as_alone_bit_for_bit(case, dtype):
    """out and gradients; lengths of none and of one token are among them."""
    given = row_of(LENGTHS, case, dtype)
    expected = alone(given, LENGTHS, case)
    assert same_bits(run(packed(LENGTHS), given, case), expected)


def test_the_longest_may_be_said_to_be_longer():
    lengths, case = [5, 30], Case()
    given = row_of(lengths)
    assert same_bits(run(packed(lengths, 35), given, case), run(packed(lengths), given, case))


def test_it_is_float64s_attention_under_a_mask_of_blocks():
    """The whole row at once, in float64, with all keys of other sequences masked."""
    given = row_of(LENGTHS)
    pieces = zip(*(x[None].split([n for n in LENGTHS if n], 1) for x in given), strict=True)
    parts = zip(*(exact(each, Case()) for each in pieces), strict=True)
    for name, found, part in zip(NAMES, run(packed(LENGTHS), given, Case()), parts, strict=True):
        expected = torch.cat(part, 1)[0]
        assert rms(found - expected) <= 1e-6 * rms(expected), name


@pytest.mark.parametrize("causal", [True, False])
def test_no_sequence_sees_another(causal):
    """Others' numbers, NaN even, change no bit of a sequence's results."""
    lengths, case = [5, 33, 20], Case(causal=causal)
    given = row_of(lengths)
    expected = run(packed(lengths), given, case)
    for x in given:
        x[5:38] = torch.nan
    for found, same in zip(run(packed(lengths), given, case), expected, strict=True):
        assert torch.equal(found[:5], same[:5]) and torch.equal(found[38:], same[38:])
        assert found[5:38].isnan().any(-1).all()


def test_the_order_of_sequences_does_not_matter():
    given = row_of([30, 50])
    swapped = [torch.cat([x[30:], x[:30]]) for x in given]
    found, other = run(packed([30, 50]), given, Case()), run(packed([50, 30]), swapped, Case())
    assert same_bits(found, [torch.cat([x[50:], x[:50]]) for x in other])


@pytest.mark.parametrize("lengths", [[], [0], [0, 0]])
def test_no_tokens(lengths):
    cu_seqlens, longest = torch.zeros(len(lengths) + 1, dtype=torch.int32, device=DEVICE), 0
    if not lengths:
        cu_seqlens = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    q, k, v = (x.requires_grad_() for x in row_of([0])[1:])
    out = flash_attention_varlen(q, k, v, cu_seqlens, longest)
    out.sum().backward()
    assert out.shape == q.shape == q.grad.shape and k.grad.shape == k.shape


def test_lengths_and_where_sequences_begin():
    cu_seqlens, longest = lengths_to_cu_seqlens([3, 0, 5])
    assert cu_seqlens.tolist() == [0, 3, 3, 8] and cu_seqlens.dtype == torch.int32 and longest == 5


def test_how_they_lie_in_memory_does_not_matter():
    """Slices of a product of q, k and v at once; every second number of a longer cu_seqlens."""
    lengths, case = [9, 30], Case(heads=2, kv_heads=2)
    given = row_of(lengths, case)
    expected = run(packed(lengths), given, case)
    gradient, q, k, v = given
    together = torch.cat([q, k, v], -1)
    sparse = torch.tensor([0, 99, 9, 99, 39], dtype=torch.int32, device=DEVICE)[::2]

    def attend(q, k, v, case: Case):
        return flash_attention_varlen(q, k, v, sparse, 30)

    assert same_bits(run(attend, (gradient, *together.split(case.d, -1)), case), expected)


@interpreted_only
def test_nothing_outside_is_read_or_written_and_pytorch_computes_nothing():
    given = row_of(LENGTHS, dtype=torch.bfloat16)
    expected = run(packed(LENGTHS), given, Case())
    cu_seqlens, longest = lengths_to_cu_seqlens(LENGTHS, DEVICE)

    def forward_and_backward(gradient, q, k, v, cu_seqlens):
        out = flash_attention_varlen(q, k, v, cu_seqlens, longest)
        return out.detach(), *torch.autograd.grad(out, (q, k, v), gradient)

    given = [x.detach().requires_grad_() for x in given]
    assert same_bits(run_guarded(flash_forward_kernel, forward_and_backward, *given, cu_seqlens), expected)


def test_what_it_costs():
    """One launch forward and three backward for all sequences; kept are q, k, v, out, lse and where sequences begin; no
    tensor is larger than q.
    """
    gradient, *leaves = row_of(LENGTHS)
    leaves, kept = [x.requires_grad_() for x in leaves], []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x)
    with hooks, record_launches() as launches, GuardBands() as guards:
        out = packed(LENGTHS)(*leaves, Case())
        torch.autograd.grad(out, leaves, gradient)
    tokens, heads = leaves[0].shape[:2]
    own_bytes = sum(x.nbytes for x in leaves) + out.nbytes + 4 * tokens * heads + 4 * (len(LENGTHS) + 1)
    assert sum(x.untyped_storage().nbytes() for x in {x.data_ptr(): x for x in kept}.values()) >= own_bytes
    assert sum(x.nbytes for x in kept) == own_bytes and guards.largest_bytes == leaves[0].nbytes
    assert len(launches) == 4 and {launch.grid[2] for launch in launches} == {len(LENGTHS)}


def test_opcheck():
    gradient, q, k, v = (x[None] for x in row_of([3, 6], Case(heads=1)))
    cu_seqlens, longest = lengths_to_cu_seqlens([3, 6], DEVICE)
    out, lse = flash_operator(q, k, v, cu_seqlens, longest, True, 0.25)
    given = gradient, q, k, v, out, lse, cu_seqlens, longest, True, 0.25
    torch.library.opcheck(flash_backward_operator, given)
    torch.library.opcheck(flash_operator, (*(x.requires_grad_() for x in (q, k, v)), cu_seqlens, longest, True, 0.25))


def test_under_autocast():
    gradient, q, k, v = row_of([9, 4])
    with torch.autocast(DEVICE, torch.bfloat16):
        out = packed([9, 4])(q, k, v, Case())
    assert torch.equal(out, packed([9, 4])(*(x.bfloat16() for x in (q, k, v)), Case()))


ENDS = torch.tensor([0, 2, 5], dtype=torch.int32)


@pytest.mark.parametrize("shapes, ends, longest, says", [
    ([(1, 5, 2, 8)] * 3, ENDS, 3, r"expected \[t, a, d\], \[t, kv, d\] twice"),
    ([(5, 2, 8), (4, 2, 8), (4, 2, 8)], ENDS, 3, r"k \[4, 2, 8\], v \[4, 2, 8\]: expected"),
    ([(5, 2, 8), (5, 2, 8), (4, 2, 8)], ENDS, 3, "k has 5 tokens and v 4"),
    ([(5, 3, 8), (5, 2, 8), (5, 2, 8)], ENDS, 3, "3 query heads, 2 key heads"),
    ([(5, 2, 8)] * 3, ENDS.long(), 3, "cu_seqlens is torch.int64"),
    ([(5, 2, 8)] * 3, ENDS[:1], 3, r"torch.int32 \[1\]: expected int32 \[sequences \+ 1\]"),
    ([(5, 2, 8)] * 3, ENDS[None], 3, "expected int32"),
    ([(5, 2, 8)] * 3, ENDS.to("meta"), 3, "cu_seqlens is on meta, q on cpu: expected one device"),
    ([(5, 2, 8)] * 3, ENDS, 0, "max_seqlen is 0: expected 1 to 5"),
    ([(5, 2, 8)] * 3, ENDS, 6, "max_seqlen is 6"),
])  # fmt: skip
def test_what_does_not_fit_is_named_in_one_line_and_nothing_is_launched(shapes, ends, longest, says):
    with record_launches() as launches, pytest.raises(ValueError, match=says) as error:
        flash_attention_varlen(*map(torch.zeros, shapes), ends, longest)
    assert "\n" not in str(error.value) and not launches


def test_packed_rows_for_a_model():
    """[1, t, a, d], without a copy of anything, forward or backward; of more rows no number is lost without a word."""
    gradient, *leaves = (x[None] for x in row_of([9, 4]))
    leaves, attend = [x.requires_grad_() for x in leaves], packed_attention(*lengths_to_cu_seqlens([9, 4], DEVICE))
    with GuardBands() as guards:
        out = attend(*leaves)
        gradients = torch.autograd.grad(out, leaves, gradient)
    assert not guards.operations, guards.operations
    given = [x.detach()[0] for x in (gradient, *leaves)]
    assert same_bits([x[0] for x in (out, *gradients)], run(packed([9, 4]), given, Case()))
    with pytest.raises(ValueError, match="expected one packed row"):
        attend(*(x.expand(2, -1, -1, -1) for x in leaves))
