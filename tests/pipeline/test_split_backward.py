"""course_lib.pipeline.split_backward in one process: I and W are B, in gradients to the bit, in FLOPs, and in hooks."""

import contextlib
import dataclasses
import gc
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from course_lib.expert_parallel.mixture import apply_moe
from course_lib.expert_parallel.router import routers_of, take_counts
from course_lib.pipeline import deferred_grads
from course_lib.pipeline.split_backward import SplitPass
from course_lib.pipeline.stages import StagePass, split_stages
from course_lib.recompute.modes import apply_recompute, keep_matmuls
from course_lib.single_gpu.model import ModelConfig, Transformer, loss
from split_models import whole_model

OF = ModelConfig(layers=4, hidden=16, heads=4, kv_heads=2, ffn_hidden=20, vocab=31)
TIED, DROPOUT = dataclasses.replace(OF, tied=True), dataclasses.replace(OF, dropout=0.3)
WIDE = dataclasses.replace(OF, ffn_hidden=32)
SOFTMAX = (
    ("experts", 4),
    ("top_k", 2),
    ("ffn_hidden", 16),
    ("aux_loss_coeff", 0.3),
    ("z_loss_coeff", 0.02),
    ("shared", 1),
)
BATCH, SEQ = 3, 8


class Scaled(torch.autograd.Function):
    """x · weight, element by element; makes only what it is asked for, and notes what that was."""

    asked = []

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        ctx.power = 1  # an attribute of the context is there in both halves
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        Scaled.asked.append(ctx.needs_input_grad)
        x, weight = ctx.saved_tensors
        grad_x = gradient * weight**ctx.power if ctx.needs_input_grad[0] else None
        return grad_x, (gradient * x).sum((0, 1)) if ctx.needs_input_grad[1] else None


class ScaledAnyway(torch.autograd.Function):
    """The same; makes both whatever it is asked for."""

    calls = 0

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        ScaledAnyway.calls += 1
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum((0, 1))


class Own(nn.Module):
    """Behind an MLP, a Function of somebody's own."""

    def __init__(self, mlp: nn.Module, function):
        super().__init__()
        self.mlp, self.function, self.scale = mlp, function, nn.Parameter(torch.linspace(0.5, 2, 16))

    def forward(self, x):
        return self.function.apply(self.mlp(x), self.scale)


class Twice(nn.Module):
    """An MLP behind itself: each weight is used two times."""

    def __init__(self, mlp: nn.Module):
        super().__init__()
        self.mlp = mlp

    def forward(self, x):
        return self.mlp(self.mlp(x))


def twice(model: Transformer) -> Transformer:
    for block in model.blocks:
        block.mlp = Twice(block.mlp)
    return model


def two_names(model: Transformer) -> Transformer:
    """The MLPs are one module, of several names."""
    for block in model.blocks:
        block.mlp = model.blocks[0].mlp
        block.again = block.mlp.up_proj
    return model


def with_own(model: Transformer, function) -> Transformer:
    for block in model.blocks:
        block.mlp = Own(block.mlp, function)
    return model


def with_biases(model: Transformer) -> Transformer:
    for block in model.blocks:
        block.attention.q_proj.bias = nn.Parameter(torch.linspace(-1, 1, 16))
    return model


def frozen(model: Transformer) -> Transformer:
    for block in model.blocks:
        block.mlp.up_proj.weight.requires_grad_(False)
        block.attention.requires_grad_(False)
    return model


def looped(model: Transformer) -> Transformer:
    from course_lib.expert_parallel.experts import loop_experts

    for block in model.blocks:
        block.mlp.experts.compute = loop_experts
    return model


