"""Continue a prompt with a trained model: from a run's checkpoints, or from a model in Hugging Face's format.

    python -m course_lib.train.generate checkpoints --prompt "def main("
    python -m course_lib.train.generate my-model --prompt "Once upon a time" --temperature 0

A checkpoint of any layout is read to one process: the weights alone, 4 bytes per parameter.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from course_lib.checkpoint.chunks import Chunk
from course_lib.checkpoint.files import ABOUT, CheckpointError, ChunkReader, DamagedError, damaged, describe, latest
from course_lib.checkpoint.hf_files import from_hf_config
from course_lib.checkpoint.hugging_face import routing_of
from course_lib.checkpoint.planners import read_into
from course_lib.expert_parallel import hugging_face as mixtures
from course_lib.expert_parallel.mixture import apply_moe
from course_lib.single_gpu import hugging_face as dense
from course_lib.single_gpu.data import text_tokens
from course_lib.single_gpu.errors import one_line_message
from course_lib.single_gpu.hf_tokenizers import has_tokenizer, load_tokenizer, special_tokens
from course_lib.single_gpu.model import ModelConfig, Transformer
from course_lib.train.sampling import generate_tokens


class Codec(NamedTuple):
    """A tokenizer: text to tokens and back, the tokens before each text, and the token that ends it or None."""

    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    start: list[int]
    end: int | None


BYTES = Codec(
    lambda text: [*text.encode()],
    lambda tokens: bytes(token for token in tokens if token < 256).decode(errors="replace"),
    [],
    None,
)


def codec_of(name: str) -> Codec:
    """Return a tokenizer of transformers by file, folder or name. Raises ValueError, in one line."""
    tokenizer, _ = load_tokenizer(name)
    before, after = special_tokens(tokenizer)
    return Codec(
        lambda text: [token for part in text_tokens(tokenizer, text) for token in part],
        lambda tokens: tokenizer.decode(tokens, skip_special_tokens=True),
        before,
        after[-1] if after else None,
    )


def apply_saved_moe(model: Transformer, folder: Path, about: dict, weights: dict[str, TensorStorageMetadata]) -> None:
    """Give a model the mixtures of a checkpoint that has experts. No token is dropped, whatever the run's capacity."""
    mixture = "blocks.0.mlp"
    if f"{mixture}.experts.up_proj.weight" not in weights:
        return
    width = weights[f"{mixture}.experts.up_proj.weight"].size[1]
    shared = weights.get(f"{mixture}.shared.up_proj.weight")  # [number * width, h]
    routing = dataclasses.asdict(routing_of(folder, about)) | {"capacity": None}
    apply_moe(model, ffn_hidden=width, shared=shared.size[0] // width if shared else 0, **routing)


def from_checkpoint(folder: Path) -> tuple[Transformer, dict]:
    """Return the model of a checkpoint, and the contents of its checkpoint.json.

    Raises CheckpointError if the folder is no checkpoint of a `Transformer`, DamagedError if its files are not as they
    were written.
    """
    about = describe(folder)
    if damage := damaged(folder, about["files"]):
        raise DamagedError(f"{folder} is damaged: {damage}")
    reader = ChunkReader(folder)
    saved = {
        name: each
        for name, each in reader.read_metadata().state_dict_metadata.items()
        if "/" not in name and isinstance(each, TensorStorageMetadata)
    }
    with torch.device("meta"):
        model = Transformer(ModelConfig(**about["config"]))
        apply_saved_moe(model, folder, about, saved)
    tied = {"head.weight"} if model.config.tied else set()  # saved as the embedding
    names = model.state_dict().keys() - tied  # not the scales of a run in FP8
    if missing := names - saved.keys():
        raise CheckpointError(f"another model: {folder} has no {min(missing)}")
    weights = {name: torch.empty(saved[name].size, dtype=saved[name].properties.dtype) for name in names}
    read_into({name: [Chunk((0,) * w.dim(), tuple(w.shape), w)] for name, w in weights.items()}, reader)
    model.load_state_dict(weights | dict.fromkeys(tied, weights["embedding.weight"]), assign=True)
    if tied and model.head is not None and model.embedding is not None:
        model.head.weight = model.embedding.weight
    return model, about


def default_codec(folder: Path, tokenizer: str | None, vocab: int) -> Codec:
    """Return a model's tokenizer: by name, the one in its folder, or bytes. Raises ValueError if it has none."""
    if tokenizer is None and has_tokenizer(folder):
        tokenizer = str(folder)
    if tokenizer is None:
        if vocab != 256:
            raise ValueError(f"{folder} has no tokenizer, and a vocabulary of {vocab:,}: --tokenizer names one")
        return BYTES
    try:
        return codec_of(tokenizer)
    except ValueError as error:
        raise ValueError(f"{error}; --tokenizer names another") from None


def load_model(folder: Path, tokenizer: str | None = None) -> tuple[Transformer, Codec]:
    """Return a trained model on the host, and its tokenizer.

    folder: of checkpoints, of which the last is read; a single checkpoint; or a model in Hugging Face's format.
    tokenizer: instead of the model's. Raises ValueError, in one line, if there is no such model.
    """
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}")
    checkpoint = folder if (folder / ABOUT).is_file() else latest(folder)
    if checkpoint is not None:
        model, about = from_checkpoint(checkpoint)
        plan = about.get("plan")  # of a training run; another caller of `save` may store anything
        name = plan.get("tokenizer") if isinstance(plan, dict) else None
    elif (folder / "config.json").is_file():
        model, name = (mixtures if from_hf_config(folder)[1] else dense).from_hf(folder), None
    else:
        raise ValueError(f"{folder} has no checkpoint (step-*) and no model in Hugging Face's format (config.json)")
    return model, codec_of(tokenizer) if tokenizer else default_codec(checkpoint or folder, name, model.config.vocab)


