"""Networks from images to logits, and beam search over the words of a captioner."""
