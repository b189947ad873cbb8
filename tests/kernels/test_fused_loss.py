"""course_lib.kernels.fused_loss: loss and gradients of the eager path without its logits. CPU, interpreted; one wants
CUDA.
"""

import dataclasses
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from calls import peak_bytes, said
from course_kit.checks.guard_bands import GuardBands, guarded
from course_kit.gpu.launches import record_launches
from course_lib.kernels.fused_loss import (
    DeferredHead,
    chunk_size,
    chunked_cross_entropy,
    cross_entropy_,
    defer_head,
    linear_cross_entropy,
)
from course_lib.single_gpu.model import ModelConfig, Transformer, loss

torch.set_num_threads(1)
CONFIG = ModelConfig(2, 24, 2, 1, 32, 67)
EPS = {torch.float32: 2**-23, torch.bfloat16: 2**-8, torch.float16: 2**-11}
every_dtype = pytest.mark.parametrize("dtype", list(EPS), ids=lambda dtype: str(dtype).removeprefix("torch."))


def case(tokens: int, hidden: int, vocab: int, dtype=torch.float32, ignored: int = 2, scale: float = 1.0):
    """hidden [t, h], weight [v, h], targets [t]; the first and, if 2, the last target is ignored."""
    generator = torch.Generator().manual_seed(tokens + vocab)
    x = torch.randn(tokens, hidden, generator=generator).mul(scale).to(dtype).requires_grad_()
    weight = torch.randn(vocab, hidden, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(vocab, (tokens,), generator=generator)
    targets[: min(ignored, 1)] = -100
    targets[tokens - ignored // 2 :] = -100
    return x, weight, targets


def eager(x, weight, targets, ignore_index: int = -100) -> torch.Tensor:
    """The loss of stored logits, as course_lib.single_gpu.model.loss."""
    return F.cross_entropy((x @ weight.t()).float(), targets, ignore_index=ignore_index)


def exactly(x, weight, targets, ignore_index: int = -100):
    """Loss and gradients of the same numbers in float64."""
    x, weight = (tensor.detach().double().requires_grad_() for tensor in (x, weight))
    value = F.cross_entropy(x @ weight.t(), targets, ignore_index=ignore_index)
    return value.detach(), *torch.autograd.grad(value, (x, weight))


def with_gradients(value, x, weight):
    return value.detach(), *torch.autograd.grad(value, (x, weight))


def errors(found, exact) -> list[float]:
    """The norm of each error over the norm of what is exact."""
    return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, exact, strict=True)]


# Loss and gradients.

SIZES = [(1, 1, 1), (1, 5, 7), (5, 16, 64), (7, 24, 131), (13, 3, 1000)]


@every_dtype
@pytest.mark.parametrize("chunk_rows", [None, 1, 3, 100])
def test_loss_and_gradients_are_as_exact_as_eager(dtype, chunk_rows):
    """Against float64, by norm: no more than twice eager's error and two roundings; in float32 four, for NumPy's exp is
    off by up to three on some processors.
    """
    for tokens, hidden, vocab in SIZES:
        x, weight, targets = case(tokens, hidden, vocab, dtype, ignored=2 if tokens > 2 else 0)
        exact = exactly(x, weight, targets)
        found = with_gradients(linear_cross_entropy(x, weight, targets, chunk_rows=chunk_rows), x, weight)
        assert [tensor.dtype for tensor in found] == [torch.float32, dtype, dtype]
        if vocab == 1:
            assert not any(tensor.any() for tensor in found)
            continue
        of_eager = errors(with_gradients(eager(x, weight, targets), x, weight), exact)
        for ours, theirs in zip(errors(found, exact), of_eager, strict=True):
            roundings = 4 if dtype == torch.float32 else 2
            assert ours <= 2 * theirs + roundings * EPS[dtype], (tokens, hidden, vocab, ours, theirs)


def test_a_row_of_several_blocks():
    """More words than a program holds at a time; the largest logit comes first, last, or in the middle block."""
    x, weight, targets = case(3, 2, 40_001, ignored=0)
    with torch.no_grad():
        x.copy_(torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]))
        weight[7, 0], weight[40_000, 1], weight[20_000, 0] = 30.0, 30.0, 25.0
        targets.copy_(torch.tensor([7, 39_999, 40_000]))
    found = with_gradients(linear_cross_entropy(x, weight, targets), x, weight)
    assert max(errors(found, exactly(x, weight, targets))) < 1e-5


