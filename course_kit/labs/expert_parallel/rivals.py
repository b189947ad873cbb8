"""An MoE model against Hugging Face's Mixtral: logits and time with the same weights and tokens."""

from __future__ import annotations

import logging
import time
from typing import Any

import numpy as np
import torch

from course_kit.labs.tensor_parallel.models import relative_error
from course_kit.typed import transformer_blocks
from course_lib.expert_parallel.hugging_face import from_hf


def against_transformers(repeats: int = 5) -> tuple[dict[str, np.ndarray], float]:
    """Return the milliseconds of forward and backward of one MoE layer, by way and repeat, and the relative error of
    the logits. Raises ImportError if transformers is not installed.
    """
    logging.disable(logging.WARNING)  # some warnings are about CUDA libraries that this machine lacks
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": 256,
        "intermediate_size": 352,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    }
    sizes |= {"num_hidden_layers": 2, "vocab_size": 256, "num_local_experts": 16, "num_experts_per_tok": 2}
    theirs = MixtralForCausalLM(MixtralConfig(**sizes, sliding_window=None))
    ours, tokens = from_hf(theirs), torch.randint(256, (4, 256), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = ours(tokens), theirs(tokens).logits
    layer, x = transformer_blocks(ours)[0].mlp, torch.randn(4, 256, 256)
    block = theirs.model.layers[0].mlp
    ways = {"ours": layer, "transformers, grouped_mm": block, "transformers, eager": block}
    ways["transformers, grouped_mm again"] = block
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats + 1):
        for name, way in ways.items():
            if way is block:
                theirs.set_experts_implementation(name.split()[1])
            rows = x.clone().requires_grad_()
            way.zero_grad()
            start = time.perf_counter()
            way(rows).square().mean().backward()
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: np.array(taken[1:]) for name, taken in times.items()}, relative_error(*logits)
