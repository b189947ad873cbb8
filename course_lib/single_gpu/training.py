"""Train a model on one device: the step, the loop, and how well the device was used (MFU).

A step's forward and backward need 6N + 12·L·a·d·s floating-point operations a token (Chowdhery et al. 2022, PaLM,
appendix B). MFU is that, times tokens per second, over what the device can do at most. For memory see `memory`.
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
    """Bytes at the peak so far: of the caching allocator on CUDA, else of the whole process."""
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
    """One step on inputs and targets, each [b, s]; dtype: that of the matrix products (autocast); returns the loss, a
    scalar on the device.
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
    """Train for `steps` steps, each by `step`. Returns, and passes to `on_step`, a record of each: step, loss, step_s,
    tokens_per_s, mfu, peak_memory. model: a `Transformer`, or a wrapper that has it as `.module`; ranks_per_batch: how
    many devices share the work on a batch; tokens_per_s and mfu are one device's.
    """
    device, peak, records = next(model.parameters()).device, peak_flops(), []
    core = getattr(model, "module", model)
    config = getattr(core, "active_config", core.config)  # of a mixture (notebook 08): what one token goes through
    model.train()
    for number in range(1, steps + 1):
        start = time.perf_counter()
        inputs, targets = (part.to(device, non_blocking=True) for part in next(batches))
        step_loss = step(
            model, optimizer, inputs, targets, dtype
        ).item()  # .item() waits for the device: the time is the whole step's
        step_s = time.perf_counter() - start
        speed = inputs.numel() / step_s / ranks_per_batch
        used = mfu(config, inputs.shape[1], speed, peak) if peak else None
        records.append(
            {
                "step": number,
                "loss": step_loss,
                "step_s": step_s,
                "tokens_per_s": speed,
                "mfu": used,
                "peak_memory": peak_memory(device),
            }
        )
        on_step(records[-1])
    return records


# exercise 01.11
def evaluate(model: nn.Module, batches: Iterator, count: int) -> torch.Tensor:
    """Return the mean loss over `count` batches, a scalar tensor without a graph, on the model's device.

    Memory does not grow with `count`, no value is read on the host, and the model stays as it is.
    """
    device = next(model.parameters()).device
    total = 0.0
    with torch.no_grad():
        for _ in range(count):
            inputs, targets = (part.to(device) for part in next(batches))
            total = total + loss(model(inputs), targets)
    return total / count


def out_file(path: str) -> Path:
    """A file that a program may write, as the type of an option. Raises ArgumentTypeError."""
    file = Path(path)
    if not file.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {file.parent}")
    if file.is_dir():
        raise argparse.ArgumentTypeError(f"{file} is a folder; name a file in it")
    return file