@every_dtype
def test_large_and_infinite_logits(dtype):
    """Logits of some hundreds; and a word that masking has ruled out, -inf: both as in eager."""
    x, weight, targets = case(6, 4, 50, dtype, scale=100.0)
    ours = with_gradients(linear_cross_entropy(x, weight, targets), x, weight)
    theirs = with_gradients(eager(x, weight, targets), x, weight)
    assert max(errors(ours, [tensor.double() for tensor in theirs])) < 4 * EPS[dtype]
    logits = torch.randn(2, 300).to(dtype)
    logits[:, 3:260] = -torch.inf
    targets, losses, expected = torch.tensor([1, 299]), torch.empty(2), logits.float().requires_grad_()
    theirs = F.cross_entropy(expected, targets, reduction="none")
    theirs.sum().backward()
    cross_entropy_(logits, targets, losses, -100, gradient=True)
    torch.testing.assert_close(losses, theirs.detach())
    torch.testing.assert_close(logits.float(), expected.grad, rtol=EPS[dtype], atol=EPS[dtype])


def test_rows_that_do_not_count():
    """Another ignore_index, a word's number among them; none that counts; no row at all."""
    x, weight, targets = case(9, 8, 20, ignored=0)
    targets[::2] = 5
    for ignore_index in (5, -1):
        found = with_gradients(linear_cross_entropy(x, weight, targets, ignore_index), x, weight)
        assert max(errors(found, exactly(x, weight, targets, ignore_index))) < 1e-5
        assert bool(found[1][::2].any()) == (ignore_index == -1)
    value, *grads = with_gradients(linear_cross_entropy(x, weight, torch.full((9,), -100)), x, weight)
    assert value.isnan() and not any(grad.any() for grad in grads)
    with record_launches() as launches:
        value, *grads = with_gradients(linear_cross_entropy(x[:0], weight, targets[:0]), x, weight)
    assert value.isnan() and not any(grad.any() for grad in grads) and not launches


def test_an_ignored_row_hides_what_it_computes():
    """NaN in the hidden states of a row that does not count stays there, as in eager."""
    x, weight, targets = case(4, 8, 20, ignored=0)
    targets[2] = -100
    logits = (x @ weight.t()).detach()
    logits[2] = torch.nan
    losses = torch.empty(4)
    cross_entropy_(logits, targets, losses, -100, gradient=True)
    assert losses.isfinite().all() and losses[2] == 0 and logits.isfinite().all() and not logits[2].any()


@pytest.mark.parametrize("wrong", [-1, 20, 2**40, -(2**63)])
def test_a_target_that_is_no_word_is_seen_in_the_loss(wrong):
    """Nothing outside of the row is read or written; the row's loss and gradient are NaN, the others' are right."""
    x, weight, targets = case(3, 8, 20, ignored=0)
    expected = F.cross_entropy(x @ weight.t(), targets, reduction="none")
    bands = GuardBands()
    logits, losses = bands.guarded((x @ weight.t()).detach()), bands.guarded(torch.empty(3))
    targets[1] = wrong
    assert linear_cross_entropy(x, weight, targets).isnan()
    with bands:
        cross_entropy_(logits, guarded(targets), losses, -100, gradient=True)
    bands.check()
    assert losses.isnan().tolist() == [False, True, False] and logits.isnan().any(1).tolist() == [False, True, False]
    torch.testing.assert_close(losses[::2], expected[::2])


