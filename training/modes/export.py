"""``mode=export``: a trained model in a format that other programs read."""

from __future__ import annotations

import importlib.util
import io
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import hoconv
from hoconv import jit
from hoconv.dispatch.exported import compile_operators
from training.configuration.errors import MisconfigurationException
from training.configuration.instantiation import instantiate
from training.disk import replaced
from training.model import build_trained
from training.results.record import Results
from training.results.saved import KEY, Saved

# Largest difference between outputs of what is written and of the model, over the largest output.
TOLERANCE = 1e-5
OPERATORS = "operators"  # the folder of the libraries that a package of AOTInductor needs
Files = dict[str, bytes]  # path in the folder of the run -> contents, in the order of writing


def export(config: DictConfig, run_dir: Path, results: Results, saved: Saved) -> Path:
    """Writes the model of a checkpoint as ``model.<format>`` into the folder of the run; returns
    the path of the checkpoint.

    The formats are ``safetensors``, the weights, with the description of the run, so that
    ``ckpt=`` takes it; ``pt2``, a program of :func:`torch.export.export`, with the implementations
    that ``impl=`` names, on a CPU; ``onnx``, of the reference's operations; and ``aoti``, that
    program as AOTInductor's package for CPUs like this one, which needs no Python, with the shared
    libraries of the operators that it calls in the folder ``operators``. The last two are run, and
    compared with the model. Programs take a batch of any number of inputs, as the model is given
    those of the data's tests: normalised, and of their size.

    Args:
        config: that of the checkpoint, with what the command names.

    Raises:
        MisconfigurationException: the format is unknown or its package is missing, the model has no
            ``forward``, it cannot be exported, or what would be written computes something else.
    """
    if config.format not in FORMATS:
        raise MisconfigurationException(f"format: expected {', '.join(FORMATS)}; got "
                                        f"{config.format!r}")  # fmt: skip
    write, packages = FORMATS[config.format]
    if missing := [each for each in packages if importlib.util.find_spec(each) is None]:
        raise MisconfigurationException(
            f"format={config.format} needs {', '.join(missing)}; pip install 'hoconv[export]'"
        )
    model = build_trained(saved, config).eval()
    files = write(model, config, saved)
    if config.format == "aoti":
        operators = run_dir / OPERATORS
        operators.mkdir(exist_ok=True)  # it may stay empty
        for path in operators.glob("*.so"):  # of another model: an operator is defined once
            if f"{OPERATORS}/{path.name}" not in files:
                path.unlink()
    for name, contents in files.items():
        path = run_dir / name
        path.parent.mkdir(exist_ok=True)
        with replaced(path) as file:
            file.write(contents)
    return saved.path


def _safetensors(model: pl.LightningModule, config: DictConfig, saved: Saved) -> Files:
    from safetensors.torch import save

    # Tensors that share memory, which the format has not, become copies.
    weights = {name: t.detach().clone().contiguous() for name, t in saved.state_dict.items()}
    described = {"format": "pt", KEY: json.dumps(saved.description())}
    return {"model.safetensors": save(weights, described)}


def _pt2(model: pl.LightningModule, config: DictConfig, saved: Saved) -> Files:
    file = io.BytesIO()
    torch.export.save(_trace(model, _inputs(model, config)), file)
    return {"model.pt2": file.getvalue()}


def _aoti(model: pl.LightningModule, config: DictConfig, saved: Saved) -> Files:
    inputs = _inputs(model, config)
    traced = _trace(model, inputs)
    file = io.BytesIO()
    try:
        jit.compiler("cpu")  # its error says what to install
        libraries = compile_operators(traced)
        torch._inductor.aoti_compile_and_package(
            traced,
            package_path=file,
            # Batches of one input pass the checks, too: the program takes them.
            inductor_configs={"aot_inductor.check_lowerbound": False},
        )
    except Exception as error:  # of many kinds: AOTInductor's, and its compiler's
        raise MisconfigurationException(f"format=aoti: {str(error).strip()}") from error
    _require_same("AOTInductor", torch._inductor.aoti_load_package(file)(*inputs), model, inputs)
    operators = {f"{OPERATORS}/{path.name}": path.read_bytes() for path in libraries}
    return {**operators, "model.aoti": file.getvalue()}


