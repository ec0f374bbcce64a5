"""GPU kernels and vmap rewrites, independent of models and of federated learning."""
