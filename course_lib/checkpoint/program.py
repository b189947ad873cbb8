"""The program that trains in any layout, by a TOML file and flags.

    launch_nb_torchrun.py notebooks/10_5d.ipynb --nproc-per-node 8 -- --layout dp2,tp2,pp2 --out log.jsonl

`five_d.model` has the model and its step, `five_d.layouts` and `five_d.meshes` say which rank is where.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
import tomllib
from pathlib import Path

import torch
import torch.distributed as dist

from course_lib.checkpoint.hf_files import from_hf_config, read_hf_config
from course_lib.checkpoint.hugging_face import from_hf
from course_lib.checkpoint.noise import drop_tokens
from course_lib.checkpoint.saved_run import Log, SavedRun, log_file
from course_lib.expert_parallel.mixture import active_config, describe_model, moe_options
from course_lib.five_d.layouts import Layout, check_layout, fitted
from course_lib.five_d.meshes import build_mesh
from course_lib.five_d.model import ParallelModel, parallelize
from course_lib.five_d.plan import batch_at, learning_rate
from course_lib.single_gpu import training as single_gpu
from course_lib.single_gpu.data import TokenBatches
from course_lib.single_gpu.model import PRESETS, ModelConfig

# Settings that a run may change when it continues; it prints each change.
PLANNED = "steps", "lr", "warmup", "batch", "start_batch", "ramp", "max_norm", "dtype"


def from_file(argv: list[str]) -> list[str]:
    """argv, and before it what the TOML file of its --config says, as options; so argv wins.

    Raises ValueError where the file can't be read or is no TOML.
    """
    first = argparse.ArgumentParser(prog="five_d", add_help=False, allow_abbrev=False)
    first.add_argument("--config", type=Path)
    file = first.parse_known_args(argv)[0].config
    if file is None:
        return argv
    try:
        settings = tomllib.loads(file.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"--config {file}: {error}") from None
    for name, value in settings.items():
        if isinstance(value, (dict, list)):
            raise ValueError(f"--config {file}: {name} is a table or a list; options are strings and numbers")
    return [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()] + argv


def program_parser() -> argparse.ArgumentParser:
    """The program's options: training_parser's, some of them in another sense, and its own."""
    parser = argparse.ArgumentParser(
        prog="five_d",
        description="Train with data, tensor, context, expert and pipeline parallelism together.",
        parents=[single_gpu.training_parser("five_d", "")],
        allow_abbrev=False,  # --conf would not be read
        conflict_handler="resolve",  # --batch and --out mean something else here
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--config", type=Path, help="a TOML file of options; those of the command line win")
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--preset", choices=list(PRESETS), help="the model's sizes; small by default")
    model.add_argument("--model", type=Path, help="a model's config.json, or its folder: its sizes, random weights")
    model.add_argument("--from-hf", type=Path, help="start from a model of transformers, in safetensors")
    add("--layout", default="dp1", help="such as dp2,pp2,tp4,sp,zero1,mb2,zb-h1,full, or dp16,zero3,rep2")
    add("--batch", type=int, default=16, help="sequences a step, of all ranks together")
    add("--warmup", type=int, default=0, help="steps in which the learning rate rises; it falls to a tenth afterwards")
    add("--start-batch", type=int, help="sequences of the first step; --batch by default")
    add("--ramp", type=int, default=0, help="steps in which the batch grows to --batch")
    add("--max-norm", type=float, default=1.0, help="of all gradients together")
    add("--experts", type=int, help="experts a layer; a model without them by default")
    add("--top-k", type=int, help="experts per token; 2 by default")
    add("--expert-hidden", type=int, help="width of an expert; that of the preset's MLP by default")
    add("--shared", type=int, help="experts that every token goes through; none by default")
    add("--balance", type=float, default=0.01, help="weight of the balance loss")
    add("--peak-tflops", type=float, help="of a device, for MFU, where the course does not know it")
    add("--checkpoints", type=Path, help="a folder: go on from its last checkpoint, and save there")
    add("--save-every", type=int, default=100, help="steps from one checkpoint to the next; the last step is saved too")
    add("--keep", type=int, default=2, help="checkpoints that stay")
    add("--bad-steps", type=int, default=3, help="in a row without a finite loss and norm, until the run stops")
    add("--drop-tokens", type=float, default=0.0, help="share of the input tokens that is replaced at random")
    add("--elastic", action="store_true", help="as many dp ranks as there are, whatever --layout says")
    add("--out", type=log_file, help="a file of JSON lines, one per step; a run that continues adds to it")
    return parser


def full_path(source: str | None) -> str | None:
    """Return the full path of a local data set or tokenizer, and a name at Hugging Face as it is.

    to_hf, which reads it from a checkpoint, may be called from another folder.
    """
    return str(Path(source).absolute()) if source and Path(source).exists() else source


def check_run(chosen: argparse.Namespace, config: ModelConfig, layout: Layout, ranks: int | None = None) -> None:
    """Raise ValueError where the layout does not fit the model, the ranks, or any batch of the run."""
    ramp = (chosen.start_batch, chosen.batch, chosen.ramp)
    for batch in sorted({batch_at(step, *ramp) for step in range(1, chosen.ramp + 2)}):
        check_layout(config, layout, ranks, batch, chosen.seq, chosen.moe)


def model_of(chosen: argparse.Namespace) -> tuple[ModelConfig, dict | None]:
    """Return the model's sizes, and arguments of apply_moe, by --preset, --model or --from-hf; --preset small if none
    of them is given. Raises ValueError.
    """
    file = chosen.model or chosen.from_hf
    if file is None:
        chosen.preset = chosen.preset or "small"
        config, moe = PRESETS[chosen.preset], None
    else:
        config, moe = read_hf_config(file) if chosen.model else from_hf_config(file)
    if chosen.from_hf and not moe and chosen.experts is not None:
        raise ValueError(f"--experts is {chosen.experts}, and the model of --from-hf {chosen.from_hf} has none")
    moe = moe_options(chosen, moe)
    return config, moe and moe | {"aux_loss_coeff": chosen.balance}


def options(argv: list[str] | None = None) -> argparse.Namespace:
    """The program's options. Touches nothing; an unknown or impossible one ends the program with status 2."""
    parser = program_parser()
    try:
        chosen = single_gpu.parse(parser, from_file(sys.argv[1:] if argv is None else list(argv)))
        chosen.layout = Layout.parse(chosen.layout)
        chosen.start_batch = chosen.batch if chosen.start_batch is None else chosen.start_batch
        chosen.config, chosen.moe = model_of(chosen)
        if (chosen.shared or 0) < 0:
            raise ValueError("--shared must be 0 or more")
        if min(chosen.save_every, chosen.keep, chosen.bad_steps) < 1 or not 0 <= chosen.drop_tokens < 1:
            ones = "--save-every, --keep and --bad-steps must be 1 or more"
            raise ValueError(f"{ones}, --drop-tokens 0 or more and below 1")
        if min(*(1 if n is None else n for n in (chosen.expert_hidden, chosen.peak_tflops)), 1) <= 0:
            raise ValueError("--expert-hidden and --peak-tflops must be above 0")
        if (
            not 1 <= chosen.start_batch <= chosen.batch
            or min(chosen.warmup, chosen.ramp) < 0
            or not chosen.max_norm > 0
        ):
            raise ValueError("--start-batch must be 1 to --batch, --warmup and --ramp 0 or more, --max-norm above 0")
        if chosen.start_batch < chosen.batch and not chosen.ramp:
            raise ValueError("--start-batch goes with --ramp, the steps in which it grows to --batch")
        if chosen.elastic:  # which dp it will be, and whether the batches fit, is not known yet
            check_layout(chosen.config, chosen.layout, None, None, chosen.seq, chosen.moe)
        else:
            check_run(chosen, chosen.config, chosen.layout)
    except ValueError as error:
        parser.error(str(error))
    except ImportError as error:
        parser.error(f"{error}; {'--model' if chosen.model else '--from-hf'} needs pip install -e '.[hf]'")
    return chosen


