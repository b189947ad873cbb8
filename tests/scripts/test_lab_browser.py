"""`make lab` in a browser: a learner comes to the welcome page, opens the blank notebook 01 from it, runs it, moves a
slider, and the picture changes. Nothing else asks for attention. Each widget of each notebook, run with no more cells
than it needs, moves and redraws.

Needs Debian's chromium and chromium-driver, or Chrome and its driver; CI has them. No GPU, no network. About a minute.
"""

import ast
import contextlib
import json
import re
import time
from pathlib import Path

import nbformat
import pytest
from selenium.common.exceptions import TimeoutException, WebDriverException
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait

import make_workbook
from headless import PATIENCE_S, browser, held_port, lab, needs_browser, no_process_stays
from needed_cells import needed_cells

ROOT = Path(__file__).resolve().parents[2]
DRAG_S = 10  # until the slider is dragged once more


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


@pytest.fixture(scope="module")
def learner(tmp_path_factory):
    """A browser on `make lab`; yields the driver, the folder workbook/, and a function that opens a notebook of it."""
    folder = tmp_path_factory.mktemp("lab")
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(held_port())
        stack.enter_context(no_process_stays(folder))
        url, token = stack.enter_context(lab(folder, port))
        driver = stack.enter_context(browser(folder))
        wait = WebDriverWait(driver, PATIENCE_S, poll_frequency=0.2, ignored_exceptions=[WebDriverException])

        def run_all() -> None:
            """Run the cells of the notebook that is open."""
            # Before its kernel is there, JupyterLab would ask for one.
            wait.until(lambda _: "| Idle" in driver.find_element(By.ID, "jp-main-statusbar").text)
            driver.find_element(By.XPATH, "//li[contains(@class, 'lm-MenuBar-item')][normalize-space()='Run']").click()
            wait.until(lambda _: shown(driver, '.lm-Menu-item[data-command="runmenu:run-all"]')).click()

        driver.get(f"{url}?token={token}")
        yield driver, folder / "course/workbook", wait, run_all


@needs_browser
def test_from_the_welcome_page_to_a_slider_that_moves_the_picture(learner):
    driver, workbook, wait, run_all = learner
    wait.until(lambda _: shown(driver, ".jp-MarkdownViewer a[href*='01_single_gpu.ipynb']")).click()
    run_all()
    contents = wait.until(lambda _: shown(driver, ".jp-TableOfContents"))
    wait.until(lambda _: "Exercise 01.1" in contents.text)
    log = (workbook.parents[1] / "server.log").read_text()
    assert not re.search(r"^\[[IW] |WARNING", log.partition("To access the server")[0], re.MULTILINE), log
    wait.until(lambda _: scrolled_to(driver, "img.widget-image"))
    assert not driver.find_elements(By.CSS_SELECTOR, ".jp-Dialog, .Toastify__toast"), "news, or a question"
    before = picture(driver)
    wait.until(lambda _: moves_the_picture(driver, before))


@needs_browser
def test_a_notebook_opens_without_a_change_and_run_all_goes_on_below_a_failing_check(learner):
    """JupyterLab puts a dot on the tab of a notebook that differs from its file; a workbook's checks bear a tag."""
    driver, workbook, wait, run_all = learner
    lab = driver.current_url.partition("/lab")[0] + "/lab/tree/"
    notebook = nbformat.v4.new_notebook(metadata=nbformat.read(workbook / "02_recompute.ipynb", as_version=4).metadata)
    notebook.cells = [nbformat.v4.new_code_cell(source) for source in ("1 / 0", "print('it ' + 'goes on')")]
    notebook.cells[0].metadata.tags = [make_workbook.GOES_ON]
    nbformat.write(notebook, workbook / "fails.ipynb")
    driver.get(f"{lab}02_recompute.ipynb?reset")
    wait.until(lambda _: "| Idle" in driver.find_element(By.ID, "jp-main-statusbar").text)
    time.sleep(2)  # JupyterLab asks the kernel for its language, and writes it down
    assert not driver.find_elements(By.CSS_SELECTOR, ".lm-DockPanel-tabBar .jp-mod-dirty")
    driver.get(f"{lab}fails.ipynb?reset")
    run_all()
    wait.until(lambda _: "it goes on" in driver.find_element(By.CSS_SELECTOR, ".jp-NotebookPanel").text)
    assert driver.find_elements(By.CSS_SELECTOR, ".lm-DockPanel-tabBar .jp-mod-dirty"), "this is how it shows a change"


