"""Trains a model on a data set: ``python train.py``; ``--help`` shows what can be chosen."""

from __future__ import annotations

import sys
from pathlib import Path

import hydra
from omegaconf import DictConfig

from training.command import run_command

CONF = Path(__file__).resolve().parent / "conf"


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
def main(config: DictConfig) -> float | None:
    """Runs one job, that of a command or one of a sweep; returns what a search improves."""
    from training.run import run_job  # after composition, since it imports all that a job needs

    return run_job(config)


if __name__ == "__main__":
    import train  # the processes that run the jobs of a sweep find it by this name, not __main__

    sys.exit(run_command(train.main))
