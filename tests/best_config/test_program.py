"""course_lib.best_config.program: what is printed, as lines and as JSON, and what is refused. CPU."""

import dataclasses
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from course_lib.best_config.answer import answer
from course_lib.best_config.answer_text import in_lines
from course_lib.best_config.clusters import CLUSTERS
from course_lib.best_config.hardware import load_cluster
from course_lib.best_config.program import as_text, main, options
from course_lib.best_config.software import NANOTRON, SOFTWARE
from course_lib.five_d.layouts import Layout

EXAMPLE = Path(__file__).parents[2] / "data/clusters/example.toml"
SMALL = ["--preset", "llama3.2-1B", "--gpus", "8", "--batch", "64"]


def test_python_m_prints_the_answer(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["best_config", *SMALL, "--top", "3", "--tokens", "1e12"])
    runpy.run_module("course_lib.best_config", run_name="__main__")
    printed = capsys.readouterr().out
    said = main([*SMALL, "--top", "3", "--tokens", "1e12"])
    assert printed == capsys.readouterr().out == as_text(said) + "\n"
    lines = printed.splitlines()
    assert lines[0].startswith("llama3.2-1B on 8 x H100") and "64 sequences of 4,096 tokens" in lines[0]
    assert lines[1] == "for this course's program, unfused" and lines[4].split()[:2] == ["per", "GPU"]
    first = said["layouts"][0]
    for line, layout in zip(lines[5:8], said["layouts"], strict=True):
        words = line.split(" (")[0].split()
        assert words[0] == f"{layout['tokens_per_s_per_gpu']:,.0f}" and words[-1] == layout["layout"]
        numbers = [f"{layout['mfu']:.1%}", f"{layout['causal_mfu']:.1%}", f"{layout['peak_gib']:.1f}"]
        numbers += [f"{layout['risk']:.0%}", f"{layout['days']:,.1f}"]
        gain = [] if layout is first else [f"{first['step_s'] / layout['step_s'] - 1:+.1%}"]
        assert words[2:-1] == numbers + gain
    assert sum(line.startswith("MFU counts attention in full") for line in lines) == 1
    assert max(map(len, lines[3 : lines.index("", 3)])) <= 120
    assert in_lines(said["launch"]["command"]) in as_text(said) and in_lines(said["launch"]["slurm"]) in as_text(said)
    assert all(f"{count:>10,} rejected: {reason}" in lines for reason, count in said["rejected"].items())


def test_a_reader_that_stops_early_is_no_traceback():
    """The read end of the pipe is closed, as `| head` closes it."""
    read, write = os.pipe()
    os.close(read)
    line = [sys.executable, "-m", "course_lib.best_config", "--preset", "debug", "--gpus", "1"]
    ended = subprocess.run(line, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (ended.returncode, ended.stderr) == (1, "")


def test_json_is_one_object_with_all_of_it(capsys):
    said = main([*SMALL, "--json"])
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(said)) and len(said["layouts"]) == 5


def test_the_second_better_jobs_and_what_is_risky_are_in_words():
    said = answer(options([*SMALL, "--top", "2"]).question, 2)
    first, second = said["layouts"]
    first["ties"], second["uncommon"] = 3, ["DualPipe", "tp beyond a node"]
    said["near"] = [first | {"gpus": 16, "batch": 72, "gain": 0.125, "tokens_per_s": 1.5 * first["tokens_per_s"]}]
    said["risky"] = [second | {"risk": 0.24}]
    second |= {"step_s": first["step_s"] * 1.05}
    said["second"] = {"bubble": 0.1, "step": 0.004, "matrices": -0.04}
    lines = as_text(said).splitlines()
    name = f"the second, {second['layout']},"
    assert f"{name} takes 5.0% longer: +10.0% bubble, -4.0% matrices, -1.0% other" in lines
    gain = f"+12.5% per GPU, +50.0% in total, {first['layout']}"
    assert f"a better job size: 16 GPUs, batch 72: {gain}" in lines
    at = lines.index("faster by estimate, but with a risk above 10% of running out of memory:")
    assert lines[at + 1].split(" (")[0].split()[-1] == second["layout"] and " 24% " in lines[at + 1]
    assert at == 7 and lines[5].endswith(f"  {first['layout']}") and "(a" not in lines[5]
    assert lines[6].endswith(f"-4.8%  {second['layout']} (a, b)") and lines[at + 1].endswith(" (a, b)")
    assert lines[at + 2] == "uncommon: (a) DualPipe, (b) tp beyond a node"
    second |= {"step_s": first["step_s"] / 1.1}
    assert f"{name} takes 9.1% less time: " in as_text(said)
    second |= {"step_s": first["step_s"] * 2.5}
    assert f"{name} takes 2.5 times as long: " in as_text(said)
    second |= {"step_s": first["step_s"], "peak_gib": first["peak_gib"] - 2.5}
    assert f"{name} is as fast, with 2.5 GiB less" in as_text(said | {"second": {}}).splitlines()


