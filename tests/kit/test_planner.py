"""The planner's figures show what the search found: every bar is as long as its part, and no text lies on another.

CPU, no processes. The oracles are `estimate` and `search` themselves, a slow `distinct`, and matplotlib's own layout.
"""

import html
import itertools

import numpy as np
import pytest

from course_kit.figures.best_config import heatmap, rejections
from course_kit.figures.best_config import ranking as ranking_figure
from course_kit.figures.best_config.parts import memory_groups, time_groups
from course_kit.figures.best_config.rankings import distinct, two_lines
from course_kit.planning.best_layouts import best_layouts, best_row
from course_kit.widgets import best_config as planner_module
from course_kit.widgets.best_config import HEATMAP_NODES, HEATMAP_SETTINGS, family, planner
from course_lib.best_config.answer import answer
from course_lib.best_config.clusters import CLUSTERS
from course_lib.best_config.planner import Ranking, search
from course_lib.best_config.program import as_text
from course_lib.best_config.question import Question
from course_lib.five_d.layouts import Layout
from course_lib.single_gpu.model import PRESETS
from figure_faults import faults, visible_texts

GIB = 2**30
H100 = CLUSTERS["H100"]
CASES = {  # model, GPUs, batch, tokens of a sequence
    "8B": ("llama3-8B", 8, 256, 4096),
    "70B": ("llama3-70B", 128, 1024, 4096),
    "small": ("small", 4, 12, 512),
    "one GPU": ("debug", 1, 8, 512),
}


@pytest.fixture(scope="module")
def rankings() -> dict[str, Ranking]:
    """The search of each case."""
    return {name: search(PRESETS[model], H100, *sizes) for name, (model, *sizes) in CASES.items()}


def bars(ax) -> dict[int, float]:
    """Return the length of each row's bar: the sum of its parts, which must lie end to end."""
    ends = {}
    for patch in ax.patches:
        y = round(patch.get_y() + patch.get_height() / 2)
        assert patch.get_x() == pytest.approx(ends.get(y, 0.0))
        ends[y] = patch.get_x() + patch.get_width()
    return ends


def check_readable(figure) -> None:
    """All texts can be read, and none is cut."""
    assert not faults(figure)
    for text in visible_texts(figure):
        box = text.get_window_extent()
        assert box.x0 >= -1 and box.x1 <= figure.bbox.x1 + 1 and box.y0 >= -1 and box.y1 <= figure.bbox.y1 + 1, text


# What is shown.


def slow_distinct(ranking: Ranking, n: int) -> list[int]:
    """Row by row against all that were chosen, as the docstring says it."""
    chosen, step_s = [], ranking.estimate.step_s
    for row in ranking.order[:3000]:
        layout = ranking.table[row]
        degrees = (layout.dp * layout.cp, layout.pp, layout.tp)
        if not any(degrees == others and step_s[row] / step_s[other] - 1 <= 1e-3 for other, others in chosen):
            chosen.append((row, degrees))
    return [row for row, _ in chosen[:n]]


@pytest.mark.parametrize("case", CASES)
def test_layouts_of_the_same_degrees_and_time_are_shown_once(rankings, case):
    ranking = rankings[case]
    rows = distinct(ranking, 8)
    assert rows == slow_distinct(ranking, 8)
    assert rows[0] == ranking.order[0] and (len(rows) == 8 or case == "one GPU")


def test_there_are_layouts_to_leave_out(rankings):
    assert sum(distinct(ranking, 8) != list(ranking.order[:8]) for ranking in rankings.values()) >= 3


def test_fewer_layouts_than_asked_for_are_all_shown(rankings):
    rows = distinct(rankings["one GPU"], 10_000)
    assert 1 < len(rows) < len(rankings["one GPU"].order)
    assert len(ranking_figure(rankings["one GPU"], n=3).axes[0].texts) == 3
    labels = ranking_figure(rankings["8B"], rows=[4, 2]).axes[0].get_yticklabels()
    assert [str(Layout.parse(label.get_text().replace("\n", ","))) for label in labels] == [
        str(rankings["8B"].table[row]) for row in (4, 2)
    ]


