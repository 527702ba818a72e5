"""rnn.RNN, rnn.LSTM and rnn.GRU against torch.nn and against loops written out."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.utils.checkpoint import checkpoint

from hoconv import recurrent as rnn
from hoconv.recurrent import cells
from hoconv.recurrent.operator import OPERATOR
from tests.hoconv.recurrent.support import READY, gradients, layer, sequence


def pair(kind: str, *sizes: int, **options: Any) -> tuple[nn.Module, nn.Module]:
    """Ours and PyTorch's, of one state dict."""
    theirs = getattr(nn, kind)(*sizes, dtype=torch.float64, **options)
    ours = getattr(rnn, kind)(*sizes, dtype=torch.float64, impl="reference", **options)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def same(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_exactly_the_state_dict_of_pytorch_is_taken() -> None:
    theirs = nn.LSTM(3, 4).state_dict()
    before = dict(theirs)
    rnn.LSTM(3, 4).load_state_dict(theirs)
    assert theirs.keys() == before.keys()
    with pytest.raises(RuntimeError, match="Missing key"):
        rnn.LSTM(3, 4, 2).load_state_dict(theirs)
    with pytest.raises(RuntimeError, match="size mismatch"):
        rnn.LSTM(3, 5).load_state_dict(theirs)
    for missing in ("weight_hh_l0", "bias_ih_l0"):
        part = {name: value for name, value in theirs.items() if name != missing}
        with pytest.raises(RuntimeError, match="Missing key"):
            rnn.LSTM(3, 4).load_state_dict(part)
    with pytest.raises(RuntimeError, match="Missing key"):
        rnn.LSTM(3, 1).load_state_dict(nn.GRU(3, 1).state_dict())
    ours = nn.Sequential(rnn.LSTM(3, 4))
    ours.load_state_dict(nn.Sequential(nn.LSTM(3, 4)).state_dict())


@given(
    kind=st.sampled_from(["LSTM", "GRU"]),
    T=st.integers(1, 5),
    B=st.integers(1, 4),
    sizes=st.tuples(st.integers(1, 5), st.integers(2, 5), st.integers(1, 3)),
    options=st.fixed_dictionaries(
        {"bidirectional": st.booleans(), "bias": st.booleans(), "batch_first": st.booleans()}
    ),
)
def test_equals_pytorch(
    kind: str, T: int, B: int, sizes: tuple[int, int, int], options: dict[str, bool]
) -> None:
    ours, theirs = pair(kind, *sizes, **options)
    x = sequence(*((B, T) if options["batch_first"] else (T, B)), sizes[0])
    same(ours(x), theirs(x))


@pytest.mark.parametrize(("kind", "states"), [("LSTM", 2), ("GRU", 1)])
@pytest.mark.parametrize("enforce_sorted", [True, False])
def test_equals_pytorch_packed_with_two_layers_and_directions(
    kind: str, states: int, enforce_sorted: bool
) -> None:
    ours, theirs = pair(kind, 3, 4, 2, bidirectional=True)
    lengths = [6, 4, 4, 1] if enforce_sorted else [4, 1, 6, 4]
    packed = pack_padded_sequence(sequence(6, 4, 3), lengths, enforce_sorted=enforce_sorted)
    drawn = [sequence(4, 4, 4) for _ in range(states)]
    initial = tuple(drawn) if states > 1 else drawn[0]
    same(ours(packed, initial), theirs(packed, initial))


def test_projections_equal_pytorch() -> None:
    ours, theirs = pair("LSTM", 3, 5, 2, bidirectional=True, proj_size=2)
    x = sequence()
    same(ours(x), theirs(x))
    output, (h, c) = ours(x)
    assert (output.shape[-1], h.shape[-1], c.shape[-1]) == (4, 2, 5)


def test_one_sequence_needs_no_batch() -> None:
    ours, theirs = pair("LSTM", 3, 4, 2, bidirectional=True)
    x, state = sequence(5, 3), (sequence(4, 4), sequence(4, 4))
    same(ours(x), theirs(x))
    same(ours(x, state), theirs(x, state))


def test_gradients_equal_pytorch() -> None:
    ours, theirs = pair("GRU", 3, 4)
    x, state = sequence(), sequence(1, 2, 4)
    mine, others = gradients(ours, x, state), gradients(theirs, x, state)
    same(mine[:3], others[:3])


@pytest.mark.parametrize("name", READY)
def test_gradients_agree_with_finite_differences(name: str) -> None:
    made = layer(name, bidirectional=True)
    x = sequence(3, 2, 3).requires_grad_()
    states = tuple(sequence(2, 2, n).requires_grad_() for n in made.runs[0][0].state_sizes.values())

    def function(x: Tensor, *tensors: Tensor) -> Any:
        given: Any = tensors[: len(states)]
        parameters = dict(zip(dict(made.named_parameters()), tensors[len(states) :]))
        arguments = (x, given if len(given) > 1 else given[0], [3, 2])
        return torch.func.functional_call(made, parameters, arguments)[0]

    inputs = (x, *states, *made.parameters())
    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


@pytest.mark.parametrize("name", READY)
def test_lengths_are_as_sequences_one_by_one(name: str) -> None:
    made = layer(name, num_layers=2, bidirectional=True)
    x, lengths = sequence(6, 4, 3), [3, 6, 1, 5]
    output, state = made(x, lengths=lengths)
    states = state if isinstance(state, tuple) else (state,)
    for b, n in enumerate(lengths):
        alone, final = made(x[:n, b])
        same(output[:n, b], alone)
        assert not output[n:, b].any()
        finals = final if isinstance(final, tuple) else (final,)
        same([s[:, b] for s in states], list(finals))
    same(made(x, lengths=torch.tensor(lengths)), (output, state))


def test_lengths_of_any_default_device_and_of_an_empty_batch() -> None:
    made, x = layer("lstm"), sequence(5, 2, 3)
    expected = made(x, lengths=torch.tensor([2, 5]))
    with torch.device("meta"):
        same(made(x, lengths=[2, 5]), expected)
        with pytest.raises(ValueError, match="expected 1 to the 5 steps"):
            made(x, lengths=[2, 6])
    assert made(x[:, :0], lengths=[])[0].shape == (5, 0, expected[0].shape[2])
    with pytest.raises(ValueError, match="expected 2 ints"):
        made(x, lengths=torch.ones(2, dtype=torch.complex64))


def test_packed_sequences_give_what_lengths_give() -> None:
    made = layer("coupled_lstm", bidirectional=True)
    x, lengths = sequence(6, 3, 3), [3, 6, 2]
    packed, state = made(pack_padded_sequence(x, lengths, enforce_sorted=False))
    assert isinstance(packed, PackedSequence)
    output, expected = made(x, lengths=lengths)
    same(nn.utils.rnn.pad_packed_sequence(packed)[0], output)
    same(state, expected)


def test_detached_states_cut_the_gradient() -> None:
    made = layer("gru")
    x = sequence(6, 2, 3).requires_grad_()
    whole = made(x)
    first, state = made(x[:3])
    second, last = made(x[3:], state)
    same((torch.cat((first, second)), last), whole)
    same(torch.autograd.grad(last.sum(), x, retain_graph=True)[0][:3].any(), torch.tensor(True))
    _, last = made(x[3:], state.detach())
    assert not torch.autograd.grad(last.sum(), x)[0][:3].any()


@rnn.cell(state=("h",))
def noisy(x: Any, h: Any, *, p: float = 0.5) -> Any:
    new = rnn.tanh(rnn.linear("i", rnn.dropout(x, p), rnn.dropout(h, p)))
    h = rnn.zoneout(new, h, p)
    return h, dict(h=h)


def test_noise_is_in_training_only_and_repeats_with_the_seed() -> None:
    made = rnn.RNN(noisy, 3, 8, impl="reference")
    x = torch.randn(5, 2, 3)
    outputs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outputs.append(made(x)[0])
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])
    made.eval()
    assert torch.equal(made(x)[0], made(x)[0])
    quiet = rnn.RNN(noisy, 3, 8, p=0.0, impl="reference")
    quiet.load_state_dict(made.state_dict())
    assert torch.equal(quiet(x)[0], quiet.eval()(x)[0])


