"""Generates source code: assigns storage, lowers ops to loops, writes C++ and CUDA."""