def makers_of_widgets() -> set[str]:
    """The functions of course_kit.widgets that return a widget."""
    found = set()
    for path in (ROOT / "course_kit/widgets").glob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.returns and ast.unparse(node.returns) == "Drawing":
                found.add(node.name)
    return found


def up_to_widget(source: str, makers: set[str]) -> str | None:
    """A cell's source up to the widget that it shows, itself or by `display`; None if it shows none."""
    body = ast.parse(source).body if any(name in source for name in makers) else []
    for number in reversed(range(len(body))):
        call = getattr(body[number], "value", None)
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "display":
            call = call.args[0]
        if isinstance(call, ast.Call) and ast.unparse(call.func).rpartition(".")[2] in makers:
            return ast.unparse(ast.Module([*body[:number], ast.Expr(call)], []))
    return None


def widgets() -> dict[str, list[str]]:
    """The cells of the notebooks that show a widget, by name: their sources, those that they need first."""
    found, makers = {}, makers_of_widgets()
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
        sources = [cell.source for cell in cells]
        for number, source in enumerate(sources):
            if shows := up_to_widget(source, makers):
                first = sorted(needed_cells(sources, number, {}) - {number})
                found[f"{path.stem} {cells[number].id}"] = [*(sources[one] for one in first), shows]
            assert shows or not source.startswith("# Widget:"), f"{path.name} {cells[number].id}: where is the widget?"
    return found


# Each widget has names of its own, as in its own notebook; only what it shows at its end is shown.
RUN = """
import ast, json, pathlib
def run(widget):
    sources, names = json.loads(pathlib.Path("widgets.json").read_text())[widget], {"__name__": "__main__"}
    for source in sources:
        *body, last = ast.parse(source).body
        exec(compile(ast.Module(body, []), "cell", "exec"), names)
        if not isinstance(last, ast.Expr):
            exec(compile(ast.Module([last], []), "cell", "exec"), names)
        elif source is sources[-1]:
            return eval(compile(ast.Expression(last.value), "cell", "eval"), names)
"""


def move(control) -> None:
    """Give a control another value, with the keyboard."""
    if control.tag_name == "select":
        menu = Select(control)
        chosen = menu.options.index(menu.first_selected_option)
        menu.select_by_index((chosen + 1) % len(menu.options))
    elif control.tag_name == "input":
        control.send_keys(Keys.END, "0" if control.get_attribute("type") == "number" else "1", Keys.ENTER)
    else:
        at, least = (float(control.get_attribute(f"aria-value{what}")) for what in ("now", "min"))
        control.send_keys(Keys.ARROW_LEFT if at > least else Keys.ARROW_RIGHT)


CONTROLS = "select, .noUi-handle, .widget-text input"


def sources_of(output) -> list[str]:
    """The addresses of a widget's pictures: another one each time that a picture is drawn."""
    return [image.get_attribute("src") for image in output.find_elements(By.CSS_SELECTOR, "img.widget-image")]


@needs_browser
def test_each_widget_moves_and_redraws(learner):
    driver, workbook, wait, run_all = learner
    found = widgets()
    (workbook / "widgets.json").write_text(json.dumps(found))  # in cells of the page, they would take it a minute
    notebook = nbformat.v4.new_notebook(metadata=nbformat.read(workbook / "01_single_gpu.ipynb", as_version=4).metadata)
    notebook.cells = [nbformat.v4.new_code_cell(source) for source in (RUN, *(f"run({name!r})" for name in found))]
    nbformat.write(notebook, workbook / "widgets.ipynb")
    driver.get(driver.current_url.partition("/lab")[0] + "/lab/tree/widgets.ipynb?reset")
    run_all()
    widget = ".jp-OutputArea-output:has(img.widget-image)"
    wait.until(lambda _: len(driver.find_elements(By.CSS_SELECTOR, widget)) == len(found))
    for name, output in zip(found, driver.find_elements(By.CSS_SELECTOR, widget), strict=True):
        before = sources_of(output)
        move(output.find_element(By.CSS_SELECTOR, CONTROLS))
        wait.until(lambda _: sources_of(output) != before, f"{name} stays as it is")
