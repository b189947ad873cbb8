"""Tell all files where the course is published: make address REPOSITORY=https://github.com/you/course

The address is in pyproject.toml. README.md, CITATION.cff and others link to it; this replaces it in all of them.
"""

import re
import subprocess
import sys
import tomllib

from export import ROOT, write_atomically

PUBLISHED = re.compile(r"https://github\.com/([\w-]+)/([\w.-]+)")


def address() -> str:
    """Return the address of the course's repository."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Repository"]


def forms(repository: str) -> list[str]:
    """Return what links contain: the owner and the name, after a host or a word such as `gh`, and the site's host."""
    owner, name = PUBLISHED.fullmatch(repository).groups()
    return [f"/{owner}/{name}", f"//{owner}.github.io/{name}"]


def main(argv: list[str] | None = None) -> int:
    """Replace the address in the files that git knows. Returns 0, or 2 after printing why not."""
    argv = sys.argv[1:] if argv is None else argv
    new = "".join(argv).rstrip("/").removesuffix(".git")
    if not PUBLISHED.fullmatch(new):
        print("usage: make address REPOSITORY=https://github.com/you/course", file=sys.stderr)
        return 2
    replaced = dict(zip(forms(address()), forms(new), strict=True))
    words = [word for form in replaced for word in ("-e", form)]
    listing = subprocess.run(["git", "grep", "-lF", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    for name in listing.stdout.splitlines():
        text = (ROOT / name).read_text(encoding="utf-8")
        for before, after in replaced.items():
            text = text.replace(before, after)
        write_atomically(ROOT / name, text)
        print(name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