@pytest.mark.parametrize(("p", "draws"), [(0.5, True), (0.0, False)])
def test_only_cells_with_noise_draw_random_numbers(p: float, draws: bool) -> None:
    made = rnn.RNN(noisy, 3, 8, p=p, impl="reference")
    before = torch.get_rng_state()
    made(torch.zeros(2, 1, 3))
    assert torch.equal(before, torch.get_rng_state()) is not draws


def test_dropout_is_between_layers_and_in_training_only() -> None:
    made = rnn.LSTM(3, 4, 2, dropout=1.0, impl="reference")
    still = rnn.LSTM(3, 4, 2, impl="reference")
    still.load_state_dict(made.state_dict())
    x = torch.randn(5, 2, 3)
    first = made(x)[1][0]
    torch.testing.assert_close(first[0], still(x)[1][0][0])
    assert not torch.allclose(first[1], still(x)[1][0][1])
    torch.testing.assert_close(made.eval()(x), still(x))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
@pytest.mark.parametrize("name", READY)
def test_half_precision_is_near_and_autocast_is_the_same(
    name: str, dtype: torch.dtype, tolerance: float
) -> None:
    exact = layer(name).float()
    half = copy.deepcopy(exact).to(dtype)
    x = torch.randn(8, 2, 3).to(dtype)
    output, state = half(x)
    states = state if isinstance(state, tuple) else (state,)
    assert {t.dtype for t in (output, *states)} == {dtype}
    torch.testing.assert_close(output.float(), exact(x.float())[0], atol=tolerance, rtol=tolerance)
    with torch.autocast("cpu", dtype):
        assert torch.equal(exact(x)[0], output)
        for gradient in gradients(exact, x.float())[-len(list(exact.parameters())) :]:
            assert gradient.dtype == torch.float32