def test_a_layouts_words_stand_in_two_lines():
    assert two_lines(Layout.parse("dp2,pp4,tp8,zero1,sp,mb2,zb-v")) == "dp2,pp4,tp8\nzero1,sp,mb2,zb-v"
    assert two_lines(Layout.parse("dp8")) == "dp8" and two_lines(Layout()) == "dp1"
    assert two_lines(Layout.parse("zero0,mb4,full")) == "dp1\nmb4,full"
    assert two_lines(Layout.parse("pp4,ep1,dualpipe")) == "pp4\ndualpipe"


@pytest.mark.parametrize("case", CASES)
def test_each_bar_is_as_long_as_the_step_and_the_memory(rankings, case):
    ranking = rankings[case]
    figure, rows, e = ranking_figure(ranking, title="a title"), distinct(ranking, 8), ranking.estimate
    time_ax, memory_ax = figure.axes
    for y, row in enumerate(rows):
        assert bars(time_ax)[y] == pytest.approx(e.step_s[row])
        assert bars(memory_ax)[y] == pytest.approx(e.needed_bytes[row] / GIB)
        assert f"{e.tokens_per_s[row]:,.0f} tokens/s" in time_ax.texts[y].get_text()
        assert f"MFU {e.mfu[row]:.1%}" in time_ax.texts[y].get_text()
        assert f"{e.needed_bytes[row] / GIB:.1f}" in memory_ax.texts[y].get_text()
    labels = [label.get_text().replace("\n", ",") for label in time_ax.get_yticklabels()]
    assert [str(Layout.parse(label)) for label in labels] == [str(ranking.table[row]) for row in rows]
    (line,) = memory_ax.lines
    assert list(line.get_xdata()) == [e.usable_bytes / GIB] * 2
    assert time_ax.yaxis_inverted()  # the best on top


def test_a_part_has_its_length(rankings):
    ranking = rankings["8B"]
    rows, e = distinct(ranking, 8), ranking.estimate
    for ax, parts, groups, unit in zip(
        ranking_figure(ranking).axes,
        (e.time, e.memory),
        (time_groups(e.time), memory_groups(e.memory)),
        (1, GIB),
        strict=True,
    ):
        drawn = {bar.get_label(): [patch.get_width() for patch in bar] for bar in ax.containers}
        assert len(drawn) > 3 and set(drawn) <= set(groups)
        for group, lengths in drawn.items():
            assert lengths == pytest.approx(sum(np.asarray(parts[name])[rows] for name in groups[group]) / unit), group


@pytest.mark.parametrize("case", CASES)
def test_no_text_lies_on_another(rankings, case):
    check_readable(ranking_figure(rankings[case], title=f"{case}: a title"))
    check_readable(rejections(rankings[case]))


def test_where_no_layout_fits_one_line_says_why():
    ranking = search(PRESETS["llama3-405B"], H100, 8, 8)
    assert not len(ranking.order) and distinct(ranking, 8) == []
    with pytest.raises(ValueError, match=r"^no layout fits: [\d,]+ out of memory[^\n]*$"):
        ranking_figure(ranking)
    check_readable(rejections(ranking))  # which is of use then
    with pytest.raises(ValueError, match="n=0: expected 1 or more"):
        ranking_figure(ranking, n=0)


@pytest.mark.parametrize("case", CASES)
def test_the_rejections_are_those_of_the_search(rankings, case):
    ranking = rankings[case]
    (ax,) = rejections(ranking).axes
    names = [label.get_text().replace("\n", " ") for label in ax.get_yticklabels()]
    shown = dict(zip(names, (patch.get_width() for patch in ax.patches), strict=True))
    assert shown == {"fits": len(ranking.order), **ranking.rejected}
    assert [text.get_text().strip() for text in ax.texts] == [f"{count:,.0f}" for count in shown.values()]
    assert ax.get_xscale() == "log"