def continued(
    model: Transformer, codec: Codec, prompt: str, count: int, temperature: float, top_p: float, seed: int
) -> str:
    """Return the prompt with up to `count` more tokens. An empty prompt begins a text. Raises ValueError, in one line,
    if it cannot, or an argument cannot be used.
    """
    tokens = codec.start + codec.encode(prompt)
    if not tokens:
        if codec.end is None:
            raise ValueError("the prompt is empty, and the tokenizer has no token that begins or ends a text")
        tokens = [codec.end]  # in training, a text follows the end of another one
    new = generate_tokens(model, tokens, count, temperature, top_p, codec.end, seed)
    return codec.decode(tokens + new)


def main(argv: list[str] | None = None) -> None:
    """Print the continuation of a prompt. An error ends the program with one line."""
    parser = argparse.ArgumentParser(
        prog="generate",
        description="Continue a prompt with a trained model.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("folder", type=Path, help="a run's checkpoints, one checkpoint, or a model in Hugging Face's format")
    add("--prompt", default="", help="the beginning of the text")
    add("--tokens", type=int, default=100, help="how many tokens to generate at most")
    add("--temperature", type=float, default=0.8, help="0: always the likeliest token")
    add("--top-p", type=float, default=0.95, help="sample from the fewest tokens with this probability together")
    add("--seed", type=int, default=0, help="of the samples")
    add("--tokenizer", help="a tokenizer.json, a folder with one, or a name at Hugging Face; default: the model's own")
    args = parser.parse_args(argv)
    try:
        model, codec = load_model(args.folder, args.tokenizer)
        model.to("cuda" if torch.cuda.is_available() else "cpu")
        print(continued(model, codec, args.prompt, args.tokens, args.temperature, args.top_p, args.seed))
    except ImportError as error:
        raise SystemExit(f"generate: {error}; this model needs pip install -e '.[hf]'") from None
    except (ValueError, OSError) as error:
        raise SystemExit(f"generate: {one_line_message(error)}") from None


if __name__ == "__main__":
    main()
