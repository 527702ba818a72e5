"""The cost of a step: its profile, and the shares of its layers."""
