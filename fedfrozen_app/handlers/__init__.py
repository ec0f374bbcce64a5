"""A client's handlers for each kind of message: train, masking, census. Sites check their policy first."""
