"""Many runs by one command: what is complete is kept, what fails is told and takes no other with it."""