def test_one_state_dict_serves_copies_and_pickles() -> None:
    made = layer("peephole_lstm")
    x = sequence()
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        same(other(x), made(x))


def test_parameters_have_names_like_pytorchs() -> None:
    made = rnn.RNN(rnn.layernorm_lstm, 3, 4, 2, bidirectional=True)
    names = dict(made.named_parameters())
    assert names["weight_i_l0"].shape == (4, 7)
    assert names["weight_i_l1_reverse"].shape == (4, 12)
    assert torch.equal(names["norm_c_gain_l1"], torch.ones(4))
    assert not names["norm_c_shift_l0_reverse"].any()
    assert (names["weight_i_l0"].abs() <= 0.5).all()
    assert names["weight_i_l0"].abs().max() > 0.25


def test_it_says_what_it_is() -> None:
    made = rnn.RNN(rnn.projected_lstm, 3, 4, num_layers=2, bidirectional=True, proj_size=2)
    shown = "RNN(projected_lstm, 3, 4, num_layers=2, bidirectional=True, proj_size=2)"
    assert repr(made) == shown


def test_wrong_arguments_are_refused() -> None:
    for arguments, message in (
        ({"input_size": 0}, "input_size: expected an int of at least 1, got 0"),
        ({"hidden_size": 1.5}, "hidden_size: expected an int of at least 1, got 1.5"),
        ({"num_layers": True}, "num_layers: expected an int of at least 1, got True"),
        ({"dropout": 2.0}, "dropout: expected a probability from 0 to 1, got 2.0"),
        ({"schedule": "best"}, "schedule: expected one of naive, .*, auto; got 'best'"),
        ({"impl": "fast"}, "impl: expected one of .*; got 'fast' for recurrent"),
    ):
        with pytest.raises(ValueError, match=message):
            rnn.RNN(**{"cell": rnn.lstm, "input_size": 3, "hidden_size": 4, **arguments})
    with pytest.raises(TypeError, match=r"decorated with @rnn\.cell"):
        rnn.RNN(lambda x, h: (h, dict(h=h)), 3, 4)  # pyright: ignore[reportArgumentType]