# The heatmap.


def test_a_cell_of_the_heatmap_is_the_best_of_its_search():
    models = {name: PRESETS[name] for name in ("llama3-8B", "llama3-70B")}
    rows = best_layouts(models, (1, 4), H100, 64, 2048, HEATMAP_SETTINGS)
    ax = heatmap(rows, "64 sequences of 2,048 tokens", predicted=True).axes[0]
    cells = {tuple(round(at) for at in text.get_position()): text.get_text() for text in ax.texts}
    assert [label.get_text() for label in ax.get_yticklabels()] == list(models)
    for (x, nodes), (y, config) in itertools.product(enumerate((1, 4)), enumerate(models.values())):
        best = search(config, H100, 8 * nodes, 64, 2048, settings=HEATMAP_SETTINGS).best(1)
        if not best:
            assert cells[x, y] == "none\nfits"
            continue
        layout, _, mfu, _ = best[0]
        value, *degrees, settings = cells[x, y].split("\n")
        assert value == f"{100 * mfu:.1f}%" and f"mb{layout.micro_batch}" in settings
        assert two_lines(layout).split("\n")[0] == " ".join(degrees).replace(" ", ",")
    assert cells[0, 1] == "none\nfits" and list(cells.values()).count("none\nfits") == 1
    assert [patch.get_hatch() for patch in ax.patches] == ["//"]
    assert "64 sequences of 2,048 tokens" in ax.get_title() and "runs" not in ax.get_title()


def test_a_heatmap_has_the_degrees_that_are_asked_for():
    models = {"bench-8B": PRESETS["bench-8B"]}
    texts = {}
    for degrees in (None, {"cp": (1,)}):
        rows = best_layouts(models, (1, 4), H100, 16, 65536, HEATMAP_SETTINGS, degrees)
        texts[bool(degrees)] = [text.get_text() for text in heatmap(rows, "H100").axes[0].texts]
    assert any("cp" in text for text in texts[False]) and not any("cp" in text for text in texts[True])


def test_long_words_stay_in_their_cell():
    layout = Layout.parse("dp128,pp32,cp16,tp16,zero3,mb16,keep")
    names = ("llama3-8B", "llama3-405B")

    class Found:
        def best(self, n):
            return [(layout, 1.0, 0.4, 1.0)]

    rows = [best_row(name, Found(), nodes, 8, 64) for name in names for nodes in HEATMAP_NODES]
    figure = heatmap(rows, "H100; 8 sequences of 64 tokens", predicted=True)
    check_readable(figure)
    ax = figure.axes[0]
    cell = ax.transData.transform((1, 0))[0] - ax.transData.transform((0, 0))[0]
    assert max(text.get_window_extent().width for text in ax.texts) <= cell


def test_a_heatmap_without_a_layout_says_so():
    with pytest.raises(ValueError, match="no layout of llama3-405B fits on H100"):
        best_layouts({"llama3-405B": PRESETS["llama3-405B"]}, (1, 2), H100, 8)
    with pytest.raises(ValueError, match="batch 0"):
        best_layouts({"debug": PRESETS["debug"]}, (1,), H100, 0)


def test_the_widgets_heatmap_comes_near_the_whole_search():
    for name, nodes in (("llama3-8B", 1), ("llama3-70B", 8), ("bench-3B", 8)):
        fast, whole = (
            search(PRESETS[name], H100, 8 * nodes, 256, settings=settings).best(1)[0][2]
            for settings in (HEATMAP_SETTINGS, None)
        )
        assert 0.95 * whole <= fast <= whole


# The widget.


