"""Real sites: their kits, the executor that runs there, and the policy that it enforces."""
