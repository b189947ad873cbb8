"""Record docs/notebook_01.gif, the README's picture of the course, from JupyterLab: python scripts/record_gif.py

A slider moves and its figure follows; an exercise is blank, then wrong, then solved, and its check says so each time.
Needs Chromium and its driver. About two minutes.
"""

import contextlib
import io
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image
from selenium.common.exceptions import JavascriptException
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from exercises import solution
from export import NOTEBOOKS, ROOT

sys.path.append(str(ROOT / "tests/scripts"))
from headless import PATIENCE_S, browser, held_port, lab, no_process_stays

GIF = ROOT / "docs/notebook_01.gif"
SLIDER, EXERCISE = "calculator-first", "01.2"
WRONG = "first * cos - second * sin", "first * cos + second * sin"
WINDOW, WIDTH, COLORS = (1060, 790), 880, 96  # the window's size; width and colors of the GIF
COMMANDS = """
const [kind, id, source] = arguments, done = arguments[arguments.length - 1], app = window.jupyterapp;
const notebook = app.shell.currentWidget.content;
const index = notebook.widgets.findIndex(cell => cell.model.id === id);
if (kind === "write") { notebook.widgets[index].model.sharedModel.setSource(source); done(); }
notebook.activeCellIndex = index;
notebook.widgets[index].node.scrollIntoView({block: source || "start"});
if (kind === "run") app.commands.execute("notebook:run-cell").then(() => done()); else if (kind === "show") done();
"""


class Recorder:
    """Takes pictures of a browser's window, each with the time that it is shown."""

    def __init__(self, driver):
        self.driver, self.frames, self.ms = driver, [], []

    def frame(self, seconds: float) -> None:
        picture = Image.open(io.BytesIO(self.driver.get_screenshot_as_png())).convert("RGB")
        picture = picture.resize((WIDTH, WIDTH * picture.height // picture.width), Image.Resampling.LANCZOS)
        self.frames.append(picture)
        self.ms.append(int(seconds * 1000))

    def save(self, path: Path) -> None:
        """Write a GIF, with one palette for all frames so that what does not change is not written again."""
        strip = Image.new("RGB", (WIDTH, sum(frame.height for frame in self.frames)))
        for number, frame in enumerate(self.frames):
            strip.paste(frame, (0, number * frame.height))
        palette = strip.quantize(COLORS, dither=Image.Dither.NONE)
        first, *others = (frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in self.frames)
        first.save(path, save_all=True, append_images=others, duration=self.ms, loop=0, optimize=False)


def play(driver, url: str, token: str) -> Recorder:
    """Open notebook 01 and do what a learner does; return the recorded frames."""
    wait, recorder = WebDriverWait(driver, PATIENCE_S, poll_frequency=0.2), Recorder(driver)

    def do(kind: str, cell: str, source: str = "") -> None:
        driver.execute_async_script(COMMANDS, kind, cell, source)

    def output(cell: str) -> str:
        do("show", cell, "center")
        return driver.find_element(By.CSS_SELECTOR, ".jp-Cell.jp-mod-active .jp-Cell-outputArea").text

    driver.set_window_size(*WINDOW)
    driver.set_script_timeout(PATIENCE_S)
    driver.get(f"{url}lab/tree/01_single_gpu.ipynb?token={token}")
    wait.until(lambda _: "| Idle" in driver.find_element(By.ID, "jp-main-statusbar").text)
    driver.execute_script("const {shell} = window.jupyterapp; shell.collapseLeft(); shell.collapseRight();")
    time.sleep(1)
    recorder.frame(2.0)
    for cell in ("setup", "problem-figure", SLIDER):
        do("run", cell)
    wait.until(lambda _: driver.find_elements(By.CSS_SELECTOR, "img.widget-image"))
    do("show", SLIDER)
    time.sleep(2)
    recorder.frame(1.2)
    sliders = driver.find_elements(By.CSS_SELECTOR, ".widget-slider")
    handle = next(each for each in sliders if each.text.startswith("batch")).find_element(
        By.CSS_SELECTOR, ".noUi-handle"
    )
    for _ in range(5):
        handle.send_keys(Keys.ARROW_RIGHT)
        time.sleep(1.5)
        recorder.frame(0.5)
    check, cell = (f"{kind}-{EXERCISE.replace('.', '-')}" for kind in ("check", "ex"))
    right = solution(EXERCISE, NOTEBOOKS)
    assert right.count(WRONG[0]) == 1, f"the wrong answer no longer fits the solution of {EXERCISE}"
    for answer, seconds in ((None, 2.5), (right.replace(*WRONG), 3.0), (right, 3.5)):
        if answer is not None:
            do("write", cell, answer)
        do("run", cell)
        do("show", cell)
        recorder.frame(1.2)
        with contextlib.suppress(JavascriptException):  # a check that fails
            do("run", check)
        wait.until(lambda _: output(check))
        do("show", cell)
        time.sleep(1)
        recorder.frame(seconds)
    return recorder


def main() -> None:
    """Record the GIF."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        port = stack.enter_context(held_port())
        stack.enter_context(no_process_stays(folder))
        server = lab(folder, port, "--LabApp.expose_app_in_browser=True")
        url, token = stack.enter_context(server)
        play(stack.enter_context(browser(folder)), url, token).save(GIF)


if __name__ == "__main__":
    main()
