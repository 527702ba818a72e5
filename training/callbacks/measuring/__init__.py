"""What a step costs: its profile, and the shares of its layers."""
