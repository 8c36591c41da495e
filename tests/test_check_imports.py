"""The check of imports fails for private names of torch, and for import cycles."""

import ast
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
import check_imports


@pytest.mark.parametrize(
    "code",
    [
        "import torch\ntorch._C._is_fwd_grad_enabled()",
        "import torch as t\nt.nn.modules.module._global_forward_hooks",
        "from torch import autograd\nautograd._functions",
        "from torch.utils._pytree import tree_map",
        "from torch.overrides import _get_current_function_mode",
        "import torch._dynamo",
        "def f():\n    import torch\n    return getattr(torch._C, 'x')",
        "import torch\ngetattr(torch, '_x', None)",
        "import importlib\nimportlib.import_module('torch._inductor')",
        "import torch\nsuper(torch.autograd.Function, f).apply",
        "x.untyped_storage()._cdata",
    ],
)
def test_private_names_are_found(code):
    assert list(check_imports.private_names(ast.parse(code)))


def test_what_is_public_is_not():
    code = '"torch, and _x"\nimport torch\ntorch._foreach_norm([x]), x._version, torch.__version__'
    code += "\nfrom a import _torch_private\nself._C, _torch_private._y, super(A, b)._z"
    assert not list(check_imports.private_names(ast.parse(code)))


def modules(folder, **files):
    for name, text in files.items():
        path = folder / "p" / f"{name.replace('.', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found = check_imports.modules_of(["p"], folder)
    return {name: check_imports.imports(name, found) for name in found}


def test_circles_are_found(tmp_path):
    graph = modules(tmp_path, __init__="", a="import p.b", b="def f():\n    from . import a")
    assert graph == {"p": set(), "p.a": {"p.b"}, "p.b": {"p.a"}}
    assert sorted(set(check_imports.circle(graph))) == ["p.a", "p.b"]


def test_imports_for_types_close_none(tmp_path):
    types = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from p import a"
    graph = modules(tmp_path, __init__="", a="from p.b import x", b=types)
    assert not check_imports.circle(graph)


def test_rooms(monkeypatch):
    monkeypatch.setattr(check_imports, "ROOMS", "p")
    graph = {"p.a.x": {"p.b.y", "p.flat"}, "p.b.y": set(), "p.b.z": {"p.a"}, "p.flat": set()}
    rooms = check_imports.rooms_of(graph, {"p.a", "p.b"})
    assert rooms == {"a": {"b", "flat"}, "b": {"a"}, "flat": set()}
    assert check_imports.circle(rooms)
