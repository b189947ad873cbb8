"""`make lab` and `make test` where something is missing: one line of advice, nothing half-made stays. No network."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DEBIAN = """The virtual environment was not created successfully because ensurepip is not
available.  On Debian/Ubuntu systems, you need to install the python3-venv package."""


@pytest.fixture
def course(tmp_path):
    """A copy of what the set-up reads, in a path with a space."""
    folder = tmp_path / "my course"
    (folder / "scripts").mkdir(parents=True)
    (folder / "course_lib").mkdir()
    (folder / "README.md").write_text("")
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "scripts/setup.sh"):
        shutil.copy(ROOT / name, folder / name)
    return folder


def program(path: Path, text: str) -> None:
    """A shell script at `path` that can be called."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def make(course: Path, *words: str, **environment: str) -> subprocess.CompletedProcess:
    """Run make in the copy, with `fakes` first on the PATH and no package index but a closed port of this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        closed = f"http://127.0.0.1:{free.getsockname()[1]}/simple"
    keep = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PIP_", "MAKE", "MFLAGS")) and name not in ("PYTHON", "CPU", "TORCH")
    }
    pip = {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": closed, "PIP_RETRIES": "0", "PIP_NO_CACHE_DIR": "1"}
    path = f"{course / 'fakes'}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["make", *words],
        cwd=course,
        env={**keep, **pip, "PATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def advice(run: subprocess.CompletedProcess) -> str:
    """The one line on stderr; make's own last line aside."""
    assert run.returncode != 0
    lines = run.stderr.splitlines()
    assert len(lines) == 2 and lines[1].startswith("make: ***"), run.stderr
    return lines[0]


@pytest.mark.parametrize("version", ["3.9", "3.10", "3.14", "2.7"])
def test_python_too_old_or_too_new(course, version):
    program(course / "fakes/python3", f"echo {version}")
    assert advice(make(course, "lab")) == (
        f"setup: python3 is Python {version}, the course needs 3.11, 3.12 or 3.13: "
        "install one and name it: make lab PYTHON=python3.12"
    )
    assert not (course / ".venv").exists()


def test_python_that_is_not_there(course):
    line = advice(make(course, "lab", "PYTHON=python3.99"))
    assert line.startswith("setup: python3.99 does not run: install Python 3.11, 3.12 or 3.13")


def test_debian_without_venv(course):
    program(
        course / "fakes/python3",
        f"""case "$2" in
        venv) mkdir -p .venv/bin; echo '{DEBIAN}'; exit 1;;
        *ensurepip) exit 1;;
        *) echo 3.11;;
    esac""",
    )
    assert "run 'sudo apt install python3-venv'" in advice(make(course, "test"))
    assert not (course / ".venv").exists()


@pytest.mark.parametrize("at", ["venv", "uv", "pip"])
def test_a_full_disk(course, at):
    """The error is one line, no other installer runs, and no files remain."""
    full = "echo 'OSError: [Errno 28] No space left on device'; exit 1"
    environment = """mkdir -p .venv/bin llm_training_at_scale.egg-info; cp "$0" .venv/bin/python;;"""
    program(
        course / "fakes/python3",
        f"""echo "$@" >> calls
        case "$2 $3" in
        "venv "*) {full if at == "venv" else environment}
        esac
        case "$2 $*" in
        import*) echo 3.12;;
        uv*) {full if at == "uv" else "exit 1"};;
        pip*-e*) {full};;
        esac""",
    )
    assert advice(make(course, "lab")).startswith(
        "setup: the disk is full: the environment and the downloads in ~/.cache"
    )
    assert not (course / ".venv").exists() and not (course / "llm_training_at_scale.egg-info").exists()
    tried = [line.split()[1] for line in (course / "calls").read_text().splitlines() if "-e" in line.split()]
    assert tried == {"venv": [], "uv": ["uv"], "pip": ["uv", "pip"]}[at]


