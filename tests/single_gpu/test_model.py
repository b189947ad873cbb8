"""course_lib.single_gpu.model: the same numbers as Hugging Face's LlamaForCausalLM, and the doors later notebooks need.
No GPU.
"""

import copy
import json
import math

import psutil
import pytest
import torch
import torch.nn.functional as F

from course_lib.single_gpu.hugging_face import from_hf, hf_config, hf_name, to_hf
from course_lib.single_gpu.model import (
    PRESETS,
    ModelConfig,
    Transformer,
    apply_rope,
    causal_attention,
    init_parameter,
    loss,
    rope_angles,
)

torch.set_num_threads(1)  # many small operations: a second thread only waits
SHAPES = {
    "grouped, tied": ModelConfig(2, 64, 4, 2, 176, 256, tied=True),
    "multi-head, untied": ModelConfig(2, 48, 4, 4, 100, 131),
    "one K/V head, odd sizes": ModelConfig(3, 42, 3, 1, 50, 77, rope_theta=500_000.0, norm_eps=1e-3),
    "odd sizes, tied": ModelConfig(1, 30, 5, 5, 33, 65, tied=True, rope_theta=100.0),
    "Llama 3.1's positions": ModelConfig(2, 64, 4, 2, 96, 131, rope_theta=50.0, rope_factor=8.0, rope_trained=32),
    "Llama, heads wider than h": ModelConfig(2, 48, 4, 2, 100, 131, head_size=20),
    "Qwen2": ModelConfig(2, 64, 4, 2, 96, 131, tied=True, norm_eps=1e-6, qkv_bias=True),
    "Qwen2, heads wider than h": ModelConfig(1, 48, 4, 2, 100, 131, head_size=20, qkv_bias=True),
    "Qwen3": ModelConfig(2, 48, 6, 2, 96, 131, norm_eps=1e-6, head_size=16, qk_norm=True),
}
each_shape = pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES)


def random_tokens(config: ModelConfig, batch: int = 3, seq: int = 13) -> torch.Tensor:
    """tokens: [batch, seq]."""
    return torch.randint(config.vocab, (batch, seq), generator=torch.Generator().manual_seed(1))


def wide_model(config: ModelConfig) -> Transformer:
    """Weights ten times as large as the initial ones, and norms that are not ones: every term of the model counts."""
    model = Transformer(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.normal_(1.0, 0.3, generator=torch.Generator().manual_seed(parameter.numel()))
            else:
                parameter.mul_(10)
    return model


def assert_same(ours: torch.Tensor, theirs: torch.Tensor, what: str) -> None:
    """Within 1e-5 of the size of the whole, float32."""
    error = (ours - theirs).norm() / theirs.norm()
    assert error < 1e-5, f"{what}: relative error {error:.1e}"


# Against LlamaForCausalLM.


@each_shape
def test_logits_loss_and_gradients_are_those_of_llama(config):
    ours = wide_model(config)
    theirs, tokens = to_hf(ours), random_tokens(config)
    expected = theirs(tokens, labels=tokens)  # its loss shifts the labels by itself
    logits = ours(tokens)
    our_loss = loss(logits[:, :-1], tokens[:, 1:])
    expected.loss.backward()
    our_loss.backward()

    assert_same(logits, expected.logits, "logits")
    assert_same(our_loss, expected.loss, "loss")
    their_gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    our_gradients = {hf_name(name): parameter.grad for name, parameter in ours.named_parameters()}
    assert our_gradients.keys() == their_gradients.keys()
    for name, gradient in our_gradients.items():
        assert_same(gradient, their_gradients[name], name)


@each_shape
def test_the_way_to_hugging_face_and_back_changes_nothing(config):
    model = wide_model(config)
    back = from_hf(to_hf(model))
    assert back.config == config
    assert (back.head.weight is back.embedding.weight) == config.tied
    assert all(parameter.requires_grad for parameter in back.parameters())
    before, after = dict(model.named_parameters()), dict(back.named_parameters())
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(back(random_tokens(config)), model(random_tokens(config)))


def test_the_copy_shares_no_memory_with_the_original():
    model = Transformer(PRESETS["debug"])
    theirs = to_hf(model)
    back = from_hf(theirs)
    addresses = [{p.data_ptr() for p in module.parameters()} for module in (model, theirs, back)]
    assert not addresses[0] & addresses[1] and not addresses[1] & addresses[2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_from_hf_reads_a_saved_folder(tmp_path, dtype):
    model = wide_model(SHAPES["odd sizes, tied"]).to(dtype)
    to_hf(model).save_pretrained(tmp_path)
    back = from_hf(str(tmp_path))
    assert back.config == model.config
    for name, parameter in back.named_parameters():
        assert parameter.dtype == dtype and torch.equal(parameter, model.get_parameter(name)), name


@pytest.mark.parametrize(
    "change, named",
    [
        ({"attention_bias": True}, "attention_bias is True"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}},
            "rope_type is linear, not default or llama3",
        ),
        (
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "rope_theta": 500_000.0,
                    "factor": 8.0,
                    "low_freq_factor": 2.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 64,
                }
            },
            "low_freq_factor is 2.0, not 1.0",
        ),
        ({"hidden_act": "gelu"}, "hidden_act is gelu"),
        ({"sliding_window": 16}, "sliding_window is 16, not None"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_from_hf_refuses_what_our_model_has_not(change, named):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    theirs = LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=96, vocab_size=50, **change))
    with pytest.raises(ValueError, match="not the model of this course") as refusal:
        from_hf(theirs)
    assert named in str(refusal.value) and "\n" not in str(refusal.value)


