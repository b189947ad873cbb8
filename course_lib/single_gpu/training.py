"""Train a model on one device: the step, the loop, and how well the device was used (MFU).

A step's forward and backward need 6N + 12·L·a·d·s floating-point operations per token (Chowdhery et al. 2022, PaLM,
appendix B). MFU is that, times tokens per second, over the peak of the device. For memory see `memory`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from course_lib.single_gpu.data import ByteTokenizer, TokenBatches, corpus, hf_tokens
from course_lib.single_gpu.devices import peak_flops
from course_lib.single_gpu.memory import param_count
from course_lib.single_gpu.model import PRESETS, ModelConfig, Transformer, loss
from course_lib.single_gpu.placement import placement_of
from course_lib.single_gpu.same_text import check_same_text


# exercise 01.12
def flops_per_token(config: ModelConfig, seq: int) -> float:
    """Return the floating-point operations of forward and backward for one token: 6N + 12·L·a·d·s (PaLM, appendix B).

    N is all parameters, a tied embedding once.
    """
    return 6 * param_count(config) + 12 * config.layers * config.attention_width * seq


# exercise 01.12
def mfu(config: ModelConfig, seq: int, tokens_per_s: float, peak: float) -> float:
    """Return the model FLOPs utilization of one device, 0 to 1.

    tokens_per_s: of that device; peak: its floating-point operations per second.
    """
    return tokens_per_s * flops_per_token(config, seq) / peak


def peak_memory(device: torch.device) -> int:
    """Return the bytes at the peak so far: of the caching allocator on CUDA, else of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    in_kib = sys.platform != "darwin"  # ru_maxrss is in KiB on Linux, in bytes on macOS
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1024 if in_kib else 1)


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    dtype: torch.dtype = torch.float32,
    max_norm: float = 1.0,
) -> torch.Tensor:
    """Run one step on inputs and targets, each [b, s]; dtype: of the matmuls (autocast). Return the loss, a scalar on
    the device.
    """
    optimizer.zero_grad()
    with torch.autocast(inputs.device.type, dtype, enabled=dtype != torch.float32):
        step_loss = loss(model(inputs), targets)
    step_loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    return step_loss.detach()


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterator,
    steps: int,
    dtype: torch.dtype = torch.float32,
    on_step: Callable[[dict], None] = lambda record: None,
    step: Callable = train_step,
    ranks_per_batch: int = 1,
) -> list[dict]:
    """Train for `steps` steps, each by `step`. Return, and pass to `on_step`, a record of each: step, loss, step_s,
    tokens_per_s, mfu, peak_memory. model: a `Transformer`, or a wrapper that has it as `.module`; ranks_per_batch: how
    many devices share the work on a batch; tokens_per_s and mfu are per device.
    """
    device, peak, records = next(model.parameters()).device, peak_flops(), []
    core = getattr(model, "module", model)
    # active_config, of a mixture (notebook 08): the sizes that one token goes through.
    config = cast(ModelConfig, getattr(core, "active_config", core.config))
    model.train()
    for number in range(1, steps + 1):
        start = time.perf_counter()
        inputs, targets = (part.to(device, non_blocking=True) for part in next(batches))
        # .item() waits for the device: the time covers the complete step.
        step_loss = step(model, optimizer, inputs, targets, dtype).item()
        step_s = time.perf_counter() - start
        speed = inputs.numel() / step_s / ranks_per_batch
        used = mfu(config, inputs.shape[1], speed, peak) if peak else None
        record = {"step": number, "loss": step_loss, "step_s": step_s, "tokens_per_s": speed, "mfu": used}
        records.append(record | {"peak_memory": peak_memory(device)})
        on_step(records[-1])
    return records


# exercise 01.11
def evaluate(model: nn.Module, batches: Iterator, count: int) -> torch.Tensor:
    """Return the mean loss over `count` batches, a float32 scalar without a graph, on the model's device.

    Memory does not grow with `count`, no value is read on the host, and the model stays as it is.
    """
    device = next(model.parameters()).device
    total = torch.zeros((), device=device)
    with torch.no_grad():
        for _ in range(count):
            inputs, targets = (part.to(device) for part in next(batches))
            total = total + loss(model(inputs), targets)
    return total / count


