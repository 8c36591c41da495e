"""Runs the files of feature directories."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_Identity = tuple[int, int]  # device and inode
_loaders: list[FeatureLoader] = []


def loading_files() -> bool:
    """Return whether feature files are being loaded now."""
    return bool(_loaders)


class FeatureLoader:
    """Loads files as modules, which are removed from `sys.modules` afterwards.

    While a file runs, its folder comes first in `sys.path`, so that it can import its siblings. A
    file that the process has imported already is not run again.
    """

    def __init__(self, directories: list[str]) -> None:
        self._directories = [Path(d).resolve() for d in directories]
        self._imported: dict[str, _Identity | None] = {}

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Context for calls of `load`; removes the modules of the directories at the end."""
        before = set(sys.modules)
        _loaders.append(self)
        try:
            yield
        finally:
            _loaders.remove(self)
            new = set(sys.modules) - before
            ours = {name for name in new if "." not in name and self._is_ours(sys.modules[name])}
            for name in new:
                if name.partition(".")[0] in ours:  # modules of a package go with it
                    del sys.modules[name]

    def load(self, path: str) -> str | None:
        """Run a file; return an error message, or None."""
        file = Path(path).resolve()
        if _identity_of(path) in self._imported_files():
            return None
        taken = file.stem in sys.modules
        name = f"nvdlfw_inspect_file_{abs(hash(file)):x}" if taken else file.stem
        spec = importlib.util.spec_from_file_location(name, file)
        if spec is None or spec.loader is None:
            return "not a Python file"
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        sys.path.insert(0, str(file.parent))
        try:
            spec.loader.exec_module(module)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # SystemExit too: a feature file does not end the process
            sys.modules.pop(name, None)
            return _explain(error, file)
        finally:
            sys.path.remove(str(file.parent))
        return None

    def _imported_files(self) -> set[_Identity | None]:
        for name, module in list(sys.modules.items()):
            if name not in self._imported:
                self._imported[name] = _identity_of(getattr(module, "__file__", None))
        return {identity for identity in self._imported.values() if identity}

    def _is_ours(self, module: ModuleType) -> bool:
        file = _file_of(module)
        return file is not None and any(d in file.parents for d in self._directories)


def _identity_of(path: object) -> _Identity | None:
    """Device and inode: the same for all paths of a file, and five times faster than `resolve`."""
    try:
        found = Path(path).stat() if isinstance(path, str) else None
    except (OSError, ValueError):
        return None
    return found and (found.st_dev, found.st_ino)


def _file_of(module: object) -> Path | None:
    file = getattr(module, "__file__", None)
    return Path(file).resolve() if isinstance(file, str) else None


def _explain(error: BaseException, file: Path) -> str:
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(file)]
    line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
    return f"{'' if line is None else f'line {line}: '}{type(error).__name__}: {error}"
