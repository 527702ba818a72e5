"""Writes loops for clusters of blocks, which keep the weights on the chip for all steps."""
