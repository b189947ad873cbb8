"""course_lib.best_config.step_memory: notebook 01's bytes where both count the same, and what each degree divides.
Plain numpy.
"""

import pytest

from course_lib.best_config.clusters import CLUSTERS, Cluster
from course_lib.best_config.step_memory import head_in_layers, stage_parameters, step_memory
from course_lib.five_d.layouts import Layout
from course_lib.pipeline.actions import validate
from course_lib.pipeline.schedules import schedule_by_name
from course_lib.pipeline.stages import split_layers
from course_lib.single_gpu.memory import POLICIES, activation_bytes, layer_activations, param_count, training_bytes
from course_lib.single_gpu.model import PRESETS, ModelConfig
from some_layouts import EXPERTS, some_rows

SEQ = 512
STATES = ("parameters", "gradients", "optimizer states")
LLAMA, TIED = PRESETS["llama3-8B"], PRESETS["llama3.2-1B"]
QWEN = ModelConfig(36, 2560, 32, 8, 9728, 151936, head_size=128)  # as Qwen3-4B, untied: 32 heads of 128 are 1.6 h
H100 = CLUSTERS["H100"]


def counted(config: ModelConfig, policy: str = "bf16") -> Cluster:
    """A cluster whose software keeps what notebook 01 counts: its `Transformer`, and a policy's bytes a parameter."""
    kept, h = layer_activations(config, SEQ), config.hidden
    whole = (kept["norms"] + kept["norm outputs"]) / 2 / h  # elements of 2 bytes
    keys = 2 * config.kv_heads * config.head_dim  # step_memory adds K and V itself, and counts the 2 h of them in
    weights, gradients, optimizer = POLICIES[policy]
    return H100.with_software(
        kept_outside_tp=whole, kept_hidden=whole + 2 + (kept["attention"] / 2 - keys) / config.attention_width,
        kept_ffn=kept["mlp"] / 2 / config.ffn_hidden, logit_bytes=(4.0, 4.0), held=(0.0, 0.0), reserved_bytes=0.0,
        weight_bytes=weights, gradient_bytes=gradients, optimizer_bytes=optimizer,
    )  # fmt: skip


def memory(config: ModelConfig, cluster: Cluster, words: str, m: int = 8, seq: int = SEQ, **more) -> dict[str, float]:
    """Bytes by part of a layout in words."""
    parts = step_memory(config, cluster, Layout.parse(words), m, seq, **more)
    return {name: float(part) for name, part in parts.items()}


UNTIED = [pytest.param(config, id=name) for name, config in (("untied", LLAMA), ("all heads", PRESETS["bench-8B"]))]


@pytest.mark.parametrize("config", [*UNTIED, pytest.param(TIED, id="tied")])
@pytest.mark.parametrize("policy", ["bf16", "bf16, fp32 gradients"])
def test_the_states_are_those_of_notebook_01(config, policy):
    cluster = counted(config, policy)
    for tp, dp, cp, zero in ((1, 1, 1, 0), (1, 8, 1, 1), (2, 4, 2, 2), (4, 2, 1, 3), (8, 4, 4, 3), (16, 1, 1, 0)):
        found = memory(config, cluster, f"dp{dp},cp{cp},tp{tp},zero{zero}")
        expected = training_bytes(config, 1, SEQ, policy, zero_stage=zero, dp=dp, tp=tp, cp=cp)
        last_norm = config.hidden * 20 * config.tied  # goes with the head, which a tied model has not
        assert {name: found[name] for name in STATES} == {
            name: pytest.approx(expected[name], rel=1e-9, abs=last_norm) for name in STATES
        }


@pytest.mark.parametrize(
    "config", [LLAMA, TIED, PRESETS["bench-8B"], QWEN], ids=["untied", "tied", "all heads", "wide heads"]
)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_the_activations_are_those_of_notebook_01(config, recompute):
    """Two things are small, and left out: the output of the last norm, and the numbers of tokens, targets and angles.
    One is more: where layers are recomputed, one of them is there whole; notebook 01 stops at the end of the forward.
    """
    cluster, kept = counted(config), layer_activations(config, SEQ)
    for tp, sp, cp, b in ((1, False, 1, 1), (1, False, 4, 2), (4, True, 1, 2), (8, True, 2, 1), (16, True, 1, 1)):
        tokens, outside = b * SEQ / cp, tp if sp else 1
        words = f"cp{cp},tp{tp},mb{b}{',sp' * sp}" + f",{recompute}" * (recompute != "none")
        found = memory(config, cluster, words)
        expected = activation_bytes(config, b, SEQ, recompute=recompute, tp=tp, sp=sp, cp=cp)
        left_out = tokens * (kept["norms"] / 2 + kept["norm outputs"] / 2) / outside
        left_out += tokens * (16 + 2 * config.head_dim / b)
        if recompute == "full":
            copies = 2 * 2 * config.kv_heads * config.head_dim * (max(1, tp / config.kv_heads) - 1)  # of K and V
            expected += tokens * (sum(kept.values()) + copies) / tp
        assert found["activations"] + found["logits"] == pytest.approx(expected - left_out, rel=1e-6), words
        assert found["buffers"] == found["reserved"] == 0


