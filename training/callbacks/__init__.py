"""What watches over a run, step by step, and writes what it sees."""