def out_file(path: str) -> Path:
    """Return a file that a program may write: the type of an option. Raises ArgumentTypeError."""
    file = Path(path)
    if not file.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {file.parent}")
    if file.is_dir():
        raise argparse.ArgumentTypeError(f"{file} is a folder; name a file in it")
    return file


def training_parser(prog: str, description: str) -> argparse.ArgumentParser:
    """Return a parser with the options of every training program of this course."""
    parser = argparse.ArgumentParser(
        prog=prog, description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add, precision = parser.add_argument, "bf16" if torch.cuda.is_available() else "fp32"
    add("--preset", default="small", choices=list(PRESETS), help="the model's sizes")
    add("--steps", type=int, default=50)
    add("--batch", type=int, default=8, help="sequences per step, on each device")
    add("--seq", type=int, default=128, help="tokens per sequence")
    add("--lr", type=float, default=2e-3)
    add("--dtype", default=precision, choices=["fp32", "bf16"], help="of the matmuls")
    add("--seed", type=int, default=0)
    add("--dataset", help="a file, a folder, or a name at Hugging Face (a .txt is one document); needs --tokenizer")
    add("--tokenizer", help="a tokenizer.json, a folder with one, or a name at Hugging Face")
    add("--column", default="text", help="of --dataset: the column that holds the text")
    add("--split", default="train", help="of --dataset")
    add("--subset", help="of --dataset: the one of its configurations that is read")
    add("--documents", type=int, help="of --dataset: how many are read at most; all by default")
    add("--out", type=out_file, help="a JSON file for the records of all steps")
    return parser


def add_micro_batch(parser: argparse.ArgumentParser) -> None:
    """Add the option --micro-batch, for which `parse` sets the default and checks the value."""
    parser.add_argument("--micro-batch", type=int, help="sequences at a time; all by default")


def parse(parser: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    """Return the options of a `training_parser`. An impossible one ends the program with status 2."""
    args = parser.parse_args(argv)
    if "micro_batch" in args:
        args.micro_batch = args.batch if args.micro_batch is None else args.micro_batch
        if not 1 <= args.micro_batch <= args.batch:
            parser.error("--micro-batch must be 1 or more, and no more than --batch")
    if min(args.steps, args.batch, args.seq) < 1:
        parser.error("--steps, --batch and --seq must be 1 or more")
    if not 0 < args.lr < float("inf"):
        parser.error("--lr must be a number above 0")
    if (args.dataset is None) != (args.tokenizer is None):
        parser.error("--dataset and --tokenizer go together")
    if "" in (args.dataset, args.tokenizer):
        parser.error("--dataset and --tokenizer must not be empty")
    of_dataset = ("column", "split", "subset", "documents")
    if args.dataset is None and any(getattr(args, name) != parser.get_default(name) for name in of_dataset):
        parser.error("--column, --split, --subset and --documents go with --dataset")
    if args.documents is not None and args.documents < 1:
        parser.error("--documents must be 1 or more")
    return args


def options(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the program's options. Touches nothing; an unknown or impossible one ends the program with status 2."""
    return parse(training_parser("single_gpu", "Train a model on one device."), argv)


def describe(record: dict) -> str:
    """Return one line for a step's record."""
    share = f" | MFU {record['mfu']:.1%}" if record["mfu"] else ""
    return (
        f"step {record['step']:>5} | loss {record['loss']:.4f} | {record['tokens_per_s']:>9,.0f} tokens/s{share} | "
        f"peak memory {record['peak_memory'] / 2**30:.2f} GiB"
    )


ADAMW: dict[str, Any] = {
    "betas": (0.9, 0.95),
    "weight_decay": 0.1,
    "fused": True,
}  # in every training program of this course


def decay_groups(module_or_params: nn.Module | Iterable[nn.Parameter]) -> list[dict]:
    """Return an optimizer's parameter groups: matrices have its weight decay, norms and biases have none.

    A parameter without decay has fewer than two dimensions, or its placement says so. A flat shard counts with the
    dimensions of its full parameter, which its placement keeps.
    """
    parameters = module_or_params.parameters() if isinstance(module_or_params, nn.Module) else module_or_params
    groups: dict[bool, dict[str, Any]] = {True: {"params": []}, False: {"params": [], "weight_decay": 0.0}}
    for parameter in parameters:
        flat = placement_of(parameter).flat_shard
        decays = placement_of(parameter).decays and len(flat.full_shape if flat else parameter.shape) > 1
        groups[decays]["params"].append(parameter)
    return [group for group in groups.values() if group["params"]]


def adamw(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """Return the optimizer of every training program of this course."""
    return torch.optim.AdamW(decay_groups(model), lr=lr, **ADAMW)


def training_text(args: argparse.Namespace) -> tuple[torch.Tensor, int]:
    """Return the tokens [n] of the data set that the options name, or of the corpus, and the size of the vocabulary.

    A data set or tokenizer that does not work ends the program with one line. Raises ValueError if ranks have different
    texts.
    """
    if args.dataset is None:
        tokens, vocab = ByteTokenizer().encode(corpus()), ByteTokenizer.vocab_size
    else:
        read = {name: getattr(args, name) for name in ("split", "column", "documents", "subset")}
        try:
            tokens, tokenizer = hf_tokens(args.dataset, args.tokenizer, **read)
        except (ValueError, OSError, ImportError) as error:
            needs = "; --dataset needs pip install -e '.[hf]'" if isinstance(error, ImportError) else ""
            raise SystemExit(f"{error}{needs}") from None
        vocab = 1 + max(tokenizer.get_vocab().values())
    if len(tokens) <= args.seq:
        text = args.dataset or "the text of the course"
        raise SystemExit(f"{text}: {len(tokens):,} tokens; --seq {args.seq} needs {args.seq + 1:,} or more")
    check_same_text(tokens, vocab)
    return tokens, vocab


def run(
    args: argparse.Namespace,
    step: Callable = train_step,
    build: Callable[[ModelConfig, int], nn.Module] = Transformer,
    make_optimizer: Callable[[nn.Module, float], torch.optim.Optimizer] = adamw,
    rank: int = 0,
    world_size: int = 1,
    ranks_per_batch: int = 1,
) -> list[dict]:
    """Train as the options say; rank 0 prints one line per step and writes the records to --out.

    step: as `train_step`. build(config, seed): the model, or a wrapper that has it as `.module`. make_optimizer(model,
    lr): its optimizer. ranks_per_batch: how many consecutive ranks have the same batch. Returns the records of `train`.
    """
    from tqdm import tqdm

    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    tokens, vocab = training_text(args)
    config = dataclasses.replace(PRESETS[args.preset], vocab=vocab)
    with device:
        model = build(config, args.seed)
    optimizer = make_optimizer(model, args.lr)
    share, shares = rank // ranks_per_batch, world_size // ranks_per_batch
    batches = TokenBatches(tokens, args.batch, args.seq, share, shares, args.seed)
    dtype = torch.bfloat16 if args.dtype == "bf16" else torch.float32
    if rank == 0:
        print(f"{args.preset}: {param_count(config):,} parameters on {device}, {len(tokens):,} tokens of text")
    # No bar on other ranks, or if the output is no terminal.
    with tqdm(total=args.steps, unit="step", disable=True if rank else None) as bar:

        def on_step(record: dict) -> None:
            if rank == 0:
                bar.write(describe(record))
                bar.update()

        records = train(model, optimizer, batches, args.steps, dtype, on_step, step, ranks_per_batch)
    if args.out and rank == 0:
        args.out.write_text(
            json.dumps({"options": {k: str(v) for k, v in vars(args).items()}, "records": records}, indent=1)
        )
    return records


def main(argv: list[str] | None = None) -> list[dict]:
    """Train as the options say; print one line per step, write the records to --out, and return them."""
    return run(options(argv))
