"""The training program's steps against a bare loop: the same model, layout and transforms, with a batch in memory.

    python benchmarks/train_loop.py

What the program adds to `ParallelModel.step` is timed: reading and packing the next batch, the learning rate, and a
line of the log every ten steps. On ranks of this machine, one per core, or one per GPU.
"""

import contextlib
import io
import tempfile
from pathlib import Path

import measure
import torch
import torch.distributed as dist

from course_kit.ranks import Ranks
from course_lib.five_d.layouts import Layout
from course_lib.train.model import named_model
from course_lib.train.settings import read_settings
from course_lib.train.text import open_text
from course_lib.train.trainer import Trainer

STEPS = 10  # of a timed run: one line of the log
LAYOUTS = {1: ["dp1"], 2: ["dp2,zero1", "tp2,sp"]}


def compare(words: list[str], spec: str) -> dict:
    """On a rank: compare both loops, by medians of runs in alternation. Returns the figures."""
    settings, layout = read_settings([*words, "--layout", spec]), Layout.parse(spec)
    text = open_text(settings)
    trainer = Trainer(settings, named_model(settings).with_vocab(text.vocab), layout, text)
    inputs, targets, positions = (each.to(trainer.device) for each in next(trainer.batches))
    done = 0

    def program() -> None:
        nonlocal done
        for _ in range(STEPS):
            done += 1
            trainer.step(done)
        with contextlib.redirect_stdout(io.StringIO()):
            trainer.report(1.0)

    def bare() -> None:
        for _ in range(STEPS):
            loss, _ = trainer.parallel.step(inputs, targets, 1.0, positions)
        loss.item()

    figures = {"program_against_bare": measure.paired(program, bare, dist.barrier)}
    figures["bare_against_itself"] = measure.paired(bare, bare, dist.barrier)
    trainer.close()
    return figures


def main() -> None:
    """Measure on this machine, print the figures and write them down."""
    gpus = torch.cuda.device_count()
    sizes = "--preset SmolLM-135M --batch 16 --seq 1024" if gpus else "--preset small --layers 3 --batch 4 --seq 128"
    figures = {"settings": sizes}
    with tempfile.TemporaryDirectory() as folder:
        words = [*sizes.split(), "--steps", "100000", "--cache", str(Path(folder))]
        for n in [1, gpus] if gpus > 1 else [1] if gpus else [1, 2]:
            with Ranks(n, timeout_s=900) as ranks:
                for spec in LAYOUTS.get(n, [f"dp{n},zero1"]):
                    figures[f"{spec}, {ranks.backend}"] = ranks(compare, words, spec)[0]
    measure.write("train_loop", figures)


if __name__ == "__main__":
    main()
