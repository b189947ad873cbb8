"""Checkpoints to and from the safetensors of Hugging Face's transformers: models of Llama's kind, and mixtures.

    to_hf(latest(Path("checkpoints")), Path("my-model"))       # one process; a shard of the output in memory at a time
    from_hf(parallel, Path("my-model"))                        # each rank reads the slices that are its own

from_hf reads FP8 too, with a scale for each block or tensor: weights are code * scale, in the model's own type. Any
other quantized model is refused. Both need the extra `[hf]`.
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

from course_lib.checkpoint.chunks import Chunk, weight_chunks
from course_lib.checkpoint.files import CheckpointError, ChunkReader, DamagedError, damaged, describe, flush
from course_lib.checkpoint.groups import on_each, together
from course_lib.checkpoint.hf_files import HfFiles, from_hf_config, read_cut, read_json
from course_lib.checkpoint.planners import read_into
from course_lib.expert_parallel.hugging_face import hf_tensors, to_hf_mixture
from course_lib.expert_parallel.router import Routing
from course_lib.five_d.model import ParallelModel
from course_lib.single_gpu.hf_tokenizers import load_tokenizer
from course_lib.single_gpu.hugging_face import to_hf_config
from course_lib.single_gpu.model import NOT_OF_WEIGHTS, ModelConfig


def cut_into_files(sizes: dict[str, int], most: float) -> list[list[str]]:
    """Names in lists, in their order, whose sizes add up to at most so much; a larger one is alone."""
    files, room = [[]], 0
    for name, size in sizes.items():
        if room + size > most and files[-1]:
            files, room = [*files, []], 0
        files[-1].append(name)
        room += size
    return files


def run_tokenizer(about: dict, tokenizer: str | Path | None):
    """Return the tokenizer to save beside a model: `tokenizer`, by name or folder, or else the run's; None without one.

    about: checkpoint.json. Raises CheckpointError if `tokenizer` can't be loaded. If the run's can't be, prints a line.
    """
    plan = about.get("plan")  # SavedRun's; another caller of save may store anything
    name = tokenizer or (plan.get("tokenizer") if isinstance(plan, dict) else None)
    if name is None:
        return None
    try:
        return load_tokenizer(str(name))[0]
    except ValueError as error:
        line = f"the tokenizer {name} can't be loaded: {error}"
    if tokenizer is not None:
        raise CheckpointError(line)
    print(f"{line}; the model is written without a tokenizer: pass tokenizer=...")


def save_tokenizer(words, folder: Path) -> None:
    """Write a tokenizer of transformers to a folder, so that transformers 4 can read it, too: it has no class
    TokenizersBackend, and the tokenizer.json is the same.
    """
    words.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    settings = read_json(file)
    if settings.get("tokenizer_class") == "TokenizersBackend":
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        file.write_text(json.dumps(settings, indent=2, ensure_ascii=False), encoding="utf-8")


def run_config(about: dict) -> ModelConfig:
    """Return the sizes of a checkpoint's model. Its `context` is the longest sequence: that of the model that the run
    started from, or the run's --seq if that is more. about: checkpoint.json.
    """
    config, seq = ModelConfig(**about["config"]), about.get("seq")
    longest = max(config.context or 0, seq if isinstance(seq, int) else 0)
    return dataclasses.replace(config, context=longest or None)


def routing_of(folder: Path, about: dict) -> Routing:
    """Return the routing of a checkpoint with experts. about: checkpoint.json.

    Raises CheckpointError if it does not say how many experts a token goes to.
    """
    saved = about.get("routing") or about.get("moe") or {}  # "moe": from earlier versions
    if "top_k" not in saved:
        raise CheckpointError(f"{folder} does not say how many experts a token goes to: load it, and save it again")
    return Routing(**{each.name: saved[each.name] for each in dataclasses.fields(Routing) if each.name in saved})


def hf_config_of(folder: Path, about: dict, kinds: dict, tokenizer):
    """Return the config of transformers of a checkpoint. kinds: see write_hf; tokenizer: of transformers, or None.

    Raises CheckpointError if transformers has no such model, or the tokenizer does not fit.
    """
    try:
        config = to_hf_config(run_config(about), tokenizer)
        if experts := next((each.size for name, each in kinds.items() if ".experts.up_proj" in name), None):
            if foreign := next((name for name in kinds if ".shared." in name), None):
                raise CheckpointError(f"no mixture of transformers that the course knows has {foreign}")
            config = to_hf_mixture(config, routing_of(folder, about), experts[1])
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(str(error)) from None
    return config


def read_rows(reader: ChunkReader, name: str, kind, experts: list[int | None]) -> list[torch.Tensor]:
    """Read one weight, [None], or consecutive experts' matrices in it. kind: the index's entry of the weight."""
    first, size = experts[0], tuple(kind.size)
    shape = size if first is None else (len(experts), *size[1:])
    values = torch.empty(shape, dtype=kind.properties.dtype)
    read_into({name: [Chunk((first or 0, *(0,) * (len(size) - 1)), size, values)]}, reader)
    return [values] if first is None else [*values]


def write_hf(reader: ChunkReader, out: Path, config, kinds: dict, dtype: torch.dtype | None, file_bytes: float):
    """See to_hf. config: of transformers; kinds: the index's entry of each weight."""
    from safetensors.torch import save_file
    from transformers import GenerationConfig

    ours = {theirs: (name, expert) for name, each in kinds.items()
            for theirs, expert in hf_tensors(name, each.size, config.model_type)}  # fmt: skip
    nbytes = {}
    for theirs, (name, expert) in ours.items():
        numbers = kinds[name].size.numel() // (1 if expert is None else kinds[name].size[0])
        nbytes[theirs] = numbers * (dtype or kinds[name].properties.dtype).itemsize
    files, placed = cut_into_files(nbytes, file_bytes), {}
    for number, names in enumerate(files, 1):
        file, tensors = f"model-{number:05d}-of-{len(files):05d}.safetensors", {}
        for name, each in itertools.groupby(names, lambda theirs: ours[theirs][0]):
            each = [*each]
            rows = read_rows(reader, name, kinds[name], [ours[theirs][1] for theirs in each])
            tensors |= {theirs: row.to(dtype) for theirs, row in zip(each, rows, strict=True)}
        save_file(tensors, out / file, {"format": "pt"})
        flush(out / file)
        placed |= dict.fromkeys(tensors, file)
    index = {"metadata": {"total_size": sum(nbytes.values())}, "weight_map": placed}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    config.dtype = dtype or torch.float32
    config.save_pretrained(out)
    GenerationConfig.from_model_config(config).save_pretrained(out)


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder to write in that becomes `out` at the end, and is removed after an error. Raises CheckpointError where
    it can't be written.
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
    """Write a checkpoint's weights as a model of transformers, to a new folder. In one process, without a group.

    dtype: None: as they are. file_bytes: the most in one file; that and one tensor are in memory at a time. tokenizer:
    by name or folder, the run's --tokenizer by default. It is saved beside the model, and generation ends at its end
    token. The longest sequence in config.json: see run_config. Raises CheckpointError if the checkpoint can't be read
    (see load), transformers has no such model, `out` exists, or the tokenizer does not fit. `out` is complete, or does
    not exist.
    """
    about = describe(folder)
    folder, out = Path(folder), Path(out)
    if wrong := damaged(folder, about["files"]):
        raise DamagedError(f"{folder} is damaged: {wrong}")
    if out.exists():
        raise CheckpointError(f"{out} exists already")
    reader = ChunkReader(folder)
    metadata = reader.read_metadata().state_dict_metadata
    kinds = {name: each for name, each in metadata.items() if "/" not in name}
    words = run_tokenizer(about, tokenizer)
    config = hf_config_of(folder, about, kinds, words)
    biases = [name for name in kinds if name.endswith("router.bias")]
    if moved := next((name for name in biases if read_rows(reader, name, kinds[name], [None])[0].any()), None):
        raise CheckpointError(f"transformers has no {moved}, and it is not 0")
    with new_folder(out) as writing:
        write_hf(reader, writing, config, kinds, dtype, file_bytes)
        if words is not None:
            save_tokenizer(words, writing)


