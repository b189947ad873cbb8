"""course_lib.best_config.tested: what no run has tested about a layout, alone and in a table."""

import dataclasses

import numpy as np
import pytest

from course_lib.best_config import tested
from course_lib.best_config.clusters import CLUSTERS
from course_lib.best_config.planned_config import PlannedConfig, count_parameters
from course_lib.best_config.tables import LayoutTable
from course_lib.best_config.tested import is_tested, untested
from course_lib.five_d.layouts import Layout
from course_lib.single_gpu.model import PRESETS
from some_layouts import EXPERTS, some_rows

H100 = CLUSTERS["H100"]
MANY = {"experts": 256, "top_k": 8, "ffn_hidden": 2048}
FP8 = H100.with_software(matmul_dtype="fp8")
BIG = dataclasses.replace(PRESETS["llama3-405B"], layers=6 * 126)


def reasons(words: str, model="llama3-70B", cluster=H100, seq=8192, moe=None, batch=None) -> tuple[str, ...]:
    return untested(PRESETS[model], cluster, Layout.parse(words), seq, moe, batch)


@pytest.mark.parametrize(
    "words",
    [
        "dp1",
        "dp512,zero3,full",  # llm-foundry's MPT-70b, with 8 sequences in a micro-batch
        "dp1024,zero3,full",  # twice as many
        "dp64,tp16,sp,zero1",  # nanotron, on half as many
        "dp128,pp16,tp8,sp,zero1,interleaved,v8",  # Meta's
        "dp16,pp16,cp8,tp8,sp,zero1,interleaved,v4",
        "dp16,tp8,sp,zero3,full",  # torchtitan's
        "dp8,pp12,tp8,full",  # Megatron-LM's
    ],
)
def test_layouts_like_measured_ones_are_tested(words):
    assert reasons(words) == ()


@pytest.mark.parametrize(
    "words, expected",
    [
        ("dp2048,zero3,full", ("ZeRO-3 on more than 512 GPUs", "dp above 512")),
        ("dp256,tp8,zero3,full", ("ZeRO-3 on more than 512 GPUs",)),
        ("dp64,tp8,sp,zero3,full", ("ZeRO-3 with TP on more than 128 GPUs",)),
        ("dp64,zero3,rep8", ("HSDP",)),
        ("dp16,cp4,zero3", ("ZeRO-3 with CP",)),
        ("dp8,pp8,zero3,keep", ("ZeRO-3 with a pipeline",)),
        ("dp8,pp8,zero1,zb-v", ("schedule zb-v",)),
        ("dp8,pp8,zb-h1", ("schedule zb-h1",)),
        ("dp8,pp8,zero1,afab", ("schedule afab",)),
        ("dp8,pp8,zero1,dualpipe", ("schedule dualpipe with a dense model",)),
        ("dp8,pp4,zero2", ("ZeRO-2 with a pipeline",)),
        ("dp128,tp16,sp,zero1", ("TP between nodes on more than 512 GPUs",)),
        ("dp8,tp128,sp,zero1", ("tp above 32",)),
        ("dp2,cp64,tp8,sp,zero1", ("cp above 16",)),
        ("dp8,cp2,ulysses,zero1", ("CP by Ulysses",)),
        ("dp128,pp128,tp4,sp,zero1,interleaved", ("more than 16,384 GPUs",)),
        ("dp2048,zero1", ("dp above 512",)),
    ],
)
def test_reasons_name_what_no_run_has(words, expected):
    assert reasons(words) == expected


@pytest.mark.parametrize(
    "words, moe, expected",
    [
        ("dp128,pp16,ep64,zero1,dualpipe", MANY, ()),  # DeepSeek-V3's
        ("dp64,ep8,zero1", EXPERTS, ()),
        ("dp64,ep8,zero2", EXPERTS, ("ZeRO-2 with a mixture of experts",)),
        ("dp8,tp8,ep8,sp,zero1", EXPERTS, ()),  # Grok-1's
        ("dp4,pp4,tp4,ep4,sp,zero1,interleaved", EXPERTS, ()),
        ("dp8,cp8,ep8,zero3", EXPERTS, ("ZeRO-3 with CP", "ZeRO-3 with a mixture of experts")),
        ("dp8,pp8,ep8,zero1", EXPERTS, ("schedule 1f1b with a mixture of experts",)),
        ("dp256,ep256,zero1", MANY, ("ep above 64",)),
    ],
)
def test_mixtures_have_few_runs(words, moe, expected):
    assert reasons(words, "llama3-8B", seq=4096, moe=moe) == expected


