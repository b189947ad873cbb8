"""The figures of notebook 10 can be read, and show the numbers that they are given."""

import itertools

import pytest
from matplotlib.colors import to_hex

from course_kit.figures import five_d as figures
from course_kit.figures.five_d.axes import AXES
from course_kit.figures.style import KINDS, LIGHT, MEMORY
from course_kit.labs.five_d.memory import bytes_by_sequence, bytes_of_each_alone, published_activations
from course_kit.widgets.five_d import map_of_layout
from course_lib.five_d import layouts
from course_lib.five_d.layouts import Layout
from figure_faults import faults

PARTS = ("parameters", "gradients", "optimizer states", "activations")
NAMES = ["none", "DP 4, ZeRO-3", "TP 4 with SP", "PP 4", "CP 4", "EP 4"]
SPECS = ["dp8", "dp4,tp2,sp", "dp4,cp2", "dp4,pp2", "dp4,ep2,tp2,sp", "dp2,cp2,tp2,sp", "dp2,pp2,tp2,sp"]
FEATURES = ["tp2", "sp", "cp2", "pp2", "ep2", "zero1", "zero2", "zero3"]
MEASURED = {name: {part: (1 + x + y) * 2**18 for y, part in enumerate(PARTS)} for x, name in enumerate(NAMES)}
FORMULAS = {name: MEASURED[name] for name in NAMES[:-1]}
SENT = {
    spec: {"tp": 48_512 * (x > 0), "cp": 0, "ep": 9000, "pp": 20_000, "replicas": 190_000 - 9000 * x, "other": 3080}
    for x, spec in enumerate(SPECS)
}
PER_TOKEN = {
    name: {m: height / m for m in (1, 2, 4)}
    for name, height in (
        ("ZeRO-3 (dp4)", 2e4),
        ("pipeline (pp4)", 1e3),
        ("pipeline, each stage ZeRO-3, gathered once (dp2,pp2)", 9e3),
        ("pipeline, ZeRO-1 (dp2,pp2)", 4e3),
    )
}
DIFFERENCES = {pair: 1e-7 * (i + 1) for i, pair in enumerate(itertools.combinations(FEATURES, 2))}
DIFFERENCES |= {("zero1", "zero2"): "no", ("zero1", "zero3"): "no", ("zero2", "zero3"): "no", ("tp2", "sp"): 1e-2}
LOG = [{"step": n, "loss": 5.3 - n / 10, "lr": 0.002 * n, "batch": 4 + 2 * n} for n in range(1, 7)]
LOGS = {"dp4": LOG, "dp2,pp2,mb2": LOG, "cp2,tp2,sp,zero3,mb4": LOG}
SLOW = {"no slow rank": ([0.11] * 8, [0.004] * 8), "a slow rank": ([0.29] * 8, [0.1, 0.17, *[0.002] * 6])}
CROSSING = {order: [200_000 - 9000 * i, 300_000 - 1000 * i] for i, order in enumerate(itertools.permutations("dpt"))}
CROSSING = {tuple(f"{axis}p" for axis in order): sizes for order, sizes in CROSSING.items()}
SHAPES = {
    "attention_norm": [2, 8, 32], "q": [2, 16, 2, 8], "k": [2, 16, 1, 8], "core": [2, 16, 2, 8], "o_proj": [2, 8, 32],
    "mlp_norm": [2, 8, 32], "router": [2, 8, 4], "experts": [52, 32], "mlp": [2, 8, 32],
}  # fmt: skip
WEIGHTS = {
    "attention_norm.weight": [32], "attention.q_proj.weight": [16, 32], "attention.o_proj.weight": [32, 16],
    "mlp_norm.weight": [32], "mlp.router.weight": [4, 32], "mlp.experts.up_proj.weight": [2, 24, 32],
}  # fmt: skip


def coordinates(spec: str) -> list[dict[str, int]]:
    layout = Layout.parse(spec)
    return [layouts.coordinates(rank, layout) for rank in range(layout.ranks)]


