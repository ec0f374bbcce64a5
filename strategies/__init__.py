"""Server side: one file per strategy, with only its difference from `fedfrozen_app.server.base`."""