@pytest.mark.parametrize("sp", [False, True])
def test_tp_without_sp_leaves_norms_whole(sp):
    cluster = counted(LLAMA)
    one, four = (memory(LLAMA, cluster, words)["activations"] for words in ("tp1", "tp4,sp" if sp else "tp4"))
    kept = layer_activations(LLAMA, SEQ)
    whole = LLAMA.layers * SEQ * (kept["norms"] + kept["norm outputs"])
    assert four == pytest.approx(one / 4 if sp else (one - whole) / 4 + whole)


def test_a_layer_that_is_recomputed_is_as_large_as_one_that_is_kept():
    config, words = PRESETS["bench-8B"], "tp8,full"
    one_layer = memory(config, H100, "tp8")["activations"] / config.layers
    inputs = config.layers * SEQ * 2 * config.hidden
    assert memory(config, H100, words)["activations"] == pytest.approx(inputs + one_layer)


# What ZeRO divides.


@pytest.mark.parametrize(
    "zero, divided", enumerate([(), ("optimizer states",), ("optimizer states", "gradients"), STATES])
)
def test_zero_divides_its_own_parts_by_dp_times_cp(zero, divided):
    one = memory(LLAMA, H100, "dp1")
    for dp, cp in ((8, 1), (2, 4), (1, 8), (64, 2)):
        split = memory(LLAMA, H100, f"dp{dp},cp{cp},zero{zero}")
        for name in STATES:
            assert split[name] == pytest.approx(one[name] / (dp * cp if name in divided else 1)), (name, dp, cp)
        assert (split["gathered weights"] > 0) == (zero == 3)


def test_zero_3_has_two_layers_gathered_and_keeps_a_stage_where_it_says_so():
    one_layer = float(sum(stage_parameters(LLAMA, Layout(tp=2), None, 1, 0, 0)))
    assert memory(LLAMA, H100, "dp8,tp2,zero3")["gathered weights"] == 2 * one_layer * H100.software.weight_bytes
    kept, whole = memory(LLAMA, H100, "dp8,pp2,zero3,keep"), memory(LLAMA, H100, "dp8,pp2,zero1")
    assert kept["gathered weights"] == 0 and kept["parameters"] == whole["parameters"]
    assert kept["gradients"] == whole["gradients"] and kept["optimizer states"] == whole["optimizer states"]


def test_replicas_of_zero_3_divide_by_the_ranks_of_one_group():
    """But experts, which all of dp x cp / ep share out as they do without."""
    for words, rep in (("dp8,zero3", 4), ("dp4,cp2,zero3", 2), ("dp8,zero3", 8), ("dp8,pp2,zero3,keep", 2)):
        whole = memory(LLAMA, H100, words)
        split = memory(LLAMA, H100, f"{words},rep{rep}")
        for name in STATES if "keep" not in words else ["optimizer states"]:
            assert split[name] == pytest.approx(whole[name] * rep), (words, rep, name)
        assert split["activations"] == whole["activations"] and split["gathered weights"] == whole["gathered weights"]
    dense, experts = stage_parameters(LLAMA, Layout(ep=2), EXPERTS, LLAMA.layers, 1, 1)
    split = memory(LLAMA, H100, "dp8,ep2,zero3,rep4", moe=EXPERTS)["optimizer states"]
    assert split == pytest.approx((dense / 2 + experts / 4) * H100.software.optimizer_bytes)


@pytest.mark.parametrize("moe", [None, EXPERTS])
def test_the_ranks_together_hold_the_model_or_more(moe):
    """Optimizer states of all ranks, with everything sharded: those of the whole model, and no fewer."""
    whole = float(sum(stage_parameters(LLAMA, Layout(), moe, LLAMA.layers, 1, 1))) * H100.software.optimizer_bytes
    for words in ("dp8,zero1", "dp4,tp2,sp,zero2", "dp2,cp4,zero3", "dp2,pp2,tp2,zero1"):
        layout = Layout.parse(words)
        assert memory(LLAMA, H100, words, moe=moe)["optimizer states"] * layout.ranks >= whole * (1 - 1e-9), words


