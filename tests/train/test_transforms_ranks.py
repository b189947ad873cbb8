"""Kernels, FlashAttention, documents, FP8 and compilation in layouts, against one process without any of them. CPU."""

import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from course_lib.collectives.traffic import count_traffic
from course_lib.five_d.layouts import Layout
from course_lib.five_d.meshes import build_mesh
from course_lib.five_d.model import full_weights, parallelize
from course_lib.recompute.modes import IGNORED
from course_lib.single_gpu.model import ModelConfig, Transformer
from course_lib.single_gpu.placement import placement_of
from course_lib.train.documents import document_ends
from course_lib.train.settings import SettingsError, read_settings
from course_lib.train.transforms import check_transforms, compile_blocks, transforms

OF = ModelConfig(layers=2, hidden=32, heads=4, kv_heads=2, ffn_hidden=48, vocab=97)
WIDE = ModelConfig(layers=2, hidden=128, heads=4, kv_heads=2, ffn_hidden=128, vocab=97)  # whole 128 x 128 blocks
SEQ, BATCH, MOST = 16, 4, 4
LENGTHS = [[16], [5, 11], [1, 7, 8], [3, 4, 8, 1]]  # of the documents in each sequence


def packed() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs, targets and positions of packed documents, [BATCH, SEQ] each."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randint(0, OF.vocab, (BATCH, SEQ), generator=generator)
    targets = inputs.roll(-1, 1)
    positions = torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in LENGTHS])
    targets[:, :-1][positions[:, 1:] == 0] = IGNORED
    targets[:, -1] = IGNORED
    return inputs, targets, positions


def settings_of(words: str):
    """The settings of a command line, without document masks unless they are asked for."""
    return read_settings(words.split() + ["--no-document-masks"] * ("--document-masks" not in words))


def trained(cases: list[tuple[str, str]], config: ModelConfig = OF, steps: int = 2) -> list[dict]:
    """On a rank: of each layout and command line, the losses and norms of the steps, and the full weights."""
    of_all = []
    for text, words in cases:
        settings, layout = settings_of(words), Layout.parse(text)
        check_transforms(settings, layout)
        mesh = build_mesh(layout)
        extra = transforms(settings, layout, MOST)
        choices = {"lr": 1e-3, "eps": 1e-4, "weight_decay": 0.5, "fused": True}
        parallel = parallelize(config, layout, mesh, extra, **choices)
        if settings.compile.compile:
            compile_blocks(parallel.stages, settings.compile.backend)
        batch = [each.chunk(layout.dp)[mesh.dp.rank()] for each in packed()]
        inputs, targets, positions = (*batch[:2], batch[2] if settings.data.document_masks else None)
        result = {"numbers": []}
        for _ in range(steps):
            loss, norm = parallel.step(inputs, targets, 0.5, positions)
            result["numbers"] += [loss.item(), norm.item()]
        of_all.append(result | {"weights": {n: w.clone() for n, w in full_weights(parallel).items()}})
    return of_all


def check(of_ranks: list[list[dict]], cases: list, expected: list[dict], relative: float) -> None:
    for case, wanted, *of_case in zip(cases, expected, *of_ranks, strict=True):
        for rank, result in enumerate(of_case):
            assert result["numbers"] == pytest.approx(wanted["numbers"], rel=relative), (case, rank)
            for name, weight in result["weights"].items():
                off = (weight - wanted["weights"][name]).abs().max() / wanted["weights"][name].abs().max()
                assert off < relative * 10, (case, rank, name, off)


PLAIN = [
    ("tp2,sp,mb2", "--kernels"),
    ("cp2,mb4", "--attention flash"),
    ("cp2,ulysses,mb4", "--attention flash --kernels"),
    ("dp2,zero3,mb2", "--kernels --attention flash"),
    ("pp2,mb2", "--kernels"),
    ("dp2,zero3,mb2", "--compile --backend aot_eager"),
    ("tp2,sp,mb2", "--compile --backend aot_eager"),
]


def test_kernels_flash_and_compilation_train_as_one_process(two):
    expected = two(trained, [("dp2,mb2", "")])[0]
    check(two(trained, PLAIN), PLAIN, expected * len(PLAIN), 2e-5)


MASKED = [
    ("dp2,zero1,mb2", "--document-masks"),
    ("dp2,zero3,mb1,full", "--document-masks --kernels"),
    ("tp2,sp,mb2", "--document-masks"),
    ("pp2,mb1", "--document-masks"),
    ("tp2,mb2,selective", "--document-masks --attention flash"),
    ("pp2,mb2,zb-h1", "--document-masks --attention flash"),
    ("dp2,mb2", "--document-masks --compile --backend aot_eager"),
]


def documents_alone() -> float:
    """The mean loss of one process that sees each document as a sequence of its own."""
    model = Transformer(OF)
    inputs, targets, _ = packed()
    total, count = 0.0, 0
    for row, of_row, lengths in zip(inputs, targets, LENGTHS, strict=True):
        for document, goal in zip(row.split(lengths), of_row.split(lengths), strict=True):
            logits = model(document[None])[0]
            total += F.cross_entropy(logits, goal, ignore_index=IGNORED, reduction="sum").item()
            count += (goal != IGNORED).sum().item()
    return total / count


