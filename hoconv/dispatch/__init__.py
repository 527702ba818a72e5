"""The parts that all operators share: declarations, implementations, registration."""
