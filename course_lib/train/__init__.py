"""One training program, from raw text to generated words, in any layout."""

from __future__ import annotations