def test_from_hf_refuses_quantized_weights_and_other_names(tmp_path):
    """Before transformers loads, by config.json and the files' types; and of a model that is loaded already."""
    from safetensors.torch import load_file, save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    theirs = LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=96, vocab_size=50))
    theirs.save_pretrained(tmp_path)
    file, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    tensors, plain, q = load_file(file), config.read_text(), "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(from_hf(tmp_path).embedding.weight, tensors["model.embed_tokens.weight"])

    def refusal(source=tmp_path) -> str:
        with pytest.raises(ValueError) as refused:
            from_hf(source)
        assert "\n" not in str(refused.value)
        return str(refused.value)

    for method in ("fp8", "gptq", "bitsandbytes"):
        config.write_text(json.dumps(json.loads(plain) | {"quantization_config": {"quant_method": method}}))
        line = refusal()
        assert f"{tmp_path} is quantized (quant_method {method}): use the release of the model in bfloat16" in line
        assert ("course_lib.checkpoint" in line) == (method == "fp8")
    config.write_text(plain)
    for dtype, name in ((torch.int8, "I8"), (torch.float8_e4m3fn, "F8_E4M3")):
        save_file(tensors | {q: tensors[q].to(dtype)}, file, {"format": "pt"})
        assert refusal().startswith(f"{q} is {name} in {file}: use the release")
    save_file(tensors | {q.replace("weight", "bias"): torch.zeros(64)}, file, {"format": "pt"})
    assert refusal() == f"{tmp_path}: not the model of this course: unexpected weights {q.replace('weight', 'bias')}"
    save_file({name: tensor for name, tensor in tensors.items() if name != q}, file, {"format": "pt"})
    assert refusal() == f"{tmp_path}: not the model of this course: missing weights {q}"
    file.write_bytes(file.read_bytes()[:-8])
    assert refusal().startswith(f"{tmp_path}: ") and "not fully covered" in refusal()
    file.unlink()
    assert f"no file named model.safetensors, or pytorch_model.bin, found in directory {tmp_path}" in refusal()
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    assert torch.equal(from_hf(tmp_path).embedding.weight, tensors["model.embed_tokens.weight"])
    config.write_text(plain.replace('"llama"', '"no-such-model"'))
    assert refusal().startswith(f"{tmp_path}: ") and "no-such-model" in refusal()
    projection = theirs.model.layers[0].self_attn.q_proj
    projection.weight = torch.nn.Parameter(projection.weight.to(torch.float8_e4m3fn), requires_grad=False)
    assert refusal(theirs).startswith(f"{q} is torch.float8_e4m3fn, a quantized weight: ")


