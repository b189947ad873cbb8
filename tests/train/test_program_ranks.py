"""The training program on one, two and four ranks: one run through several layouts, evaluated, exported, and read by
transformers. CPU, gloo.
"""

import contextlib
import io
import json
import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from calls import Operations
from course_lib.train import program
from course_lib.train.generate import load_model
from course_lib.train.sampling import generate_tokens
from course_lib.train.settings import read_settings

TINY = "--layers 2 --hidden 32 --heads 4 --kv-heads 2 --ffn-hidden 48 --preset small --seq 24 --batch 8 --lr 3e-3"


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> Path:
    """A file of documents, some shorter than a sequence and some longer."""
    folder, chosen = tmp_path_factory.mktemp("text"), random.Random(0)
    words = [f"{chosen.choice('bcdfgklmnprst')}{chosen.choice('aeiou')}" for _ in range(40)]
    lines = [json.dumps({"text": " ".join(chosen.choices(words, k=chosen.randint(2, 30)))}) for _ in range(120)]
    (folder / "text.jsonl").write_text("\n".join(lines))
    return folder / "text.jsonl"


def words_of(text: Path, folder: Path, *more: str) -> list[str]:
    """The command line of a run on this text, whose files are in a folder."""
    files = ["--dataset", str(text), "--cache", str(folder / "cache")]
    return [*TINY.split(), *files, *(word for each in more for word in each.split())]


