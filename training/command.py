"""A command: its line is checked and composed before what its jobs need is imported."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from training import console
from training.configuration.errors import MisconfigurationException
from training.configuration.folders import check_files, own_folders
from training.configuration.names import check_names, is_override
from training.configuration.resolvers import ROOT, register
from training.start.merging import complete

# Options of Hydra's with which the overrides are not those of conf/config.yaml.
OTHER_CONFIGURATION = {"--config-name", "-cn", "--config-path", "-cp", "--shell-completion", "-sc"}
NEEDED = ("data", "model", "trainer")  # groups that no run can do without
SEVERAL = ("callbacks", "logger")  # groups of which several options can be chosen

register()  # here, since a process that runs one job of a sweep imports nothing before this

failed_jobs: list[Path] = []  # of this process; a sweep goes on after them


def run_command(main: Callable[[], Any]) -> int:
    """Runs the command in ``sys.argv``; returns the exit code: 1 where a job failed.

    Args:
        main: of train.py, which Hydra gives each job's configuration.
    """
    failed_jobs.clear()
    console.take_any_text()
    try:
        sys.argv[1:] = check_command(sys.argv[1:], ROOT / "conf")
    except MisconfigurationException as error:
        console.show_problem("Error", str(error))
        return 1
    main()
    return 1 if failed_jobs else 0


def check_command(arguments: Sequence[str], conf: Path) -> list[str]:
    """Checks a command line, and the files of its own folders of configuration (``--config-dir``);
    returns it as Hydra needs it.

    Args:
        conf: the folder of the configuration, which has a folder for each group.

    Raises:
        MisconfigurationException: a file is not YAML, or would never be read; the checkpoint whose
            configuration the command uses cannot be read; or an override sets
            a key that does not exist, or chooses what a group does not have. The message says what
            to write instead.
    """
    own = own_folders(arguments)
    other = OTHER_CONFIGURATION.intersection(each.partition("=")[0] for each in arguments)
    if not other:
        check_files(conf, own)
    for argument in arguments:
        name, equals, value = argument.partition("=")
        name = name.lstrip("+~")
        if argument.startswith("~") and name in NEEDED:
            raise MisconfigurationException(
                f"~{name}: every run needs one; {name}=... chooses another"
            )
        folders = [folder / name for folder in (conf, *own) if (folder / name).is_dir()]
        if not equals or not folders or name.startswith("-"):
            continue
        options = sorted({path.stem for folder in folders for path in folder.glob("*.yaml")})
        if value in ("", "null"):
            fix = f"leave it out, or choose one of {', '.join(options)}"
            fix = f"write {name}=none" if "none" in options else fix
            raise MisconfigurationException(f"{name}: null is none of its options; {fix}")
        if value.startswith("[") and name not in SEVERAL:
            fix = f"-m {name}={value.strip('[]')} runs each"
            raise MisconfigurationException(
                f"{name}: expected one of its options, got {value}; {fix}"
            )
        simple = re.fullmatch(r"\[?\w+(,\w+)*\]?", value)  # one or several, not an interpolation
        for chosen in re.findall(r"\w+", value) if simple else ():
            if chosen not in options and not other:
                named = [
                    each for each in options if each != "none"
                ]  # "choose none" reads as advice
                close = difflib.get_close_matches(chosen, named, 1) or options
                raise MisconfigurationException(
                    f"{name}: there is no {chosen!r}; choose {', '.join(close)}"
                )
    if other:
        return [*arguments]
    completed = complete(arguments, (conf, *own))
    check_names(filter(is_override, completed), conf, own)
    return completed
