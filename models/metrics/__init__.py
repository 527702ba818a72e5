"""Scores of pixels, boxes and captions. A score of nothing is NaN, and so is never the best."""
