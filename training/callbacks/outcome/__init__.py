"""What a fit can do, which of its losses are no numbers, and why it ended."""
