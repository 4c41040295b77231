"""Changes to modules of somebody else, made at the moment when they are imported."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from ...log import logger

Work = Callable[[ModuleType], None]


def when_imported(name: str, work: Work) -> None:
    """Change a module: now if it is imported already, else as soon as it is.

    ``work`` is done before anyone else sees the module. Its failure is logged and reaches nobody.
    """
    module = sys.modules.get(name)
    if module is not None:
        _do(work, module)
        return
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    _finder.waiting[name] = work


class _Finder(MetaPathFinder):
    def __init__(self) -> None:
        self.waiting: dict[str, Work] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.waiting:
            return None
        others = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                # Not earlier: who asks for a spec may only want to know whether the module exists.
                work = self.waiting.pop(fullname, None)
                if work is not None:
                    _do(work, module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_finder = _Finder()


def _do(work: Work, module: ModuleType) -> None:
    try:
        work(module)
    except Exception as error:
        logger().error(
            "a part of verl is not traced, since %s is not as verl 0.9.1 has it: %s", module.__name__, error
        )


def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Put a function of a class or module into another one.

    Args:
        make: gives the new function for the old one.

    Raises:
        AttributeError: there is no such function.
    """
    old = vars(owner)[name] if name in vars(owner) else getattr(owner, name)
    setattr(owner, name, functools.wraps(old)(make(old)))