def test_notes_and_what_is_untested_are_lines():
    said = answer(options([*SMALL, "--top", "1"]).question, 1) | {"untested": [], "tested": None}
    assert "note:" not in as_text(said) and "no run has tested" not in as_text(said)
    first = said["layouts"][0]
    tested = first | {"layout": "dp4,tp2", "step_s": 1.25 * first["step_s"], "tokens_per_s_per_gpu": 8000.0}
    said |= {"notes": ["windows count as full"], "untested": ["ZeRO-2", "1B"], "tested": tested}
    lines = as_text(said).splitlines()
    assert lines[2] == "note: windows count as full"
    numbers = f"8,000 tokens/s per GPU (-20.0%), {first['mfu']:.1%} MFU, {first['peak_gib']:.1f} GiB"
    assert f"no run has tested this: ZeRO-2; 1B; the fastest tested layout: dp4,tp2, {numbers}" in lines
    assert "no run has tested this: ZeRO-2; 1B; nor any other layout of this job" in as_text(said | {"tested": None})


def test_what_rests_on_overlap_and_what_kernels_gain_are_lines():
    said = answer(options(SMALL).question, 1)
    first = said["layouts"][0]
    exposed = {"step_s": 1.25 * first["step_s"], "fastest": "tp8", "fastest_s": 1.0}
    said |= {"exposed": exposed, "kernels": first | {"layout": "dp8", "step_s": first["step_s"] / 1.2}}
    lines = as_text(said).splitlines()
    line = f"without any overlap of data-parallel traffic the first would take {exposed['step_s']:.3g} s (+25%)"
    assert f"{line}, and tp8 would lead with 1 s" in lines
    assert f"{line}, and still lead" in as_text(said | {"exposed": exposed | {"fastest": first["layout"]}})
    speed = f"{first['tokens_per_s_per_gpu']:,.0f} tokens/s per GPU (+20.0%), {first['peak_gib']:.1f} GiB, dp8"
    assert f"with fused kernels (--kernels): {speed}" in lines
    text = as_text(said | {"exposed": exposed | {"step_s": 1.05 * first["step_s"]}, "kernels": None})
    assert "without any overlap" not in text and "--kernels" not in text


def test_of_which_peak_mfu_is(capsys):
    main([*SMALL, "--fp8"])
    assert capsys.readouterr().out.count("; both are of the BF16 peak") == 1
    main(SMALL)
    assert "BF16 peak" not in capsys.readouterr().out