def test_documents_in_a_sequence_train_as_if_alone(two):
    of_ranks = two(trained, MASKED)
    wanted = of_ranks[0][0]
    assert wanted["numbers"][0] == pytest.approx(documents_alone(), rel=1e-5)
    check(of_ranks, MASKED, [wanted] * len(MASKED), 2e-5)


def test_ends_of_documents():
    _, _, positions = packed()
    ends = document_ends((positions == 0).cumsum(1), 5)
    starts = (positions.flatten() == 0).nonzero().flatten().tolist()
    assert ends.tolist() == starts + [64] * (4 * 5 + 1 - len(starts))
    assert ends.dtype == torch.int32


FP8_TWO = [
    ("dp2,zero3,mb2", "--fp8 deepseek-v3 --fp8-gather"),
    ("dp2,zero1,mb2", "--fp8 transformer-engine"),
]


def gathered_bytes(words: str) -> int:
    """On a rank: bytes of this rank's all-gathers in a step of ZeRO-3."""
    settings, layout = settings_of(words), Layout.parse("dp2,zero3,mb2")
    mesh = build_mesh(layout)
    parallel = parallelize(WIDE, layout, mesh, transforms(settings, layout, MOST), lr=1e-3, fused=True)
    inputs, targets = (each.chunk(2)[dist.get_rank()] for each in packed()[:2])
    with count_traffic() as traffic:
        parallel.step(inputs, targets)
    return sum(record.bytes for record in traffic.records if record.collective.startswith("all_gather"))


def test_fp8_with_zero3_and_the_8_bit_gather(two):
    """Losses and norms are those of float32 but for the rounding to 8 bits."""
    alone = two(trained, [("dp2,mb2", "")], WIDE)[0][0]["numbers"]
    for (case, words), *of_ranks in zip(FP8_TWO, *two(trained, FP8_TWO, WIDE), strict=True):
        for result in of_ranks:
            numbers = result["numbers"]
            assert all(map(math.isfinite, numbers)), (case, words)
            assert numbers == pytest.approx(alone, rel=0.05), (case, words)
            assert numbers[0] != alone[0], "8 bits round"
    plain, narrow = (two(gathered_bytes, f"--fp8 deepseek-v3{more}")[0] for more in ("", " --fp8-gather"))
    assert narrow < 0.5 * plain, (narrow, plain)


def undecayed(words: str, text: str) -> dict[str, bool]:
    """On a rank: which parameters have no weight decay."""
    layout = Layout.parse(text)
    extra = transforms(settings_of(words), layout, MOST)
    parallel = parallelize(OF, layout, build_mesh(layout), extra, lr=1e-3, weight_decay=0.5, fused=True)
    stays = {p: not group["weight_decay"] for group in parallel.optimizer.param_groups for p in group["params"]}
    named = [item for stage in parallel.stages.values() for item in stage.named_parameters()]
    assert all(placement_of(p) is not None for _, p in named)
    return {name.removeprefix("module."): stays[p] for name, p in named if p in stays}


@pytest.mark.parametrize("text", ["dp2", "dp2,zero3", "tp2"])
def test_parameters_without_decay(two, text):
    result = two(undecayed, "--no-decay embedding,q_proj", text)[0]
    expected = {name for name in result if any(each in name for each in ("norm", "embedding", "q_proj"))}
    assert {name for name, undecayed in result.items() if undecayed} == expected
    assert expected > {name for name in result if "norm" in name}


@pytest.mark.parametrize(
    "words, text, line",
    [
        ("--document-masks", "cp2", "document_masks with cp 2: ranks would share a document"),
        ("--fp8 deepseek-v3", "tp2,sp", "fp8 deepseek-v3 with sp: 8-bit layers take full sequences"),
        ("--fp8 deepseek-v3 --fp8-gather", "dp2,zero1", "fp8_gather with zero_stage 1: only zero3 gathers"),
        ("--compile --fp8 deepseek-v3", "dp2", "compile with fp8 deepseek-v3 on a CPU: inductor's code makes NaN"),
        ("--compile", "pp2,zb-h1", "compile with schedule zb-h1: it runs a layer's backward in two halves"),
        ("--kernels", "pp2,dualpipe", "kernels with schedule dualpipe: it runs"),
    ],
)
def test_what_does_not_combine_is_one_line(words, text, line):
    with pytest.raises(SettingsError, match=line) as error:
        check_transforms(settings_of(words), Layout.parse(text))
    assert "\n" not in str(error.value)


def test_a_pattern_that_fits_no_name():
    layout = Layout()
    *_, transform = transforms(settings_of("--no-decay embeding"), layout, MOST)
    with torch.device("meta"), pytest.raises(ValueError, match="no_decay: no parameter has embeding in its name"):
        transform(Transformer(OF))
