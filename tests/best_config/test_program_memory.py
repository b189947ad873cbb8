"""course_lib.best_config.program_memory, and what step_memory makes of it: counts of saved tensors of the course's
layers, formulas that were published, and runs that ran. Sizes alone: fake tensors, no GPU.
"""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from course_kit.planning.published_errors import refused_by_program, refused_runs
from course_kit.planning.published_runs import load_published, predicted_step
from course_lib.best_config.clusters import CLUSTERS, Cluster
from course_lib.best_config.planner import estimate
from course_lib.best_config.software import SOFTWARE
from course_lib.best_config.step_memory import (
    chunk_rows,
    fp8_saved,
    kept_elements,
    loss_bytes,
    stage_parameters,
    step_memory,
)
from course_lib.best_config.step_time import step_time
from course_lib.five_d.layouts import Layout
from course_lib.flash_attention.operator import use_flash_attention
from course_lib.fp8.program import apply_fp8
from course_lib.fp8.recipes import RECIPES
from course_lib.kernels.fused_loss import chunk_size, linear_cross_entropy
from course_lib.kernels.program import use_kernels
from course_lib.single_gpu.memory import gpt_layer_bytes, param_count
from course_lib.single_gpu.model import PRESETS, ModelConfig, Transformer, rope_angles

SEQ = 256
LLAMA = PRESETS["llama3-8B"]
SMALL = ModelConfig(layers=1, hidden=512, heads=4, kv_heads=2, ffn_hidden=1408, vocab=1024)
WIDE = ModelConfig(layers=1, hidden=512, heads=8, kv_heads=4, ffn_hidden=1024, vocab=1024, head_size=128)
RUNS = load_published(Path(__file__).parents[2] / "data" / "published_throughput.csv")


def with_program(name: str, cluster: str = "H100", **changes) -> Cluster:
    """A cluster with a program's software, some of it changed."""
    return dataclasses.replace(CLUSTERS[cluster], software=SOFTWARE[name]).with_software(**changes)