# name: (the model, stages, which one)
CASES = {
    "a stage in the middle": (lambda: whole_model(OF), 3, 1),
    "with the embedding": (lambda: whole_model(OF), 3, 0),
    "with the head": (lambda: whole_model(OF), 3, 2),
    "all of it": (lambda: whole_model(OF), 1, 0),
    "tied in one stage": (lambda: whole_model(TIED), 1, 0),
    "tied, the head": (lambda: whole_model(TIED), 2, 1),
    "biases": (lambda: with_biases(whole_model(OF)), 3, 1),
    "dropout": (lambda: whole_model(DROPOUT), 3, 1),
    "weights used twice": (lambda: twice(whole_model(OF)), 3, 1),
    "modules of two names": (lambda: two_names(whole_model(OF)), 3, 1),
    "partly frozen": (lambda: frozen(whole_model(OF)), 3, 1),
    "experts": (lambda: whole_model(OF, SOFTMAX), 3, 1),
    "experts one by one": (lambda: looped(whole_model(OF, SOFTMAX)), 3, 1),
    "a capacity": (lambda: whole_model(OF, (*SOFTMAX, ("capacity", 1.0))), 3, 1),
    "experts whose rows are padded": (lambda: apply_moe(Transformer(OF), 3, 2, ffn_hidden=10), 3, 1),
    "a Function that is asked": (lambda: with_own(whole_model(OF), Scaled), 3, 1),
    "a Function that is not": (lambda: with_own(whole_model(OF), ScaledAnyway), 3, 1),
    "selective": (lambda: apply_recompute(whole_model(OF), "selective"), 3, 1),
    "matmuls": (lambda: apply_recompute(whole_model(OF), "selective", keep_matmuls), 3, 1),
    "full": (lambda: apply_recompute(whole_model(OF), "full"), 3, 1),
    "full, with dropout": (lambda: apply_recompute(whole_model(DROPOUT), "full"), 3, 1),
    "full, all of it, tied": (lambda: apply_recompute(whole_model(TIED), "full"), 1, 0),
    "full, experts": (lambda: apply_recompute(whole_model(OF, SOFTMAX), "full"), 3, 1),
}


class Part:
    """One stage of a case, and a micro-batch of it."""

    def __init__(self, name: str, seed: int = 0):
        make, stages, number = CASES[name]
        self.stage = split_stages(make(), stages)[number]
        generator = torch.Generator().manual_seed(seed)
        hidden = torch.randn(BATCH, SEQ, 16, generator=generator)
        tokens, self.targets = torch.randint(31, (2, BATCH, SEQ), generator=generator).unbind()
        self.x = tokens if number == 0 else hidden
        self.last = number == stages - 1
        self.gradient = torch.ones(()) if self.last else torch.randn(BATCH, SEQ, 16, generator=generator)

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [self.x, self.targets, self.gradient]

    def forward(self, make):
        torch.manual_seed(1)
        return make(self.stage, self.x, (lambda out: loss(out, self.targets)) if self.last else lambda out: out)

    def gradients(self) -> dict[str, torch.Tensor]:
        return {name: p.grad for name, p in self.stage.named_parameters() if p.grad is not None}


def both(name: str, dtype: torch.dtype = torch.float32, times: int = 1):
    """Of B and of I and W: gradients by name and the input's, and FLOPs of F, and of backward (a list)."""
    found = []
    for make in (StagePass, SplitPass):
        part, grad_x, flops = Part(name), [], []
        for _ in range(times):
            with torch.autocast("cpu", dtype, enabled=dtype != torch.float32), counted(flops):
                done = part.forward(make)
            if make is StagePass:
                with counted(flops):
                    grad_x.append(done.backward(part.gradient))
            else:
                with counted(flops):
                    grad_x.append(done.input_gradient(part.gradient))
                with counted(flops):
                    done.weight_gradients()
        found.append((part.gradients(), grad_x, flops))
    return found


@contextlib.contextmanager
def counted(flops: list):
    with FlopCounterMode(display=False) as counter:
        yield
    flops.append(counter.get_total_flops())


def same(one, other) -> bool:
    return one is other is None or (one.dtype == other.dtype and torch.equal(one, other))


@pytest.mark.parametrize("name", CASES)
def test_the_halves_are_the_whole(name):
    """All gradients to the bit, the FLOPs to the FLOP; I makes no more than B less W."""
    (whole, whole_x, (forward, b)), (halves, halves_x, (split_forward, i, w)) = both(name)
    assert whole.keys() == halves.keys() and len(whole) >= 4
    assert [each for each in whole if not same(whole[each], halves[each])] == []
    assert all(map(same, whole_x, halves_x))
    assert forward == split_forward
    again = 0
    if (
        name.startswith("full") and "dropout" not in name
    ):  # the replay goes on to a block's last product, see the module
        blocks = 4 if "all" in name else 2
        rows, width = BATCH * SEQ, 20
        again = blocks * 2 * rows * 16 * width if "experts" not in name else None
    if again is None:
        assert b <= i + w
    else:
        assert i + w == b + again, (b, i, w)
    assert w > 0 and i > 0


