"""The training program: text, a model and a layout in; checkpoints, logs and an exported model out.

launch_nb_torchrun.py train --nproc-per-node 8 -- run.toml --layout dp2,tp2,pp2
torchrun --nproc-per-node 8 -m course_lib.train run.toml          where only the package is installed
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from course_lib.checkpoint.checkpoints import latest
from course_lib.checkpoint.hugging_face import to_hf
from course_lib.expert_parallel.mixture import describe_model
from course_lib.five_d.layouts import Layout, check_layout
from course_lib.single_gpu.errors import one_line_message
from course_lib.single_gpu.hf_tokenizers import has_tokenizer
from course_lib.train.auto_layout import choose_layout
from course_lib.train.exports import check_checkpoints
from course_lib.train.model import NamedModel, check_run, named_layout, named_model
from course_lib.train.run_log import check_logging
from course_lib.train.sections import Settings
from course_lib.train.settings import as_toml, read_settings, shown
from course_lib.train.sources import held_out_source, sources_of
from course_lib.train.text import open_text
from course_lib.train.trainer import Trainer


def options(argv: list[str] | None = None) -> Settings:
    """Return the run's settings, checked as far as they can be without ranks and without reading the text. Changes
    nothing; a setting that cannot be used ends the program with status 2 and one line.
    """
    try:
        settings = read_settings(argv)
        use_model_tokenizer(settings)
        model, layout = named_model(settings), named_layout(settings)
        if layout is not None:
            check_run(settings, model, layout)
        check_layout(model.config, Layout(), None, None, None, model.moe)  # the sizes alone
        sources_of(settings.data)
        held_out_source(settings)
        check_checkpoints(settings, model.config, model.moe)
        check_logging(settings)
    except ImportError as error:
        by_name = vars(settings.model) | vars(settings.checkpoints)
        name = next(each for each in ("hf_config", "from_hf", "export") if by_name[each])
        exit_with(f"{error}; {name} needs pip install -e '.[hf]'")
    except ValueError as error:
        exit_with(one_line_message(error))
    return settings


def use_model_tokenizer(settings: Settings) -> None:
    """Set the tokenizer of a model that from_hf names, if its folder has one and the settings name none."""
    folder = settings.model.from_hf
    if folder and settings.tokenizer.tokenizer is None and has_tokenizer(Path(folder)):
        settings.tokenizer.tokenizer = folder


def exit_with(line: str) -> None:
    """End the program with status 2 and this line on stderr."""
    print(f"train: error: {line}", file=sys.stderr)
    raise SystemExit(2)


UNUSED = (  # keys, and the value of another key with which the program does not read them
    ("betas eps", "optimizer", "sgd"),
    ("momentum", "optimizer", "adamw"),
    ("min_lr", "schedule", "constant"),
    ("backend", "compile", False),
    ("save_every keep", "checkpoints", None),
    ("eval_dataset eval_split eval_share eval_sequences", "eval_every", 0),
)


def notes(settings: Settings) -> list[str]:
    """Return a line for each key that is set without effect in this run, and for a warmup that is cut short."""
    values, defaults = (
        {name: value for section in vars(each).values() for name, value in vars(section).items()}
        for each in (settings, Settings())
    )
    lines = [
        f"{name} has no effect: {other} is {'not set' if value is None else shown(value)}"
        for names, other, value in UNUSED
        for name in names.split()
        if values[other] == value and values[name] != defaults[name]
    ]
    run = settings.run
    if run.ramp and (run.start_batch or run.batch) == run.batch:
        lines.append("ramp has no effect: start_batch is not set, or is batch")
    if settings.optimizer.warmup > run.steps:
        lines.append(f"warmup is longer than the run: the learning rate stays below {settings.optimizer.lr:g}")
    if settings.layout.cluster and settings.layout.layout != "auto":
        lines.append("cluster has no effect: layout is not auto")
    return lines


def layout_for_ranks(settings: Settings, model: NamedModel) -> Layout:
    """Return the layout for all ranks of the default group: the planner's choice for auto. Raises ValueError."""
    ranks = dist.get_world_size()
    layout = named_layout(settings, ranks)
    if layout is None:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else None
        layout, line = choose_layout(settings, model.config, model.moe, ranks, local, name)
        if dist.get_rank() == 0:
            print(line, flush=True)
    try:
        check_run(settings, model, layout, ranks)
    except ValueError as error:
        raise ValueError(f"layout {layout}: {error}") from None
    return layout


def main(argv: list[str] | None = None) -> list[dict]:
    """Train as the settings say, and return the records of all steps. Rank 0 prints and writes; tokens/s and MFU are
    per device, memory is the fullest rank's.

    Needs the default process group. Raises ValueError, in one line, if the text or the layout does not fit.
    """
    settings = options(argv)
    text = open_text(settings)
    model = named_model(settings).with_vocab(text.vocab)
    layout = layout_for_ranks(settings, model)
    trainer = Trainer(settings, model, layout, text)
    title = describe_model(model.name, model.config, model.moe)
    ranks = f"{layout.ranks} rank{'s' if layout.ranks > 1 else ''}"
    for line in notes(settings) + text.lines:
        trainer.saved.say(line)
    trainer.saved.say(f"{title}, layout {layout}: {ranks}, {trainer.batches.tokens:,} tokens of text")
    try:
        records = trainer.train()
    finally:
        trainer.close()
    if dist.get_rank() == 0:
        export_and_draw(settings, title)
    return records


def export_and_draw(settings: Settings, title: str) -> None:
    """Write the model in the format of transformers, and the page of plots, if the settings name folders for them."""
    out = settings.checkpoints.export
    if out and settings.checkpoints.checkpoints:
        folder = latest(Path(settings.checkpoints.checkpoints))
        assert folder is not None, "the last step is saved"
        Path(out).absolute().parent.mkdir(parents=True, exist_ok=True)
        to_hf(folder, Path(out))
        print(f"exported {folder} to {out}", flush=True)
    if settings.logging.summary and settings.logging.out:
        from course_lib.train.summary import write_summary

        files = write_summary(Path(settings.logging.out), Path(settings.logging.summary), title, as_toml(settings))
        print(f"wrote {', '.join(map(str, files))}", flush=True)
