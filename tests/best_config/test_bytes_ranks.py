"""course_lib.best_config.step_time: its seconds are the program's bytes, on a cluster that sends a byte a second and
takes no time for anything else. CPU, gloo for experts; fake ranks otherwise.
"""

import dataclasses

import pytest
import torch
import torch.distributed as dist

from course_lib.best_config.clusters import Cluster
from course_lib.best_config.dry_runs import dry_run
from course_lib.best_config.planner import estimate
from course_lib.best_config.software import Software
from course_lib.collectives.traffic import count_traffic
from course_lib.five_d.layouts import Layout, groups_along
from course_lib.five_d.meshes import build_mesh
from course_lib.five_d.model import parallelize
from course_lib.single_gpu.model import ModelConfig

SEQ = 256
OF = ModelConfig(layers=2, hidden=512, heads=8, kv_heads=4, ffn_hidden=1408, vocab=1000)
DEEP = dataclasses.replace(OF, layers=6)  # with embedding and head 8: two for each of four stages
FREE = {name: 1.0 for name in Software.__dataclass_fields__ if name.endswith("efficiency")}
FREE |= {name: 0.0 for name in Software.__dataclass_fields__ if name.endswith("_s")}
FREE |= {"overlap": 0.0, "sharded_overlap": 0.0, "layer_traffic": 0.0, "gathers_again": True, "expert_spread": 0.0}
BYTES = Cluster("a byte a second", 1e40, 1e40, 1e40, 1.0, 1.0, software=Software(**FREE))

AXES = {"tensor parallel": ("tp",), "context parallel": ("cp",), "transfers": ("pp",)}
AXES["gradients"] = ("dp", "dp_shard", "dp_replicate")
LAYOUTS = [  # words, and the part that is compared
    ("dp4", "gradients"),
    ("dp4,zero1", "gradients"),
    ("dp4,zero2", "gradients"),
    ("dp4,zero3", "gradients"),
    ("dp2,pp4,zero3,keep", "gradients"),
    ("dp4,zero3,rep2", "gradients"),
    ("tp4", "tensor parallel"),  # embedding and head included
    ("tp4,full", "tensor parallel"),
    ("tp4,sp", "tensor parallel"),  # the head's input is gathered again too
    # the replay of a layer stops before its last sum
    ("dp2,tp2,sp,zero1,full", "tensor parallel"),
    ("tp2,pp2,sp", "tensor parallel"),  # of the last stage: with the head, without the embedding
    ("dp2,cp4,zero1", "context parallel"),
    ("dp2,cp4,ulysses,zero1", "context parallel"),
    ("dp2,pp4,zero1", "transfers"),
    ("pp4,interleaved", "transfers"),
    ("pp4,zb-v", "transfers"),
]


@pytest.mark.parametrize("words, part", LAYOUTS, ids=[f"{words} {part}" for words, part in LAYOUTS])
def test_the_planner_counts_the_bytes_that_the_program_sends(words, part):
    """Within 1%: of a pipeline's second rank, which sends most; of gradients the ranks' mean, as the planner has it."""
    layout = Layout.parse(words)
    config = DEEP if layout.pp > 1 or layout.zero_stage == 3 else OF
    batch = layout.dp * (4 if layout.pp > 1 else 2 if part == "gradients" else 1)
    expected = float(estimate(config, BYTES, layout, batch, SEQ).time[part])
    stages, found = groups_along(layout, "pp")[0], []
    for rank in stages if part == "gradients" else stages[:2][-1:]:
        sent = dry_run(config, layout, batch, SEQ, rank=rank, lr=1e-3).bytes_sent
        found.append(sum(size for (axes, _), size in sent.items() if axes in AXES[part]))
    assert sum(found) / len(found) == pytest.approx(expected, rel=0.01)


MOE = {"experts": 8, "top_k": 2, "ffn_hidden": 256, "shared": 1}
EXCHANGES = ["dp2,ep2,full", "dp2,cp2,ep2,tp2,sp,zero1"]


@pytest.mark.parametrize("words", EXCHANGES)
def test_the_planner_counts_the_bytes_of_the_exchange(words):
    """Within 1%. Tensor-parallel ranks exchange all tokens, with sequence parallelism too; full recomputation repeats
    the dispatch, and not the combine.
    """
    layout = Layout.parse(words)
    expected = float(estimate(OF, BYTES, layout, layout.dp, SEQ, MOE).time["expert parallel"])
    sent = dry_run(OF, layout, layout.dp, SEQ, moe=MOE, lr=1e-3).bytes_sent
    assert sent["ep", "all_to_all"] == pytest.approx(expected, rel=0.01)


RINGS = ["dp2,cp2,ep2,zero2", "dp4,ep2,zero3"]


@pytest.mark.parametrize("words", RINGS)
def test_the_planner_counts_the_bytes_of_the_gradients_of_experts(words):
    """Of dense weights over dp x cp, and of experts over dp / ep x cp: together within 1%."""
    layout = Layout.parse(words)
    config, batch = DEEP if layout.zero_stage == 3 else OF, 2 * layout.dp
    expected = float(estimate(config, BYTES, layout, batch, SEQ, MOE).time["gradients"])
    sent = dry_run(config, layout, batch, SEQ, moe=MOE, lr=1e-3).bytes_sent
    found = sum(size for (_, collective), size in sent.items() if collective in ("all_gather", "reduce_scatter"))
    assert found == pytest.approx(expected, rel=0.01)


def sent_to_experts(moe: dict) -> int:
    """On a rank: bytes of a step's all-to-alls of rows."""
    layout = Layout.parse("dp2,ep2")
    config = ModelConfig(2, 64, 4, 2, 48, 97)
    parallel = parallelize(config, layout, build_mesh(layout), moe=moe, dtype=torch.bfloat16, lr=1e-3)
    inputs, targets = torch.randint(97, (2, 2, 64), generator=torch.Generator().manual_seed(dist.get_rank())).unbind()
    with count_traffic() as traffic:
        parallel.step(inputs, targets)
    rows = [record.bytes for record in traffic.select("all_to_all").records if record.bytes >= 64]  # not their counts
    return sum(rows)


def test_the_planner_counts_the_bytes_of_experts(two):
    """A token goes once to each rank that has one of its experts; routers that have learned nothing: within 5%."""
    moe = {"experts": 8, "top_k": 2, "ffn_hidden": 24}
    layout = Layout.parse("dp2,ep2")
    expected = float(estimate(ModelConfig(2, 64, 4, 2, 48, 97), BYTES, layout, 4, 64, moe).time["expert parallel"])
    assert sum(two(sent_to_experts, moe)) / 2 == pytest.approx(expected, rel=0.05)