@pytest.mark.parametrize(
    "name", ["a stage in the middle", "tied in one stage", "experts", "full", "with the embedding"]
)
def test_the_halves_are_the_whole_in_bfloat16(name):
    """Autocast: the same products of the same numbers, and sums in float32 that go to float32 weights."""
    (whole, whole_x, _), (halves, halves_x, _) = both(name, torch.bfloat16)
    assert [each for each in whole if not same(whole[each], halves[each])] == []
    assert all(gradient.dtype == torch.float32 for gradient in halves.values())
    assert all(map(same, whole_x, halves_x))


@pytest.mark.parametrize("name", ["a stage in the middle", "tied in one stage", "experts", "full"])
def test_gradients_add_up_over_micro_batches(name):
    (whole, _, _), (halves, _, _) = both(name, times=3)
    assert [each for each in whole if not same(whole[each], halves[each])] == []


def test_halves_of_several_micro_batches_may_take_turns():
    """F F I F I W W I W: each has its own graph and its own tensors."""
    part, reference = Part("a stage in the middle"), Part("a stage in the middle")
    xs = [torch.randn(BATCH, SEQ, 16) for _ in range(3)]
    for x in xs:
        StagePass(reference.stage, x, lambda out: out).backward(part.gradient)
    passes = [SplitPass(part.stage, xs[0], lambda out: out), SplitPass(part.stage, xs[1], lambda out: out)]
    passes[0].input_gradient(part.gradient)
    passes.append(SplitPass(part.stage, xs[2], lambda out: out))
    passes[1].input_gradient(part.gradient)
    passes[0].weight_gradients()
    passes[1].weight_gradients()
    passes[2].input_gradient(part.gradient)
    passes[2].weight_gradients()
    wanted = reference.gradients()
    assert all(torch.equal(gradient, wanted[name]) for name, gradient in part.gradients().items())


def test_a_function_is_asked_once_for_its_input_and_once_for_its_weight():
    Scaled.asked, ScaledAnyway.calls = [], 0
    both("a Function that is asked")
    assert Scaled.asked == 2 * [(True, True)] + 2 * [(True, False)] + 2 * [(False, True)]
    both("a Function that is not")
    assert ScaledAnyway.calls == 4, "once for each block: it has made all at once, and nothing is made twice"


@pytest.mark.parametrize("name", CASES)
def test_hooks_of_weights_fire_once_and_after_w_alone(name):
    """A tensor's hook and a post-accumulate one see the whole gradient; a parameter has no .grad before W."""
    part, seen = Part(name), []
    for label, parameter in part.stage.named_parameters():
        if parameter.requires_grad:
            parameter.register_hook(lambda gradient, label=label: seen.append(("gradient", label, gradient.clone())))
            parameter.register_post_accumulate_grad_hook(
                lambda p, label=label: seen.append(("accumulated", label, p.grad.clone()))
            )
    done = part.forward(SplitPass)
    done.input_gradient(part.gradient)
    assert seen == [] and part.gradients() == {}
    done.weight_gradients()
    gradients = part.gradients()
    assert len(seen) == 2 * len(gradients)
    for kind in ("gradient", "accumulated"):
        found = {label: gradient for each, label, gradient in seen if each == kind}
        assert found.keys() == gradients.keys() and all(torch.equal(found[n], gradients[n]) for n in found)


def test_the_stage_has_its_own_weights_all_the_time():
    """Proxies are there in forward alone, also where it fails; a replay in I does not see them either."""
    part = Part("full")
    before = {name: id(p) for name, p in part.stage.named_parameters()}
    seen = []
    block = next(iter(part.stage.blocks))
    block.mlp.register_forward_pre_hook(lambda *_: seen.append(id(block.mlp.down_proj.weight)))
    done = part.forward(SplitPass)
    assert {name: id(p) for name, p in part.stage.named_parameters()} == before
    done.input_gradient(part.gradient)
    done.weight_gradients()
    assert {name: id(p) for name, p in part.stage.named_parameters()} == before and len(seen) == 2
    with pytest.raises(RuntimeError):
        SplitPass(part.stage, torch.randn(2, 3, 5), lambda out: out)
    assert {name: id(p) for name, p in part.stage.named_parameters()} == before
    assert part.stage.state_dict().keys() == Part("full").stage.state_dict().keys()


