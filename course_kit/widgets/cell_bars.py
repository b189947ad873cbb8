"""A progress bar above the outputs of a slow cell. The cell's first comment names its work and its time on two cores:

    # Measured: tokens/s of four recipes, about 12 s

The bar is a separate output, redrawn every second and emptied when the cell ends. `course_kit` shows such bars in every
notebook that imports it.
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
    """The progress bar of one cell, drawn by a thread."""

    def __init__(self, doing: str, expected_s: int):
        self.doing, self.expected_s, self.began = doing, expected_s, time.monotonic()
        self.name = uuid.uuid4().hex
        self.ended = threading.Event()
        self.show(update=False)
        self.thread = threading.Thread(target=self.keep_up, daemon=True)
        self.thread.start()

    def show(self, update: bool = True) -> None:
        """Draw the bar for the time that has passed."""
        passed_s = time.monotonic() - self.began
        template = f"|{{bar}}| {passed_s:.0f} of about {self.expected_s} s on two cores"
        bar = tqdm.format_meter(
            min(passed_s, self.expected_s), self.expected_s, passed_s, ncols=80, bar_format=template
        )
        display({"text/plain": f"{self.doing}\n{bar}"}, raw=True, display_id=self.name, update=update)

    def keep_up(self) -> None:
        """Draw the bar every second until the cell has ended."""
        while not self.ended.wait(TICK_S):
            self.show()

    def take_away(self) -> None:
        """Empty the output, so that it shows nothing."""
        self.ended.set()
        self.thread.join()
        display({}, raw=True, display_id=self.name, update=True)


def show_bars(shell) -> None:
    """Show a bar for each cell of this IPython shell that announces itself as slow, from the next cell on."""
    bars: list[Bar] = []

    def start(info) -> None:
        if match := LONG_CELL.match(info.raw_cell or ""):
            bars.append(Bar(match[1], int(match[2])))

    def stop(_) -> None:
        while bars:
            bars[-1].take_away()
            bars.pop()  # last: after an interrupt in between, the end of the next cell takes the bar away

    shell.events.register("pre_run_cell", start)
    shell.events.register("post_run_cell", stop)
