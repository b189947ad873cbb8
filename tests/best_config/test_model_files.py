"""course_lib.best_config.model_files: sizes from config.json are those of published models. CPU."""

import json

import pytest

from course_lib.best_config.model_files import read_config, sizes_of
from course_lib.checkpoint.hf_files import read_hf_config
from course_lib.expert_parallel.mixture import mixture_params
from course_lib.single_gpu.hf_config import hf_config
from course_lib.single_gpu.memory import param_count

LLAMA = {
    "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0}, "hidden_act": "silu",
}  # fmt: skip
# config.json and the counts of mistralai/Mistral-7B-v0.3, Qwen/Qwen2.5-0.5B (0.49B) and Qwen/Qwen3-0.6B (0.6B).
DENSE = {
    "mistral": ({
        "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
        "intermediate_size": 14336, "vocab_size": 32768, "sliding_window": None,
    }, 7.248e9),
    "qwen2": ({
        "num_hidden_layers": 24, "hidden_size": 896, "num_attention_heads": 14, "num_key_value_heads": 2,
        "intermediate_size": 4864, "vocab_size": 151936, "tie_word_embeddings": True, "sliding_window": 32768,
    }, 0.494e9),
    "qwen3": ({
        "num_hidden_layers": 28, "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "intermediate_size": 3072, "vocab_size": 151936, "tie_word_embeddings": True,
    }, 0.596e9),
}  # fmt: skip
# config.json and the counts in the model cards of mistralai/Mixtral-8x7B-v0.1 (46.7B, 12.9B), Qwen/Qwen3-30B-A3B
# (30.5B, 3.3B) and Qwen/Qwen1.5-MoE-A2.7B (14.3B, 2.7B).
MIXTURES = {
    "mixtral": ({
        "model_type": "mixtral", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 32000, "num_local_experts": 8,
        "num_experts_per_tok": 2, "sliding_window": None,
    }, 46.7e9, 12.9e9),
    "qwen3_moe": ({
        "model_type": "qwen3_moe", "num_hidden_layers": 48, "hidden_size": 2048, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144, "vocab_size": 151936,
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }, 30.5e9, 3.3e9),
    "qwen2_moe": ({
        "model_type": "qwen2_moe", "num_hidden_layers": 24, "hidden_size": 2048, "num_attention_heads": 16,
        "num_key_value_heads": 16, "intermediate_size": 5632, "vocab_size": 151936, "num_experts": 60,
        "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
    }, 14.3e9, 2.7e9),
}  # fmt: skip


@pytest.fixture
def written(tmp_path):
    """Writes a config.json; returns its path."""

    def write(sizes):
        file = tmp_path / "config.json"
        file.write_text(sizes if isinstance(sizes, str) else json.dumps(sizes))
        return file

    return write


def test_llama_without_transformers(written):
    config, moe = read_config(written(LLAMA))
    assert moe is None and param_count(config) == 8_030_261_248  # of meta-llama/Llama-3.1-8B's safetensors
    assert read_config(written(LLAMA).parent) == (config, None)
    assert read_config(written(LLAMA | {"num_key_value_heads": None, "tie_word_embeddings": True}))[0].tied
    without = {name: value for name, value in LLAMA.items() if name != "num_key_value_heads"}
    assert read_config(written(without))[0].kv_heads == 32


@pytest.mark.parametrize("kind", DENSE)
def test_published_models_have_their_published_counts(kind, written):
    sizes, count = DENSE[kind]
    config, moe = read_config(written({"model_type": kind} | sizes))
    assert moe is None and param_count(config) == pytest.approx(count, rel=0.01)
    assert (config.qkv_bias, config.qk_norm) == (kind == "qwen2", kind == "qwen3")


@pytest.mark.parametrize("kind", MIXTURES)
def test_published_mixtures_have_their_published_counts(kind, written):
    sizes, total, active = MIXTURES[kind]
    config, moe = read_config(written(sizes))
    counts = mixture_params(config, **moe)
    assert counts == pytest.approx((total, active), rel=0.03)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model_type": "bert"}, "model_type is bert: the planner knows llama, mistral"),
        ({"model_type": None}, "model_type is None"),
        ({"hidden_size": "4096"}, "hidden_size is '4096': it must be a whole number of 1 or more"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_attention_heads": 33}, "heads must divide hidden"),
        ({"model_type": "mixtral"}, "num_local_experts is missing"),
        (
            {"model_type": "qwen3_moe", "num_experts": 64, "mlp_only_layers": [1]},
            "mlp_only_layers is .* the course has mixtures in all layers, or in none",
        ),
    ],
)
def test_what_the_planner_does_not_know_is_one_line(change, message, written):
    file = written(LLAMA | change)
    with pytest.raises(ValueError, match=message) as caught:
        read_config(file)
    assert "\n" not in str(caught.value) and str(caught.value).startswith(f"{file}: ")


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "Expecting"),
        ("[1]", "no JSON object"),
        (None, "No such file"),
        ("[" * 100_000, "its JSON is nested too deeply"),
    ],
)
def test_no_config_is_one_line(text, message, written, tmp_path):
    file = written(text) if text else tmp_path / "none.json"
    with pytest.raises(ValueError, match=message) as caught:
        read_config(file)
    assert "\n" not in str(caught.value)


def test_a_file_with_a_byte_order_mark(written):
    assert read_config(written("\ufeff" + json.dumps(LLAMA))) == read_config(written(LLAMA))


@pytest.mark.parametrize("kind", ["llama", *DENSE])
@pytest.mark.parametrize("left_out", ["num_key_value_heads", "head_dim", "tie_word_embeddings", "rms_norm_eps"])
def test_what_a_file_leaves_out_is_what_transformers_takes(kind, left_out):
    from transformers import CONFIG_MAPPING

    sizes = {name: value for name, value in LLAMA.items() if name not in ("rope_scaling", left_out)}
    sizes |= {"model_type": kind, "hidden_size": 2048, "sliding_window": None}
    ours, theirs = sizes_of(sizes)[0], hf_config(CONFIG_MAPPING[kind].from_dict(sizes))
    assert (ours.kv_heads, ours.head_dim, ours.tied) == (theirs.kv_heads, theirs.head_dim, theirs.tied)
    assert param_count(ours) == param_count(theirs)


def test_each_causal_model_of_transformers_is_read_or_refused_in_one_line(written):
    """The default config of each, by the three readers: of the object, of the file, and the planner's of the file."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KINDS

    def read(reader, source):
        try:
            return reader(source)
        except ValueError as error:
            assert "\n" not in str(error) and len(str(error)) < 400, (kind, error)
            return None

    found, tried = {reader: set() for reader in (hf_config, read_hf_config, sizes_of)}, 0
    for kind in KINDS:
        try:
            theirs = CONFIG_MAPPING[kind]()
        except Exception:  # its defaults contradict each other
            continue
        text, tried = theirs.to_json_string(use_diff=False), tried + 1
        for reader, source in ((hf_config, theirs), (read_hf_config, written(text)), (sizes_of, json.loads(text))):
            found[reader] |= {kind} if read(reader, source) else set()
    assert tried > 100 and found[hf_config] == {"llama", "qwen2", "qwen3"}
    assert found[read_hf_config] == found[hf_config] | {"mixtral"}  # Qwen3-MoE does not norm its gates by default
    assert found[sizes_of] >= found[hf_config] | {"mistral", "mixtral", "qwen3_moe"}  # windows do not change a matrix