@pytest.fixture(scope="module")
def opened():
    """The planner, its heatmap with two columns, to be quicker."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner_module, "HEATMAP_NODES", (1, 8))
        yield planner()


@pytest.fixture
def parts(opened):
    """Controls by description, and what it shows, at an 8B model on one node."""
    row, words, best, said, across, below = opened.children
    controls = {control.description: control for column in row.children for control in column.children}
    start = {"batch, sequences": 64, "nodes": 1, "cluster": "H100", "sequence, tokens": 4096, "model": "bench-8B"}
    for name, value in start.items():
        controls[name].value = value
    return controls, words, best, said, across, below


def test_the_planner_opens_with_both_pictures(parts):
    controls, words, best, said, across, below = parts
    assert set(controls) == {"model", "cluster", "nodes", "batch, sequences", "sequence, tokens"}
    for picture in (best, across):
        assert bytes(picture.value).startswith(b"\x89PNG") and len(picture.value) > 5000
        assert picture.layout.display is None
    answered = html.escape(as_text(answer(Question("bench-8B", PRESETS["bench-8B"], H100, 8, 64))))
    assert said.value == f"<pre style='line-height:1.3'>{answered}</pre>" and "risk" in answered
    assert "zb-v" in below.value and "<b></b>" == words.value


@pytest.mark.parametrize(
    "control, value, both",
    [
        ("model", "bench-3B", False),
        ("nodes", 2, False),
        ("batch, sequences", 128, True),
        ("cluster", "H200", True),
        ("sequence, tokens", 8192, True),
    ],
)
def test_a_control_changes_what_it_should(parts, control, value, both):
    controls, _, best, _, across, _ = parts
    before = bytes(best.value), bytes(across.value)
    controls[control].value = value
    assert bytes(best.value) != before[0] and (bytes(across.value) != before[1]) == both


def test_the_heatmap_is_drawn_anew_only_where_it_changes(parts, monkeypatch):
    controls, *_ = parts
    drawn = []

    def counted(models, *others):
        drawn.append(models)
        raise ValueError("not now")

    monkeypatch.setattr(planner_module, "best_layouts", counted)
    controls["nodes"].value = 4
    controls["model"].value = "bench-3B"
    assert drawn == []
    controls["batch, sequences"].value = 96
    assert [list(models) for models in drawn] == [["bench-1B", "bench-3B", "bench-8B", "bench-80B"]]


@pytest.mark.parametrize(
    "control, value, line, all_bad",
    [("batch, sequences", 0, "batch 0", True), ("model", "bench-80B", "no layout fits: ", False)],
)
def test_bad_input_gets_one_line_in_place_of_the_figure(parts, control, value, line, all_bad):
    controls, words, best, said, across, below = parts
    before = controls[control].value
    controls[control].value = value
    assert line in words.value and "\n" not in words.value and "<br" not in words.value
    assert best.layout.display == "none" and ("no layout fits: the leanest, " in said.value) != all_bad
    assert (across.layout.display == "none") == all_bad and (below.value == "") == all_bad
    controls[control].value = before
    assert best.layout.display is None and across.layout.display is None and words.value == "<b></b>"


def test_a_family_has_the_same_letters():
    assert family("llama3-8B") == ("llama3.2-1B", "llama3-8B", "llama3-70B", "llama3-405B")
    assert {name for name in PRESETS if name in family(name)} == set(PRESETS)
    assert family("SmolLM-135M") == ("SmolLM-135M",)


def test_it_says_that_it_computes_while_what_it_shows_is_old(parts, monkeypatch):
    controls, words, best, said, across, below = parts
    seen = []

    def watched(*args):
        seen.append((words.value, [part.layout.opacity for part in (best, said, across, below)]))
        return answer(*args)

    monkeypatch.setattr(planner_module, "answer", watched)
    controls["nodes"].value = 4
    assert seen[0][0] == "<i>computing… bench-8B on 32 GPUs: 64 sequences of 4,096 tokens</i>"
    assert seen[0][1] == ["0.3"] * 4
    assert words.value == "<b></b>" and [part.layout.opacity for part in (best, said, across, below)] == [None] * 4
