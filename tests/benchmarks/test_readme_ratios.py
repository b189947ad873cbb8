"""README's table of ratios is that of benchmarks/results/. Needs no GPU."""

import functools
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROWS = [line.split("|")[1:-1] for line in (ROOT / "README.md").read_text("utf-8").splitlines() if line.startswith("| ")]
TORCH = "ours against torch"
PLACES = {  # file and keys, "N ranks, gloo" aside, of each number in a row
    "data parallelism, in buckets": ("data_parallel", ["ours_against_ddp"]),
    "ZeRO-1": ("zero", ["ours_1 against zero_redundancy"]),
    "ZeRO-2": ("zero", ["ours_2 against zero_redundancy"]),
    "ZeRO-3": ("zero", ["ours_3 against fsdp2"]),
    "the same, parameters kept from forward to backward": ("zero", ["ours_3 against fsdp2, parameters kept"]),
    "ZeRO-3 on two replicas (HSDP)": ("zero", ["ours_hsdp against fsdp2_hsdp"]),
    "tensor parallelism": ("tensor_parallel", ["1 chunk against dtensor/step"]),
    "with sequence parallelism": ("context_parallel", ["sequence parallelism/sequence parallel against dtensor/step"]),
    **{
        f"ring attention, {tokens:,} tokens, contiguous and zig-zag": (
            "context_parallel",
            [f"attention, {tokens} tokens/ring {order} against sdpa/step" for order in ("contiguous", "zigzag")],
        )
        for tokens in (1024, 4096)
    },
    "GPipe, 1F1B, interleaved, ZB-V": (
        "pipeline",
        [f"Schedule{x}/{TORCH}" for x in ("GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble")],
    ),
    "PyTorch's interleaved zero bubble and DualPipeV, the same actions in our runner": (
        "pipeline",
        [f"Schedule{x}/same order against torch" for x in ("InterleavedZeroBubble", "DualPipeV")],
    ),
    "our ZB-V instead of these two, a different schedule": (
        "pipeline",
        [f"Schedule{x}/{TORCH}" for x in ("InterleavedZeroBubble", "DualPipeV")],
    ),
    "ZeRO-3 and 1F1B": ("five_d", [f"FSDP2, pipelining, N/{TORCH}"]),
    "ZeRO-3 gathered once per step, and tensor parallelism": ("five_d", [f"FSDP2 once a step, DTensor, N/{TORCH}"]),
    "ZeRO-3, tensor parallelism and 1F1B, 8 ranks": ("five_d", [f"FSDP2, DTensor, pipelining, N/{TORCH}"]),
}


def measured(file: str, ranks: str, place: str) -> str:
    """A ratio, as README has it."""
    keys = place.replace("N", ranks, 1).split("/") if file == "five_d" else [ranks, *place.split("/")]
    results = json.loads((ROOT / f"benchmarks/results/{file}_cpu.json").read_text())
    return f"{functools.reduce(lambda inside, key: inside[key], keys, results)['ratio']:.2f}"


def test_no_row_is_left_out():
    labels = [row[0].strip() for row in ROWS]
    first = labels.index("data parallelism, in buckets")
    assert labels[first : first + len(PLACES)] == list(PLACES)


@pytest.mark.parametrize("label", PLACES)
def test_a_row_says_what_was_measured(label):
    (row,) = ([cell.strip() for cell in row] for row in ROWS if row[0].strip() == label)
    file, places = PLACES[label]
    last = "8 ranks, gloo" if label.endswith("8 ranks") else "4 ranks, gloo"
    for ranks, said in (("2 ranks, gloo", row[2]), (last, row[3])):
        if said:
            assert said == ", ".join(measured(file, ranks, place) for place in places)
    assert row[3]


def test_notebook_09_says_what_two_halves_cost():
    text = (ROOT / "notebooks/09_pipeline.ipynb").read_text("utf-8")
    halves = json.loads((ROOT / "benchmarks/results/pipeline_cpu.json").read_text())["halves"]
    labels = {"ours": "ours", "torch": "PyTorch's own halves", "x and dY kept": "layers that keep x and dY for later"}
    for kind, label in labels.items():
        numbers = [f"{found[kind]['ratio']:.2f}" for found in halves.values()]
        assert f"| {' | '.join([label, *numbers])} |" in text


# README's second table, of one H200.


