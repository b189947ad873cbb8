"""Checkpoints to and from the safetensors of Hugging Face's transformers, for models of Llama's kind.

    to_hf(latest(Path("checkpoints")), Path("my-model"))       # one process; a shard of the output in memory at a time
    from_hf(parallel, Path("my-model"))                        # each rank reads the slices that are its own

from_hf reads FP8 too, with a scale for each block or tensor: weights are code * scale, in the model's own type. Any
other quantized model is refused. Both need the extra `[hf]`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
import torch.distributed as dist

from course_lib.checkpoint.boxes import Box, weight_boxes
from course_lib.checkpoint.files import BoxReader, CheckpointError, DamagedError, damaged, describe, flush
from course_lib.checkpoint.groups import on_each, together
from course_lib.checkpoint.planners import read_into
from course_lib.five_d.model import ParallelModel
from course_lib.single_gpu.hugging_face import PLAIN_RELEASE, PLAIN_TYPES, hf_config, hf_name, to_hf_config
from course_lib.single_gpu.model import ModelConfig, Transformer


def cut_into_files(sizes: dict[str, int], most: float) -> list[list[str]]:
    """Names in lists, in their order, whose sizes add up to at most so much; a larger one is alone."""
    files, room = [[]], 0
    for name, size in sizes.items():
        if room + size > most and files[-1]:
            files, room = [*files, []], 0
        files[-1].append(name)
        room += size
    return files


def write_hf(reader: BoxReader, out: Path, about: dict, kinds: dict, dtype: torch.dtype | None, file_bytes: float):
    """See to_hf. kinds: the index's entry of each weight."""
    from safetensors.torch import save_file

    nbytes = {name: each.size.numel() * (dtype or each.properties.dtype).itemsize for name, each in kinds.items()}
    files, placed = cut_into_files(nbytes, file_bytes), {}
    for number, names in enumerate(files, 1):
        file, tensors = f"model-{number:05d}-of-{len(files):05d}.safetensors", {}
        for name in names:
            whole = torch.empty(kinds[name].size, dtype=kinds[name].properties.dtype)
            box = Box((0,) * whole.dim(), tuple(whole.shape), whole)
            read_into({name: [box]}, reader)
            tensors[hf_name(name)] = whole.to(dtype)
        save_file(tensors, out / file, {"format": "pt"})
        flush(out / file)
        placed |= dict.fromkeys(tensors, file)
    index = {"metadata": {"total_size": sum(nbytes.values())}, "weight_map": placed}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    config = to_hf_config(ModelConfig(**about["config"]))
    config.dtype = dtype or torch.float32
    config.save_pretrained(out)
    flush(out)


def to_hf(folder: Path, out: Path, dtype: torch.dtype | None = None, file_bytes: float = 5e9) -> None:
    """Write a checkpoint's weights as a model of transformers, to a new folder. In one process, without a group.

    dtype: None: as they are. file_bytes: of a file; that and one tensor are in memory at a time. Raises CheckpointError
    where the checkpoint can't be read (see load), has experts, or `out` exists; `out` is there whole or not at all.
    """
    from safetensors import SafetensorError

    folder, out = Path(folder), Path(out)
    about = describe(folder)
    if wrong := damaged(folder, about["files"]):
        raise DamagedError(f"{folder} is damaged: {wrong}")
    if out.exists():
        raise CheckpointError(f"{out} is there already")
    reader = BoxReader(folder)
    metadata = reader.read_metadata().state_dict_metadata
    kinds = {name: each for name, each in metadata.items() if "/" not in name}
    if foreign := sorted(name for name in kinds if ".experts." in name or "router" in name):
        raise CheckpointError(f"no model of Llama's kind: it has {foreign[0]}")
    writing = out.with_name(f"{out.name}.writing")
    shutil.rmtree(writing, ignore_errors=True)
    try:
        writing.mkdir()
        write_hf(reader, writing, about, kinds, dtype, file_bytes)
        writing.rename(out)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{out} can't be written: {error}") from None
    finally:
        shutil.rmtree(writing, ignore_errors=True)


