"""course_lib.flash_attention.operator as the block of notebook 07's attention across ranks, and under tensor
parallelism, on 2 and 4 ranks against one process. CPU, gloo, interpreted.
"""

import torch

from attention_inputs import NAMES, Case, exact, inputs
from course_kit.gpu.launches import record_launches
from course_lib.collectives.traffic import count_traffic
from course_lib.context_parallel.model import METHODS, apply_context_parallel
from course_lib.flash_attention.operator import FLASH_BLOCK, use_flash_attention
from course_lib.sequence_parallel.shards import shard_sequence, unshard_sequence
from course_lib.single_gpu.model import ModelConfig
from course_lib.tensor_parallel.model import apply_tensor_parallel
from course_lib.tensor_parallel.shards import gather_state_dict
from course_lib.zero.shards import clip_grad_norm_
from split_models import (
    MAX_NORM,
    OPTIMIZERS,
    STEPS,
    batches,
    differing,
    group_of,
    in_replicas,
    not_as,
    one_process,
    split_loss,
    whole_gradients,
    whole_model,
)

WITHIN = {torch.float32: 2e-6, torch.bfloat16: 1.5e-2}  # norm of the error over the norm
TOKENS = 24  # chunks for 2 and 4 ranks
# (method, ranks, K/V heads, dtype, causal)
WAYS = [
    ("ring", 2, 1, torch.bfloat16, True),
    ("ring", 4, 2, torch.float32, True),
    ("ring", 2, 4, torch.float32, False),
    ("all_gather", 4, 1, torch.float32, True),
    ("all_gather", 2, 2, torch.bfloat16, False),
    ("ulysses", 4, 4, torch.bfloat16, True),
    ("ulysses", 2, 1, torch.float32, False),
]


def attention_differs() -> dict[str, str]:
    """On a rank: what is further from float64 than its dtype allows, or was not computed by the kernels."""
    groups, wrong = {n: group_of(n) for n in (2, 4)}, {}
    for method, n, kv_heads, dtype, causal in WAYS:
        group, case = groups[n], Case(b=1, s_q=TOKENS, s_k=TOKENS, heads=4, kv_heads=kv_heads, causal=causal)
        whole = inputs(case, dtype, kv_heads)
        gradient, *leaves = (shard_sequence(x, group).requires_grad_() for x in whole)
        with record_launches() as launches:
            out = METHODS[method](*leaves, group, causal, FLASH_BLOCK)
            found = out, *torch.autograd.grad(out, leaves, gradient)
        names = [launch.name for launch in launches]
        backward = "key_gradient_kernel" if dtype == torch.float32 else "gradient_kernel"
        kernels = {name: names.count(name) for name in ("flash_forward_kernel", backward)}
        if len(names) != 4 * kernels["flash_forward_kernel"] or len(set(kernels.values())) != 1 or not names:
            wrong[f"{method} {n}: launches"] = str(kernels)
        for name, part, expected in zip(NAMES, found, exact(whole, case), strict=True):
            error = ((unshard_sequence(part, group) - expected).norm() / expected.norm()).item()
            if not error < WITHIN[dtype] or part.dtype != dtype:
                wrong[f"{method} {n} {kv_heads} {dtype} {causal}: {name}"] = f"{error:.1e} {part.dtype}"
    return wrong


def test_across_ranks_it_is_float64s_attention(ranks):
    """Outputs and gradients of every rank by all three methods: within 2e-6 and 1.5e-2 by dtype."""
    for wrong in ranks(attention_differs):
        assert not wrong, wrong


def a_ring_of_kernels(n: int) -> tuple[list[int], int]:
    """On a rank: the keys of each forward block, and the bytes that forward sends."""
    group = group_of(n)
    _, *leaves = (shard_sequence(x, group, "contiguous") for x in inputs(Case(b=1, s_q=TOKENS, s_k=TOKENS)))
    with record_launches() as launches, count_traffic() as traffic:
        METHODS["ring"](*leaves, group, True, FLASH_BLOCK, "contiguous")
    return [launch.args[7] for launch in launches], traffic.select("send").bytes


def test_a_block_for_each_step_of_the_ring_that_is_seen(ranks):
    """In order, rank r sees the keys of r + 1 ranks: no kernel begins for the others. A step sends a rank's k and v."""
    of_a_rank = TOKENS // 4
    for rank, (keys, sent) in enumerate(ranks(a_ring_of_kernels, 4)):
        assert keys == [of_a_rank] * (rank + 1)
        assert sent == 3 * 2 * of_a_rank * 16 * 4


TRAINED = {"seq": 8, "batch": 1}
MODEL = ModelConfig(layers=1, hidden=32, heads=4, kv_heads=2, ffn_hidden=36, vocab=97)


def trained_in_a_ring() -> list[str]:
    """On one of 2 ranks that share each sequence: what differs from one process."""
    group, alone = group_of(2), group_of(1)
    model = apply_context_parallel(whole_model(MODEL), group, "ring", attention=FLASH_BLOCK)

    def own(whole: torch.Tensor) -> torch.Tensor:
        return shard_sequence(whole, group)

    return not_as(in_replicas("DataParallel", model, group, alone, own, **TRAINED), one_process(MODEL, **TRAINED))


def test_training_in_a_ring_is_that_of_one_process(ranks):
    """Losses, gradients, norms, weights after 3 clipped steps, within 1e-5."""
    assert ranks(trained_in_a_ring) == [[]] * 4


def tensor_parallel_training() -> tuple[list[str], list[int]]:
    """On one of 2 ranks: what differs from one process, and the query heads of each forward launch."""
    group, found = group_of(2), {}
    model = apply_tensor_parallel(use_flash_attention(whole_model(MODEL)), group)
    optimizer = OPTIMIZERS["SGD"](model.parameters())
    with record_launches() as launches:
        for step in range(STEPS):
            optimizer.zero_grad()
            step_loss = split_loss(model, *batches(step, **TRAINED), group)
            step_loss.backward()
            found |= {f"loss {step}": step_loss.detach()}
            found |= {f"gradient {step} {name}": whole for name, whole in whole_gradients(model).items()}
            found[f"norm {step}"] = clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
    found |= {f"weight {name}": tensor for name, tensor in gather_state_dict(model).items()}
    heads = [launch.grid[1] for launch in launches if launch.name == "flash_forward_kernel"]
    return differing(found, one_process(MODEL, **TRAINED)), heads


def test_tensor_parallel_training_is_that_of_one_process(ranks):
    """Losses, gradients, norms, weights after 3 clipped steps, within 1e-5; each rank computes its own heads."""
    for differs, heads in ranks(tensor_parallel_training):
        assert not differs and heads == [MODEL.heads // 2] * MODEL.layers * STEPS
