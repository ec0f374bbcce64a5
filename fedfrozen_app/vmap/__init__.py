"""GPU kernels and vmap rewrites. They know no model and no federation."""
