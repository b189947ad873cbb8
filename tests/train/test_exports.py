"""What the program refuses before a group exists, and how it ends on a full disk and with a damaged cache."""

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from course_lib.single_gpu.model import ModelConfig, Transformer
from course_lib.train import program
from course_lib.train.settings import SettingsError, read_settings
from course_lib.train.streams import read_manifest


def refused(words: list[str], capsys) -> str:
    with pytest.raises(SystemExit) as stop:
        program.options(words)
    assert stop.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    "words, line",
    [
        ("--checkpoints file", "checkpoints is file, and file is not a folder"),
        (
            "--checkpoints c --export folder",
            "export is folder, which exists already: name a new folder, remove it, or set no export",
        ),
        (
            "--checkpoints c --export link",
            "export is link, which exists already: name a new folder, remove it, or set no export",
        ),
        ("--checkpoints step-7", "checkpoints is step-7, which is one checkpoint: name the folder above it"),
        ("--checkpoints c --export file/x", "export is file, and file is not a folder"),
        (
            "--checkpoints c --export x --experts 4 --shared 1",
            "export: no mixture of transformers that the course knows has shared experts: make shared 0",
        ),
        (
            "--checkpoints c --export x --experts 4 --top-k 1",
            "no mixture of transformers that the course knows has top_k 1 without norms of q and k",
        ),
        ("--experts 2 --top-k 4", "top_k 4: it must be 1 to 2, the number of experts"),
        ("sources.toml", "[[data.sources]] 1 has no key weigth; did you mean weight?"),
        ("line.toml", "line.toml: [run] has no key a b; it is one of"),
    ],
)
def test_what_would_fail_at_the_end_is_refused_at_the_start(words, line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    (tmp_path / "step-7").mkdir()
    (tmp_path / "step-7" / "checkpoint.json").write_text("{}")
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "sources.toml").write_text("[[data.sources]]\ndataset = 'a'\nweigth = 1\n")
    (tmp_path / "line.toml").write_text('[run]\n"a\\nb" = 1\n')
    told = refused(words.split(), capsys)
    assert told.startswith(f"train: error: {line}") and told.count("\n") == 1
    assert not (tmp_path / "c").exists() and not (tmp_path / "x").exists()


def test_an_elastic_layout_is_checked_once_the_ranks_are_known():
    assert program.options(["--layout", "dp3,tp2,pp2", "--elastic"]).layout.elastic


def test_a_compiler_that_pytorch_lacks_is_told_in_one_line():
    from course_lib.train.transforms import compile_blocks

    config = ModelConfig(layers=1, hidden=8, heads=2, kv_heads=1, ffn_hidden=8, vocab=8)
    with pytest.raises(SettingsError, match="^backend is inductr; torch.compile has .*inductor"):
        compile_blocks(Transformer(config), "inductr")


def test_a_run_whose_last_checkpoint_is_not_written_fails_and_exports_nothing(tmp_path):
    """A limit on the size of files stands for a full disk."""

    def full_disk():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    (tmp_path / "a.txt").write_text("a small text, and another one. " * 20)
    words = "--preset small --layers 1 --hidden 32 --heads 2 --kv-heads 1 --ffn-hidden 32 --seq 16 --batch 2 --steps 1"
    words += " --dataset a.txt --cache cache --checkpoints ck --export out"
    command = [sys.executable, "-m", "course_lib.train", *words.split()]
    root = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        preexec_fn=full_disk,
        env=os.environ | {"PYTHONPATH": root},
    )
    assert done.returncode == 1, done.stderr
    assert "train: error: ended without a checkpoint of its last step" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("contents", ["", "[1]", '{"complete": true}', '{"complete'])
def test_a_damaged_manifest_says_what_to_delete(contents, tmp_path):
    (tmp_path / "manifest.json").write_text(contents)
    with pytest.raises(ValueError, match="manifest.json is damaged; delete its folder, and it is written again"):
        read_manifest(tmp_path)


def test_from_hf_brings_the_tokenizer_of_its_folder(tmp_path):
    settings = read_settings(["--from-hf", str(tmp_path)])
    program.use_model_tokenizer(settings)
    assert settings.tokenizer.tokenizer is None
    (tmp_path / "tokenizer.json").write_text("{}")
    program.use_model_tokenizer(settings)
    assert settings.tokenizer.tokenizer == str(tmp_path)
    settings = read_settings(["--from-hf", str(tmp_path), "--tokenizer", "other"])
    program.use_model_tokenizer(settings)
    assert settings.tokenizer.tokenizer == "other"
