"""What a client does with each kind of message: train, masking, census. Sites put their policy before it."""