def test_wrong_inputs_are_refused() -> None:
    made = rnn.LSTM(3, 4)
    x = torch.randn(5, 2, 3)
    h, c = torch.zeros(1, 2, 4), torch.zeros(1, 2, 4)
    packed = pack_padded_sequence(x, [5, 3])
    for arguments, message in (
        ((x[..., :2],), r"x: expected \(T, B, 3\) or \(T, 3\), got shape \(5, 2, 2\)"),
        ((x[:0],), "x: expected at least one time step"),
        ((x, h), r"state: expected 2 \(h, c\), got 1"),
        ((x, (h, c[..., :2])), r"state c: expected shape \(1, 2, 4\), got \(1, 2, 2\)"),
        ((x, None, [5]), "lengths: expected 2 ints, as many as sequences"),
        ((x, None, torch.tensor([1.0, 2.0])), "lengths: expected 2 ints"),
        ((x, None, torch.tensor([True, True])), "lengths: expected 2 ints, .* got torch.bool"),
        ((x, None, [6, 1]), r"lengths: expected 1 to the 5 steps of x, got \[6, 1\]"),
        ((x, None, torch.tensor([5, 0])), "lengths: expected 1 to the 5 steps"),
        ((packed, None, [5, 3]), "lengths: a PackedSequence has its own"),
    ):
        with pytest.raises(ValueError, match=message):
            made(*arguments)
    with pytest.raises(TypeError, match=r"x: expected the dtype of the parameters, torch\.float32"):
        made(x.double())
    with pytest.raises(TypeError, match=r"state h: expected a tensor of shape .*, got NoneType"):
        made(x, (None, c))
    for dtype in (torch.complex64, torch.int64):
        with pytest.raises(TypeError, match=f"state c: expected floating point, got {dtype}"):
            made(x, (h, c.to(dtype)))
    with pytest.raises(TypeError, match="x: expected a tensor or a PackedSequence, got ndarray"):
        made(x.numpy())


def test_dtypes_that_no_implementation_has_are_refused() -> None:
    for dtype in (torch.complex64, torch.int64, torch.float8_e4m3fn):
        with pytest.raises(TypeError, match="dtype: expected float32, float64, bfl"):
            rnn.LSTM(3, 4, dtype=dtype)
    with pytest.warns(UserWarning, match="Complex modules are a new feature"):
        made = rnn.LSTM(3, 4).to(torch.complex64)
    with pytest.raises(TypeError, match=r"x: expected float32, .* got torch\.complex64; convert"):
        made(torch.randn(2, 1, 3, dtype=torch.complex64))


