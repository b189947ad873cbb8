"""The page of a run: what it shows, and logs of all kinds. CPU."""

import base64
import html
import itertools
import json
import math
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.image import imread

from calls import said
from course_lib.train.log_curves import layout_changes, read_log, results, smoothed
from course_lib.train.summary import draw, main, write_summary
from test_run_log import record


def written(file: Path, records: list[dict]) -> Path:
    file.write_text("".join(json.dumps(each) + "\n" for each in records))
    return file


def run_of(steps: int, **changed) -> list[dict]:
    """A run whose loss is 5 - step / 100, evaluated every tenth step; it has a new layout from step 26."""
    records = [record(n, 5 - n / 100, "dp2" if n < 26 else "tp2,sp") | changed for n in range(1, steps + 1)]
    for each in records[9::10]:
        each["eval_loss"] = 5.5 - each["step"] / 100
    return records


def titles(figure) -> list[str]:
    return [axes.get_title("left") for axes in figure.axes]


def drawn(records: list[dict]):
    with rc_context({"font.size": 30}):  # draw has a style of its own
        figure = draw(records, "a run")
        FigureCanvasAgg(figure).draw()
    return figure


def test_the_page_has_the_picture_the_results_and_the_settings(tmp_path):
    log = written(tmp_path / "log.jsonl", run_of(50, mfu=0.41))
    files = write_summary(log, tmp_path / "new" / "folder", "debug <b>", '[model]\npreset = "debug"\n')
    assert files == [tmp_path / "new" / "folder" / name for name in ("summary.html", "summary.png")]
    page = files[0].read_text(encoding="utf-8")
    (picture,) = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    assert base64.b64decode(picture) == files[1].read_bytes() and imread(files[1]).shape[1] == 1800
    assert "<h1>debug &lt;b&gt;</h1>" in page and "http" not in page and "<script" not in page
    assert html.escape('preset = "debug"') in page.split("<details>")[1]
    (alt,) = re.findall(r'alt="([^"]+)"', page)
    assert "loss" in alt and "MFU" in alt
    table = dict(re.findall(r"<tr><th>(.*?)</th><td>(.*?)</td></tr>", page))
    assert table == {
        "steps": "1 to 50",
        "tokens": "3,200",
        "last loss, mean of 10 steps": "4.5450",
        "best loss on held-out text": "5.0000, after step 50",
        "tokens/s per device, median": "320",
        "MFU, median": "41.0%",
        "peak memory": "1.00 GiB, on rank 1",
        "layout": "dp2; from step 26 tp2,sp",
    }


