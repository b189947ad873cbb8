"""A bar over the outputs of a cell that takes long. Its first comment says what it does, and for how long on two cores:

    # Measured: tokens/s of four recipes, about 12 s

The bar is an output of its own, drawn anew each second and emptied when the cell ends. `course_kit` shows such bars in
every notebook that imports any of it.
"""

import re
import threading
import time
import uuid

from IPython.display import display
from tqdm import tqdm

LONG_CELL = re.compile(r"(?:#\|.*\n)*# (.+), about (\d+) s\b")
TICK_S = 1.0


class Bar:
    """The bar of one cell, which a thread draws."""

    def __init__(self, doing: str, expected_s: int):
        self.doing, self.expected_s, self.began = doing, expected_s, time.monotonic()
        self.name = uuid.uuid4().hex
        self.ended = threading.Event()
        self.show(update=False)
        self.thread = threading.Thread(target=self.keep_up, daemon=True)
        self.thread.start()

    def show(self, update: bool = True) -> None:
        """Draw it as far as the time is."""
        passed_s = time.monotonic() - self.began
        words = f"|{{bar}}| {passed_s:.0f} of about {self.expected_s} s on two cores"
        bar = tqdm.format_meter(min(passed_s, self.expected_s), self.expected_s, passed_s, ncols=80, bar_format=words)
        display({"text/plain": f"{self.doing}\n{bar}"}, raw=True, display_id=self.name, update=update)

    def keep_up(self) -> None:
        """Draw it each second until the cell has ended."""
        while not self.ended.wait(TICK_S):
            self.show()

    def take_away(self) -> None:
        """Leave an output without content, which shows nothing."""
        self.ended.set()
        self.thread.join()
        display({}, raw=True, display_id=self.name, update=True)


def show_bars(shell) -> None:
    """From the next cell on, each cell of this IPython shell that announces itself as long has a bar."""
    bars = []

    def start(info) -> None:
        if found := LONG_CELL.match(info.raw_cell or ""):
            bars.append(Bar(found[1], int(found[2])))

    def stop(_) -> None:
        while bars:
            bars[-1].take_away()
            bars.pop()  # not before: where an interrupt comes in between, the next cell's end takes it away

    shell.events.register("pre_run_cell", start)
    shell.events.register("post_run_cell", stop)
