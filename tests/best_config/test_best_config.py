"""course_lib.best_config.planner: the search leaves out nothing, counts everything, and its best is the best. Plain
numpy.
"""

import dataclasses

import numpy as np
import pytest

from course_lib.best_config.clusters import CLUSTERS
from course_lib.best_config.layouts import (
    SETTINGS,
    degree_rules,
    degrees,
    divisors,
    first_reason,
    groups_of_nodes,
    setting_rules,
    with_settings,
)
from course_lib.best_config.planner import CP_LIMIT, RISK, RISKY, TP_LIMIT, estimate, search, why_not
from course_lib.best_config.recipe import recipe
from course_lib.best_config.stage_loads import bubble_share
from course_lib.best_config.tables import LayoutTable
from course_lib.five_d.layouts import Layout, check_layout
from course_lib.single_gpu.model import PRESETS
from course_lib.single_gpu.training import flops_per_token

H100 = CLUSTERS["H100"]
LLAMA = PRESETS["llama3-8B"]


@pytest.mark.parametrize(
    "name, gpus, batch", [("llama3-8B", 8, 64), ("llama3-70B", 64, 256), ("llama3-405B", 16384, 2048)]
)
def test_every_layout_is_counted_once(name, gpus, batch):
    config = PRESETS[name]
    ranking, table = search(config, H100, gpus, batch), degrees(gpus)
    able = first_reason(degree_rules(config, table, batch, 4096), ["none"]) == 0
    settings = {"micro_batch": divisors(batch), "ep": (1,), "replicate": groups_of_nodes(gpus, 8)}
    everything = with_settings(table.where(able), batch, SETTINGS | settings)
    assert sum(ranking.rejected.values()) + len(ranking.order) == np.count_nonzero(~able) + len(everything)
    assert all(count > 0 for count in ranking.rejected.values())
    e, both = ranking.estimate, np.concatenate([ranking.order, ranking.risky])
    assert len(both) == np.count_nonzero(e.fits) == len(set(both.tolist()))
    assert ranking.rejected["out of memory"] == np.count_nonzero(e.runs & ~e.fits)
    assert ranking.rejected[RISKY] == len(ranking.risky) == np.count_nonzero(e.fits & (e.risk > RISK)) > 0
    assert len(ranking.table) == len(both) + np.count_nonzero(~e.fits)


def test_the_ranking_is_sorted_and_what_is_in_it_can_be_run():
    ranking = search(PRESETS["llama3-70B"], H100, 64, 256)
    e, order = ranking.estimate, ranking.order
    assert (np.diff(e.step_s[order]) >= 0).all() and (np.diff(e.step_s[ranking.risky]) >= 0).all()
    assert (e.risk[order] <= RISK).all()
    best = ranking.best(50)
    assert len(best) == 50 and len({layout for layout, *_ in best}) == 50
    speeds = [tokens_per_s for _, tokens_per_s, *_ in best]
    assert speeds == sorted(speeds, reverse=True)
    for layout, tokens_per_s, mfu, gib in best:
        check_layout(PRESETS["llama3-70B"], layout, 64, 256, 4096)
        alone = estimate(PRESETS["llama3-70B"], H100, layout, 256)
        assert (tokens_per_s, mfu, gib) == pytest.approx((alone.tokens_per_s, alone.mfu, alone.peak_bytes / 2**30))
        assert 0 < mfu < 1 and gib * 2**30 < H100.memory_bytes


@pytest.mark.parametrize("name, cluster, gpus", [("llama3-8B", "H100", 8), ("llama3.2-1B", "H100, EFA", 4)])
def test_the_best_is_that_of_a_loop_over_single_layouts(name, cluster, gpus):
    config, of, batch = PRESETS[name], CLUSTERS[cluster], 32
    settings = {"micro_batch": (1, 4), "recompute": ("none", "full"), "virtual": (2,)}
    fastest = None
    for degree in (degrees(gpus)[row] for row in range(len(degrees(gpus)))):
        for layout in variants(degree):
            try:
                check_layout(config, layout, gpus, batch, 4096)
            except ValueError:
                continue
            found = estimate(config, of, layout, batch)
            if found.risk <= RISK and (fastest is None or found.step_s < fastest[0]):
                fastest = float(found.step_s), layout
    layout, tokens_per_s, *_ = search(config, of, gpus, batch, settings=settings).best(1)[0]
    assert tokens_per_s == pytest.approx(batch * 4096 / gpus / fastest[0])
    assert estimate(config, of, layout, batch).step_s == pytest.approx(fastest[0])


