"""Runs of kernels that are written thread by thread, for the checks of 12.3 and 12.5."""

from __future__ import annotations

from collections.abc import Callable

from course_kit.checks import reference
from course_lib.kernels.thread_blocks import BlockTraffic, run_blocks


def run_threads(kernel: Callable, grid: tuple[int, ...], threads: tuple[int, ...], *args) -> BlockTraffic:
    """Run `run_blocks`, with the library's own count of sectors. An index or a race that `Block` refuses fails the
    check.
    """
    try:
        with reference("12.2"):
            return run_blocks(kernel, grid, threads, *args)
    except NotImplementedError:
        raise
    except (IndexError, RuntimeError) as error:
        raise AssertionError(f"{kernel.__name__}: {error}") from None
