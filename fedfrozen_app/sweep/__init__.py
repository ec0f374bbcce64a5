"""Many runs by one command: complete runs are kept; a failed run is reported and stops no other run."""
