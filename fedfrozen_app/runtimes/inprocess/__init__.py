"""Where nodes live in this process."""
