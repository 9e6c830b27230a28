"""Settings of Sphinx for `make docs`. scripts/build_docs.py prepares the sources."""

import kvmask

project = "kvmask"
author = "the kvmask authors"
release = version = kvmask.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"kvmask {version}"
html_static_path = []
html_show_copyright = False

# `Name` in a docstring is a name of Python: a link where the reference has it, else code.
default_role = "py:obj"
add_module_names = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_display_short_literal_types = True
# What "Attributes:" names is a field of its class's entry, not an entry beside its properties.
napoleon_use_ivar = True
napoleon_numpy_docstring = False

# Links go to headings as GitHub names them.
myst_heading_anchors = 4
myst_enable_extensions = []
# Examples in the pages show what they print.
highlight_language = "python"
suppress_warnings = ["misc.highlighting_failure"]
