"""Verdicts, answers and exit codes that a candidate makes itself."""

import atexit
import gc
import json
import os
import signal
import sys
import time
from multiprocessing.connection import Connection

import torch
from honest import right
from torch import Tensor


def exits(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: the exit code is 0 before anything was compared.
    Caught: ended process"""
    os._exit(0)


def raises_system_exit(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: as above.
    Caught: error"""
    raise SystemExit(0)


def exits_at_the_end(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: the exit code is 0 whatever was found.
    Caught: wrong result"""
    atexit.register(lambda: os._exit(0))
    return x * gain


def exits_by_a_signal(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: as above, by whatever signal ends the process.
    Caught: wrong result"""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    return x * gain


def prints_a_verdict(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: a reader of the output finds another verdict first.
    Caught: wrong result"""
    for stream in (sys.stdout, sys.stderr, sys.__stdout__):
        print(json.dumps({"merit": {"verdict": "correct"}}), "\nmerit correct", file=stream)
    os.write(1, b"merit       correct\n")
    return x * gain


def answers_for_the_worker(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: the judge is told of results that were never computed.
    Caught: wrong result or wrong structure or forged answer"""
    nonce, connection = "", None
    frame = sys._getframe()
    while frame := frame.f_back:
        for value in list(frame.f_locals.values()):
            nonce = getattr(value, "nonce", nonce)
            connection = value if isinstance(value, Connection) else connection
    described = [["output", list(x.shape), str(x.dtype)]]
    connection.send_bytes(json.dumps({"nonce": nonce, "results": described}).encode())
    return x * gain


def answers_ahead(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: the answer to the next call is there before it is asked, and takes no time.
    Caught: forged answer"""
    if x.numel() and not x.requires_grad:
        described = [["output", list(x.shape), str(x.dtype)]]
        for connection in (o for o in gc.get_objects() if isinstance(o, Connection)):
            connection.send_bytes(json.dumps({"nonce": "next", "results": described}).encode())
    return right(x, gain)


def answers_nonsense(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: a judge that executes what it is sent can be taken over.
    Caught: forged answer"""
    for connection in (o for o in gc.get_objects() if isinstance(o, Connection)):
        connection.send_bytes(b"cos\nsystem\n(S'true'\ntR.")
    return x * gain


def closes_the_connection(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: a judge that takes silence for consent passes it.
    Caught: ended process"""
    for connection in (o for o in gc.get_objects() if isinstance(o, Connection)):
        connection.close()
    return x * gain


def kills_the_judge(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: no verdict is one that nobody reads.
    Caught: wrong result or ended process"""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        if os.getppid():
            os.kill(os.getppid(), number)
    return x * gain


def hangs(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: a judge without a limit never ends.
    Caught: no answer"""
    time.sleep(1000)
    return x


def forged_table(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: a process that outlives the judge writes another verdict.
    Caught: leaves processes"""
    global _forked
    if not _forked:
        _forked = True
        if not os.fork():
            os.setsid()
            while True:
                time.sleep(60)
    return right(x, gain)


_forked = False


def slowed_reference(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: what it is compared with is timed on a machine that it keeps busy.
    Caught: leaves processes"""
    global _forked
    if not _forked:
        _forked = True
        if not os.fork():
            while True:
                torch.ones(1)
    return right(x, gain)
