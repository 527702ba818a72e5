"""The gradient of a program: derivatives of its ops, and what the forward steps save."""
