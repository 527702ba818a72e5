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
from training.configuration.errors import MisconfigurationException
from training.configuration.instantiation import instantiate
from training.disk import replaced
from training.model import build_trained
from training.results.record import Results
from training.results.saved import KEY, Saved

# Largest difference between the outputs of an ONNX model and of the model, over the largest output.
ONNX_TOLERANCE = 1e-5


def export(config: DictConfig, run_dir: Path, results: Results, saved: Saved) -> Path:
    """Writes the model of a checkpoint as ``model.<format>`` into the folder of the run; returns
    the path of the checkpoint.

    The formats are ``safetensors``, the weights, with the description of the run, so that
    ``ckpt=`` takes it; ``pt2``, a program of :func:`torch.export.export`, with the implementations
    that ``impl=`` names, on a CPU; and ``onnx``, of the reference's operations, compared with the
    model by ONNX Runtime. Programs take a batch of any number of inputs, as the model is given
    those of the data's tests: normalised, and of their size.

    Args:
        config: that of the checkpoint, with what the command names.

    Raises:
        MisconfigurationException: the format is unknown or its package is missing, the model has no
            ``forward``, it cannot be exported, or an ONNX model computes something else.
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
    contents = write(model, config, saved)
    with replaced(run_dir / f"model.{config.format}") as file:
        file.write(contents)
    return saved.path


def _safetensors(model: pl.LightningModule, config: DictConfig, saved: Saved) -> bytes:
    from safetensors.torch import save

    # Tensors that share memory, which the format has not, become copies.
    weights = {name: t.detach().clone().contiguous() for name, t in saved.state_dict.items()}
    return save(weights, {"format": "pt", KEY: json.dumps(saved.description())})


def _pt2(model: pl.LightningModule, config: DictConfig, saved: Saved) -> bytes:
    file = io.BytesIO()
    torch.export.save(_trace(model, _inputs(model, config)), file)
    return file.getvalue()


def _onnx(model: pl.LightningModule, config: DictConfig, saved: Saved) -> bytes:
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
    with torch.no_grad():
        expected = tree_leaves(model(*inputs))
    for got, exact in zip(session.run(None, fed), expected, strict=True):
        error = (torch.from_numpy(got) - exact).abs().max() / exact.abs().max()
        if not error <= ONNX_TOLERANCE:
            raise MisconfigurationException(
                f"format=onnx: ONNX Runtime differs from the model by {error:.1e}; at most "
                f"{ONNX_TOLERANCE} is allowed"
            )
    return contents


def _trace(model: pl.LightningModule, inputs: tuple[Tensor, ...]) -> torch.export.ExportedProgram:
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


# Name -> what returns the contents of the file, and the packages that it needs.
Write = Callable[[pl.LightningModule, DictConfig, Saved], bytes]
FORMATS: dict[str, tuple[Write, tuple[str, ...]]] = {
    "safetensors": (_safetensors, ("safetensors",)),
    "pt2": (_pt2, ()),
    "onnx": (_onnx, ("onnx", "onnxruntime", "onnxscript")),
}
