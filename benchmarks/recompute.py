"""Savings and costs of recomputation: bytes kept, peak memory, FLOPs and time of a forward and backward, by mode.

    python benchmarks/recompute.py        # writes benchmarks/results/recompute_<device>.json

Modes are none, selective, matmuls (selective with the policy keep_matmuls) and full, all by torch.utils.checkpoint.
Each runs in alternation with none, as does none with itself: the spread of that ratio is the noise. Bytes kept are
held against memory.activation_bytes, without the mode matmuls. MFU and HFU want a device of a known peak.
"""

import torch
from measure import paired, peak_mib, write
from transformer import step

from course_lib.recompute.modes import apply_recompute, keep_matmuls, retained_bytes
from course_lib.recompute.profiling import count_flops, hfu, step_flops
from course_lib.single_gpu.devices import peak_flops
from course_lib.single_gpu.memory import activation_bytes
from course_lib.single_gpu.model import PRESETS, Transformer, loss

MODES = {
    "none": ("none", None),
    "selective": ("selective", None),
    "matmuls": ("selective", keep_matmuls),
    "full": ("full", None),
}
CLOSE = 0.05  # relative tolerance between measured bytes and the formula


def retained_by_forward(model: Transformer, forward) -> int:
    """Return the bytes that `forward()` leaves alive: by CUDA's allocator, or those made on a CPU."""
    if not torch.cuda.is_available():
        return retained_bytes(model, forward)
    model.zero_grad()
    before = torch.cuda.memory_allocated()
    result = forward()  # noqa: F841  (it holds the graph)
    return torch.cuda.memory_allocated() - before


def retained_against_formula(model: Transformer, forward, mode: str, batch: int, seq: int) -> dict:
    """Return the MiB kept, and the formula's error in percent, if any; PyTorch's RMSNorm is fused on CUDA alone."""
    gpu, retained = torch.cuda.is_available(), retained_by_forward(model, forward)
    figures = {"kept_mib": retained / 2**20}
    if mode != "matmuls":
        formula = activation_bytes(model.config, batch, seq, 2 if gpu else 4, mode, fused_norm=gpu)
        figures["formula_mib"] = formula / 2**20
        figures["formula_error_percent"] = 100 * (formula / retained - 1)
        figures["within_5_percent"] = abs(formula / retained - 1) <= CLOSE
    return figures


def flops_and_use(config, batch: int, seq: int, mode: str, run, seconds: float) -> dict:
    """Return GFLOP by formula and counted; MFU and HFU, None if the device's peak is not known."""
    needed, executed = step_flops(config, batch, seq, MODES[mode][0])
    peak = peak_flops()
    return {
        "needed_gflop": needed / 1e9,
        "executed_gflop": executed / 1e9,
        "counted_gflop": count_flops(run) / 1e9,
        "mfu": hfu(needed, seconds, peak) if peak else None,
        "hfu": hfu(executed, seconds, peak) if peak else None,
    }


def main() -> None:
    """Measure on this machine's device, print the figures and write them down."""
    gpu = torch.cuda.is_available()
    device, preset, batch, seq = (
        (torch.device("cuda"), "llama3.2-1B", 2, 4096) if gpu else (torch.device("cpu"), "small", 4, 128)
    )
    with device:
        model = Transformer(PRESETS[preset]).to(torch.bfloat16 if gpu else torch.float32)
    inputs, targets = torch.randint(model.config.vocab, (2, batch, seq), device=device)

    def forward():
        return loss(model(inputs.clone()), targets.clone())

    def step_in(mode: str):
        def run():
            apply_recompute(model, *MODES[mode])
            step(model, forward)

        return run

    figures = {"preset": preset, "dtype": "bf16" if gpu else "fp32", "batch": batch, "seq": seq, "modes": {}}
    for mode in MODES:
        run = step_in(mode)
        times = paired(run, step_in("none"))
        apply_recompute(model, *MODES[mode])
        retained = retained_against_formula(model, forward, mode, batch, seq)
        model.zero_grad()  # so that the peak has the gradients in it
        figures["modes"][mode] = {
            **retained,
            "peak_mib": peak_mib(run),
            "against_none": times,
            **flops_and_use(model.config, batch, seq, mode, run, times["ours_ms"] / 1e3),
        }
    write("recompute", figures)


if __name__ == "__main__":
    main()
