"""course_lib.best_config.step_time: parts that add up, and what a change of cluster, model or layout does to them.
Plain numpy.
"""

import dataclasses

import numpy as np
import pytest

from course_lib.best_config.clusters import CLUSTERS, latency_steps
from course_lib.best_config.planner import estimate
from course_lib.best_config.stage_loads import bubble_share
from course_lib.best_config.step_time import (
    expert_gradient_time,
    gradient_time,
    replica_time,
    stall_time,
    step_time,
    tensor_parallel_time,
    transfer_time,
)
from course_lib.best_config.tables import LayoutTable
from course_lib.five_d.layouts import Layout, groups_along
from course_lib.pipeline.schedules import schedule_by_name
from course_lib.pipeline.transfers import find_transfers
from course_lib.single_gpu.memory import param_count, parameter_parts
from course_lib.single_gpu.model import PRESETS, ModelConfig
from some_layouts import EXPERTS, some_rows

SEQ = 4096
SMALL, LLAMA, LARGE = (PRESETS[name] for name in ("llama3.2-1B", "llama3-8B", "llama3-70B"))
H100 = CLUSTERS["H100"]
BETWEEN_GPUS = ("tensor parallel", "context parallel", "transfers", "stalls", "bubble", "gradients")


def times(words: str, config: ModelConfig = LLAMA, cluster=H100, m: int = 8, **more) -> dict[str, float]:
    """Seconds by part of a layout in words."""
    return {name: float(part) for name, part in step_time(config, cluster, Layout.parse(words), m, SEQ, **more).items()}


@pytest.mark.parametrize("software", ["H100", "H100, EFA"])
@pytest.mark.parametrize("moe", [None, EXPERTS])
def test_arrays_are_row_by_row_the_same_and_nothing_is_negative(software, moe):
    cluster, batch = CLUSTERS[software], 64
    table = some_rows(LLAMA, 64, batch, SEQ, moe, 150)
    m = batch / (table.dp * table.micro_batch)
    found, whole = step_time(LLAMA, cluster, table, m, SEQ, moe), estimate(LLAMA, cluster, table, batch, SEQ, moe)
    assert min(part.min() for part in found.values()) >= 0
    np.testing.assert_allclose(whole.step_s, sum(found.values()), rtol=1e-12)
    for row in range(len(table)):
        single = step_time(LLAMA, cluster, table[row], m[row], SEQ, moe)
        assert {name: part[row] for name, part in found.items()} == {n: pytest.approx(p) for n, p in single.items()}
        one = estimate(LLAMA, cluster, table[row], batch, SEQ, moe)
        for name in ("step_s", "peak_bytes", "needed_bytes", "fits", "mfu", "tokens_per_s", "runs", "gpus"):
            assert getattr(whole, name)[row] == pytest.approx(getattr(one, name)), (name, str(table[row]))


def test_one_gpu_has_no_communication():
    for words in ("dp1", "mb2", "full", "zero3", "zb-v"):
        found = times(words)
        assert [found[name] for name in BETWEEN_GPUS] == [0] * len(BETWEEN_GPUS), words
    assert times("dp1", moe=EXPERTS)["expert parallel"] == 0
    assert times("dp8,ep8", moe=EXPERTS)["expert parallel"] > 0


def test_the_matrices_take_their_flops():
    """6 N a token at the efficiency of many rows, but for embedding, head and norms; scores, a head and K/V apart."""
    found = times("mb64", cluster=H100.with_software(half_rows=0.0))
    parts = parameter_parts(LLAMA)
    matrices = LLAMA.layers * (parts["q_o"] + parts["kv"] + parts["mlp"])
    rate = H100.peak_flops * H100.software.matmul_efficiency
    assert found["matrices"] == pytest.approx(6 * matrices * 8 * 64 * SEQ / rate)
    assert param_count(LLAMA) - matrices == parts["embedding"] + parts["head"] + 65 * LLAMA.hidden