def variants(degree: Layout):
    """A layout with the settings of the loop; those that cannot be are among them."""
    for micro_batch in (1, 4):
        for recompute in ("none", "full"):
            for zero in range(4):
                for schedule in SETTINGS["schedule"] if degree.pp > 1 else ("1f1b",):
                    for sp in (False, True):
                        yield dataclasses.replace(
                            degree, micro_batch=micro_batch, recompute=recompute, zero_stage=zero, schedule=schedule,
                            sequence_parallel=sp, gather_once=zero == 3 and degree.pp > 1,
                        )  # fmt: skip


def test_the_best_for_16384_gpus_does_not_starve_its_pipeline():
    """Llama 3 405B on 16,384 H100 had 16 stages (Llama Team 2024, table 4); one micro-batch would leave them idle."""
    for layout, _, mfu, _ in search(PRESETS["llama3-405B"], H100, 16384, 2048).best(5):
        assert 2048 // (layout.dp * layout.micro_batch) >= layout.pp > 1 and 0.2 < mfu < 0.6, str(layout)


def test_one_micro_batch_leaves_a_pipeline_idle():
    """Whatever the schedule: of p stages one is at work, or two where gradients of weights are put off."""
    for name in ("1f1b", "naive", "afab", "zb-h1", "zb-h2", "zb-v"):
        layout = Layout(pp=8, schedule=name)
        assert float(bubble_share(layout, 1)) > 0.6, name
        assert estimate(PRESETS["llama3-70B"], H100, layout, 1).mfu < 0.12, name


def test_numbers_of_an_estimate_go_together():
    layout = Layout.parse("dp4,pp2,tp8,sp,zero1")
    found = estimate(LLAMA, H100, layout, 256)
    assert found.tokens == 256 * 4096 and found.gpus == 64
    assert found.tokens_per_s == pytest.approx(256 * 4096 / 64 / sum(found.time.values()))
    assert found.mfu == pytest.approx(found.tokens_per_s * flops_per_token(LLAMA, 4096) / 989e12)
    assert found.needed_bytes == pytest.approx(sum(found.memory.values()))
    assert found.peak_bytes <= found.needed_bytes


def test_buffers_are_given_back_where_memory_is_short():
    """Peak bytes are those that are needed, or what is left without buffers: never fewer."""
    for micro_batch in (1, 2, 4, 8, 16):
        found = estimate(LLAMA, CLUSTERS["H100, EFA"], Layout.parse(f"tp8,sp,mb{micro_batch}"), 64)
        without = found.needed_bytes - found.memory["buffers"]
        assert found.memory["buffers"] > 0 and without <= found.peak_bytes <= found.needed_bytes
        if found.needed_bytes <= 0.95 * found.usable_bytes:
            assert found.peak_bytes == found.needed_bytes


def test_more_memory_lets_more_fit_and_faster_gpus_are_faster():
    eight, bigger = (search(LLAMA, CLUSTERS[name], 8, 64) for name in ("H100", "H200"))
    assert len(bigger.order) > len(eight.order)
    assert bigger.best(1)[0][1] >= eight.best(1)[0][1]
    speeds = [search(LLAMA, CLUSTERS[name], 8, 64).best(1)[0][1] for name in ("A100", "H100", "B200")]
    assert speeds == sorted(speeds) and speeds[0] < speeds[2] / 3


def test_nothing_fits_on_too_few_gpus():
    ranking = search(PRESETS["llama3-405B"], H100, 8, 64)
    assert ranking.best() == [] and len(ranking.order) == 0 and ranking.rejected["out of memory"] > 0


def test_groups_of_a_few_nodes_hold_the_same_shards():
    """By default HSDP is searched: groups of 1, 2, 4 and 8 nodes, where they divide the GPUs."""
    assert groups_of_nodes(64, 8) == (1, 2, 4, 8) and groups_of_nodes(16384, 8) == (1, 256, 512, 1024, 2048)
    assert groups_of_nodes(24, 8) == (1, 3) and groups_of_nodes(8, 8) == groups_of_nodes(12, 8) == (1,)
    table = search(PRESETS["llama3-70B"], H100, 64, 256).table
    assert set(table.replicate) == {1, 2, 4, 8} and set(table.zero_stage[table.replicate > 1]) == {3}
    (alone,) = set(search(LLAMA, H100, 64, 256, settings={"replicate": (1,)}).table.replicate)
    assert alone == 1


