"""A headless browser for tests, and `make lab` for it: Debian's chromium and chromium-driver, or Chrome and its driver.
CI has them.
"""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from selenium import webdriver

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 300  # a deadline for what hangs
BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chromium-browser"))), None)
DRIVER = shutil.which("chromedriver")
FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --window-size=1400,1200"
).split()
ADVICE = "no chromium and chromedriver: apt install chromium chromium-driver"

needs_browser = pytest.mark.skipif(not (BROWSER and DRIVER) and not os.environ.get("CI"), reason=ADVICE)


@contextlib.contextmanager
def browser(folder: Path):
    """A headless browser with a profile of its own; what it shows at the end, good or bad, is left as screen.png."""
    assert BROWSER and DRIVER, ADVICE
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for flag in (*FLAGS, f"--user-data-dir={folder / 'profile'}"):
        options.add_argument(flag)
    with webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER)) as driver:
        try:
            yield driver
        finally:
            driver.save_screenshot(folder / "screen.png")
            print("screenshot:", folder / "screen.png")


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
def held_port():
    """A port at which a server that is started inside can listen; no other program gets it."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("", 0))
        yield held.getsockname()[1]


@contextlib.contextmanager
def lab(folder: Path, port: int, *arguments: str):
    """`make lab` in a copy of the course whose setup is done; yields the server's address and token."""
    course = folder / "course"
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        course.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, course)
    for name in ("scripts", "notebooks", "course_lib", "course_kit"):
        shutil.copytree(ROOT / name, course / name, ignore=shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints"))
    for name in ("data", "benchmarks"):
        (course / name).symlink_to(ROOT / name)
    python = course / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    (course / ".venv/installed-lab").touch()
    jupyter = {name: str(folder / name.lower()) for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")}
    settings = Path(jupyter["JUPYTER_CONFIG_DIR"], "lab/user-settings/@jupyterlab/notebook-extension")
    settings.mkdir(parents=True)
    (settings / "tracker.jupyterlab-settings").write_text('{"windowingMode": "none"}')  # cells stay in the page
    with open(folder / "server.log", "w") as log:
        make = subprocess.Popen(
            ["make", "lab", f"LAB_ARGS=--no-browser --port {port} {' '.join(arguments)}"],
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