def on_h200(file: str) -> dict:
    return json.loads((ROOT / f"benchmarks/results/{file}_h200.json").read_text())


def ratios(rows: list[dict], rival: str, *passes: str) -> list[float]:
    """Our times by a rival's, of rows of these passes."""
    return [row["ours_against"][rival] for row in rows if row["pass"] in passes and rival in row["ours_against"]]


def span(found: list[float]) -> str:
    return f"{min(found):.2f} to {max(found):.2f}"


def test_the_h200s_table_says_what_was_measured():
    kernels, attention = on_h200("kernels")["rows"], on_h200("attention")["rows"]
    times = {row["way"]: row["step_s"] for row in on_h200("steps")["rows"]}
    product = {row["kernel"]: row["ours_against"] for row in on_h200("fp8")["products"]}
    turns = on_h200("steps").get("in turns")  # as long as there are none: of the same file, one after the other
    fp8 = turns["FP8, blocks against kernels"]["ratio"] if turns else times["FP8, blocks"] / times["kernels"]
    layers = {row["size"]: row for row in on_h200("fp8")["layers"] if row["pass"] == "forward and backward"}
    layer = layers["8,192 x 8,192 x 8,192"]["ours_against"]
    both = "forward", "backward"
    blocks = [product[f"product, 1 x 128, {other}"]["blockwise"] for other in ("128 x 128", "1 x 128")]
    expected = {
        "a training step": f"{times['kernels'] / times['eager']:.2f}, {times['kernels'] / times['compile']:.2f}",
        "the same in FP8": f"{fp8:.2f}",
        "softmax, RMSNorm": span(ratios(kernels, "compile", *both)),
        "the same, without ELU": span(ratios(kernels, "Liger", *both)),
        "attention, heads of 128": ", ".join(span(ratios(attention, "flash", name)) for name in both),
        "the same | cuDNN": ", ".join(span(ratios(attention, "cuDNN", name)) for name in both),
        "FP8 matmul": f"{product['product, tensor']['scaled_mm']:.2f}; {blocks[0]:.2f}, {blocks[1]:.2f}",
        "FP8 layer": f"{layer['BF16']:.2f}; {layer['torchao']:.2f}",
    }
    lines = (ROOT / "README.md").read_text("utf-8").splitlines()
    for start, numbers in expected.items():
        (line,) = [line for line in lines if line.startswith(f"| {start}")]
        assert line.split("|")[-2].strip() == numbers, line


DIRECT = "direct: FP8, blocks"  # with casts called as they are since then: by functions, not by operators


def test_the_note_below_the_h200s_table_says_what_is_known_of_the_fp8_step():
    """It goes with the next `make gpu`, which measures both steps in turns."""
    note = "has not been measured beside a BF16 step"
    readme = (ROOT / "README.md").read_text("utf-8").replace("\n", " ")
    assert (note in readme) == ("in turns" not in on_h200("steps"))
    if note in readme:
        lines = map(json.loads, (ROOT / "benchmarks/results/gpu_run_h200.jsonl").read_text().splitlines())
        (direct,) = [line["row"]["step_s"] for line in lines if "row" in line and line["job"] == DIRECT]
        times = {row["way"]: row["step_s"] for row in on_h200("steps")["rows"]}
        assert f"{direct:.3f} s instead of {times['FP8, blocks']:.3f} s" in readme


def test_notebook_13_says_how_fast_each_kernel_was():
    """For each kernel, the fastest tile sizes whose results were right."""
    rows = on_h200("hopper_tiles")["attention"]
    text = (ROOT / "notebooks/13_flash_attention.ipynb").read_text("utf-8").replace("**", "")
    labels = {
        "plain": "plain: notebook's own, `cp.async`",
        "hopper, overlapped": "TMA, overlapped",
        "hopper, specialised": "TMA, specialized, 128 keys",
        "SDPA flash": "PyTorch's FlashAttention-2",
        "cuDNN": "cuDNN",
    }
    for kernel, label in labels.items():
        numbers = []
        for seq, causal in ((4096, True), (16384, True), (16384, False)):
            its = [row for row in rows if (row["kernel"], row["s"], row["causal"]) == (kernel, seq, causal)]
            numbers.append(str(max(row["tflop_per_s"] for row in its if row.get("error", 0) is not None)))
        assert f"| {' | '.join([label, *numbers])} |" in text, label
