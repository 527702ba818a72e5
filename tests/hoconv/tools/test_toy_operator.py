"""Declaring is enough: an operator of another package goes through the tests of all operators.

And those tests can fail: each of its faulty implementations is caught.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import defaultdict
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
SOUND = "toy_sound or toy_single or toy_pair"
SELECTED = f"{SOUND} or toy_first or toy_surrogate or (toy_faulty and not inductor)"
PAIR_FAULTS = [
    "wrong_second_output",
    "wrong_gradient_of_the_second_output",
    "one_output",
    "second_output_of_another_dtype",
]
# Fault -> what is said of the forms of a call in which it shows.
FORM_FAULTS = {
    "takes_b_for_contiguous": "with ",
    "takes_rows_for_contiguous": "with rows apart",
    "takes_the_gradient_for_contiguous": ", ",
    "differentiates_b_only_with_a": "differentiated: argument 1",
}
# A module built on the operator with two outputs, as the table at the start of a run reads it.
START_UP_TABLE = """
from torch import nn
from hoconv.dispatch.declaration import find, layers, operators
from hoconv.dispatch.implementations import choose
operators()
layer = nn.Identity()
layer.operator, layer.impl = find("toy_pair"), "auto"
for name, layer in layers(nn.Sequential(nn.Identity(), layer)):
    print(name, layer.operator.name, choose(layer.operator, layer.impl, "cpu").name)
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns where the package `toy_operators` is installed, beside one that cannot be
    imported."""
    site = tmp_path_factory.mktemp("site")
    package = site / "toy_operators-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: toy_operators\nVersion: 1\n")
    (package / "entry_points.txt").write_text(
        "[hoconv.operators]\ngone = gone\ntoy = toy_operators\n"
    )
    return site


def python(site: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs Python where the package is installed."""
    before = filter(None, [os.environ.get("PYTHONPATH")])
    path = os.pathsep.join([str(site), str(HERE), str(ROOT), *before])
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": path},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def outcomes(site: Path) -> dict[str, dict[str, set[str]]]:
    """Runs the tests of all operators over those that the package declares.

    Outcome -> what was tested -> names of tests.
    """
    report = site / "report.xml"
    arguments = ["-q", "-k", SELECTED, "--tb=no", "-p", "no:cacheprovider", f"--junitxml={report}"]
    done = python(site, "-m", "pytest", ROOT / "hoconv/tools/testing/test_operators.py", *arguments)
    assert done.returncode == 1, done.stdout + done.stderr  # some failed, as they should

    outcomes: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for case in ET.parse(report).iter("testcase"):
        name, _, parameters = case.attrib["name"].rstrip("]").partition("[")
        what = "-".join(parameters.split("-")[:3])
        problem = next((child.tag for child in case if child.tag != "properties"), "passed")
        outcomes[problem][what].add(name)
    return outcomes


@pytest.mark.slow
@pytest.mark.parametrize("operator", ["toy_sound", "toy_single", "toy_pair"])
def test_sound_operator_passes_every_test(
    outcomes: dict[str, dict[str, set[str]]], operator: str
) -> None:
    assert {*outcomes} == {"passed", "failure", "skipped"}
    assert not [what for what in outcomes["failure"] if operator in what]
    assert len(outcomes["passed"][operator]) >= 4
    assert len(outcomes["passed"][f"{operator}-registered-cpu"]) >= 10
    skipped = {"test_a_penalty_of_gradients_is_right_or_an_error"}
    assert outcomes["skipped"][f"{operator}-registered-cpu"] == skipped


@pytest.mark.slow
def test_a_gradient_that_cannot_be_differentiated_again_has_to_say_so(
    outcomes: dict[str, dict[str, set[str]]],
) -> None:
    name = "test_a_penalty_of_gradients_is_right_or_an_error"
    assert not outcomes["failure"]["toy_first-registered-cpu"]
    assert name in outcomes["passed"]["toy_first-registered-cpu"]
    for impl in ("ignored", "dropped"):
        assert outcomes["failure"][f"toy_first-{impl}-cpu"] == {name}
    assert name in outcomes["skipped"]["toy_sound-registered-cpu"]


