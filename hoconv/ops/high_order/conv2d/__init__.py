"""The high-order convolution: every pixel has a kernel of its own."""