def train(
    parallel: ParallelModel, batches: TokenBatches, chosen: argparse.Namespace, config: ModelConfig, done: int = 0
):
    """Train as the options say; yields a record of each step, the same on all ranks but for the times. done: steps that
    are done already.
    """
    layout, device = parallel.layout, next(parallel.stages.parameters()).device
    peak = chosen.peak_tflops * 1e12 if chosen.peak_tflops else single_gpu.peak_flops()
    for number in range(done + 1, chosen.steps + 1):
        start = time.perf_counter()
        batch = batch_at(number, chosen.start_batch, chosen.batch, chosen.ramp)
        batches.batch = batch // layout.dp
        rate = learning_rate(number, chosen.lr, chosen.warmup, chosen.steps)
        for group in parallel.optimizer.param_groups:
            group["lr"] = rate
        first = batches.position + batches.rank * batches.batch  # number of this rank's first sample
        inputs, targets = next(batches)
        if chosen.drop_tokens:
            inputs = drop_tokens(inputs, chosen.drop_tokens, config.vocab, chosen.seed, first)
        loss, norm = parallel.step(*(part.to(device, non_blocking=True) for part in (inputs, targets)), chosen.max_norm)
        # The fullest rank's bytes, and which rank that is, in one number: no list as long as the world.
        fullest = single_gpu.peak_memory(device) * layout.ranks + dist.get_rank()
        fullest = torch.full((), fullest, dtype=torch.int64, device=device)
        dist.all_reduce(fullest, dist.ReduceOp.MAX)
        read = torch.stack([loss.double(), norm.double(), fullest.double()])  # exact up to 2^53
        loss, norm, fullest = read.tolist()  # waits for the device: the time is the whole step's
        step_s = time.perf_counter() - start
        peak_memory, rank = divmod(int(fullest), layout.ranks)
        speed = batch * chosen.seq / step_s / layout.ranks
        yield {
            "step": number,
            "loss": loss,
            "norm": norm,
            "lr": rate,
            "batch": batch,
            "tokens": batches.position * chosen.seq,
            "step_s": step_s,
            "tokens_per_s": speed,
            "mfu": single_gpu.mfu(config, chosen.seq, speed, peak) if peak else None,
            "peak_memory": peak_memory,
            "fullest_rank": rank,
            "layout": str(layout),
        }


