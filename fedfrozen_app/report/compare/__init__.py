"""Runs side by side: grouped by everything but the seed, with the statistics that a claim needs."""

from fedfrozen_app.report.compare.collect import collect
from fedfrozen_app.report.compare.model import Comparison

__all__ = ["Comparison", "collect"]