def saved_bytes(run, not_counted: list[torch.Tensor]) -> int:
    """Bytes that autograd keeps of what `run` computes, each storage once, without those of some tensors."""
    left_out, kept = {tensor.untyped_storage()._cdata for tensor in not_counted}, {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = run()
    assert result.requires_grad
    return sum(t.untyped_storage().nbytes() for pointer, t in kept.items() if pointer not in left_out)


def layer_bytes(config: ModelConfig, kernels: bool, recipe: str) -> int:
    """Bytes that a layer in BF16 keeps for backward, without its parameters and the angles."""
    with FakeTensorMode():
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = Transformer(config)
        finally:
            torch.set_default_dtype(torch.float32)
        model = use_flash_attention(use_kernels(model) if kernels else model)
        apply_fp8(model, RECIPES[recipe])
        x = torch.zeros(1, SEQ, config.hidden, dtype=torch.bfloat16, requires_grad=True)
        cos, sin = (part.to(torch.bfloat16) for part in rope_angles(torch.arange(SEQ), config))
        return saved_bytes(lambda: model.blocks[0](x, cos, sin), [*model.parameters(), cos, sin])


@pytest.mark.parametrize("config", [SMALL, WIDE, LLAMA], ids=["small", "wide heads", "llama3-8B"])
def test_a_layer_with_kernels_keeps_what_is_counted(config):
    """Beside it come a number for each row of a norm and each query of attention, in FP8 a scale for each tile."""
    for recipe, products, small in (("BF16", "bf16", 0.003), ("DeepSeek-V3", "fp8", 0.015)):
        cluster = with_program("course, kernels", matmul_dtype=products)
        elements = kept_elements(config, cluster, Layout()) - fp8_saved(config, cluster, Layout())
        counted = layer_bytes(config, True, recipe) / SEQ / 2
        assert elements < counted < elements * (1 + small), products


def test_fp8_saves_as_much_in_an_eager_layer():
    cluster = with_program("course", matmul_dtype="fp8")
    counted = layer_bytes(LLAMA, False, "BF16") - layer_bytes(LLAMA, False, "DeepSeek-V3")
    assert counted / SEQ / 2 == pytest.approx(float(fp8_saved(LLAMA, cluster, Layout())), rel=0.1)


def test_fp8_changes_what_is_kept_and_splits_it_as_bf16():
    """tp splits the inputs of the last matrix, sequence parallelism the norms' outputs too; torchao keeps 16 bits."""
    for words in ("dp8,zero1", "dp4,tp2,zero1", "dp2,tp4,sp,zero1", "dp8,zero1,full"):
        layout = Layout.parse(words)
        found = {
            products: step_memory(LLAMA, with_program("Megatron-Core", matmul_dtype=products), layout, 4, 4096)
            for products in ("bf16", "fp8")
        }
        outside = layout.tp if layout.sequence_parallel else 1
        saved = LLAMA.hidden / outside + (LLAMA.ffn_hidden - LLAMA.hidden) / 2 / layout.tp
        layers = LLAMA.layers if layout.recompute == "none" else 1
        less = found["bf16"]["activations"] - found["fp8"]["activations"]
        assert less == pytest.approx(2 * 4096 * layers * saved)
        one_layer = sum(stage_parameters(LLAMA, layout, None, 1, 0, 0))
        copies = found["fp8"]["parameters"] - found["bf16"]["parameters"]
        assert copies == pytest.approx(2 * LLAMA.layers * one_layer), "a layer's weights in FP8, both ways"
    assert fp8_saved(LLAMA, with_program("torchtitan", matmul_dtype="fp8"), Layout()) == 0


# The loss without logits.


def test_chunks_are_those_of_the_fused_loss():
    for hidden, vocab in ((4096, 128256), (512, 1000), (1, 7), (16384, 16032), (768, 50257)):
        tokens = np.array([1, 2, 33, 700, 4096, 8192, 131072])
        expected = [chunk_size(int(t), hidden, vocab) for t in tokens]
        assert chunk_rows(tokens, hidden, vocab).tolist() == expected, (hidden, vocab)


def test_the_fused_loss_keeps_two_gradients():
    """Beside the number of rows. The rest of loss_bytes is transient: a chunk of logits exists in the forward only."""
    with FakeTensorMode():
        hidden = torch.zeros(SEQ, LLAMA.hidden, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.zeros(LLAMA.vocab, LLAMA.hidden, dtype=torch.bfloat16, requires_grad=True)
        targets = torch.zeros(SEQ, dtype=torch.int64)
        kept = saved_bytes(lambda: linear_cross_entropy(hidden, weight, targets), [hidden, weight, targets])
    assert kept == 2 * SEQ * LLAMA.hidden + 4 * LLAMA.vocab * LLAMA.hidden + 8
    counted = float(loss_bytes(LLAMA, with_program("course, kernels"), Layout(), SEQ))
    rows = max(chunk_size(SEQ, LLAMA.hidden, LLAMA.vocab), LLAMA.hidden)
    assert counted == kept - 8 + 2 * rows * LLAMA.vocab


@pytest.mark.parametrize("words", ["dp8,zero1", "dp2,pp4,zero1", "dp4,tp2,sp,zero1"])
def test_a_fused_loss_takes_less_memory_and_no_product_more(words):
    layout, seq = Layout.parse(words), 8192
    plain, fused = (with_program("course, kernels", fused_loss=fused) for fused in (False, True))
    most = [sum(step_memory(LLAMA, cluster, layout, 8, seq).values()) for cluster in (plain, fused)]
    assert most[1] <= most[0] and (most[1] < most[0] or layout.pp > 1)
    losses = [float(loss_bytes(LLAMA, cluster, layout, seq)) for cluster in (plain, fused)]
    assert losses[1] < 0.6 * losses[0]
    times = [step_time(LLAMA, cluster, layout, 8, seq)["output layer"] for cluster in (plain, fused)]
    assert times[0] == times[1]


def test_the_last_stage_is_fullest_where_its_logits_are_many():
    """A vocabulary of 2^20 words on two stages: the last one's logits decide, unless the loss has none."""
    config = ModelConfig(4, 1024, 8, 8, 2816, 2**20)
    plain, fused = (with_program("course, kernels", fused_loss=fused) for fused in (False, True))
    found = [step_memory(config, cluster, Layout(pp=2), 8, 4096)["logits"] for cluster in (plain, fused)]
    assert found[0] == pytest.approx(4096 * 2**20 * plain.software.logit_bytes[1])
    assert found[1] == pytest.approx(2 * 4096 * 1024 + 4 * 2**30 + 2 * 2**30)


# What has been published.


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_megatrons_layers_are_those_of_korthikanti_et_al(recompute):
    """34 h + 5 a s bytes a token; where a layer is computed again, one is there in full."""
    h, heads, seq = 6144, 48, 2048
    config = ModelConfig(48, h, heads, heads, 8 * h // 3, 51200)
    found = step_memory(config, with_program("Megatron-LM"), Layout(recompute=recompute), 8, seq)["activations"]
    again = {"none": 0, "selective": 5 * heads * seq, "full": gpt_layer_bytes(h, heads, seq)}[recompute]
    assert found / seq == pytest.approx(48 * gpt_layer_bytes(h, heads, seq, recompute) + again)


def test_selective_recomputation_of_torchtitan_keeps_every_other_product():
    """The input, q, v, the output of attention, gate, and the result of down: by count, of Llama 3's layers."""
    for name in ("llama3-8B", "llama3-70B"):
        config = PRESETS[name]
        kept = 4 * config.hidden + config.kv_heads * config.head_dim + config.ffn_hidden
        share = kept / kept_elements(config, with_program("torchtitan"), Layout())
        assert share == pytest.approx(SOFTWARE["torchtitan"].selective_keeps, rel=0.02)


# torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, tables 1 to 3: Llama 3.1 8B, GiB of the fullest GPU; without
# and with torch.compile, and with Float8 too.
TITAN = [
    ("dp8,zero3,mb2,selective", 16, 8192, (82.4, 77.0, 76.8)),
    ("dp128,zero3,mb2,selective", 256, 8192, (67.0, 62.0, 61.8)),
    ("dp8,zero3,full", 8, 32768, (83.9,)),
    ("dp4,cp2,zero3,full", 4, 65536, (84.2,)),
    ("dp2,cp4,zero3,full", 2, 131072, (84.0,)),
    ("cp8,zero3,full", 1, 262144, (84.5,)),
]


@pytest.mark.parametrize("words, batch, seq, measured", TITAN, ids=[words for words, *_ in TITAN])
def test_torchtitans_readings(words, batch, seq, measured):
    found = estimate(LLAMA, with_program("torchtitan"), Layout.parse(words), batch, seq)
    for gib in measured:
        assert float(found.needed_bytes) / 2**30 == pytest.approx(gib, rel=0.08)


def test_a_run_of_torchtitan_that_is_out_of_memory():
    """Llama 2 70B on 64 A100 with selective recomputation: one sequence fits, two do not (its docs/performance.md)."""
    config = ModelConfig(80, 8192, 64, 8, 28672, 32000)
    one, two = (
        estimate(
            config, with_program("torchtitan", "A100"), Layout.parse(f"dp64,zero3,mb{mb},selective"), 64 * mb, 4096
        )
        for mb in (1, 2)
    )
    assert one.fits and not two.fits


def test_fsdp_gathers_in_bf16_and_keeps_fp32_shards():
    """Of ZeRO-2 all weights are gathered, of ZeRO-3 two layers; the shards are there in both."""
    cluster, params = with_program("llm-foundry"), param_count(LLAMA)
    two, three = (step_memory(LLAMA, cluster, Layout.parse(f"dp8,zero{zero}"), 1, 2048) for zero in (2, 3))
    for found in (two, three):
        states = found["parameters"] + found["gradients"] + found["optimizer states"]
        assert states == pytest.approx(16 * params / 8, rel=1e-3)
    assert two["gathered weights"] == pytest.approx(2 * params, rel=1e-3)
    assert three["gathered weights"] < two["gathered weights"] / 8


def test_metas_layouts_of_405b_fit_its_program():
    meta = [run for run in RUNS if run.program == "Llama 3"]
    assert len(meta) == 3
    for run in meta:
        found = predicted_step(run)
        assert found.fits and found.needed_bytes > 0.8 * found.usable_bytes, run.layout
        other = estimate(run.config, with_program("course"), run.layout, run.batch, run.seq)
        assert not other.fits, "eager layers do not"


def test_runs_that_ran_are_not_refused():
    """But two of a recipe that keeps optimizer states in BF16 (nemotron4-340b-synth.yaml), which no other does."""
    refused = refused_runs(RUNS)
    assert {(run.program, run.model, run.gpus) for run in refused} <= {("NeMo", "Nemotron-4 340B", 128)}
    counts = refused_by_program(RUNS)
    assert sum(n for n, _ in counts.values()) == len(refused) and sum(of for _, of in counts.values()) == len(RUNS)
    assert counts["torchtitan"][0] == counts["Megatron-LM"][0] == 0