@every_dtype
@pytest.mark.parametrize("vocab", [1, 33, 128])
def test_nothing_outside_is_read_or_written(dtype, vocab):
    """Rows of logits lie 3 elements apart; what surrounds them and every other tensor is NaN before and after."""
    x, weight, targets = case(5, 8, vocab, torch.float32, ignored=1)
    apart = torch.empty(5, vocab + 3, dtype=dtype)[:, :vocab].copy_((x @ weight.t()).detach())
    bands = GuardBands()
    logits, losses = bands.guarded(apart), bands.guarded(torch.empty(5))
    with bands:
        cross_entropy_(logits, guarded(targets), losses, -100, gradient=True)
    bands.check()
    assert losses.isfinite().all() and logits.isfinite().all() and logits.stride(0) == vocab + 3
    expected = apart.float().requires_grad_()
    F.cross_entropy(expected, targets, reduction="sum").backward()
    torch.testing.assert_close(logits.float(), expected.grad, rtol=2 * EPS[dtype], atol=EPS[dtype])


def test_any_strides_and_leading_dimensions():
    """[b, s, h] that is transposed, a weight that is a transposed view, targets with a stride."""
    x, weight, targets = case(12, 8, 33)
    expected = exactly(x, weight, targets)
    turned = x.detach().view(3, 4, 8).transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    columns = weight.detach().t().contiguous().t().requires_grad_()
    spread = torch.full((3, 4, 2), 7)
    spread[..., 0] = targets.view(3, 4)
    assert not turned.is_contiguous() and not columns.is_contiguous() and not spread[..., 0].is_contiguous()
    value = linear_cross_entropy(turned, columns, spread[..., 0], chunk_rows=5)
    found = with_gradients(value, turned, columns)
    assert max(errors((found[0], found[1].reshape(12, 8), found[2]), expected)) < 1e-6


def test_the_smallest_gradients_of_fp16_survive():
    """1/t comes last: softmax / t of these rows is below what FP16 has, and the incoming gradient, a loss scale, undoes
    it. The gradient of each word's row is there, within FP16's rounding.
    """
    x, weight, targets = case(64, 4, 3000, torch.float16, ignored=0, scale=0.05)
    scaled = linear_cross_entropy(x, weight, targets) * 2.0**14
    _, _, found = with_gradients(scaled, x, weight)
    expected = exactly(x, weight, targets)[2] * 2.0**14
    assert (1 / 3000 / 64) < 2 * torch.finfo(torch.float16).tiny
    torch.testing.assert_close(found.double(), expected, rtol=2e-2, atol=2e-2 * expected.abs().median().item())


# What runs, what it keeps, what it costs.


def test_it_is_products_and_one_kernel():
    """Three products and one launch a chunk, a program a row; no operation of PyTorch besides computes on logits. In
    backward there are two multiplications, by a factor that is never read on the host.
    """
    x, weight, targets = case(11, 8, 64)
    with record_launches() as launches, GuardBands() as bands:
        value = linear_cross_entropy(x, weight, targets, chunk_rows=4)
    assert [(launch.name, launch.grid) for launch in launches] == [
        ("cross_entropy_kernel", (rows,)) for rows in (4, 4, 3)
    ]
    bands.check()
    of_count_and_mean = ["aten.ne", "aten.sum", "aten.sum", "aten.div"]
    assert sorted(bands.operations) == sorted(3 * ["aten.mm", "aten.mm", "aten.addmm_"] + of_count_and_mean)
    with record_launches() as launches, GuardBands() as bands:
        value.backward()
    assert not launches and sorted(set(bands.operations)) == ["aten.clamp", "aten.div", "aten.mul_"]


def test_only_what_is_asked_for_is_computed():
    """Without gradients only the losses; a frozen weight or frozen hidden states cost no product."""
    x, weight, targets = case(6, 8, 64)
    expected = exactly(x, weight, targets)

    def products(run) -> tuple[int, list[bool]]:
        with record_launches() as launches, GuardBands() as bands:
            run()
        count = sum(name in ("aten.mm", "aten.addmm_") for name in bands.operations)
        return count, [launch.meta["GRADIENT"] for launch in launches]

    with torch.no_grad():
        assert products(lambda: linear_cross_entropy(x, weight, targets, chunk_rows=6)) == (1, [False])
    frozen = weight.detach()
    assert products(lambda: linear_cross_entropy(x, frozen, targets, chunk_rows=6).backward()) == (2, [True])
    inputs = x.detach()
    assert products(lambda: linear_cross_entropy(inputs, weight, targets, chunk_rows=6).backward()) == (2, [True])
    assert max(errors((x.grad, weight.grad), expected[1:])) < 1e-6