def test_panels_without_data_are_left_out_and_layouts_are_marked():
    records = run_of(50)
    figure = drawn(records)
    expected = ["loss, nats per token", "gradient norm, before clipping", "learning rate", "tokens/s per device"]
    expected += ["peak memory of the fullest rank, GiB"]
    assert titles(figure) == expected
    assert all(any(list(line.get_xdata()) == [26, 26] for line in axes.lines) for axes in figure.axes)
    assert [text.get_text() for text in figure.axes[0].texts] == ["dp2", "tp2,sp"]
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == ["training", "held-out text"]
    assert figure.axes[1].get_yscale() == "log"
    for each in records:
        each |= {"mfu": 0.4, "batch": 4 + each["step"] // 10}
    assert titles(drawn(records)) == [*expected[:4], "MFU, %", expected[4], "sequences per step"]


def test_no_two_texts_overlap():
    """Labels of ticks, titles, legend and layouts, in a long run that changes its layout often."""
    records = run_of(400, mfu=0.4)
    for each in records:
        each |= {"layout": f"dp2,pp2,tp2,zero1,mb{each['step'] // 30}", "norm": 10 ** (each["step"] / 80)}
    figure = drawn(records)
    boxes = []
    for axes in figure.axes:
        texts = [axes._left_title, axes.xaxis.label, *axes.texts]
        texts += axes.get_legend().get_texts() if axes.get_legend() else []
        for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
            ticks = zip(axis.get_majorticklocs(), axis.get_majorticklabels(), strict=True)
            texts += [label for place, label in ticks if low <= place <= high]
        boxes += [(text.get_text(), text.get_window_extent()) for text in texts if text.get_text()]
    pairs = itertools.combinations(boxes, 2)
    assert len(boxes) > 60 and not [(one, two) for (one, box), (two, other) in pairs if box.overlaps(other)]
    assert len(figure.axes[0].texts) == 14


@pytest.mark.parametrize("values", [[0.6, 0.7], [0.99], [1e-4, 3e5], [1.0, 1.0], [math.nan, 0.0, 2.0]])
def test_a_range_of_norms_always_has_two_labels(values):
    records = [record(n + 1) | {"norm": value} for n, value in enumerate(values)]
    axes = drawn(records).axes[1]
    low, high = axes.get_ylim()
    labels = [tick for tick in axes.get_yticks() if low <= tick * 1.001 and tick <= high * 1.001]
    positive = [value for value in values if value > 0]
    assert len(labels) >= 2 and low <= min(positive) and max(positive) <= high


@pytest.mark.parametrize(
    "records",
    [[record(1)], [record(1, math.nan)], [record(n, math.nan if n % 3 else 2.0) for n in range(1, 300)], run_of(15)],
    ids=["one step", "one skipped step", "skipped steps", "few steps"],
)
def test_runs_of_any_length_are_drawn(records, tmp_path):
    log = written(tmp_path / "log", records)
    with open(log, "a") as opened:
        opened.write('{"step": 999, "lo')  # of a killed job
    write_summary(log, tmp_path / "page", "")
    skipped = sum(math.isnan(each["loss"]) for each in records)
    assert results(read_log(log)).get("skipped steps") == (f"{skipped}" if skipped else None)


def test_smoothing_is_the_mean_of_the_finite_neighbors():
    values = np.array([1.0, 5.0, math.nan, 3.0, 4.0])
    np.testing.assert_allclose(smoothed(values, 1), [1, 3, 4, 3.5, 4])
    np.testing.assert_allclose(smoothed(values, 0), values)
    np.testing.assert_allclose(smoothed(np.arange(100.0), 30), np.arange(100.0))
    assert np.isnan(smoothed(np.array([math.nan]), 5)).all()


def test_a_layout_that_comes_back_is_a_change():
    layouts = ["dp2", "dp2", "tp2", "dp2"]
    records = [record(n, layout=layout) for n, layout in enumerate(layouts, 1)]
    assert layout_changes(records) == [(1, "dp2"), (3, "tp2"), (4, "dp2")]


def test_what_is_no_log_gets_one_line(tmp_path, monkeypatch):
    good = written(tmp_path / "good", [record(1)])
    (tmp_path / "empty").touch()
    (tmp_path / "half").write_text('{"step": 1')
    (tmp_path / "foreign").write_text('{"epoch": 1}\n[1]\nhello\n')
    (tmp_path / "binary").write_bytes(bytes(range(256)))
    expected = {"no": "No such file or directory", "empty": "is empty: no step is in it yet"}
    expected |= dict.fromkeys(["half", "foreign", "binary"], "is not a log of a training run")
    for name, message in expected.items():
        found = said(lambda: write_summary(tmp_path / name, tmp_path / "page", ""))
        assert found.startswith(f"ValueError: {tmp_path / name}") and found.endswith(message), found
    assert said(lambda: write_summary(good, good / "page", "")) == f"ValueError: {good / 'page'}: Not a directory"
    assert not (tmp_path / "page").exists()
    with pytest.raises(SystemExit, match=r"^summary: .*empty is empty"):
        main([str(tmp_path / "empty")])
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    found = said(lambda: write_summary(good, tmp_path / "page", ""))
    assert found == "ValueError: the page is drawn by matplotlib: pip install matplotlib"


def test_the_command_writes_beside_the_log(tmp_path, capsys):
    main([str(written(tmp_path / "log.jsonl", run_of(3)))])
    folder = tmp_path / "log-summary"
    assert capsys.readouterr().out == f"wrote {folder / 'summary.html'}\nwrote {folder / 'summary.png'}\n"