def test_the_sizes_of_a_hugging_face_config():
    from transformers import GemmaConfig, LlamaConfig, MistralConfig

    sizes = {"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"intermediate_size": 96, "vocab_size": 50, "rms_norm_eps": 1e-6, "tie_word_embeddings": True}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    expected = ModelConfig(1, 64, 4, 2, 96, 50, tied=True, rope_theta=5e5, norm_eps=1e-6)
    assert hf_config(LlamaConfig(**sizes, **rope)) == expected
    assert hf_config(MistralConfig(**sizes, **rope, sliding_window=None)) == expected
    with pytest.raises(ValueError, match="sliding_window is 8, not None$"):
        hf_config(MistralConfig(**sizes, sliding_window=8, head_dim=32))
    with pytest.raises(ValueError, match="model_type is gemma, not llama, mistral, qwen2 or qwen3$"):
        hf_config(GemmaConfig(**sizes, hidden_act="silu"))


# Sizes.


@pytest.mark.parametrize(
    "preset, published",
    [
        ("SmolLM-135M", 134_515_008),
        ("llama3.2-1B", 1_235_814_400),
        ("llama3-8B", 8_030_261_248),
        ("llama3-70B", 70_553_706_496),
        ("llama3-405B", 405_853_388_800),
    ],
)
def test_presets_have_the_published_number_of_parameters(preset, published):
    with torch.device("meta"):
        model = Transformer(PRESETS[preset])
    assert sum(parameter.numel() for parameter in model.parameters()) == published


@pytest.mark.parametrize(
    "preset, billions", [("bench-1B", 1.342), ("bench-3B", 3.574), ("bench-8B", 8.858), ("bench-80B", 79.99)]
)
def test_presets_have_the_benchmarked_number_of_parameters(preset, billions):
    with torch.device("meta"):
        model = Transformer(PRESETS[preset])
    count = sum(parameter.numel() for parameter in model.parameters()) / 1e9
    assert count == pytest.approx(billions, abs=0.006 if billions > 10 else 0.001)


def test_405_billion_parameters_on_meta_take_no_memory():
    process = psutil.Process()
    before = process.memory_info().rss
    with torch.device("meta"):
        model = Transformer(PRESETS["llama3-405B"])
    assert all(parameter.is_meta for parameter in model.parameters())
    assert process.memory_info().rss - before < 100 * 2**20, "the whole model has 1.5 TB"


def test_initial_weights_on_meta_do_nothing():
    with torch.device("meta"):
        model = Transformer(PRESETS["debug"])
        model.init_weights(seed=3)
        logits = model(torch.zeros(2, 5, dtype=torch.int64))
    assert logits.is_meta and logits.shape == (2, 5, 256)


@pytest.mark.parametrize(
    "hidden, heads, kv_heads", [(50, 4, 2), (36, 4, 2), (64, 4, 3), (64, 4, 8), (64, 0, 2), (64, 4, 0), (0, 4, 2)]
)
def test_heads_that_do_not_divide_are_refused(hidden, heads, kv_heads):
    with pytest.raises(ValueError, match=f"hidden {hidden}, heads {heads}, kv_heads {kv_heads}"):
        ModelConfig(1, hidden, heads, kv_heads, 64, 256)


# Initial weights.


def test_a_parameter_made_alone_is_the_one_in_the_model():
    config = PRESETS["debug"]
    torch.manual_seed(1)
    model = Transformer(config, seed=5)
    torch.manual_seed(2)  # the global generator has no say
    for name, parameter in model.named_parameters():
        alone = torch.empty_like(parameter)
        init_parameter(name, alone, config, seed=5)
        assert torch.equal(alone, parameter), name


def test_a_bias_begins_at_zero():
    for name in ("blocks.0.attention.q_proj.bias", "blocks.1.mlp.router.bias"):
        bias = torch.full((3,), torch.nan)
        init_parameter(name, bias, PRESETS["debug"])
        assert not bias.any(), name


def test_initial_weights_depend_on_seed_and_name():
    config = PRESETS["debug"]
    first, second = Transformer(config), Transformer(config, seed=1)
    weights = [parameter for parameter in first.parameters() if parameter.dim() == 2]
    assert all(
        not torch.equal(parameter, second.get_parameter(name))
        for name, parameter in first.named_parameters()
        if parameter.dim() == 2
    )
    beginnings = [tuple(weight.flatten()[:4].tolist()) for weight in weights]
    assert len(set(beginnings)) == len(weights), "two parameters began with the same numbers"


def test_initial_weights_have_the_deviations_of_gpt2():
    config = PRESETS["small"]
    for name, parameter in Transformer(config).named_parameters():
        if parameter.dim() == 1:
            assert (parameter == 1).all(), name
            continue
        residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        deviation = 0.02 / math.sqrt(2 * config.layers) if residual else 0.02
        assert parameter.std().item() == pytest.approx(deviation, rel=0.03), name
        assert parameter.mean().item() == pytest.approx(0, abs=0.05 * deviation), name


def test_the_first_loss_is_that_of_a_uniform_guess():
    config = PRESETS["debug"]
    tokens = random_tokens(config, 8, 64)
    assert loss(Transformer(config)(tokens), tokens.roll(-1, 1)).item() == pytest.approx(math.log(256), rel=0.02)


# The doors: stages, positions, the attention core.


@each_shape
def test_two_stages_are_the_whole_model(config):
    if config.layers == 1:
        config = ModelConfig(2, *list(vars(config).values())[1:])
    whole = wide_model(config)
    first, last = copy.deepcopy(whole), copy.deepcopy(whole)
    first.blocks, first.norm, first.head = first.blocks[:1], None, None
    last.blocks, last.embedding = last.blocks[1:], None
    tokens = random_tokens(config)
    hidden = first(tokens)
    assert hidden.shape == (3, 13, config.hidden)
    assert torch.equal(last(hidden), whole(tokens))
    later = torch.arange(7, 20)
    assert torch.equal(last(first(tokens, later), later), whole(tokens, later)), "positions reach every stage"


def caching_core(kept: list):
    """An attention core that also sees the keys and values of the calls before, which it finds in `kept`."""

    def core(q, k, v):
        kept.append((k, v))
        q, k, v = (x.transpose(1, 2) for x in (q, *(torch.cat(parts, dim=1) for parts in zip(*kept, strict=True))))
        sees = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=sees, enable_gqa=True).transpose(1, 2)

    return core