@pytest.mark.parametrize("words", ["dp1", "dp8,zero1", "tp8,sp", "pp4", "pp4,tp2,sp,full", "cp4"])
def test_a_gpu_twice_as_fast_halves_what_it_computes(words):
    fast = dataclasses.replace(H100, peak_flops=2 * H100.peak_flops)
    before, after = times(words, LARGE), times(words, LARGE, fast)
    for name in ("matrices", "attention", "output layer"):
        assert after[name] == pytest.approx(before[name] / 2)
    for name in ("other kernels", "tensor parallel", "transfers", "optimizer"):
        assert after[name] == pytest.approx(before[name])
    assert after["gradients"] >= before["gradients"], "less to hide behind"
    assert before["launch"] <= after["launch"] and sum(after.values()) < sum(before.values())


def test_full_recomputation_is_a_forward_more():
    for words in ("mb2", "mb2,tp4,sp", "mb2,pp4"):
        none, full = times(words), times(f"{words},full")
        assert full["matrices"] == pytest.approx(none["matrices"] * 4 / 3)
        assert full["attention"] == pytest.approx(none["attention"] * 9 / 7), "of 7 matrix products, 2 are forward"
        # a layer has 10 exchanges, and 3 more in a replay; embedding and head have 5 together; without tp all are 0
        again = (13 * LLAMA.layers + 5) / (10 * LLAMA.layers + 5)
        assert full["tensor parallel"] == pytest.approx(none["tensor parallel"] * again)
        assert full["output layer"] == none["output layer"]
        assert 1.2 < sum(full.values()) / sum(none.values()) < 1.4
    none, selective = times("mb2"), times("mb2,selective")
    assert selective["matrices"] == none["matrices"] and selective["attention"] > none["attention"]
    titan = H100.with_software(selective_keeps=0.3, selective_again=0.5)
    none, selective = times("mb2", cluster=titan), times("mb2,selective", cluster=titan)
    assert selective["matrices"] == pytest.approx(none["matrices"] * (1 + 0.5 / 3)), "half of a forward"
    assert selective["attention"] == none["attention"], "its result is kept"


def test_few_rows_are_slow():
    per_sequence = [times(f"mb{mb}", m=1)["matrices"] / mb for mb in (1, 2, 4, 8)]
    assert per_sequence == sorted(per_sequence, reverse=True)
    half, whole = (times("dp1", m=1, cluster=H100.with_software(half_rows=n))["matrices"] for n in (SEQ, 0))
    assert half == pytest.approx(2 * whole), "with half_rows tokens"


# Data parallelism.


def test_more_nodes_at_a_fixed_batch_lower_mfu():
    """Each GPU has fewer sequences to hide gradients behind; a small model's are a larger part of its step."""
    lost, nodes = {}, LayoutTable.of(Layout(dp=8 * n, zero_stage=1) for n in (1, 4, 8, 16, 32))
    for name, config in (("small", SMALL), ("8B", LLAMA)):
        mfu = estimate(config, H100, nodes, 256).mfu.tolist()
        assert mfu == sorted(mfu, reverse=True), name
        lost[name] = mfu[-1] / mfu[0]
    assert lost["small"] < lost["8B"] < 0.9


def exposed(words: str, slot: float, m: int = 8, cluster=H100) -> float:
    return float(gradient_time(cluster, Layout.parse(words), m, 1e9, slot))


@pytest.mark.parametrize("zero", range(4))
def test_exposed_gradients_are_what_cannot_be_hidden(zero):
    for words in (f"dp8,zero{zero}", f"dp64,zero{zero}", f"dp8,tp8,zero{zero}"):
        slots = [exposed(words, slot) for slot in (0.0, 0.05, 0.5, 1e4)]
        assert slots == sorted(slots, reverse=True) and slots[0] > 0 and slots[-1] == 0, (words, slots)
    assert exposed(f"tp8,zero{zero}", 0.0) == 0, "no data parallelism, no gradients to send"


