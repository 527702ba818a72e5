"""The networks: images in, logits out; and how words are read off them."""
