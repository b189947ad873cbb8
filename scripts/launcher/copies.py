"""Modules of a learner's library that may replace the course's: ranks check each file before they import it.

The first line of a copy of a module, with a learner's answers in it, identifies the text it was made from; the copy
replaces only that text. A module that an older course exported in full (its blocks have headings) replaces none, so
files that a launch of an older course left behind are ignored.
"""

import hashlib
import re
from pathlib import Path

HEADER = re.compile(r"# A copy of \S+ \((?P<digest>[0-9a-f]{12})\), with answers of yours; a launch writes it\.")
HEADING = re.compile(r"^# %% \S+\.ipynb #\S+$", re.MULTILINE)


def digest(text: str) -> str:
    """Return a short hash of a module's text."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]


def headed(text: str, name: str, original: str) -> str:
    """Return a copy of the module `name`, with a first line that identifies its source."""
    file = f"course_lib/{name.replace('.', '/')}.py"
    return f"# A copy of {file} ({digest(original)}), with answers of yours; a launch writes it.\n{text}"


def is_copy(text: str) -> bool:
    """Return whether a module's text is a copy."""
    return HEADER.match(text) is not None


def fits(overlay: Path, reference: Path) -> bool:
    """Return whether the learner's file may replace the reference's. A file that the reference lacks may."""
    if not reference.is_file():
        return True
    text, original = overlay.read_text(encoding="utf-8"), reference.read_text(encoding="utf-8")
    if header := HEADER.match(text):
        return header["digest"] == digest(original)
    return not HEADING.search(text)