@pytest.mark.parametrize("name, reason", [("tp", TP_LIMIT), ("cp", CP_LIMIT)])
def test_a_limit_on_a_degree_is_a_reason(name, reason):
    free, limited = (search(LLAMA, H100, 64, 256, **{f"max_{name}": most}) for most in (None, 4))
    degree = getattr(free.table, name)
    assert max(degree) > 4 == max(getattr(limited.table, name))
    assert limited.rejected[reason] > 0 and reason not in free.rejected
    assert (free.estimate.step_s[free.order][degree[free.order] <= 4] == limited.estimate.step_s[limited.order]).all()


def test_mfu_with_half_of_the_scores():
    found = estimate(LLAMA, H100, Layout.parse("dp8"), 64, 8192)
    half = 6 * LLAMA.layers * LLAMA.attention_width * 8192
    assert found.causal_flops == flops_per_token(LLAMA, 8192) - half
    assert (
        found.causal_mfu == pytest.approx(found.mfu * found.causal_flops / found.flops) and found.causal_mfu < found.mfu
    )


def test_settings_are_what_is_tried():
    ranking = search(LLAMA, H100, 16, 64, settings={"micro_batch": (2,), "zero_stage": (0, 1), "recompute": ("full",)})
    assert set(ranking.table.micro_batch) == {2} and set(ranking.table.recompute) == {"full"}
    assert set(ranking.table.zero_stage) == {0, 1} and set(ranking.table.schedule) == set(SETTINGS["schedule"])


def test_experts_are_shared_out():
    moe = {"experts": 8, "top_k": 2}
    ranking = search(PRESETS["llama3-8B"], H100, 32, 64, moe=moe, settings={"ep": (1, 2, 4, 8), "recompute": ("none",)})
    assert set(ranking.table.ep) == {1, 2, 4, 8} and (ranking.table.dp % ranking.table.ep == 0).all()
    dense = search(PRESETS["llama3-8B"], H100, 32, 64).best(1)[0]
    assert ranking.best(1)[0][1] < dense[1], "each token uses two experts of the same width"


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"gpus": 0, "batch": 8}, "gpus 0, batch 8, seq 4096: each is 1 or more"),
        ({"gpus": 8, "batch": -1}, "batch -1"),
        ({"gpus": 8, "batch": 8, "seq": 0}, "seq 0"),
        ({"gpus": 8, "batch": 8, "settings": {"tp": (8,)}}, "settings: tp is none of micro_batch"),
    ],
)
def test_bad_numbers_are_one_line(arguments, message):
    with pytest.raises(ValueError, match=message) as error:
        search(LLAMA, H100, **arguments)
    assert "\n" not in str(error.value)


MIXED = {"experts": 8, "top_k": 2}
NOTHING_TO_PLAN = [
    *[
        ({name: size}, {}, f"model: {name} {size}: a whole number, 1 or more")
        for name in ("layers", "ffn_hidden", "vocab")
        for size in (0, -8, 2.5)
    ],
    ({"head_size": 0}, {}, "model: head_dim 0"),
    ({}, {"batch": 0}, "batch 0, seq 64: each is 1 or more"),
    ({}, {"batch": 2.5}, "batch 2.5, seq 64: each is 1 or more, and whole"),
    ({}, {"batch": 10**20}, "batch 100000000000000000000, seq 64: each is 100,000,000 or less"),
    ({"hidden": 10**30, "head_size": 64}, {}, "model: .*e.* parameters: the planner counts 1e\\+15 or fewer"),
    ({}, {"seq": "64"}, "seq 64: each"),
    ({}, {"moe": {}}, "moe: experts None: a whole number, 1 or more"),
    ({}, {"moe": {"experts": 8}}, "moe: top_k None: a whole number, 1 or more"),
    ({}, {"moe": {"top_k": 2}}, "moe: experts None"),
    ({}, {"moe": MIXED | {"width": 64}}, "moe: width is none of ffn_hidden, shared, seed, experts, top_k"),
    ({}, {"moe": MIXED | {"experts": -8}}, "moe: experts -8"),
    ({}, {"moe": MIXED | {"top_k": "2"}}, "moe: top_k '2'"),
    ({}, {"moe": MIXED | {"top_k": 9}}, "top_k 9: it must be 1 to 8, the number of experts"),
    ({}, {"moe": MIXED | {"ffn_hidden": -1}}, "moe: ffn_hidden -1: a whole number, 1 or more"),
    ({}, {"moe": MIXED | {"shared": -1}}, "moe: shared -1: a whole number, 0 or more"),
    ({}, {"moe": MIXED | {"capacity": "all"}}, "moe: .*not supported between"),
]


