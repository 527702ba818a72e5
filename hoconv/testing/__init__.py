"""What checks a layer: random cells, and cases that compare them with their definitions."""