def test_the_ranks_together_hold_all_experts():
    """ep is a part of dp: an expert's states are shared by dp x cp / ep ranks."""
    whole = float(sum(stage_parameters(LLAMA, Layout(), EXPERTS, LLAMA.layers, 1, 1))) * H100.software.optimizer_bytes
    for ep in (2, 4, 8):
        split = memory(LLAMA, H100, f"dp8,ep{ep},zero1", moe=EXPERTS)["optimizer states"]
        assert split * 8 >= whole * (1 - 1e-9), ep


# What the degrees do.


def test_the_parameters_of_all_stages_are_the_models():
    for config in (LLAMA, TIED):
        last_norm = config.hidden * config.tied  # goes with the head
        found = sum(stage_parameters(config, Layout(), None, config.layers, 1, int(not config.tied)))
        assert found == param_count(config) - last_norm
    assert memory(TIED, H100, "dp1")["parameters"] == pytest.approx(2 * param_count(TIED), rel=1e-4)


def test_more_tp_pp_or_ep_is_never_more_states():
    for name, top, moe in (("tp", 32, None), ("pp", 32, None), ("ep", 8, EXPERTS)):
        sizes = []
        for degree in (2**n for n in range(top.bit_length())):
            layout = f"dp8,ep{degree}" if name == "ep" else f"{name}{degree}"
            found = memory(LLAMA, H100, layout, moe=moe)
            sizes.append(sum(found[part] for part in STATES))
        assert sizes == sorted(sizes, reverse=True) and sizes[-1] < sizes[0] / 2, name


def test_more_tp_and_cp_is_never_more_activations():
    for words in ("tp{},sp", "tp{}", "cp{}"):
        sizes = [memory(LLAMA, H100, words.format(n))["activations"] for n in (2, 4, 8, 16)]
        assert sizes == sorted(sizes, reverse=True) and sizes[-1] < sizes[0], words


def test_k_and_v_are_not_split_below_a_head():
    eight, sixteen = (memory(LLAMA, counted(LLAMA), f"tp{tp},sp")["activations"] for tp in (8, 16))
    keys = LLAMA.layers * SEQ * 2 * 2 * LLAMA.kv_heads * LLAMA.head_dim
    assert sixteen == pytest.approx((eight - keys / 8) / 2 + keys / 8)


def one_stage(config: ModelConfig, layout: Layout, rank: int, held: float, seq: int) -> float:
    """Bytes of a pipeline's rank on H100s: `held` micro-batches of the layers that notebook 09 gives it."""
    software, last = H100.software, rank == layout.pp - 1
    n = len(split_layers(config.layers, layout.pp)[rank])
    parameters = float(sum(stage_parameters(config, layout, None, n, int(rank == 0), int(last))))
    states = parameters * (software.weight_bytes + software.gradient_bytes + software.optimizer_bytes)
    layer = memory(config, H100, "dp1", 1, seq)["activations"] / config.layers
    return states + held * n * layer + last * seq * config.vocab * software.logit_bytes[1] + software.reserved_bytes


def fullest(config: ModelConfig, layout: Layout, m: int, seq: int) -> tuple[float, float]:
    """What step_memory says, and the fullest of all ranks by `validate`."""
    held = validate(schedule_by_name(layout.schedule, layout.pp, m, layout.virtual))
    parts = layout.virtual if layout.schedule == "interleaved" else 1
    ranks = [one_stage(config, layout, rank, held[rank] / parts, seq) for rank in range(layout.pp)]
    return sum(memory(config, H100, str(layout), m, seq, host_ahead=False).values()), max(ranks)


@pytest.mark.parametrize("seq", [512, 4096, 16384])
def test_1f1b_holds_what_its_fullest_stage_holds(seq):
    """Where the larger stages are only in the middle, step_memory takes the second rank for one: more, and not much."""
    for pp in (2, 4, 8, 16, 32, 64):
        found, expected = fullest(PRESETS["llama3-405B"], Layout(pp=pp), 64, seq)
        assert found == pytest.approx(expected), f"126 layers and both ends: the same for all of {pp} stages"
    for pp in (2, 3, 4, 5, 8, 16):
        found, expected = fullest(PRESETS["llama3-70B"], Layout(pp=pp), 64, seq)
        assert expected * (1 - 1e-9) <= found <= 1.25 * expected, pp


