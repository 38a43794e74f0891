"""EMC2's Metropolis-Hastings chains in Triton: proposals, walks and the chain itself."""
