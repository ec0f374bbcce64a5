from tests.models.conftest import logits, tiny
from tests.sites.inprocess import prepared, sites

__all__ = ["logits", "prepared", "sites", "tiny"]  # fixtures