def run(argv: list[str]) -> tuple[list[dict], str]:
    """On a rank: the records of a run, and what it printed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        records = program.main(argv)
    dist.barrier()
    return records, printed.getvalue()


def losses(records: list[dict]) -> list[float]:
    return [record["loss"] for record in records]


def test_one_run_in_four_layouts_is_the_run_of_one_layout(text, two, ranks, tmp_path):
    """Two and four ranks take turns: the same tokens, losses and held-out losses, in one file without a step twice."""
    whole = words_of(text, tmp_path, "--steps 12 --eval-every 3 --log-every 2 --warmup 3 --schedule linear")
    out = tmp_path / "one.jsonl"
    records, printed = two(run, [*whole, "--layout", "dp2,zero1", "--out", str(out)])[0]
    kept = ["--checkpoints", str(tmp_path / "ck"), "--save-every", "3", "--out", str(tmp_path / "many.jsonl")]
    turns = [(two, "tp2,sp,mb2"), (ranks, "dp2,pp2,zero1,mb1"), (two, "dp2,zero3,mb2,full"), (ranks, "dp2,tp2,zero2")]
    seen = []
    for n, (pool, layout) in enumerate(turns):
        part, lines = pool(interrupted, [*whole, *kept, "--layout", layout], 3 * (n + 1))[0]
        seen += part
        assert n == 0 or f"continues after step {3 * n}" in lines
    assert losses(seen) == pytest.approx(losses(records), rel=2e-5)
    of_one, of_many = (
        [json.loads(line) for line in file.read_text().splitlines()] for file in (out, tmp_path / "many.jsonl")
    )
    assert [each["step"] for each in of_many] == [*range(1, 13)] == [each["step"] for each in of_one]
    for one, many in zip(of_one, of_many, strict=True):
        assert many["loss"] == pytest.approx(one["loss"], rel=2e-5)
        assert many["lr"] == one["lr"] and many["tokens"] == one["tokens"]
        assert ("eval_loss" in one) == (one["step"] % 3 == 0)
        if "eval_loss" in one:
            assert many["eval_loss"] == pytest.approx(one["eval_loss"], rel=2e-5)
    assert records[-1]["loss"] < records[0]["loss"] - 0.3
    assert [line.split("|")[0].split() for line in printed.splitlines() if "loss" in line and "held" not in line] == [
        ["step", str(step)] for step in (2, 3, 4, 6, 8, 9, 10, 12)
    ]
    assert "steps = 12" in (tmp_path / "ck" / "run.toml").read_text()
    contents = (tmp_path / "many.jsonl").read_text()
    *_, last = two(run, [*whole, *kept, "--layout", "tp2", "--steps", "12"])[0][1].splitlines()
    assert last == f"step    12 | held-out loss {of_one[-1]['eval_loss']:.4f}", "a finished run is evaluated again"
    assert (tmp_path / "many.jsonl").read_text() == contents


class Stop(Exception):
    """The end of a job in the middle of its run."""


def interrupted(argv: list[str], until: int) -> tuple[list[dict], str]:
    """On a rank: the records of a run that ends after a step, as if killed then."""

    class Until(program.Trainer):
        def step(self, step: int) -> None:
            if step > until:
                self.saved.finish()  # the save of the last step is on the disk
                raise Stop
            super().step(step)

        def report(self, seconds: float) -> list[dict]:
            records = super().report(seconds)
            reported.extend(records)
            return records

    reported, printed, of_program = [], io.StringIO(), program.Trainer
    program.Trainer = Until
    try:
        with contextlib.redirect_stdout(printed), contextlib.suppress(Stop):
            program.main(argv)
    finally:
        program.Trainer = of_program
    dist.barrier()
    return reported, printed.getvalue()


def reads(argv: list[str]) -> list[int]:
    """On a rank: how often each step reads a tensor on the host."""
    counts = []

    class Counted(program.Trainer):
        def step(self, step: int) -> None:
            with Operations() as operations:
                super().step(step)
            counts.append(operations.count["_local_scalar_dense"])

    of_program, program.Trainer = program.Trainer, Counted
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            program.main(argv)
    finally:
        program.Trainer = of_program
    return counts


@pytest.mark.parametrize("layout", ["dp2,zero1", "dp2,zero3", "tp2,sp", "pp2"])
def test_a_step_reads_nothing_on_the_host(text, two, tmp_path, layout):
    counts = two(reads, words_of(text, tmp_path, "--steps 6 --log-every 3 --layout", layout))[0]
    assert counts[1:] == [0] * 5, counts  # the first step may look at shapes and options


MODELS = {
    "dense": "",
    "tied mixture": "--experts 4 --top-k 2 --expert-hidden 24",
}


@pytest.mark.parametrize("name", MODELS)
def test_transformers_generates_what_the_exported_model_does(text, two, tmp_path, name):
    from transformers import AutoModelForCausalLM

    argv = words_of(text, tmp_path, "--steps 6 --lr 3e-2", MODELS[name], "--layout", "dp2,zero1")
    two(run, [*argv, "--checkpoints", str(tmp_path / "ck"), "--export", str(tmp_path / "hf")])
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    prompt = [98, 97, 32, 99, 111]
    with torch.no_grad():
        wanted = theirs.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None)[0, 5:]
    for folder in ("hf", "ck"):
        model, _ = load_model(tmp_path / folder)
        assert generate_tokens(model, prompt, 12, temperature=0) == wanted.tolist()


def of_error(argv: list[str]) -> str:
    """On a rank: the message of the error that ends a run."""
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as printed:
            program.main(argv)
    except SystemExit as stop:
        return printed.getvalue().strip() or str(stop.code)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def test_what_cannot_work_is_one_line(text, two, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("a")
    cases = {
        "--layout tp3": "tp 3 does not divide heads, which is 4; change tp",
        "--layout dp2,cp2": "document_masks with cp 2",
        "--batch 3": "layout dp2,zero1: batch 3 is not a multiple of dp 2",
        f"--dataset {tmp_path / 'missing.txt'}": "missing.txt: there is no such file",
        f"--dataset {tmp_path / 'empty.txt'}": "empty.txt",
        f"--dataset {tmp_path / 'short.txt'}": "short.txt",
        "--preset smal": '--preset is "smal"; did you mean small?',
        "--no-decay embeding": "no_decay: no parameter has embeding in its name",
        f"--from-hf {tmp_path / 'none'} --preset": "expected one argument",
    }
    for words, line in cases.items():
        for message in two(of_error, words_of(text, tmp_path, words)):
            assert line in message, (words, message)
            assert "\n" not in message, (words, message)
    assert not (tmp_path / "ck").exists()


def test_options_reads_no_text_and_changes_nothing(tmp_path):
    settings = program.options(["--checkpoints", str(tmp_path / "ck"), "--out", str(tmp_path / "log"), "--steps", "3"])
    assert settings == read_settings(
        ["--checkpoints", str(tmp_path / "ck"), "--out", str(tmp_path / "log"), "--steps", "3"]
    )
    assert not list(tmp_path.iterdir())
