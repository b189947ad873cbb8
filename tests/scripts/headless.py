"""A headless browser for tests: Debian's chromium and chromium-driver, or Chrome and its driver. CI has them."""

import contextlib
import os
import shutil
from pathlib import Path

import pytest
from selenium import webdriver

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
