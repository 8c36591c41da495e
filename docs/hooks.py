"""Hooks of mkdocs: what pages and navigation take from the repository."""

import ast
import inspect
import posixpath
import re
from pathlib import Path
from typing import Any

from markdown import Extension, Markdown
from markdown.preprocessors import Preprocessor

_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#:\s]+)(#[^)\s]*)?\)")

_DOCSTRING = re.compile(r"^\{\{ docstring ([\w.]+)\.(\w+) \}\}$", re.M)
_DECISIONS = re.compile(r"^\{\{ decisions \}\}$", re.M)


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Links to files outside of docs/ become their text; `{{ docstring a.b.C }}` the docstring."""
    folder = posixpath.dirname(page.file.src_uri)

    def replaced(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, match[2]))
        return match[1] if target.startswith("..") else match[0]

    markdown = _DOCSTRING.sub(_docstring, _LINK.sub(replaced, markdown))
    return _DECISIONS.sub(_table_of_decisions, markdown)


def _docstring(match: re.Match[str]) -> str:
    """A docstring in a layout of its own, which is not that of the other ones."""
    tree = ast.parse(Path(match[1].replace(".", "/") + ".py").read_text())
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == match[2]:
            text = inspect.cleandoc(ast.get_docstring(node) or "")
            return f"```text\n{text}\n```"
    raise SystemExit(f"docs: no class {match[2]} in {match[1]}")


class _FencedExamples(Preprocessor):
    """Makes code of `>>>` and the lines below it; Markdown takes them for quotations."""

    def run(self, lines: list[str]) -> list[str]:
        made: list[str] = []
        indent, fenced = None, False  # indent: of the example that runs
        for line in [*lines, ""]:
            if indent is not None and not line.strip():
                made.append(f"{indent}```")
                indent = None
            if indent is None and line.lstrip().startswith("```"):
                fenced = not fenced
            elif indent is None and not fenced and line.lstrip().startswith(">>> "):
                indent = line[: len(line) - len(line.lstrip())]
                made.append(f"{indent}```pycon")
            made.append(line)
        return made[:-1]


class _Examples(Extension):
    def extendMarkdown(self, md: Markdown) -> None:
        md.preprocessors.register(_FencedExamples(md), "examples", 1000)  # before code is seen


def on_config(config: Any) -> Any:
    """Examples in docstrings; navigation: decisions, and how-tos that mkdocs.yml does not name."""
    config.markdown_extensions.append(_Examples())
    docs = Path(config.docs_dir)
    named = str(config.nav)
    for section in config.nav:
        if "Decisions" in section:
            section["Decisions"] += [f"adr/{path.name}" for path in _decisions(docs)]
        for group in section.get("How to", ()):
            found = sorted(f"how-to/{path.name}" for path in docs.glob("how-to/*.md"))
            if "Use it" in group:
                group["Use it"] += [page for page in found if page not in named]
    return config


def _decisions(docs: Path) -> list[Path]:
    return sorted(docs.glob("adr/[0-9]*.md"))


def _table_of_decisions(_: re.Match[str]) -> str:
    rows = []
    for path in _decisions(Path("docs")):
        number, title = path.read_text().splitlines()[0].lstrip("# ").split(". ", 1)
        rows.append(f"| {number} | [{title}]({path.name}) |")
    return "\n".join(["| number | decision |", "| --- | --- |", *rows])


def on_post_build(*, config: Any, **_: Any) -> None:
    """Say where the site is."""
    print(f"docs: file://{Path(config.site_dir).resolve()}/index.html")
