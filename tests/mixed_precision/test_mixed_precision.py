"""Master weights keep what 16 bits lose, and the loss scaler does bit for bit what torch.amp.GradScaler does, without a
question to the device. CPU, and two gloo ranks for the skip that all share; a GPU where there is one.
"""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from course_kit.checks.watchers import NoHostReads
from course_lib.mixed_precision.masters import LossScaler, MasterWeights, mixed_step, step_unless
from course_lib.single_gpu.model import ModelConfig, Transformer, loss
from course_lib.single_gpu.training import ADAMW, train_step

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ODD = ModelConfig(layers=1, hidden=10, heads=1, kv_heads=1, ffn_hidden=13, vocab=19, tied=True)
FUSED = {"lr": 1e-2, **ADAMW}
HALVES = torch.float16, torch.bfloat16


def small_model(dtype: torch.dtype = torch.float32) -> Transformer:
    return Transformer(ODD).to(DEVICE, dtype)


def small_batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(ODD.vocab, (3, 8), generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    return tokens[:, :-1], tokens[:, 1:]


def everything(optimizer: torch.optim.Optimizer | MasterWeights) -> list[torch.Tensor]:
    """Copies of all that a step may change: weights, moments, step counters."""
    inner = optimizer.optimizer if isinstance(optimizer, MasterWeights) else optimizer
    weights = optimizer.weights + optimizer.master_parameters if inner is not optimizer else []
    weights = weights + [parameter for group in inner.param_groups for parameter in group["params"]]
    states = [value for parameter in inner.state for _, value in sorted(inner.state[parameter].items())]
    return [tensor.detach().clone() for tensor in weights + states]


def assert_same_bits(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    assert len(ours) == len(theirs)
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their, rtol=0, atol=0, check_device=False)


@pytest.mark.parametrize(("dtype", "lost"), [(torch.bfloat16, 1e-3), (torch.float16, 1e-4)])
def test_without_a_master_copy_small_updates_are_lost(dtype, lost):
    weights = [nn.Parameter(torch.ones(100, device=DEVICE, dtype=dtype)) for _ in range(2)]
    alone = torch.optim.AdamW([weights[0]], lr=lost, weight_decay=0, fused=True)
    with_master = MasterWeights([weights[1]], torch.optim.AdamW, lr=lost, weight_decay=0)
    for _ in range(50):
        for weight, optimizer in zip(weights, (alone, with_master), strict=True):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
            optimizer.zero_grad()
    assert (weights[0] == 1).all(), "steps of less than half a unit in the last place can't move a 16-bit weight"
    expected = torch.full_like(weights[1], 1 - 50 * lost, dtype=torch.float32)
    torch.testing.assert_close(with_master.master_parameters[0].detach(), expected, rtol=1e-5, atol=0)
    assert_same_bits([weights[1].detach()], [expected.to(dtype)])


@pytest.mark.parametrize("dtype", HALVES)
def test_masters_step_as_the_optimizer_does_in_float32(dtype):
    model = small_model(dtype)
    model.norm.float()  # a parameter that is float32 already
    model.blocks[0].mlp_norm.weight.requires_grad_(False)
    reference = copy.deepcopy(model).float()
    optimizer = MasterWeights(model.parameters(), torch.optim.AdamW, **FUSED)
    expected = torch.optim.AdamW([p for p in reference.parameters() if p.requires_grad], **FUSED)
    for seed in range(3):
        for number, weight in enumerate(optimizer.weights):
            generator = torch.Generator(DEVICE).manual_seed(100 * seed + number)
            weight.grad = torch.empty_like(weight).normal_(0, 1e-3, generator=generator)
            expected.param_groups[0]["params"][number].grad = weight.grad.float()
        optimizer.step()
        expected.step()
        optimizer.zero_grad()
    masters = [master.detach() for master in optimizer.master_parameters]
    assert_same_bits(masters, [p.detach() for p in reference.parameters() if p.requires_grad])
    assert_same_bits(
        [p.detach() for p in optimizer.weights],
        [m.to(w.dtype) for w, m in zip(optimizer.weights, masters, strict=True)],
    )
    assert model.norm.weight.data_ptr() == masters[-1].data_ptr(), "a float32 parameter needs no copy"
    assert {p.dtype for p in model.blocks.parameters()} == {dtype}


@pytest.mark.parametrize("dtype", HALVES)
def test_gradients_of_micro_batches_add_up_in_float32(dtype):
    weight = nn.Parameter(torch.zeros(3, device=DEVICE, dtype=dtype))
    optimizer = MasterWeights([weight], torch.optim.AdamW, lr=1e-3)
    for _ in range(3000):  # a running sum of ones stops at 2048 in float16, at 256 in bfloat16
        weight.sum().backward()
        optimizer.accumulate_into_master()
    assert weight.grad is None
    assert (optimizer.master_parameters[0].grad == 3000).all()
    optimizer.zero_grad()
    assert optimizer.master_parameters[0].grad is None


@pytest.mark.parametrize(("dtype", "stops"), [(torch.float16, 2048), (torch.bfloat16, 256)])
def test_where_a_running_sum_of_ones_stops(dtype, stops):
    assert torch.tensor(stops - 1, dtype=dtype) + 1 == stops
    assert torch.tensor(stops, dtype=dtype) + 1 == stops


def test_a_saved_run_goes_on_with_the_same_bits(tmp_path):
    def run(steps: range, model: nn.Module, optimizer: MasterWeights, scaler: LossScaler) -> list[torch.Tensor]:
        for seed in steps:
            mixed_step(scaler, model, optimizer, *small_batch(seed))
        return everything(optimizer) + [scaler.factor, scaler.good_steps]

    def fresh() -> tuple[nn.Module, MasterWeights, LossScaler]:
        model = small_model(torch.float16)
        return model, MasterWeights(model.parameters(), torch.optim.AdamW, **FUSED), LossScaler(interval=3).to(DEVICE)

    first = fresh()
    run(range(4), *first)
    torch.save({"optimizer": first[1].state_dict(), "scaler": first[2].state_dict()}, tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt")
    assert sorted(state["scaler"]) == ["factor", "good_steps"]
    second = fresh()
    second[1].load_state_dict(state["optimizer"])
    second[2].load_state_dict(state["scaler"])
    expected = run(range(4, 8), *first)
    assert_same_bits(run(range(4, 8), *second), expected)

    rounded = fresh()  # masters made again from the 16-bit weights: what a save without them would bring back
    weights = [master.half().float() for master in state["optimizer"]["master"]]
    rounded[1].load_state_dict(state["optimizer"] | {"master": weights})
    rounded[2].load_state_dict(state["scaler"])
    found = run(range(4, 8), *rounded)
    assert any(not torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_what_master_weights_refuse():
    with pytest.raises(ValueError, match="not torch.float64"):
        MasterWeights([nn.Parameter(torch.zeros(2, dtype=torch.float64))], torch.optim.AdamW)
    optimizer, other = (MasterWeights([nn.Parameter(torch.ones(n).half())], torch.optim.AdamW) for n in (2, 3))
    with pytest.raises(ValueError, match="other shapes"):
        optimizer.load_state_dict(other.state_dict())
    assert (optimizer.weights[0] == 1).all()


SCRIPT = "....i..n......ii......."  # a dot: finite gradients; i: an inf; n: a nan


@pytest.mark.parametrize(("growth", "backoff"), [(2.0, 0.5), (1.1, 0.7)])
def test_the_same_bits_as_torchs_grad_scaler(growth, backoff):
    models = [small_model(), small_model()]
    ours, theirs = (torch.optim.AdamW(model.parameters(), **FUSED) for model in models)
    scaler = LossScaler(2.0**10, growth, backoff, interval=3).to(DEVICE)
    expected = torch.amp.GradScaler(DEVICE, 2.0**10, growth, backoff, growth_interval=3)
    scales = []
    for number, what in enumerate(SCRIPT):
        inputs, targets = small_batch(number)
        for model, optimizer in zip(models, (ours, theirs), strict=True):
            optimizer.zero_grad()
            scaled = (scaler if optimizer is ours else expected).scale(loss(model(inputs), targets))
            scaled.backward()
            if what != ".":
                model.norm.weight.grad[3] = float("inf") if what == "i" else float("nan")
        scaler.unscale(models[0].parameters())
        expected.unscale_(theirs)
        assert scaler.found_inf == (what != ".")
        for model in models:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        before = everything(ours)
        scaler.step(ours)
        expected.step(theirs)
        if what != "." and number:
            assert_same_bits(everything(ours), before)
        scaler.update()
        expected.update()
        scales.append(scaler.factor.item())
        assert scales[-1] == expected.get_scale()
        assert scaler.good_steps == expected._get_growth_tracker()
        assert_same_bits(everything(ours), everything(theirs))
    assert len(set(scales)) >= 3, "the script doesn't exercise the schedule"


def test_a_step_skipped_first_leaves_step_counter_and_moments_at_zero():
    model = small_model(torch.float16)
    optimizer = MasterWeights(model.parameters(), torch.optim.AdamW, **FUSED)
    before = [weight.detach().clone() for weight in optimizer.weights + optimizer.master_parameters]
    scaler = LossScaler(2.0**126).to(DEVICE)
    mixed_step(scaler, model, optimizer, *small_batch(0))
    assert scaler.factor == 2.0**125
    assert_same_bits([w.detach() for w in optimizer.weights + optimizer.master_parameters], before)
    for state in optimizer.optimizer.state.values():
        assert not any(value.any() for value in state.values())


def test_the_scale_never_grows_to_infinity():
    scaler = LossScaler(2.0**127, interval=1)
    scaler.update()
    assert scaler.factor == 2.0**127
    with pytest.raises(ValueError, match="scale 0"):
        LossScaler(0)


@pytest.mark.parametrize("with_masters", [True, False])
def test_scaling_by_a_power_of_two_changes_no_bit_in_float32(with_masters):
    """So unscaling comes before clipping: the other order would clip everything."""
    models, losses = [small_model(), small_model()], []
    optimizers = [torch.optim.AdamW(model.parameters(), **FUSED) for model in models]
    if with_masters:
        optimizers[0] = MasterWeights(models[0].parameters(), torch.optim.AdamW, **FUSED)
    scaler = LossScaler(2.0**20, interval=2).to(DEVICE)
    for seed in range(4):
        losses.append(mixed_step(scaler, models[0], optimizers[0], *small_batch(seed), max_norm=0.5))
        assert torch.equal(losses[-1], train_step(models[1], optimizers[1], *small_batch(seed), max_norm=0.5))
    assert scaler.factor == 2.0**22
    assert_same_bits([p.detach() for p in models[0].parameters()], [p.detach() for p in models[1].parameters()])


@pytest.mark.parametrize("dtype", HALVES)
def test_autocast_with_our_scaler_is_autocast_with_torchs(dtype):
    models = [small_model(), small_model()]
    ours, theirs = (torch.optim.AdamW(model.parameters(), **FUSED) for model in models)
    scaler = LossScaler(2.0**24, interval=2).to(DEVICE)  # too large for float16: the first steps are skipped
    expected = torch.amp.GradScaler(DEVICE, 2.0**24, growth_interval=2)
    for seed in range(8):
        inputs, targets = small_batch(seed)
        found = mixed_step(scaler, models[0], ours, inputs, targets, dtype)
        theirs.zero_grad()
        with torch.autocast(DEVICE, dtype):
            their_loss = loss(models[1](inputs), targets)
        expected.scale(their_loss).backward()
        expected.unscale_(theirs)
        nn.utils.clip_grad_norm_(models[1].parameters(), 1.0)
        expected.step(theirs)
        expected.update()
        assert torch.equal(found, their_loss.detach())
        assert scaler.factor == expected.get_scale()
    assert_same_bits(everything(ours), everything(theirs))


def test_tiny_gradients_survive_with_a_scale_alone():
    """A loss of 1e-9 w in float16: its gradient is zero, and 6.6e-5 with a scale of 65,536."""
    steps = {}
    for name, factor in (("plain", 1.0), ("scaled", 2.0**16)):
        weight = nn.Parameter(torch.ones(4, device=DEVICE, dtype=torch.float16))
        optimizer, scaler = MasterWeights([weight], torch.optim.SGD, lr=1e6, fused=True), LossScaler(factor).to(DEVICE)
        (scaler.scale((weight.float() * 1e-9).sum())).backward()
        optimizer.accumulate_into_master()
        scaler.unscale(optimizer.master_parameters)
        scaler.step(optimizer)
        steps[name] = 1 - optimizer.master_parameters[0].detach()
    assert (steps["plain"] == 0).all()
    torch.testing.assert_close(steps["scaled"], torch.full_like(steps["scaled"], 1e-3), rtol=1e-3, atol=0)


def test_what_the_scaler_refuses():
    weight = nn.Parameter(torch.ones(3, device=DEVICE, dtype=torch.float16))
    weight.grad = torch.ones_like(weight)
    with pytest.raises(ValueError, match="float32 first"):
        LossScaler().to(DEVICE).unscale([weight])
    assert (weight.grad == 1).all()
    found_inf = torch.ones((), device=DEVICE)
    with pytest.raises(ValueError, match="fused=True"):
        step_unless(found_inf, torch.optim.AdamW([weight]))
    with pytest.raises(ValueError, match="uninitialized momentum"):
        step_unless(found_inf, torch.optim.SGD([weight], lr=1, momentum=0.9, fused=True))
    assert (weight == 1).all()


@pytest.mark.parametrize("masters", [True, False])
def test_a_step_reads_nothing_on_the_host(masters):
    model = small_model(torch.float16 if masters else torch.float32)
    optimizer = MasterWeights(model.parameters(), torch.optim.AdamW, **FUSED)
    optimizer = optimizer if masters else torch.optim.AdamW(model.parameters(), **FUSED)
    scaler, batch = LossScaler().to(DEVICE), small_batch(0)
    with NoHostReads():
        mixed_step(scaler, model, optimizer, *batch, torch.float32 if masters else torch.float16)
    with pytest.raises(AssertionError, match="on the host"), NoHostReads():
        bool(scaler.found_inf)


def test_a_step_runs_on_fake_tensors():
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    try:
        with FakeTensorMode(), torch.device(DEVICE):
            model = Transformer(ODD)
            optimizer, scaler = MasterWeights(model.parameters(), torch.optim.AdamW, **FUSED), LossScaler()
            tokens = torch.zeros(2, 8, dtype=torch.int64)
            for _ in range(2):
                assert mixed_step(scaler, model, optimizer, tokens, tokens).shape == ()
            assert {p.dtype for p in model.parameters()} == {torch.float16}
    finally:
        torch.set_default_dtype(dtype)


def steps_of_two_ranks(together: bool) -> tuple[list[float], list[float], list[bool]]:
    """On each of two ranks: scales, step counters and found_inf, where rank 1's shard has an inf in step 1,
    and both have one in step 2.
    """
    pair = dist.new_group([0, 1])
    if dist.get_rank() > 1:
        return [], [], []
    shard = nn.Parameter(torch.full((4,), 1.0 + dist.get_rank()))
    optimizer = torch.optim.AdamW([shard], **FUSED)
    scaler, scales, counters, skipped = LossScaler(8.0, group=pair if together else None), [], [], []
    for step in range(4):
        shard.grad = torch.full((4,), float("inf") if step == 2 or step == dist.get_rank() == 1 else 1.0)
        scaler.unscale([shard])
        skipped.append(bool(scaler.found_inf))
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.factor.item())
        counters.append(optimizer.state[shard]["step"].item())
    return scales, counters, skipped


def test_ranks_skip_together(ranks):
    first, second = ranks(steps_of_two_ranks, True)[:2]
    assert first == second == ([8, 4, 2, 2], [1, 1, 1, 2], [False, True, True, False])
    first, second = ranks(steps_of_two_ranks, False)[:2]
    assert first != second, "without the group, each rank goes its own way"
