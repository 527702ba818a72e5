"""What leaves the loop, and what returns to it."""