def training_parser(prog: str, description: str) -> argparse.ArgumentParser:
    """The options that every training program of this course has."""
    parser = argparse.ArgumentParser(
        prog=prog, description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add, precision = parser.add_argument, "bf16" if torch.cuda.is_available() else "fp32"
    add("--preset", default="small", choices=list(PRESETS), help="the model's sizes")
    add("--steps", type=int, default=50)
    add("--batch", type=int, default=8, help="sequences a step, on each device")
    add("--seq", type=int, default=128, help="tokens a sequence")
    add("--lr", type=float, default=2e-3)
    add("--dtype", default=precision, choices=["fp32", "bf16"], help="of the matrix products")
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
    chosen = parser.parse_args(argv)
    if "micro_batch" in chosen:
        chosen.micro_batch = chosen.batch if chosen.micro_batch is None else chosen.micro_batch
        if not 1 <= chosen.micro_batch <= chosen.batch:
            parser.error("--micro-batch must be 1 or more, and no more than --batch")
    if min(chosen.steps, chosen.batch, chosen.seq) < 1:
        parser.error("--steps, --batch and --seq must be 1 or more")
    if not 0 < chosen.lr < float("inf"):
        parser.error("--lr must be a number above 0")
    if (chosen.dataset is None) != (chosen.tokenizer is None):
        parser.error("--dataset and --tokenizer go together")
    if "" in (chosen.dataset, chosen.tokenizer):
        parser.error("--dataset and --tokenizer must not be empty")
    of_dataset = ("column", "split", "subset", "documents")
    if chosen.dataset is None and any(getattr(chosen, name) != parser.get_default(name) for name in of_dataset):
        parser.error("--column, --split, --subset and --documents go with --dataset")
    if chosen.documents is not None and chosen.documents < 1:
        parser.error("--documents must be 1 or more")
    return chosen


def options(argv: list[str] | None = None) -> argparse.Namespace:
    """The program's options. Touches nothing; an unknown or impossible one ends the program with status 2."""
    return parse(training_parser("single_gpu", "Train a model on one device."), argv)


def describe(record: dict) -> str:
    """One line of a step's record."""
    share = f" | MFU {record['mfu']:.1%}" if record["mfu"] else ""
    return (
        f"step {record['step']:>5} | loss {record['loss']:.4f} | {record['tokens_per_s']:>9,.0f} tokens/s{share} | "
        f"peak memory {record['peak_memory'] / 2**30:.2f} GiB"
    )


ADAMW = {"betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}  # in every training program of this course


def decay_groups(module_or_params: nn.Module | Iterable[nn.Parameter]) -> list[dict]:
    """Return an optimizer's parameter groups: matrices have its weight decay, norms and biases have none.

    A parameter without decay has fewer than two dimensions. A flat shard counts with the dimensions of its full
    parameter, which its placement keeps.
    """
    is_module = isinstance(module_or_params, nn.Module)
    groups = {True: {"params": []}, False: {"params": [], "weight_decay": 0.0}}
    for parameter in module_or_params.parameters() if is_module else module_or_params:
        flat = placement_of(parameter).flat_shard
        decays = len(flat.full_shape if flat else parameter.shape) > 1
        groups[decays]["params"].append(parameter)
    return [group for group in groups.values() if group["params"]]


def adamw(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """The optimizer of every training program of this course."""
    return torch.optim.AdamW(decay_groups(model), lr=lr, **ADAMW)


def training_text(chosen: argparse.Namespace) -> tuple[torch.Tensor, int]:
    """The tokens [n] that the options name, and the size of their vocabulary; the corpus where they name none.

    A data set or tokenizer that does not work ends the program with one line. Raises ValueError where ranks have
    different texts.
    """
    if chosen.dataset is None:
        tokens, vocab = ByteTokenizer().encode(corpus()), ByteTokenizer.vocab_size
    else:
        read = {name: getattr(chosen, name) for name in ("split", "column", "documents", "subset")}
        try:
            tokens, tokenizer = hf_tokens(chosen.dataset, chosen.tokenizer, **read)
        except (ValueError, OSError, ImportError) as error:
            needs = "; --dataset needs pip install -e '.[hf]'" if isinstance(error, ImportError) else ""
            raise SystemExit(f"{error}{needs}") from None
        vocab = 1 + max(tokenizer.get_vocab().values())
    if len(tokens) <= chosen.seq:
        text = chosen.dataset or "the text of the course"
        raise SystemExit(f"{text}: {len(tokens):,} tokens; --seq {chosen.seq} needs {chosen.seq + 1:,} or more")
    check_same_text(tokens, vocab)
    return tokens, vocab


def run(
    chosen: argparse.Namespace,
    step: Callable = train_step,
    build: Callable[[ModelConfig, int], nn.Module] = Transformer,
    make_optimizer: Callable[[nn.Module, float], torch.optim.Optimizer] = adamw,
    rank: int = 0,
    world_size: int = 1,
    ranks_per_batch: int = 1,
) -> list[dict]:
    """Train as the options say; rank 0 prints one line a step and writes the records where --out says.

    step: as `train_step`. build(config, seed): the model, or a wrapper that has it as `.module`. make_optimizer(model,
    lr): its optimizer. ranks_per_batch: how many consecutive ranks have the same batch. Returns the records of `train`.
    """
    from tqdm import tqdm

    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    tokens, vocab = training_text(chosen)
    config = dataclasses.replace(PRESETS[chosen.preset], vocab=vocab)
    with device:
        model = build(config, chosen.seed)
    optimizer = make_optimizer(model, chosen.lr)
    share, shares = rank // ranks_per_batch, world_size // ranks_per_batch
    batches = TokenBatches(tokens, chosen.batch, chosen.seq, share, shares, chosen.seed)
    dtype = torch.bfloat16 if chosen.dtype == "bf16" else torch.float32
    if rank == 0:
        print(f"{chosen.preset}: {param_count(config):,} parameters on {device}, {len(tokens):,} tokens of text")
    # No bar where the output is no terminal, or another rank's.
    with tqdm(total=chosen.steps, unit="step", disable=True if rank else None) as bar:

        def on_step(record: dict) -> None:
            if rank == 0:
                bar.write(describe(record))
                bar.update()

        records = train(model, optimizer, batches, chosen.steps, dtype, on_step, step, ranks_per_batch)
    if chosen.out and rank == 0:
        chosen.out.write_text(
            json.dumps({"options": {k: str(v) for k, v in vars(chosen).items()}, "records": records}, indent=1)
        )
    return records


def main(argv: list[str] | None = None) -> list[dict]:
    """Train as the options say; prints one line a step, writes the records where --out says, and returns them."""
    return run(options(argv))