@pytest.mark.slow
def test_a_gradient_that_is_no_derivative_is_compared_with_the_definition_alone(
    outcomes: dict[str, dict[str, set[str]]],
) -> None:
    name = "test_gradients_and_their_gradients_agree_with_finite_differences"
    assert name in outcomes["skipped"]["toy_surrogate-same-cpu"]
    assert not outcomes["failure"]["toy_surrogate-same-cpu"]
    assert "test_agrees_with_the_reference" in outcomes["failure"]["toy_surrogate-half-cpu"]
    penalty = {"test_a_penalty_of_gradients_is_right_or_an_error"}
    assert penalty <= outcomes["passed"]["toy_surrogate-same-cpu"]
    assert outcomes["failure"]["toy_surrogate-dropped-cpu"] == penalty


@pytest.mark.slow
def test_a_gradient_unlike_finite_differences_is_named_in_a_line(site: Path) -> None:
    chosen = "toy_faulty", "-k", "finite and (wrong_gradient- or wrong_second_gradient-)"
    done = python(site, "-m", "hoconv.tools.cli", "test", *chosen)
    assert done.returncode == 1, done.stderr
    differs = r"argument [01] \([ab]\): it differs from finite differences by up to .*;"
    for line in (
        rf"toy_faulty wrong_gradient cpu: small: gradient of {differs} .*surrogate_gradient=True",
        rf"toy_faulty wrong_second_gradient cpu: small: second gradient of {differs} .*first_order",
    ):
        assert re.search(f"^{line}", done.stdout, re.MULTILINE), done.stdout
    assert "numerical" not in done.stdout
    assert ".py" not in done.stdout.replace("test_operators.py", "")


@pytest.mark.slow
def test_what_is_wrong_is_said_in_words_rather_than_in_code(site: Path) -> None:
    chosen = "toy_faulty", "-k", "agrees_with_the_reference and wrong_gradient-cpu-float32"
    done = python(site, "-m", "hoconv.tools.cli", "test", *chosen)
    assert done.returncode == 1, done.stderr
    said = r"^small: gradient of argument 0: relative error \d"
    assert re.search(said, done.stdout, re.MULTILINE), done.stdout
    assert "def test_" not in done.stdout
    done = python(site, "-m", "hoconv.tools.cli", "test", "--tb=short", *chosen)
    assert "assert not failed" in done.stdout


@pytest.mark.slow
def test_an_operator_that_refuses_the_dtype_of_autocast_is_told_what_to_do(site: Path) -> None:
    done = python(site, "-m", "hoconv.tools.cli", "test", "toy_one_dtype", "-k", "autocast")
    assert done.returncode == 1, done.stderr
    said = r"^toy_one_dtype-same-cpu: under autocast .* got torch.bfloat16; .* convert tensors to a"
    assert re.search(said, done.stdout, re.MULTILINE), done.stdout


def test_check_compares_each_output_and_other_forms_of_a_call(site: Path) -> None:
    path = site / "check.json"
    selected = "toy_pair", "toy_faulty_pair", "toy_faulty"
    done = python(
        site, "-m", "hoconv.tools.check", "--device", "cpu", "--operator", *selected, "--json", path
    )
    assert done.returncode == 1, done.stderr
    found = {(r["operator"], r["impl"]): r for r in json.loads(path.read_text())["rows"]}
    assert found["toy_pair", "registered"]["cases"] == 3
    failed = {impl for (name, impl), row in found.items() if "pair" in name and row["failures"]}
    assert failed == {*PAIR_FAULTS}
    for fault, form in FORM_FAULTS.items():
        assert all(form in line for line in found["toy_faulty", fault]["failures"])
        assert found["toy_faulty", fault]["failures"]
    assert "output[1]: error" in found["toy_faulty_pair", PAIR_FAULTS[0]]["failures"][0]
    assert not found["toy_faulty_pair", "second_output_never_the_same"]["same_bits"]