def test_what_data_parallelism_sends():
    """Bytes a parameter, with nothing to hide behind and no latency: an all-reduce of FP32 sums is twice 4; ZeRO-1
    sends 4 and gets 2; ZeRO-2 sends 4 for every micro-batch; ZeRO-3 gets 2 twice and sends 4, for every one."""
    cluster = H100.with_software(collective_s=0.0, gradient_step_s=0.0, nvlink_efficiency=1.0)
    for words, sent in (("dp8", 8), ("dp8,zero1", 6), ("dp8,zero2", 4 * 8 + 2), ("dp8,zero3", 8 * 8)):
        assert exposed(words, 0.0, cluster=cluster) == pytest.approx(1e9 * sent * 7 / 8 / cluster.node_link), words
    assert exposed("dp8,pp2,zero3,keep", 0.0, cluster=cluster) < exposed("dp8,pp2,zero2", 0.0, cluster=cluster)


def test_gradients_beyond_the_node_are_slower():
    assert exposed("dp8,zero1", 0.0) < exposed("dp16,zero1", 0.0) < exposed("dp16,tp8,zero1", 0.0)


RINGS = ["dp8", "dp64", "cp8", "cp32", "dp2,cp4", "dp4,cp4", "dp8,tp8", "dp8,tp4", "dp4,pp4"]
RINGS += ["dp4,cp2,tp4", "dp4,pp2,cp2,tp4"]
RINGS += ["dp2,pp8,cp2", "dp16,pp8,cp2"]  # with other stages between


@pytest.mark.parametrize("words", RINGS)
def test_gradients_take_the_links_between_the_ranks_of_dp_and_cp(words):
    """Placed rank by rank, as notebook 10 does: as many cards as ranks of the group are in a node."""
    cluster = H100.with_software(collective_s=0.0, gradient_step_s=0.0, nvlink_efficiency=1.0, network_efficiency=1.0)
    group = groups_along(Layout.parse(words), "dp", "cp")[0]
    inside = sum(rank < cluster.gpus_per_node for rank in group)
    bandwidth = cluster.node_link if inside == len(group) else min(cluster.node_link, inside * cluster.network)
    expected = 1e9 * 6 * (len(group) - 1) / len(group) / bandwidth
    assert exposed(f"{words},zero1", 0.0, cluster=cluster) == pytest.approx(expected)


def with_replicas(words: str, slot: float = 0.0, m: int = 8, cluster=H100, experts: float = 0.0) -> float:
    return float(replica_time(cluster, Layout.parse(words), m, 1e9, experts, slot))


@pytest.mark.parametrize("words", ["dp16,zero3,rep2", "dp16,tp4,zero3,rep4", "dp4,cp4,zero3,rep2", "dp8,zero3,rep4"])
def test_replicas_sum_pieces_over_the_links_between_them(words):
    """Nothing hidden, no latency: 8 bytes a round inside a group, and an all-reduce of 4 + 4 bytes of a piece between
    the groups, each by as many cards as ranks of its own are in a node; placed rank by rank.
    """
    cluster = H100.with_software(collective_s=0.0, gradient_step_s=0.0, nvlink_efficiency=1.0, network_efficiency=1.0)
    layout = Layout.parse(words)
    everyone = groups_along(layout, "dp", "cp")[0]
    size = len(everyone) // layout.replicate
    group, others = everyone[:size], everyone[::size]

    def seconds(ranks: list[int], sent: float) -> float:
        inside = sum(rank < cluster.gpus_per_node for rank in ranks)
        bandwidth = cluster.node_link if inside == len(ranks) else min(cluster.node_link, inside * cluster.network)
        return sent * (len(ranks) - 1) / len(ranks) / bandwidth

    expected = seconds(group, 1e9 * 8 * 8) + seconds(others, 1e9 / size * 8)
    assert with_replicas(words, cluster=cluster) == pytest.approx(expected)


