"""Runs the Python listings of the documents, and compares figures with what happens."""

import importlib.util
import re
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest
import torch
from fake_manager import session

import nvdlfw_inspect.api as debug_api
import transformer_engine.pytorch as te
from nvdlfw_inspect.__main__ import main as check_config
from transformer_engine.pytorch.chain import gemm
from transformer_engine.pytorch.fp8.recipes import base

ROOT = Path(__file__).parents[1]
LISTING = re.compile(r"^```(python|yaml)\n(.*?)^```", re.M | re.S)
INCLUDED = re.compile(r'^--8<-- "(.*?)"$', re.M)  # a source file that the page includes

# Packages beyond torch that the listings of a document need.
PACKAGES = {
    "docs/how-to/export_to_onnx.md": ("onnx", "onnxscript", "onnxruntime"),
    "docs/how-to/inspect_a_training.md": ("rich",),
    "docs/how-to/keep_weights_in_fp8.md": (),
    "docs/how-to/read_a_report.md": ("rich", "jinja2", "plotly"),
}
PAGES = ["README.md", *(str(p.relative_to(ROOT)) for p in sorted(ROOT.glob("docs/**/*.md")))]
ELSEWHERE = {"docs/how-to/use_other_libraries.md"}  # run by tests/clients
DOCUMENTS = [
    page for page in PAGES if LISTING.search((ROOT / page).read_text()) and page not in ELSEWHERE
]


@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")  # torch's own, while it exports
@pytest.mark.filterwarnings("ignore:.*buffer is not writable:UserWarning")  # torch 2.12 and older
@pytest.mark.parametrize("document", DOCUMENTS)
def test_listings_run(
    document: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    capfd: pytest.CaptureFixture[str],
) -> None:
    for package in PACKAGES.get(document, ()):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(base, "_RULES", dict(base._RULES))  # a page may register recipes
    request.addfinalizer(debug_api.end_debug)
    te.gemm_report(reset=True)  # as in a fresh process
    module = ModuleType("document")
    monkeypatch.setitem(sys.modules, "document", module)  # compilers look up globals here
    for language, listing in LISTING.findall((ROOT / document).read_text()):
        if language == "yaml":  # the configuration for the next Python listing
            Path("config.yaml").write_text(listing)
            assert check_config(["check", "--strict", "config.yaml"]) == 0
        else:
            exec(compile(listing, document, "exec"), module.__dict__)
    debug_api.end_debug()
    shown = capfd.readouterr()
    assert "WARNING" not in shown.err  # no warning of the debugger
    assert shown.out.count("\n") < 50, "more than readers look at"


def test_what_pages_include_is_there() -> None:
    for page in PAGES:
        for source in INCLUDED.findall((ROOT / page).read_text()):
            assert (ROOT / source).is_file(), f"{page} shows {source}"


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:\s]+)[^)]*\)", (ROOT / page).read_text()):
            assert ((ROOT / page).parent / target).exists(), f"{page} links to {target}"


def test_every_feature_has_a_page() -> None:
    folder = ROOT / "transformer_engine/debug/features"
    of_features = {
        re.findall(r"^class (\w+)", path.read_text(), re.M)[0]: path.stem
        for path in folder.glob("*.py")
        if "@Registry.register_feature" in path.read_text()
    }
    assert "DumpTensors" in of_features
    table = (ROOT / "docs/features/index.md").read_text()
    of_keys = (ROOT / "docs/how-to/inspect_a_training.md").read_text()
    navigation = (ROOT / "mkdocs.yml").read_text()
    for feature, page in of_features.items():
        shown = f"{{{{ docstring transformer_engine.debug.features.{page}.{feature} }}}}"
        assert shown in (ROOT / f"docs/features/{page}.md").read_text()
        assert f"| [{feature}]({page}.md) |" in table
        assert f"| `{feature}` |" in of_keys
        assert f"- features/{page}.md" in navigation


@pytest.fixture
def figure():
    path = ROOT / "docs/figures/hook_order.py"
    spec = importlib.util.spec_from_file_location("hook_order", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_figure_of_calls_is_drawn_anew(figure) -> None:
    for name, palette in (("light", figure.LIGHT), ("dark", figure.DARK)):
        drawn = (ROOT / f"docs/figures/hook_order_{name}.svg").read_text()
        assert drawn == figure.draw(palette), f"run python docs/figures/{figure.__name__}.py"


class Recorder:
    """A feature that records when a layer calls its methods and multiplies."""

    def __init__(self):
        self.calls = []

    def inspect_tensor_enabled(self, config, layer_name, tensor_name, iteration):
        return True

    def inspect_tensor_postquantize_enabled(self, config, layer_name, tensor_name, gemm, iteration):
        return True

    def inspect_tensor(self, config, layer_name, tensor_name, tensor, iteration):
        self.calls.append(("inspect_tensor", tensor_name, ""))

    def inspect_tensor_postquantize(self, config, layer_name, tensor_name, gemm, tensor, iteration):
        self.calls.append(("inspect_tensor_postquantize", tensor_name, gemm))


def test_the_figure_of_calls_shows_what_layers_do(figure, monkeypatch) -> None:
    recorder = Recorder()

    def counted(name, product):
        def run(*args, **kwargs):
            recorder.calls.append(("gemm", name, ""))
            return product(*args, **kwargs)

        return run

    for name in ("fprop", "dgrad", "wgrad"):
        monkeypatch.setattr(gemm, name, counted(name, getattr(gemm, name)))
    with session((".*", recorder, {})):
        layer = te.Linear(32, 32, device="cpu", name="layer")
        with te.fp8_autocast():
            y = layer(torch.randn(16, 32, requires_grad=True))
        y.sum().backward()
    drawn = [call for call in (*figure.FORWARD, *figure.BACKWARD) if call[0] != "cast"]
    assert recorder.calls == drawn
    for part in (figure.FORWARD, figure.BACKWARD):  # each cast is followed by its inspection
        for cast, look in pairwise(part):
            if cast[0] == "cast":
                assert look == ("inspect_tensor_postquantize", *cast[1:])
