"""The built-in features of `transformer_engine`.

Importing this package imports all files of the folder, each of which registers its features.
"""

from importlib import import_module
from pkgutil import iter_modules

for _file in iter_modules(__path__, f"{__name__}."):
    import_module(_file.name)
