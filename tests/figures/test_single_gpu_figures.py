"""course_kit.figures.single_gpu: what is drawn is what was given, and it can be read. CPU."""

import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex
from torch import nn

from course_kit.figures import single_gpu as figures
from course_kit.figures.style import MEMORY, PHASES
from course_lib.single_gpu.memory import activation_bytes, param_count, state_bytes, training_bytes
from course_lib.single_gpu.model import PRESETS
from course_lib.single_gpu.profile import MemoryProfile
from figure_faults import faults

GiB = 2**30
LLAMA = PRESETS["llama3-8B"]
CASES = {name: training_bytes(PRESETS[name], 1, 4096) for name in ("llama3.2-1B", "llama3-8B")}


def timeline():
    """Two small steps, with their moments."""
    model = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    with MemoryProfile(model, optimizer) as profile:
        for step in range(2):
            profile.mark(f"step {step}")
            model(torch.randn(500, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return profile


@pytest.mark.parametrize(
    "draw",
    [
        lambda: figures.training_memory(LLAMA, [1024, 4096, 16384]),
        figures.step_phases,
        lambda: figures.where_parameters_are(["llama3.2-1B", "llama3-8B", "llama3-70B", "llama3-405B"]),
        figures.gpt_layer_activations,
        lambda: figures.activations_by_length(LLAMA, [2**n for n in range(10, 18)]),
        lambda: figures.memory_over_steps(timeline()),
        lambda: figures.training_loss(np.linspace(5.5, 2.4, 30), [5, 3, 2] * 20),
        figures.states_and_activations,
        lambda: figures.memory_budget(CASES, 80),
        lambda: figures.memory_budget({"one GPU": CASES["llama3-8B"]}, 24, 2**16),
    ],
)
def test_a_reader_can_read_it(draw):
    assert not faults(draw())


def test_bars_are_as_long_as_their_bytes_and_have_their_things_colors():
    (axes,) = figures.training_memory(LLAMA, [1024, 4096]).axes
    file, *parts = axes.patches
    assert file.get_height() == 2 * param_count(LLAMA) / GiB
    expected = []
    for seq in (1024, 4096):
        sizes = state_bytes(param_count(LLAMA), "bf16") | {"activations": activation_bytes(LLAMA, 1, seq)}
        expected += [(size / GiB, MEMORY[name].lower()) for name, size in sizes.items()]
    assert [(bar.get_height(), to_hex(bar.get_facecolor())) for bar in parts] == expected


def test_a_budget_has_a_bar_a_case_and_a_line():
    (axes,) = figures.memory_budget(CASES, 80).axes
    assert len(axes.patches) == 8 and axes.lines[0].get_xdata()[0] == 80
    ends = [axes.patches[i].get_x() + axes.patches[i].get_width() for i in (3, 7)]
    assert ends == [pytest.approx(sum(parts.values()) / GiB) for parts in CASES.values()]
    assert axes.get_xlim()[1] > max(ends)


def test_a_bar_that_is_drawn_again_grows_on_the_same_axis():
    ends, axes_limits = [], set()
    for batch in (1, 4, 24):
        parts = training_bytes(LLAMA, batch, 4096)
        (axes,) = figures.memory_budget({"one GPU": parts}, 80, 2**16).axes
        last = axes.patches[-1]
        ends.append(last.get_x() + last.get_width())
        axes_limits.add(axes.get_xlim())
        assert ends[-1] == pytest.approx(sum(parts.values()) / GiB)
        shares = np.diff([0, *(np.log(bar.get_x() + bar.get_width()) / np.log(ends[-1]) for bar in axes.patches)])
        assert shares == pytest.approx([size / sum(parts.values()) for size in parts.values()])
    assert ends == sorted(ends) and ends[2] > 4 * ends[0] and len(axes_limits) == 1


def test_shares_of_the_parameters_add_up():
    for name in ("llama3.2-1B", "llama3-405B"):
        assert sum(figures.parameter_shares(PRESETS[name]).values()) == pytest.approx(1)


def test_phases_have_their_colors_and_a_loss_its_levels():
    (axes,) = figures.step_phases().axes
    assert [to_hex(box.get_facecolor()) for box in axes.patches[::4] if hasattr(box, "get_x")][0] == PHASES[
        "forward"
    ].lower()
    (axes,) = figures.training_loss([5.0, 4.0, 3.0], [1, 1, 0, 2]).axes
    loss, uniform, by_frequency = axes.lines
    assert list(loss.get_ydata()) == [5, 4, 3] and uniform.get_ydata()[0] == np.log(256)
    assert by_frequency.get_ydata()[0] == pytest.approx(1.5 * np.log(2))


def test_a_device_and_moments_are_marked():
    profile = timeline()
    (axes,) = figures.memory_over_steps(profile, [(0.0, "forward")], limit_mib=0.5).axes
    texts = [text.get_text().strip() for text in axes.texts]
    assert "forward" in texts and "a device of 0 MiB" in texts and "step 1" in texts
