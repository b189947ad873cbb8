"""`make lab` in a browser: a learner comes to the welcome page, opens the blank notebook 01 from it, runs it, moves a
slider, and the picture changes. Nothing else asks for attention.

Needs Debian's chromium and chromium-driver, or Chrome and its driver; CI has them. No GPU, no network. About 30 s.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
from selenium.common.exceptions import TimeoutException, WebDriverException
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from headless import browser, needs_browser

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 300  # a deadline for what hangs: the whole test takes a tenth of it
DRAG_S = 10  # until the slider is dragged once more


def started(folder: Path) -> set[psutil.Process]:
    """The processes below this one, and those that left it but name `folder` in their command."""
    found = set(psutil.Process().children(recursive=True))
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if str(folder) in " ".join(process.cmdline()):
                found.add(process)
    return found


@contextlib.contextmanager
def no_process_stays(folder: Path):
    """End what was started inside: server, kernels, driver and browser, whether the test passed or not."""
    before = started(folder)
    try:
        yield
    finally:
        processes = started(folder) - before
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.terminate()
        _, alive = psutil.wait_procs(processes, timeout=5)
        for process in (started(folder) - before) | set(alive):
            with contextlib.suppress(psutil.Error):
                process.kill()


@contextlib.contextmanager
def lab(folder: Path, port: int):
    """`make lab` in a copy of the course whose set-up is done; yields the server's address and token."""
    course = folder / "course"
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        course.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, course)
    for name in ("scripts", "notebooks", "course_lib", "course_kit"):
        shutil.copytree(ROOT / name, course / name, ignore=shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints"))
    python = course / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    (course / ".venv/installed-lab").touch()
    jupyter = {name: str(folder / name.lower()) for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")}
    with open(folder / "server.log", "w") as log:
        make = subprocess.Popen(
            ["make", "lab", f"LAB_ARGS=--no-browser --port {port}"],
            cwd=course,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **jupyter},
        )
        deadline = time.monotonic() + PATIENCE_S
        while not (files := list(Path(jupyter["JUPYTER_RUNTIME_DIR"]).glob("jpserver-*.json"))):
            assert make.poll() is None and time.monotonic() < deadline, (folder / "server.log").read_text()
            time.sleep(0.2)
        server = json.loads(files[0].read_text())
        assert server["port"] == port and server["token"] and server["root_dir"] == str(course / "workbook")
        yield server["url"], server["token"]


def shown(driver, selector: str):
    """The first element of that kind that can be seen, or None."""
    return next(filter(lambda element: element.is_displayed(), driver.find_elements(By.CSS_SELECTOR, selector)), None)


def scrolled_to(driver, selector: str):
    """The first element of that kind in the notebook. JupyterLab takes out of the page what is scrolled away, so where
    there is none yet, this scrolls on, from the end to the top again, and returns None.
    """
    if element := shown(driver, selector):
        driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
        return element
    driver.execute_script("""
        const panel = document.querySelector(".jp-NotebookPanel .jp-WindowedPanel-outer");
        const end = panel.scrollTop + panel.clientHeight >= panel.scrollHeight - 1;
        panel.scrollTop = end ? 0 : panel.scrollTop + panel.clientHeight / 2;""")


def picture(driver) -> str:
    """The bytes of the calculator's picture, in base64."""
    return driver.execute_async_script("""
        const done = arguments[arguments.length - 1];
        fetch(document.querySelector("img.widget-image").src).then(answer => answer.blob()).then(blob => {
            const reader = new FileReader();
            reader.onload = () => done(reader.result);
            reader.readAsDataURL(blob);
        });""")


def moves_the_picture(driver, before: str) -> bool:
    """Whether the picture changes while the button is still down. While cells above print, the page may move, and the
    slider away from under the mouse.
    """
    sliders = driver.find_elements(By.CSS_SELECTOR, ".widget-slider")
    slider = next(slider for slider in sliders if slider.text.startswith("batch"))
    handle = slider.find_element(By.CSS_SELECTOR, ".noUi-handle")
    ActionChains(driver).scroll_to_element(handle).click_and_hold(handle).move_by_offset(40, 0).perform()
    try:
        return WebDriverWait(driver, DRAG_S, poll_frequency=0.2).until(lambda _: picture(driver) != before)
    except TimeoutException:
        return False
    finally:
        ActionChains(driver).release().perform()


@needs_browser
def test_from_the_welcome_page_to_a_slider_that_moves_the_picture(tmp_path, port):
    with no_process_stays(tmp_path), lab(tmp_path, port) as (url, token), browser(tmp_path) as driver:
        wait = WebDriverWait(driver, PATIENCE_S, poll_frequency=0.2, ignored_exceptions=[WebDriverException])
        driver.get(f"{url}?token={token}")
        wait.until(lambda _: shown(driver, ".jp-MarkdownViewer a[href*='01_single_gpu.ipynb']")).click()
        wait.until(lambda _: shown(driver, '.jp-Notebook-ExecutionIndicator[data-status="idle"]'))
        driver.find_element(By.XPATH, "//li[contains(@class, 'lm-MenuBar-item')][normalize-space()='Run']").click()
        wait.until(lambda _: shown(driver, '.lm-Menu-item[data-command="runmenu:run-all"]')).click()
        wait.until(lambda _: scrolled_to(driver, "img.widget-image"))
        assert not driver.find_elements(By.CSS_SELECTOR, ".jp-Dialog, .Toastify__toast"), "news, or a question"
        before = picture(driver)
        wait.until(lambda _: moves_the_picture(driver, before))