def test_the_sum_over_replicas_hides_behind_what_the_group_leaves_of_the_last_backward():
    software = H100.software
    steps_s = 63 * software.gradient_step_s + 1e9 / 8 * 8 * 63 / 64 / (H100.network * software.network_efficiency)
    own_s = exposed("dp8,zero3", 0.0, m=1)
    assert with_replicas("dp512,zero3,rep64") == pytest.approx(8 * own_s + steps_s)
    for slot in (2 * own_s, 3 * own_s, 0.1):
        hidden = min(steps_s, slot * 2 / 3 - own_s)
        assert with_replicas("dp512,zero3,rep64", slot) == pytest.approx(steps_s - hidden), slot
    steps_s = software.gradient_step_s + 1e9 / 4 * 8 / 2 / (H100.network * software.network_efficiency)
    kept = exposed("dp4,pp2,zero3,keep", 0.0) + steps_s
    assert with_replicas("dp8,pp2,zero3,keep,rep2") == pytest.approx(kept), "one gather, one reduce-scatter"


def test_experts_are_shared_out_over_all_replicas():
    alone = float(expert_gradient_time(H100, Layout.parse("dp64,ep2,zero3"), 8, 1e9))
    both = with_replicas("dp64,ep2,zero3,rep8", experts=1e9)
    assert both == pytest.approx(with_replicas("dp64,ep2,zero3,rep8") + alone)
    alone = float(expert_gradient_time(H100, Layout.parse("dp8,ep2,zero3"), 8, 1e9))
    both = with_replicas("dp8,ep2,zero3,rep8", experts=1e9)
    assert both == pytest.approx(with_replicas("dp8,ep2,zero3,rep8") + alone), "with one rank per group"
    found = times("dp64,ep2,zero3,rep8", moe=EXPERTS)
    assert found["gradients"] > times("dp64,ep2,zero3,rep8")["gradients"]


def test_replicas_pay_on_many_nodes_and_not_on_few():
    """What notebook 11 says of the 8B: on 512 GPUs four groups are as fast as eight; on 16 one is the fastest."""
    for gpus, best in ((16, (1,)), (512, (4, 8))):
        table = LayoutTable.of(Layout(dp=gpus, zero_stage=3, replicate=2**n) for n in range(gpus.bit_length() - 3))
        found = estimate(LLAMA, H100, table, 2 * gpus)
        good = np.flatnonzero(found.mfu > 0.995 * found.mfu.max())
        assert found.fits.all() and tuple(table.replicate[good].tolist()) == best, (gpus, found.mfu)


# Tensor and context parallelism, pipelines.


def test_tensor_parallelism_beyond_the_node_costs():
    inside, beyond = (estimate(LARGE, H100, Layout.parse(words), 64) for words in ("dp2,tp8,sp,zero1", "tp16,sp"))
    assert beyond.tokens_per_s < 0.8 * inside.tokens_per_s
    seconds = [float(tensor_parallel_time(H100, Layout(tp=tp), 2**25)) for tp in (2, 4, 8, 16, 32)]
    assert seconds == sorted(seconds)
    assert seconds[3] / seconds[2] > 2 > seconds[2] / seconds[0], "the step beyond the node is the large one"


def test_sequence_parallelism_saves_kernels_and_sends_as_much():
    without, sp = (times(words, cluster=H100.with_software(gathers_again=False)) for words in ("tp8", "tp8,sp"))
    assert sp["other kernels"] < without["other kernels"]
    assert sp["tensor parallel"] == without["tensor parallel"] and sp["matrices"] == without["matrices"]


