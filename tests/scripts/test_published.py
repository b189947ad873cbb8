"""What is published: blank notebooks for Colab and Binder, the repository's address, the version."""

import json
import os
import re
import subprocess
import sys
import tomllib

import pytest

import address
import blank_branch
from exercises import BLANK
from tiny_course import ROOT

COLAB = """import sys, types
sys.modules["google.colab"] = types.ModuleType("google.colab")
"""
TOLD = """
import json, os
print(json.dumps([os.getcwd(), sys.path[0]]))
"""


def test_notebooks_are_blank_and_say_first_how_to_begin(tmp_path, capsys):
    assert blank_branch.main(tmp_path / "workbook") == 0
    names = sorted(path.name for path in (tmp_path / "workbook").glob("*.ipynb"))
    assert names == sorted(path.name for path in blank_branch.NOTEBOOKS.glob("*.ipynb"))
    for name in names:
        text = (tmp_path / "workbook" / name).read_text(encoding="utf-8")
        assert BLANK in text and "### BEGIN SOLUTION" not in text
        cells = json.loads(text)["cells"]
        assert [cell["id"] for cell in cells[:4]] == ["title", "elsewhere-text", "elsewhere", "setup"], name
        assert address.address() in "".join(cells[2]["source"])
    assert blank_branch.main(tmp_path / "workbook") == 2
    assert "is there already" in capsys.readouterr().err


def test_the_first_cell_fetches_and_installs_the_course_in_colab_alone(tmp_path):
    """In IPython. git fetches from a repository of this machine, and pip is a module that writes down its arguments."""
    repository, folder = tmp_path / "repository", tmp_path / "content"
    git = ["git", "-C", str(repository), "-c", "user.name=me", "-c", "user.email=me@example.org"]
    (repository / "workbook").mkdir(parents=True)
    (repository / "workbook/01.ipynb").write_text("{}")
    subprocess.run(["git", "init", "-q", "-b", blank_branch.BRANCH, str(repository)], check=True)
    for words in (["add", "-A"], ["commit", "-q", "-m", "blank"]):
        subprocess.run([*git, *words], check=True)
    (tmp_path / "fakes/pip").mkdir(parents=True)
    writes = f"import sys; print(*sys.argv[1:], file=open({str(tmp_path / 'calls')!r}, 'a'))"
    (tmp_path / "fakes/pip/__init__.py").touch()
    (tmp_path / "fakes/pip/__main__.py").write_text(writes)
    blank = {"cells": [{"id": "title"}, {"id": "setup"}]}
    _, _, cell, _ = blank_branch.for_elsewhere(blank, repository.as_uri(), str(folder))["cells"]

    def run(before: str) -> list[str]:
        script = tmp_path / "cell.ipy"
        script.write_text(before + cell["source"] + TOLD)
        environment = {**os.environ, "PYTHONPATH": str(tmp_path / "fakes"), "IPYTHONDIR": str(tmp_path)}
        done = subprocess.run(
            [sys.executable, "-m", "IPython", str(script)],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert not done.stderr, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    assert run("")[0] == str(tmp_path) and not folder.exists() and not (tmp_path / "calls").exists()
    for _ in range(2):  # again after a restart
        assert run(COLAB) == [str(folder / "workbook"), str(folder)]
    assert (folder / "workbook/01.ipynb").exists()
    assert (tmp_path / "calls").read_text().splitlines()[0] == f"install -q -e {folder} {blank_branch.PACKAGES}"


@pytest.mark.parametrize(
    "path", ["README.md", "CITATION.cff", "SECURITY.md", "CODE_OF_CONDUCT.md", ".github/ISSUE_TEMPLATE/config.yml"]
)
def test_a_file_has_the_address_of_pyproject(path):
    text = (ROOT / path).read_text(encoding="utf-8")
    assert address.address() in text and ("/OWNER/" in address.address() or "/OWNER/" not in text)


def test_address_replaces_it_everywhere_and_refuses_what_is_none(tmp_path, monkeypatch, capsys):
    (tmp_path / "pyproject.toml").write_text('[project.urls]\nRepository = "https://github.com/one/course"\n')
    (tmp_path / "page.md").write_text("https://one.github.io/course/ and git clone https://github.com/one/course.git\n")
    (tmp_path / "other.md").write_text("https://github.com/one/other and alone/course\n")
    for words in (["init", "-q"], ["add", "-A"]):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    monkeypatch.setattr(address, "ROOT", tmp_path)
    assert address.main(["no address"]) == 2 and "usage" in capsys.readouterr().err
    assert address.main(["https://github.com/the-second/my.course"]) == 0
    assert capsys.readouterr().out.split() == ["page.md", "pyproject.toml"]
    text = "https://the-second.github.io/my.course/ and git clone https://github.com/the-second/my.course.git\n"
    assert (tmp_path / "page.md").read_text() == text
    assert address.address() == "https://github.com/the-second/my.course"
    assert (tmp_path / "other.md").read_text() == "https://github.com/one/other and alone/course\n"
    assert address.main(["https://github.com/third/course.git/"]) == 0
    assert address.address() == "https://github.com/third/course"


def test_the_newest_version_of_the_changelog_is_that_of_the_package_and_of_the_citation():
    version, date = re.search(r"^## ([\d.]+) \((.+)\)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE).groups()
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == version
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"version: {version}\ndate-released: {date}\n" in citation
