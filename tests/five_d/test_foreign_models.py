"""What changes the course's `Transformer` says so when it is given another model, and names what works in any."""

import copy

import pytest
from torch import nn

from course_lib.context_parallel.model import apply_context_parallel
from course_lib.expert_parallel.mixture import apply_moe
from course_lib.expert_parallel.model import apply_expert_parallel
from course_lib.five_d.layouts import Layout
from course_lib.five_d.model import parallelize
from course_lib.flash_attention.operator import use_flash_attention
from course_lib.fp8.program import apply_fp8
from course_lib.fp8.recipes import RECIPES
from course_lib.kernels.fused_loss import defer_head
from course_lib.kernels.program import use_kernels
from course_lib.pipeline.stages import split_stages
from course_lib.recompute.modes import apply_recompute
from course_lib.sequence_parallel.model import apply_sequence_parallel
from course_lib.single_gpu.model import ModelConfig, Transformer
from course_lib.tensor_parallel.model import apply_tensor_parallel
from course_lib.tensor_parallel.partitioned_checkpoints import apply_partitioned_recompute


class Mine(nn.Module):
    """A model of another library, with names that the course's has too."""

    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList([nn.Linear(8, 8)]), nn.Linear(8, 8)


RECIPE = next(recipe for recipe in RECIPES.values() if recipe.casts)
CALLS = {
    "apply_tensor_parallel": (apply_tensor_parallel, "ColumnParallelLinear(linear, group)"),
    "apply_partitioned_recompute": (apply_partitioned_recompute, "apply_recompute takes an nn.ModuleList"),
    "apply_sequence_parallel": (apply_sequence_parallel, "gather_sequence(local, group)"),
    "apply_context_parallel": (apply_context_parallel, "ring_attention(q, k, v, group)"),
    "apply_moe": (lambda model: apply_moe(model, 4, 2), "MoE(config, experts, top_k)"),
    "apply_expert_parallel": (apply_expert_parallel, "dispatch_and_combine(x, gates, ..., group, compute)"),
    "split_stages": (lambda model: split_stages(model, 1), "PipelineRunner takes stages of any kind"),
    "use_kernels": (use_kernels, "FusedRMSNorm, rope and swiglu"),
    "defer_head": (defer_head, "linear_cross_entropy(hidden, weight, targets)"),
    "use_flash_attention": (use_flash_attention, "flash_attention(q, k, v)"),
    "apply_fp8": (lambda model: apply_fp8(model, RECIPE), "Fp8Linear(linear, recipe.casts)"),
    "apply_recompute": (lambda model: apply_recompute(model, "full"), 'apply_recompute(model.layers, "full")'),
}


@pytest.mark.parametrize("name", CALLS)
def test_another_model_is_refused_in_a_sentence_and_stays_as_it_is(name):
    apply, instead = CALLS[name]
    model = Mine()
    before, attributes = str(model), {each: copy.copy(vars(each)) for each in model.modules()}
    with pytest.raises(TypeError) as refusal:
        apply(model)
    text = str(refusal.value)
    assert text.startswith(f"{name} takes ") and "not Mine; " in text and instead in text and "\n" not in text, text
    assert str(model) == before and all(vars(each) == attributes[each] for each in model.modules())


def test_a_wrapped_model_is_refused_by_the_order():
    wrapped = nn.DataParallel(Transformer(ModelConfig(1, 8, 2, 1, 16, 11)))
    with pytest.raises(TypeError, match="use_kernels comes before the model is wrapped in DataParallel"):
        use_kernels(wrapped)


def test_parallelize_names_what_it_takes():
    with pytest.raises(TypeError, match="parallelize builds the model from a ModelConfig; it can't take a Mine"):
        parallelize(Mine(), Layout(), None)
