"""Declaring is enough: an operator of another package goes through the tests of all operators.

And those tests can fail: each of its faulty implementations is caught.
"""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import defaultdict
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SELECTED = "toy_sound or (toy_faulty and not inductor) or package"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, set[str]]]:
    """Installs the package `toy_operators`, runs the tests of all operators over what it declares.

    Outcome -> what was tested -> names of tests.
    """
    site = tmp_path_factory.mktemp("site")
    package = site / "toy_operators-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: toy_operators\nVersion: 1\n")
    (package / "entry_points.txt").write_text(
        "[hoconv.operators]\ngone = gone\ntoy = toy_operators\n"
    )
    path = os.pathsep.join([str(site), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    report = site / "report.xml"
    arguments = ["-q", "-k", SELECTED, "--tb=no", "-p", "no:cacheprovider", f"--junitxml={report}"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", HERE / "test_operators.py", *arguments],
        env={**os.environ, "PYTHONPATH": path},
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr  # some failed, as they should

    outcomes: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for case in ET.parse(report).iter("testcase"):
        name, _, parameters = case.attrib["name"].rstrip("]").partition("[")
        what = "-".join(parameters.split("-")[:3])
        problem = next((child.tag for child in case if child.tag != "properties"), "passed")
        outcomes[problem][what].add(name)
    return outcomes


def test_sound_operator_passes_every_test(outcomes: dict[str, dict[str, set[str]]]) -> None:
    assert {*outcomes} == {"passed", "failure", "skipped"}
    assert not [what for what in outcomes["failure"] if "toy_sound" in what]
    assert len(outcomes["passed"]["toy_sound"]) >= 4
    assert len(outcomes["passed"]["toy_sound-registered-cpu"]) >= 10
    assert not outcomes["skipped"]["toy_sound-registered-cpu"]


def test_reference_beside_faulty_implementations_passes(
    outcomes: dict[str, dict[str, set[str]]],
) -> None:
    assert not outcomes["failure"]["toy_faulty-reference-cpu"]


@pytest.mark.parametrize("broken", ["does_not_compile", "does_not_load"])
def test_what_is_broken_fails_every_test_that_calls_it(
    outcomes: dict[str, dict[str, set[str]]], broken: str
) -> None:
    place = f"toy_faulty-{broken}-cpu"
    assert "test_agrees_with_the_reference" in outcomes["failure"][place]
    assert not outcomes["passed"][place]


def test_what_is_missing_is_skipped(outcomes: dict[str, dict[str, set[str]]]) -> None:
    place = "toy_faulty-is_missing-cpu"
    assert "test_agrees_with_the_reference" in outcomes["skipped"][place]
    assert not outcomes["passed"][place] | outcomes["failure"][place]


def test_package_that_cannot_be_imported_fails_one_test_and_hides_no_other_package(
    outcomes: dict[str, dict[str, set[str]]],
) -> None:
    assert outcomes["failure"][""] == {"test_every_package_of_operators_can_be_imported"}


@pytest.mark.parametrize(
    ("fault", "caught_by"),
    [
        ("wrong_output", "test_agrees_with_the_reference"),
        ("wrong_gradient", "test_agrees_with_the_reference"),
        ("wrong_gradient", "test_gradients_and_their_gradients_agree_with_finite_differences"),
        (
            "wrong_second_gradient",
            "test_gradients_and_their_gradients_agree_with_finite_differences",
        ),
        ("not_a_number", "test_agrees_with_the_reference"),
        ("wrong_dtype", "test_results_have_the_dtype_device_and_shapes_of_the_reference"),
        ("changes_its_input", "test_inputs_are_left_alone"),
        ("never_twice_the_same", "test_two_runs_give_the_same_bits"),
        ("depends_on_threads", "test_any_number_of_threads_gives_the_same_bits"),
        ("untraceable", "test_compiled_equals_eager"),
        ("untraceable", "test_exported_equals_eager"),
        ("fake_with_wrong_shape", "test_torch_library_finds_no_fault"),
        ("fake_with_wrong_shape", "test_meta_tensors_get_the_shape_and_dtype"),
        ("fake_with_wrong_strides", "test_fake_tensors_get_the_real_shape_dtype_and_strides"),
    ],
)
def test_fault_is_caught(
    outcomes: dict[str, dict[str, set[str]]], fault: str, caught_by: str
) -> None:
    assert caught_by in outcomes["failure"][f"toy_faulty-{fault}-cpu"]
