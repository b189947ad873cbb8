"""course_lib.best_config.dry_runs and fake_ranks in one process: sizes, errors, and nothing is left behind. CPU."""

import dataclasses
import gc
import resource
import sys

import pytest
import torch
import torch.distributed as dist
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from calls import peak_bytes
from course_lib.best_config.clusters import CLUSTERS
from course_lib.best_config.dry_runs import DryRun, axes_between, bytes_by_axes, dry_run, measured_step, prepare_step
from course_lib.best_config.fake_ranks import fake_ranks, shifted, simulate_peer_object
from course_lib.best_config.planner import estimate
from course_lib.collectives.simulation import all_gather_object
from course_lib.collectives.traffic import Record, Traffic
from course_lib.expert_parallel import exchange
from course_lib.five_d.layouts import Layout, groups_along
from course_lib.five_d.meshes import build_mesh
from course_lib.five_d.model import parallelize
from course_lib.single_gpu.memory import param_count
from course_lib.single_gpu.model import PRESETS, ModelConfig

SIZES = ModelConfig(layers=2, hidden=64, heads=4, kv_heads=2, ffn_hidden=176, vocab=256)
SEQ = 64


def state() -> tuple:
    """What a dry run might leave behind in the process."""
    gc.collect()
    hooks = len(_global_optimizer_pre_hooks)
    modes, default = _get_current_dispatch_mode_stack(), torch.get_default_device()
    random = torch.get_rng_state().sum().item()
    autocast = torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()
    functions = dist.all_gather_object, torch.UntypedStorage.resize_, sys.excepthook
    functions += tuple(len(each.simulations) for each in (all_gather_object, exchange.read_sizes))
    return dist.is_initialized(), hooks, modes, default, random, autocast, functions


# The allocator's own events know nothing of MemoryProfile. Real tensors, fake ranks: gloo's buffers are not ours.
@pytest.mark.parametrize("words", ["dp2,zero1", "dp2,zero3", "tp2,sp,full", "pp2,zb-h1"])
def test_the_peak_is_that_of_the_allocator(words):
    layout = Layout.parse(words)
    found = dry_run(SIZES, layout, 4 * layout.dp, SEQ, dtype=torch.float32, lr=1e-3)
    with fake_ranks(layout):
        parallel = parallelize(SIZES, layout, build_mesh(layout, "cpu"), lr=1e-3)
        parallel.reads_flags = False  # what nobody sends may be NaN
        tokens = prepare_step(parallel, 4, SEQ)
        parallel.step(tokens, tokens)
        held = sum(measured_step(parallel, tokens, tokens)[0].values())
        if layout.zero_stage == 3:  # these gradients go at the beginning of a step, unseen by the profiler
            held -= found.between_steps["gradients"]
            parallel.optimizer.zero_grad()
        peak = held + peak_bytes(lambda: parallel.step(tokens, tokens))
    assert found.peak_bytes == pytest.approx(peak, rel=0.03)


def test_a_model_that_fits_nowhere_here_takes_no_memory():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    config = dataclasses.replace(PRESETS["llama3-405B"], layers=14)  # of 16 stages: one layer or the embedding each
    layout = Layout.parse("dp128,pp16,tp8,sp,zero1")
    found = dry_run(config, layout, 128 * 4, 8192, rank=8)  # rank 8 of 16,384 has the second stage
    weights = 2 * param_count(dataclasses.replace(config, layers=1, vocab=0)) // 8  # BF16
    assert found.between_steps["parameters"] == pytest.approx(weights, rel=1e-3)
    assert found.peak_bytes > 5 * 2**30
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**10 < 300  # MiB


