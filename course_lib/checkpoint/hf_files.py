"""The files of a Hugging Face transformers model: sizes from config.json, weights from safetensors.

    config, moe = read_hf_config(Path("my-model"))   # a folder, or a config.json under any file name
    config, moe = from_hf_config(Path("my-model"))   # a folder that also has weights

FP8 weights have a scale per block or tensor. Weights that are quantized in another way are refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from course_lib.checkpoint.files import CheckpointError
from course_lib.expert_parallel.hf_sizes import size
from course_lib.expert_parallel.hugging_face import HF_MIXTURES, hf_mixture, hf_tensors
from course_lib.expert_parallel.mixture import apply_moe
from course_lib.single_gpu.hf_config import HF_KINDS, hf_config, one_of
from course_lib.single_gpu.hugging_face import PLAIN_RELEASE, PLAIN_TYPES
from course_lib.single_gpu.model import ModelConfig, Transformer

SIZES = (
    *("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"),
    *("intermediate_size", "moe_intermediate_size", "num_experts", "num_local_experts", "num_experts_per_tok"),
)


def read_json(file: Path) -> dict:
    """Read a file that holds a JSON object. Raises CheckpointError."""
    try:
        contents = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror}") from None
    except ValueError as error:
        raise CheckpointError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(contents, dict):
        raise CheckpointError(f"{file} is not a JSON object")
    return contents


def read_hf_config(path: Path) -> tuple[ModelConfig, dict | None]:
    """Return the sizes of a transformers model, and the arguments of apply_moe (None for a dense model). Needs `[hf]`.

    path: the model's folder, or its config.json under any file name. Raises CheckpointError if the file cannot be read;
    ValueError if our model lacks one of its features (see hf_config and hf_mixture).
    """
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    contents = read_json(file)
    kind = contents.get("model_type")
    if kind not in (*HF_KINDS, *HF_MIXTURES):
        raise ValueError(f"{file}: model_type is {kind}, not {one_of((*HF_KINDS, *HF_MIXTURES))}")
    from transformers import CONFIG_MAPPING

    try:
        for name in SIZES:
            if contents.get(name) is not None:  # transformers fills in the others
                size(contents, name)
        config = CONFIG_MAPPING[kind].from_dict(contents)
    except Exception as error:  # a wrong value may raise any exception
        raise CheckpointError(f"{file}: {' '.join(str(error).split())}") from None
    return hf_mixture(config) if kind in HF_MIXTURES else (hf_config(config), None)


def weight_files(folder: Path) -> dict[str, str]:
    """Return the safetensors file of each tensor from the index; {} without an index: all are in model.safetensors.

    Raises CheckpointError if a file is missing, or the weights are not in safetensors.
    """
    index = folder / "model.safetensors.index.json"
    file_of = read_json(index).get("weight_map") if index.is_file() else {}
    if not isinstance(file_of, dict) or not all(isinstance(file, str) for file in file_of.values()):
        raise CheckpointError(f"{index} has no weight_map with a file for each tensor")
    if missing := sorted(file for file in {*file_of.values()} if not (folder / file).is_file()):
        raise CheckpointError(f"{folder} lacks {missing[0]}, which {index.name} names")
    if file_of or (folder / "model.safetensors").is_file():
        first = min(file_of.values(), default="model.safetensors")
        with open(folder / first, "rb") as opened:
            if opened.read(40).startswith(b"version https://git-lfs"):
                raise CheckpointError(f"{folder / first} is a pointer of Git LFS, not the weights: run git lfs pull")
        return file_of
    others = sorted(file.name for end in ("bin", "pth", "gguf") for file in folder.glob(f"*.{end}"))
    hint = f", only {others[0]}: load the model with transformers, and write it with save_pretrained" if others else ""
    raise CheckpointError(f"{folder} has no model.safetensors{hint}")


def from_hf_config(folder: Path) -> tuple[ModelConfig, dict | None]:
    """Return the result of read_hf_config for a folder that also has the weights' files.

    Raises CheckpointError if a file is missing, or the weights are quantized in a way that from_hf cannot read;
    ValueError as read_hf_config.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        hint = "" if folder.is_dir() else "; download the model to a folder first"
        raise CheckpointError(f"{folder} is not a model of transformers: it has no config.json{hint}")
    sizes = read_hf_config(folder)
    fp8_block(folder)
    weight_files(folder)
    return sizes