@pytest.mark.parametrize("name, runs", [("a stage in the middle", 1), ("full", 2), ("matmuls", 2)])
def test_a_recomputed_forward_is_replayed_once(name, runs):
    """Not once for I and once more for W."""
    part, calls = Part(name), []
    for block in part.stage.blocks:
        block.mlp.register_forward_pre_hook(lambda *_: calls.append("mlp"))
    done = part.forward(SplitPass)
    assert len(calls) == 2
    done.input_gradient(part.gradient)
    assert len(calls) == 2 * runs
    done.weight_gradients()
    assert len(calls) == 2 * runs


# Where a replaced `apply` is not called.


def unsplit(name: str) -> list[str]:
    """The messages of the warnings of I. Asserts that the gradients are those of B, and come in W alone."""
    part, reference = Part(name), Part(name)
    reference.forward(StagePass).backward(reference.gradient)
    done = part.forward(SplitPass)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        grad_x = done.input_gradient(part.gradient)
    assert part.gradients() == {} and done.deferred == []
    done.weight_gradients()
    wanted = reference.gradients()
    assert part.gradients().keys() == wanted.keys()
    assert all(torch.equal(gradient, wanted[key]) for key, gradient in part.gradients().items())
    assert grad_x is None or grad_x.shape == part.x.shape
    return [str(each.message) for each in caught if "I computes the weights' gradients too" in str(each.message)]


@pytest.mark.parametrize(
    "name", ["a stage in the middle", "tied in one stage", "experts", "full", "with the embedding"]
)
def test_on_a_pytorch_that_does_not_call_a_replaced_apply_backward_is_one_piece(name, monkeypatch):
    monkeypatch.setattr(deferred_grads, "autograd_calls_replaced_apply", lambda: False)
    (line,) = unsplit(name)
    assert line.startswith(f"PyTorch {torch.__version__} does not call")


def test_under_compiled_autograd_backward_is_one_piece():
    from torch._dynamo import compiled_autograd

    with compiled_autograd._enable(lambda graph: graph):
        (line,) = unsplit("a stage in the middle")
    assert line.startswith("compiled autograd is on")
    assert deferred_grads.can_defer()


def test_this_pytorch_calls_a_replaced_apply():
    assert deferred_grads.autograd_calls_replaced_apply.__wrapped__()


# Memory.


class Alive(TorchDispatchMode):
    """Inside and later: the bytes that are still there of what has been made inside."""

    def __init__(self, *before: torch.Tensor):
        super().__init__()
        self.before, self.storages = {tensor.untyped_storage()._cdata for tensor in before}, {}

    @classmethod
    def _should_skip_dynamo(cls):
        return False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.before:
                    self.storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return out

    @property
    def bytes(self) -> int:
        return sum(size for storage, size in self.storages.values() if not storage.expired())


def forget_counts(stage: nn.Module) -> None:
    """Routers keep how many tokens each expert had until somebody takes it."""
    if routers_of(stage):
        take_counts(stage)


def levels(name: str) -> dict[str, int]:
    """Bytes alive after each part, of what a pass has made; without the garbage collector."""
    part, make = Part(name), SplitPass
    weights = list(part.stage.parameters())
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    before = [*weights, *(weight.grad for weight in weights), *part.stage.buffers(), *part.tensors]
    gc.disable()
    try:
        with Alive(*before) as alive:
            done, found = part.forward(make), {}
            done.out = None
            found["F"] = alive.bytes
            done.input_gradient(part.gradient)
            found["I"] = alive.bytes
            done.weight_gradients()
            found["W"] = alive.bytes
            done = None
            forget_counts(part.stage)
            found["end"] = alive.bytes
    finally:
        gc.enable()
    return found


