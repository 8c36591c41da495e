"""The Python listings of the documents run, top to bottom."""

import re
from pathlib import Path

import pytest

import transformer_engine.pytorch as te

ROOT = Path(__file__).parents[1]


# The documents, each with the packages that its listings need beyond torch.
DOCUMENTS = {
    "README.md": (),
    "docs/quickstart.md": (),
    "docs/how-to/add_feature.md": (),
    "docs/how-to/read_a_report.md": ("rich", "jinja2", "plotly"),
}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_listings_run(document: str) -> None:
    for package in DOCUMENTS[document]:
        pytest.importorskip(package)
    listings = re.findall(r"^```python\n(.*?)^```", (ROOT / document).read_text(), re.M | re.S)
    assert listings
    te.gemm_report(reset=True)  # a fresh process, as far as a reader can see
    names: dict[str, object] = {}
    for listing in listings:
        exec(compile(listing, document, "exec"), names)
