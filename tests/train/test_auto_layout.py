"""course_lib.train.auto_layout: the planner's first answer among the layouts that a run's settings allow. CPU."""

import re

import pytest

from course_lib.best_config.answer import answer
from course_lib.best_config.program import options
from course_lib.best_config.software import SOFTWARE
from course_lib.five_d.layouts import Layout, check_layout
from course_lib.single_gpu.config import PRESETS
from course_lib.train.auto_layout import batches_of, choose_layout, cluster_of, preset_of
from course_lib.train.settings import read_settings

H100 = "NVIDIA H100 80GB HBM3"
MOE = {"experts": 8, "top_k": 2, "ffn_hidden": 1024}
JOB = "--preset llama3-8B --batch 256 --seq 4096"
LONG = "--preset llama3-8B --batch 64 --seq 131072"


def choose(words: str, gpus: int, device: str | None = H100, moe: dict | None = None) -> tuple[Layout, str]:
    """The choice for settings in the words of the command line, on nodes of 8."""
    settings = read_settings(words.split())
    config = PRESETS[settings.model.preset or "small"]
    layout, line = choose_layout(settings, config, moe, gpus, min(gpus, 8), device)
    for batch in batches_of(settings):
        check_layout(config, layout, gpus, batch, settings.run.seq, moe)
    assert line.startswith(f"layout auto: {layout}") and "\n" not in line
    return layout, line


@pytest.mark.parametrize(
    "words, device, planner",
    [
        (JOB, H100, f"{JOB} --max-cp 1 --fused-loss"),
        (f"{JOB} --no-chunked-loss", "NVIDIA H200", f"{JOB} --max-cp 1 --cluster H200"),
        (f"{JOB} --kernels", "NVIDIA A100-SXM4-80GB", f"{JOB} --max-cp 1 --kernels --cluster A100"),
        (LONG, H100, f"{LONG} --max-cp 1 --fused-loss"),
        (f"{LONG} --no-document-masks", H100, f"{LONG} --fused-loss"),
        (f"{JOB} --cluster B200", None, f"{JOB} --max-cp 1 --fused-loss --cluster B200"),
    ],
)
def test_it_is_the_planners_first_answer(words, device, planner):
    first = answer(options([*planner.split(), "--gpus", "64"]).question, 1)["layouts"][0]
    layout, line = choose(words, 64, device)
    assert str(layout) == first["layout"] and f"{first['step_s']:.3g} s per step" in line
    assert f"{first['peak_gib']:.1f} of {first['usable_gib']:.0f} GiB" in line
    assert (layout.cp > 1) == ("--no-document-masks" in words)


def test_it_leaves_out_what_the_settings_do_not_allow():
    ramp = f"{JOB} --start-batch 96 --ramp 4"
    assert choose(JOB, 64)[0].dp == 64 and 96 % choose(ramp, 64)[0].dp == 0
    assert choose(ramp, 64)[0].schedule == "zb-v" and choose(f"{ramp} --compile", 64)[0].schedule == "1f1b"
    assert choose(ramp, 64)[0].zero_stage == 1 and choose(f"{ramp} --fp8 nanotron --fp8-gather", 64)[0].zero_stage == 3
    assert choose(LONG, 64)[0].sequence_parallel and choose(LONG, 64)[0].recompute == "full"
    assert not choose(f"{LONG} --fp8 nanotron", 128)[0].sequence_parallel
    assert choose("--preset llama3-70B --batch 512 --seq 8192 --recompute none", 512)[0].recompute == "none"
    assert choose("--preset llama3.2-1B --batch 64 --seq 2048 --experts 8", 16, moe=MOE)[0].ranks == 16


@pytest.mark.parametrize(
    "words, ranks, layout",
    [
        ("--batch 16", 1, "dp1"),
        ("--batch 16", 4, "dp4,zero1"),
        ("--batch 6", 4, "dp2,tp2,zero1"),
        ("--batch 7", 4, "tp4"),
        ("--batch 8 --start-batch 2 --ramp 3", 4, "dp2,tp2,zero1"),
    ],
)
def test_on_cpus_data_parallelism_comes_first(words, ranks, layout):
    chosen, line = choose(words, ranks, None)
    assert chosen == Layout.parse(layout) and "the planner knows GPUs only" in line


@pytest.mark.parametrize(
    "words, gpus, device, message",
    [
        ("--batch 7", 3, None, "neither data nor tensor parallelism fits 3 ranks: batch 7 is not a multiple of dp 3"),
        (JOB, 8, "NVIDIA T4", "the planner does not know NVIDIA T4: set cluster to a TOML file, or H100; "),
        (f"{JOB} --cluster H10", 8, H100, "do you mean H100?"),
        ("--preset llama3-405B --batch 64 --seq 4096", 8, H100, "layout auto: no layout fits: the leanest, "),
        ("--preset debug --batch 1 --seq 63", 7, H100, "layout auto: no layout runs: change the GPUs, "),
        (JOB, 16, "NVIDIA GeForce RTX 4090", "16 GPUs are more than a node's 8, and it has no network"),
    ],
)
def test_what_has_no_layout_is_told_in_one_line(words, gpus, device, message):
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        choose(words, gpus, device)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "device, preset",
    [
        (H100, "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA GB200", "GB200 NVL72"),
        ("AMD Instinct MI300X OAM", "MI300X"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA A100-PCIE-40GB", None),
        ("", None),
    ],
)
def test_the_cluster_of_a_gpu(device, preset):
    assert preset_of(device) == preset


def test_a_cluster_has_the_constants_of_the_program_that_runs(tmp_path):
    """A file's own constants stay if they are of the course's program; another program's do not count."""
    file = tmp_path / "mine.toml"
    file.write_text('name = "Ours"\nbase = "H100"\nnetwork_gb_s = 25\n[software]\nmatmul_efficiency = 0.5\n')
    settings = read_settings(["--cluster", str(file), "--fp8", "nanotron", "--no-chunked-loss"])
    cluster = cluster_of(settings, 4, H100)
    assert (cluster.network, cluster.gpus_per_node, cluster.software.matmul_efficiency) == (25e9, 8, 0.5)
    assert (cluster.software.matmul_dtype, cluster.software.fused_loss) == ("fp8", False)
    assert (
        cluster_of(read_settings(["--kernels", "--cluster", "H100, EFA"]), 8, "").software
        == SOFTWARE["course, kernels"]
    )
    assert cluster_of(read_settings(["--fp8", "nanotron"]), 4, "NVIDIA A100-SXM4-80GB").software.matmul_dtype == "bf16"
    assert cluster_of(read_settings([]), 4, H100).gpus_per_node == 4
    assert cluster_of(read_settings([]), 4, "NVIDIA GB200").gpus_per_node == 72, "a rack"