def test_8b_on_8_ranks_is_what_zero_3_promises():
    found = dry_run(PRESETS["llama3-8B"], Layout.parse("dp8,zero3"), 8, 8192)
    weights = param_count(PRESETS["llama3-8B"])
    for category, copies in (("parameters", 1), ("gradients", 1), ("optimizer states", 2)):
        assert found.between_steps[category] == pytest.approx(4 * copies * weights / 8, rel=1e-6)
    assert found.bytes_sent["dp", "reduce_scatter"] == pytest.approx(7 / 8 * 4 * weights, rel=1e-6)  # float32
    assert found.peak["parameters"] > found.between_steps["parameters"]  # gathered ones


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"layout": Layout(tp=3)}, "tp"),
        ({"layout": Layout(dp=4)}, "batch 2 is not a multiple of dp 4 x mb 1: make it 4"),
        ({"layout": Layout(cp=2), "seq": 30}, "seq 30"),
        ({"layout": Layout(dp=2), "rank": 2}, "rank 2 of 2: it is 0 to 1"),
        ({"moe": {"experts": 4, "top_k": 5}}, "top_k 5"),
        ({"layout": Layout(dp=2, ep=2), "moe": {"experts": 3, "top_k": 2}}, "ep 2 does not divide experts"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(arguments, message):
    before = state()
    with pytest.raises(ValueError, match=message) as caught:
        dry_run(**{"config": SIZES, "layout": Layout(), "batch": 2, "seq": SEQ} | arguments)
    assert "\n" not in str(caught.value)
    assert state() == before


WIDE, FINE = {"experts": 8, "top_k": 2, "ffn_hidden": 704}, {"experts": 32, "top_k": 8, "ffn_hidden": 176}
MIXTURES = [("dp4,ep2,zero1", WIDE), ("dp2,tp2,ep2,sp", WIDE), ("dp4,ep4,zero1", FINE), ("dp2,tp2,ep2,sp,full", FINE)]


# Half the parameters of these mixtures are experts'. Dense models of this size: 0.94 (dp4,zero1) to 1.09 (tp4,sp).
@pytest.mark.parametrize("words, moe", MIXTURES, ids=[f"{words},k{moe['top_k']}" for words, moe in MIXTURES])
def test_the_planner_is_as_near_for_a_mixture_as_for_a_dense_model(words, moe):
    """States within 1%; with what backward needs where many choices are weighted, all bytes within 9%."""
    config = ModelConfig(2, 512, 8, 4, 1408, 2048)
    kept = {"weight_bytes": 2, "gradient_bytes": 4, "optimizer_bytes": 12, "reserved_bytes": 0.0}
    layout, course = Layout.parse(words), CLUSTERS["H100"].with_software(**kept)
    found, said = dry_run(config, layout, 4, 1024, moe=moe), estimate(config, course, layout, 4, 1024, moe)
    assert said.needed_bytes == pytest.approx(found.peak_bytes, rel=0.09)
    names = ("parameters", "gradients", "optimizer states")  # FP32 weights count as one of the outer two
    states = [sum(parts[name] for name in names) for parts in (said.memory, found.peak)]
    assert float(states[0]) == pytest.approx(states[1], rel=0.01)


def test_nothing_is_left_behind():
    before = state()
    dry_run(SIZES, Layout.parse("dp2,ep2"), 4, SEQ, moe={"experts": 4, "top_k": 2})
    assert state() == before
    words = ["dp2,zero3", "pp2,tp2,sp,zero1", "dp2,zero3"]
    first, _, again = (dry_run(SIZES, Layout.parse(each), 4, SEQ) for each in words)
    assert first == again
    assert state() == before

    def breaks(model):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        dry_run(SIZES, Layout.parse("dp2,zero3"), 4, SEQ, extra=[breaks])
    assert state() == before


def test_a_process_group_stays_as_it_is():
    with fake_ranks(Layout(dp=4), 1):
        with pytest.raises(ValueError, match="a rank of a process group already") as caught:
            dry_run(SIZES, Layout(dp=2), 2, SEQ)
        assert "\n" not in str(caught.value)
        assert (dist.get_rank(), dist.get_world_size()) == (1, 4)


@pytest.mark.parametrize("axis", ["dp", "pp", "cp", "tp"])
def test_every_rank_says_which_group_it_is_in(axis):
    layout = Layout.parse("dp4,pp3,cp2,tp2,ep2")
    groups = {rank: group for group in groups_along(layout, axis) for rank in group}
    for own in (0, 17, 47):
        said = groups[own], "a word", (groups[own], [])
        for other in range(layout.ranks):
            assert simulate_peer_object(other, own, said, layout) == (groups[other], "a word", (groups[other], []))
    assert shifted([0, 12], [0, 0, 0, 0, 0], layout) == [0, 12]


def test_bytes_are_sorted_by_the_axes_of_their_group():
    layout = Layout.parse("dp4,pp2,tp2,ep2")
    names = {(0, 1): "tp", (0, 2): "pp", (0, 4): "ep", (0, 8): "copies", (0, 4, 8, 12): "dp", tuple(range(16)): "all"}
    for ranks, name in names.items():
        assert axes_between(ranks, layout) == {"all": "dp x pp x tp"}.get(name, name)
    layout = Layout.parse("dp4,pp2,cp2,zero3,keep,rep2")  # the shard group of rank 0: dp places 0 and 1, with cp
    names = {(0, 1, 4, 5): "dp_shard x cp", (0, 8): "dp_replicate", (0, 1, 4, 5, 8, 9, 12, 13): "dp x cp", (0, 1): "cp"}
    for ranks, name in names.items():
        assert axes_between(ranks, layout) == name
    layout = Layout.parse("dp4,pp2,tp2,ep2")
    calls = [("send", (0, 2), 5), ("all_reduce", (0, 1), 7), ("recv", (0, 2), 0), ("send", (0, 2), 1)]
    traffic = Traffic([Record(name, ranks, 0, sent, None) for name, ranks, sent in calls])
    assert bytes_by_axes(traffic, layout) == {("pp", "send"): 6, ("tp", "all_reduce"): 7}


def test_the_table_adds_up():
    gib = 2**30
    between_steps = {"parameters": gib, "optimizer states": 2 * gib, "activations": 0, "gradients": gib, "temporary": 0}
    peak = between_steps | {"activations": 3 * gib}
    found = DryRun(Layout(dp=8), 3, between_steps, peak, {("dp", "all_reduce"): 7 * gib})
    assert found.peak_bytes == 7 * gib
    lines = str(found).splitlines()
    assert lines[0] == "rank 3 of 8, dp8"
    assert lines[-3].split() == ["together", "4.000", "7.000"]
    assert lines[-1].split() == ["dp", "all_reduce", "7.000"]
