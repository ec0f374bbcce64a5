"""Old names of public seams, kept for one release: each use gives a DeprecationWarning.

`Alias` serves code that reads an old name, `adopt_old_names` classes that still define one, `old_keywords`
calls that still pass one, `old_names` imports of one from its module, and `OLD_MODULES` imports of a module.
"""

import sys
import warnings
from abc import ABCMeta
from collections.abc import Callable, Sequence
from functools import wraps
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeVar

# Modules that a package with a method of its own imports, and where each one is now.
OLD_MODULES = {
    "fedfrozen_app.errors": "fedfrozen_app.core.errors",
    "fedfrozen_app.exchange.order": "fedfrozen_app.exchange.train_request",
    "fedfrozen_app.models.adapted": "fedfrozen_app.adapters.adapted",
    "fedfrozen_app.models.design": "fedfrozen_app.adapters.design",
    "fedfrozen_app.models.lora": "fedfrozen_app.adapters.lora",
    "fedfrozen_app.models.prompts": "fedfrozen_app.adapters.prompts",
    "fedfrozen_app.registry": "fedfrozen_app.core.registry",
    "fedfrozen_app.seeds": "fedfrozen_app.core.seeds",
    "fedfrozen_app.server.adapter_rule": "fedfrozen_app.adapters.rule",
    "fedfrozen_app.words": "fedfrozen_app.core.formatting",
}

C = TypeVar("C", bound=type)


def warn(owner: str, old: str, new: str, stacklevel: int = 3) -> None:
    warnings.warn(f"{owner}: `{old}` is now `{new}`.", DeprecationWarning, stacklevel=stacklevel)


class Alias:
    """An old name of an attribute or method: `tells = Alias("metric_names")`."""

    def __init__(self, new: str) -> None:
        self.new = new

    def __set_name__(self, owner: type, name: str) -> None:
        self.owner, self.old = owner, name

    def __get__(self, instance: Any, kind: type | None = None) -> Any:
        kind = type(instance) if kind is None else kind
        warn(kind.__name__, self.old, self.new)
        line = kind.__mro__
        defining = [place for place, one in enumerate(line) if not _is_alias(vars(one).get(self.old, self))]
        if defining:
            # A subclass defines the old name, so this is its super().old: what the classes above it have.
            default = next(vars(one)[self.new] for one in line[defining[-1] + 1 :] if self.new in vars(one))
            return default.__get__(instance, kind) if hasattr(default, "__get__") else default
        return getattr(kind if instance is None else instance, self.new)

    def __set__(self, instance: Any, value: Any) -> None:
        warn(type(instance).__name__, self.old, self.new)
        setattr(instance, self.new, value)


def adopt_old_names(kind: type) -> None:
    """For `__init_subclass__`: what a class defines under an old name it defines under the new one too."""
    aliases = {name: one for parent in kind.__mro__ for name, one in vars(parent).items() if _is_alias(one)}
    for old, alias in aliases.items():
        definer = next(one for one in kind.__mro__ if old in vars(one))
        found = vars(definer)[old]
        # A parent that is a seam's subclass has its new name already; a mixin has not.
        if _is_alias(found) or (definer is not kind and issubclass(definer, alias.owner)):
            continue
        warn(kind.__name__, old, alias.new, stacklevel=5 if isinstance(kind, ABCMeta) else 4)  # the class
        if alias.new not in vars(kind):
            setattr(kind, alias.new, found)


def _is_alias(value: Any) -> bool:
    return isinstance(value, Alias)


def old_keywords(**names: str) -> Callable[[C], C]:
    """A class whose constructor takes old keywords too: `@old_keywords(own="client_state")`."""

    def decorate(kind: C) -> C:
        build = kind.__init__  # type: ignore[misc]

        @wraps(build)
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            for old, new in names.items():
                if old in kwargs:
                    warn(kind.__name__, old, new)
                    kwargs[new] = kwargs.pop(old)
            build(self, *args, **kwargs)

        kind.__init__ = init  # type: ignore[misc]
        return kind

    return decorate


def old_names(module: str, **names: str) -> Callable[[str], Any]:
    """A module's `__getattr__`, for old names of what it has, or of what moved (`"package.module:name"`)."""

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        place, _, new = names[name].rpartition(":")
        warn(module, name, names[name])
        return getattr(import_module(place or module), new)

    return find


class OldModules(MetaPathFinder, Loader):
    """Imports what an old module is now."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in OLD_MODULES else None

    def exec_module(self, module: ModuleType) -> None:
        new = OLD_MODULES[module.__name__]
        warn("import", module.__name__, new)
        sys.modules[module.__name__] = import_module(new)


def find_old_modules() -> None:
    if not any(isinstance(finder, OldModules) for finder in sys.meta_path):
        sys.meta_path.append(OldModules())
