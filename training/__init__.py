"""The code of a run: from its configuration to its results."""

import os

# Threads that decode images on a GPU have their own connections to it. The graph of a training step
# takes all 8 of the default, and they would wait until it ends. CUDA reads this when it starts.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