def _onnx(model: pl.LightningModule, config: DictConfig, saved: Saved) -> Files:
    hoconv.set_impl(model, "reference")
    inputs = _inputs(model, config)
    traced = _trace(model, inputs)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the exporter's own packages
            program: Any = torch.onnx.export(traced, verbose=False)
    except torch.onnx.OnnxExporterError as error:
        reason: BaseException = error
        while reason.__cause__:
            reason = reason.__cause__
        raise MisconfigurationException(
            f"format=onnx: {type(model).__name__} computes what ONNX cannot: {reason}"
        ) from error
    contents = program.model_proto.SerializeToString()

    import onnxruntime

    session = onnxruntime.InferenceSession(contents, providers=["CPUExecutionProvider"])
    fed = {each.name: t.numpy() for each, t in zip(session.get_inputs(), inputs, strict=True)}
    found = [torch.from_numpy(each) for each in session.run(None, fed)]
    _require_same("ONNX Runtime", found, model, inputs)
    return {"model.onnx": contents}


def _require_same(
    runtime: str, found: Any, model: pl.LightningModule, inputs: tuple[Tensor, ...]
) -> None:
    """Raises where a runtime's outputs are not those of the model."""
    with torch.no_grad():
        expected = tree_leaves(model(*inputs))
    for got, exact in zip(tree_leaves(found), expected, strict=True):
        error = (got - exact).abs().max() / exact.abs().max()
        if not error <= TOLERANCE:
            raise MisconfigurationException(
                f"mode=export: {runtime} differs from the model by {error:.1e}; at most "
                f"{TOLERANCE} is allowed"
            )


def _trace(model: pl.LightningModule, inputs: tuple[Tensor, ...]) -> torch.export.ExportedProgram:
    if any(getattr(module, "quantizer", None) for module in model.modules()):
        raise MisconfigurationException(
            "format: expected safetensors of a model with a multiplier of integers, whose range "
            "PyTorch cannot export for batches of any size"
        )
    batch = torch.export.Dim("batch")
    shapes = tuple({0: batch} for _ in inputs)
    try:
        return torch.export.export(_Forward(model), inputs, dynamic_shapes=(shapes,))
    except Exception as error:  # of many kinds, each of which says what it cannot export
        raise MisconfigurationException(
            f"model: {type(model).__name__} cannot be exported: {str(error).strip()}"
        ) from error


class _Forward(nn.Module):
    """The forward of a LightningModule, without its other attributes."""

    def __init__(self, model: pl.LightningModule) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Tensor) -> Any:
        return self.model(*inputs)


def _inputs(model: pl.LightningModule, config: DictConfig) -> tuple[Tensor, ...]:
    """Returns two inputs of the model in a batch: its ``example_input_array``, or those that the
    data has for tests."""
    if type(model).forward is pl.LightningModule.forward:
        raise MisconfigurationException(
            f"mode=export: a {type(model).__name__} has no forward; define it, or use "
            "format=safetensors"
        )
    if isinstance(model.example_input_array, Tensor):
        return (model.example_input_array,)
    data = instantiate(config.data)
    data.prepare_data()
    data.setup("test")
    batch = next(iter(data.test_dataloader()))
    # As a model is given it: images in memory are bytes until then.
    first, *_ = tree_leaves(data.on_after_batch_transfer(batch, 0))
    return (first[:2],)


# Name -> what returns the files, and the packages that it needs.
Write = Callable[[pl.LightningModule, DictConfig, Saved], Files]
FORMATS: dict[str, tuple[Write, tuple[str, ...]]] = {
    "safetensors": (_safetensors, ("safetensors",)),
    "pt2": (_pt2, ()),
    "aoti": (_aoti, ()),
    "onnx": (_onnx, ("onnx", "onnxruntime", "onnxscript")),
}
