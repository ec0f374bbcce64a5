"""Server side: one file a strategy, stating only its difference from `fedfrozen_app.server.base`."""
