"""The chunked loss against stored logits, for the same model in the same layout: losses, norms and weights of three
steps, on 1, 2 and 4 ranks; and that no tensor has as many elements as the logits. CPU, gloo.
"""

import dataclasses
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from calls import Operations
from course_kit.ranks import Ranks
from course_lib.five_d.layouts import Layout
from course_lib.five_d.meshes import build_mesh
from course_lib.five_d.model import full_weights, parallelize
from course_lib.recompute.modes import IGNORED
from course_lib.single_gpu.model import ModelConfig, Transformer
from course_lib.train.loss import apply_chunked_loss, chunk_rows, chunked_cross_entropy
from split_models import differing

# 257 words go on no 2 ranks. 4 sequences of 16 tokens: several chunks, the last one smaller.
OF = ModelConfig(layers=2, hidden=32, heads=4, kv_heads=2, ffn_hidden=44, vocab=257)
MOE = {"experts": 4, "top_k": 2, "ffn_hidden": 12, "aux_loss_coeff": 0.02}
SEQ, SEQUENCES = 16, 4
WORDS = {
    1: ["dp1", "mb4"],
    2: ["tp2", "tp2,sp,mb2", "pp2,mb1", "pp2,zb-v", "pp2,dualpipe", "dp2,zero1", "dp2,zero2,full", "dp2,zero3,mb2"]
    + ["cp2,zigzag", "cp2,contiguous,zero3"],
    4: ["dp2,pp2,zero3,keep", "pp2,tp2,sp,zb-h1", "cp2,tp2,sp,zero3", "dp2,ep2,tp2,zero1"],
}
BFLOAT16 = ["dp2", "tp2,sp", "dp2,zero3", "pp2,zb-h1,zero1"]