@pytest.mark.parametrize("how", ["float32", "bfloat16", "autocast"])
def test_peak_memory_is_that_of_the_formula(how):
    """c·v·e + t·h·e + 4·v·h bytes, and a copy of the weight or of its gradient where types differ; far below eager's.
    On the CPU a BF16 product has a copy of the weight besides (oneDNN's), and its factors are float32 for the sum.
    """
    tokens, hidden, vocab, e = 192, 16, 2048, 4 if how == "float32" else 2
    x, weight, targets = case(tokens, hidden, vocab, torch.bfloat16 if how == "bfloat16" else torch.float32)
    rows = chunk_size(tokens, hidden, vocab)

    def run(value):
        def step():
            with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
                step_loss = value(x, weight, targets)
            step_loss.backward()
            x.grad = weight.grad = None

        return peak_bytes(step)

    found, theirs = run(linear_cross_entropy), run(eager)
    other_type = 0 if how == "float32" else 2 * vocab * hidden
    room = (0 if how == "float32" else 4 * rows * (vocab + hidden) + 2 * vocab * hidden) + 64 * tokens
    formula = rows * vocab * e + tokens * hidden * e + 4 * vocab * hidden + other_type
    assert 0.8 * formula < found < formula + room, (found, formula)
    assert abs(theirs / (12 * tokens * vocab) - 1) < 0.15 and found < theirs / 10, (found, theirs)


def test_no_tensor_has_the_size_of_the_logits():
    """The largest allocation is the gradient of the weight."""
    x, weight, targets = case(128, 8, 1024)
    with GuardBands() as bands:
        linear_cross_entropy(x, weight, targets).backward()
    bands.check()
    assert bands.operations and bands.largest_bytes == 4 * 1024 * 8 < 4 * 128 * 1024 / 8


def test_a_loss_that_stores_the_logits_is_seen():
    """The right number all the same: by the same kernel with all rows in one chunk, and by eager operations."""
    x, weight, targets = case(128, 8, 1024)
    wanted = linear_cross_entropy(x, weight, targets)
    for fake in (lambda x, w, t: linear_cross_entropy(x, w, t, chunk_rows=128), eager):
        with GuardBands() as bands:
            value = fake(x, weight, targets)
            value.backward()
        torch.testing.assert_close(value, wanted)
        assert bands.largest_bytes >= 4 * 128 * 1024


