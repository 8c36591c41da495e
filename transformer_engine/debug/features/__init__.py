"""The built-in features of `transformer_engine`: importing this registers all of them.

A file in this folder is imported by being there.
"""

from importlib import import_module
from pkgutil import iter_modules

for _file in iter_modules(__path__, f"{__name__}."):
    import_module(_file.name)
