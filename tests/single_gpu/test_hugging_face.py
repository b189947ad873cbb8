"""course_lib.single_gpu.hugging_face: which configs of transformers are read, and written again. CPU, no weights."""

import dataclasses
import itertools
import json
from types import SimpleNamespace

import pytest

from course_lib.single_gpu.hugging_face import hf_config, to_hf_config
from course_lib.single_gpu.model import PRESETS

SIZES = {"num_hidden_layers": 3, "hidden_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"intermediate_size": 160, "vocab_size": 131, "rms_norm_eps": 1e-6, "max_position_embeddings": 4096}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 512}
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 1e6},
    "llama3": LLAMA3 | {"factor": 8.0},
    "llama3 without a factor": LLAMA3 | {"factor": 1.0},
}
HEADS = {"as h": {}, "wider than h": {"head_dim": 32}, "narrower": {"head_dim": 8}}
UNEVEN = {"hidden_size": 98, "head_dim": 24}  # heads that do not divide h: Llama's config refuses them


def made(kind: str, **entries):
    """A config of transformers; imported here: it takes seconds."""
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[kind](**SIZES | ({"sliding_window": None} if kind == "mistral" else {}) | entries)


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_what_is_read_is_written_and_read_again(kind):
    ways = [
        (heads, {"tie_word_embeddings": tied, "rope_parameters": rope})
        for heads, tied, rope in itertools.product([*HEADS.values(), UNEVEN], (False, True), ROPES.values())
        if (kind, heads) != ("llama", UNEVEN)
    ]
    assert len(ways) == (18 if kind == "llama" else 24)
    for heads, more in ways:
        theirs = made(kind, **heads, **json.loads(json.dumps(more)))
        ours = hf_config(theirs)
        again = to_hf_config(ours)
        assert hf_config(again) == ours, (heads, more)
        assert ours.head_dim == heads.get("head_dim", getattr(theirs, "head_dim", 24)) == again.head_dim
        assert again.max_position_embeddings == ours.context == 4096
        width = (again.num_attention_heads, again.num_key_value_heads, again.hidden_size)
        assert width == (4, 2, heads.get("hidden_size", 96))
        assert ours.rope_factor == more["rope_parameters"].get("factor", 1.0)
        assert (ours.qkv_bias, ours.qk_norm) == (kind == "qwen2", kind == "qwen3")
        written = json.loads(again.to_json_string())
        assert hf_config(type(again).from_dict(json.loads(again.to_json_string()))) == ours  # as a file has it
        assert written["rope_theta"] == ours.rope_theta, "transformers 4 reads rope_theta and rope_scaling alone"
        scaling = {name: value for name, value in again.rope_parameters.items() if name != "rope_theta"}
        assert written["rope_scaling"] == (scaling if ours.rope_factor != 1 else None)


@pytest.mark.parametrize(
    "entries, length",
    [
        ({"context": 512}, 512),
        ({"context": 1024, "rope_factor": 8.0, "rope_trained": 512}, 1024),
        ({"context": 512, "rope_factor": 8.0, "rope_trained": 512}, 4096),  # transformers wants more than before
        ({"rope_factor": 8.0, "rope_trained": 512}, 4096),
    ],
)
def test_the_longest_sequence_is_written(entries, length):
    config = to_hf_config(dataclasses.replace(PRESETS["debug"], **entries))
    assert config.max_position_embeddings == length
    assert (config.bos_token_id, config.eos_token_id) == (None, None), "no text ends without a tokenizer"
    assert config.rope_parameters.get("original_max_position_embeddings", 0) < length, "transformers would warn"


@pytest.mark.parametrize(
    "kind, entries, message",
    [
        ("llama", {"rope_parameters": {"full_attention": ROPES["default"]}}, "differ by layer (full_attention)"),
        ("llama", {"rope_parameters": ROPES["default"] | {"rope_type": "yarn"}}, "rope_type is yarn, not default or"),
        ("llama", {"rope_parameters": {"type": "linear", "rope_theta": 1e6}}, "rope_type is linear, not default or"),
        ("llama", {"rope_parameters": ROPES["default"] | {"rope_theta": "1e6"}}, "rope_theta is '1e6': it must be a"),
        ("llama", {"rope_parameters": LLAMA3 | {"factor": None}}, "is llama3, and rope_parameters lack factor"),
        ("llama", {"rope_parameters": ROPES["llama3"] | {"low_freq_factor": 0.0}}, "low_freq_factor is 0.0, not 1.0"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, not 1.0"),
        ("llama", {"attention_bias": True, "hidden_act": "gelu"}, "_bias is True, not False, hidden_act is gelu"),
        ("mistral", {"sliding_window": 64}, "sliding_window is 64, not None"),
        ("gpt2", {"rope_parameters": None, "hidden_act": "gelu"}, "model_type is gpt2, not llama, mistral, qwen2"),
    ],
)  # fmt: skip
def test_what_our_model_lacks_is_named_in_one_line(kind, entries, message):
    """Configs are plain attributes here: transformers has its own opinion of some of these values."""
    plain = SIZES | {"model_type": kind, "tie_word_embeddings": False, "rope_parameters": ROPES["default"]} | entries
    with pytest.raises(ValueError) as refused:
        hf_config(SimpleNamespace(**plain))
    assert message in str(refused.value) and "\n" not in str(refused.value)
