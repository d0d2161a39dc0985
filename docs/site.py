"""What mkdocs does besides: links that leave docs/, and Sphinx roles in docstrings.

Pages link to files of the repository (`../examples/fsdp2_moe.py`), so that the links work there too. The site gets a
copy of each such file; of a link to a folder or to another page (notes/), the name stays.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

REPOSITORY = Path(__file__).resolve().parent.parent
LINK = re.compile(r"\[([^\]]+)\]\(\.\./([^)#]+)\)")
ROLE = re.compile(r":(?:class|meth|func|data|attr|exc|mod):(?=<code>)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds what pages of docs/ link to outside of it."""
    for page in list(filter(_is_at_top, files.documentation_pages())):
        for _, target in LINK.findall(page.content_string):
            if target.endswith(".md") or not (REPOSITORY / target).is_file():
                continue
            if files.get_file_from_path(target) is None:
                files.append(File.generated(config, target, abs_src_path=str(REPOSITORY / target)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links to those copies. A link to what does not exist stays as it is, and fails the build."""

    def link(match: re.Match[str]) -> str:
        name, target = match.groups()
        if (REPOSITORY / target).is_dir() or (
            target.endswith(".md") and (REPOSITORY / target).is_file()
        ):
            return name
        return f"[{name}]({target})" if files.get_file_from_path(target) else match[0]

    return LINK.sub(link, markdown) if _is_at_top(page.file) else markdown


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """`:class:` and the like, which only Sphinx knows, go; the name behind them stays."""
    return ROLE.sub("", html)


def _is_at_top(file: File) -> bool:
    return "/" not in file.src_uri
