"""Who imports whom: `[tool.importlinter]` in pyproject.toml holds the floors of the house. Needs no GPU."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def lint(monkeypatch):
    """The exit status of import-linter in a folder."""
    cli = pytest.importorskip("importlinter.cli")

    def run(folder: Path) -> int:
        monkeypatch.chdir(folder)
        monkeypatch.syspath_prepend(str(folder))
        return cli.lint_imports(no_cache=True)

    return run


def test_the_library_imports_no_instrument(lint):
    assert lint(ROOT) == 0


def test_an_import_of_an_instrument_is_found(lint, tmp_path, capsys):
    """The same contract on a house whose library imports an instrument, inside a function too."""
    for name in ("a_lib", "a_kit"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    (tmp_path / "a_lib" / "zero.py").write_text("def step():\n    from a_kit import ranks\n    return ranks\n")
    (tmp_path / "a_kit" / "ranks.py").touch()
    contract = (ROOT / "pyproject.toml").read_text().partition("[tool.importlinter]")[2]
    contract = contract.replace("course_lib", "a_lib").replace("course_kit", "a_kit")
    (tmp_path / "pyproject.toml").write_text("[tool.importlinter]" + contract)
    assert lint(tmp_path) == 1 and "a_lib.zero -> a_kit.ranks" in capsys.readouterr().out
