"""How modules run under recipes: one file for each class of documented recipes.

All files of this folder are imported; each registers its rules (see `base`).
"""

from importlib import import_module
from pkgutil import iter_modules

for _file in iter_modules(__path__, f"{__name__}."):
    import_module(_file.name)
