"""Forward and backward of course_lib's Transformer against transformers' LlamaForCausalLM: time and peak memory.

    python benchmarks/transformer.py        # writes benchmarks/results/transformer_<device>.json

Both have the same weights and the same batch. They run in alternation, as does the rival against itself: the
spread of that ratio is the noise. Times are medians of 9 pairs.
"""

import torch
from measure import paired, peak_mib, write

from course_lib.single_gpu.hugging_face import to_hf
from course_lib.single_gpu.model import PRESETS, Transformer, loss


def step(module: torch.nn.Module, forward) -> None:
    """Run one forward and backward, until the device has finished."""
    module.zero_grad()
    forward().backward()
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> None:
    """Measure on this machine's device, print the figures and write them."""
    gpu = torch.cuda.is_available()
    device, preset, batch, seq = (
        (torch.device("cuda"), "llama3.2-1B", 2, 4096) if gpu else (torch.device("cpu"), "small", 4, 128)
    )
    with device:
        model = Transformer(PRESETS[preset]).to(torch.bfloat16 if gpu else torch.float32)
    theirs = to_hf(model).to(device).train()
    inputs, targets = torch.randint(model.config.vocab, (2, batch, seq), device=device)

    def ours():
        step(model, lambda: loss(model(inputs), targets))

    def rival():
        step(theirs, lambda: loss(theirs(inputs, use_cache=False).logits, targets))

    figures = {
        "preset": preset,
        "batch": batch,
        "seq": seq,
        "ours_against_llama": paired(ours, rival),
        "llama_against_itself": paired(rival, rival),
        "ours_peak_mib": peak_mib(ours),
        "llama_peak_mib": peak_mib(rival),
    }
    write("transformer", figures)


if __name__ == "__main__":
    main()