class HfChunk(NamedTuple):
    """A chunk of a tensor in transformers' files, and the memory that it fills."""

    name: str  # of the tensor
    shape: tuple[int, ...]  # of the full tensor
    cut: tuple[slice, ...]
    values: torch.Tensor


def hf_chunks(name: str, box: Chunk, kind: str) -> Iterator[HfChunk]:
    """Yield the chunks of transformers' tensors that fill a box of one of our weights, one per expert. kind: a
    model_type.
    """
    cut = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.values.shape, strict=True))
    for theirs, expert in hf_tensors(name, box.full_shape, kind):
        if expert is None:
            yield HfChunk(theirs, box.full_shape, cut, box.values)
        elif cut[0].start <= expert < cut[0].stop:
            yield HfChunk(theirs, box.full_shape[1:], cut[1:], box.values[expert - cut[0].start])


def check_same(parallel: ParallelModel, config: ModelConfig, moe: dict | None) -> None:
    """Raise CheckpointError if these sizes are not the model's, or its router computes other gates."""
    routing = parallel.routing
    here = {name: value for name, value in vars(parallel.config).items() if name not in NOT_OF_WEIGHTS}
    there = dict(vars(config))
    if routing and moe:
        del here["ffn_hidden"]  # of an MLP that the mixtures have replaced
        here |= {"score": routing.score, "scale": routing.scale}
        there |= {"score": "softmax", "scale": 1.0}
    for name in ("experts", "top_k"):
        here[name] = routing and getattr(routing, name)
        there[name] = moe and moe[name]
    for name, value in here.items():
        if there[name] != value:
            raise CheckpointError(f"another model: {name} is {there[name]} there, and {value} here")


