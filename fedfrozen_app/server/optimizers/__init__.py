"""Server optimisers, one file each: how a mean update becomes the next model, under any strategy."""
