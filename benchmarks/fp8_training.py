"""Training in FP8: the loss of each recipe against BF16's over seeds and learning rates, and a large model's step.

    python benchmarks/fp8_training.py curves      # writes benchmarks/results/fp8_curves_<device>.json
    python benchmarks/fp8_training.py steps       # writes benchmarks/results/fp8_steps_<device>.json

curves: a small model on the corpus, everything kept in the recipe's dtypes (RecipeOptimizer), the same batches for all
recipes; losses are means of ten steps. The loss at the end is the mean of the last fifty, its gap that to BF16 of the
same seed and learning rate. BF16 of another seed says how large a gap means nothing.

steps: bench-1B of 4,096 tokens on a GPU (debug on a CPU), fused AdamW on float32 weights and autocast in both columns,
BF16 and FP8 of each way to scale: seconds, tokens/s, MFU of the BF16 peak, peak memory, and the losses.
"""

import argparse
import dataclasses
import itertools
import statistics

import torch
from measure import save

from course_lib.data import ByteTokenizer, TokenBatches, corpus
from course_lib.fp8 import apply_fp8
from course_lib.fp8_linear import update_scales
from course_lib.fp8_recipes import RECIPES, by_blocks, per_tensor
from course_lib.model import PRESETS, ModelConfig, Transformer, loss
from course_lib.recipe_optimizer import RecipeOptimizer
from course_lib.single_gpu import adamw, train, train_step

NAMES = ["BF16, FP32 accumulation", "Transformer Engine", "FP8-LM", "DeepSeek-V3", "nanotron"]
SMALL = ModelConfig(layers=2, hidden=128, heads=4, kv_heads=2, ffn_hidden=256, vocab=256)
SCALINGS = {
    "BF16": None,
    "tensor": per_tensor(),
    "delayed": per_tensor(history=16, weight_history=16),
    "blocks": by_blocks(),
}


def device_here() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def curve(name: str, lr: float, seed: int, steps: int, tokens: torch.Tensor) -> list[float]:
    """The loss of each step of a recipe."""
    recipe, device, losses = RECIPES[name], device_here(), []
    with device:
        model = apply_fp8(Transformer(SMALL, seed), recipe)
    optimizer, batches = RecipeOptimizer(model, recipe, lr), TokenBatches(tokens, 8, 64, seed=seed)
    for _ in range(steps):
        inputs, targets = (part.to(device) for part in next(batches))
        step_loss = loss(model(inputs), targets)
        step_loss.backward()
        optimizer.step()
        losses.append(step_loss.detach())
    return torch.stack(losses).tolist()


def curves(chosen: argparse.Namespace) -> dict:
    """Rows of recipe, learning rate, seed, the curve by tens of steps, and the loss at the end."""
    tokens, rows = ByteTokenizer().encode(corpus(2_000_000)), []
    for lr, seed, name in itertools.product(chosen.lr, range(chosen.seeds), NAMES):
        losses = curve(name, lr, seed, chosen.steps, tokens)
        tens = [statistics.mean(losses[i : i + 10]) for i in range(0, len(losses), 10)]
        row = {"recipe": name, "lr": lr, "seed": seed, "tens": tens, "end": statistics.mean(losses[-50:])}
        rows.append(row)
        print(f"lr {lr:g} seed {seed} {name:26s} {row['end']:.4f}", flush=True)
    return {"model": dataclasses.asdict(SMALL), "batch": 8, "seq": 64, "steps": chosen.steps, "rows": rows}


def large_steps(chosen: argparse.Namespace) -> dict:
    """The medians of each way to scale, and its losses."""
    device = device_here()
    preset, batch, seq = ("bench-1B", 1, 4096) if device.type == "cuda" else ("debug", 2, 64)
    tokens, rows = ByteTokenizer().encode(corpus()), []
    for name, casts in SCALINGS.items():
        with device:
            model = apply_fp8(Transformer(PRESETS[preset]), dataclasses.replace(RECIPES["DeepSeek-V3"], casts=casts))
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

        def step(*arguments):
            step_loss = train_step(*arguments)
            update_scales(arguments[0])
            return step_loss

        batches = TokenBatches(tokens, batch, seq)
        records = train(model, adamw(model, 1e-4), batches, chosen.steps, torch.bfloat16, step=step)
        settled = records[min(5, len(records) - 1) :]
        figures = {key: statistics.median(r[key] for r in settled) for key in ("step_s", "tokens_per_s", "peak_memory")}
        mfu = settled[-1]["mfu"] and statistics.median(record["mfu"] for record in settled)
        rows.append({"scaling": name, **figures, "mfu": mfu, "losses": [record["loss"] for record in records]})
        print(f"{name:8s} {figures['step_s'] * 1e3:.0f} ms a step, loss {records[-1]['loss']:.4f}", flush=True)
        del model
    return {"preset": preset, "batch": batch, "seq": seq, "steps": chosen.steps, "rows": rows}


def main(argv: list[str] | None = None) -> None:
    """Measure on this machine's device and write the figures down."""
    parser = argparse.ArgumentParser(description="Training in FP8 against BF16.")
    parser.add_argument("what", choices=["curves", "steps"])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-3, 3e-3, 1e-2])
    chosen = parser.parse_args(argv)
    torch.set_num_threads(1)
    figures = curves(chosen) if chosen.what == "curves" else large_steps(chosen)
    save(f"fp8_{chosen.what}", figures)


if __name__ == "__main__":
    main()
