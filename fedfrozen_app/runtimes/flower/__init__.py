"""Where nodes are Flower's: its processes, its simulation, a deployed federation."""
