"""Names of a model whose blocks torch.compile has wrapped: those of the plain model, in checkpoints, initial values,
and exports. CPU; nothing is compiled.
"""

import pytest
import torch
from torch import nn

from calls import as_rank
from course_lib.checkpoint.chunks import weight_chunks
from course_lib.five_d.layouts import Layout
from course_lib.five_d.meshes import build_mesh
from course_lib.five_d.model import full_weights, parallelize
from course_lib.single_gpu.hugging_face import hf_name
from course_lib.single_gpu.model import ModelConfig, Transformer
from course_lib.tensor_parallel.shards import gather_state_dict
from course_lib.zero import full_state_dict, fully_shard, load_full_state_dict

CONFIG = ModelConfig(layers=2, hidden=32, heads=4, kv_heads=2, ffn_hidden=44, vocab=97, tied=True)


def wrap_blocks(model: nn.Module) -> None:
    """What a user's program does: model.blocks[i] = torch.compile(model.blocks[i])."""
    for name, block in model.blocks.named_children():
        model.blocks.add_module(name, torch.compile(block))


@pytest.mark.parametrize("words", ["dp1", "dp1,zero1", "dp1,zero3"])
@pytest.mark.parametrize("when", ["before values", "after"])
def test_wrapped_blocks_have_their_names_and_values(words, when):
    layout = Layout.parse(words)
    with as_rank(0, 1):
        plain = parallelize(CONFIG, layout, build_mesh(layout, "cpu"), lr=1e-3)
        extra = [wrap_blocks] if when == "before values" else []
        wrapped = parallelize(CONFIG, layout, build_mesh(layout, "cpu"), extra, lr=1e-3)
        if when == "after":
            wrap_blocks(getattr(wrapped.stages["0"], "module", wrapped.stages["0"]))
        assert any("_orig_mod" in name for name, _ in wrapped.stages.named_parameters())
        assert weight_chunks(wrapped).keys() == weight_chunks(plain).keys()
        expected, found = full_weights(plain), full_weights(wrapped)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_full_states_have_plain_names_and_are_loaded_with_either():
    with as_rank(0, 1):
        plain, model = Transformer(CONFIG), Transformer(CONFIG, seed=1)
        wrap_blocks(model)
        sharded = fully_shard(model)
        for source in (plain, torch.compile(plain)):
            load_full_state_dict(sharded, {name: value + 1 for name, value in source.state_dict().items()})
            found, expected = full_state_dict(sharded), plain.state_dict()
            assert found.keys() == expected.keys() == gather_state_dict(torch.compile(plain)).keys()
            assert all(torch.equal(found[name], expected[name] + 1) for name in expected)


def test_wrapped_models_have_the_names_of_transformers():
    model = Transformer(CONFIG)
    expected = [hf_name(name) for name in model.state_dict()]
    assert [hf_name(name) for name in torch.compile(model).state_dict()] == expected
    wrap_blocks(model)
    assert [hf_name(name) for name in model.state_dict()] == expected
