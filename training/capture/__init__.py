"""Training steps as CUDA graphs, and what of a step a graph cannot repeat."""
