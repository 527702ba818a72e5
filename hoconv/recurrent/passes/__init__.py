"""The compiler's passes: each a function from a program to a program, one a file."""
