from tests.sites.inprocess import prepared, sites

__all__ = ["prepared", "sites"]  # fixtures