@pytest.mark.parametrize("impl", ["reference", "cpp"])
def test_parameters_that_do_not_fit_are_refused(impl: str) -> None:
    made = rnn.LSTM(3, 4, 2, dtype=torch.float64, impl=impl)
    x = sequence(2, 1, 3)

    def call(**changed: Tensor) -> None:
        torch.func.functional_call(made, changed, (x,))

    with pytest.raises(ValueError, match=r"bias_i_l1: expected shape \(4,\), got \(3,\)"):
        call(bias_i_l1=torch.zeros(3, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"weight_o_l0: expected shape \(4, 7\), got \(28,\)"):
        call(weight_o_l0=torch.zeros(28, dtype=torch.float64))
    with pytest.raises(TypeError, match="weight_f_l0: expected the dtype of the oth"):
        call(weight_f_l0=torch.zeros(4, 7))
    with pytest.raises(ValueError, match="x: expected the device of the parameters, meta as b"):
        call(bias_g_l1=torch.zeros(4, dtype=torch.float64, device="meta"))


def test_the_op_reads_no_memory_that_is_not_there() -> None:
    """Whatever called it: an exported program, or another's code."""
    from hoconv.recurrent.frontend.serialize import to_text
    from hoconv.recurrent.frontend.trace import trace
    from hoconv.recurrent.ops import compiled_op
    from hoconv.recurrent.plans import request

    cell = rnn.elman.bind(3, 4, {})
    plan = request(to_text(trace(cell)), torch.float32, "auto", False, False, False)
    x, h = torch.randn(2, 1, 3), torch.zeros(1, 4)
    weight, bias = torch.randn(4, 7), torch.randn(4)
    assert compiled_op([x], [h], [weight, bias], None, plan, "inference", "cpp")
    for sequences, states, parameters in (
        ([x], [h], [weight, torch.randn(3)]),
        ([x], [h], [weight, bias.double()]),
        ([x], [h], [weight[:, :6], bias]),
        ([x], [h], [weight[:3], bias]),
        ([x[..., :2]], [h], [weight, bias]),
        ([x.double()], [h], [weight, bias]),
        ([x], [h[:, :3]], [weight, bias]),
        ([x], [torch.zeros(2, 4)], [weight, bias]),
    ):
        with pytest.raises((ValueError, RuntimeError)):
            compiled_op(sequences, states, parameters, None, plan, "inference", "cpp")


@pytest.mark.slow
def test_what_is_past_a_sequence_s_end_reaches_nothing() -> None:
    @rnn.cell(state=("h",))
    def delicate(x: Any, h: Any) -> Any:
        h = rnn.tanh(rnn.linear("h", rnn.log(x), h)) / rnn.sqrt(rnn.sum(x))
        return h, dict(h=h)

    lengths = [3, 6, 1, 5]
    for made in (
        rnn.RNN(delicate, 3, 4, dtype=torch.float64),
        rnn.RNN(delicate, 3, 4, bidirectional=True, dtype=torch.float64),
        layer("lstm", num_layers=2, bidirectional=True),
    ):
        clean = sequence(6, 4, 3).abs() + 0.1
        valid = torch.arange(6)[:, None] < torch.tensor(lengths)
        found = []
        for impl in ("reference", "cpp"):
            made.impl = impl
            for padding in (0.0, float("nan"), float("inf"), -1.0):
                x = clean.where(valid[..., None], torch.tensor(padding, dtype=torch.float64))
                found.append(gradients(made, x, None, lengths))
        for others in found[1:]:
            for mine, exact in zip(others, found[0], strict=True):
                assert mine.isfinite().all()
                same(mine, exact)


def test_parameters_are_drawn_anew_through_a_parametrization() -> None:
    made = rnn.LSTM(3, 4)
    parametrizations.orthogonal(made, "weight_i_l0")
    parametrizations.weight_norm(made, "weight_f_l0")
    before = {name: p.clone() for name, p in made.named_parameters()}
    torch.manual_seed(3)
    made.reset_parameters()
    assert parametrize.is_parametrized(made, "weight_f_l0")
    for name in ("weight_f_l0", "bias_o_l0", "weight_g_l0"):
        value = getattr(made, name)
        assert value.abs().max() <= 0.5 + 1e-6
    changed = [name for name, p in made.named_parameters() if not torch.equal(p, before[name])]
    assert {"weight_g_l0", "bias_i_l0"} <= set(changed)
    assert any(name.startswith("parametrizations.weight_f_l0") for name in changed)
    assert made(torch.randn(2, 1, 3))[0].isfinite().all()


@pytest.mark.parametrize("cell", [rnn.lstm, rnn.layernorm_lstm])
def test_shapes_alone_are_computed_without_memory(cell: rnn.Cell) -> None:
    made = rnn.RNN(cell, 3, 4, 2, bidirectional=True, device="meta")
    output, (h, c) = made(torch.randn(5, 2, 3, device="meta"), lengths=torch.tensor([5, 3]))
    assert (output.shape, h.shape, c.shape) == ((5, 2, 8), (4, 2, 4), (4, 2, 4))
    assert output.is_meta


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("impl", ["reference", "cpp", "cuda"])
def test_no_implementation_runs_a_kernel_for_them(impl: str, dtype: torch.dtype) -> None:
    """Also where nothing could be compiled: on a machine without a GPU."""
    function = OPERATOR.implementations[impl].function
    for sample in OPERATOR.samples(torch.device("cpu"), dtype):
        x, *tensors = (t.to("meta") for t in sample.args)
        found = function(x, tensors, **sample.kwargs)
        x, *tensors = sample.args
        expected = OPERATOR.implementations["reference"].function(x, tensors, **sample.kwargs)
        assert [(t.shape, t.dtype) for t in found] == [(t.shape, t.dtype) for t in expected]
        assert all(t.is_meta for t in found)


def test_noise_of_probability_one_is_certain_in_training() -> None:
    @rnn.cell(state=("h",))
    def dropped(x: Any, h: Any) -> Any:
        return rnn.dropout(x, 1.0), dict(h=rnn.dropout(h, 1.0))

    @rnn.cell(state=("h",))
    def kept(x: Any, h: Any) -> Any:
        return x, dict(h=rnn.zoneout(x, h, 1.0))

    x, h = torch.randn(3, 2, 4), torch.randn(1, 2, 4)
    zero = torch.zeros_like
    for impl in ("reference", "cpp"):
        for cell, output, state in ((dropped, zero(x), zero(h)), (kept, x, h)):
            same(rnn.RNN(cell, 4, 4, impl=impl)(x, h), (output, state))
        same(rnn.RNN(dropped, 4, 4, impl=impl).eval()(x, h), (x, h))


@pytest.mark.parametrize("impl", ["reference", "cpp"])
def test_numbers_that_pytorch_keeps_negated(impl: str) -> None:
    """The imaginary part of a conjugate is a view of memory that has the other sign."""
    made = rnn.LSTM(3, 4, dtype=torch.float64, impl=impl)
    x, z = sequence(5, 2, 3), torch.randn(1, 2, 4, dtype=torch.complex128)
    negated = z.conj().imag
    assert negated.is_neg()
    same(made(x, (z.real, negated))[0], made(x, (z.real.clone(), -z.imag))[0])

    h, c = made(x)[1]
    found = torch.autograd.grad((torch.complex(h, c).conj() * z).real.sum(), [*made.parameters()])
    h, c = made(x)[1]
    same(found, torch.autograd.grad((h * z.real + c * z.imag).sum(), [*made.parameters()]))


@pytest.mark.parametrize("impl", ["reference", "cpp"])
def test_returned_states_share_no_memory(impl: str) -> None:
    @rnn.cell(state={"last": "input_size", "before": "input_size"})
    def delay(x: Any, last: Any, before: Any) -> Any:
        return before * 2.0, dict(last=x, before=last)

    made = rnn.RNN(delay, 3, 3, impl=impl)
    x, given = torch.randn(1, 2, 3), (torch.randn(1, 2, 3), torch.randn(1, 2, 3))
    with torch.no_grad():
        returned = made(x, given)[1]
    assert torch.equal(returned[0], x)
    assert torch.equal(returned[1], given[0])
    memory = [t.untyped_storage().data_ptr() for t in (x, *given, *returned)]
    assert len({*memory}) == len(memory)


@pytest.mark.parametrize("impl", ["reference", "cpp"])
def test_checkpoints_of_activations(impl: str) -> None:
    """PyTorch ends a recomputation by an exception of its own, in the middle of a cell."""
    made, x = rnn.LSTM(3, 4, dtype=torch.float64, impl=impl), sequence(5, 2, 3)

    def grads(call: Any) -> Any:
        return torch.autograd.grad(call().sum(), [*made.parameters()])

    def run() -> Tensor:
        return made(x)[0]

    same(grads(lambda: checkpoint(run, use_reentrant=False)), grads(run))


@rnn.cell(state={"memory": "input_size"})
def remembers_inputs(x: Any, memory: Any, *, outputs: int | None = None) -> Any:
    memory = rnn.tanh(memory + x)
    output = memory if outputs is None else rnn.linear("out", memory, size=outputs)
    return output, {"memory": memory}


def test_states_whose_sizes_differ_between_layers_are_refused_when_it_is_made() -> None:
    said = (
        r"num_layers: the state 'memory' of the cell remembers_inputs has as many features as the "
        r"layer has inputs, 3 in layer 0 and {} in layer 1; expected the same in all: [^\n]+$"
    )
    refused: list[tuple[int, dict[str, Any]]] = [(5, {"outputs": 5}), (6, {"bidirectional": True})]
    for sizes, options in refused:
        with pytest.raises(ValueError, match=said.format(sizes)):
            rnn.RNN(remembers_inputs, 3, 4, num_layers=2, **options)
    for outputs in (None, 3):
        made = rnn.RNN(remembers_inputs, 3, 4, 2, impl="reference", outputs=outputs)
        _, state = made(torch.ones(2, 3))
        assert isinstance(state, Tensor)
        assert state.shape == (2, 3)


@rnn.cell(state=("h",))
def as_wide_as_inputs(x: Any, h: Any, *, input_size: int) -> Any:
    h = rnn.tanh(rnn.linear("in", x, h) + rnn.sum(rnn.parameter("scale", x) * x))
    return rnn.cat(x, rnn.linear("out", h, size=input_size)), {"h": h}


def test_all_else_may_be_as_wide_as_the_inputs_of_a_layer() -> None:
    layer = rnn.RNN(as_wide_as_inputs, 2, 3, 2, bidirectional=True, impl="reference")
    output, state = layer(torch.ones(4, 2, 2), lengths=[4, 3])
    assert isinstance(state, Tensor)
    assert isinstance(output, Tensor)
    assert (output.shape, state.shape) == ((4, 2, 2 * 4 * 4), (4, 2, 3))
    assert layer.scale_l1.shape == (8,)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("name", ["lstm", "gru", "projected_lstm"])
def test_steps_are_those_of_a_sequence(name: str, batch_first: bool) -> None:
    made = layer(name, num_layers=2, batch_first=batch_first)
    x = sequence(4, 2, 3)
    whole, last = made(x.transpose(0, 1) if batch_first else x)
    state, rows = made.initial_state(2), []
    for step in x:
        output, state = made.step(step, state)
        alone, _ = made.step(step)
        assert alone.shape == output.shape
        rows.append(output)
    torch.testing.assert_close(torch.stack(rows, int(batch_first)), whole)
    torch.testing.assert_close(state, last)


def test_steps_take_further_inputs_and_are_refused_where_later_ones_are_read() -> None:
    made = rnn.RNN(cells.gru_d, 3, 4, dtype=torch.float64)
    x, mask, gap = sequence(2, 3), torch.ones(2, 3).double(), sequence(2, 3)
    output, state = made.step(x, mask=mask, gap=gap)
    whole, last = made(x[None], mask=mask[None], gap=gap[None])
    torch.testing.assert_close((output, state), (whole[0], last))
    with pytest.raises(ValueError, match=r"x: expected \(B, 3\), got \(1, 2, 3\)"):
        made.step(x[None], mask=mask, gap=gap)
    with pytest.raises(ValueError, match="step: a bidirectional layer reads later steps"):
        layer("gru", bidirectional=True).step(x)
