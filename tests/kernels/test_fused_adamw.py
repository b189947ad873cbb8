"""The fused AdamW steps as torch.optim.AdamW does, in one pass of 28 bytes a parameter, alone and under ZeRO. Triton's
interpreter on the CPU, or a GPU where there is one.
"""

import copy
import re

import pytest
import torch
import torch.distributed as dist
import triton
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from compiled_once import compile_launches
from course_kit.checks.guard_bands import GuardBands, guarded
from course_kit.gpu.launches import Launch, record_launches
from course_kit.gpu.operation_bytes import BytesMoved
from course_lib.kernels import adamw_optimizer
from course_lib.kernels.adamw_optimizer import FusedAdamW, adamw_many_kernel, update_many
from course_lib.kernels.fused_adamw import BLOCK, adamw_step, update
from course_lib.single_gpu.model import ModelConfig, Transformer
from course_lib.zero.optimizer import ZeroOptimizer
from kernel_traffic import count_accesses

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FLOAT32 = torch.finfo(torch.float32).eps
interpreted_only = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="counts inside Triton's interpreter")


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def fresh(numel: int) -> tuple[torch.Tensor, ...]:
    """master, exp_avg, exp_avg_sq before the first step; step."""
    return numbers(numel), *torch.zeros(2, numel, device=DEVICE).unbind(), torch.zeros((), device=DEVICE)


