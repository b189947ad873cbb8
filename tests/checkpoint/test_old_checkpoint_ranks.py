"""A checkpoint that an earlier version of the course wrote loads into other layouts. CPU, gloo.

version_1_checkpoint.zip was written in dp2,tp2,ep2,zero1, with two experts and AdamW. Every tensor in it holds the
values of `expected`, and its settings have the router's old names "balance" and "z".
"""

import math
import shutil
import zlib
from pathlib import Path

import pytest
import torch

from course_lib.checkpoint.checkpoints import load
from course_lib.checkpoint.chunks import state_chunks, weight_chunks
from course_lib.checkpoint.files import describe, latest
from course_lib.checkpoint.staging import synchronize_for_save
from course_lib.five_d.layouts import Layout
from course_lib.five_d.meshes import build_mesh
from course_lib.five_d.model import parallelize
from course_lib.single_gpu.model import ModelConfig

CONFIG = ModelConfig(layers=1, hidden=8, heads=2, kv_heads=2, ffn_hidden=8, vocab=11, tied=True)
MOE = {"experts": 2, "top_k": 1, "ffn_hidden": 8, "aux_loss_coeff": 0.01}


def expected(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the values of a full tensor in the checkpoint."""
    if not shape:
        return torch.tensor(3.0)  # AdamW's step
    return (torch.arange(math.prod(shape)).float().view(shape) + zlib.crc32(name.encode()) % 97) / 128


def differing(text: str, folder: Path) -> tuple[int, list[str]]:
    """Load the checkpoint on a rank. Return the number of its tensors, and the names of those with other values."""
    layout = Layout.parse(text)
    parallel = parallelize(CONFIG, layout, build_mesh(layout), moe=MOE, seed=5, lr=1e-3)
    about = load(parallel, folder)
    assert (about["step"], about["position"], about["moe"]) == (7, 28, MOE)
    chunks = weight_chunks(parallel) | state_chunks(parallel, synchronize_for_save(parallel).state)
    names = []
    for name, chunk in ((name, chunk) for name, each in chunks.items() for chunk in each):
        cut = tuple(slice(begin, begin + n) for begin, n in zip(chunk.offsets, chunk.values.shape, strict=True))
        if not torch.equal(expected(name, chunk.full_shape)[cut], chunk.values):
            names.append(name)
    return len(chunks), names


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("old")
    shutil.unpack_archive(Path(__file__).with_name("version_1_checkpoint.zip"), root)
    return latest(root)


@pytest.mark.parametrize("text", ["dp4", "dp2,tp2,ep2,zero1", "dp4,ep2,zero3"])
def test_a_checkpoint_of_an_earlier_version_loads_into_any_layout(ranks, checkpoint, text):
    for tensors, names in ranks(differing, text, checkpoint):
        assert tensors > 10 and not names


def test_settings_of_an_earlier_version_get_their_present_names(checkpoint):
    about = describe(checkpoint)
    assert about["routing"]["aux_loss_coeff"] == 0.01 and about["routing"]["z_loss_coeff"] == 0.0
    assert not {"balance", "z"} & {*about["routing"], *about["moe"]}
