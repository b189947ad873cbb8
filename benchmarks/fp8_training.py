"""Training in FP8: the loss of each recipe against BF16's, over seeds and learning rates.

    python benchmarks/fp8_training.py             # both
    python benchmarks/fp8_training.py curves      # writes benchmarks/results/fp8_curves_<device>.json
    python benchmarks/fp8_training.py spikes      # writes benchmarks/results/fp8_spikes_<device>.json

curves: a small model on the corpus, with its state in the recipe's dtypes (RecipeOptimizer), and the same batches for
all recipes; losses are means of ten steps. The loss at the end is the mean of the last fifty, its gap the difference
from BF16 of the same seed and learning rate. BF16 with another seed, and FP32 with the same one, show which gaps are
insignificant.

spikes: a small model is trained in BF16, then training continues with each kind of scaling, with one spike: in one
token and one channel, gate and up of each SwiGLU are multiplied by `growth` for one step. Gaps are relative to BF16
with the same spike.
"""

import argparse
import copy
import dataclasses
import itertools
import statistics

import torch
from measure import save

from course_lib.fp8.delayed_scaling import update_scales
from course_lib.fp8.operands import Cast
from course_lib.fp8.program import apply_fp8
from course_lib.fp8.recipe_optimizer import RecipeOptimizer
from course_lib.fp8.recipes import RECIPES, Recipe, by_blocks, per_tensor
from course_lib.single_gpu.data import ByteTokenizer, TokenBatches, corpus
from course_lib.single_gpu.model import PRESETS, ModelConfig, Transformer, loss, swiglu
from course_lib.single_gpu.training import adamw, train_step

NAMES = ["BF16, FP32 accumulation", "Transformer Engine", "FP8-LM", "DeepSeek-V3", "nanotron"]
ALL_FP32 = Recipe(None, torch.float32, torch.float32, None, None, torch.float32, torch.float32, "the control")
CURVES = {name: RECIPES[name] for name in NAMES} | {"FP32": ALL_FP32}
SMALL = ModelConfig(layers=2, hidden=128, heads=4, kv_heads=2, ffn_hidden=256, vocab=256)
LONG_HISTORY = per_tensor(history=1024, weight_history=1024)
SPIKE_CASTS = {
    "BF16": None,
    "delayed, 1,024 steps": LONG_HISTORY,
    "delayed, 16 steps": per_tensor(history=16, weight_history=16),
    "delayed, 1 step": per_tensor(history=1, weight_history=1),
    "delayed, 1,024 steps, inputs in e5m2": LONG_HISTORY._replace(input=Cast(torch.float8_e5m2, history=1024)),
    "current": per_tensor(),
    "tiles": by_blocks(),
}
BEFORE_SPIKE, SPIKE_AT = 40, 4  # steps in BF16; steps from the switch to the spike


def device_here() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def curve(name: str, lr: float, seed: int, steps: int, tokens: torch.Tensor) -> list[float]:
    """Return the loss of each step of a recipe."""
    recipe, device, losses = CURVES[name], device_here(), []
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


def curves(args: argparse.Namespace) -> dict:
    """Return rows of recipe, learning rate, seed, the curve by tens of steps, and the loss at the end."""
    tokens, rows = ByteTokenizer().encode(corpus(2_000_000)), []
    for lr, seed, name in itertools.product(args.lr, range(args.seeds), CURVES):
        losses = curve(name, lr, seed, args.steps, tokens)
        tens = [statistics.mean(losses[i : i + 10]) for i in range(0, len(losses), 10)]
        row = {"recipe": name, "lr": lr, "seed": seed, "tens": tens, "end": statistics.mean(losses[-50:])}
        rows.append(row)
        print(f"lr {lr:g} seed {seed} {name:26s} {row['end']:.4f}", flush=True)
    return {"model": dataclasses.asdict(SMALL), "batch": 8, "seq": 64, "steps": args.steps, "rows": rows}