def gradients(numel: int, steps: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Of sizes from 1e-6 to 1e2."""
    return [numbers(numel, dtype=dtype, seed=9 * i) * 10.0 ** ((i % 9) - 6) for i in range(steps)]


def torch_steps(start: torch.Tensor, grads: list[torch.Tensor], dtype: torch.dtype, **settings) -> list[torch.Tensor]:
    """master, exp_avg, exp_avg_sq after torch.optim.AdamW, computed in `dtype`, in float64."""
    parameter = nn.Parameter(start.to(dtype, copy=True))
    optimizer = torch.optim.AdamW([parameter], foreach=False, **settings)
    for grad in grads:
        parameter.grad = grad.to(dtype)
        optimizer.step()
    state = optimizer.state[parameter]
    return [each.detach().double() for each in (parameter, state["exp_avg"], state["exp_avg_sq"])]


@pytest.mark.parametrize("numel", [1, 7, 2049])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    "settings",
    [
        {"lr": 1e-3},
        {"lr": 0.02, "betas": (0.9, 0.95), "eps": 1e-4, "weight_decay": 0.1},
        {"lr": 0.1, "betas": (0.0, 0.0), "weight_decay": 0.0},
    ],
)
def test_trajectory_is_torchs_to_a_bit_or_two(numel, dtype, settings):
    master, exp_avg, exp_avg_sq, step = fresh(numel)
    weights, start = torch.zeros(numel, dtype=torch.bfloat16, device=DEVICE), master.clone()
    grads = gradients(numel, 12, dtype)
    for grad in grads:
        step += 1
        adamw_step(master, grad, exp_avg, exp_avg_sq, step, **settings, weights=weights)
    exact, theirs = (torch_steps(start, grads, kind, **settings) for kind in (torch.float64, torch.float32))
    last_bits = 2 if DEVICE == "cpu" else 3
    for ours, other, right in zip((master, exp_avg, exp_avg_sq), theirs, exact, strict=True):
        error, other_error = (ours.double() - right).abs(), (other - right).abs()
        assert error.max() <= 2 * other_error.max() + last_bits * FLOAT32 * right.abs().max()
    assert torch.equal(weights, master.bfloat16())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's: past the end, 0 is divided by 0
@pytest.mark.parametrize("number", [1, 2, 10, 1000, 2**24])
def test_bias_corrections_have_all_their_digits(number):
    """Of an update from 0, every digit is seen: 1 - beta2 of a beta2 rounded to float32 would be 1e-5 off."""
    grad = numbers(100).abs() + 0.1
    betas = (0.9, 0.999)
    master, exp_avg, exp_avg_sq, _ = (torch.zeros(100, device=DEVICE) for _ in range(4))
    adamw_step(master, grad, exp_avg, exp_avg_sq, torch.tensor([float(number)], device=DEVICE), 1e-3, betas, 0.0, 0.0)
    g = grad.double()
    m, v = (1 - betas[0]) * g, (1 - betas[1]) * g**2
    expected = -1e-3 * m / (1 - betas[0] ** number) / (v / (1 - betas[1] ** number)).sqrt()
    torch.testing.assert_close(master.double(), expected, rtol=8 * FLOAT32, atol=0)
    torch.testing.assert_close(exp_avg.double(), m, rtol=2 * FLOAT32, atol=0)
    torch.testing.assert_close(exp_avg_sq.double(), v, rtol=3 * FLOAT32, atol=0)


@interpreted_only
@pytest.mark.parametrize(
    "grad_dtype, weights_dtype, expected",
    [(torch.bfloat16, torch.bfloat16, 28), (torch.float32, torch.float16, 30), (torch.float32, None, 28)],
)
def test_bytes_a_parameter(grad_dtype, weights_dtype, expected):
    numel = 2500
    master, exp_avg, exp_avg_sq, step = fresh(numel)
    weights = None if weights_dtype is None else torch.zeros(numel, dtype=weights_dtype, device=DEVICE)
    with count_accesses() as moved, record_launches() as launches:
        adamw_step(master, numbers(numel, dtype=grad_dtype), exp_avg, exp_avg_sq, step + 1, 1e-3, weights=weights)
    programs = launches[0].grid[0]
    assert moved["load"] + moved["store"] - 4 * programs == expected * numel  # each program reads the step
    assert moved["store"] == numel * (12 + (0 if weights is None else 2)) and len(launches) == 1


def test_one_operation_after_another_moves_eighty():
    parameter = nn.Parameter(numbers(100))
    optimizer = torch.optim.AdamW([parameter], foreach=False)
    for _ in range(2):
        parameter.grad = numbers(100)
        with BytesMoved() as moved:
            optimizer.step()
    assert moved.total == 80 * 100 + 3 * 4  # the count of steps goes up, and is read


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("numel", [1, 1023, 1025])
def test_nothing_outside_is_read_or_written(numel, dtype):
    guards, (master, exp_avg, exp_avg_sq, step) = GuardBands(), fresh(numel)
    grad, weights = guarded(numbers(numel, dtype=dtype)), torch.zeros(numel, dtype=torch.bfloat16, device=DEVICE)
    written = [guards.guarded(buffer) for buffer in (master, exp_avg, exp_avg_sq, weights)]
    with guards:
        adamw_step(written[0], grad, *written[1:3], guarded(step + 1), 0.1, weights=written[3])
    guards.check()
    for buffer, before in zip(written, (master, exp_avg, exp_avg_sq, weights), strict=True):
        assert buffer.isfinite().all() and not torch.equal(buffer, before)  # what surrounds the inputs is NaN


def test_operator_is_well_made_and_makes_nothing():
    for weights in (None, torch.zeros(5, dtype=torch.bfloat16, device=DEVICE)):
        master, exp_avg, exp_avg_sq, step = fresh(5)
        given = master, numbers(5), exp_avg, exp_avg_sq, weights, step + 1, 1e-3, 0.9, 0.999, 1e-8, 0.01
        torch.library.opcheck(update, given)
        with GuardBands() as guards:
            update(*given)
        assert guards.operations == [] and guards.largest_bytes == 0


def test_the_step_is_read_by_the_kernel_so_nothing_is_traced_twice():
    traced = []

    def backend(graph, inputs):
        traced.append(graph)
        return graph.forward

    ours, theirs = fresh(40), fresh(40)
    compiled = torch.compile(adamw_step, backend=backend, fullgraph=True)
    for grad in gradients(40, 4, torch.float32):
        for function, (master, exp_avg, exp_avg_sq, step) in ((compiled, ours), (adamw_step, theirs)):
            step += 1
            function(master, grad, exp_avg, exp_avg_sq, step, 1e-3)
    assert len(traced) == 1
    for found, expected in zip(ours, theirs, strict=True):
        assert torch.equal(found, expected)
    with FakeTensorMode():
        fake = [torch.empty(8) for _ in range(4)]
        adamw_step(*fake, torch.empty(()), 1e-3)


def train(kind, steps: int = 5, state: dict | None = None, model: nn.Module | None = None):
    """A model of odd shapes, two parameter groups, a schedule: trained, with its optimizer."""
    if model is None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.Linear(3, 3)).to(DEVICE)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() == 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0, "betas": (0.8, 0.95)},
    ]
    optimizer = kind(groups, lr=1e-2)
    if state is not None:
        optimizer.load_state_dict(copy.deepcopy(state))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for i in range(steps):
        optimizer.zero_grad()
        loss = model(numbers(4, 5, seed=i)).pow(2).sum()
        (model[:2](numbers(4, 5)).sum() if i == 1 else loss).backward()  # some have no gradient
        optimizer.step()
        schedule.step()
    return model, optimizer


def assert_same(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, found), expected in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, msg=lambda text: f"{name}: {text}")


def test_optimizer_trains_as_torchs_with_one_launch_a_group():
    """In the first step one a parameter, so that a graph that is captured later finds all kernels loaded. Of one
    parameter the launch needs no tables: in the second step, where two layers have no gradient, each group has one.
    """
    theirs, _ = train(torch.optim.AdamW)
    with record_launches() as launches:
        ours, optimizer = train(FusedAdamW)
    assert_same(ours, theirs)
    names = [launch.name for launch in launches]
    assert names == ["adamw_kernel"] * (6 + 2) + ["adamw_many_kernel"] * 3 * 2
    with GuardBands() as guards:
        optimizer.step()
    tables = {"aten.detach_", "aten.lift_fresh"} | ({"aten.to"} if DEVICE == "cuda" else set())
    computed = {name for name in guards.operations if not name.startswith("profiler.")}
    assert computed - tables == {"aten._foreach_add_"}  # the steps' numbers, and no more
    assert guards.largest_bytes <= 3 * 6 * 8  # addresses: nothing of the parameters' size


SHAPES = [(5,), (0, 7), (64, 32), (1,), (3000,), (1024,), (2, 512)]


def many_steps(dtype: torch.dtype, shapes=SHAPES, shift: int = 0) -> tuple[list, list]:
    """Parameters of these shapes after three steps with gradients of a dtype: ours, and torch's with their numbers as
    float32. shift: elements by which they, and all else, are off 16 bytes.
    """
    ours, theirs = [], []
    for seed, shape in enumerate(shapes):
        numel = torch.Size(shape).numel()
        start = numbers(numel + shift, seed=seed)
        ours.append(nn.Parameter(start.clone()[shift:].view(shape)))
        theirs.append(nn.Parameter(start[shift:].view(shape).clone()))
    optimizers = FusedAdamW(ours, lr=1e-2), torch.optim.AdamW(theirs, lr=1e-2)
    for i in range(3):
        for seed, (our, their) in enumerate(zip(ours, theirs, strict=True)):
            grad = numbers(our.numel() + shift, dtype=dtype, seed=seed + 50 * i)[shift:].view(our.shape)
            our.grad_dtype = None
            our.grad, their.grad = grad, grad.float()
        for optimizer in optimizers:
            optimizer.step()
    return ours, theirs


@pytest.mark.parametrize("shift", [0, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_many_parameters_of_all_sizes_in_one_launch(dtype, shift):
    with record_launches() as launches:
        ours, theirs = many_steps(dtype, shift=shift)
    sizes = [torch.Size(shape).numel() for shape in SHAPES]
    aligned = [size for size in sizes if size % 16 == 0 and size] if not shift else []
    others = [size for size in sizes if size not in aligned]
    grids = [(sum(triton.cdiv(size, BLOCK) for size in some),) for some in (aligned, others) if some]
    first = [launch.name for launch in launches].count("adamw_kernel")
    assert first == len(sizes) - 1, "one has no elements"
    assert [launch.name for launch in launches[first:]] == ["adamw_many_kernel"] * 2 * len(grids)
    assert [launch.grid for launch in launches[first:]] == grids * 2, "a program for each block, and none for nothing"
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their, rtol=1e-5, atol=1e-6)


@interpreted_only
def test_many_parameters_move_as_few_bytes():
    """28 an element, as each alone; of a program's own the addresses, the owner and the step: 60."""
    parameters = [nn.Parameter(numbers(2048)), nn.Parameter(numbers(1000))]
    for parameter in parameters:
        parameter.grad = numbers(parameter.numel())
    optimizer = FusedAdamW(parameters)
    optimizer.step()
    with count_accesses() as moved, record_launches() as launches:
        optimizer.step()
    programs = sum(launch.grid[0] for launch in launches)
    assert programs == 3 and moved["load"] + moved["store"] == 28 * 3048 + programs * (8 + 6 * 8 + 4)


def test_wide_loads_where_all_sizes_and_addresses_are_multiples_of_16():
    """A tensor that is not costs the others nothing: it has a launch of its own."""
    for shapes, shift, aligned in (
        ([(64,), (32, 2)], 0, [True]),
        ([(64,), (5,), (3,), (32,)], 0, [True, False]),
        ([(64,), (64,)], 1, [False]),
    ):
        with record_launches() as launches:
            many_steps(torch.float32, shapes, shift)
        assert [launch.args[6] for launch in launches if launch.name == "adamw_many_kernel"] == aligned * 2
    table, owners, flat = torch.zeros(2, 6, dtype=torch.int64), torch.zeros(2, 2, dtype=torch.int32), torch.zeros(64)
    meta = {"BETA1": 0.9, "BETA2": 0.999, "BLOCK": BLOCK, "num_warps": 8}
    given = table, owners, flat, 1e-3, 1.0, 1e-8
    made = compile_launches([Launch(adamw_many_kernel, (1,), given, meta | {"ALIGNED": each}) for each in (1, 0)])
    wide = [len(re.findall(r"(?:ld|st)\.global\.v4\.b32", each.ptx)) for each in made]
    assert wide == [7, 0] and not any(each.spilled_bytes for each in made)


def test_groups_of_other_settings_and_gradients_are_launches_of_their_own():
    parameters = [nn.Parameter(numbers(40)) for _ in range(8)]
    optimizer = FusedAdamW([{"params": parameters[:4]}, {"params": parameters[4:], "betas": (0.5, 0.9)}])
    for i, parameter in enumerate(parameters):
        parameter.grad_dtype = None
        parameter.grad = numbers(40, dtype=[torch.float32, torch.bfloat16][i % 2])
    optimizer.step()
    with record_launches() as launches:
        optimizer.step()
    assert len(launches) == 4 and {launch.name for launch in launches} == {"adamw_many_kernel"}


def test_a_captured_graph_has_a_launch_for_each(monkeypatch):
    """Its replays would read a table that is no longer there. (Here the device only says that it is capturing.)"""
    parameters = [nn.Parameter(numbers(40)) for _ in range(3)]
    for parameter in parameters:
        parameter.grad = numbers(40)
    optimizer = FusedAdamW(parameters)
    one_each, together = ["adamw_kernel"] * 3, ["adamw_many_kernel"] * 2
    for capturing, names in ((False, one_each), (True, one_each), (False, together[:1])):
        monkeypatch.setattr(adamw_optimizer, "capturing", lambda device, capturing=capturing: capturing)
        with record_launches() as launches:
            optimizer.step()
        assert [launch.name for launch in launches] == names


def test_one_bad_gradient_or_moment_stops_the_step_before_it_begins():
    parameters = [nn.Parameter(numbers(40)) for _ in range(3)]
    optimizer = FusedAdamW(parameters)
    for parameter in parameters:
        parameter.grad = numbers(40)
    optimizer.step()
    optimizer.state[parameters[2]]["exp_avg"] = torch.zeros(39, device=DEVICE)
    before = [parameter.detach().clone() for parameter in parameters]
    with record_launches() as launches, pytest.raises(ValueError, match="exp_avg .39.: it is flat and contiguous"):
        optimizer.step()
    assert not launches and all(map(torch.equal, before, parameters))
    assert [float(state["step"]) for state in optimizer.state.values()] == [1, 1, 1]


def test_the_operator_for_many_is_well_made():
    lists = [[numbers(5, seed=i), numbers(3, seed=i)] for i in range(2)]
    moments = [[torch.zeros(5, device=DEVICE), torch.zeros(3, device=DEVICE)] for _ in range(2)]
    steps = [torch.ones((), device=DEVICE) for _ in range(2)]
    torch.library.opcheck(update_many, (*lists, *moments, steps, 1e-3, 0.9, 0.999, 1e-8, 0.01))


@pytest.mark.parametrize("first, second", [(FusedAdamW, torch.optim.AdamW), (torch.optim.AdamW, FusedAdamW)])
def test_states_go_over_to_torch_and_back(first, second):
    model, optimizer = train(first)
    state = copy.deepcopy(optimizer.state_dict())
    assert all(set(each) == {"step", "exp_avg", "exp_avg_sq"} for each in state["state"].values())
    assert [float(each["step"]) for each in state["state"].values()] == [5, 4, 4, 5, 4, 4]
    twin = copy.deepcopy(model)
    stayed, _ = train(first, 3, state, model)
    moved, other = train(second, 3, state, twin)
    assert_same(moved, stayed)
    assert [float(each["step"]) for each in other.state.values()] == [8, 6, 6, 8, 6, 6]
    again = second(model.parameters())
    with pytest.raises(ValueError, match="parameter group"):
        again.load_state_dict(state)


def test_a_loaded_step_is_on_the_device_and_the_optimizers_own():
    _, theirs = train(torch.optim.AdamW)
    _, ours = train(FusedAdamW, 0)
    ours.load_state_dict(theirs.state_dict())
    for parameter, state in ours.state.items():
        assert state["step"].device == parameter.device and state["step"].dtype == torch.float32
        state["step"] += 1
    assert [float(state["step"]) for state in theirs.state.values()] == [5, 4, 4, 5, 4, 4]


def test_closure():
    parameter = nn.Parameter(numbers(3))
    optimizer = FusedAdamW([parameter])

    def closure():
        optimizer.zero_grad()
        loss = parameter.pow(2).sum()
        loss.backward()
        return loss

    before = parameter.detach().clone()
    assert optimizer.step(closure) == before.pow(2).sum() and not torch.equal(before, parameter)


def zero_trajectory(kind: type[torch.optim.Optimizer]) -> list[torch.Tensor]:
    """Weights after 3 steps of ZeroOptimizer, and after 2 more from its saved state; called on each rank."""
    model, found, state = Transformer(ModelConfig(2, 24, 4, 2, 37, 61)), [], None
    for steps in (3, 2):
        zero = ZeroOptimizer(model, kind, stage=2, bucket_mb=0.02, lr=1e-3, eps=1e-4)
        if state is not None:
            zero.load_state_dict(state)
        for i in range(steps):
            tokens = torch.arange(12).view(2, 6) + 13 * dist.get_rank() + i
            model(tokens).pow(2).mean().backward()
            zero.clip_grad_norm_(1.0)
            zero.step()
            zero.zero_grad()
        state = zero.state_dict()
        found.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    return found


@interpreted_only
def test_flat_shards_of_zero(ranks):
    for ours, theirs in zip(ranks(zero_trajectory, FusedAdamW), ranks(zero_trajectory, torch.optim.AdamW), strict=True):
        for found, expected in zip(ours, theirs, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_empty():
    with record_launches() as launches:
        adamw_step(*(torch.empty(0, device=DEVICE) for _ in range(4)), torch.ones((), device=DEVICE), 1e-3)
        parameter = nn.Parameter(torch.empty(0, 3, device=DEVICE))
        parameter.grad = torch.empty_like(parameter)
        FusedAdamW([parameter]).step()
    assert not launches


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("grad", torch.ones(5), r"grad \[5\]: it is flat and contiguous, \[4\] as the master"),
        ("grad", torch.ones(4, 1), r"grad \[4, 1\]"),
        ("exp_avg", torch.ones(8)[::2], r"exp_avg \[4\]: it is flat and contiguous"),
        ("master", torch.ones(4).bfloat16(), "master is torch.bfloat16; it may be torch.float32"),
        ("exp_avg_sq", torch.ones(4).double(), "exp_avg_sq is torch.float64"),
        ("weights", torch.ones(4), "weights is torch.float32; it may be torch.bfloat16, torch.float16"),
        ("grad", torch.ones(4, device="meta"), "grad is on meta, the master on cpu"),
        ("step", 3, "step 3: it is a float32 tensor of one element"),
        ("step", torch.tensor(3), "step 3: it is a float32 tensor"),
        ("lr", -1.0, "lr -1.0"),
        ("lr", float("nan"), "lr nan"),
        ("lr", torch.tensor(0.1), "they are Python numbers"),
        ("betas", (0.9, 1.0), "betas"),
        ("betas", (0.9,), "betas"),
        ("eps", -1e-8, "eps -1e-08"),
        ("weight_decay", -0.1, "weight_decay -0.1"),
    ],
)
def test_bad_input_is_one_line_and_changes_nothing(name, value, message):
    given = {each: torch.ones(4) for each in ("master", "grad", "exp_avg", "exp_avg_sq")}
    given |= {"step": torch.ones(()), "lr": 1e-3, name: value}
    with pytest.raises(ValueError, match=message) as raised:
        adamw_step(**given)
    assert "\n" not in str(raised.value)
    for each in set(given) - {name, "lr", "step"}:
        assert torch.equal(given[each], torch.ones(4))


def test_an_optimizer_that_cannot_train_is_refused():
    good = nn.Parameter(numbers(4))
    optimizer = FusedAdamW([good])
    for parameter, settings in [
        (nn.Parameter(numbers(4).bfloat16()), {}),
        (nn.Parameter(numbers(4, 4).t()), {}),
        (nn.Parameter(numbers(4)), {"lr": -1.0}),
    ]:
        with pytest.raises(ValueError):
            FusedAdamW([parameter], **settings)
        with pytest.raises(ValueError):
            optimizer.add_param_group({"params": [parameter], **settings})
    assert len(optimizer.param_groups) == 1
    before, other = good.detach().clone(), nn.Parameter(numbers(3, 3))
    optimizer.add_param_group({"params": other})
    good.grad, other.grad = torch.ones_like(good), torch.ones_like(other).to_sparse()
    with pytest.raises(ValueError, match="sparse"):
        optimizer.step()
    assert torch.equal(good, before) and not optimizer.state
    state = torch.optim.AdamW([good, other], amsgrad=True).state_dict()
    with pytest.raises(ValueError, match="amsgrad"):
        FusedAdamW([good, other]).load_state_dict(state)
