"""What kernels of clusters need done to a program: sharing its steps among blocks."""
