"""What is installed: pyproject.toml, constraints.txt, environment.yml, setup.sh and ci.yml agree. Only reads files."""

import json
import re
import sys
import tomllib
from importlib.metadata import distribution
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CONDA = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
PYTHONS = ["3.11", "3.12", "3.13"]
PINS = {
    canonicalize_name(pin.name): pin
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    if line.strip() and not line.startswith("#")
    for pin in [Requirement(line)]
}


def declared() -> list[Requirement]:
    """What pyproject.toml asks for, extras included; the project itself, which the extras name, left out."""
    lists = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    return [need for line in lists for text in line if (need := Requirement(text)).name != PROJECT["name"]]


def all_needed() -> set[str]:
    """The names of all that is declared and, in turn, of what that asks for, by what this environment holds."""
    needed, todo = set(), [(need.name, frozenset(need.extras)) for need in declared()]
    seen = set(todo)
    while todo:
        name, extras = todo.pop()
        needed.add(canonicalize_name(name))
        for text in distribution(name).requires or []:
            need = Requirement(text)
            wanted = not need.marker or any(need.marker.evaluate({"extra": extra}) for extra in ("", *extras))
            if wanted and (item := (need.name, frozenset(need.extras))) not in seen:
                seen.add(item)
                todo.append(item)
    return needed


def test_conda_installs_this_project_with_its_constraints_and_nothing_else():
    assert CONDA["name"] == PROJECT["name"]
    *plain, last = CONDA["dependencies"]
    python, pip = plain
    assert SpecifierSet(python.removeprefix("python")) == SpecifierSet(PROJECT["requires-python"]) and pip == "pip"
    assert last == {"pip": ["-c constraints.txt", "-e .[test]"]}


def workflow(name: str) -> dict:
    """A workflow of GitHub Actions."""
    return yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text(encoding="utf-8"))


def test_the_same_pythons_everywhere():
    spoken = SpecifierSet(PROJECT["requires-python"])
    assert [python for python in (f"3.{minor}" for minor in range(8, 20)) if f"{python}.5" in spoken] == PYTHONS
    assert " | ".join(PYTHONS) + ")" in (ROOT / "scripts/setup.sh").read_text(encoding="utf-8")
    ci, nightly, parts = (workflow(name) for name in ("ci", "nightly", "parts"))
    once, everywhere = (json.loads(each["jobs"]["test"]["with"]["pythons"]) for each in (ci, nightly))
    quick = ci["jobs"]["quick"]["strategy"]["matrix"]["include"]
    assert everywhere == PYTHONS and len(once) == 1
    assert {*once, *(job["python"] for job in quick if "ubuntu" in job["os"])} == set(PYTHONS)
    assert [job["os"] for job in quick].count("macos-latest") == 1
    own_steps = [job for each in (ci, nightly, parts) for job in each["jobs"].values() if "steps" in job]
    assert {job["env"]["PYTHON"] for job in own_steps} == {"python"}, ".ci/run would take the system's"


@pytest.mark.parametrize("name", ["ci", "nightly", "parts", "site"])
def test_a_workflow_may_only_read_and_a_newer_push_cancels_an_older_run(name):
    permissions = workflow(name)["permissions"]
    assert permissions["contents"] == "read" and (name == "site" or len(permissions) == 1)
    if name == "ci":
        assert workflow(name)["concurrency"]["cancel-in-progress"] is True


@pytest.mark.parametrize("need", declared(), ids=str)
def test_every_dependency_is_pinned_within_its_range(need):
    pin = PINS[canonicalize_name(need.name)]
    (specifier,) = pin.specifier
    assert specifier.operator == "==" and need.specifier.contains(specifier.version, prereleases=True)
    assert str(pin.marker) == str(need.marker)


@pytest.mark.skipif(sys.platform != "linux", reason="the pins are those of CI, which is Linux")
def test_everything_that_they_ask_for_is_pinned():
    # PyTorch pins NVIDIA's libraries itself, and differently for every GPU generation.
    open_ones = {name for name in all_needed() - set(PINS) if not name.startswith(("nvidia-", "cuda-"))}
    assert not open_ones


def test_every_pin_takes_the_first_release_of_every_python():
    for name in all_needed() & set(PINS):
        takes = SpecifierSet(distribution(name).metadata["Requires-Python"] or "")
        assert all(f"{python}.0" in takes for python in PYTHONS if not PINS[name].marker), f"{name} wants {takes}"


def test_pins_name_no_machine():
    for pin in PINS.values():
        assert pin.url is None and re.fullmatch(r"==[\w.]+", str(pin.specifier)), pin
    assert str(PINS["torch"]) == "torch==2.13.0"