def test_i_frees_all_but_what_w_needs():
    """For W: each product's input and its output's gradient (the last is the caller's); beside them the norms'."""
    found = levels("a stage in the middle")
    h, kv, f, rows = 16, 8, 20, BATCH * SEQ
    inputs, gradients = 3 * h + f, h + 2 * kv + h + 2 * f + h  # q k v, o, gate up, down; q, k, v, o, gate, up, down
    needed = 2 * 4 * rows * (inputs + gradients)
    needed -= 4 * rows * h  # the gradient that came in was there before
    beside = 4 * 2 * 2 * h
    assert needed <= found["I"] <= needed + beside, (found, needed)
    assert found["I"] < found["F"]
    assert found["W"] <= beside, "what is left is x's gradient, which is on its way"
    assert found["end"] == 0


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_left_after_w_without_the_garbage_collector(name):
    found = levels(name)
    assert found["end"] == 0, found
    assert found["W"] <= 4 * BATCH * SEQ * 16 + 64 + 4, found


@pytest.mark.parametrize("name", CASES)
def test_a_pass_that_is_never_finished_is_freed_too(name):
    """After F, and after I: an error in between. Without the garbage collector, which does not see C++'s references."""
    part = Part(name)
    gc.disable()
    try:
        for halves in (0, 1):
            with Alive(*part.stage.parameters(), *part.stage.buffers(), *part.tensors) as alive:
                done = part.forward(SplitPass)
                if halves:
                    done.input_gradient(part.gradient)
                done = None
                forget_counts(part.stage)
                assert alive.bytes == 0, halves
    finally:
        gc.enable()


def test_a_linear_layer_by_itself():
    """Shapes of any number of dimensions, with a bias by place and by name."""
    for shape in ((3, 5), (2, 3, 5), (2, 2, 3, 5)):
        for how in (lambda x, w, b: F.linear(x, w, b), lambda x, w, b: F.linear(x, w, bias=b)):
            weight, bias = nn.Parameter(torch.randn(4, 5)), nn.Parameter(torch.randn(4))
            stage = nn.Module()
            stage.weight, stage.bias = weight, bias
            stage.forward = lambda x, stage=stage, how=how: how(x, stage.weight, stage.bias)
            x, gradient = torch.randn(shape), torch.randn(*shape[:-1], 4)
            expected = torch.autograd.grad(how(x.requires_grad_(), weight, bias), [x, weight, bias], gradient)
            done = SplitPass(stage, x, lambda out: out)
            found = done.input_gradient(gradient)
            done.weight_gradients()
            for one, other in zip((found, weight.grad, bias.grad), expected, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


class Scales(nn.Module):
    """Some of these, one after another; cast: by copies of the weights in another dtype, which forward makes."""

    def __init__(self, cast: bool):
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(4) for _ in range(3))
        self.cast = cast

    def forward(self, x):
        for weight in self.weights:
            x = Scaled.apply(x, weight.double() if self.cast else weight)
        return x


@pytest.mark.parametrize("kind", ["leaves", "copies made before", "copies made in forward"])
def test_w_has_one_gradient_at_a_time(kind):
    """Each is with its weight before the next one is made: else W would hold a second gradient of every weight."""
    stage = Scales(kind == "copies made in forward")
    weights = list(stage.weights)
    if kind == "copies made before":  # operations on the weights, that autograd would run last
        for name, weight in list(stage.weights._parameters.items()):
            stage.weights._parameters[name] = weight.bfloat16()
    for weight in weights:
        weight.register_post_accumulate_grad_hook(lambda _: Scaled.asked.append("there"))
    x = torch.randn(1, 2, 4, dtype=torch.bfloat16 if kind == "copies made before" else torch.float32)
    done = SplitPass(stage, x, lambda out: out)
    done.input_gradient(torch.ones_like(done.out))
    Scaled.asked.clear()
    done.weight_gradients()
    assert Scaled.asked == [(False, True), "there"] * 3


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_under_anomaly_mode():
    """Nothing in W is made of memory that has no values yet."""
    torch.use_deterministic_algorithms(True)  # such memory is full of NaN then
    try:
        with torch.autograd.set_detect_anomaly(True, check_nan=True):
            part = Part("a stage in the middle")
            done = part.forward(SplitPass)
            done.input_gradient(part.gradient)
            done.weight_gradients()
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(gradient.isfinite().all() for gradient in part.gradients().values())
