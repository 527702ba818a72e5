"""The whole high-order layer, the generator's convolution and its application, as one operator."""