def test_help_has_no_empty_defaults(capsys):
    with pytest.raises(SystemExit):
        options(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "None" not in text and "False" not in text and "4096 by default" in text and "0.1 by default" in text


def test_no_layout_fits_says_what_the_leanest_needs(capsys):
    said = main(["--preset", "llama3-405B", "--gpus", "8"])
    printed = capsys.readouterr().out
    lean = said["leanest"]
    assert f"the leanest, {lean['layout']}, needs {lean['needed_gib']:.1f} GiB of {lean['usable_gib']:.1f}" in printed
    assert "no layout fits: " in printed and "launch" not in printed
    assert f"; on {said['enough']['gpus']} GPUs {said['enough']['layout']} fits: " in printed
    main(["--preset", "debug", "--gpus", "7", "--batch", "1", "--seq", "63"])
    assert "no layout runs" in capsys.readouterr().out


def test_any_model_can_be_asked_for(tmp_path, capsys):
    sizes = {
        "model_type": "mixtral", "num_hidden_layers": 4, "hidden_size": 512, "num_attention_heads": 8,
        "intermediate_size": 1024, "vocab_size": 1000, "num_local_experts": 8, "num_experts_per_tok": 2,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    main(["--config", str(tmp_path), "--gpus", "8", "--batch", "64", "--top", "1"])
    assert f"--hf-config {tmp_path / 'config.json'} --layout" in re.sub(r" \\\n +", " ", capsys.readouterr().out)
    with pytest.raises(SystemExit):
        options(["--config", str(tmp_path), "--experts", "4"])
    assert "--experts is 4, and the model's config.json says 8" in capsys.readouterr().err.splitlines()[-1]
    assert options([*SMALL, "--cluster", str(EXAMPLE)]).question.cluster == load_cluster(EXAMPLE)
    by_hand = options([*SMALL, "--experts", "8", "--top-k", "1", "--expert-hidden", "512", "--shared", "1"]).question
    assert by_hand.moe == {"experts": 8, "top_k": 1, "ffn_hidden": 512, "shared": 1}


def test_a_layout_says_how_many_gpus():
    asked = options(["--preset", "llama3-8B", "--layout", "dp4,pp2,tp2,sp"]).question
    assert asked.gpus == 16 and asked.layout == Layout(dp=4, pp=2, tp=2, sequence_parallel=True)
    assert options(["--preset", "llama3-8B"]).question.gpus == 64
    assert options([*SMALL, "--layout", "dp8"]).question.gpus == 8


def test_limits_and_programs_are_of_the_question():
    line = [
        "--software",
        "Megatron-LM",
        "--fused-loss",
        "--fp8",
        "--max-tp",
        "4",
        "--schedules",
        "1f1b, interleaved",
        "--max-cp",
        "1",
    ]
    asked = options([*SMALL, *line, "--cluster", "h200"]).question
    assert asked.max_tp == 4 and asked.schedules == ("1f1b", "interleaved")
    expected = dataclasses.replace(SOFTWARE["Megatron-LM"], fused_loss=True, matmul_dtype="fp8")
    assert asked.cluster == dataclasses.replace(CLUSTERS["H200"], software=expected)
    table = asked.search().table
    assert max(table.tp) == 4 and max(table.cp) == 1 and set(table.schedule) == {"1f1b", "interleaved"}
    assert options([*SMALL, "--cluster", "rtx 4090"]).question.cluster == CLUSTERS["RTX 4090"]
    assert options([*SMALL, "--cluster", "h100, efa", "--software", "Nanotron"]).question.cluster.software == NANOTRON


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--gpus", "0"], "gpus 0, batch 256, seq 4096: each is 1 or more"),
        (["--top", "0"], "1 or more"),
        (["--preset", "none"], "invalid choice"),
        (["--cluster", "none"], "--cluster none: No such file or directory, and it is none of H100; "),
        (["--cluster", "H10"], "do you mean H100?"),
        (["--cluster", "RTX 4090", "--gpus", "64"], "64 GPUs are more than a node's 8, and it has no network"),
        (["--x"], "unrecognized"),
        (["--risk", "0"], "risk 0.0: it must be a probability above 0"),
        (["--tokens", "-1"], "--tokens a number above 0"),
        (["--tokens", "nan"], "--tokens a number above 0"),
        (["--experts", "2", "--top-k", "3"], "top_k 3"),
        (["--experts", "2", "--expert-hidden", "0"], "moe: ffn_hidden 0: a whole number, 1 or more"),
        (["--shared", "1"], "--expert-hidden and --shared go with --experts"),
        (["--config", "config.json"], "not allowed with"),
        (["--software", "none"], "--software 'none': it is one of course; "),
        (["--software", "nanotron", "--kernels"], "--kernels is short for --software 'course, kernels'"),
        (["--cluster", "H100, EFA", "--software", "Megatron-LM"], "has constants of its own program: leave out"),
        (["--cluster", "A100", "--fp8"], ": these GPUs have no FP8"),
        (["--max-tp", "0"], "--max-tp 0: it must be 1 or more"),
        (["--max-cp", "0"], "--max-cp 0: it must be 1 or more"),
        (["--schedules", "1f1b,gpipe"], "--schedules gpipe: it is none of 1f1b, "),
        (["--schedules", ""], "--schedules : it is none of 1f1b, "),
        (["--layout", "dp8,tp2"], "= 16 ranks, and there are 8: make dp 4"),
        (["--layout", "dp8,xp2"], "'xp2' is not one of dpN"),
        (["--layout", "dp8,sp"], "raise tp, or leave out sp"),
        (["--layout", "dp8,rep2"], "needs zero_stage 3"),
        (["--layout", "dp8,ep2"], "the model has no experts: make ep 1"),
        (["--layout", "cp8,tp1,ulysses,dp1", "--preset", "SmolLM-135M"], "heads"),
        (["--layout", "dp4,pp2,zero3"], "gathers in each micro-batch: make zero_stage 1"),
        (["--layout", "dp2,tp4", "--max-tp", "2"], "tp 4, and --max-tp is 2"),
        (["--layout", "dp2,pp4,zb-v", "--schedules", "1f1b"], "schedule zb-v is none of --schedules"),
    ],
)
def test_options_that_cannot_be_end_the_program_in_one_line(argv, message, capsys):
    with pytest.raises(SystemExit) as ended:
        options([*(["--preset", "llama3-8B", "--gpus", "8"] if argv[0] != "--preset" else []), *argv])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and message in said and len(said.splitlines()) == 2  # one of them is the usage


def test_a_model_must_be_named(capsys):
    with pytest.raises(SystemExit):
        options(["--gpus", "8"])
    assert "one of the arguments --preset --config is required" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        options(["--config", "/none/config.json"])
    assert "No such file" in capsys.readouterr().err
