"""What the documentation site adds to MkDocs: pages from other folders, and docstrings as Markdown.

Pages of `docs` link to files of the repository, as readers of the repository need them. On the site
these are pages too: examples and notebooks, the changelog, and how to contribute.
"""

from __future__ import annotations

import json
import re
from pathlib import Path, PurePosixPath
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
TEXTS = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each text, script and notebook outside of `docs`."""
    for name, uri in TEXTS.items():
        files.append(File.generated(config, uri, content=(ROOT / name).read_text("utf-8")))
    for path in sorted((ROOT / "examples").glob("*")):
        if path.suffix in (".py", ".yaml", ".ipynb"):
            uri = f"examples/{path.stem}.md"
            files.append(File.generated(config, uri, content=make_page(path, files, config)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Have links to files of the repository lead to their pages."""
    folder = PurePosixPath(page.file.src_uri).parent
    if page.file.src_uri in TEXTS.values():
        return re.sub(r"\]\(docs/", "](", markdown)

    def redirect(link: re.Match[str]) -> str:
        up, name = link.group(1), link.group(2)
        if up != "../" * (len(folder.parts) + 1):
            return link.group(0)
        page_name = TEXTS.get(name) or re.sub(r"\.(py|yaml|ipynb)$", ".md", name)
        return f"]({'../' * len(folder.parts)}{page_name})"

    return re.sub(r"\]\(((?:\.\./)+)([\w./-]+)\)", redirect, markdown)


def make_page(path: Path, files: Files, config: MkDocsConfig) -> str:
    """Return a script or a notebook as Markdown. Pictures of a notebook become files beside it."""
    if path.suffix != ".ipynb":
        kind = "python" if path.suffix == ".py" else "yaml"
        return f"# {path.name}\n\n```{kind}\n{path.read_text('utf-8')}```\n"
    parts = []
    for cell in json.loads(path.read_text("utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            if "text" in output:
                parts.append(f"```text\n{''.join(output['text']).rstrip()}\n```")
            if png := output.get("data", {}).get("image/png"):
                parts.append(f"![Drawn by the cell above](data:image/png;base64,{''.join(png).strip()})")
    place = f"*This page is `examples/{path.name}`, which you can run.*"
    return "\n\n".join([parts[0], place, *parts[1:]]) + "\n"


class ReadableDocstrings(griffe.Extension):
    """Show docstrings as they are meant: arguments as a list, examples as code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = format_docstring(obj.docstring.value)


# The names of arguments, at the start of a line or after a sentence about others.
ARGUMENT = re.compile(r"(?:^|(?<=\.)[ \n])([a-z_]+(?:, [a-z_]+)*): ", re.MULTILINE)


def list_argument(names: re.Match[str]) -> str:
    """Return the names of arguments as the begin of an item of a list."""
    return f"\n- {', '.join(f'`{one}`' for one in names.group(1).split(', '))}: "


def format_docstring(text: str) -> str:
    r"""Return a docstring as Markdown.

    >>> print(format_docstring("Add.\n\nx, y: numbers. z: another.\n\n>>> add(1)\n2"))
    Add.
    <BLANKLINE>
    - `x`, `y`: numbers.
    - `z`: another.
    <BLANKLINE>
    ```pycon
    >>> add(1)
    2
    ```
    """
    blocks = []
    for block in text.strip().split("\n\n"):
        if block.startswith(">>> "):
            blocks.append(f"```pycon\n{block}\n```")
            continue
        blocks.append(ARGUMENT.sub(list_argument, block).strip())
    return "\n\n".join(blocks)