def batch_of(step: int, vocab: int = OF.vocab) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets [b, s]; in step 1 a whole sequence does not count: a micro-batch of some layouts."""
    tokens = torch.randint(vocab, (SEQUENCES, SEQ + 1), generator=torch.Generator().manual_seed(step))
    inputs, targets = tokens[:, :-1].clone(), tokens[:, 1:].clone()
    targets[0, : step + 3] = IGNORED
    targets[step - 1 :: SEQUENCES] = IGNORED if step == 1 else targets[step - 1 :: SEQUENCES]
    return inputs, targets


def trained(words: list[str], dtype: torch.dtype = torch.float32) -> list[tuple[dict, dict]]:
    """On a rank, by layout: what three steps give with the chunked loss, and with stored logits."""
    results = []
    for number, word in enumerate(words):
        layout, pair = Layout.parse(word), []
        config = dataclasses.replace(OF, tied=number % 2 == 0)
        mesh, moe = build_mesh(layout), MOE if layout.ep > 1 else None
        for extra in ([apply_chunked_loss], []):
            parallel = parallelize(config, layout, mesh, extra, moe=moe, dtype=dtype, lr=1e-3, eps=1e-4)
            result = {}
            for step in range(3):
                local = [each.chunk(layout.dp)[mesh.dp.rank()] for each in batch_of(step)]
                result[f"loss {step}"], result[f"norm {step}"] = parallel.step(*local, max_norm=0.5)
            pair.append(result | full_weights(parallel))
        results.append(({k: v.clone() for k, v in pair[0].items()}, {k: v.clone() for k, v in pair[1].items()}))
    return results


def check(of_ranks: list[list[tuple[dict, dict]]], words: list[str], relative: float) -> None:
    for results in of_ranks:
        for word, (chunked, stored) in zip(words, results, strict=True):
            assert chunked.keys() == stored.keys() and stored["loss 0"] > 5, word
            wrong = differing(chunked, stored, relative)
            assert not wrong, (word, wrong)


def test_one_rank():
    with Ranks(1, "gloo") as one:
        check(one(trained, WORDS[1]), WORDS[1], 1e-5)


def test_two_ranks(two):
    check(two(trained, WORDS[2]), WORDS[2], 1e-5)


def test_four_ranks(ranks):
    check(ranks(trained, WORDS[4]), WORDS[4], 1e-5)


def test_bfloat16(two):
    """8 significant bits: within 2 %, weights after steps of 1e-3 too."""
    check(two(trained, BFLOAT16, torch.bfloat16), BFLOAT16, 0.02)


def trained_by_kernel(words: list[str], dtype: torch.dtype = torch.float32) -> list[tuple[dict, dict]]:
    """As `trained`, with the kernel of notebook 12b, which is interpreted on the CPU."""
    with mock.patch("course_lib.train.loss.has_kernel", lambda device: True):
        return trained(words, dtype)


def test_an_unsplit_head_with_the_kernel(two):
    """As on a GPU: its operator in a split backward, with ZeRO-3, and with weights that are cast once per step."""
    words = ["pp2,zb-v,mb2", "pp2,dualpipe", "dp2,zero3,mb2"]
    check(two(trained_by_kernel, words), words, 1e-5)
    check(two(trained_by_kernel, ["pp2,zb-h1,mb2", "dp2"], torch.bfloat16), ["pp2,zb-h1,mb2", "dp2"], 0.02)


class Largest(TorchDispatchMode):
    """`.numel`: the elements of the largest tensor that an operation returns."""

    numel = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        out = function(*arguments, **(keywords or {}))
        sizes = [each.numel() for each in tree_leaves(out) if torch.is_tensor(each)]
        self.numel = max([self.numel, *sizes])
        return out


def largest(words: list[str]) -> dict[str, tuple[int, int]]:
    """On a rank: elements of the largest tensor of a step that is no weight, chunked and with stored logits."""
    config, found = dataclasses.replace(OF, vocab=2048), {}
    for word in words:
        layout, sizes = Layout.parse(word), []
        mesh = build_mesh(layout)
        for extra in ([apply_chunked_loss], []):
            parallel = parallelize(config, layout, mesh, extra, optimizer_cls=torch.optim.SGD, lr=0.1)
            inputs, targets = (each.repeat(1, 20) for each in batch_of(0))
            with Largest() as watched:
                parallel.gradients(inputs, targets)
            sizes.append(watched.numel)
        found[word] = tuple(sizes)
    return found


def test_no_tensor_is_as_large_as_the_logits(two):
    """4 x 320 tokens and 2,048 words: 2.6 million logits, over 1 or 2 tp ranks; the head's weight has 65,536 elements.
    The largest tensor with the chunked loss is a weight's gradient or an activation.
    """
    tokens = SEQUENCES * SEQ * 20
    for found in two(largest, ["tp2,mb4", "tp2,sp,mb4", "cp2,mb4,zero3"]):
        for word, (chunked, stored) in found.items():
            assert stored >= tokens * 2048 // 2, word
            assert chunked <= 0.15 * stored, (word, chunked, stored)


def test_the_loss_of_one_process():
    """The loss and its gradients; bad targets; no gradients without grad; a second backward is refused."""
    hidden = torch.randn(2, 50, 16, requires_grad=True, generator=torch.Generator().manual_seed(0))
    weight = torch.randn(301, 16, requires_grad=True, generator=torch.Generator().manual_seed(1))
    targets = torch.randint(301, (2, 50), generator=torch.Generator().manual_seed(2))
    targets[0, 3:30] = IGNORED
    assert chunk_rows(100, 16, 301) == 8 and chunk_rows(100, 512, 256) == 100 and chunk_rows(0, 4, 9) == 1
    expected = F.cross_entropy((hidden @ weight.t()).flatten(0, 1), targets.flatten(), reduction="sum")
    loss = chunked_cross_entropy(hidden, weight, targets)
    torch.testing.assert_close(loss, expected)
    mine, theirs = (torch.autograd.grad(3 * each, (hidden, weight), retain_graph=True) for each in (loss, expected))
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with torch.no_grad(), Operations() as made:
        torch.testing.assert_close(chunked_cross_entropy(hidden, weight, targets), expected)
    assert made.count["mm"] == 13 and not made.count["addmm_"]  # of 13 chunks: no gradient is made
    targets[1, 0] = 301
    assert chunked_cross_entropy(hidden, weight, targets).isnan()
    targets[:] = IGNORED
    loss = chunked_cross_entropy(hidden, weight, targets)
    assert loss == 0 and not any(each.any() for each in torch.autograd.grad(loss, (hidden, weight)))


def test_a_model_with_the_chunked_loss():
    """Names, logits and tied weights stay; a head that is replaced is refused."""
    model = Transformer(dataclasses.replace(OF, tied=True))
    names, (inputs, targets) = list(model.state_dict()), batch_of(0)
    logits = model(inputs)
    assert apply_chunked_loss(model) is model and list(model.state_dict()) == names
    assert torch.equal(model(inputs), logits) and model.head.weight is model.embedding.weight
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    torch.testing.assert_close(model(inputs, None, targets), expected)
    with pytest.raises(ValueError, match="the head is LossLinear"):
        apply_chunked_loss(model)
