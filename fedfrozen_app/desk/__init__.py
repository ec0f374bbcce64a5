"""The data steward's page, `fedfrozen site desk`: what `fedfrozen site` does, in a browser."""
