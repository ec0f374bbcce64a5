"""One run from start to end: the job, preparation, rounds, and outputs."""
