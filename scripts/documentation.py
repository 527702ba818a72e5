"""Hooks of the documentation site: pages of the root folder, and the roles of docstrings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
# A page of the root folder -> where it is on the site.
FROM_ROOT = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "internals/contributing.md",
    "CHANGELOG.md": "changelog.md",
}
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
# :func:`name`, :class:`~package.name`
_ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):`~?\.?([\w.]+)`")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages of the root folder."""
    for name, page in FROM_ROOT.items():
        text = (ROOT / name).read_text()
        # An image in HTML, where Markdown cannot say its width.
        text = re.sub(r'(<img src=")docs/', r"\1", text)
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Leads links to files elsewhere in the repository to their pages; names the others."""
    here = page.file.src_uri
    source = {at: name for name, at in FROM_ROOT.items()}.get(here, f"docs/{here}")

    def lead(match: re.Match[str]) -> str:
        image, text, target, heading = match.groups(default="")
        if "://" in target:
            return match[0]
        path = (ROOT / source).parent.joinpath(target).resolve().relative_to(ROOT).as_posix()
        at = FROM_ROOT.get(path) or path.removeprefix("docs/")
        if path in FROM_ROOT or (path.startswith("docs/") and Path(path).suffix):
            up = "../" * here.count("/")
            return f"{image}[{text}]({up}{at}{heading})"
        return f"{text} (`{path}`)" if path not in text else text

    return _LINK.sub(lead, markdown)


def documented() -> list[str]:
    """Returns the names on the pages of the reference."""
    pages = sorted((ROOT / "docs/reference").glob("*.md"))
    return [name for page in pages for name in re.findall(r"^::: (\S+)", page.read_text(), re.M)]


class Roles(griffe.Extension):
    """Writes the roles of reStructuredText in docstrings as links, or as code where the name is on
    no page of the reference."""

    def __init__(self) -> None:
        self.names = {name.rpartition(".")[2]: name for name in documented()}

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = _ROLE.sub(self._link, obj.docstring.value)

    def _link(self, role: re.Match[str]) -> str:
        text = role[1]
        ours = "." not in text or text.startswith("hoconv.")
        name = self.names.get(text.rpartition(".")[2]) if ours else None
        return f"[`{text}`][{name}]" if name else f"`{text}`"