def test_chunk_sizes():
    """Powers of 2 whose logits take between one and two times as much as hidden, roughly (Liger-Kernel's rule), or in
    16 bits a quarter of the weight's gradient: four times as many rows for a large vocabulary.
    """
    assert chunk_size(16_384, 4096, 128_256) == 2048 and chunk_size(8192, 2048, 128_256) == 1024
    assert chunk_size(16_384, 1024, 4096) == 4096, "hidden is larger"
    assert chunk_size(0, 4, 9) == chunk_size(1, 4, 9) == 1 and chunk_size(10, 8, 4) == 10
    for tokens, hidden, vocab in itertools.product((7, 1000, 4096), (64, 576), (256, 50_257)):
        rows = chunk_size(tokens, hidden, vocab)
        assert rows == tokens or rows & (rows - 1) == 0
        assert rows == 1 or rows / 2 * vocab < tokens * max(hidden, vocab) and rows <= tokens
        assert rows <= max(2 * -(-tokens // -(-vocab // hidden)), hidden // 2)


# As an operator.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(dtype):
    """Schema, autograd and fake implementation, of each kind of call. The tracing that opcheck has besides would hand
    out the gradients that backward works on in place; linear_cross_entropy, which does not, is traced below.
    """
    x, weight, targets = case(5, 4, 9, dtype)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    for needed in ((True, True), (True, False), (False, True), (False, False)):
        tensors = [tensor.detach().requires_grad_(need) for tensor, need in zip((x, weight), needed, strict=True)]
        torch.library.opcheck(
            chunked_cross_entropy, (*tensors, targets, -100, all(needed), 2, dtype, *needed), test_utils=tests
        )


def test_fake_tensors_say_the_same():
    with FakeTensorMode():
        x, weight = torch.empty(2, 3, 4, requires_grad=True), torch.empty(9, 4, requires_grad=True)
        value = linear_cross_entropy(x, weight, torch.empty(2, 3, dtype=torch.int64))
        value.backward()
        assert value.shape == () and value.dtype == torch.float32
        assert x.grad.shape == x.shape and weight.grad.shape == weight.shape


def test_under_tracing_and_checkpointing():
    """One graph without a break, forward and backward, for other sizes too; and recomputed in backward: the same bits
    as a plain call.
    """
    traced = torch.compile(linear_cross_entropy, backend="aot_eager", fullgraph=True, dynamic=True)
    for tokens in (7, 12):
        x, weight, targets = case(tokens, 8, 33)
        expected = with_gradients(linear_cross_entropy(x, weight, targets), x, weight)
        again = checkpoint(linear_cross_entropy, x, weight, targets, use_reentrant=False)
        for value in (traced(x, weight, targets), again):
            for a, b in zip(with_gradients(value, x, weight), expected, strict=True):
                assert torch.equal(a, b)


def test_the_incoming_gradient_scales_and_a_second_backward_is_refused():
    x, weight, targets = case(7, 8, 33)
    exact = exactly(x, weight, targets)
    value = linear_cross_entropy(x, weight, targets)
    (value * -2.5).backward(retain_graph=True)
    assert max(errors((x.grad / -2.5, weight.grad / -2.5), exact[1:])) < 1e-6
    assert "modified by an inplace operation" in said(value.backward)
    linear_cross_entropy(x, weight, targets).backward()  # a second loss adds its gradients up
    assert max(errors((x.grad / -1.5, weight.grad / -1.5), exact[1:])) < 1e-5


def test_wrong_input_is_one_line():
    x, weight, targets = (tensor.detach() for tensor in case(6, 8, 20))
    for words, args in (
        ("hidden [6, 7] and weight [20, 8]", (x[:, :7], weight, targets)),
        ("weight [8]: they are [..., h] and [v, h]", (x, weight[0], targets)),
        ("weight [0, 8]", (x, weight[:0], targets)),
        ("targets are [5] torch.int64, where hidden has [6] int64", (x, weight, targets[:5])),
        ("targets are [6] torch.int32", (x, weight, targets.int())),
        ("hidden is torch.float32, weight torch.bfloat16", (x, weight.bfloat16(), targets)),
        ("hidden is torch.float64, weight torch.float64", (x.double(), weight.double(), targets)),
        ("weight on meta", (x, weight.to("meta"), targets)),
        ("chunk_rows 0: it is 1 or more", (x, weight, targets, -100, 0)),
        ("reduction 'none': it is mean or sum", (x, weight, targets, -100, None, "none")),
    ):
        text = said(lambda: linear_cross_entropy(*args))
        assert text.startswith("ValueError: ") and words in text and "\n" not in text, text


# Rival.


@pytest.mark.skipif(not hasattr(torch.nn, "LinearCrossEntropyOptions"), reason="newer PyTorch has it")
@pytest.mark.parametrize("how", ["float32", "bfloat16"])
def test_against_pytorchs_own(how):
    """torch.nn.functional.linear_cross_entropy in chunks of as many rows: the same numbers from no more memory, its
    losses in its inputs' dtype.
    """
    tokens, hidden, vocab, dtype = 64, 16, 1024, getattr(torch, how)
    x, weight, targets = case(tokens, hidden, vocab, dtype)
    options = nn.LinearCrossEntropyOptions(chunking_method="aspect_ratio")

    def rival(x, weight, targets):
        return F.linear_cross_entropy(x, weight, targets, options=options)

    exact = exactly(x, weight, targets)
    ours = errors(with_gradients(linear_cross_entropy(x, weight, targets), x, weight), exact)
    theirs = errors(with_gradients(rival(x, weight, targets), x, weight), exact)
    assert all(a <= 2 * b + 2 * EPS[dtype] for a, b in zip(ours, theirs, strict=True)), (ours, theirs)

    def peak(value) -> int:
        def step():
            value(x, weight, targets).backward()
            x.grad = weight.grad = None

        return peak_bytes(step)

    assert peak(linear_cross_entropy) <= peak(rival)


def test_sums_of_parts_are_the_mean_of_all():
    """Micro-batches over the count of all: loss and gradients of one batch, though in one of them nothing counts."""
    x, weight, targets = case(9, 8, 33)
    targets[:3] = -100
    found = torch.zeros(())
    for rows in (slice(0, 3), slice(3, 4), slice(4, 9)):
        part = linear_cross_entropy(x[rows], weight, targets[rows], reduction="sum") / (targets != -100).sum()
        part.backward()
        found += part.detach()
    assert max(errors((found, x.grad, weight.grad), exactly(x, weight, targets))) < 1e-6


# Of a model.


def model_gradients(model: nn.Module, value) -> dict[str, torch.Tensor]:
    """The loss, and the gradient of each parameter; deferred or not, by name."""
    model.zero_grad()
    value.backward()
    return {"loss": value.detach()} | {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_deferred_head_trains_as_the_plain_one(tied, autocast):
    """float32: within 1e-5 of each tensor's largest element. Autocast: each error against float32 at most 1.5 times
    eager's. A tied weight gets the gradients of embedding and head.
    """
    config = dataclasses.replace(CONFIG, tied=tied)
    tokens, targets = torch.randint(config.vocab, (2, 2, 9), generator=torch.Generator().manual_seed(1))
    targets[0, :3] = -100
    plain, deferred = Transformer(config), defer_head(Transformer(config))
    exact = model_gradients(plain, loss(plain(tokens), targets))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        value = linear_cross_entropy(deferred(tokens), deferred.head.weight, targets)
        rival = loss(plain(tokens), targets)
    ours, theirs = model_gradients(deferred, value), model_gradients(plain, rival)
    assert list(ours) == list(exact)
    for name, expected in exact.items():
        assert ours[name].dtype == torch.float32
        error, rivals = ((found[name] - expected).abs().max() / expected.abs().max() for found in (ours, theirs))
        assert error <= (1.5 * rivals + 1e-3 if autocast else 1e-5), (name, error, rivals)


def test_a_deferred_head_is_the_same_parameter():
    for tied in (False, True):
        model = Transformer(dataclasses.replace(CONFIG, tied=tied))
        names, weight, tokens = list(model.state_dict()), model.head.weight, torch.arange(12).view(2, 6)
        logits = model(tokens)
        assert defer_head(model) is model and isinstance(model.head, DeferredHead) and isinstance(model.head, nn.Linear)
        assert model.head.weight is weight and (model.head.weight is model.embedding.weight) == tied
        assert list(model.state_dict()) == names
        torch.testing.assert_close(F.linear(model(tokens), weight), logits, rtol=0, atol=0)
        text = said(lambda: defer_head(model))
        assert text == "ValueError: the head is DeferredHead: only an nn.Linear without bias can be deferred"
    model.head = None
    assert said(lambda: defer_head(model)).startswith("ValueError: the head is NoneType")


@pytest.mark.gpu
@every_dtype
def test_on_a_gpu(dtype):
    """Compiled: as exact as eager, and the peak by the formula."""
    tokens, hidden, vocab = 2048, 256, 32_000
    x, weight, targets = (tensor.detach().cuda() for tensor in case(tokens, hidden, vocab, dtype, scale=0.1))
    x.requires_grad_(), weight.requires_grad_()
    found = with_gradients(linear_cross_entropy(x, weight, targets), x, weight)
    exact = exactly(x, weight, targets)
    theirs = errors(with_gradients(eager(x, weight, targets), x, weight), exact)
    assert all(a <= 2 * b + 2 * EPS[dtype] for a, b in zip(errors(found, exact), theirs, strict=True))
    del found, exact
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_cross_entropy(x, weight, targets).backward()
    e, rows = x.element_size(), chunk_size(tokens, hidden, vocab)
    other_type = 0 if e == 4 else 2 * vocab * hidden
    formula = rows * vocab * e + tokens * hidden * e + 4 * vocab * hidden + other_type
    assert torch.cuda.max_memory_allocated() - before < 1.1 * formula + 2**20
