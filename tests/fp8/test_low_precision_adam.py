"""AdamW with states of 32, 16 and 8 bits: torch's AdamW in float32, and in fewer bits exactly the bytes it says, no
second moment that vanishes, and means that stay right. CPU; a GPU where there is one.
"""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from course_kit.checks.watchers import NoHostReads
from course_lib.fp8.low_precision_adam import LowPrecisionAdamW, get_state, put_state
from course_lib.fp8.quantization import TILE, dequantize, quantize
from course_lib.single_gpu.data import ByteTokenizer, TokenBatches, corpus
from course_lib.single_gpu.model import PRESETS, Transformer
from course_lib.single_gpu.training import train_step

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CLOSE = 1e-7 if DEVICE == "cpu" else 5e-7  # its order of operations is another
FP32, BF16, FP16, E4M3, E5M2 = torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2
KEPT = FP32, BF16, FP16, E4M3, E5M2
SHAPES = [(37, 5), (128,), (3, 256), (), (1,)]


def spread_numbers(shape: tuple, seed: int = 0, decades: float = 2.0) -> torch.Tensor:
    """Numbers of both signs, from 10^-decades to 1 in size."""
    generator = torch.Generator().manual_seed(seed)
    size = 10 ** -(decades * torch.rand(shape, generator=generator))
    return (size * torch.randint(2, shape, generator=generator).mul(2).sub(1)).to(DEVICE)


def some_parameters(dtype: torch.dtype = FP32) -> list[nn.Parameter]:
    return [nn.Parameter(spread_numbers(shape, 100 + i).to(dtype)) for i, shape in enumerate(SHAPES)]


def give_gradients(parameters: list[nn.Parameter], step: int) -> None:
    for i, parameter in enumerate(parameters):
        parameter.grad = spread_numbers(parameter.shape, 1000 * step + i, 4).to(parameter.dtype)


def steps_of(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], steps: range) -> None:
    for step in steps:
        give_gradients(parameters, step)
        optimizer.step()


def kept_by(optimizer: LowPrecisionAdamW) -> list[dict[str, torch.Tensor]]:
    return [optimizer.state[p] for group in optimizer.param_groups for p in group["params"]]