def fp8_block(folder: Path) -> list[int] | None:
    """Return [rows, columns] of an FP8 block, or None for one scale per tensor and for models that are not quantized.

    Raises CheckpointError where config.json names another way to quantize.
    """
    config = json.loads((Path(folder) / "config.json").read_text())
    quantized = config.get("quantization_config") or config.get("compression_config")
    if not quantized:
        return None
    method, block = quantized.get("quant_method", "an unnamed method"), quantized.get("weight_block_size")
    if method != "fp8":
        raise CheckpointError(f"{folder} is quantized (quant_method {method}), not by fp8: {PLAIN_RELEASE}")
    if block is not None and (len(block) != 2 or not all(type(each) is int and each > 0 for each in block)):
        raise CheckpointError(f"{folder}: weight_block_size is {block}, not two numbers above 0: {PLAIN_RELEASE}")
    return block


def read_cut(weight, cut: tuple[slice, ...], scales=None, block: list[int] | None = None) -> torch.Tensor:
    """A part of a tensor of a file; with scales, of FP8, in float32: each code times its block's scale. Of weight and
    scales (of safetensors' get_slice) no more is read than this part and the blocks that it overlaps.
    """
    values = weight[cut]
    if scales is None:
        return values
    values = values.float()
    if block is None:
        return values * scales[...].float().reshape(())
    own = scales[tuple(slice(c.start // b, -(-c.stop // b)) for c, b in zip(cut, block, strict=True))].float()
    for dim, (c, b) in enumerate(zip(cut, block, strict=True)):
        own = own.index_select(dim, torch.arange(c.start, c.stop) // b - c.start // b)
    return values * own


def from_hf_config(folder: Path) -> ModelConfig:
    """The sizes of a model of transformers. Raises CheckpointError where there is none, or it is quantized in a way
    that from_hf can't read; ValueError where ours has not what it has (see single_gpu.hugging_face.hf_config).
    """
    from transformers import AutoConfig

    if not (Path(folder) / "config.json").is_file():
        raise CheckpointError(f"{folder} is no model of transformers: it has no config.json")
    try:
        config = hf_config(AutoConfig.from_pretrained(folder))
    except OSError as error:
        raise CheckpointError(f"{folder}: {' '.join(str(error).split())}") from None
    fp8_block(folder)
    return config


class HfFiles:
    """The safetensors files of a model. where: the file of each tensor; block: as fp8_block returns it."""

    def __init__(self, folder: Path):
        index = folder / "model.safetensors.index.json"
        self.where = json.loads(index.read_text())["weight_map"] if index.is_file() else {}
        self.folder, self.block = folder, fp8_block(folder)
        self.fp8 = bool(json.loads((folder / "config.json").read_text()).get("quantization_config"))

    def open(self, name: str):
        """Open the safetensors file that has the tensor `name`."""
        from safetensors import safe_open

        return safe_open(self.folder / self.where.get(name, "model.safetensors"), "pt")

    def scale_of(self, name: str, shape: tuple[int, ...], kind: str) -> str | None:
        """Return the name of a weight's scales, None for a plain dtype. Raises CheckpointError for any other dtype."""
        if kind in PLAIN_TYPES:
            return None
        scale, file = f"{name}_scale_inv", self.folder / self.where.get(name, "model.safetensors")
        if kind != "F8_E4M3" or not self.fp8:
            raise CheckpointError(f"{name} is {kind} in {file}, and config.json does not say how: {PLAIN_RELEASE}")
        self.where.setdefault(scale, file.name)  # an index may leave it out
        with self.open(scale) as opened:
            if scale not in opened.keys():
                raise CheckpointError(f"{name} is {kind} in {file} without its scales {scale}: {PLAIN_RELEASE}")
            scales = opened.get_slice(scale)
            found, kind = tuple(scales.get_shape()), scales.get_dtype()
        right = [(), (1,), (1, 1)]
        if self.block is not None:
            right = [tuple(-(-n // b) for n, b in zip(shape, self.block, strict=True))] if len(shape) == 2 else []
        if found not in right or kind not in (*PLAIN_TYPES, "F8_E8M0"):
            blocks = f"blocks of {self.block}" if self.block is not None else "one scale"
            given = f"{scale} is {list(found)} of {kind}"
            raise CheckpointError(f"{given}, not {blocks} for {list(shape)}: {PLAIN_RELEASE}")
        return scale

    def check_left(self, config: ModelConfig) -> None:
        """Raise CheckpointError if the files have a tensor that the model does not use."""
        with torch.device("meta"):
            used = {hf_name(name) for name in Transformer(config).state_dict()}
        used |= {"lm_head.weight"}  # of a tied model: the embedding again
        scaled = ("_scale_inv", *(f".{each}" for each in ("activation_scale", "input_scale")))  # of FP8; scale_of looks
        left = []
        for file in sorted({"model.safetensors"} if not self.where else {*self.where.values()}):
            with self.open(next((name for name, each in self.where.items() if each == file), "")) as opened:
                for name in opened.keys():
                    weight = next((name.removesuffix(end) for end in scaled if name.endswith(end)), None)
                    known = weight is not None and (weight in used or f"{weight}.weight" in used)
                    follows = name.endswith("rotary_emb.inv_freq")  # from rope_theta
                    left += [] if name in used or known or follows else [name]
        if left:
            more = f" and {len(left) - 3} more" if len(left) > 3 else ""
            raise CheckpointError(f"another model: {self.folder} has {', '.join(left[:3])}{more}, and ours has not")


@torch.no_grad()
def from_hf(parallel: ParallelModel, folder: Path) -> None:
    """Start from the weights of a model of transformers, in safetensors: each rank reads its own slices. Collective.

    FP8 weights are dequantized on the way, slice by slice. The optimizer's states stay as they are: come here before
    the first step. Raises CheckpointError, on all ranks and before anything changes, where the model is another one or
    has tensors that ours has not, weights are quantized in another way, or a file is missing or cut short.
    """
    folder, boxes = Path(folder), weight_boxes(parallel)

    def look() -> tuple[HfFiles, dict[str, str | None]]:
        """Return the files, and the name of the scales of each weight. Raises CheckpointError for a wrong shape."""
        for name, value in vars(parallel.config).items():
            if name != "dropout" and getattr(theirs, name) != value:
                raise CheckpointError(f"another model: {name} is {getattr(theirs, name)} there, and {value} here")
        files, scales = HfFiles(folder), {}
        for name in sorted(boxes, key=lambda name: files.where.get(hf_name(name), "")):
            with files.open(hf_name(name)) as opened:
                if hf_name(name) not in opened.keys():
                    file = folder / files.where.get(hf_name(name), "model.safetensors")
                    raise CheckpointError(f"{file} has no {hf_name(name)}")
                there = opened.get_slice(hf_name(name))
                shape, kind = tuple(there.get_shape()), there.get_dtype()
            if boxes[name] and boxes[name][0].whole != shape:
                where = folder / files.where.get(hf_name(name), "model.safetensors")
                raise CheckpointError(f"another model: {hf_name(name)} is {list(shape)} in {where}")
            scales[name] = files.scale_of(hf_name(name), shape, kind)
        if first:
            files.check_left(theirs)
        return files, scales

    def read() -> None:
        for name, scale in scales.items():
            with files.open(hf_name(name)) as opened, files.open(scale or hf_name(name)) as beside:
                weight, own = opened.get_slice(hf_name(name)), scale and beside.get_slice(scale)
                for box in boxes[name]:
                    cut = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.values.shape, strict=True))
                    box.values.copy_(read_cut(weight, cut, own, files.block))

    first = dist.get_rank() == 0  # one rank imports transformers
    theirs = together(dist.group.WORLD, lambda: from_hf_config(folder) if first else None)[0]
    files, scales = on_each(dist.group.WORLD, look)
    together(dist.group.WORLD, read)
    if parallel.layout.zero_stage in (1, 2):
        parallel.sharding.give_values()
