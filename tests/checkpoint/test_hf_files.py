"""course_lib.checkpoint.hf_files: what a folder of transformers lacks is one line, before a rank starts. CPU."""

import json
import sys

import pytest

from course_lib.checkpoint.hf_files import from_hf_config, read_hf_config
from course_lib.single_gpu.hugging_face import to_hf_config
from course_lib.single_gpu.model import PRESETS
from course_lib.train.program import options

INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path):
    """A config.json of Llama's kind, without weights."""
    to_hf_config(PRESETS["debug"]).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "files, message",
    [
        ({}, "has no model.safetensors"),
        ({"pytorch_model.bin": ""}, "only pytorch_model.bin: load the model with transformers, and write it with save"),
        ({"pytorch_model-00001-of-00002.bin": "", "pytorch_model.bin.index.json": "{}"}, "only pytorch_model-00001-of"),
        ({"model-q4.gguf": ""}, "only model-q4.gguf: load"),
        ({INDEX: json.dumps({"weight_map": {"a": "one", "b": "two"}}), "one": ""}, f"lacks two, which {INDEX} names"),
        ({INDEX: "{}"}, "no weight_map"),
        ({"model.safetensors": "version https://git-lfs.github.com/spec/v1"}, "is a pointer of Git LFS"),
        ({INDEX: "[1]"}, "is not a JSON object"),
        ({"config.json": "{"}, "config.json is not valid JSON"),
        ({"config.json": json.dumps({"model_type": "gpt2"})}, "config.json: model_type is gpt2, not llama, mistral"),
        ({"config.json": json.dumps({"model_type": "new"})}, "config.json: model_type is new, not llama, mistral"),
        ({"config.json": json.dumps({"model_type": "llama", "hidden_size": "64"})}, "hidden_size is '64': it must be"),
        ({"config.json": json.dumps({"model_type": "llama", "num_attention_heads": 0})}, "heads is 0: it must be"),
        ({"config.json": json.dumps({"model_type": "qwen3_moe", "num_experts": -1})}, "num_experts is -1: it must be"),
        ({"config.json": json.dumps({"model_type": "llama", "rope_scaling": {"type": "llama3"}})}, "factor"),
    ],
)  # fmt: skip
def test_what_is_missing_is_one_line(folder, files, message, capsys):
    for name, text in files.items():
        (folder / name).write_text(text)
    with pytest.raises(ValueError) as refused:
        from_hf_config(folder)
    line = str(refused.value)
    assert message in line and "\n" not in line and str(folder) in line, line
    with pytest.raises(SystemExit) as ended:
        options(["--from-hf", str(folder)])
    assert ended.value.code == 2 and capsys.readouterr().err.splitlines()[-1].endswith(line)


@pytest.mark.parametrize("option", ["--from-hf", "--hf-config"])
def test_without_transformers_the_program_says_what_to_install(folder, option, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "transformers", None)  # as if it were not installed
    with pytest.raises(SystemExit) as ended:
        options([option, str(folder)])
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith(f"; {option[2:].replace('-', '_')} needs pip install -e '.[hf]'\n")


def test_sizes_are_read_from_a_file_of_any_name(folder):
    (folder / "config.json").rename(folder / "my llama.json")
    assert read_hf_config(folder / "my llama.json") == (PRESETS["debug"], None)
    with pytest.raises(ValueError, match="config.json: No such file"):
        read_hf_config(folder)
    with pytest.raises(ValueError, match="is not a model of transformers: it has no config.json$"):
        from_hf_config(folder)
    with pytest.raises(ValueError, match="it has no config.json; download the model to a folder first"):
        from_hf_config("Qwen/Qwen3-0.6B")
