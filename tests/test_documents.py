"""The Python listings of the documents run, top to bottom."""

import re
from pathlib import Path

import pytest

import nvdlfw_inspect.api as debug_api
import transformer_engine.pytorch as te
from nvdlfw_inspect.__main__ import main as check_config

ROOT = Path(__file__).parents[1]


# The documents, each with the packages that its listings need beyond torch.
DOCUMENTS = {
    "README.md": (),
    "docs/quickstart.md": (),
    "docs/how-to/add_feature.md": (),
    "docs/how-to/choose_attention.md": (),
    "docs/how-to/inspect_a_training.md": ("rich",),
    "docs/how-to/keep_weights_in_fp8.md": (),
    "docs/how-to/read_a_report.md": ("rich", "jinja2", "plotly"),
}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_listings_run(
    document: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    for package in DOCUMENTS[document]:
        pytest.importorskip(package)
    listings = re.findall(
        r"^```(python|yaml)\n(.*?)^```", (ROOT / document).read_text(), re.M | re.S
    )
    assert listings
    monkeypatch.chdir(tmp_path)
    request.addfinalizer(debug_api.end_debug)
    te.gemm_report(reset=True)  # a fresh process, as far as a reader can see
    names: dict[str, object] = {}
    for language, listing in listings:
        if language == "yaml":  # the configuration of the Python below it
            Path("config.yaml").write_text(listing)
            assert check_config(["check", "config.yaml"]) == 0
        else:
            exec(compile(listing, document, "exec"), names)
