"""README and docs: links lead to files and headings, and records name the command beside them."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torchvision

import hoconv
from hoconv.jit import compilers

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")])


def headings(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).lower().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)]+)\)", text):
        path, _, heading = link.partition("#")
        target = page.parent / path if path else page
        if path.startswith("http"):
            continue
        if not target.exists() or (heading and heading not in headings(target)):
            broken.append(link)
    assert broken == []


def test_options_of_training_commands_come_before_overrides() -> None:
    """As argparse wants it: else the overrides behind an option are unrecognized arguments."""
    for page in [*PAGES, *ROOT.glob("hoconv/tools/template/*.md")]:
        for command in re.findall(r"^python train\.py .*", page.read_text(), re.MULTILINE):
            assert not re.search(r" [^- ]\S*=\S+ -m ", command), f"{page}: {command}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_command_beside_a_record_is_the_one_that_wrote_it(page: Path) -> None:
    for links, command in re.findall(
        r"\(((?:\[\w+\]\([^)]+\.json\),\s)+)by\s+`([^`]+)`", page.read_text()
    ):
        for link in re.findall(r"\(([^)]+)\)", links):
            recorded = json.loads((page.parent / link).read_text())["command"]
            assert re.sub(r" --out \S+", "", recorded) == " ".join(command.split()), link


# Pages whose code no other test runs -> the names that it reads.
CODE = {
    "README.md": {},
    "docs/internals/high_order.md": {"hoconv": hoconv, "torch": torch},
    "docs/use/dynamic_conv1d.md": {
        "hoconv": hoconv, "batch": 2, "beams": torch.tensor([1, 1, 0]),
        "prompt": torch.randn(2, 512, 5), "token": torch.randn(2, 512),
    },
}  # fmt: skip


@pytest.mark.parametrize("page", CODE)
def test_its_code_runs(page: str) -> None:
    scope = dict(CODE[page])
    for code in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL):
        exec(compile(code, page, "exec"), scope)


C_FUNCTION = """// PDK45_PWR = 0.425 mW
// WCE = 0
#include <stdint.h>
int16_t mul8s(int8_t a, int8_t b) { return a * b; }
"""


def _integers(*shape: int) -> torch.Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8)


def _product_of_bfloat16(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    def keep(t: torch.Tensor) -> torch.Tensor:
        return (t.view(torch.int32) & ~0xFFFF).view(torch.float32)

    return keep(keep(a) * keep(b))


@pytest.mark.skipif(compilers.obstacle("cpu") is not None, reason="no C++ compiler")
def test_the_code_about_multipliers_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("mul8s", "mul8s_1KV6"):
        Path(f"{name}.c").write_text(C_FUNCTION.replace("mul8s", name))
    Path("mul7u.c").write_text((ROOT / "docs/use/mul7u_truncated.c").read_text())
    products = [a * b for a in range(-128, 128) for b in range(-128, 128)]
    Path("multiplier.txt").write_text("\n".join(map(str, products)))
    a, b = torch.randn(4, 4), torch.randn(4, 4)
    tables = {"a": _integers(2, 5, 4), "b": _integers(2, 4, 3)}
    derivatives = {"of_a": torch.randn(128, 128), "of_b": torch.randn(128, 128)}
    network = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3, 32), torch.nn.Flatten())
    scope: dict[str, Any] = {
        "torch": torch, "torchvision": torchvision, "hoconv": hoconv, "model": network,
        "batches": torch.randn(2, 1, 3, 64, 64), "x": torch.randn(1, 2, 9, 9),
        "weight": torch.randn(4, 2, 3, 3), "my_product_of_floats": _product_of_bfloat16,
    }  # fmt: skip
    page = "docs/use/approx.md"
    for code in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL):
        scope |= tables if "table_matmul" in code else {"a": a, "b": b, **derivatives}
        exec(compile(code, page, "exec"), scope)


@pytest.mark.parametrize(
    "module", ["hoconv", "hoconv.approx", "hoconv.lightning", "hoconv.recurrent"]
)
def test_the_reference_has_every_public_name(module: str) -> None:
    text = "\n".join(page.read_text() for page in (ROOT / "docs/reference").glob("*.md"))
    room = importlib.import_module(module)
    public = {name for name in room.__dir__() if not name.startswith("_")}
    missing = {
        name
        for name in public
        if not re.search(rf"(::: {module}\.|`){name}\b", text)
        and not isinstance(getattr(room, name), ModuleType)
    }
    assert missing == set()


# Measured before a record had to name a clean commit: each is to be measured again, and none added.
OLDER = {
    "approx_cuda", "coco/table_cuda", "coco_captions_overfit", "coco_detection_overfit",
    "coco_segmentation_overfit", "digits", "images_cuda", "loading_cpu", "loading_cuda",
    "mnist/table_cuda", "mnist_mbm_exact", "mnist_mbm_mbm16",
    "profile_cuda", "recurrent_cells_cuda", "recurrent_directions_cuda", "recurrent_ladder_cuda",
    "recurrent_latency_cuda", "recurrent_lengths_cuda",
    "recurrent_library_cuda", "scaling_cuda", "step_cuda", "table_cpu", "table_cuda",
    "throughput_cuda",
}  # fmt: skip


def test_a_quoted_record_names_the_commit_that_it_measured() -> None:
    unnamed = set()
    for page in PAGES:
        for link in re.findall(r"\]\(([^)]+results/[^)]+)\.(?:json|png)\)", page.read_text()):
            record = (page.parent / link).resolve().with_suffix(".json")
            contents = json.loads(record.read_text()) if record.exists() else {}
            contents = contents if isinstance(contents, dict) else {}
            known = contents.get("environment", {})
            commit = contents.get("commit") or known.get("commit") or ""
            if not re.fullmatch("[0-9a-f]{40}", commit):
                unnamed.add(str(record.relative_to(ROOT / "docs/results").with_suffix("")))
    assert unnamed == OLDER