@pytest.mark.parametrize("ask", ["estimate", "search", "why_not"])
@pytest.mark.parametrize("sizes, arguments, message", NOTHING_TO_PLAN)
def test_a_job_that_makes_no_sense_is_one_line(sizes, arguments, message, ask):
    """layers 0 had 81,770 tokens/s."""
    config = dataclasses.replace(LLAMA, **sizes)
    ask, what = {"estimate": (estimate, Layout(dp=2)), "search": (search, 2), "why_not": (why_not, Layout(dp=2))}[ask]
    with pytest.raises(ValueError, match=message) as error:
        ask(config, H100, what, **{"batch": 8, "seq": 64} | arguments)
    assert "\n" not in str(error.value)


def test_a_job_needs_a_network_or_one_node():
    box = dataclasses.replace(H100, network=0)
    assert search(LLAMA, box, 8, 64).best(1) == search(LLAMA, H100, 8, 64).best(1), "a node never leaves it"
    message = "^H100, 400 Gb/s per GPU: 16 GPUs are more than a node's 8, and it has no network$"
    for ask, what in ((search, 16), (estimate, Layout(dp=16)), (why_not, Layout(dp=16)), (recipe, 16)):
        with pytest.raises(ValueError, match=message):
            ask(LLAMA, box, what, 64)
    table = LayoutTable.of([Layout(dp=8), Layout(dp=2, tp=8)])
    with pytest.raises(ValueError, match=message):
        estimate(LLAMA, box, table, 64)


def test_each_rejected_layout_has_a_reason():
    """The same reason, one layout at a time, as the search counts for the whole table."""
    config, batch = PRESETS["llama3-8B"], 12
    table = with_settings(degrees(8), batch, SETTINGS | {"micro_batch": (1, 5), "ep": (1,), "replicate": (1, 2)})
    rules = degree_rules(config, table, batch, 4096) | setting_rules(config, table, batch, 4096)
    reasons, found = [""], estimate(config, H100, table, batch)
    numbers, seen = first_reason(rules, reasons), set()
    for row in range(0, len(table), 7):
        said = why_not(config, H100, table[row], batch)
        seen.add(said.split(":")[0])
        if numbers[row]:
            assert said == reasons[numbers[row]]
        else:
            assert (said == "") == bool(found.risk[row] <= RISK)
            assert not said or said.startswith(("out of memory", RISKY, "the pipeline has"))
    assert {"", "out of memory", RISKY} < seen and len(seen) > 3


# Risk.


def test_the_risk_is_a_half_at_the_usable_bytes_and_as_steep_as_the_errors_are():
    table = LayoutTable.of(Layout(dp=8, zero_stage=1, micro_batch=n) for n in range(1, 9))
    found = estimate(PRESETS["llama3.2-1B"], H100, table, 8 * 840)
    assert (np.diff(found.needed_bytes) > 0).all() and (np.diff(found.risk) > 0).all()
    odds = np.log(found.risk / (1 - found.risk))
    spread = H100.software.memory_spread
    assert odds == pytest.approx(np.log(found.needed_bytes / found.usable_bytes) / spread)
    assert ((found.risk < 0.5) == found.fits).all() and found.fits[0] and not found.fits[-1]
    starved = estimate(PRESETS["llama3.2-1B"], H100, Layout(dp=3), 8)
    assert not starved.runs and starved.risk == 1


def test_a_larger_risk_lets_more_in_and_none_less():
    orders = [search(LLAMA, H100, 8, 64, risk=risk) for risk in (1e-3, 0.1, 0.5)]
    assert [len(r.order) for r in orders] == sorted({len(r.order) for r in orders}), "each lets in more"
    assert len(orders[2].risky) == 0, "half is what fits"
    speeds = [ranking.best(1)[0][1] for ranking in orders]
    assert speeds == sorted(speeds)
    for risk in (0, -0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match="risk"):
            search(LLAMA, H100, 8, 64, risk=risk)