def test_the_job_has_reasons_of_its_own():
    assert untested(BIG, H100, Layout.parse("dp8,tp8"), 8192) == ("models of more than 1,000 billion parameters",)
    many = {"experts": 512, "top_k": 8}
    assert "mixtures of more than 670 billion parameters" in reasons("dp64,ep8,zero1", moe=many)
    assert reasons("dp8,tp8", seq=2**19) == ("sequences of more than 131,072 tokens",)
    assert reasons("dp8,tp8", seq=2**18) == ("sequences of more than 65,536 tokens without CP",)
    assert reasons("dp8,cp8,tp8,zero1", seq=2**18) == reasons("dp8,tp8", seq=2**17) == ()


@pytest.mark.parametrize("name", sorted(CLUSTERS))
def test_only_gpus_of_runs_are_tested(name):
    expected = name in ("H100", "H100, EFA", "H200", "A100", "A100-40GB")
    assert any("GPUs other than" in reason for reason in reasons("dp8", cluster=CLUSTERS[name])) != expected


def test_a_measured_cluster_of_the_same_gpus_is_tested():
    slower = dataclasses.replace(H100, name="ours", peak_flops=0.95 * H100.peak_flops, network=25e9)
    assert reasons("dp64,zero3", cluster=slower) == ()
    for factor, same in ((0.8, False), (1.43, True), (1.6, False)):  # an H200 has 1.43 times an H100's bandwidth
        other = dataclasses.replace(H100, name="ours", memory_bandwidth=factor * H100.memory_bandwidth)
        assert (reasons("dp64,zero3", cluster=other) == ()) == same


def test_micro_batches_count_where_every_one_of_them_sends():
    assert reasons("dp64,zero2", batch=1024) == ("ZeRO-2 with more than 1 micro-batch per step",)
    assert reasons("dp64,zero2", batch=128) == reasons("dp64,zero2,mb8", batch=1024) == ()
    assert reasons("dp64,zero3", batch=64 * 42) == reasons("dp64,zero1", batch=64 * 43) == ()
    assert reasons("dp64,zero3", batch=64 * 43) == ("ZeRO-3 with more than 21 micro-batches per step",)


def test_fp8_is_a_technique():
    assert reasons("dp64,pp8,tp8,sp,zero1,interleaved", cluster=FP8) == ()
    on_more = ("FP8 on more than 2,304 GPUs",)
    assert reasons("dp128,pp8,tp8,sp,zero1,interleaved", cluster=FP8) == on_more


def test_a_technique_without_its_runs_is_untested(monkeypatch):
    rows = [row for row in tested.read_table("tested_layouts.csv") if "zero2" not in row["layout"]]
    monkeypatch.setattr(tested, "read_table", lambda file: rows)
    caches = (tested.measured_layouts, tested.most_gpus)
    try:
        for cache in caches:
            cache.cache_clear()
        assert reasons("dp64,zero2") == ("ZeRO-2",)
        assert reasons("dp64,zero2", batch=1024) == ("ZeRO-2",)
    finally:
        for cache in caches:
            cache.cache_clear()


@pytest.mark.parametrize("cluster, moe", [(H100, None), (FP8, EXPERTS), (CLUSTERS["B200"], None)])
def test_a_table_has_the_answers_of_its_layouts(cluster, moe):
    config, batch = PRESETS["llama3-8B"], 1024
    table = some_rows(config, 1024, batch, 4096, moe, 300)
    plain = ["dp1024,mb1", "dp512,tp2,sp,zero1", "dp1024,ep8,zero1"]  # of which some are tested
    table = LayoutTable.of([*(table[i] for i in range(len(table))), *map(Layout.parse, plain)])
    found = is_tested(config, cluster, table, 4096, moe, batch)
    alone = [untested(config, cluster, table[i], 4096, moe, batch) == () for i in range(len(table))]
    assert found.tolist() == alone
    assert np.any(found) == (cluster.name != CLUSTERS["B200"].name) and not np.all(found)


def test_layers_without_experts_have_no_parameters_of_experts():
    """Experts in every other layer: 717 billion parameters, and 1,403 billion with experts in all 122."""
    plain = dataclasses.replace(PRESETS["llama3-8B"], layers=122, hidden=7168, heads=56, kv_heads=56, ffn_hidden=2048)
    half = PlannedConfig(**vars(plain), expert_every=2)
    assert 600e9 < count_parameters(half, MANY)[0] < 2 * 670e9 < count_parameters(plain, MANY)[0]
    layout = Layout.parse("dp64,ep8,zero1")
    too_large = "mixtures of more than 670 billion parameters"
    assert too_large not in untested(half, H100, layout, 4096, MANY)
    assert too_large in untested(plain, H100, layout, 4096, MANY)
