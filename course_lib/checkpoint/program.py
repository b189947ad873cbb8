"""The program that trains in any layout, configured by a TOML file and flags.

    launch_nb_torchrun.py notebooks/10_5d.ipynb --nproc-per-node 8 -- --layout dp2,tp2,pp2 --out log.jsonl

`five_d.model` has the model and its step; `five_d.layouts` and `five_d.meshes` place the ranks.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from course_lib.checkpoint.hf_files import from_hf_config, read_hf_config
from course_lib.checkpoint.hugging_face import from_hf
from course_lib.checkpoint.noise import drop_tokens
from course_lib.checkpoint.saved_run import Log, SavedRun, log_file
from course_lib.expert_parallel.mixture import describe_model
from course_lib.expert_parallel.sizes import active_config, moe_options
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
    """Return the settings in the TOML file of --config as options, followed by argv, which takes precedence.

    Raises ValueError if the file cannot be read or is not valid TOML.
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
    """Return the parser of the program's options: training_parser's, some with another meaning, and its own."""
    parser = argparse.ArgumentParser(
        prog="five_d",
        description="Train with data, tensor, context, expert and pipeline parallelism together.",
        parents=[single_gpu.training_parser("five_d", "")],
        allow_abbrev=False,  # from_file would not see --conf
        conflict_handler="resolve",  # --batch and --out have another meaning here
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--config", type=Path, help="a TOML file of options; the command line takes precedence")
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--preset", choices=list(PRESETS), help="the model's sizes; default: small")
    model.add_argument(
        "--model", type=Path, help="a model's config.json, or its folder: its sizes, with random weights"
    )
    model.add_argument("--from-hf", type=Path, help="start from a model of transformers, in safetensors")
    add("--layout", default="dp1", help="such as dp2,pp2,tp4,sp,zero1,mb2,zb-h1,full, or dp16,zero3,rep2")
    add("--batch", type=int, default=16, help="sequences per step, over all ranks")
    add("--warmup", type=int, default=0, help="steps of rising learning rate; then it falls to a tenth")
    add("--start-batch", type=int, help="sequences in the first step; default: --batch")
    add("--ramp", type=int, default=0, help="steps in which the batch grows to --batch")
    add("--max-norm", type=float, default=1.0, help="maximum norm of all gradients")
    add("--experts", type=int, help="experts per layer; default: a model without experts")
    add("--top-k", type=int, help="experts per token; default: 2")
    add("--expert-hidden", type=int, help="width of an expert; default: the width of the preset's MLP")
    add("--shared", type=int, help="experts that process every token; default: none")
    add("--balance", type=float, default=0.01, help="weight of the balance loss")
    add("--peak-tflops", type=float, help="of a device, for MFU, if the course does not know the device")
    add("--checkpoints", type=Path, help="a folder: continue from its last checkpoint, and save there")
    add("--save-every", type=int, default=100, help="steps between checkpoints; the last step is saved as well")
    add("--keep", type=int, default=2, help="number of checkpoints to keep")
    add("--bad-steps", type=int, default=3, help="steps in a row without a finite loss and norm that stop the run")
    add("--drop-tokens", type=float, default=0.0, help="share of the input tokens to replace at random")
    add("--elastic", action="store_true", help="fit dp to the number of ranks, whatever the dp in --layout")
    add("--out", type=log_file, help="a file of JSON lines, one per step; a run that continues adds to it")
    return parser


def full_path(source: str | None) -> str | None:
    """Return the full path of a local data set or tokenizer; return a name on Hugging Face unchanged.

    to_hf reads it from a checkpoint, and may run in another folder.
    """
    return str(Path(source).absolute()) if source and Path(source).exists() else source


def check_run(args: argparse.Namespace, config: ModelConfig, layout: Layout, ranks: int | None = None) -> None:
    """Raise ValueError if the layout does not fit the model, the ranks, or any batch of the run."""
    ramp = (args.start_batch, args.batch, args.ramp)
    for batch in sorted({batch_at(step, *ramp) for step in range(1, args.ramp + 2)}):
        check_layout(config, layout, ranks, batch, args.seq, args.moe)


def model_sizes(args: argparse.Namespace) -> tuple[str | None, ModelConfig, dict | None]:
    """Return the preset, the model's sizes, and the arguments of apply_moe, from --preset (small by default), --model
    or --from-hf. The preset is None for the last two. Raises ValueError.
    """
    moe: dict | None = None
    if args.model is None and args.from_hf is None:
        preset = args.preset or "small"
        config = PRESETS[preset]
    else:
        preset = None
        config, moe = read_hf_config(args.model) if args.model else from_hf_config(args.from_hf)
    if args.from_hf and not moe and args.experts is not None:
        raise ValueError(f"--experts is {args.experts}, and the model of --from-hf {args.from_hf} has none")
    moe = moe_options(args, moe)
    return preset, config, moe and moe | {"aux_loss_coeff": args.balance}


def options(argv: list[str] | None = None) -> argparse.Namespace:
    """Return the program's options. Changes nothing; an unknown or invalid option ends the program with status 2."""
    parser = program_parser()
    try:
        args = single_gpu.parse(parser, from_file(sys.argv[1:] if argv is None else list(argv)))
        args.layout = Layout.parse(args.layout)
        args.start_batch = args.batch if args.start_batch is None else args.start_batch
        args.preset, args.config, args.moe = model_sizes(args)
        if (args.shared or 0) < 0:
            raise ValueError("--shared must be 0 or more")
        if min(args.save_every, args.keep, args.bad_steps) < 1 or not 0 <= args.drop_tokens < 1:
            counts = "--save-every, --keep and --bad-steps must be 1 or more"
            raise ValueError(f"{counts}, --drop-tokens 0 or more and below 1")
        if min(*(1 if n is None else n for n in (args.expert_hidden, args.peak_tflops)), 1) <= 0:
            raise ValueError("--expert-hidden and --peak-tflops must be above 0")
        if not 1 <= args.start_batch <= args.batch or min(args.warmup, args.ramp) < 0 or not args.max_norm > 0:
            raise ValueError("--start-batch must be 1 to --batch, --warmup and --ramp 0 or more, --max-norm above 0")
        if args.start_batch < args.batch and not args.ramp:
            raise ValueError("--start-batch needs --ramp, the steps in which it grows to --batch")
        if args.elastic:  # dp, and whether the batches fit, is not known yet
            check_layout(args.config, args.layout, None, None, args.seq, args.moe)
        else:
            check_run(args, args.config, args.layout)
    except ValueError as error:
        parser.error(str(error))
    except ImportError as error:
        parser.error(f"{error}; {'--model' if args.model else '--from-hf'} needs pip install -e '.[hf]'")
    return args


def train(
    parallel: ParallelModel, batches: TokenBatches, args: argparse.Namespace, config: ModelConfig, done: int = 0
) -> Iterator[dict]:
    """Train with these options, and yield a record per step, the same on all ranks except for the times. done: number
    of steps already done.
    """
    layout, device = parallel.layout, next(parallel.stages.parameters()).device
    peak = args.peak_tflops * 1e12 if args.peak_tflops else single_gpu.peak_flops()
    for number in range(done + 1, args.steps + 1):
        start = time.perf_counter()
        batch = batch_at(number, args.start_batch, args.batch, args.ramp)
        batches.batch = batch // layout.dp
        rate = learning_rate(number, args.lr, args.warmup, args.steps)
        for group in parallel.optimizer.param_groups:
            group["lr"] = rate
        first_sample = batches.position + batches.rank * batches.batch  # number of this rank's first sample
        inputs, targets = next(batches)
        if args.drop_tokens:
            inputs = drop_tokens(inputs, args.drop_tokens, config.vocab, args.seed, first_sample)
        inputs, targets = inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)
        step_loss, step_norm = parallel.step(inputs, targets, args.max_norm)
        # The fullest rank's bytes and its number, in one integer: no list as long as the world.
        encoded = single_gpu.peak_memory(device) * layout.ranks + dist.get_rank()
        fullest = torch.full((), encoded, dtype=torch.int64, device=device)
        dist.all_reduce(fullest, dist.ReduceOp.MAX)
        values = torch.stack([step_loss.double(), step_norm.double(), fullest.double()])  # exact up to 2^53
        loss, norm, encoded = values.tolist()  # waits for the device: the time covers the full step
        step_s = time.perf_counter() - start
        peak_memory, rank = divmod(int(encoded), layout.ranks)
        speed = batch * args.seq / step_s / layout.ranks
        yield {
            "step": number,
            "loss": loss,
            "norm": norm,
            "lr": rate,
            "batch": batch,
            "tokens": batches.position * args.seq,
            "step_s": step_s,
            "tokens_per_s": speed,
            "mfu": single_gpu.mfu(config, args.seq, speed, peak) if peak else None,
            "peak_memory": peak_memory,
            "fullest_rank": rank,
            "layout": str(layout),
        }