def test_rings_of_context_hide_behind_attention_and_ulysses_does_not():
    ring, ulysses, short = times("cp4"), times("cp4,ulysses"), times("cp8")
    assert ring["context parallel"] <= short["context parallel"], "less attention to hide behind"
    assert ulysses["context parallel"] > 0
    long = step_time(LLAMA, H100, Layout(cp=8), 1, 2**20)
    assert long["context parallel"] == 0 and long["attention"] > long["matrices"]


@pytest.mark.parametrize("words", ["dp1", "tp8,sp", "cp4", "full"])
def test_attention_takes_the_width_of_all_heads(words):
    """At the same hidden size twice as wide heads take twice the time, and 32 heads of 128 as much whatever h is."""
    wide = dataclasses.replace(LLAMA, head_size=2 * LLAMA.head_dim)
    assert times(words, wide)["attention"] == pytest.approx(2 * times(words)["attention"], rel=1e-12)
    qwen = dataclasses.replace(LLAMA, hidden=2048, head_size=128)  # as Qwen3-30B-A3B
    assert times(words, qwen)["attention"] == times(words)["attention"]


def test_ulysses_sends_the_width_of_all_heads():
    """Of q and the output, and of K and V; the hidden state stays where it is."""
    free = H100.with_software(collective_s=0.0, ring_step_s=0.0)
    wide = dataclasses.replace(LLAMA, head_size=2 * LLAMA.head_dim)
    found = [times("cp4,ulysses", config, free)["context parallel"] for config in (LLAMA, wide)]
    assert found[1] == pytest.approx(2 * found[0], rel=1e-12) and found[0] > 0
    narrow = dataclasses.replace(LLAMA, hidden=2048, head_size=128)
    assert times("cp4,ulysses", narrow, free)["context parallel"] == found[0]


def test_rings_of_context_send_whole_heads():
    bare = H100.with_software(attention_efficiency=1e9, ring_step_s=0.0)
    eight, sixteen = (times(f"cp2,tp{tp},sp", cluster=bare)["context parallel"] for tp in (8, 16))
    assert sixteen == pytest.approx(eight), "with 8 K/V heads, 16 ranks have one each as well"


def test_the_bubble_is_the_schedules_share():
    config, names = PRESETS["bench-80B"], ("1f1b", "afab", "zb-h1", "zb-h2", "naive")
    assert times("pp1", config)["bubble"] == 0
    bubbles = {name: times(f"pp8,{name}", config, m=16)["bubble"] for name in names}
    for name in names:
        share = float(bubble_share(Layout(pp=8, schedule=name), 16))
        assert bubbles[name] == pytest.approx(share * bubbles["1f1b"]), name
    found = times("pp8", config, m=16)
    busy = sum(found[name] for name in found if name not in ("bubble", "gradients", "optimizer", "step"))
    assert found["bubble"] / busy == pytest.approx(7 / 16, rel=0.1), "(p - 1) / m, but that stages differ a little"


def test_more_micro_batches_are_a_smaller_bubble():
    shares = [times("pp8", LARGE, m=m)["bubble"] / sum(times("pp8", LARGE, m=m).values()) for m in (8, 16, 32, 64)]
    assert shares == sorted(shares, reverse=True)


