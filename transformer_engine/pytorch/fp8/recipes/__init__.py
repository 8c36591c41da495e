"""What recipes mean to modules: one file for each, found by the class of the documented recipe.

A file in this folder is imported by being there, and registers its rules itself; see `base`.
"""

from importlib import import_module
from pkgutil import iter_modules

for _file in iter_modules(__path__, f"{__name__}."):
    import_module(_file.name)
