"""How Sphinx builds these pages: ``tox -e docs``."""

import sys
from importlib.metadata import version as version_of
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for the modules beside this one

project = "singlebeat"
author = "the authors of singlebeat"
version = release = version_of("celery-singlebeat")

extensions = ["diagrams", "directives", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_click"]
nitpicky = True
# Names of other projects, and of modules that are not public.
nitpick_ignore_regex = [("py:.*", r"(?!singlebeat\.((errors|signals|embedded)\.)?\w+$).*")]
autodoc_default_options = {"member-order": "bysource"}
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
html_static_path = ["style.css"]
html_theme = "furo"
html_title = f"singlebeat {release}"
smartquotes = False  # the help of a command names options: --json
html_copy_source = False
html_show_copyright = False
templates_path: list[str] = []
