"""A trained model in the format of Hugging Face's transformers: its logits there, and layouts that load it."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path

import torch
from torch import nn

from course_kit.labs.checkpoint.resharding import local_samples
from course_kit.labs.five_d.models import SHALLOW, built
from course_kit.ranks import Ranks
from course_lib.checkpoint.checkpoints import latest, save
from course_lib.checkpoint.hugging_face import from_hf, to_hf


def trained_logits(root: Path, tokens: torch.Tensor) -> torch.Tensor:
    """On a rank: two steps of training, a checkpoint, and the logits of the full model."""
    layout, mesh, parallel = built("dp4,zero3", SHALLOW, lr=3e-3)
    batches = torch.randint(97, (2, 2, 4, 8), generator=torch.Generator().manual_seed(1))
    for batch in batches:
        parallel.step(*batch[:, local_samples(layout, mesh, 4)])
    save(parallel, root, 2)
    with torch.no_grad():
        return parallel.stages["0"](tokens)


def first_loss(text: str, folder: Path, batch: torch.Tensor) -> float:
    """On a rank: the loss of a first step that starts from a model of transformers."""
    layout, mesh, parallel = built(text, SHALLOW, seed=7, lr=1e-3)
    from_hf(parallel, folder)
    return parallel.step(*batch[:, local_samples(layout, mesh, 4)])[0].item()


def to_and_from_transformers(ranks: Ranks) -> None:
    """Train on four ranks, load the checkpoint with transformers, start two layouts from it; print the differences."""
    try:
        import transformers
    except ImportError:
        print("transformers is not installed: pip install -e '.[hf]' to compare")
        return
    logging.disable(logging.WARNING)  # some warnings are about CUDA libraries that this machine lacks
    transformers.utils.logging.disable_progress_bar()
    root, draw = Path(tempfile.mkdtemp()), torch.Generator().manual_seed(2)
    tokens, batch = (torch.randint(97, shape, generator=draw) for shape in ((2, 8), (2, 4, 8)))
    ours = ranks(trained_logits, root, tokens)[0]
    checkpoint = latest(root)
    assert checkpoint is not None
    to_hf(checkpoint, root / "model", file_bytes=8e3)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(root / "model")
    with torch.no_grad():
        difference = (theirs(tokens).logits - ours).abs().max().item()
        right = nn.functional.cross_entropy(theirs(batch[0]).logits.flatten(0, 1), batch[1].flatten()).item()
    files = len(list((root / "model").glob("*.safetensors")))
    print(f"{type(theirs).__name__} from {files} files: logits differ by at most {difference:.0e}")
    print(f"the loss of another batch, transformers: {right:.6f}")
    for text in ("dp2,tp2,zero1,mb2", "pp2,dp2,zero3,keep"):
        print(f"first step in {text:18s}: {ranks(first_loss, text, root / 'model', batch)[0]:.6f}")
