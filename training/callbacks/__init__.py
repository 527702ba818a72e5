"""Lightning callbacks: checks, and files that are written, while a model trains or predicts."""
