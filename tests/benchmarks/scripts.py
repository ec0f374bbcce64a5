"""benchmarks/ is a folder of scripts, not a package: its common module, imported by path."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def load_common() -> ModuleType:
    """benchmarks/ is a folder of scripts, not a package."""
    path = Path(__file__).parents[2] / "benchmarks" / "common.py"
    if str(path.parent) not in sys.path:  # it imports other scripts
        sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location("benchmarks_common", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


common = load_common()
