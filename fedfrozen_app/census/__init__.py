"""Do our data fit together? What a site counts of its rows, what of it may leave, and what it tells."""
