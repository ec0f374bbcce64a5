"""Where clients live: in this process, in Flower's simulation, or on real sites."""
