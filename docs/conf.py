"""The site: `sphinx-build -W --keep-going -c docs . site`, then open site/index.html.

Its source is the whole repository, so that README.md and the pages of docs/ link to one another, and to programs, as
they do on a code host.
"""

project = "torchacc"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
root_doc = "docs/index"
include_patterns = ["*.md", "docs/**.md", "benchmarks/*.md", "examples/*.md"]
exclude_patterns = [".*", "site", "build", "**/.venv*"]
html_theme = "furo"
html_title = "torchacc"
templates_path = ["_templates"]
html_additional_pages = {"index": "to_docs.html"}

myst_heading_anchors = 4

autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_member_order = "bysource"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
