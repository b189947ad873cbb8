"""course_lib.pipeline.stages: all stages together are the model, and so are their gradients. One process."""

import dataclasses
import gc
import weakref

import pytest
import torch
from torch import nn

from course_lib.expert_parallel.mixture import apply_moe
from course_lib.pipeline.stages import StagePass, split_layers, split_stages
from course_lib.recompute.modes import apply_recompute
from course_lib.single_gpu.model import ModelConfig, Transformer, loss
from course_lib.single_gpu.placement import placement_of
from split_models import whole_model

OF = ModelConfig(layers=6, hidden=16, heads=4, kv_heads=2, ffn_hidden=20, vocab=31)
TIED = dataclasses.replace(OF, tied=True)


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(31, (2, 3, 5), generator=torch.Generator().manual_seed(seed)).unbind()


def test_layers_are_shared_out_with_embedding_and_head_counted_in():
    """Every layer once, in order; embedding, layers and head differ by one at most from stage to stage."""
    for layers in range(0, 40):
        for stages in range(1, layers + 3):
            ranges = split_layers(layers, stages)
            assert [layer for each in ranges for layer in each] == list(range(layers))
            counts = [len(each) + (i == 0) + (i == stages - 1) for i, each in enumerate(ranges)]
            assert max(counts) - min(counts) <= 1 and min(counts) >= 1 and len(ranges) == stages
    assert [len(each) for each in split_layers(126, 16)] == [7] + [8] * 14 + [7], "Llama 3 405B"


def test_too_many_stages_and_none_are_refused():
    for stages in (0, -1, 9):
        with pytest.raises(ValueError, match=f"6 layers, an embedding and a head do not fill {stages} stages"):
            split_layers(6, stages)
    with pytest.raises(ValueError, match="do not fill 12 stages"):
        split_stages(Transformer(OF), 4, 3)
    for p, v in ((0, 1), (2, 0), (-2, -1)):
        with pytest.raises(ValueError, match=f"p = {p}, v = {v}: ranks and stages per rank must be 1 or more"):
            split_stages(Transformer(OF), p, v)


