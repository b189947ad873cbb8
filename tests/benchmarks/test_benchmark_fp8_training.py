"""benchmarks/fp8_training.py: what it compares and writes down, at tiny sizes on a CPU; its times need a GPU."""

from pathlib import Path

import pytest
import torch

from course_lib.single_gpu.model import swiglu

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="here it would take bench-1B: run the benchmark itself"
)


@pytest.fixture
def saved(monkeypatch) -> dict[str, dict]:
    """What `main` saves, by name; nothing is written."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    found = {}
    monkeypatch.setattr(benchmark(), "save", lambda name, figures: found.update({name: figures}))
    monkeypatch.setattr(benchmark(), "BEFORE_SPIKE", 2)
    return found


def benchmark():
    return __import__("fp8_training")


def test_curves_of_every_recipe_start_alike_and_then_differ(saved):
    benchmark().main(["curves", "--steps", "2", "--seeds", "1", "--lr", "1e-3"])
    figures = saved["fp8_curves"]
    ends = {row["recipe"]: row["end"] for row in figures["rows"]}
    assert list(ends) == [*benchmark().NAMES, "FP32"] and figures["steps"] == 2
    assert len(set(ends.values())) == len(ends)  # each rounds in its own way
    assert max(ends.values()) - min(ends.values()) < 0.05


def test_a_spike_is_one_value_in_one_step(saved):
    torch.manual_seed(0)
    gate, up = torch.randn(2, 2, 3, 8).unbind()
    gate, up = gate.requires_grad_(), up.requires_grad_()
    spiking = benchmark().SpikingSwiglu()
    assert torch.equal(spiking(gate, up), swiglu(gate, up))
    spiking.growth = 1000.0
    out, calm = spiking(gate, up), swiglu(gate, up)
    ((where,),) = [torch.nonzero(out != calm).tolist()]
    assert where[:2] == [0, 0]
    assert 1e6 <= (out / calm)[tuple(where)] < 1e7  # the square, and silu's bend below
    grown = torch.autograd.grad(out.sum(), up)[0] / torch.autograd.grad(calm.sum(), up)[0]
    assert 1e3 <= grown[tuple(where)] < 1e4  # of the weights that have aligned, the other one


def test_spikes_are_held_against_bf16_with_the_same_spike(saved, monkeypatch):
    seen, own = [], benchmark().spike_curve

    def spike_curve(model, optimizer, batches, growth=1.0, at=None):
        seen.append(
            (sum("quantizers.input" in name for name, _ in model.named_buffers()) > 0, len(batches), growth, at)
        )
        return own(model, optimizer, batches, growth, at)

    monkeypatch.setattr(benchmark(), "spike_curve", spike_curve)
    benchmark().main(["spikes", "--steps", "6", "--seeds", "1", "--lr", "3e-3", "--growth", "1000"])
    rows = {row["casts"]: row for row in saved["fp8_spikes"]["rows"]}
    assert list(rows) == list(benchmark().SPIKE_CASTS)
    assert [rows["BF16"][key] for key in ("at", "next", "last")] == [0, 0, 0]
    assert all(row["next"] != 0 and row["loss"] < 6 for name, row in rows.items() if name != "BF16")
    assert seen[0][1:] == (2, 1.0, None) and all(call[1:] == (6, 1000.0, 4) for call in seen[1:])
    delayed = [name.startswith("delayed") for name in rows]
    assert [call[0] for call in seen[1:]] == delayed  # a history is a buffer


def test_gaps_are_means_of_the_steps_they_are_named_after(saved):
    base = [2.0] * 40
    losses = [2.0] * 4 + [7.0] + [3.0] * 15 + [2.0] * 10 + [2.5] * 10
    gaps = benchmark().spike_gaps(losses, base)
    assert gaps == pytest.approx({"at": 5.0, "next": 1.0, "last": 0.5, "loss": 2.5})


@pytest.mark.parametrize("argv", [["curve"], ["spikes", "--steps", "5"], ["--steps", "5"]])
def test_an_impossible_run_ends_before_it_starts(saved, argv):
    with pytest.raises(SystemExit) as ended:
        benchmark().main(argv)
    assert ended.value.code == 2 and not saved
