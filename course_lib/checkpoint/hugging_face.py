"""Checkpoints to and from the safetensors of Hugging Face's transformers: Llama-like models, and mixtures of experts.

    to_hf(latest(Path("checkpoints")), Path("my-model"))       # one process; one output file in memory at a time
    from_hf(parallel, Path("my-model"))                        # each rank reads the slices of its own chunks

from_hf also reads FP8, with a scale per block or tensor: weights are code * scale, in the model's dtype. Other
quantized models are refused. Both functions need the extra `[hf]`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from course_lib.checkpoint.chunks import Chunk, weight_chunks
from course_lib.checkpoint.files import CheckpointError, ChunkReader, DamagedError, damaged, describe, flush
from course_lib.checkpoint.groups import first_or_raise, gather_or_raise, run_or_raise
from course_lib.checkpoint.hf_files import HfFiles, from_hf_config, read_cut, read_json
from course_lib.checkpoint.planners import read_into
from course_lib.checkpoint.plans import Tensors
from course_lib.expert_parallel.hugging_face import hf_tensors, to_hf_mixture
from course_lib.expert_parallel.router import Routing
from course_lib.five_d.model import ParallelModel
from course_lib.single_gpu.hf_tokenizers import load_tokenizer
from course_lib.single_gpu.hugging_face import to_hf_config
from course_lib.single_gpu.model import NOT_OF_WEIGHTS, ModelConfig


def split_into_files(sizes: dict[str, int], max_bytes: float) -> list[list[str]]:
    """Return the names in lists, in order, with sizes of at most `max_bytes` per list. A larger tensor is alone."""
    files: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if filled + size > max_bytes and files[-1]:
            files, filled = [*files, []], 0
        files[-1].append(name)
        filled += size
    return files


def run_tokenizer(about: dict, tokenizer: str | Path | None):
    """Return the tokenizer to save beside a model: `tokenizer`, by name or folder, or else the run's; None without one.

    about: checkpoint.json. Raises CheckpointError if `tokenizer` cannot be loaded. If the run's tokenizer cannot be
    loaded, prints a line.
    """
    plan = about.get("plan")  # of SavedRun; another caller of save may store anything
    name = tokenizer or (plan.get("tokenizer") if isinstance(plan, dict) else None)
    if name is None:
        return None
    try:
        return load_tokenizer(str(name))[0]
    except ValueError as error:
        message = f"the tokenizer {name} can't be loaded: {error}"
    if tokenizer is not None:
        raise CheckpointError(message)
    print(f"{message}; the model is written without a tokenizer: pass tokenizer=...")
    return None


def save_tokenizer(tokenizer, folder: Path) -> None:
    """Write a tokenizer of transformers to a folder in a form that transformers 4 also reads: it has no class
    TokenizersBackend, and the tokenizer.json is the same.
    """
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    settings = read_json(file)
    if settings.get("tokenizer_class") == "TokenizersBackend":
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        file.write_text(json.dumps(settings, indent=2, ensure_ascii=False), encoding="utf-8")


def run_config(about: dict) -> ModelConfig:
    """Return the sizes of a checkpoint's model. `context` is the longer of the run's --seq and the longest sequence of
    the model that the run started from. about: checkpoint.json.
    """
    config, seq = ModelConfig(**about["config"]), about.get("seq")
    longest = max(config.context or 0, seq if isinstance(seq, int) else 0)
    return dataclasses.replace(config, context=longest or None)


def routing_of(folder: Path, about: dict) -> Routing:
    """Return the routing of a checkpoint with experts. about: checkpoint.json.

    Raises CheckpointError if it does not have the number of experts per token.
    """
    saved = about.get("routing") or about.get("moe") or {}  # "moe": from earlier versions
    if "top_k" not in saved:
        raise CheckpointError(f"{folder} does not say how many experts a token goes to: load it, and save it again")
    return Routing(**{each.name: saved[each.name] for each in dataclasses.fields(Routing) if each.name in saved})


def hf_config_of(folder: Path, about: dict, weights: Tensors, tokenizer):
    """Return the transformers config of a checkpoint. weights: see write_hf; tokenizer: of transformers, or None.

    Raises CheckpointError if transformers has no such model, or the tokenizer does not fit.
    """
    try:
        config = to_hf_config(run_config(about), tokenizer)
        if experts := next((each.size for name, each in weights.items() if ".experts.up_proj" in name), None):
            if foreign := next((name for name in weights if ".shared." in name), None):
                raise CheckpointError(f"no mixture of transformers that the course knows has {foreign}")
            config = to_hf_mixture(config, routing_of(folder, about), experts[1])
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    return config


def read_rows(
    reader: ChunkReader, name: str, weight: TensorStorageMetadata, experts: list[int | None]
) -> list[torch.Tensor]:
    """Read a weight (experts: [None]), or the matrices of consecutive experts in it. weight: its entry in the index."""
    first, size = experts[0], tuple(weight.size)
    shape = size if first is None else (len(experts), *size[1:])
    values = torch.empty(shape, dtype=weight.properties.dtype)
    read_into({name: [Chunk((first or 0, *(0,) * (len(size) - 1)), size, values)]}, reader)
    return [values] if first is None else [*values]


def write_hf(reader: ChunkReader, out: Path, config, weights: Tensors, dtype: torch.dtype | None, file_bytes: float):
    """Write the files of `to_hf`. config: of transformers; weights: the entry in the index of each weight."""
    from safetensors.torch import save_file
    from transformers import GenerationConfig

    sources = {hf_name: (name, expert) for name, each in weights.items()
               for hf_name, expert in hf_tensors(name, each.size, config.model_type)}  # fmt: skip
    nbytes = {}
    for hf_name, (name, expert) in sources.items():
        elements = weights[name].size.numel() // (1 if expert is None else weights[name].size[0])
        nbytes[hf_name] = elements * (dtype or weights[name].properties.dtype).itemsize
    files = split_into_files(nbytes, file_bytes)
    file_of: dict[str, str] = {}
    for number, names in enumerate(files, 1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        tensors: dict[str, torch.Tensor] = {}
        for name, group in itertools.groupby(names, lambda hf_name: sources[hf_name][0]):
            hf_names = [*group]
            rows = read_rows(reader, name, weights[name], [sources[hf_name][1] for hf_name in hf_names])
            tensors |= {hf_name: row.to(dtype) for hf_name, row in zip(hf_names, rows, strict=True)}
        save_file(tensors, out / file, {"format": "pt"})
        flush(out / file)
        file_of |= dict.fromkeys(tensors, file)
    index = {"metadata": {"total_size": sum(nbytes.values())}, "weight_map": file_of}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    config.dtype = dtype or torch.float32
    config.save_pretrained(out)
    GenerationConfig.from_model_config(config).save_pretrained(out)


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yield a folder to write in. It becomes `out` at the end, and is removed after an error. Raises CheckpointError if
    it cannot be written.
    """
    from safetensors import SafetensorError

    writing = out.with_name(f"{out.name}.writing")
    shutil.rmtree(writing, ignore_errors=True)
    try:
        writing.mkdir()
        yield writing
        flush(writing)
        writing.rename(out)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{out} can't be written: {error}") from None
    finally:
        shutil.rmtree(writing, ignore_errors=True)


