"""What mkdocs does besides: links that leave docs/, diagrams, and Sphinx roles in docstrings.

Pages link to files of the repository (`../examples/fsdp2_moe.py`), so that the links work there too. The site gets a
copy of each such file; of a link to a folder or to another page (README.md), the name stays.

A diagram is a fence in Mermaid. The script that draws fences in a browser comes from another machine, so the site shows
a picture in docs/images instead, with the number of the fence from which it was drawn. A fence without its picture
fails the build. `python docs/site.py` draws the pictures; it needs mermaid-cli (`npm install @mermaid-js/mermaid-cli`)
as `mmdc`, with its browser.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import tempfile
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

REPOSITORY = Path(__file__).resolve().parent.parent
LINK = re.compile(r"\[([^\]]+)\]\(\.\./([^)#]+)\)")
FENCE = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TITLE = re.compile(r"accTitle: (.*)")
DRAWN_WITH = {  # letters are text of the picture, and the same fence gives the same bytes
    "theme": "neutral",
    "htmlLabels": False,
    "flowchart": {"htmlLabels": False},
    "deterministicIds": True,
}
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
    """Links to those copies, and pictures. A link to what does not exist stays as it is, and fails the build."""
    markdown = _with_pictures(markdown, page.file.src_uri)

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


def picture_of(page: str, number: int) -> str:
    """The file in docs/ that shows a fence of a page; fences are counted from 1."""
    return f"images/{page.removesuffix('.md').replace('/', '-')}-{number}.svg"


def digest(fence: str) -> str:
    """What a picture has at its end, and only the picture of this fence has."""
    return f"<!-- {hashlib.sha256(fence.encode()).hexdigest()} -->"


def _with_pictures(markdown: str, page: str) -> str:
    """The text of a page with pictures in place of its fences."""
    for number, fence in enumerate(FENCE.findall(markdown), 1):
        name = picture_of(page, number)
        path = REPOSITORY / "docs" / name
        if not path.is_file() or digest(fence) not in path.read_text("utf-8"):
            raise PluginError(f"{name} does not show its fence in {page}: run python docs/site.py")
        picture = f"![{TITLE.search(fence)[1]}]({'../' * page.count('/')}{name})"
        markdown = markdown.replace(f"```mermaid\n{fence}```", picture)
    return markdown


def draw() -> None:
    """Draws the picture of every fence."""
    docs = REPOSITORY / "docs"
    for page in sorted(docs.rglob("*.md")):
        fences = FENCE.findall(page.read_text("utf-8"))
        for number, fence in enumerate(fences, 1):
            path = docs / picture_of(page.relative_to(docs).as_posix(), number)
            with tempfile.TemporaryDirectory() as folder:
                options = Path(folder, "options.json")
                options.write_text(json.dumps(DRAWN_WITH))
                command = ["mmdc", "-i", "-", "-c", options, "-o", path, "-b", "white"]
                subprocess.run(command, input=fence, text=True, check=True)
            path.write_text(f"{path.read_text('utf-8')}{digest(fence)}\n", "utf-8")


def _is_at_top(file: File) -> bool:
    return "/" not in file.src_uri


if __name__ == "__main__":
    draw()
