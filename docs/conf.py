"""The site of the docs: `make docs` renders the Markdown pages, strictly and without a network."""

from pathlib import Path

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator

import semix

ROOT = Path(__file__).parents[1]

project = "semix"
copyright = "the semix authors"
html_title = "semix"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_math_renderer = "mathml"  # MathJax would be loaded from elsewhere
html_copy_source = False
html_show_sphinx = False
root_doc = "docs/index"
# The source folder is the repository, so that its pages link to each other as they do on GitHub.
include_patterns = ["*.md", "docs/**.md", "benchmarks/README.md"]
exclude_patterns = [".*", "build", "quickstart", "tests", "benchmarks/results", "*.egg-info"]

myst_enable_extensions = ["dollarmath"]
myst_dmath_allow_space = myst_dmath_allow_digits = False  # a price is no formula
myst_heading_anchors = 4  # as GitHub makes them

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
default_role = "code"  # docstrings write code in single backticks
nitpicky = True
nitpick_ignore_regex = [
    (r"py:class", r".*"),  # types in signatures, of torch and inner ones
    (r"py:exc", r"\w+Failed|DamagedShards"),  # kinds of RunFailed
]

# The menu. It stands here, because a toctree in a page would be a block of code on GitHub.
MENU = {
    "Begin": ["README", "docs/quickstart", "docs/tutorial", "docs/notebook"],
    "Methods": [
        "docs/methods/csm",
        "docs/methods/fedlas",
        "docs/methods/mac-cal",
        "docs/methods/noise",
        "docs/studies/README",
        "docs/studies/which",
        "docs/studies/claims",
        "docs/peers",
    ],
    "Use": [
        "docs/generation",
        "docs/noise",
        "docs/labels",
        "docs/training",
        "docs/serving",
        "docs/python",
        "docs/reference",
        "docs/format",
        "docs/publishing",
    ],
    "Operate": [
        "docs/scaling",
        "docs/deployments",
        "docs/server",
        "docs/architecture",
        "benchmarks/README",
        "CONTRIBUTING",
        "CHANGELOG",
    ],
}


RETURNED = [
    "semix.calib.classifier.CalibratedClassifier",
    "semix.calib.metrics.measures.CalibrationMetrics",
    "semix.data.dataset.MixedImages",
    "semix.data.stream.MixedPipeline",
]


def add_menu(text: str) -> str:
    for caption, pages in MENU.items():
        lines = "\n".join(f"/{page}" for page in pages if (ROOT / f"{page}.md").exists())
        text += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{lines}\n```\n"
    studies = sorted((ROOT / "docs" / "studies").glob("*/*.md"))
    lines = "\n".join(f"/{path.relative_to(ROOT).with_suffix('')}" for path in studies)
    return text + f"\n```{{toctree}}\n:hidden:\n:caption: Records\n\n{lines}\n```\n"


def add_reference(text: str) -> str:
    """The signature and docstring of every public name, below the page's own text."""
    for name in sorted(semix.__all__, key=str.lower):
        value, kind, options = getattr(semix, name), "function", ""
        if isinstance(value, type):
            kind = "exception" if issubclass(value, BaseException) else "class"
            options = "   :members:\n"
        text += f"\n## {name}\n\n```{{eval-rst}}\n.. auto{kind}:: semix.{name}\n{options}```\n"
    text += "\n## What functions return\n"
    for name in RETURNED:
        text += f"\n```{{eval-rst}}\n.. autoclass:: {name}\n   :members:\n```\n"
    return text


def complete_page(app: Sphinx, page: str, source: list[str]) -> None:
    if page == root_doc:
        source[0] = add_menu(source[0])
    if page == "docs/reference":
        source[0] = add_reference(source[0])


def visit_math(self: HTML5Translator, node: nodes.math) -> None:
    self.body.append(tex2mathml(node.astext()))
    raise nodes.SkipNode


def visit_math_block(self: HTML5Translator, node: nodes.math_block) -> None:
    self.body.append(f"<div class='math'>{tex2mathml(node.astext(), as_block=True)}</div>")
    raise nodes.SkipNode


def write_entry(app: Sphinx, exception: Exception | None) -> None:
    """A page at the top that leads to the first one."""
    if exception is None:
        target = f"{root_doc}.html"
        page = f'<!doctype html><meta http-equiv="refresh" content="0; url={target}">'
        Path(app.outdir, "index.html").write_text(f'{page}<a href="{target}">semix</a>\n')


def setup(app: Sphinx) -> None:
    app.connect("source-read", complete_page)
    app.connect("build-finished", write_entry)
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_math_block, None))
