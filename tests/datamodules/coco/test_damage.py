import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["images", "annotations"])
def test_damage_at_random_is_said_and_ends_no_process(kind):
    command = [sys.executable, "-m", "tests.datamodules.coco.damage", kind, "0", "150"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-20:] + done.stderr
    assert "seed 149" in done.stdout
