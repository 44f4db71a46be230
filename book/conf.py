"""Sphinx configuration. `make book` copies this folder and the executed chapters to book/_build/source."""

project = "kvlab"
author = "the kvlab authors"
copyright = "the kvlab authors"
html_title = "kvlab: KV-cache engineering, one bottleneck a chapter"

extensions = [
    "myst_nb",
    "sphinxcontrib.bibtex",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx-mathjax-offline",  # copies MathJax and its fonts into the site: the mathematics renders with no network
]
exclude_patterns = ["_build"]
language = "en"

# Chapters arrive executed, so that a page shows what its notebook printed.
nb_execution_mode = "off"
nb_merge_streams = True
nb_render_markdown_format = "myst"
nb_ipywidgets_js = {}

myst_enable_extensions = ["amsmath", "attrs_block", "attrs_inline", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
myst_dmath_double_inline = True

numfig = True
math_numfig = True
math_number_all = False
math_eqref_format = "equation ({number})"

bibtex_bibfiles = ["references.bib"]
bibtex_default_style = "plain"
bibtex_reference_style = "author_year"

copybutton_selector = "div:not(.no-copybutton):not(.output) > div.highlight > pre"

html_theme = "sphinx_book_theme"
html_static_path = ["_static"]
html_css_files = ["kvlab.css"]
html_copy_source = True
html_show_sourcelink = True
html_show_copyright = False
html_last_updated_fmt = None
html_context = {"default_mode": "auto"}
html_theme_options = {
    "use_download_button": True,
    "use_fullscreen_button": False,
    "use_repository_button": False,
    "home_page_in_toc": True,
    "navbar_start": [],
    "navbar_center": [],
    "navbar_end": [],
    "navbar_persistent": [],
    "show_toc_level": 2,
    "show_navbar_depth": 1,
    "toc_title": "On this page",
    "logo": {"text": "kvlab"},
}
