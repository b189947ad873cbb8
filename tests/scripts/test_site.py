"""The site as a reader has it: built once without a warning, then its pages in a browser, on a phone's width too."""

import functools
import http.server
import importlib.util
import inspect
import os
import subprocess
import sys
import threading
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from headless import browser, needs_browser
from pages import STILL

ROOT = Path(__file__).resolve().parents[2]
REPOSITORY = "https://github.com/someone/course"
PACKAGES = sorted(path.parent.name for path in (ROOT / "course_lib").glob("*/__init__.py"))
BUILD_S, PATIENCE_S = 300, 30  # deadlines for what hangs
PHONE = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": False}
WIDE = PHONE | {"width": 1680, "height": 1050}


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The site's folder, built as `make site` does."""
    folder = tmp_path_factory.mktemp("site")
    options = "-q -W --keep-going -c docs".split()
    built = subprocess.run(
        [sys.executable, "-m", "sphinx", *options, "-d", folder / "doctrees", ".", folder / "site"],
        cwd=ROOT,
        env={**os.environ, "REPOSITORY": REPOSITORY},
        capture_output=True,
        text=True,
        timeout=BUILD_S,
    )
    assert built.returncode == 0 and not built.stderr, built.stderr
    return folder / "site"


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def reader(site, tmp_path_factory):
    """A browser, and the address of the site, served by this process."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=site)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with browser(tmp_path_factory.mktemp("browser")) as driver:
            yield driver, f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def seen(driver, selector: str):
    """The first element of that kind that can be seen, or None."""
    return next((found for found in driver.find_elements(By.CSS_SELECTOR, selector) if found.is_displayed()), None)


def on_page(driver) -> dict:
    """What a page links to, has and fetches; and what is wrong with it: pictures, or a width that can be scrolled."""
    return driver.execute_script("""
        const parts = [document.documentElement, document.querySelector(".bd-article-container")];
        return {
            links: [...document.querySelectorAll("a[href]")].map(link => link.href),
            names: [...document.querySelectorAll("[id]")].map(element => element.id),
            fetched: performance.getEntriesByType("resource").map(entry => entry.name),
            wrong: [...document.images].filter(image => !image.naturalWidth).map(image => `no picture ${image.src}`)
                .concat(parts.filter(part => part && part.scrollWidth > part.clientWidth)
                .map(part => `${part.tagName} of ${part.clientWidth} pixels is ${part.scrollWidth} wide`)),
        };""")


def scrolling_code(driver) -> list[str]:
    """The cells whose code is wider than their place, by their first line, once all cells are unfolded."""
    return driver.execute_script("""
        document.querySelectorAll("details").forEach(cell => cell.open = true);
        return [...document.querySelectorAll(".cell_input pre")].filter(code => code.scrollWidth > code.clientWidth)
            .map(code => `${code.scrollWidth} in ${code.clientWidth} pixels: ${code.innerText.split("\\n")[0]}`);
    """)


@needs_browser
def test_no_page_has_a_broken_link_or_picture_or_an_error_or_is_too_wide_for_a_phone(site, reader):
    driver, address = reader
    pages = {path.relative_to(site).as_posix() for path in site.rglob("*.html") if "_static" not in path.parts}
    found, wrong = {}, []
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", PHONE)
    for page in sorted(pages - {"index.html"}):  # which sends a reader on to the next one
        driver.get(address + page)
        found[page] = on_page(driver)
        wrong += [f"{page}: {what}" for what in found[page]["wrong"]]
        wrong += [f"{page}: fetches {url}" for url in found[page]["fetched"] if not url.startswith(address)]
        wrong += [f"{page}: {entry['message']}" for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", WIDE)
    for page in ("docs/index.html", "CHEATSHEET.html", "notebooks/13_flash_attention.html"):
        driver.get(address + page)
        wrong += [f"{page}, wide: {what}" for what in [*on_page(driver)["wrong"], *scrolling_code(driver)]]
    driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    for page, has in found.items():
        for url, name in map(urldefrag, has["links"]):
            if url.startswith(address):
                target = unquote(url.removeprefix(address)) or "index.html"
                exists = target in pages or (site / target).is_file()
                if not exists or (name and target in found and unquote(name) not in found[target]["names"]):
                    wrong.append(f"{page}: links to {target} {name}, which is not there")
    assert not wrong, "\n".join(dict.fromkeys(wrong))
    driver.get(address)
    WebDriverWait(driver, PATIENCE_S).until(lambda _: driver.current_url == f"{address}docs/index.html")


# The package is for Playwright; only the script is taken from it.
AXE = Path(importlib.util.find_spec("axe_playwright_python").origin).with_name("axe.min.js")
PAGES = ["docs/index", "notebooks/14_mixed_precision", "CHEATSHEET", "docs/reference/course_lib.zero"]


@needs_browser
@pytest.mark.parametrize("screen", [PHONE, WIDE], ids=["phone", "wide"])
def test_the_keyboard_and_a_screen_reader_find_no_serious_fault(reader, screen):
    driver, address = reader
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    wrong = []
    for page in PAGES:
        driver.get(f"{address}{page}.html")
        driver.execute_script(AXE.read_text(encoding="utf-8"))
        found = driver.execute_async_script(
            """
            const [contrast, done] = arguments;
            axe.run({resultTypes: ["violations"], preload: false, rules: {"color-contrast": {enabled: contrast}}})
                .then(result => done(result.violations));""",
            screen is WIDE,  # a phone has the same colors, and this rule takes longer than all others
        )
        wrong += [
            f"{page}: {fault['id']}, {node['html'][:200]}"
            for fault in found
            if fault["impact"] in ("serious", "critical")
            for node in fault["nodes"]
        ]
    driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert not wrong, "\n".join(wrong)


FIGURE = "Figure: four tensors end to end in a flat buffer, cut into four equal shards"


@needs_browser
def test_a_solution_is_behind_a_bar_and_a_figure_has_its_title_and_links_to_its_picture(reader):
    driver, address = reader
    driver.get(f"{address}notebooks/05_zero.html")
    wait = WebDriverWait(driver, PATIENCE_S)
    (bar, *_) = driver.find_elements(By.CSS_SELECTOR, "details.hide > summary")
    inside = bar.find_element(By.XPATH, "following-sibling::div")
    assert bar.text == "Solution" and not inside.is_displayed()
    driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", bar)
    bar.click()
    wait.until(lambda _: inside.is_displayed())
    assert "gb_of_stage = " in inside.text and bar.text == "Solution"
    assert "BEGIN SOLUTION" not in driver.page_source and "END SOLUTION" not in driver.page_source
    figure = driver.find_element(By.XPATH, f"//figure[.//img[@alt='{FIGURE}']]")
    assert figure.find_element(By.TAG_NAME, "figcaption").text.startswith(FIGURE)
    source = figure.find_element(By.TAG_NAME, "img").get_attribute("src")
    assert figure.find_element(By.CSS_SELECTOR, "a:has(img)").get_attribute("href") == source


def test_each_widget_has_a_still_picture_and_a_note(site):
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        page = (site / f"notebooks/{path.stem}.html").read_text(encoding="utf-8")
        assert page.count(STILL) == path.read_text(encoding="utf-8").count('"# Widget: '), path.stem


@needs_browser
def test_a_search_finds_the_notebook(reader):
    driver, address = reader
    driver.get(f"{address}docs/index.html")
    wait = WebDriverWait(driver, PATIENCE_S)
    wait.until(lambda _: seen(driver, ".search-button-field")).click()
    wait.until(lambda _: seen(driver, "input[name=q]")).send_keys("zig-zag\n")
    wait.until(lambda _: driver.find_elements(By.CSS_SELECTOR, "#search-results a[href*='07_sequence_context']"))


@needs_browser
def test_the_cheatsheets_field_shows_the_rows_that_hold_the_words(reader):
    driver, address = reader
    driver.get(f"{address}CHEATSHEET.html")
    rows = driver.find_elements(By.CSS_SELECTOR, "#method-search ~ * tbody tr")
    field = driver.find_element(By.ID, "method-search")
    field.send_keys("zig-zag")
    shown = [row.text.lower() for row in rows if row.is_displayed()]
    assert 0 < len(shown) < len(rows) and all("zig-zag" in row for row in shown)
    field.send_keys(" nothing has this")
    assert not any(row.is_displayed() for row in rows)


def test_a_notebook_has_buttons_that_start_it_elsewhere(site):
    page = (site / "notebooks/05_zero.html").read_text(encoding="utf-8")
    assert "https://mybinder.org/v2/gh/someone/course/blank?urlpath=lab/tree/workbook/05_zero.ipynb" in page
    assert "https://colab.research.google.com/github/someone/course/blob/blank/workbook/05_zero.ipynb" in page
    assert 'id="in-colab-or-binder"' in (site / "docs/index.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("package", PACKAGES)
def test_the_reference_has_every_public_name(site, package):
    page = (site / f"docs/reference/course_lib.{package}.html").read_text(encoding="utf-8")
    for name in importlib.import_module(f"course_lib.{package}").__all__:
        assert f'id="course_lib.{package}.{name}"' in page, name


def test_the_planners_page_has_its_command_line(site):
    assert "--cluster" in (site / "docs/planner.html").read_text(encoding="utf-8")


def functions_of(thing) -> list:
    """A function, or the public ones of a class and how it is made."""
    if inspect.isfunction(thing):
        return [thing]
    own = vars(thing) if inspect.isclass(thing) else {}
    own = [getattr(each, "fget", getattr(each, "__func__", each)) for name, each in own.items() if shown_of_class(name)]
    return [each for each in own if inspect.isfunction(each)]


def shown_of_class(name: str) -> bool:
    return name == "__init__" or not name.startswith("_")


@pytest.mark.parametrize("package", PACKAGES)
def test_the_reference_has_every_type(package):
    """Of arguments and of what is returned. Not of matplotlib's axes: the library does without matplotlib."""
    module, without = importlib.import_module(f"course_lib.{package}"), []
    for function in (each for name in module.__all__ for each in functions_of(getattr(module, name))):
        for name, given in inspect.signature(function).parameters.items():
            variadic = given.kind in (given.VAR_POSITIONAL, given.VAR_KEYWORD)
            if given.annotation is given.empty and not variadic and name not in ("self", "cls", "ax"):
                without.append(f"{function.__qualname__}: {name}")
        if "return" not in function.__annotations__ and function.__name__ != "__init__":
            without.append(f"{function.__qualname__}: what it returns")
    assert not without
