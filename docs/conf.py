"""How Sphinx builds these pages: ``tox -e docs``."""

from importlib.metadata import version as version_of

project = "singlebeat"
author = "the authors of singlebeat"
version = release = version_of("celery-singlebeat")

extensions = ["sphinx.ext.autodoc"]
nitpicky = True
html_theme = "furo"
html_title = f"singlebeat {release}"
html_copy_source = False
html_show_copyright = False
templates_path: list[str] = []
