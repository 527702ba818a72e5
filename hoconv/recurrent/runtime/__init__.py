"""What runs a program: op by op, or as compiled loops on the CPU and on GPUs."""
