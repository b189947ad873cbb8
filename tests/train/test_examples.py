"""The runs in examples/: their settings fit their models and layouts, and the commands in their comments are right.
Nothing is trained or downloaded. CPU.
"""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from course_lib.train.auto_layout import choose_layout
from course_lib.train.model import check_run, named_layout, named_model
from course_lib.train.settings import read_settings
from course_lib.train.sources import sources_of

ROOT = Path(__file__).resolve().parents[2]
RUNS = [("lesson.toml", 1, 256), ("lesson.toml", 2, 256), ("node.toml", 8, 128_256), ("two_nodes.toml", 16, 128_256)]
H100 = "NVIDIA H100 80GB HBM3"


def command_of(file: Path) -> list[str]:
    """The words of the launcher's line in the comment at the top of a file."""
    return shlex.split(re.search(r"^#     (python scripts/.*)$", file.read_text(), re.MULTILINE)[1])


def test_each_file_of_settings_is_tested():
    assert {file.name for file in (ROOT / "examples").glob("*.toml")} == {name for name, _, _ in RUNS}


@pytest.mark.parametrize("name, ranks, vocab", RUNS)
def test_the_settings_fit_the_model_and_the_ranks(name, ranks, vocab):
    settings = read_settings([str(ROOT / "examples" / name)])
    model = named_model(settings).with_vocab(vocab)
    assert model.config.vocab == named_model(settings).config.vocab, "the preset has the vocabulary of the tokenizer"
    layout = named_layout(settings, ranks)
    if layout is None:
        layout, _ = choose_layout(settings, model.config, model.moe, ranks, min(ranks, 8), H100)
    assert layout.ranks == ranks
    check_run(settings, model, layout, ranks)
    assert sources_of(settings.data)
    written = [settings.checkpoints.checkpoints, settings.checkpoints.export, settings.logging.out]
    assert all(path.startswith(f"runs/{Path(name).stem}/") for path in [*written, settings.logging.summary])


@pytest.mark.parametrize("name", sorted({name for name, _, _ in RUNS}))
def test_the_command_in_the_comment_starts_this_file(name):
    python, *words = command_of(ROOT / "examples" / name)
    assert python == "python" and words[-2:] == ["--", f"examples/{name}"]
    words[-2:-2] = ["--dry-run"]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.rstrip().endswith(f" examples/{name}")
    ranks = {ranks for run, ranks, _ in RUNS if run == name}
    if "--slurm" in words:
        nodes, gpus = (
            int(re.search(rf"#SBATCH --{key}=(\d+)\n", done.stdout)[1]) for key in ("nodes", "gpus-per-node")
        )
        assert nodes * gpus in ranks and "#SBATCH --requeue\n" in done.stdout
    else:
        assert int(re.search(r"--nproc-per-node (\d+)", done.stdout)[1]) in ranks
