"""Fills in the templates of assets/."""

from __future__ import annotations

from importlib import resources

from nvdlfw_inspect.report.extras import require


def asset(name: str) -> str:
    """Returns the text of a file of assets/."""
    return (resources.files(__package__) / "assets" / name).read_text(encoding="utf-8")


def render(template: str, **values: object) -> str:
    """Fills in a template; values are escaped.

    Raises:
        MissingExtraError: jinja2 is not installed.
    """
    jinja2 = require("jinja2", "the report")
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(asset),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    text: str = environment.get_template(template).render(**values)
    return text
