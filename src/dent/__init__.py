"""Dynamic defenses against adversarial attacks: models that optimize back, on every batch.

The names of this package are those of `dent.api`. They are imported, and torch with them, when one is
used for the first time, so that the command line starts at once.
"""

from importlib import import_module

__version__ = "0.1.0"
TYPE_CHECKING = False  # type checkers take it to be True; `typing` takes a while to load

if TYPE_CHECKING:
    from dent.api import *  # noqa: F403
else:

    def __getattr__(name: str) -> object:
        """Return a public name of `dent.api`, or a module that it imports (PEP 562)."""
        if name == "__all__" or not name.startswith("_"):
            api = import_module("dent.api")
            if name == "__all__" or name in getattr(api, "__all__", ()):
                return getattr(api, name)
            if name in globals():  # a submodule, now that it is imported
                return globals()[name]
        raise AttributeError(f"module 'dent' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *import_module("dent.api").__all__})
