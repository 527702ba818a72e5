import subprocess
import sys
import warnings

import numpy as np
import pytest

from datamodules.coco.datamodule import TASKS
from tests.datamodules.coco import damage


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["images", "annotations", "folders"])
def test_damage_at_random_is_said_and_ends_no_process(kind):
    command = [sys.executable, "-m", "tests.datamodules.coco.damage", kind, "0", "150"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-20:] + done.stderr
    assert "seed 149" in done.stdout


def test_folders_with_damage_are_read_or_refused_in_a_line(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they count what is left out
        said = [damage.read_folder(np.random.default_rng(seed), tmp_path) for seed in range(80)]
    assert sum(each == " | ".join(["read"] * len(TASKS)) for each in said) > 20
    assert len(set(said)) > 10