@each_shape
def test_the_second_half_of_a_sequence_with_its_positions(config):
    """With a core that remembers the first half, the second half alone gives what it gives in the whole sequence."""
    model, tokens = wide_model(config), random_tokens(config)
    expected = model(tokens)
    for block in model.blocks:
        block.attention.core = caching_core([])
    halves = [model(tokens[:, :6]), model(tokens[:, 6:], torch.arange(6, 13))]
    assert_same(torch.cat(halves, dim=1), expected, "logits")


def test_positions_may_differ_by_sample():
    config = SHAPES["one K/V head, odd sizes"]
    model, tokens = wide_model(config), random_tokens(config, batch=2)
    near, far = torch.arange(13), 3 * torch.arange(13)
    both = model(tokens, torch.stack([near, far]))
    assert_same(both[:1], model(tokens[:1], near), "sample 0")
    assert_same(both[1:], model(tokens[1:], far), "sample 1")
    assert not torch.allclose(model(tokens[1:], far), model(tokens[1:], near))


def test_the_attention_core_is_replaceable():
    model, tokens, seen = Transformer(PRESETS["debug"]), random_tokens(PRESETS["debug"]), []

    def core(q, k, v):
        seen.append((q.shape, k.shape, v.shape))
        return causal_attention(q, k, v)

    expected = model(tokens)
    for block in model.blocks:
        block.attention.core = core
    assert torch.equal(model(tokens), expected)
    assert seen == [((3, 13, 4, 16), (3, 13, 2, 16), (3, 13, 2, 16))] * 2, "q [b, s, a, d]; k and v [b, s, kv, d]"
    model.blocks[0].attention.core = lambda q, k, v: torch.zeros_like(q)
    assert not torch.equal(model(tokens), expected)


@each_shape
def test_no_token_sees_a_later_one(config):
    model, tokens = wide_model(config), random_tokens(config)
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % config.vocab
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert (before[:, 7:] != after[:, 7:]).any(-1).all(), "and every later one sees it"


def test_rope_is_a_turn_in_the_complex_plane():
    config = ModelConfig(1, 24, 2, 1, 8, 8, rope_theta=100.0)
    x, positions = torch.randn(2, 5, 2, 12, dtype=torch.float64), torch.tensor([0, 1, 2, 50, 1000])
    pairs = torch.complex(*x.chunk(2, dim=-1))  # [b, s, a, d/2]
    angles = positions[:, None].double() * 100.0 ** (-torch.arange(6) / 6)  # [s, d/2]
    turned = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
    cos, sin = rope_angles(positions, config)
    assert cos.dtype == torch.float32 and cos.shape == (5, 6)
    found = apply_rope(x, cos.double(), sin.double())
    torch.testing.assert_close(found, torch.cat([turned.real, turned.imag], dim=-1), rtol=0, atol=5e-4)


# Dropout and precision.


def test_no_dropout_unless_asked_for():
    model, tokens = Transformer(PRESETS["debug"]).train(), random_tokens(PRESETS["debug"])
    assert torch.equal(model(tokens), model(tokens))


def test_dropout_works_in_training_alone():
    config, tokens = PRESETS["debug"], random_tokens(PRESETS["debug"])
    model = Transformer(ModelConfig(**{**vars(config), "dropout": 0.2})).train()
    assert not torch.equal(model(tokens), model(tokens))
    for part in ("attention", "mlp"):
        layer = getattr(model.blocks[0], part)
        x = torch.randn(3, 13, config.hidden)
        angles = rope_angles(torch.arange(13), config) if part == "attention" else ()
        assert 0.1 < (layer(x, *angles) == 0).float().mean() < 0.3, f"dropout at the end of {part}"
    assert torch.equal(model.eval()(tokens), Transformer(config)(tokens))


def test_the_loss_is_computed_in_float32():
    logits = (20 * torch.randn(2, 7, 300)).bfloat16()
    targets = torch.randint(300, (2, 7))
    found = loss(logits, targets)
    assert found.dtype == torch.float32
    expected = F.nll_loss(logits.double().log_softmax(-1).flatten(0, 1), targets.flatten())
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)


def test_bfloat16_stays_near_float32():
    config = SHAPES["grouped, tied"]
    model, tokens = Transformer(config), random_tokens(config)
    expected = model(tokens)
    rounded = copy.deepcopy(model).bfloat16()(tokens)
    assert rounded.dtype == torch.bfloat16
    assert (rounded - expected).norm() / expected.norm() < 0.02, "bfloat16 has 8 bits: 2% over two layers"
