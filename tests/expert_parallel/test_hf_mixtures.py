"""course_lib.expert_parallel.hugging_face against transformers: Mixtral and Qwen3-MoE, in one process. CPU."""

import pytest
import torch

from calls import said
from course_lib.expert_parallel.hugging_face import from_hf
from course_lib.expert_parallel.router import Router, routers_of
from course_lib.single_gpu import hugging_face
from course_lib.single_gpu.model import loss

SIZES = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"vocab_size": 61, "num_experts_per_tok": 2, "initializer_range": 0.1}
QWEN = {"num_experts": 6, "moe_intermediate_size": 40, "norm_topk_prob": True, "head_dim": 16, "intermediate_size": 24}
KINDS = {"Mixtral": {"num_local_experts": 4, "intermediate_size": 40}, "Qwen3Moe": QWEN}


def mixture(kind: str = "Mixtral", dtype=torch.float32, **changed):
    """A model of transformers, from random weights."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES | KINDS[kind] | changed)
    return getattr(transformers, f"{kind}ForCausalLM")(config).to(dtype).eval()


ONE = {"num_experts_per_tok": 1, "norm_topk_prob": False}  # its gate is the score, as the course's


@pytest.mark.parametrize("kind, tied, change", [*((k, t, {}) for k in KINDS for t in (0, 1)), ("Qwen3Moe", False, ONE)])
def test_logits_and_gradients_are_those_of_transformers(kind, tied, change, tmp_path):
    """float32 within 1e-5 of the largest; from a model and from a folder; nothing is shared with the original."""
    theirs = mixture(kind, tie_word_embeddings=bool(tied), **change)
    theirs.save_pretrained(tmp_path)
    for ours in (from_hf(theirs), from_hf(str(tmp_path))):
        both = torch.randint(61, (3, 11), generator=torch.Generator().manual_seed(0))
        inputs, targets = both[:, :-1], both[:, 1:]
        expected, found = theirs(inputs).logits, ours(inputs)
        assert ((found - expected).abs().max() / expected.abs().max()).item() < 1e-5
        theirs.zero_grad()
        loss(expected, targets).backward()
        loss(found, targets).backward()
        for block, layer in zip(ours.blocks, theirs.model.layers, strict=True):
            gate, up = layer.mlp.experts.gate_up_proj.grad.chunk(2, dim=1)
            pairs = {"gate_proj": gate, "up_proj": up, "down_proj": layer.mlp.experts.down_proj.grad}
            for name, grad in pairs.items():
                mine = getattr(block.mlp.experts, name).weight.grad
                assert ((mine - grad).abs().max() / grad.abs().max()).item() < 1e-5, name
            router = layer.mlp.gate.weight.grad
            assert ((block.mlp.router.weight.grad - router).abs().max() / router.abs().max()).item() < 1e-5
        assert (ours.head.weight is ours.embedding.weight) == tied
        assert not any(p.is_meta for p in ours.state_dict().values())
        theirs_too = {p.data_ptr() for p in theirs.parameters()}
        assert not theirs_too & {p.data_ptr() for p in ours.parameters()}
        assert ours.active_config.ffn_hidden == 40 * theirs.config.num_experts_per_tok


def test_the_dense_model_s_functions_name_those_of_mixtures():
    text = said(lambda: hugging_face.from_hf(mixture()))
    assert "model_type is mixtral, not llama, " in text and text.endswith(
        "; course_lib.checkpoint.from_hf reads mixtures"
    )
    text = said(lambda: hugging_face.to_hf(from_hf(mixture())))
    assert text.startswith("ValueError: no model of Llama's kind: it has model.layers.0.mlp.experts.down_proj.weight; ")


def test_in_bfloat16_and_with_options_of_the_router():
    ours = from_hf(mixture(dtype=torch.bfloat16), aux_loss_coeff=0.02)
    assert {p.dtype for p in ours.parameters()} == {torch.bfloat16}
    assert [router.routing.aux_loss_coeff for router in routers_of(ours)] == [0.02] * 2
    assert isinstance(ours.blocks[0].mlp.router, Router) and not ours.blocks[0].mlp.router.bias.any()


@pytest.mark.parametrize(
    "change, named",
    [
        ({"sliding_window": 16}, "sliding_window is 16, not None"),
        ({"router_jitter_noise": 0.1}, "router_jitter_noise is 0.1, not 0.0"),
        ({"hidden_act": "gelu"}, "hidden_act is gelu, not silu"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}, "rope_type is linear, not"),
        ({"num_experts_per_tok": 1}, "num_experts_per_tok is 1"),  # its gate is 1 there, ours is the score
    ],
)
def test_what_ours_has_not_is_refused(change, named):
    text = said(lambda: from_hf(mixture(**change)))
    assert text.startswith("ValueError: not the model of this course: ") and named in text, text
