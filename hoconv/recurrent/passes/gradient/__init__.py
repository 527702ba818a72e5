"""The gradient of a program, and what the forward steps save for it."""
