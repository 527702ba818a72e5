"""Messages among processes while they train."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from training import processes
from training.processes import Exchange

EVERY, STEPS, BEGIN = 5, 400, 1000
# Seconds of a step: of each process in turns, slower in the second half.
SECONDS = ((0.001, 0.011), (0.003, 0.007))


class Clock:
    """Takes the place of the time and of a GPU, whose numbers arrive when somebody waits."""

    def __init__(self) -> None:
        self.now, self.waited = 0.0, 0

    def perf_counter(self) -> float:
        return self.now

    def Event(self) -> Any:
        return self

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        self.waited += 1


def train(rank: int, how: Any) -> dict[str, Any]:
    """Exchanges the rank and the step, as on a GPU; returns at which steps, and what was read."""
    clock = Clock()
    with patch.object(processes, "time", clock), patch.object(torch.cuda, "Event", clock.Event):
        exchange = Exchange(how, EVERY, torch.device("cuda"), BEGIN)
        sent, read = [], []
        for step in range(BEGIN + 1, BEGIN + STEPS + 1):
            clock.now += SECONDS[rank][step > BEGIN + STEPS // 2]
            if step % EVERY == 0 and exchange.due(step):
                sent.append(step)
                exchange.send(step, torch.tensor([float(rank), float(step)]), step)
                read += exchange.read(left=exchange.newest)
        read += exchange.read()
    return {"sent": sent, "read": read, "waited": clock.waited}


def run(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    found = {how: train(rank, how) for how in ("mean", "max")}
    (folder / str(rank)).write_text(json.dumps(found))
    dist.destroy_process_group()


def test_an_exchange_is_due_once_a_second() -> None:
    found = train(0, "mean")
    assert found["sent"] == [1275, 1370]  # 200 steps of 1 ms, then 11 ms
    assert found["read"] == [([0.0, float(step)], step) for step in found["sent"]]
    assert found["waited"] == 2


def test_numbers_of_a_cpu_arrive_at_once() -> None:
    exchange = Exchange("mean", EVERY, torch.device("cpu"))
    assert [step for step in range(1, 21) if exchange.due(step)] == [5, 10, 15, 20]
    exchange.send(5, torch.tensor([2.0]), "loss")
    assert list(exchange.read(left=exchange.newest)) == [([2.0], "loss")]


@pytest.mark.slow
def test_processes_exchange_at_the_same_steps(tmp_path: Path) -> None:
    mp.spawn(run, (tmp_path,), nprocs=2)  # pyright: ignore[reportPrivateImportUsage]
    first, second = (json.loads((tmp_path / str(rank)).read_text()) for rank in (0, 1))
    assert first == second
    for how, expected in (("mean", 0.5), ("max", 1.0)):
        sent = first[how]["sent"]
        assert first[how]["read"] == [[[expected, float(step)], step] for step in sent]
        assert sent[:2] == [1005, 1010]  # the first tells how many steps a second has
        assert len(sent) < 10