class SpikingSwiglu:
    """SwiGLU that multiplies gate and up of one token and one channel by `growth`, unless it is 1."""

    growth = 1.0

    def __call__(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        added = torch.zeros_like(gate)  # [b, s, f]
        channel = (gate[0, 0].clamp(min=0) * up[0, 0].abs()).argmax()
        added[0, 0, channel] = self.growth - 1
        return swiglu(gate + added * gate.detach(), up + added * up.detach())


def spike_curve(model, optimizer, batches: list, growth: float = 1.0, at: int | None = None) -> list[float]:
    """Return the loss of each step on the batches, in BF16 where matmuls are not in FP8. Step `at` has a spike."""
    losses = []
    for number, batch in enumerate(batches):
        for block in model.blocks:
            block.mlp.activation.growth = growth if number == at else 1.0
        losses.append(train_step(model, optimizer, *batch, torch.bfloat16))
        update_scales(model)
    return torch.stack(losses).tolist()


def spike_gaps(losses: list[float], base: list[float]) -> dict[str, float]:
    """Return how far losses are above the base's losses: at the spike, in the next 15 steps, in the last 10; and the
    loss of the last 10.
    """
    gaps = [mine - theirs for mine, theirs in zip(losses, base, strict=True)]
    after = gaps[SPIKE_AT + 1 : SPIKE_AT + 16]
    return {
        "at": gaps[SPIKE_AT],
        "next": statistics.mean(after),
        "last": statistics.mean(gaps[-10:]),
        "loss": statistics.mean(losses[-10:]),
    }


def spikes(args: argparse.Namespace) -> dict:
    """Return rows of casts, learning rate, growth, seed, and `spike_gaps` to BF16."""
    device, rows = device_here(), []
    text = TokenBatches(ByteTokenizer().encode(corpus(2_000_000)), 8, 32)
    batches = [tuple(part.to(device) for part in next(text)) for _ in range(BEFORE_SPIKE + args.steps)]
    for lr, seed in itertools.product(args.lr, range(args.seeds)):
        with device:
            model = Transformer(PRESETS["debug"], seed)
        for block in model.blocks:
            block.mlp.activation = SpikingSwiglu()
        optimizer = adamw(model, lr)
        spike_curve(model, optimizer, batches[:BEFORE_SPIKE])
        for growth in args.growth:
            curves_here = {}
            for name, casts in SPIKE_CASTS.items():
                copied, its_optimizer = copy.deepcopy((model, optimizer))
                apply_fp8(copied, dataclasses.replace(RECIPES["DeepSeek-V3"], casts=casts))
                curves_here[name] = spike_curve(copied, its_optimizer, batches[BEFORE_SPIKE:], growth, SPIKE_AT)
                row = {"casts": name, "lr": lr, "growth": growth, "seed": seed}
                rows.append(row | spike_gaps(curves_here[name], curves_here["BF16"]))
                gaps = ", ".join(f"{key} {rows[-1][key]:+.3f}" for key in ("at", "next", "last"))
                print(f"lr {lr:g} growth {growth:g} seed {seed} {name:38s} {gaps}", flush=True)
    return {"preset": "debug", "batch": 8, "seq": 32, "before": BEFORE_SPIKE, "steps": args.steps, "rows": rows}


COMPARISONS = {"curves": curves, "spikes": spikes}


def main(argv: list[str] | None = None) -> None:
    """Measure on this machine's device and write the figures."""
    parser = argparse.ArgumentParser(description="Training in FP8 against BF16.")
    parser.add_argument("what", nargs="*", help=f"of {', '.join(COMPARISONS)}; all if none is named")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-3, 3e-3, 1e-2])
    parser.add_argument("--growth", type=float, nargs="+", default=[100, 300, 1000], help="of gate and up in a spike")
    args = parser.parse_args(argv)
    if unknown := set(args.what) - set(COMPARISONS):
        parser.error(f"{', '.join(sorted(unknown))}: the comparisons are {', '.join(COMPARISONS)}")
    if "spikes" in (args.what or COMPARISONS) and args.steps < SPIKE_AT + 2:
        parser.error(f"--steps: {SPIKE_AT + 2} or more, so that there is one after the spike")
    torch.set_num_threads(1)
    for what in args.what or COMPARISONS:
        save(f"fp8_{what}", COMPARISONS[what](args))


if __name__ == "__main__":
    main()