def test_progress_is_shown_while_it_installs(course):
    """Each line when it comes: the installer here goes on when the first one has been read."""
    text = """case "$2" in
        import*) echo 3.12;;
        uv) echo 'Downloading torch (1.0GiB)'; while [ ! -e read ]; do sleep 0.1; done; echo Prepared 1 package;;
        esac"""
    program(course / ".venv/bin/python", text)
    words = ["make", "lab"]
    with subprocess.Popen(words, cwd=course, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as run:
        lines = iter(run.stdout.readline, "")
        assert "Downloading torch (1.0GiB)\n" in lines
        (course / "read").touch()
        assert "Prepared 1 package\n" in lines
        run.wait(timeout=60)


def test_no_network(course):
    line = advice(make(course, "lab", PYTHON=sys.executable))
    assert line.startswith("setup: pip cannot reach its package index: check the network")
    assert not (course / ".venv").exists()


def test_no_network_leaves_an_environment_that_stood_before(course):
    program(course / ".venv/bin/python", f'exec "{sys.executable}" "$@"')
    assert "pip cannot reach its package index" in advice(make(course, "test"))
    assert os.listdir(course / ".venv") == ["bin"]


def test_installs_once_and_again_when_the_list_changes(course):
    program(course / ".venv/bin/python", 'case "$2" in import*) echo 3.12;; esac; echo "$@" >> calls')

    def installs(*words):
        (course / "calls").write_text("")
        assert make(course, *words).returncode == 0
        return [line for line in (course / "calls").read_text().splitlines() if " install" in line]

    tool = "-m pip install -q --timeout 5 --only-binary :all: -c constraints.txt uv"
    by_uv = "-m uv pip install --python .venv/bin/python -c constraints.txt -e "
    assert installs("lab") == [tool, f"{by_uv}.[lab]"]
    assert installs("lab") == []
    assert installs("test") == [tool, f"{by_uv}.[test]"]
    assert installs("test") == installs("lab") == []
    os.utime(course / "constraints.txt", (4e9, 4e9))
    assert installs("lab", "CPU=1") == [tool, f"{by_uv}.[lab]"]


@pytest.mark.parametrize("missing", ["*uv", "-m?uv*"], ids=["no uv", "uv fails"])
def test_pip_installs_where_uv_does_not(course, missing):
    text = f'case "$*" in {missing}) exit 1;; -c*) echo 3.12;; esac; echo "$@" >> calls'
    program(course / ".venv/bin/python", text)
    make(course, "lab")
    make(course, "test", "CPU=1")
    lines = (course / "calls").read_text().splitlines()
    assert [line for line in lines if " -e " in line] == [
        "-m pip install -c constraints.txt -e .[lab]",
        "-m pip install -c constraints.txt -e .[test] --extra-index-url https://download.pytorch.org/whl/cpu",
    ]


def test_uv_takes_packages_from_where_pip_is_told_to(course):
    """PIP_INDEX_URL, which `make` sets, is of this machine and closed."""
    uv = 'echo "$UV_DEFAULT_INDEX|$UV_INDEX|$UV_FIND_LINKS|$HTTPS_PROXY|$*" > places'
    program(
        course / ".venv/bin/python",
        f"""case "$*" in
        -c*) echo 3.12;;
        *list) exec {sys.executable} "$@";;
        "-m uv"*) {uv};;
        esac""",
    )
    settings = course / "pip.conf"
    settings.write_text("""
[install]
proxy = http://127.0.0.1:9
[global]
proxy = http://no.example
constraint = ours.txt
extra-index-url =
  https://a.example/simple
  https://b.example
find-links = /wheels
""")
    make(course, "lab", "CPU=1", PIP_CONFIG_FILE=str(settings), PIP_FIND_LINKS="/mine /more")
    index, more, links, proxy, words = (course / "places").read_text().strip().split("|")
    assert proxy == "http://127.0.0.1:9" and words.endswith("-c constraints.txt -e .[lab] -c ours.txt")
    assert index.startswith("http://127.0.0.1:") and links == "/mine,/more"
    assert more.split() == ["https://a.example/simple", "https://b.example", "https://download.pytorch.org/whl/cpu"]


def test_another_torch_than_the_pinned_one(course):
    """It brings its own Triton, and a NumPy that this one's interpreter knows; the other versions stay."""
    program(course / ".venv/bin/python", 'case "$2$7" in import*) echo 3.12;; uv-c) cp "$8" pins;; esac')
    make(course, "lab", "TORCH=2.11.0")
    pins, pinned = ((course / name).read_text().splitlines() for name in ("pins", "constraints.txt"))
    assert set(pins) - set(pinned) == {"torch==2.11.0", "triton==3.6.*", "numpy<2.4"}
    names = {line.split("==")[0] for line in set(pinned) - set(pins)}
    assert names == {"torch", "torchao", "triton", "numpy", "setuptools"}


def test_an_environment_of_another_clone_is_told_and_stays_that_clones(course, tmp_path):
    """A .venv that is a link to another clone's: nothing is installed, whether its set-up is due or was done."""
    other = tmp_path / "first clone"
    shutil.copytree(course, other)
    program(other / ".venv/bin/python", f'case "$2" in import*) echo 3.12;; esac; echo "$@" >> "{tmp_path}/calls"')
    site = other / ".venv/lib/python3.12/site-packages"
    site.mkdir(parents=True)
    (site / "__editable__.llm_training_at_scale-0.1.0.pth").write_text(f"{other}\n")
    (course / ".venv").symlink_to(other / ".venv")
    for words in ("lab", "test"):
        assert advice(make(course, words)) == (
            f"setup: .venv belongs to the clone in {other}, and this is {course}: 'rm -rf .venv' here (of a link, the "
            "link alone goes), and run it again"
        )
    assert not (tmp_path / "calls").exists()
    assert make(other, "lab").returncode == 0 and "install" in (tmp_path / "calls").read_text()
    assert (other / ".venv/installed-lab").exists() and "belongs to" in advice(make(course, "progress"))
    (course / ".venv").unlink()
    program(course / "fakes/python3", "echo 3.9")
    assert "python3 is Python 3.9" in advice(make(course, "lab")), "the set-up goes on to make an environment"


def test_an_environment_whose_python_is_gone_is_told(course):
    """The set-up was done, so make would not look at it again."""
    (course / ".venv" / "bin").mkdir(parents=True)
    (course / ".venv" / "bin" / "python").symlink_to(course / "python3.11 that was removed")
    (course / ".venv" / "installed-lab").touch()
    assert advice(make(course, "lab")) == (
        "setup: the Python of .venv is gone, or has another path now: 'rm -rf .venv', and run it again"
    )
