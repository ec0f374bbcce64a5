"""One run from its first line to its last: the job, how it begins, its rounds, and what it leaves."""
