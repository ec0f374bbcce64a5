"""Virtual time of simulated clients: their machines and links, and the duration of requests."""
