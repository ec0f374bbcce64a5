"""The parts of Opacus that we use, without the handler that its import adds to the root logger."""

import logging

_root = logging.getLogger()
_handlers, _level = list(_root.handlers), _root.level

from opacus.accountants import PRVAccountant, RDPAccountant  # noqa: E402
from opacus.accountants.analysis.prv import (  # noqa: E402
    Domain,
    PoissonSubsampledGaussianPRV,
    TruncatedPrivacyRandomVariable,
    compose_heterogeneous,
    discretize,
)
from opacus.accountants.analysis.rdp import compute_rdp, get_privacy_spent  # noqa: E402
from opacus.grad_sample import GradSampleHooksFastGradientClipping  # noqa: E402
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping  # noqa: E402

_root.handlers[:] = _handlers
_root.setLevel(_level)

__all__ = [
    "DPOptimizer",
    "DPOptimizerFastGradientClipping",
    "Domain",
    "GradSampleHooksFastGradientClipping",
    "PRVAccountant",
    "PoissonSubsampledGaussianPRV",
    "RDPAccountant",
    "TruncatedPrivacyRandomVariable",
    "compose_heterogeneous",
    "compute_rdp",
    "discretize",
    "get_privacy_spent",
]
