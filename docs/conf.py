"""The site, `make site`: built from the repository's files in place (notebooks, docs/), with their saved outputs."""

import os
import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS), str(DOCS.parent), str(DOCS.parent / "scripts")]

from address import address  # noqa: E402 -- below the line that finds it

# Where the course is published: a build on GitHub knows it, others read it from pyproject.toml. Without an owner there
# are no launch buttons.
REPOSITORY = os.environ.get("REPOSITORY", "" if "/OWNER/" in address() else address())

# Pages that show a program's help run it with this Python, at this width.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
os.environ["COLUMNS"] = "100"

project = "Training large language models at scale"
author = "the authors of the course"
html_title = project
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "docstrings", "mathml", "shown_cells"]
extensions += ["sphinxcontrib.programoutput", "pages"]

# The source folder is the repository's root, so that a link from a notebook or a page to any file is right on the site,
# in JupyterLab and in a repository's viewer alike.
include_patterns = ["notebooks/*.ipynb", "docs/**.md", "docs/**.rst", "CHEATSHEET.md", "CONTRIBUTING.md"]
exclude_patterns = ["docs/_*", "**/.*", "build", "workbook", "tests", "**/.ipynb_checkpoints"]
root_doc = "docs/index"
templates_path = [str(DOCS / "_templates")]

nb_execution_mode = "off"
nb_merge_streams = True
myst_enable_extensions = ["dollarmath", "colon_fence", "deflist"]
myst_heading_anchors = 3
html_math_renderer = "mathml"

# The reference: signatures with types, and docstrings, in which `x` is a name.
default_role = "py:obj"
autodoc_default_options = {"members": True, "undoc-members": True, "no-value": True, "member-order": "bysource"}
autodoc_inherit_docstrings = False
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 100
toc_object_entries_show_parents = "hide"
autosummary_ignore_module_all = False
add_module_names = False

html_theme = "sphinx_book_theme"
html_static_path = ["_static"]
html_css_files = ["course.css"]
html_favicon = "_static/icon.svg"
html_context = {"default_mode": "auto"}
html_use_index = html_domain_indices = False
html_extra_path = ["_root"]
html_copy_source = False
html_show_copyright = False
html_last_updated_fmt = None
html_theme_options = {
    "navbar_persistent": [],
    "show_navbar_depth": 1,
    "show_toc_level": 1,
    "max_navbar_depth": 1,
    "back_to_top_button": False,
    "use_download_button": False,
    "use_fullscreen_button": False,
}
if REPOSITORY:
    html_theme_options |= {
        "repository_url": REPOSITORY,
        "repository_branch": "main",
        "path_to_docs": "",
        "use_repository_button": True,
        "launch_buttons": {
            "binderhub_url": "https://mybinder.org",
            "colab_url": "https://colab.research.google.com",
            "notebook_interface": "jupyterlab",
        },
    }