@torch.no_grad()
def from_hf(parallel: ParallelModel, folder: Path) -> None:
    """Start from the weights of a model of transformers, in safetensors: each rank reads its own slices. Collective.

    FP8 weights are dequantized on the way, slice by slice. The optimizer's states stay as they are: call this before
    the first step. Raises CheckpointError, on all ranks and before anything changes, where the model is another one or
    has tensors that ours has not, weights are quantized in another way, or a file is missing or cut short.
    """
    folder, boxes = Path(folder), weight_chunks(parallel)

    def look() -> tuple[HfFiles, list[tuple[HfChunk, str | None]]]:
        """Return the files, and this rank's chunks of them with the names of their scales. Raises CheckpointError."""
        check_same(parallel, *theirs)
        files, chunks = HfFiles(folder), []
        local_boxes = ((name, box) for name, each in boxes.items() for box in each)
        for chunk in (chunk for name, box in local_boxes for chunk in hf_chunks(name, box, files.kind)):
            there = files.get_slice(chunk.name)
            shape, dtype = tuple(there.get_shape()), there.get_dtype()
            if chunk.shape != shape:
                raise CheckpointError(f"another model: {chunk.name} is {list(shape)} in {files.file_of(chunk.name)}")
            chunks.append((chunk, files.scale_of(chunk.name, shape, dtype)))
        if first:
            files.check_left(*theirs)
        return files, chunks

    def read() -> None:
        for chunk, scale in chunks:
            scales = scale and files.get_slice(scale)
            chunk.values.copy_(read_cut(files.get_slice(chunk.name), chunk.cut, scales, files.block))
        for box in (box for name, each in boxes.items() if name.endswith("router.bias") for box in each):
            box.values.zero_()  # transformers has none

    first = dist.get_rank() == 0  # one rank imports transformers
    theirs = together(dist.group.WORLD, lambda: from_hf_config(folder) if first else None)[0]
    files, chunks = on_each(dist.group.WORLD, look)
    together(dist.group.WORLD, read)
    parallel.sharding.all_gather_params()
