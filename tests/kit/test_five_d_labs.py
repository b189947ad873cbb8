"""course_kit/labs/five_d: the layouts of pairs, drawn faults, bytes by axis, a comparison. Needs no GPU."""

import itertools

from course_kit.labs.five_d import counts, hangs, memory, pairs, rivals
from course_lib.collectives.traffic import Record
from course_lib.five_d.layouts import Layout


def test_every_pair_is_a_layout_of_four_ranks_and_eight_sequences_or_two_stages_of_zero():
    for one, other in itertools.combinations(pairs.FEATURES, 2):
        text = pairs.paired(one, other)
        if {one[:4], other[:4]} == {"zero"}:
            continue  # a layout has one stage
        layout = Layout.parse(text)
        assert layout.ranks == 4 and 8 % (layout.dp * layout.micro_batch) == 0, text
        assert layout.tp == 2 or not layout.sequence_parallel


def test_each_job_has_another_fault_and_ranks_to_blame():
    drawn = [hangs.planted(number) for number in range(len(hangs.JOBS))]
    assert sorted(fault for fault, _ in drawn) == sorted(hangs.FAULTS)
    for fault, guilty in drawn:
        assert len(guilty) == (2 if fault == "circle" else 1) and set(guilty) <= set(range(8))


def test_bytes_count_for_the_axis_of_their_group():
    groups = {"tp": (0, 1), "cp": (0,), "ep": (0,), "pp": (0,), "replicas": (0, 2)}
    records = [Record("all_reduce", ranks, 0, size, None) for ranks, size in (((0, 1), 5), ((0, 2), 7), ((0, 1, 2), 9))]
    found = counts.by_axis(counts.Layer({}, {}, {}, [], records, groups))
    assert found == {"tp": 5, "cp": 0, "ep": 0, "pp": 0, "replicas": 7, "other": 9}


def test_the_formula_has_all_parts_of_the_runs_that_it_knows():
    found = memory.formula_sizes()
    assert set(found) == {*memory.RUNS} - {"EP 4"}
    assert all({*memory.PARTS} <= {*parts} for parts in found.values())


def test_a_comparison_has_the_largest_difference_and_the_middle_ratio(capsys):
    numbers = [[[2.0, 1.0]], [[2.0, 1.01], [1.9, 1.0]]]
    rivals.compare(numbers, [[1.0, 2.0, 2.0], [1.0, 4.0, 4.0], [3.0, 4.0, 4.0]])
    first, ours, theirs = capsys.readouterr().out.splitlines()
    assert first == "1 steps: losses and norms differ by at most 1e-02"
    assert "1000 ms, ratio 0.50 (0.25 to 0.75)" in ours and "ratio 1.00" in theirs
