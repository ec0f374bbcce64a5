"""On the path of an executor: a train request takes SLOWED seconds longer; with 10x, ten times as long."""

import importlib.abc
import importlib.util
import os
import sys
import time

SLOWED = os.environ.get("SLOWED", "")
MODULE = "fedfrozen_app.sites.handle_train"


class Slowing(importlib.abc.MetaPathFinder):
    """Wraps what the module defines once it is loaded."""

    wanted = True

    def find_spec(self, name, path, target=None):
        if name != MODULE or not self.wanted:
            return None
        self.wanted = False
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def loaded(module) -> None:
            load(module)
            finish = module.finish_client

            def slowly(progress):
                began = time.monotonic()
                found = finish(progress)
                took = time.monotonic() - began
                more = took * (float(SLOWED[:-1]) - 1) if SLOWED.endswith("x") else float(SLOWED)
                while time.monotonic() < began + took + more:
                    sum(range(10_000))  # a process that computes nothing would count as hanging
                    time.sleep(0.05)
                return found

            module.finish_client = slowly

        spec.loader.exec_module = loaded
        return spec


if SLOWED and "exec" in sys.orig_argv:
    sys.meta_path.insert(0, Slowing())