def sent_by_a_rank(layout: Layout, m: int) -> float:
    """Tensors that a rank in the middle of a pipeline sends for each micro-batch of the step, by notebook 09's plan."""
    schedule = schedule_by_name(layout.schedule, layout.pp, m, layout.virtual)
    return sum(transfer.source == layout.pp // 2 for *_, transfer in find_transfers(schedule)) / m


@pytest.mark.parametrize("words", ["zb-h1", "zb-h2", "afab", "zb-v", "interleaved", "interleaved,v3", "dualpipe"])
def test_as_many_tensors_are_sent_as_in_notebook_09(words):
    layout, one = Layout.parse(f"pp4,{words}"), Layout(pp=4)
    found, expected = (float(transfer_time(LLAMA, H100, each, SEQ)) for each in (layout, one))
    assert found / expected == pytest.approx(sent_by_a_rank(layout, 24) / sent_by_a_rank(one, 24))


def test_what_a_pipeline_sends():
    """A hidden state of 2 bytes an element, and its gradient."""
    links = {"nvlink_efficiency": 1.0, "network_efficiency": 1.0, "collective_s": 0.0, "ring_step_s": 0.0}
    cluster = H100.with_software(**links)
    inside, beyond = (float(transfer_time(LLAMA, cluster, Layout(pp=pp, micro_batch=2), SEQ)) for pp in (8, 16))
    assert inside == pytest.approx(2 * 2 * SEQ * LLAMA.hidden * 2 / cluster.node_link)
    whole, split = (
        float(transfer_time(LLAMA, cluster, Layout(pp=2, tp=2, sequence_parallel=sp), SEQ)) for sp in (False, True)
    )
    assert whole == pytest.approx(2 * split)  # without SP, each rank of tp sends all of it
    assert beyond == pytest.approx(inside * cluster.node_link / cluster.network)
    for words in ("pp1", "dp64", "dp64,tp8"):
        assert transfer_time(LLAMA, H100, Layout.parse(words), SEQ) == 0, words


def test_the_network_stalls_in_large_jobs_of_nanotron_alone():
    table = LayoutTable.of(Layout(dp=nodes, pp=2, tp=4) for nodes in (1, 16, 63, 64, 128))
    efa = CLUSTERS["H100, EFA"]
    stall_s = efa.software.stall_s
    assert stall_s > 0 and stall_time(efa, table, 3).tolist() == [0, 0, 0, 3 * stall_s, 3 * stall_s]
    assert stall_time(efa, Layout(pp=4, dp=16, tp=8), 5) == (2 * 5 + 1) * stall_s, "two neighbours, and to fill it"
    assert stall_time(efa, Layout(dp=512), 2) == 2 * 2 * stall_s, "a ring's neighbours"
    assert stall_time(efa, Layout(dp=16, tp=32), 2) == stall_time(efa, Layout(tp=512), 2) == 0
    assert stall_time(efa, Layout(pp=2, tp=32), 2) == 2 * stall_s, "a small job, with tp beyond two nodes"
    assert not stall_time(H100, table, 3).any()


def test_latency_grows_as_a_ring_and_beyond_the_largest_measured_one_as_a_tree():
    ranks = np.array([1, 2, 128, 256, 512, 65536])
    assert latency_steps(H100, ranks) == pytest.approx([0, 1, 127, 255, 255 * 9 / 8, 255 * 2])
    step_s = [times(f"dp{n},zero1", m=1)["gradients"] for n in (4096, 8192)]
    assert 0 < step_s[1] - step_s[0] < 256 * H100.software.gradient_step_s, "a ring would wait for 4,096 steps more"


# What programs differ in.


def test_factors_of_a_gpu_scale_what_it_computes():
    slow = dataclasses.replace(H100, matmul_factor=0.5, attention_factor=0.25)
    before, after = times("tp2,sp"), times("tp2,sp", cluster=slow)
    assert after["matrices"] == pytest.approx(2 * before["matrices"])
    assert after["output layer"] == pytest.approx(2 * before["output layer"])
    assert after["attention"] == pytest.approx(4 * before["attention"])
    assert after["other kernels"] == before["other kernels"] and after["tensor parallel"] == before["tensor parallel"]


def test_fp8_has_an_efficiency_of_its_own():
    fp8 = H100.with_software(matmul_dtype="fp8", fp8_efficiency=0.5, half_rows=0.0)
    bf16 = H100.with_software(matmul_efficiency=0.6, half_rows=0.0)
    rates = H100.fp8_flops * 0.5 / (H100.peak_flops * 0.6)
    assert times("dp1", cluster=bf16)["matrices"] == pytest.approx(rates * times("dp1", cluster=fp8)["matrices"])
    for name in ("attention", "output layer", "other kernels"):
        assert times("dp1", cluster=bf16)[name] == times("dp1", cluster=fp8)[name]


def test_the_loss_moves_its_logits():
    moving = times("tp4,mb2", cluster=H100.with_software(logit_traffic=100.0))["output layer"]
    logits = 8 * 2 * SEQ * LLAMA.vocab / 4
    assert moving - times("tp4,mb2")["output layer"] == pytest.approx(100 * logits / H100.memory_bandwidth)


def test_overlapped_exchanges_of_a_layer_cost_their_exposed_share():
    """Those of the embedding and the output layer stay."""
    clusters = [H100.with_software(tp_overlap=share) for share in (0.0, 0.5, 1.0)]
    full, half, none = (times("tp8,sp", cluster=cluster)["tensor parallel"] for cluster in clusters)
    assert half == pytest.approx((full + none) / 2) and 0 < none < 0.1 * full


@pytest.mark.parametrize("words, share", [("pp4,tp4", 1 / 4), ("pp4,tp4,sp", 1), ("pp4", 1)])
def test_scattered_transfers_send_a_tensor_parallel_share(words, share):
    cluster = H100.with_software(collective_s=0.0, ring_step_s=0.0)
    scattered = transfer_time(LLAMA, cluster.with_software(scatters_transfers=True), Layout.parse(words), SEQ)
    assert scattered == pytest.approx(share * transfer_time(LLAMA, cluster, Layout.parse(words), SEQ))


@pytest.mark.parametrize("words, hidden", [("pp4,interleaved,v2", True), ("pp4", False), ("pp4,zb-h1", False)])
def test_interleaved_stages_may_hide_their_transfers(words, hidden):
    exposed, overlapped = (times(words, cluster=H100.with_software(overlaps_transfers=x)) for x in (False, True))
    assert exposed["transfers"] > 0 and overlapped["transfers"] == (0 if hidden else exposed["transfers"])


def test_gradients_of_interleaved_chunks_hide_behind_the_last_pp_micro_batches():
    """1F1B's are complete only with the last micro-batch; ZeRO-2 sends those of each, so its slots count once."""
    cluster = dataclasses.replace(H100.with_software(overlaps_transfers=True), network=1e9)
    for zero, hidden in (("zero1", True), ("zero2", False)):
        words = [f"dp8,pp4,tp8,sp,{zero},{schedule}" for schedule in ("1f1b", "interleaved")]
        one, several = (times(each, m=4, cluster=cluster) for each in words)
        assert one["gradients"] > 0
        assert (several["gradients"] < one["gradients"] - 1e-3) == hidden


@pytest.mark.parametrize("words, layers", [("pp8,tp2,sp", 7), ("pp3,tp2,sp,zb-h1", 3), ("pp4", 24)])
def test_a_faster_gpu_is_no_slower_where_the_host_limits_the_slowest_stage(words, layers):
    """The output layer makes the last stage the slowest, until launching the layers of another one takes longer."""
    config = ModelConfig(layers, 1024, 8, 8, 4096, 262_208)
    faster = [dataclasses.replace(H100, peak_flops=H100.peak_flops * 2.0**power) for power in range(-3, 5)]
    seconds = [sum(times(words, config, cluster).values()) for cluster in faster]
    assert all(after <= before * (1 + 1e-9) for before, after in zip(seconds, seconds[1:], strict=False)), seconds


def test_an_end_rank_of_dualpipe_has_the_head_for_half_of_the_micro_batches():
    """The other half of the micro-batches enters at this rank, and leaves at the opposite end."""
    config = ModelConfig(8, 4096, 32, 32, 16384, 262_208)  # the output layer takes longer than a stage of layers
    plain, both = (float(times(words, config, m=16)["output layer"]) for words in ("pp4", "pp4,dualpipe"))
    assert plain > 0 and both == pytest.approx(plain / 2)