def to_hf(
    folder: Path,
    out: Path,
    dtype: torch.dtype | None = None,
    file_bytes: float = 5e9,
    tokenizer: str | Path | None = None,
) -> None:
    """Write a checkpoint's weights as a model of transformers, to a new folder. Runs in one process, without a group.

    dtype: of the weights; None: unchanged. file_bytes: the maximum per file; one file and one tensor are in memory at a
    time. tokenizer: a name or folder, by default the run's --tokenizer. It is saved beside the model, and generation
    ends at its end token. For the longest sequence in config.json see run_config. Raises CheckpointError if the
    checkpoint cannot be read (see load), transformers has no such model, `out` exists, or the tokenizer does not fit.
    `out` is complete, or does not exist.
    """
    about = describe(folder)
    folder, out = Path(folder), Path(out)
    if damage := damaged(folder, about["files"]):
        raise DamagedError(f"{folder} is damaged: {damage}")
    if out.exists():
        raise CheckpointError(f"{out} exists already")
    reader = ChunkReader(folder)
    metadata = reader.read_metadata().state_dict_metadata
    weights = {
        name: each
        for name, each in metadata.items()
        if "/" not in name and ".quantizers." not in name and isinstance(each, TensorStorageMetadata)
    }
    hf_tokenizer = run_tokenizer(about, tokenizer)
    config = hf_config_of(folder, about, weights, hf_tokenizer)
    biases = [name for name in weights if name.endswith("router.bias")]
    if moved := next((name for name in biases if read_rows(reader, name, weights[name], [None])[0].any()), None):
        raise CheckpointError(f"transformers has no {moved}, and it is not 0")
    with new_folder(out) as writing:
        write_hf(reader, writing, config, weights, dtype, file_bytes)
        if hf_tokenizer is not None:
            save_tokenizer(hf_tokenizer, writing)


