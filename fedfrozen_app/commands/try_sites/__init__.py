"""`fedfrozen try-sites`: a server and two sites on this machine, from kits to the end of a run."""
