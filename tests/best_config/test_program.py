"""course_lib.best_config.program: what is printed, as lines and as JSON, and what is refused. CPU."""

import json
import runpy
import sys
from pathlib import Path

import pytest

from course_lib.best_config.answer import answer
from course_lib.best_config.hardware import load_cluster
from course_lib.best_config.program import as_text, main, options

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
    for line, layout in zip(lines[4:7], said["layouts"], strict=True):
        words = line.split("  (")[0].split()
        assert words[0] == f"{layout['tokens_per_s_per_gpu']:,.0f}" and words[-1] == layout["layout"]
        assert words[2:-1] == [f"{layout['mfu']:.1%}", f"{layout['peak_gib']:.1f}", f"{layout['risk']:.0%}"] + [
            f"{layout['days']:,.1f}"
        ]
    assert said["launch"]["command"] in lines and said["launch"]["slurm"] in lines
    assert all(f"{count:>10,} rejected: {reason}" in lines for reason, count in said["rejected"].items())


def test_json_is_one_object_with_all_of_it(capsys):
    said = main([*SMALL, "--json"])
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(said)) and len(said["layouts"]) == 5


def test_the_second_better_jobs_and_what_is_risky_are_in_words():
    said = answer(options([*SMALL, "--top", "2"]).question, 2)
    first, second = said["layouts"]
    said["near"] = [first | {"gpus": 16, "batch": 72, "gain": 0.125, "tokens_per_s": 1.5 * first["tokens_per_s"]}]
    said["risky"] = [second | {"risk": 0.24}]
    second |= {"step_s": first["step_s"] * 1.05}
    said["second"] = {"bubble": 0.1, "step": 0.004, "matrices": -0.04}
    lines = as_text(said).splitlines()
    name = f"the second, {second['layout']},"
    assert f"{name} takes 5.0% longer: +10.0% bubble, -4.0% matrices, -1.0% other" in lines
    gain = f"+12.5% a GPU, +50.0% in all, {first['layout']}"
    assert f"better near by: 16 GPUs, batch 72: {gain}" in lines
    at = lines.index("faster on paper, but more likely than 10% to run out of memory:")
    assert lines[at + 1].split("  (")[0].split()[-2:] == ["24%", second["layout"]]
    second |= {"step_s": first["step_s"], "peak_gib": first["peak_gib"] - 2.5}
    assert f"{name} is as fast, with 2.5 GiB less" in as_text(said | {"second": {}}).splitlines()


def test_no_layout_fits_says_what_the_leanest_needs(capsys):
    said = main(["--preset", "llama3-405B", "--gpus", "8"])
    printed = capsys.readouterr().out
    lean = said["leanest"]
    assert f"the leanest, {lean['layout']}, needs {lean['needed_gib']:.1f} GiB of {lean['usable_gib']:.1f}" in printed
    assert "no layout fits: " in printed and "launch" not in printed
    main(["--preset", "debug", "--gpus", "7", "--batch", "1", "--seq", "63"])
    assert "no layout runs" in capsys.readouterr().out


def test_any_model_can_be_asked_for(tmp_path, capsys):
    sizes = {
        "model_type": "mixtral", "num_hidden_layers": 4, "hidden_size": 512, "num_attention_heads": 8,
        "intermediate_size": 1024, "vocab_size": 1000, "num_local_experts": 8, "num_experts_per_tok": 2,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    main(["--config", str(tmp_path), "--gpus", "8", "--batch", "64", "--top", "1"])
    assert f"--model {tmp_path / 'config.json'} --layout" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        options(["--config", str(tmp_path), "--experts", "4"])
    assert "--experts is 4, and the model's config.json says 8" in capsys.readouterr().err.splitlines()[-1]
    assert options(["--cluster", str(EXAMPLE)]).question.cluster == load_cluster(EXAMPLE)
    by_hand = options(["--experts", "8", "--top-k", "1", "--expert-hidden", "512", "--shared", "1"]).question
    assert by_hand.moe == {"experts": 8, "top_k": 1, "ffn_hidden": 512, "shared": 1}


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--gpus", "0"], "gpus 0, batch 256, seq 4096: each is 1 or more"),
        (["--top", "0"], "1 or more"),
        (["--preset", "none"], "invalid choice"),
        (["--cluster", "none"], "--cluster none: No such file or directory, and it is none of H100; "),
        (["--cluster", "RTX 4090"], "64 GPUs are more than a node's 8, and it has no network"),
        (["--x"], "unrecognized"),
        (["--risk", "0"], "--risk above 0"),
        (["--tokens", "-1"], "--tokens a number above 0"),
        (["--tokens", "nan"], "--tokens a number above 0"),
        (["--experts", "2", "--top-k", "3"], "top_k 3"),
        (["--experts", "2", "--expert-hidden", "0"], "moe: ffn_hidden 0: a whole number, 1 or more"),
        (["--shared", "1"], "--expert-hidden and --shared go with --experts"),
        (["--config", "/none/config.json"], "No such file"),
        (["--preset", "debug", "--config", "config.json"], "not allowed with"),
    ],
)
def test_options_that_cannot_be_end_the_program_in_one_line(argv, message, capsys):
    with pytest.raises(SystemExit) as ended:
        options(argv)
    said = capsys.readouterr().err
    assert ended.value.code == 2 and message in said and len(said.splitlines()) == 2  # one of them is the usage
