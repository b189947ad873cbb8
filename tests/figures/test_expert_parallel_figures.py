"""course_kit.figures.expert_parallel: what is drawn is what was given, and it can be read. CPU."""

import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex

from course_kit.figures import expert_parallel as figures
from course_kit.figures.expert_parallel.drawings import EXPERTS
from course_kit.figures.style import KINDS, PHASES
from course_kit.labs.expert_parallel import crossings
from course_lib.expert_parallel.model import dispatch_ratio
from figure_faults import faults

GATES = torch.tensor([[0.57, 0, 0.43, 0], [0, 0.5, 0.5, 0], [1.0, 0, 0, 0], [0, 0.25, 0, 0.75]] * 2)
COUNTS = np.tile(np.array([40.0, 10, 20, 30, 5, 60, 15, 20]), (40, 2, 1))
TRAINING = np.linspace(5, 4, 40), COUNTS, np.full((40, 2), 1e-3)
TRAININGS = {"nothing": TRAINING, "balance loss, 0.01": TRAINING, "bias, 0.01 per step": TRAINING}
WAYS = {n: {"loop": 3.0 * n, "batched": 2.0 * n, "grouped": 1.0 * n} for n in (4, 16, 64)}
SENT = {"a fresh router": torch.full((4, 4), 256), "even choices": torch.arange(16).view(4, 4) * 40}
ROUNDS = {"even choices": [(40.0, 15.0, [(3.0, 8.0), (20.0, 28.0)])] * 2}
ROUNDS["most choices want rank 0's experts"] = ROUNDS["even choices"]
CASES = {
    "Mixtral in a node\n(8 GPUs, NVLink)": (1.6, 2, 14336, 450e9, 2),
    "DeepSeek-V3,\n8 nodes": (6.0, 9, 2048, 50e9, 2),
}
DRAWN = {
    "dense_or_experts": lambda: figures.dense_or_experts([1, 2, 4], [5, 9, 18], [6, 7]),
    "layer": figures.layer,
    "sorted_rows": lambda: figures.sorted_rows(GATES),
    "ways_to_compute": lambda: figures.ways_to_compute(
        {"tokens spread evenly": WAYS, "first choice is expert 0": WAYS}
    ),
    "parameters": lambda: figures.parameters({"Llama-3 8B\n(dense)": (8e9, 8e9), "DeepSeek-V3": (671e9, 37e9)}),
    "collapse": lambda: figures.collapse(TRAINING),
    "lab_runs": lambda: figures.lab_runs(dict.fromkeys("ABCD", TRAINING)),
    "remedies": lambda: figures.remedies(TRAININGS),
    "dropped_choices": lambda: figures.dropped_choices(TRAININGS, (1.0, 1.5, 3.0)),
    "dispatch": figures.dispatch,
    "rows_sent": lambda: figures.rows_sent(SENT),
    "timeline": lambda: figures.timeline(ROUNDS),
    "bytes_by_node_limit": lambda: figures.bytes_by_node_limit([0.5, 0.9, 1.2, 1.3], np.arange(1, 9), [8.0] * 8),
    "gradient_groups": figures.gradient_groups,
    "mesh_layouts": figures.mesh_layouts,
    "dispatch_ratios": lambda: figures.dispatch_ratios(CASES),
    "dispatch_ratio_by_nodes": figures.dispatch_ratio_by_nodes,
}


@pytest.mark.parametrize("name", DRAWN)
def test_a_reader_can_read_it(name):
    assert not faults(DRAWN[name]())


def test_rows_are_sorted_by_expert_and_have_its_color():
    left, right = DRAWN["sorted_rows"]().axes
    rows = [text.get_text() for text in right.texts if not text.get_text().startswith("W")]
    assert rows == ["0", "2", "4", "6", "1", "3", "5", "7", "0", "1", "4", "5", "3", "7"]
    assert to_hex(right.patches[0].get_facecolor()) == EXPERTS[0].lower()
    assert [text.get_text() for text in left.texts][:2] == ["0.57", "1.00"] and left.yaxis_inverted()


def test_the_two_largest_probabilities_are_used():
    (axes,) = figures.layer((0.1, 0.2, 0.3, 0.4)).axes
    assert [text.get_text() for text in axes.texts if "×" in text.get_text()] == ["× 0.43", "× 0.57"]


def test_lines_and_bars_are_what_was_given():
    (axes,) = DRAWN["dense_or_experts"]().axes
    assert list(axes.lines[1].get_xdata()) == [2, 4] and list(axes.lines[1].get_ydata()) == [6, 7]
    assert list(DRAWN["ways_to_compute"]().axes[1].lines[0].get_ydata()) == [12.0, 48.0, 192.0]
    (axes,) = DRAWN["parameters"]().axes
    assert [bar.get_height() for bar in axes.patches] == [8, 8, 671, 37] and axes.get_ylim()[0] == 0
    left, right = DRAWN["bytes_by_node_limit"]().axes
    assert [bar.get_height() for bar in left.patches] == [0.5, 0.9, 1.2, 1.3]
    assert list(right.lines[1].get_ydata()) == list(range(1, 9))


def test_the_busiest_expert_is_the_one_in_color():
    first, _, shares = DRAWN["collapse"]().axes
    lowest = first.collections[0]
    assert to_hex(lowest.get_facecolor()[0]) == KINDS[0].lower()
    assert lowest.get_paths()[0].vertices[:, 1].max() == 60 and first.get_ylim()[1] == 200
    assert [round(bar.get_height(), 3) for bar in shares.patches][:2] == [0.3, 0.2]
    loads = DRAWN["lab_runs"]().axes[4]
    assert loads.get_ylim()[1] == 2048


def test_rows_and_exchanges_are_where_they_were_measured():
    fresh, even = DRAWN["rows_sent"]().axes
    assert [text.get_text() for text in even.texts][:4] == ["0", "40", "80", "120"]
    assert fresh.images[0].get_clim() == even.images[0].get_clim() == (0, 600)
    axes = DRAWN["timeline"]().axes[0]
    colors = [to_hex(bars.get_facecolor()[0]) for bars in axes.collections[:3]]
    assert colors == [PHASES[name].lower() for name in ("forward", "backward", "communication")]
    box = axes.collections[2].get_paths()[1].vertices
    assert (box[:, 0].min(), box[:, 0].max()) == (20, 28)


def test_ratios_are_the_formulas_on_a_fixed_axis():
    (axes,) = DRAWN["dispatch_ratios"]().axes
    wanted = [dispatch_ratio(copies, k, f, link, 989e12, size) for copies, k, f, link, size in CASES.values()]
    assert [bar.get_height() for bar in axes.patches] == pytest.approx(wanted)
    limits = set()
    for width, top_k, nodes, limit in ((2048, 8, 8, 4), (512, 2, 16, 16)):
        (axes,) = figures.dispatch_ratio_by_nodes(width, top_k, nodes, limit).axes
        copies = crossings(limit, nodes, 32 * nodes, top_k, 1000)[0]
        assert axes.lines[1].get_ydata()[0] == pytest.approx(dispatch_ratio(copies, top_k, width, 50e9, 989e12, 1, 2))
        limits.add((axes.get_xlim(), axes.get_ylim()))
    assert len(limits) == 1
    with pytest.raises(ValueError, match="M = 9: there are 8 nodes"):
        figures.dispatch_ratio_by_nodes(limit=9)
