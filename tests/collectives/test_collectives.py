"""course_lib.collectives.rings and bandwidth without other ranks: options, bandwidths, the fit, the table. Needs no
GPU.
"""

import json
import math
import random

import numpy as np
import pytest
import torch
import torch.distributed as dist

from course_lib.collectives.bandwidth import bandwidths, fit_alpha_beta, run_collective, sweep
from course_lib.collectives.rings import (
    describe,
    main,
    options,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
    tree_broadcast,
)
from course_lib.collectives.traffic import count_traffic

SIZES = [4096 * 4**power for power in range(8)]


@pytest.fixture
def alone():
    """A default group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# Options.


def test_options_of_the_launch_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    chosen = options(["--collectives", "all_gather", "all_reduce", "--max-kib", "16", "--out", "sweep.json"])
    assert (chosen.collectives, chosen.min_kib, chosen.max_kib) == (["all_gather", "all_reduce"], 4, 16)
    assert options([]).collectives == ["all_reduce", "all_gather", "reduce_scatter"] and options([]).out is None
    assert options(["--min-kib", "8", "--max-kib", "8"]).min_kib == 8, "one size is a sweep too"
    assert list(tmp_path.iterdir()) == [], "options touch nothing"


@pytest.mark.parametrize(
    "line, words",
    [
        ("--no-such-option", "--no-such-option"),
        ("extra", "extra"),
        ("--collectives", "expected at least one argument"),
        ("--collectives gossip", "invalid choice: 'gossip'"),
        ("--collectives all_reduce broadcast", "invalid choice: 'broadcast'"),
        ("--min-kib 0", "--min-kib must be 1 or more"),
        ("--min-kib -4", "--min-kib must be 1 or more"),
        ("--min-kib 8 --max-kib 4", "--max-kib no less than --min-kib"),
        ("--max-kib 1.5", "invalid int value: '1.5'"),
        ("--factor 1", "--factor must be 2 or more"),
        ("--factor 0", "--factor must be 2 or more"),
        ("--out nowhere/sweep.json", "there is no folder nowhere"),
        ("--out folder", "folder is a folder; name a file in it"),
    ],
)
def test_a_bad_option_ends_with_status_2_a_line_and_nothing_touched(line, words, tmp_path, monkeypatch, capsys):
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        options(line.split())
    assert end.value.code == 2
    out, err = capsys.readouterr()
    last = err.splitlines()[-1]
    assert out == "" and last.startswith("collectives: error: ") and words in last
    assert [path.name for path in tmp_path.rglob("*")] == ["folder"]


# Bandwidths and the fit.


@pytest.mark.parametrize(
    "collective, factor",
    [
        ("all_reduce", lambda n: 2 * (n - 1) / n),
        ("reduce_scatter", lambda n: (n - 1) / n),
        ("all_gather", lambda n: (n - 1) / n),
        ("all_to_all", lambda n: (n - 1) / n),
        ("broadcast", lambda n: 1),
        ("reduce", lambda n: 1),
    ],
)
def test_bandwidths_are_those_of_nccl_tests(collective, factor):
    """Its doc/PERFORMANCE.md."""
    for n in (1, 2, 3, 8, 512):
        assert bandwidths(collective, 3 * 10**9, 1.5, n) == pytest.approx((2e9, 2e9 * factor(n)))


@pytest.mark.parametrize("name", ["gossip", "", None, "All_Reduce", "barrier"])
def test_a_collective_without_a_factor_is_refused(name):
    with pytest.raises(ValueError, match="no bus bandwidth"):
        bandwidths(name, 1, 1.0, 2)


def test_the_fit_is_exact_without_noise_in_any_order_and_any_unit():
    for alpha, beta in ((1e-6, 400e9), (10e-6, 50e9), (3e-4, 1e9), (2.0, 10.0)):
        points = [(size, alpha + size / beta) for size in SIZES]
        assert fit_alpha_beta(*zip(*points, strict=True)) == pytest.approx((alpha, beta), rel=1e-6)
        random.Random(0).shuffle(points)
        assert fit_alpha_beta(*zip(*points, strict=True)) == pytest.approx((alpha, beta), rel=1e-6)
        assert fit_alpha_beta(*zip(*points[:2], strict=True)) == pytest.approx((alpha, beta), rel=1e-6), (
            "two points are enough"
        )


def test_the_fit_is_numpys_with_weights_of_one_over_the_time():
    noise = np.random.default_rng(0)
    for alpha, beta in ((1e-6, 400e9), (3e-4, 1e9)):
        times = [(alpha + size / beta) * noise.uniform(0.7, 1.3) for size in SIZES]
        slope, intercept = np.polyfit(SIZES, times, 1, w=1 / np.array(times))
        assert fit_alpha_beta(SIZES, times) == pytest.approx((intercept, 1 / slope), rel=1e-6)


def test_ordinary_least_squares_would_miss_the_latency():
    """The trap of exercise 03.8."""
    noise, alpha, beta = np.random.default_rng(1), 10e-6, 50e9
    off = {"ours": 0, "ordinary": 0}
    for _ in range(50):
        times = [(alpha + size / beta) * noise.uniform(0.9, 1.1) for size in SIZES]
        off["ours"] = max(off["ours"], abs(fit_alpha_beta(SIZES, times)[0] / alpha - 1))
        off["ordinary"] = max(off["ordinary"], abs(np.polyfit(SIZES, times, 1)[1] / alpha - 1))
    assert off["ours"] < 0.1 < 0.5 < off["ordinary"]


# The program, on one rank.


def test_a_line_of_the_table_has_the_columns_of_its_head():
    record = {"collective": "reduce_scatter", "bytes": 2**26, "seconds": 0.0123, "algbw": 5.456e9, "busbw": 4.774e9}
    assert describe(record).split() == ["reduce_scatter", "67,108,864", "12,300", "5.456", "4.774"]
    small = {"collective": "all_reduce", "bytes": 4, "seconds": 2e-6, "algbw": 2e6, "busbw": 3e6}
    assert len(describe(record)) == len(describe(small)) == 72


def test_main_prints_and_writes_its_records(alone, tmp_path, capsys):
    out = tmp_path / "sweep.json"
    records = main(["--collectives", "all_reduce", "all_gather", "--max-kib", "16", "--factor", "2", "--out", str(out)])
    kinds = [(record["collective"], record["bytes"]) for record in records]
    assert kinds == [(name, 1024 * kib) for name in ("all_reduce", "all_gather") for kib in (4, 8, 16)]
    written = json.loads(out.read_text())
    assert written["records"] == records and written["backend"] == "gloo" and written["options"]["factor"] == "2"
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "1 ranks, gloo, float32" and len(lines[1]) == 72
    assert lines[2:8] == [describe(record) for record in records]
    assert [line.split(": alpha ")[0] for line in lines[8:]] == ["all_reduce", "all_gather"]


def test_one_size_needs_no_fit(alone, capsys):
    assert len(main(["--collectives", "reduce_scatter", "--max-kib", "4"])) == 1
    assert "alpha" not in capsys.readouterr().out


def test_records_are_handed_on_as_they_come(alone):
    come = []
    records = sweep(["all_reduce"], [64, 1, 0], on_record=lambda record: come.append(dict(record)))
    assert come == records and [record["bytes"] for record in records] == [64, 4, 4], "one element at least"
    assert all(record["busbw"] == 0 < record["algbw"] for record in records), "one rank: nothing on the links"


def test_an_unknown_collective_is_refused(alone):
    with pytest.raises(ValueError, match="not 'broadcast'"):
        run_collective("broadcast", torch.zeros(4), torch.zeros(4))
    with pytest.raises(ValueError):
        sweep(["all_reduce", "gossip"], [4096])


def test_one_rank_has_nothing_to_send(alone):
    tensor = torch.arange(6.0).view(2, 3)
    with count_traffic() as traffic:
        tree_broadcast(tensor)
        ring_all_gather(tensor)
        ring_all_reduce(tensor)
        piece = ring_reduce_scatter(tensor)
    assert traffic.calls == 0 and piece.data_ptr() == tensor.data_ptr() and piece.tolist() == list(range(6))
    assert math.isclose(tensor.sum().item(), 15)
