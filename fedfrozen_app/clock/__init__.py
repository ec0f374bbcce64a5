"""Virtual time of simulated clients: their machines and links, and how long a request takes there."""
