"""Pure functions of speculative decoding: token trees, their construction from drafts, sampling and verification.

All modules of the package are imported with it, so that what they register is known.
"""

from importlib import import_module
from pkgutil import iter_modules

for module in iter_modules(__path__):
    import_module(f"{__name__}.{module.name}")