def main(argv: list[str] | None = None) -> list[dict]:
    """Train with these options, and return the records. Rank 0 prints one line per step and writes the file of --out.
    Tokens/s and MFU are per device; memory is the fullest rank's.

    Needs the default process group. Raises ValueError if the layout does not fit the ranks.
    """
    args, rank = options(argv), dist.get_rank()
    layout = fitted(args.layout, dist.get_world_size()) if args.elastic else args.layout
    tokens, vocab = single_gpu.training_text(args)
    config = dataclasses.replace(args.config, vocab=vocab) if args.preset else args.config
    if vocab > config.vocab:
        name = args.model or args.from_hf
        raise ValueError(f"the text has a vocabulary of {vocab}, the model of {name} one of {config.vocab}")
    try:
        check_run(args, config, layout, dist.get_world_size())
    except ValueError as error:
        raise ValueError(f"--layout {layout}: {error}") from None
    mesh = build_mesh(layout)
    dtype = torch.bfloat16 if args.dtype == "bf16" else torch.float32
    settings: dict[str, Any] = {"moe": args.moe, "seed": args.seed, "dtype": dtype, "lr": args.lr, **single_gpu.ADAMW}
    parallel = parallelize(config, layout, mesh, **settings)
    batches = TokenBatches(tokens, args.batch // layout.dp, args.seq, mesh.dp.rank(), layout.dp, args.seed)
    if rank == 0:
        title = describe_model(str(args.preset or args.model or args.from_hf), config, args.moe)
        ranks = f"{layout.ranks} rank{'s' if layout.ranks > 1 else ''}"
        print(f"{title}, layout {layout}: {ranks}, {len(tokens):,} tokens of text")
    same = {"seed": args.seed, "drop_tokens": args.drop_tokens, "moe": args.moe}
    plan = {name: getattr(args, name) for name in PLANNED}
    plan |= {"dataset": full_path(args.dataset), "tokenizer": full_path(args.tokenizer)}
    run = SavedRun(parallel, batches, args.checkpoints, args.save_every, args.keep, same, plan, args.bad_steps)
    try:
        if args.from_hf and not run.step:
            from_hf(parallel, args.from_hf)
        if run.step >= args.steps:
            run.say(f"nothing left to do: {run.step} steps are done, --steps is {args.steps}")
        log, records = Log(args.out if rank == 0 else None, run.step), []
        for record in train(parallel, batches, args, active_config(config, args.moe), run.step):
            records.append(record)
            run.say(single_gpu.describe(record))
            log.add(record)
            run.after(record["step"], record["loss"], record["norm"], record["step"] == args.steps)
        run.finish()
    finally:
        run.release()
    return records