def fp8_block(folder: Path) -> list[int] | None:
    """Return [rows, columns] of an FP8 block, or None for one scale per tensor and for models that are not quantized.

    Raises CheckpointError if config.json names another quantization method.
    """
    config = read_json(Path(folder) / "config.json")
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
    """Return a slice of a tensor in a file. With scales, for FP8: in float32, each code times its block's scale.

    weight, scales: from safetensors' get_slice. Reads only this slice and the blocks that it overlaps.
    """
    values = weight[cut]
    if scales is None:
        return values
    values = values.float()
    if block is None:
        return values * scales[...].float().reshape(())
    factors = scales[tuple(slice(c.start // b, -(-c.stop // b)) for c, b in zip(cut, block, strict=True))].float()
    for dim, (c, b) in enumerate(zip(cut, block, strict=True)):
        factors = factors.index_select(dim, torch.arange(c.start, c.stop) // b - c.start // b)
    return values * factors


class HfFiles:
    """The safetensors files of a model, each opened once. kind: its model_type; file_names: by tensor; block: see
    fp8_block.
    """

    def __init__(self, folder: Path):
        self.folder, self.file_names, self.block = folder, weight_files(folder), fp8_block(folder)
        self.indexed, config = bool(self.file_names), read_json(folder / "config.json")
        self.kind, self.fp8 = config["model_type"], bool(config.get("quantization_config"))
        self.opened: dict[Path, tuple[Any, frozenset[str]]] = {}  # safetensors' handle, and the tensors' names

    def file_of(self, name: str) -> Path:
        """Return the safetensors file of the tensor `name`. Raises CheckpointError if an index does not name it."""
        if self.indexed and name not in self.file_names:
            raise CheckpointError(f"{self.folder / 'model.safetensors.index.json'} has no {name}")
        return self.folder / self.file_names.get(name, "model.safetensors")

    def names(self, file: Path) -> frozenset[str]:
        """Return the names of the tensors in a file. Raises CheckpointError if it cannot be read."""
        from safetensors import SafetensorError, safe_open

        if file not in self.opened:
            try:
                opened = safe_open(file, "pt")
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{file} can't be read: {error}") from None
            self.opened[file] = opened, frozenset(opened.keys())
        return self.opened[file][1]

    def get_slice(self, name: str):
        """Return safetensors' handle to read slices of a tensor. Raises CheckpointError if there is no such tensor."""
        file = self.file_of(name)
        if name not in self.names(file):
            raise CheckpointError(f"{file} has no {name}")
        return self.opened[file][0].get_slice(name)

    def scale_of(self, name: str, shape: tuple[int, ...], kind: str) -> str | None:
        """Return the name of a weight's scales, None for a plain dtype. Raises CheckpointError for any other dtype."""
        if kind in PLAIN_TYPES:
            return None
        scale, file = f"{name}_scale_inv", self.file_of(name)
        if kind != "F8_E4M3" or not self.fp8:
            raise CheckpointError(f"{name} is {kind} in {file}, and config.json does not say how: {PLAIN_RELEASE}")
        self.file_names.setdefault(scale, file.name)  # an index may omit it
        if scale not in self.names(self.file_of(scale)):
            raise CheckpointError(f"{name} is {kind} in {file} without its scales {scale}: {PLAIN_RELEASE}")
        scales = self.get_slice(scale)
        scale_shape, kind = tuple(scales.get_shape()), scales.get_dtype()
        valid: list[tuple[int, ...]] = [(), (1,), (1, 1)]
        if self.block is not None:
            valid = [tuple(-(-n // b) for n, b in zip(shape, self.block, strict=True))] if len(shape) == 2 else []
        if scale_shape not in valid or kind not in (*PLAIN_TYPES, "F8_E8M0"):
            blocks = f"blocks of {self.block}" if self.block is not None else "one scale"
            actual = f"{scale} is {list(scale_shape)} of {kind}"
            raise CheckpointError(f"{actual}, not {blocks} for {list(shape)}: {PLAIN_RELEASE}")
        return scale

    def check_unused(self, config: ModelConfig, moe: dict | None) -> None:
        """Raise CheckpointError if the files have a tensor that the model does not use."""
        with torch.device("meta"):
            model = apply_moe(Transformer(config), **moe) if moe else Transformer(config)
        weights = model.state_dict().items()
        used = {hf_name for name, like in weights for hf_name, _ in hf_tensors(name, like.shape, self.kind)}
        used |= {"lm_head.weight"}  # of a tied model: the embedding again
        scales = ("_scale_inv", ".activation_scale", ".input_scale")  # of FP8; scale_of checks them
        unused = []
        for file in sorted({"model.safetensors"} if not self.file_names else {*self.file_names.values()}):
            for name in sorted(self.names(self.folder / file)):
                weight = next((name.removesuffix(end) for end in scales if name.endswith(end)), None)
                is_scale = weight is not None and (weight in used or f"{weight}.weight" in used)
                is_derived = name.endswith("rotary_emb.inv_freq")  # from rope_theta
                unused += [] if name in used or is_scale or is_derived else [name]
        if unused:
            others = f" and {len(unused) - 3} more" if len(unused) > 3 else ""
            raise CheckpointError(f"another model: {self.folder} has {', '.join(unused[:3])}{others}, which ours lacks")
