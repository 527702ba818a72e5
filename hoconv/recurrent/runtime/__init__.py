"""Runs programs: op by op in PyTorch, or as compiled loops on the CPU and on GPUs."""