def assert_same_bits(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    for our, their in zip(ours, theirs, strict=True):
        assert our.dtype == their.dtype
        assert torch.equal(our.detach().float(), their.detach().float())


@pytest.mark.parametrize("with_master", [False, True])
def test_in_float32_it_is_torchs_adamw(with_master):
    ours, theirs = some_parameters(), some_parameters()
    optimizer = LowPrecisionAdamW(ours, lr=3e-3, master=FP32 if with_master else None)
    expected = torch.optim.AdamW(theirs, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    steps_of(optimizer, ours, range(20))
    steps_of(expected, theirs, range(20))
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their, rtol=0, atol=CLOSE)
        for name in ("exp_avg", "exp_avg_sq", "step"):
            torch.testing.assert_close(optimizer.state[our][name], expected.state[their][name], rtol=10 * CLOSE, atol=0)


BYTES = {FP32: (4, 0, 0), BF16: (2, 0, 0), FP16: (2, 4, 0), E4M3: (1, 0, 4), E5M2: (1, 0, 4)}  # number, tensor, block


@pytest.mark.parametrize(("first", "second"), itertools.product(KEPT, KEPT))
@pytest.mark.parametrize("master", [None, FP32, BF16, FP16])
def test_it_keeps_the_bytes_that_it_says_and_nothing_else(first, second, master):
    parameters = some_parameters(BF16)
    optimizer = LowPrecisionAdamW(parameters, first=first, second=second, master=master)
    steps_of(optimizer, parameters, range(2))
    expected = 0
    for parameter in parameters:
        numel, blocks = parameter.numel(), -(-parameter.numel() // 128)
        kept = [BYTES[dtype] for dtype in (first, second, master) if dtype is not None]
        expected += 4 + sum(number * numel + tensor + block * blocks for number, tensor, block in kept)
        state = optimizer.state[parameter]
        assert (state["exp_avg"].dtype, state["exp_avg_sq"].dtype) == (first, second)
        assert state["exp_avg"].shape == state["exp_avg_sq"].shape == parameter.shape
        assert state["master"].dtype == master if master else "master" not in state
        assert {name.removesuffix("_scale") for name in state} <= {"step", "master", "exp_avg", "exp_avg_sq"}
    assert optimizer.stored_bytes() == expected


def test_eight_bit_moments_take_a_quarter_and_three_percent():
    weight = nn.Parameter(torch.zeros(512, 256, device=DEVICE, dtype=BF16))
    weight.grad = torch.ones_like(weight)
    optimizer = LowPrecisionAdamW([weight], first=E4M3, second=E4M3, master=BF16)
    optimizer.step()
    assert optimizer.stored_bytes() - 4 == weight.numel() * (2 + 2 * (1 + 4 / 128))


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize(
    ("dtype", "error", "decades"), [(BF16, 2**-8, 30), (FP16, 2**-11, 8), (E4M3, 2**-4, 4), (E5M2, 2**-3, 8)]
)
def test_what_is_kept_is_within_half_a_unit(name, dtype, error, decades):
    x, state = spread_numbers((70, 33), decades=decades), {}
    root = name == "exp_avg_sq" and dtype in (E4M3, E5M2)
    x = x.square() if root else x
    put_state(state, name, x, dtype, stochastic=False)
    relative = ((get_state(state, name) - x).abs() / x.abs()).max()
    assert relative <= (((1 + error) ** 2 - 1) if root else error) * 1.0001
    put_state(again := {}, name, get_state(state, name), dtype, stochastic=False)
    torch.testing.assert_close(get_state(again, name), get_state(state, name), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("stochastic", [False, True])
def test_no_second_moment_vanishes(dtype, stochastic):
    """Of gradients from 1e-9 to 1 in one block; as v itself, two thirds of them would round to zero in e4m3."""
    gradient, state = spread_numbers((8, 128), decades=9), {}
    put_state(state, "exp_avg_sq", gradient.square(), dtype, stochastic)
    kept = get_state(state, "exp_avg_sq")
    assert (kept > 0).all()
    assert (kept.sqrt() >= (0.5 if stochastic else 0.66) * gradient.abs()).all(), "the smallest code, from 1.5 of it"
    assert (dequantize(quantize(gradient.square(), E4M3, TILE)) == 0).float().mean() > 0.6
    put_state(state, "exp_avg_sq", torch.zeros(3, 50, device=DEVICE), dtype, stochastic)
    assert (get_state(state, "exp_avg_sq") == 0).all()


@pytest.mark.parametrize("stochastic", [False, True])
def test_an_update_is_never_wild(stochastic):
    """|m| <= 1.17 sqrt(v) for these betas, so an exact step is 1.2 lr at most; kept in 8 bits, no step is 3 lr."""
    weight = nn.Parameter(torch.zeros(4, 128, device=DEVICE))
    optimizer = LowPrecisionAdamW([weight], lr=1.0, weight_decay=0, first=E4M3, second=E4M3, stochastic=stochastic)
    for step in range(60):
        before = weight.detach().clone()
        weight.grad = spread_numbers((4, 128), step, 6) * (1 if step % 20 else 1000)
        optimizer.step()
        assert (weight - before).abs().max() < 3


@pytest.mark.parametrize(("dtype", "name"), [(BF16, "weights"), (BF16, "master"), (FP16, "master")])
def test_stochastic_rounding_adds_up_what_rounding_to_nearest_loses(dtype, name):
    torch.manual_seed(0)
    found = {}
    for stochastic in (False, True):
        weight = nn.Parameter(torch.ones(4096, device=DEVICE, dtype=dtype if name == "weights" else FP32))
        master = dtype if name == "master" else None
        rate = 1e-3 if dtype == BF16 else 1e-4
        optimizer = LowPrecisionAdamW([weight], lr=rate, weight_decay=0, master=master, stochastic=stochastic)
        for _ in range(50):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        found[stochastic] = (1 - weight.detach().double().mean().item()) / (50 * rate)
    assert found[False] == 0
    assert found[True] == pytest.approx(1, abs=0.03)


@pytest.mark.parametrize(("dtype", "beta2"), [(BF16, 0.999), (E4M3, 0.95), (E5M2, 0.95)])
def test_a_second_moment_falls_with_stochastic_rounding_alone(dtype, beta2):
    """Gradients of 1, then of 1e-3 but for each hundredth, which keeps the scale of its block."""
    torch.manual_seed(0)
    found = {}
    for stochastic in (False, True):
        weight = nn.Parameter(torch.zeros(100 * 128, device=DEVICE))
        optimizer = LowPrecisionAdamW([weight], betas=(0.9, beta2), second=dtype, stochastic=stochastic)
        steps = round(1 / (1 - beta2))
        large = torch.arange(weight.numel(), device=DEVICE) % 100 == 0
        for step in range(4 * steps):
            weight.grad = torch.where(large | (step < 2 * steps), 1.0, 1e-3)
            optimizer.step()
        kept = get_state(optimizer.state[weight], "exp_avg_sq")
        found[stochastic] = (kept[~large].mean() / kept[large].mean()).item()
    exact = (1 - beta2 ** (2 * steps)) * beta2 ** (2 * steps) / (1 - beta2 ** (4 * steps))
    assert found[True] == pytest.approx(exact, rel=0.2)
    assert found[False] > 2 * exact


@pytest.mark.parametrize("stochastic", [False, True])
def test_a_saved_run_goes_on_with_the_same_bits(tmp_path, stochastic):
    settings = {"first": E4M3, "second": E4M3, "master": FP16, "stochastic": stochastic, "lr": 1e-2}
    parameters = some_parameters(BF16)
    optimizer = LowPrecisionAdamW(parameters, **settings)
    steps_of(optimizer, parameters, range(3))
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    again = copy.deepcopy(parameters)
    state = torch.load(tmp_path / "state.pt")
    resumed = LowPrecisionAdamW(again)  # the dtypes come with the state, as lr does
    resumed.load_state_dict(state)
    assert {name: resumed.param_groups[0][name] for name in settings} == settings
    for run in ((optimizer, parameters), (resumed, again)):
        torch.manual_seed(1)
        steps_of(*run, range(3, 6))
    assert_same_bits(again, parameters)
    for ours, theirs in zip(kept_by(resumed), kept_by(optimizer), strict=True):
        assert_same_bits([ours[name] for name in sorted(ours)], [theirs[name] for name in sorted(theirs)])


def test_it_takes_over_a_state_of_torchs_adamw():
    theirs = some_parameters()
    other = torch.optim.AdamW(theirs, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    steps_of(other, theirs, range(3))
    ours = copy.deepcopy(theirs)
    optimizer = LowPrecisionAdamW(ours, first=E4M3, second=BF16)
    optimizer.load_state_dict(other.state_dict())
    assert optimizer.param_groups[0]["lr"] == 3e-3
    steps_of(optimizer, ours, range(3, 4))
    steps_of(other, theirs, range(3, 4))
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their, rtol=0, atol=CLOSE)  # the moments were float32 until now
        assert optimizer.state[our]["exp_avg"].dtype == E4M3
    fewer = LowPrecisionAdamW(ours[:2])
    with pytest.raises(ValueError, match="parameter group"):
        fewer.load_state_dict(other.state_dict())
    assert not fewer.state


def test_what_it_refuses():
    weight = nn.Parameter(torch.zeros(3, device=DEVICE))
    for settings, said in (
        ({"first": torch.int8}, "first=torch.int8"),
        ({"second": torch.float64}, "second=torch.float64"),
        ({"master": E4M3}, "master=torch.float8_e4m3fn"),
        ({"lr": -1.0}, "0 or more"),
        ({"betas": (0.9, 1.0)}, "below 1"),
    ):
        with pytest.raises(ValueError, match=said):
            LowPrecisionAdamW([weight], **settings)
        optimizer = LowPrecisionAdamW([weight])
        with pytest.raises(ValueError, match=said):
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))], **settings})
        assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("dtype", KEPT)