def test_interleaved_holds_what_its_fullest_stage_holds():
    """The second rank of an interleaved pipeline holds p + (p - 3)/v, and here a layer more than the first."""
    found, expected = fullest(PRESETS["llama3-405B"], Layout(pp=32, schedule="interleaved"), 64, 16384)
    assert found >= expected * (1 - 1e-9)


def test_schedules_by_what_they_hold():
    """Naive holds least; AFAB all; ZB-H2 about twice 1F1B, DualPipe two copies of the parameters."""
    found = {name: memory(LLAMA, H100, f"pp4,{name}", 16) for name in ("naive", "afab", "1f1b", "zb-h2", "dualpipe")}
    held = {name: parts["activations"] for name, parts in found.items()}
    assert held["naive"] < held["1f1b"] < held["zb-h2"] < held["afab"]
    table = LLAMA.vocab * LLAMA.hidden * 2  # bytes of an embedding in BF16; the head is as large
    stages = found["1f1b"]["parameters"] - table
    assert found["dualpipe"]["parameters"] == pytest.approx(2 * stages + 2 * table, rel=0.02), "two stages, one head"


def test_buffers_wait_only_where_the_host_runs_ahead_and_tp_gathers():
    efa = CLUSTERS["H100, EFA"]
    assert memory(LLAMA, efa, "tp4,sp")["buffers"] > 0
    assert memory(LLAMA, efa, "tp4,sp", host_ahead=False)["buffers"] == 0
    assert memory(LLAMA, efa, "dp4")["buffers"] == 0
    assert memory(LLAMA, H100, "tp4,sp")["buffers"] == 0, "nanotron's alone"


def test_what_is_recomputed_by_operation_is_the_softwares():
    titan = H100.with_software(selective_keeps=0.3, selective_again=0.5)
    none, ours, theirs = (
        memory(LLAMA, cluster, words, seq=4096)["activations"]
        for cluster, words in ((titan, "dp1"), (H100, "selective"), (titan, "selective"))
    )
    assert ours == none, "a flash core keeps no scores"
    assert theirs == pytest.approx(none * (0.3 + 0.7 / LLAMA.layers)), "and one layer's rest, anew"


def test_gathered_weights_are_in_16_bits_whatever_is_kept():
    two, four = (memory(LLAMA, H100.with_software(weight_bytes=size), "dp8,zero3") for size in (2, 4))
    assert four["parameters"] == 2 * two["parameters"] and four["gathered weights"] == two["gathered weights"] > 0


def test_full_recomputation_keeps_the_inputs_alone():
    none, full = (memory(LLAMA, H100, words, seq=4096)["activations"] for words in ("dp1", "full"))
    inputs = LLAMA.layers * 4096 * 2 * LLAMA.hidden
    assert inputs < full < none / 5
    assert full - inputs == pytest.approx(none / LLAMA.layers, rel=0.2), "and one layer, anew"


def test_the_head_is_worth_layers():
    assert head_in_layers(PRESETS["bench-1B"]) == pytest.approx(4.0)
    assert (
        head_in_layers(PRESETS["bench-80B"]) < head_in_layers(PRESETS["bench-8B"]) < head_in_layers(PRESETS["bench-3B"])
    )


# Arrays.


@pytest.mark.parametrize("software", ["H100", "H100, EFA"])
@pytest.mark.parametrize("moe", [None, EXPERTS])
def test_arrays_are_row_by_row_the_same_as_single_layouts(software, moe):
    cluster, batch, seq = CLUSTERS[software], 64, 2048
    table = some_rows(LLAMA, 64, batch, seq, moe, 150)
    m = batch / (table.dp * table.micro_batch)
    assert len(set(table.schedule)) == 8 and len(set(table.pp)) > 3 and 3 in table.zero_stage
    found = step_memory(LLAMA, cluster, table, m, seq, moe)
    assert min(part.min() for part in found.values()) >= 0
    for row in range(len(table)):
        single = step_memory(LLAMA, cluster, table[row], m[row], seq, moe)
        assert {name: part[row] for name, part in found.items()} == {n: pytest.approx(p) for n, p in single.items()}


def test_a_program_keeps_its_rows_of_each_choice():
    moe, layout, tokens = {"experts": 8, "top_k": 2}, "dp8,ep8,zero1", SEQ
    kept = {
        rows: memory(LLAMA, H100.with_software(kept_rows=rows), layout, moe=moe)["activations"] for rows in (0.5, 2)
    }
    assert kept[2] - kept[0.5] == pytest.approx(LLAMA.layers * 2 * tokens * 1.5 * 2 * LLAMA.hidden)