ALL = {
    "alone": lambda: figures.memory_of_each_alone(bytes_of_each_alone()),
    "map": lambda: figures.rank_map(coordinates("dp2,pp2,cp2,tp2"), 5),
    "map, large indices": lambda: figures.rank_map(coordinates("dp16"), 15),
    "pairs": lambda: figures.pairs_of_techniques(DIFFERENCES),
    "layer": lambda: figures.layer_under_all(SHAPES, WEIGHTS, 512),
    "axes": lambda: figures.bytes_by_axis(SENT),
    "by sequence": lambda: figures.memory_by_sequence(bytes_by_sequence(), published_activations()),
    "measured": lambda: figures.measured_memory(FORMULAS, MEASURED),
    "per token": lambda: figures.bytes_per_token(PER_TOKEN),
    "run": lambda: figures.training_run(LOGS),
    "slow": lambda: figures.straggler_delays(SLOW),
    "orders": lambda: figures.inter_node_traffic(CROSSING, 400_000, (4, 2)),
}


@pytest.mark.parametrize("name", ALL)
def test_it_can_be_read(name):
    assert not faults(ALL[name]())


def texts(axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def color(patch) -> str:
    return to_hex(patch.get_facecolor()).upper()


def test_a_technique_that_does_not_fit_has_another_color():
    needs = {"a": dict.fromkeys(PARTS, 15e9), "b": dict.fromkeys(PARTS, 25e9)}
    (axes,) = figures.memory_of_each_alone(needs).axes
    assert [bar.get_width() for bar in axes.patches] == [60, 100]
    assert [color(bar) for bar in axes.patches] == [KINDS[0], LIGHT]
    assert {"60", "15.0", "100", "25.0"} <= set(texts(axes))


def test_the_map_colors_the_groups_of_the_chosen_gpu():
    (axes,) = figures.rank_map(coordinates("dp2,pp2,cp2,tp2"), 5).axes
    colors = [color(box) for box in axes.patches]
    found = {axis: [rank for rank in range(16) if colors[rank] == AXES[axis].upper()] for axis in ("tp", "cp", "pp")}
    assert found == {"tp": [4], "cp": [7], "pp": [1]}
    assert [rank for rank in range(16) if colors[rank] == AXES["dp"].upper()] == [13] and colors.count(LIGHT) == 11
    assert texts(axes)[10:12] == ["5", "d0 p1\nc0 t1"]
    assert [(box.get_x() // 1, box.get_y() // 1) for box in axes.patches] == [(n % 8, n // 8) for n in range(16)]


def test_pairs_fill_one_triangle_whatever_the_order_of_their_names():
    mixed = {pair if pair[0] == FEATURES[0] else pair[::-1]: off for pair, off in DIFFERENCES.items()}
    for given in (DIFFERENCES, mixed):
        (axes,) = figures.pairs_of_techniques(given).axes
        assert {text.get_position() for text in axes.texts} == set(itertools.combinations(range(len(FEATURES)), 2))


def test_a_pair_is_at_its_place_and_a_large_difference_is_seen():
    (axes,) = figures.pairs_of_techniques(DIFFERENCES).axes
    shown = {
        text.get_position(): (text.get_text(), color(box)) for text, box in zip(axes.texts, axes.patches, strict=True)
    }
    assert len(shown) == 28 and shown[5, 6] == ("none", LIGHT)
    assert shown[0, 2] == ("2e-07", KINDS[0]) and shown[0, 1] == ("1e-02", "#C00000")
    assert [label.get_text() for label in axes.get_yticklabels()] == FEATURES[1:]


def test_the_layer_shows_the_given_shapes_in_order():
    (axes,) = figures.layer_under_all(SHAPES, WEIGHTS, 512).axes
    shown = texts(axes)
    order = ["attention_norm", "q, k, v", "attention", "o_proj", "mlp_norm", "router", "experts", "mlp"]
    assert [text for text in shown if text in order] == order
    assert "q [2, 16, 2, 8], k [2, 16, 1, 8]" in shown and "experts [2, 24, 32]" not in shown[:5]
    assert {"q_proj [16, 32]", "up_proj [2, 24, 32]"} <= set(shown) and any("512 elements" in text for text in shown)


def test_bars_by_axis_end_at_the_sum():
    (axes,) = figures.bytes_by_axis(SENT).axes
    for number, sizes in enumerate(SENT.values()):
        bars = axes.patches[6 * number : 6 * number + 6]
        assert [bar.get_width() for bar in bars] == pytest.approx([size / 1e3 for size in sizes.values()])
        assert bars[-1].get_x() + bars[-1].get_width() == pytest.approx(sum(sizes.values()) / 1e3)
        assert [color(bar) for bar in bars] == [AXES[axis].upper() for axis in sizes]


def test_memory_by_sequence_has_a_panel_for_each_technique_and_dots_what_is_published():
    memory, published = bytes_by_sequence(), published_activations()
    panels = figures.memory_by_sequence(memory, published).axes
    assert len(panels) == 12 and [axes.get_title() for axes in panels[:6]] == list(memory["selective"])
    for axes, (recompute, name) in zip(panels, itertools.product(memory, memory["full"]), strict=True):
        filled = [bar for bar in axes.patches if bar.get_fill()]
        dotted = [bar.get_height() * 2**30 for bar in axes.patches if not bar.get_fill()]
        drawn = [bar.get_height() * 2**30 for bar in filled]
        assert drawn == pytest.approx([size for parts in memory[recompute][name].values() for size in parts.values()])
        wanted = list(published[name].values()) if recompute == "selective" and name in published else []
        assert dotted == pytest.approx(wanted)
        assert axes.get_ylim() == (0, 160) and axes.lines[0].get_ydata()[0] == 80


def test_measured_memory_is_beside_its_formula():
    (axes,) = figures.measured_memory(FORMULAS, MEASURED).axes
    pale = [bar for bar in axes.patches if bar.get_alpha() < 1]
    assert len(pale) == 20 and len(axes.patches) == 44
    bars = [bar for bar in axes.patches if bar.get_alpha() == 1]
    sizes = [size / 2**20 for parts in MEASURED.values() for size in parts.values()]
    assert [bar.get_height() for bar in bars] == pytest.approx(sizes)
    assert [to_hex(bar.get_facecolor()).upper() for bar in bars[:4]] == [MEMORY[part] for part in PARTS]


def test_lines_are_the_given_numbers():
    (axes,) = figures.bytes_per_token(PER_TOKEN).axes
    assert {line.get_label(): dict(zip(*line.get_data(), strict=True)) for line in axes.lines} == PER_TOKEN
    loss, rate, batch = figures.training_run(LOGS).axes
    assert [line.get_label() for line in loss.lines] == list(LOGS)
    assert list(rate.lines[0].get_ydata()) == [r["lr"] for r in LOG]
    assert list(batch.lines[0].get_ydata()) == [r["batch"] for r in LOG]
    assert all(float(tick).is_integer() for tick in loss.get_xticks())


def test_delays_are_in_milliseconds():
    left, right = figures.straggler_delays(SLOW).axes
    assert [bar.get_height() for bar in right.patches][8:10] == pytest.approx([100, 170])
    assert [bar.get_height() for bar in left.patches] == pytest.approx([110] * 8 + [290] * 8)


def test_orders_are_sorted_by_what_leaves_the_node():
    (axes,) = figures.inter_node_traffic(CROSSING, 400_000, (4, 2)).axes
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == [" > ".join(order) for order in sorted(CROSSING, key=CROSSING.get)]
    assert [bar.get_width() for bar in axes.patches][:6] == sorted(sizes[0] / 1e3 for sizes in CROSSING.values())
    assert texts(axes)[5] == " 50%"


def test_the_widget_draws_the_map_of_its_choice():
    controls, _, image = map_of_layout().children
    layout, gpu = controls.children
    before = bytes(image.value)
    gpu.value = 12
    later = bytes(image.value)
    layout.value = "dp16"
    assert before.startswith(b"\x89PNG") and len({before, later, bytes(image.value)}) == 3
