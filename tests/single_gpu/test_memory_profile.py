"""course_lib.single_gpu.profile: categories against formulas, peaks against the allocator. CPU; two tests want CUDA."""

import functools
import gc
import math
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

from calls import peak_bytes
from course_lib.single_gpu.data import TokenBatches
from course_lib.single_gpu.memory import activation_bytes, param_count, state_bytes
from course_lib.single_gpu.model import PRESETS, Transformer, loss
from course_lib.single_gpu.profile import CATEGORIES, Allocation, MemoryProfile, category

torch.set_num_threads(1)
CONFIG = PRESETS["debug"]
BATCH, SEQ = 4, 64
STATES = state_bytes(param_count(CONFIG), "fp32")
REST = 3 * 4 + 8 * BATCH  # the loss, its count of tokens, its gradient; the last token of each window
CORPUS = torch.arange(200_000) % 256  # int64: 1.6 MB that were there before


def training(device: str = "cpu", seed: int = 0):
    """A model, its optimizer and its batches."""
    model = Transformer(CONFIG, seed).to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2), TokenBatches(CORPUS, BATCH, SEQ)


def one_step(model, optimizer, batches) -> torch.Tensor:
    """The loss of a step, without its graph."""
    optimizer.zero_grad()
    device = next(model.parameters()).device
    inputs, targets = (part.to(device) for part in next(batches))
    step_loss = loss(model(inputs), targets)
    step_loss.backward()
    optimizer.step()
    return step_loss.detach()


def highest(profile: MemoryProfile) -> dict[str, int]:
    """The highest level of each category."""
    return {name: max(level) for name, level in profile.levels()[1].items()}