@pytest.mark.parametrize("stochastic", [False, True])
def test_a_step_reads_nothing_on_the_host(dtype, stochastic):
    master = dtype if dtype.itemsize > 1 else BF16
    settings = {"first": dtype, "second": dtype, "master": master, "stochastic": stochastic and dtype != FP32}
    parameters = some_parameters(BF16)
    optimizer = LowPrecisionAdamW(parameters, **settings)
    give_gradients(parameters, 0)
    with NoHostReads():
        optimizer.step()
        optimizer.step()
    with FakeTensorMode():
        weight = nn.Parameter(torch.zeros(130, dtype=BF16, device=DEVICE))
        weight.grad = torch.zeros_like(weight)
        optimizer = LowPrecisionAdamW([weight], **settings)
        optimizer.step()
        optimizer.step()
        assert optimizer.state[weight]["exp_avg"].dtype == dtype


RUNS = {  # first, second, master
    "FP32": (FP32, FP32, FP32),
    "DeepSeek-V3": (BF16, BF16, FP32),
    "FP8-LM": (E4M3, FP16, FP16),
    "8 bits": (E4M3, E4M3, BF16),
    "nanotron": (E4M3, E5M2, BF16),
}


def test_a_model_learns_as_well_with_each():
    tokens = ByteTokenizer().encode(corpus(300_000))
    text = TokenBatches(tokens, 4, 32)
    batches = [tuple(part.to(DEVICE) for part in next(text)) for _ in range(40)]
    ends, size = {}, {}
    for name, (first, second, master) in RUNS.items():
        model = Transformer(PRESETS["debug"]).to(DEVICE, FP32 if master == FP32 else BF16)
        optimizer = LowPrecisionAdamW(model.parameters(), lr=3e-3, first=first, second=second, master=master)
        losses = [train_step(model, optimizer, *batch).item() for batch in batches]
        ends[name], size[name] = sum(losses[-10:]) / 10, optimizer.stored_bytes()
        assert losses[0] - ends[name] > 2
    for name in RUNS:
        assert ends[name] == pytest.approx(ends["FP32"], abs=0.1)
    assert size["FP32"] > size["DeepSeek-V3"] > size["FP8-LM"] > size["8 bits"] == size["nanotron"]
