"""Federated training of Transformers with one named plan per round, on Flower."""

import os

from fedfrozen_app.core.deprecated import find_old_modules

# Read when torch loads its thread pool. Waiting threads that spin cost a busy machine minutes a round.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
find_old_modules()
