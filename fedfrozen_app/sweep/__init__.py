"""Many runs by one command: what is complete is kept; what fails is reported and stops no other run."""
