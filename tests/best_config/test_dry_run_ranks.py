"""course_lib.best_config.dry_runs against steps of real ranks: memory by category, bytes by axes and collective. CPU,
gloo.
"""

import dataclasses

import pytest
import torch

from course_lib.best_config.dry_runs import dry_run, measured_step
from course_lib.five_d.layouts import Layout
from course_lib.five_d.meshes import build_mesh
from course_lib.five_d.model import parallelize
from course_lib.single_gpu.model import ModelConfig

SIZES = ModelConfig(layers=2, hidden=32, heads=4, kv_heads=2, ffn_hidden=44, vocab=97)  # 97 tokens go on no 2 ranks
SEQ = 64
WAYS = [  # words, tied, dtype of the products
    ("dp4,zero3,full", False, torch.bfloat16),
    ("dp2,cp2,zero1", True, torch.bfloat16),
    ("dp2,tp2,sp,zero2", False, torch.bfloat16),
    ("tp4", False, torch.float32),  # 2 K/V heads, each on 2 ranks
    ("dp2,pp2,zb-h1", True, torch.bfloat16),  # a tied embedding, summed over both stages' ranks
    ("dp2,pp2,zero3,keep", False, torch.bfloat16),
    ("dp4,zero3,rep2", True, torch.bfloat16),
]


def real_step(words: str, tied: bool, dtype: torch.dtype, batch: int, moe: dict | None = None) -> tuple:
    """On a rank: what the second step takes there."""
    layout = Layout.parse(words)
    config = dataclasses.replace(SIZES, tied=tied)
    parallel = parallelize(config, layout, build_mesh(layout), moe=moe, dtype=dtype, lr=1e-3)
    inputs, targets = torch.randint(SIZES.vocab, (2, batch // layout.dp, SEQ)).unbind()
    parallel.step(inputs, targets)
    return measured_step(parallel, inputs, targets)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way[0])
def test_a_dry_run_takes_what_a_real_rank_takes(way, ranks):
    words, tied, dtype = way
    layout = Layout.parse(words)
    batch = 2 * layout.dp * layout.micro_batch
    measured = ranks(real_step, *way, batch)
    for rank in (0, layout.ranks - 1):  # in the first stage and in the last
        between_steps, peak, sent = measured[rank]
        found = dry_run(dataclasses.replace(SIZES, tied=tied), layout, batch, SEQ, rank=rank, dtype=dtype, lr=1e-3)
        assert found.bytes_sent == sent
        # a real rank's collective may let go of its tensors a little later: a number at rest, more at the peak
        late = between_steps["temporary"] - found.between_steps["temporary"]
        assert 0 <= late <= 16 and found.between_steps | {"temporary": 0} == between_steps | {"temporary": 0}
        assert found.peak_bytes == pytest.approx(sum(peak.values()), rel=0.03)


# Where a token goes to all experts, numbers decide nothing, and the dry run knows every byte.
@pytest.mark.parametrize("words", ["dp4,ep2,zero3", "dp2,pp2,ep2,zero1"])
def test_a_mixtures_dry_run_takes_what_a_real_rank_takes(words, ranks):
    layout, moe = Layout.parse(words), {"experts": 4, "top_k": 4, "ffn_hidden": 24, "aux_loss_coeff": 0.01}
    batch = 2 * layout.dp * layout.micro_batch
    between_steps, peak, sent = ranks(real_step, words, False, torch.bfloat16, batch, moe)[0]
    found = dry_run(SIZES, layout, batch, SEQ, moe=moe, lr=1e-3)
    assert found.bytes_sent == sent and sent["ep", "all_to_all"] > 0
    assert found.between_steps | {"temporary": 0} == between_steps | {"temporary": 0}
    assert found.peak_bytes == pytest.approx(sum(peak.values()), rel=0.03)


def test_tokens_that_choose_send_what_even_shares_send(ranks):
    """Two of eight experts: a token's ranks are 1.57 of 2 on average, and a new router's choices are near to even."""
    layout, moe = Layout.parse("dp2,tp2,ep2,sp"), {"experts": 8, "top_k": 2, "ffn_hidden": 24}
    measured = ranks(real_step, str(layout), False, torch.bfloat16, 8, moe)
    found = dry_run(SIZES, layout, 8, SEQ, moe=moe, lr=1e-3)
    exchanged = [sent["ep", "all_to_all"] for _, _, sent in measured]
    assert found.bytes_sent["ep", "all_to_all"] == pytest.approx(sum(exchanged) / 4, rel=0.1)
    peaks = [sum(peak.values()) for _, peak, _ in measured]
    assert found.peak_bytes == pytest.approx(sum(peaks) / 4, rel=0.05)