@pytest.mark.slow
def test_benchmark_times_a_call_with_two_outputs(site: Path) -> None:
    options = "--device", "cpu", "--operator", "toy_pair", "--quick", "--out", str(site)
    done = python(site, "-m", "hoconv.tools.benchmarking.command", *options)
    assert done.returncode == 0, done.stderr  # the package that cannot be imported is another
    rows = json.loads((site / "op_toy_pair_cpu_float32.json").read_text())["rows"]
    assert {row["contender"] for row in rows} >= {"reference", "again", "registered"}
    for row in rows:
        assert row["error"] is None
        # 4 x 16 elements of both outputs and both gradients
        assert row["least_memory_bytes"] == 4 * 4 * 4 * 16


@pytest.mark.slow
def test_doctor_and_the_start_up_table_name_an_operator_with_two_outputs(site: Path) -> None:
    assert re.search(r"toy_pair +cpu: registered", python(site, "-m", "hoconv.tools.doctor").stdout)
    done = python(site, "-c", START_UP_TABLE)
    assert done.stdout == "1 toy_pair registered\n", done.stderr


@pytest.mark.slow
def test_reference_beside_faulty_implementations_passes(
    outcomes: dict[str, dict[str, set[str]]],
) -> None:
    assert not outcomes["failure"]["toy_faulty-reference-cpu"]


@pytest.mark.slow
@pytest.mark.parametrize("broken", ["does_not_compile", "does_not_load"])
def test_what_is_broken_fails_every_test_that_calls_it(
    outcomes: dict[str, dict[str, set[str]]], broken: str
) -> None:
    variant = f"toy_faulty-{broken}-cpu"
    assert "test_agrees_with_the_reference" in outcomes["failure"][variant]
    assert not outcomes["passed"][variant]


@pytest.mark.slow
def test_what_is_missing_is_skipped(outcomes: dict[str, dict[str, set[str]]]) -> None:
    variant = "toy_faulty-is_missing-cpu"
    assert "test_agrees_with_the_reference" in outcomes["skipped"][variant]
    assert not outcomes["passed"][variant] | outcomes["failure"][variant]


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
        *((fault, "test_other_forms_of_a_call_agree_with_the_reference") for fault in FORM_FAULTS),
        (
            "takes_b_for_an_a",
            "test_an_argument_unlike_the_others_is_refused_or_read_as_it_is",
        ),
        ("changes_its_input", "test_inputs_are_left_alone"),
        ("never_twice_the_same", "test_two_runs_give_the_same_bits"),
        ("depends_on_threads", "test_any_number_of_threads_gives_the_same_bits"),
        ("untraceable", "test_compiled_equals_eager"),
        ("untraceable", "test_exported_equals_eager"),
        ("fake_with_wrong_shape", "test_torch_library_finds_no_fault"),
        ("fake_with_wrong_shape", "test_meta_tensors_get_the_shape_and_dtype"),
        ("wrong_rule_for_vmap", "test_vmap_gives_what_the_calls_give_one_by_one"),
        ("fake_with_wrong_strides", "test_fake_tensors_get_the_real_shape_dtype_and_strides"),
    ],
)
@pytest.mark.slow
def test_fault_is_caught(
    outcomes: dict[str, dict[str, set[str]]], fault: str, caught_by: str
) -> None:
    assert caught_by in outcomes["failure"][f"toy_faulty-{fault}-cpu"]


@pytest.mark.parametrize(
    ("fault", "caught_by"),
    [
        *((fault, "test_agrees_with_the_reference") for fault in PAIR_FAULTS),
        ("second_output_never_the_same", "test_two_runs_give_the_same_bits"),
        (
            "second_output_of_another_dtype",
            "test_results_have_the_dtype_device_and_shapes_of_the_reference",
        ),
    ],
)
@pytest.mark.slow
def test_fault_in_one_of_two_outputs_is_caught(
    outcomes: dict[str, dict[str, set[str]]], fault: str, caught_by: str
) -> None:
    assert caught_by in outcomes["failure"][f"toy_faulty_pair-{fault}-cpu"]
