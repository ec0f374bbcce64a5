"""Comparison of runs: grouped by everything but the seed, with statistics for claims."""

from fedfrozen_app.report.compare.collect import collect
from fedfrozen_app.report.compare.model import Comparison

__all__ = ["Comparison", "collect"]