def open_hooks(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """What a profile might have left behind."""
    left = ["dispatch mode"] * len(_get_current_dispatch_mode_stack())
    left += ["gradient hook" for p in model.parameters() if p._post_accumulate_grad_hooks]
    left += ["optimizer hook"] * len(optimizer._optimizer_step_post_hooks)
    return left + ["saved-tensor hooks"] * (torch._C._autograd._top_saved_tensors_default_hooks(True) is not None)


def three_steps():
    """A model and the profile of its first three training steps, each a phase."""
    model, optimizer, batches = training()
    with MemoryProfile(model, optimizer) as profile:
        for step in (1, 2, 3):
            profile.mark(f"step {step}")
            one_step(model, optimizer, batches)
    return model, profile


# Categories.


def test_the_levels_of_three_steps_are_those_of_the_formulas():
    model, profile = three_steps()
    found = highest(profile)
    counters = 4 * len(list(model.parameters()))  # AdamW's count of steps, one for each parameter
    assert found["parameters"] == STATES["parameters"]
    assert found["gradients"] == STATES["gradients"]
    assert found["optimizer states"] == STATES["optimizer states"] + counters
    formula = activation_bytes(CONFIG, BATCH, SEQ, 4, fused_norm=False)
    assert found["activations"] - formula == REST
    rest = profile.levels()[1]
    assert rest["activations"][-1] == 0 and rest["optimizer states"][-1] == found["optimizer states"]


def test_the_second_step_has_the_higher_peak_by_the_optimizer_states():
    _, profile = three_steps()
    first, second, third = (profile.peak(f"step {step}") for step in (1, 2, 3))
    assert first["optimizer states"] == 0
    assert sum(second.values()) - sum(first.values()) >= STATES["optimizer states"]
    assert second == third


def test_a_model_without_gradients_or_optimizer_has_parameters_alone():
    model = Transformer(CONFIG)
    model.register_buffer("table", torch.zeros(100))
    model.blocks.requires_grad_(False)
    with MemoryProfile(model) as profile, torch.no_grad():
        model(torch.zeros(1, 8, dtype=torch.int64))
    found = highest(profile)
    assert found["parameters"] == STATES["parameters"] + 400, "a buffer counts as a parameter"
    assert found["gradients"] == found["optimizer states"] == found["activations"] == 0 < found["temporary"]


def test_gradients_and_states_of_before_keep_their_category():
    model, optimizer, batches = training()
    one_step(model, optimizer, batches)
    with MemoryProfile(model, optimizer) as profile:
        profile.mark("nothing happens")
    assert profile.peak() == {
        "parameters": STATES["parameters"],
        "optimizer states": STATES["optimizer states"] + 4 * len(list(model.parameters())),
        "activations": 0,
        "gradients": STATES["gradients"],
        "temporary": 0,
    }


def test_summed_gradients_are_one_copy():
    model, _, batches = training()
    with MemoryProfile(model) as profile:
        for _ in range(3):
            inputs, targets = next(batches)
            loss(model(inputs), targets).backward()
    assert highest(profile)["gradients"] == STATES["gradients"]


def test_what_was_there_before_is_not_counted():
    """The corpus, for example, though batches are slices of it."""
    model, _, _ = training()
    with MemoryProfile(model) as profile:
        kept = CORPUS[10:1000], CORPUS.view(2, -1)  # noqa: F841
        CORPUS.add_(0)
    assert sum(profile.peak().values()) == STATES["parameters"]


@pytest.mark.parametrize("make", [torch.ones, lambda n: torch.tensor([1.0] * n)], ids=["an operation", "torch.tensor"])
def test_what_is_made_inside_is_counted_until_it_goes(make):
    with MemoryProfile(training()[0]) as profile:
        profile.mark("made")
        made = make(5000)
        made.add_(1)
        profile.mark("gone")
        del made
    assert profile.peak("made")["temporary"] >= 20_000
    assert profile.levels()[1]["temporary"][-1] == 0


def test_recomputation_keeps_fewer_activations():
    """Checkpointed blocks keep their inputs; what backward computes again is temporary."""
    model, optimizer, batches = training()

    for block in model.blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    with MemoryProfile(model, optimizer) as profile:
        one_step(model, optimizer, batches)
    found = highest(profile)
    formula = activation_bytes(CONFIG, BATCH, SEQ, 4, recompute="full", fused_norm=False)
    assert found["activations"] - formula == REST
    assert formula < 0.5 * activation_bytes(CONFIG, BATCH, SEQ, 4, fused_norm=False)
    assert found["temporary"] > activation_bytes(CONFIG, BATCH, SEQ, 4, fused_norm=False) / 4


def test_an_evaluation_that_keeps_its_graphs_grows():
    model, _, batches = training()
    one = activation_bytes(CONFIG, BATCH, SEQ, 4, fused_norm=False)
    with MemoryProfile(model) as profile:
        total = 0.0
        for _ in range(5):
            inputs, targets = next(batches)
            total = total + loss(model(inputs), targets)
    assert highest(profile)["activations"] == pytest.approx(5 * one, rel=0.01)


@pytest.mark.parametrize("early", [True, False], ids=["before it is used", "after it was used"])
def test_claimed_tensors_count_where_they_are_claimed(early):
    """For states that no torch optimizer holds, also those that were there before the profile."""
    model, mine = training()[0], torch.zeros(1000)
    with MemoryProfile(model) as profile:
        if not early:
            mine.add_(1)
        made = torch.ones(500)
        profile.claim([mine, made, None, "no tensor"], "optimizer states")
    assert highest(profile)["optimizer states"] == 6000


@pytest.mark.parametrize(
    "fields, expected",
    [
        ({"owner": "parameters", "outlived_forward": True}, "parameters"),
        ({"owner": "gradients", "in_backward": True, "saved": True}, "gradients"),
        ({"owner": "optimizer states", "saved": True}, "optimizer states"),
        ({"saved": True}, "activations"),
        ({"outlived_forward": True}, "activations"),
        ({"in_backward": True, "saved": True}, "temporary"),
        ({"in_backward": True, "outlived_forward": True}, "temporary"),
        ({}, "temporary"),
    ],
)
def test_category(fields, expected):
    assert category(Allocation(4, 0.0, **fields)) == expected
    assert expected in CATEGORIES


# Peaks against the allocator's own events.


def allocator_peak(function) -> int:
    """Bytes at the peak by the allocator's own count, above what was there before."""
    gc.collect()  # what earlier tests left behind would be given back inside
    return peak_bytes(function)


@pytest.mark.parametrize("steps_before", [0, 1])
def test_the_peak_is_that_of_the_allocator(steps_before):
    def prepared():
        model, optimizer, batches = training()
        for _ in range(steps_before):
            one_step(model, optimizer, batches)
        optimizer.zero_grad()  # it does not see how what was there before is freed
        return model, optimizer, batches

    run, same = prepared(), prepared()
    with MemoryProfile(*run[:2]) as profile:
        there = sum(highest(profile).values())
        one_step(*run)
    theirs = allocator_peak(lambda: one_step(*same))
    assert sum(profile.peak().values()) - there == pytest.approx(theirs, rel=0.005)


def test_a_forward_that_is_dropped_gives_its_memory_back():
    """Without a backward, too: a profile must not keep what it watches."""
    model, _, batches = training()

    def forwards():
        for _ in range(4):
            inputs, targets = next(batches)
            loss(model(inputs), targets)

    alone = allocator_peak(forwards)
    with MemoryProfile(model) as profile:
        watched = allocator_peak(forwards)
    assert watched == pytest.approx(alone, rel=0.005), "the profile itself makes memory grow"
    assert sum(profile.peak().values()) - STATES["parameters"] == pytest.approx(alone, rel=0.005)


# Memory that is freed and got back without an operation.


def resized(model: nn.Module) -> None:
    """Made, freed, got back, enlarged and gone, as fully sharded data parallelism does with gathered parameters."""
    gathered = torch.ones(1000)
    storage = gathered.untyped_storage()
    for nbytes in (0, 4000, 6000, 2000):
        storage.resize_(nbytes)


def test_a_resize_ends_one_life_and_begins_another():
    with MemoryProfile(training()[0]) as profile:
        made = torch.ones(1000)
        profile.claim([made], "parameters")
        storage = made.untyped_storage()
        for nbytes in (0, 4000, 6000):
            assert storage.resize_(nbytes) is storage
        made.mul_(2)
        del made, storage
    own = STATES["parameters"]
    levels = [level - own for level in profile.levels()[1]["parameters"]]
    assert levels[-9:] == [0, 4000, 4000, 0, 4000, 4000, 10_000, 6000, 0]
    first, freed, back, larger = profile.allocations[-4:]
    assert [a.nbytes for a in (first, freed, back, larger)] == [4000, 0, 4000, 6000]
    assert first.born < freed.born < first.died < back.born < larger.born < back.died < larger.died < math.inf
    assert profile.levels()[1]["temporary"][-1] == 0 and not profile.tracker.alive


def test_a_resized_parameter_stays_one_and_a_saved_tensor_stays_saved():
    model = nn.Linear(100, 10, bias=False)
    with MemoryProfile(model) as profile:
        out = model((torch.ones(5, 100) + 1).requires_grad_())
        model.weight.untyped_storage().resize_(0)
        model.weight.untyped_storage().resize_(4000)
        nn.init.ones_(model.weight)
        out.sum().backward()
    level = profile.levels()[1]["parameters"]
    assert min(level[level.index(4000) :]) == 0 and level[-1] == 4000, "what is there at the end lives on"
    lives = [a for a in profile.allocations if a.owner == "parameters"]
    assert [(a.nbytes, a.saved, a.in_backward) for a in lives] == [
        (4000, True, False),
        (0, True, False),
        (4000, True, False),
    ]


def test_memory_that_comes_back_in_backward_is_made_in_backward():
    with MemoryProfile(nn.Linear(2, 2)) as profile:
        freed = torch.ones(1000)
        freed.untyped_storage().resize_(0)
        x = torch.ones(3, requires_grad=True)
        y = x * 2
        y.register_hook(lambda gradient: freed.untyped_storage().resize_(4000) and None)
        y.sum().backward()
    (back,) = [a for a in profile.allocations if a.nbytes == 4000 and a.died == math.inf]
    assert back.in_backward and back.backwards == 1 and category(back) == "temporary"


def test_memory_that_a_tensor_of_before_gets_back_inside_is_counted():
    """A parameter that was gathered and freed before the profile began."""
    before, other = torch.ones(1000), torch.empty(10, device="meta")
    before.untyped_storage().resize_(0)
    with MemoryProfile(training()[0]) as profile:
        before.untyped_storage().resize_(4000)
        before.fill_(1)
        other.untyped_storage().resize_(400)
    assert highest(profile)["temporary"] == 4000, "and nothing of another device"


def test_a_resize_peaks_as_the_allocators_events_do():
    model = training()[0]
    with MemoryProfile(model) as profile:
        resized(model)
    assert sum(profile.peak().values()) - STATES["parameters"] == allocator_peak(lambda: resized(model)) == 10_000


def test_resize_is_put_back_also_after_an_exception_and_from_within_another_profile():
    model, before, made = training()[0], torch.UntypedStorage.resize_, torch.ones(1000)
    with MemoryProfile(model) as outer:
        inside = torch.UntypedStorage.resize_
        with pytest.raises(ZeroDivisionError), MemoryProfile(model) as inner:
            made.untyped_storage().resize_(0)
            made.untyped_storage().resize_(4000)
            1 / 0
        assert torch.UntypedStorage.resize_ is inside is not before
        made.untyped_storage().resize_(0)
    assert torch.UntypedStorage.resize_ is before
    for profile in (outer, inner):
        assert highest(profile)["temporary"] == 4000
    assert outer.levels()[1]["temporary"][-1] == 0
    made.untyped_storage().resize_(8000)
    assert made.untyped_storage().nbytes() == 8000 and highest(outer)["temporary"] == 4000


# A profile changes nothing and keeps nothing.


def test_a_storage_may_be_freed_by_another_thread_while_the_profile_ends():
    """As gloo's threads free the tensors of a transfer: between any two lines."""

    class FreedMeanwhile(dict):
        def __iter__(self):
            keys = list(super().__iter__())
            del kept[:]
            gc.collect()
            return iter(keys)

    kept = []
    with MemoryProfile(nn.Linear(2, 2)) as profile:
        kept.append(torch.ones(1000))
        profile.tracker.alive = FreedMeanwhile(profile.tracker.alive)
    freed = [allocation for allocation in profile.allocations if allocation.nbytes == 4000]
    assert len(freed) == 1 and freed[0].died < math.inf


def test_training_is_bitwise_the_same_inside_a_profile():
    plain, watched = training(), training()
    losses = [one_step(*plain) for _ in range(3)]
    with MemoryProfile(*watched[:2]):
        assert losses == [one_step(*watched) for _ in range(3)]
    for (name, expected), found in zip(plain[0].named_parameters(), watched[0].parameters(), strict=True):
        assert torch.equal(found, expected), name
        assert torch.equal(found.grad, expected.grad), f"gradient of {name}"


def test_second_derivatives_are_the_same_inside_a_profile():
    x = torch.randn(20, requires_grad=True)

    def second():
        (first,) = torch.autograd.grad((x.exp() * x.sin()).sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    expected = second()
    with MemoryProfile(nn.Linear(2, 2)):
        assert torch.equal(second(), expected)


def test_no_tensor_is_kept_alive():
    model, optimizer, batches = training()
    with MemoryProfile(model, optimizer) as profile:
        made = torch.ones(1000)
        storage = weakref.ref(made.untyped_storage())
        del made
        assert storage() is None, "freed inside"
        result = loss(model(next(batches)[0]), next(batches)[1])
        graph = weakref.ref(result)
    storage = weakref.ref(result.untyped_storage())
    del result
    assert graph() is None and storage() is None, "freed after"
    assert not profile.tracker.alive


def test_no_hook_stays_behind():
    model, optimizer, batches = training()
    assert open_hooks(model, optimizer) == []
    with MemoryProfile(model, optimizer):
        one_step(model, optimizer, batches)
        assert len(set(open_hooks(model, optimizer))) == 4, "inside, all four kinds are there"
    assert open_hooks(model, optimizer) == []


def test_an_exception_passes_through_and_leaves_no_hook():
    model, optimizer, batches = training()
    with pytest.raises(IndexError), MemoryProfile(model, optimizer) as profile:
        one_step(model, optimizer, batches)
        model(torch.full((1, 4), 256))  # token 256 of 256
    assert open_hooks(model, optimizer) == []
    assert profile.peak()["parameters"] == STATES["parameters"], "what was recorded until then is there"


# Phases and the picture.


def test_the_peak_of_a_phase_is_what_was_alive_in_it():
    with MemoryProfile(training()[0]) as profile:
        profile.mark("one")
        first = torch.ones(1000)
        profile.mark("two")
        second = torch.ones(2000)
        profile.mark("neither is made here, both are there at first")
        del first, second
        profile.mark("quiet")
    temporary = [profile.peak(name)["temporary"] for _, name in profile.marks]
    assert temporary == [4000, 12_000, 12_000, 0]
    assert profile.peak()["temporary"] == 12_000


def test_a_phase_that_was_not_marked_is_a_key_error():
    with MemoryProfile(training()[0]) as profile:
        profile.mark("forward")
    with pytest.raises(KeyError, match=r"no phase 'backward' was marked, only \['forward'\]"):
        profile.peak("backward")


def test_levels_rise_at_birth_and_fall_at_death():
    with MemoryProfile(training()[0]) as profile:
        made = torch.ones(10)
        del made
    moments, levels = profile.levels()
    assert moments == sorted(moments) and all(len(level) == len(moments) for level in levels.values())
    assert levels["temporary"][-2:] == [40, 0]
    (allocation,) = [a for a in profile.allocations if a.nbytes == 40]
    assert 0 < allocation.born < allocation.died < math.inf


def test_the_picture_stacks_the_categories_and_names_the_phases():
    from matplotlib.figure import Figure

    model, optimizer, batches = training()
    with MemoryProfile(model, optimizer) as profile:
        profile.mark("step 1")
        one_step(model, optimizer, batches)
    profile.allocator = [(0.0, 2**20, 3 * 2**20), (0.1, 2 * 2**20, 5 * 2**20)]  # as a CUDA device would have it
    axes = Figure().add_subplot()
    profile.plot(axes, dict.fromkeys(CATEGORIES, "red"))
    labels = axes.get_legend_handles_labels()[1]
    assert labels == [*CATEGORIES, "requested, at most 2", "reserved, at most 5"]
    assert [text.get_text().strip() for text in axes.texts] == ["step 1"]
    top = max(area.get_paths()[0].vertices[:, 1].max() for area in axes.collections)
    assert top == pytest.approx(sum(profile.peak().values()) / 2**20)


# The history that CUDA's allocator keeps.


def test_history_is_refused_on_a_cpu():
    model = training()[0]
    with pytest.raises(ValueError, match="record_history needs a module on CUDA"):
        MemoryProfile(model, record_history=True)
    with MemoryProfile(model) as profile:
        pass
    with pytest.raises(ValueError, match="record_history=True"):
        profile.snapshot("nowhere.pickle")


@pytest.mark.gpu
def test_cuda_has_the_same_categories_and_the_allocators_lines():
    model, optimizer, batches = training("cuda")
    with MemoryProfile(model, optimizer) as profile:
        for _ in range(2):
            one_step(model, optimizer, batches)
    found = highest(profile)
    assert found["parameters"] == STATES["parameters"] and found["gradients"] == STATES["gradients"]
    assert found["optimizer states"] == pytest.approx(STATES["optimizer states"], rel=0.001)
    # In float32 no kernel of PyTorch on a GPU takes fewer heads of k and v than of q: scores are stored.
    assert found["activations"] == pytest.approx(activation_bytes(CONFIG, BATCH, SEQ, 4, flash=False), rel=0.001)
    requested = max(sample[1] for sample in profile.allocator)
    assert all(requested <= reserved for _, requested, reserved in profile.allocator)
    assert requested >= 0.95 * sum(profile.peak().values()), "the allocator sees all that we see"


@pytest.mark.gpu
def test_cuda_writes_a_snapshot(tmp_path):
    import pickle

    model, optimizer, batches = training("cuda")
    with MemoryProfile(model, optimizer, record_history=True) as profile:
        one_step(model, optimizer, batches)
    profile.snapshot(str(tmp_path / "step.pickle"))
    history = pickle.loads((tmp_path / "step.pickle").read_bytes())
    assert any(event["action"] == "alloc" for trace in history["device_traces"] for event in trace)
