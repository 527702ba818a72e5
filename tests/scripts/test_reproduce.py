"""scripts/reproduce.py: its commands are ones that exist, and how a run of them goes."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

ROOT = Path(__file__).parents[2]


@pytest.fixture
def reproduce(script, monkeypatch, tmp_path):
    module = script("reproduce")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "RESULTS", tmp_path / "results")
    (tmp_path / "results").mkdir()
    return module


@pytest.fixture
def commands(script) -> list[list[str]]:
    return [shlex.split(step.command) for step in script("reproduce").STEPS.values()]


def test_its_scripts_and_their_commands_exist(commands, script) -> None:
    for words in commands:
        assert all((ROOT / word).exists() for word in words if word.endswith(".py"))
        if words[1] == "scripts/benchmark.py":
            assert words[2] in script("benchmark").COMMANDS


def test_its_runs_can_be_composed(commands) -> None:
    runs = [words[2:] for words in commands if words[1] == "train.py"]
    assert runs
    for overrides in runs:
        with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
            compose("config", overrides)


def test_every_record_has_a_command(script) -> None:
    reproduce = script("reproduce")
    named = [record for step in reproduce.STEPS.values() for record in step.records]
    results = ROOT / "docs" / "results"
    found = {str(path.relative_to(results).with_suffix("")) for path in results.rglob("*.json")}
    assert len(named) == len({*named})
    # A command may still have to be run: --stale lists what it would write.
    kept = ("digits", "mnist_gradients", "mnist_pixels")  # runs, and what compares them
    assert {name for name in found if not name.startswith(kept)} <= {*named}
    measured = {path for step in reproduce.STEPS.values() for path in step.measures}
    assert [path for path in measured if not (ROOT / path).exists()] == []


def test_records_older_than_what_they_measure_are_stale(reproduce, monkeypatch, capfd, tmp_path):
    def commit(name: str) -> str:
        (tmp_path / name).write_text(str(len(list(tmp_path.iterdir()))))
        git("add", name)
        git("-c", "user.name=n", "-c", "user.email=e", "commit", "-qm", name)
        return git("rev-parse", "HEAD").strip()

    def git(*words: str) -> str:
        return subprocess.check_output(["git", *words], cwd=tmp_path, text=True)

    git("init", "-q")
    first, second = commit("kernel"), commit("other")
    records = {
        "none": None, "dirty": f"{second}-dirty", "old": first, "current": second,
        "unrelated": first, "unknown": "0" * 40,
    }  # fmt: skip
    for name, known in records.items():
        contents = {"environment": {"commit": known}}
        (tmp_path / "results" / f"{name}.json").write_text(json.dumps(contents))
    step = reproduce.Step("python -c 1", 1, 0, [*records, "missing"], ["other"])
    monkeypatch.setattr(reproduce, "STEPS", {"measure": step})
    assert reproduce.find_change(tmp_path / "results" / "unrelated.json", ["kernel"]) is None
    assert reproduce.main(["--stale"]) == 0
    out = capfd.readouterr().out
    for line in (
        r"none +│ it names no commit", r"dirty +│ its sources had changes", r"old +│ 1 later",
        r"unknown +│ there is no commit", r"missing +│ there is none",
    ):  # fmt: skip
        assert re.search(line, out), line
    assert "current" not in out


def test_a_command_that_fails_keeps_no_other_from_running(reproduce, monkeypatch, capfd, tmp_path):
    monkeypatch.setattr(
        reproduce,
        "STEPS",
        {
            "fails": reproduce.Step("python -c 'print(\"said\"); raise SystemExit(3)'", 1),
            "hangs": reproduce.Step("python -c 'import signal; signal.pause()'", 0.01),
            "many": reproduce.Step("python -c 1", 1, gpus=99),
            "missing": reproduce.Step("no-such-program", 1),
            "works": reproduce.Step("python -c 1", 1),
        },
    )
    assert reproduce.main(["--logs", str(tmp_path / "logs")]) == 1
    out = capfd.readouterr().out
    for line in (
        "failed with exit code 3", "stopped after 0.01 minutes", "not run: needs 99 GPUs",
        "not run: no-such-program was not found", "done",
    ):  # fmt: skip
        assert line in out
    assert (tmp_path / "logs" / "fails.log").read_text() == "said\n"
    assert reproduce.main(["works", "--logs", str(tmp_path / "logs")]) == 0


def test_an_interrupt_ends_with_what_was_done(reproduce, monkeypatch, capfd, tmp_path) -> None:
    steps = {name: reproduce.Step("python -c 1", 1) for name in ("first", "second", "third")}
    monkeypatch.setattr(reproduce, "STEPS", steps)
    run = reproduce.run

    def interrupted(name, step, logs):
        if name == "second":
            raise KeyboardInterrupt
        return run(name, step, logs)

    monkeypatch.setattr(reproduce, "run", interrupted)
    assert reproduce.main(["--logs", str(tmp_path / "logs")]) == 1
    table = capfd.readouterr().out.rpartition("result")[2]
    assert "done" in table
    assert "interrupted" in table
    assert "third" not in table


def test_a_run_leaves_its_results(reproduce, monkeypatch, tmp_path) -> None:
    (tmp_path / "train.py").write_text(
        "import json, sys, pathlib\n"
        "folder = pathlib.Path(sys.argv[2].removeprefix('hydra.run.dir='))\n"
        "folder.mkdir(parents=True)\n"
        "(folder / 'results.json').write_text(json.dumps(sys.argv[1]))\n"
    )
    monkeypatch.setattr(reproduce, "STEPS", {"run": reproduce.Step("python train.py seed=1", 1)})
    assert reproduce.main(["--logs", str(tmp_path / "logs")]) == 0
    assert json.loads((tmp_path / "results" / "run.json").read_text()) == "seed=1"


def test_an_unknown_name_is_refused_with_those_there_are(reproduce, capsys) -> None:
    with pytest.raises(SystemExit):
        reproduce.main(["sleep"])
    assert "expected some of gpu_tests, check" in capsys.readouterr().err