class HfChunk(NamedTuple):
    """A chunk of a tensor in transformers' files, and the memory to read it into."""

    name: str  # of the tensor
    shape: tuple[int, ...]  # of the full tensor
    cut: tuple[slice, ...]
    values: torch.Tensor


def hf_chunks(name: str, chunk: Chunk, kind: str) -> Iterator[HfChunk]:
    """Yield the chunks of transformers' tensors that fill a chunk of one of our weights, one per expert. kind: a
    model_type.
    """
    cut = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.values.shape, strict=True))
    for hf_name, expert in hf_tensors(name, chunk.full_shape, kind):
        if expert is None:
            yield HfChunk(hf_name, chunk.full_shape, cut, chunk.values)
        elif cut[0].start <= expert < cut[0].stop:
            yield HfChunk(hf_name, chunk.full_shape[1:], cut[1:], chunk.values[expert - cut[0].start])


def check_same(parallel: ParallelModel, config: ModelConfig, moe: dict | None) -> None:
    """Raise CheckpointError if these sizes differ from the model's, or its router computes other gates."""
    routing = parallel.routing
    local = {name: value for name, value in vars(parallel.config).items() if name not in NOT_OF_WEIGHTS}
    saved = dict(vars(config))
    if routing and moe:
        del local["ffn_hidden"]  # of an MLP that the mixtures have replaced
        local |= {"score": routing.score, "scale": routing.scale}
        saved |= {"score": "softmax", "scale": 1.0}
    for name in ("experts", "top_k"):
        local[name] = routing and getattr(routing, name)
        saved[name] = moe and moe[name]
    for name, value in local.items():
        if saved[name] != value:
            raise CheckpointError(f"another model: {name} is {saved[name]} in the files, {value} here")


@torch.no_grad()
def from_hf(parallel: ParallelModel, folder: Path) -> None:
    """Load the weights of a model of transformers from safetensors. Each rank reads the slices of its own chunks.
    Collective.

    FP8 weights are dequantized slice by slice. The optimizer's states do not change: call this before the first step.
    Raises CheckpointError, on all ranks and before the model changes, if the model is another one or has tensors that
    ours lacks, weights are quantized in another way, or a file is missing or truncated.
    """
    folder, local_chunks = Path(folder), weight_chunks(parallel)

    def open_files() -> tuple[HfFiles, list[tuple[HfChunk, str | None]]]:
        """Return the files, and this rank's chunks of them with the names of their scales. Raises CheckpointError."""
        check_same(parallel, config, moe)
        files, chunks = HfFiles(folder), []
        for name, chunk in ((name, chunk) for name, each in local_chunks.items() for chunk in each):
            for hf_chunk in hf_chunks(name, chunk, files.kind):
                saved = files.get_slice(hf_chunk.name)
                shape, dtype = tuple(saved.get_shape()), saved.get_dtype()
                if hf_chunk.shape != shape:
                    file = files.file_of(hf_chunk.name)
                    raise CheckpointError(f"another model: {hf_chunk.name} is {list(shape)} in {file}")
                chunks.append((hf_chunk, files.scale_of(hf_chunk.name, shape, dtype)))
        if dist.get_rank() == 0:
            files.check_unused(config, moe)
        return files, chunks

    def read() -> None:
        """Read this rank's chunks into the model."""
        for chunk, scale in chunks:
            scales = files.get_slice(scale) if scale else None
            chunk.values.copy_(read_cut(files.get_slice(chunk.name), chunk.cut, scales, files.block))
        for name, each in local_chunks.items():
            for bias in each if name.endswith("router.bias") else ():
                bias.values.zero_()  # transformers has none

    config, moe = first_or_raise(None, lambda: from_hf_config(folder))  # one rank imports transformers
    files, chunks = run_or_raise(None, open_files)
    gather_or_raise(None, read)
    parallel.sharding.all_gather_params()
