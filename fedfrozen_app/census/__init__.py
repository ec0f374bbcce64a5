"""Census: a site counts its rows, and releases only counts that protect its people."""