@pytest.mark.parametrize("of", [OF, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize("p, v", [(1, 1), (2, 1), (3, 1), (4, 1), (2, 2), (4, 2), (1, 3)])
def test_one_stage_after_the_other_is_the_model(of, p, v):
    """To the bit; and all gradients, when the graph goes through all of them."""
    model = whole_model(of)
    stages = split_stages(model, p, v)
    inputs, targets = batch()
    expected = model(inputs)
    x = inputs
    for stage in stages:
        x = stage(x)
    assert torch.equal(x, expected)
    found, wanted = (torch.autograd.grad(loss(out, targets), list(model.parameters())) for out in (x, expected))
    assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("of", [OF, TIED], ids=["untied", "tied"])
def test_stages_share_what_they_have_under_its_name(of):
    """Each parameter is the model's own, by its own name; each is in one stage, a tied one in two."""
    model = whole_model(of)
    before = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
    stages = split_stages(model, 2, 2)
    found = [(n, id(p)) for stage in stages for n, p in stage.named_parameters(remove_duplicate=False)]
    assert sorted(found) == sorted(before.items()), "nothing is copied, lost or there twice"
    assert {n: id(p) for n, p in model.named_parameters(remove_duplicate=False)} == before, "the model stays as it is"
    first, *middle, last = stages
    assert first.embedding is model.embedding and last.head is model.head and last.norm is model.norm
    assert all(stage.embedding is None for stage in [*middle, last])
    assert all(stage.head is None and stage.norm is None for stage in [first, *middle])
    assert all(type(stage) is Transformer and stage.config is of for stage in stages)
    assert placement_of(model.head.weight).stages == ((0, 3) if of.tied else None)
    assert not any(placement_of(p).stages for n, p in model.named_parameters() if "blocks" in n)


def test_one_stage_ties_nothing_across_stages():
    model = whole_model(TIED)
    (stage,) = split_stages(model, 1)
    assert placement_of(model.head.weight).stages is None and stage.head.weight is stage.embedding.weight


def test_a_model_on_the_meta_device_can_be_split():
    """Nothing gets values; shapes go through."""
    with torch.device("meta"):
        mixture, model = apply_moe(Transformer(TIED), 4, 2), Transformer(TIED)
    assert all(tensor.is_meta for stage in split_stages(mixture, 4) for tensor in stage.state_dict().values())
    stages = split_stages(model, 4)
    assert stages[0](torch.zeros(2, 5, dtype=torch.long, device="meta")).shape == (2, 5, 16)
    assert sum(1 for stage in stages for _ in stage.parameters()) == sum(1 for _ in model.parameters()) + 1


def test_training_mode_and_recomputation_are_each_stage_s_own():
    stages = split_stages(whole_model(OF), 2)
    stages[0].eval()
    assert not stages[0].blocks[0].training and stages[1].training and stages[1].get_submodule("blocks.4").training
    apply_recompute(stages[1], "full")
    assert all("forward" in block.__dict__ for block in stages[1].blocks)
    assert not any("forward" in block.__dict__ for block in stages[0].blocks)


# One micro-batch in one stage.


def passes(model: nn.Module, p: int, inputs, targets, make=StagePass) -> list[StagePass]:
    """Forward of one micro-batch through all stages; each knows nothing of the one before."""
    stages, found, x = split_stages(model, p), [], inputs
    for number, stage in enumerate(stages):
        last = number == p - 1
        found.append(make(stage, x, (lambda out: loss(out, targets)) if last else lambda out: out))
        x = found[-1].out
    return found


@pytest.mark.parametrize("of", [OF, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize("p", [1, 2, 4, 8])
def test_gradients_that_are_handed_on_are_those_of_the_whole_graph(of, p):
    """To the bit: cutting a graph changes no sum."""
    (inputs, targets), whole, model = batch(), whole_model(of), whole_model(of)
    expected = loss(whole(inputs), targets)
    expected.backward()
    done = passes(model, p, inputs, targets)
    assert torch.equal(done[-1].out, expected.detach()) and not any(each.out.requires_grad for each in done)
    gradient = torch.ones(())
    for each in reversed(done):
        gradient = each.backward(gradient)
    assert gradient is None, "tokens have no gradient"
    for (name, ours), theirs in zip(model.named_parameters(), whole.parameters(), strict=True):
        if of.tied and p > 1 and name == "embedding.weight":  # a sum of two, in either order
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-7)
        else:
            assert torch.equal(ours.grad, theirs.grad), name


def test_graphs_end_at_the_cut_and_are_freed_by_backward():
    """Without the garbage collector: neither the stage's input nor its output holds a graph."""
    stage, x = split_stages(whole_model(OF), 4)[1], torch.randn(2, 5, 16, requires_grad=True) * 2
    gc.disable()
    try:
        kept = []
        next(iter(stage.blocks)).mlp.register_forward_hook(lambda _, __, out: kept.append(weakref.ref(out)))
        done = StagePass(stage, x, lambda out: out)
        assert done.x.is_leaf and done.x is not x and done.x.grad_fn is None and done.out.grad_fn is None
        out = weakref.ref(done.out)
        done.out = None
        assert out() is None, "what is sent need not stay"
        first = done.backward(torch.ones(2, 5, 16))
        assert first.shape == x.shape
        done = None
        assert len(kept) == 1 and kept[0]() is None
    finally:
        gc.enable()


def test_hooks_of_a_stage_are_its_own():
    model, fired = Transformer(OF), []
    stages = split_stages(model, 3)
    stages[1].register_forward_pre_hook(lambda module, args: fired.append(module))
    x = torch.zeros(1, 4, dtype=torch.long)
    for stage in stages:
        x = stage(x)
    model(torch.zeros(1, 4, dtype=torch.long))
    assert fired == [stages[1]]
