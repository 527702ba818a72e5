"""The code of a run: from its configuration to its results."""

import os

from lightning_utilities.core.rank_zero import rank_zero_only

# Threads that decode images on a GPU have their own connections to it. The graph of a training step
# takes all 8 of the default, and they would wait until it ends. CUDA reads this when it starts.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

# As Lightning sets it, which is imported later.
RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")
rank_zero_only.rank = getattr(  # pyright: ignore[reportFunctionMemberAccess]
    rank_zero_only, "rank", next((int(os.environ[name]) for name in RANKS if name in os.environ), 0)
)
