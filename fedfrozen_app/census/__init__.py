"""Do our data fit together? What a site counts of its rows, and what of it may leave."""