def main(argv: list[str] | None = None) -> list[dict]:
    """Train as the options say. Rank 0 prints one line a step and writes where --out says; tokens/s and MFU are one
    device's, memory is the fullest rank's.

    Returns the records. Needs the default process group. Raises ValueError where the layout does not fit the ranks.
    """
    chosen, rank = options(argv), dist.get_rank()
    layout = fitted(chosen.layout, dist.get_world_size()) if chosen.elastic else chosen.layout
    tokens, vocab = single_gpu.training_text(chosen)
    config = dataclasses.replace(chosen.config, vocab=vocab) if chosen.preset else chosen.config
    if vocab > config.vocab:
        name = chosen.model or chosen.from_hf
        raise ValueError(f"the text has a vocabulary of {vocab}, the model of {name} one of {config.vocab}")
    try:
        check_run(chosen, config, layout, dist.get_world_size())
    except ValueError as error:
        raise ValueError(f"--layout {layout}: {error}") from None
    mesh = build_mesh(layout)
    settings = {"seed": chosen.seed, "dtype": torch.bfloat16 if chosen.dtype == "bf16" else torch.float32}
    parallel = parallelize(config, layout, mesh, moe=chosen.moe, **settings, lr=chosen.lr, **single_gpu.ADAMW)
    batches = TokenBatches(tokens, chosen.batch // layout.dp, chosen.seq, mesh.dp.rank(), layout.dp, chosen.seed)
    if rank == 0:
        model = describe_model(str(chosen.preset or chosen.model or chosen.from_hf), config, chosen.moe)
        ranks = f"{layout.ranks} rank{'s' if layout.ranks > 1 else ''}"
        print(f"{model}, layout {layout}: {ranks}, {len(tokens):,} tokens of text")
    same = {"seed": chosen.seed, "drop_tokens": chosen.drop_tokens, "moe": chosen.moe}
    plan = {name: getattr(chosen, name) for name in PLANNED}
    plan |= {"dataset": full_path(chosen.dataset), "tokenizer": full_path(chosen.tokenizer)}
    run = SavedRun(parallel, batches, chosen.checkpoints, chosen.save_every, chosen.keep, same, plan, chosen.bad_steps)
    try:
        if chosen.from_hf and not run.step:
            from_hf(parallel, chosen.from_hf)
        if run.step >= chosen.steps:
            run.say(f"nothing is left to do: {run.step} steps are done, --steps is {chosen.steps}")
        log, records = Log(chosen.out if rank == 0 else None, run.step), []
        for record in train(parallel, batches, chosen, active_config(config, chosen.moe), run.step):
            records.append(record)
            run.say(single_gpu.describe(record))
            log.add(record)
            run.after(record["step"], record["loss"], record["norm"], record["step"] == chosen.steps)
        run.finish()
    finally:
        run.release()
    return records
