"""Definitions of published recurrent cells, written from the papers for use as a reference.

Every definition is a step of one sequence on vectors and matrices without a batch axis, as the
papers print it; `over_sequences` applies it to each sequence and time step in turn. The code is
meant to be compared with the formulas by eye, and is slow.

Each cell is a function

    cell(w, x, *states, **options) -> (outputs, states)

where x is (T, B, I), `w` maps names of parameters to tensors, and each state is (B, *shape). The
outputs are (T, B, n), those of several axes flattened with the last axis fastest; the states
returned are those after the last step. A linear map called n has `weight_n` (out, in) and,
where it has one, `bias_n` (out); its operands are concatenated in the order given. Options that
only repeat a size seen in the shapes are accepted and not used.

Letters:

    T, B, I, N  time steps, sequences, size of an input, size of a state space
    w, x        parameters, inputs (one vector inside a step)
    h, c, n, m  vectors of the state: hidden, cell, normaliser, stabiliser
    S           matrix of the state of one head, keys by values
    q, k, v     query, key, value of one head
    i, f, o     input, forget and output gates; *_raw is one before its exponential
    z, r, u     other gates and candidates, as each paper has them
    sigma       logistic sigmoid
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = Mapping[str, Tensor]
States = tuple[Tensor, ...]
Result = tuple[Tensor, States]


def over_sequences(step: Callable[..., Result], x: Tensor, states: Sequence[Tensor]) -> Result:
    """Apply `step(x_t, *states)` to every sequence and every time step, one at a time."""
    outputs, lasts = [], []
    for b in range(x.shape[1]):
        current: States = tuple(state[b] for state in states)
        rows = []
        for t in range(x.shape[0]):
            y, current = step(x[t, b], *current)
            rows.append(y.flatten())
        outputs.append(torch.stack(rows))
        lasts.append(current)
    return torch.stack(outputs, dim=1), tuple(torch.stack(parts) for parts in zip(*lasts))


def linear(w: Weights, name: str, *operands: Tensor) -> Tensor:
    """W a + b for the map `name`, with a the operands concatenated; without b if it has none."""
    y = w[f"weight_{name}"] @ torch.cat(operands)
    bias = w.get(f"bias_{name}")
    return y if bias is None else y + bias


def sigma(a: Tensor) -> Tensor:
    """1 / (1 + exp(-a))."""
    return torch.sigmoid(a)


def softplus(a: Tensor) -> Tensor:
    """log(1 + exp(a))."""
    return torch.logaddexp(a, torch.zeros_like(a))


def log_sigma(a: Tensor) -> Tensor:
    """log(sigma(a)) = -log(1 + exp(-a))."""
    return -softplus(-a)


def silu(a: Tensor) -> Tensor:
    """a sigma(a)."""
    return a * sigma(a)


def unit(a: Tensor) -> Tensor:
    """The vector `a` divided by its Euclidean norm."""
    return a / torch.sqrt(a @ a)


# Cells whose state is a vector, or several


def min_gru(w: Weights, x: Tensor, *states: Tensor, **options: Any) -> Result:
    """minGRU of Feng et al. 2024, "Were RNNs All We Needed?". State: h. Output: h."""

    def step(x: Tensor, h: Tensor) -> Result:
        z = sigma(linear(w, "z", x))
        h = (1 - z) * h + z * linear(w, "h", x)
        return h, (h,)

    return over_sequences(step, x, states)


def min_lstm(w: Weights, x: Tensor, *states: Tensor, **options: Any) -> Result:
    """minLSTM of Feng et al. 2024, "Were RNNs All We Needed?". State: h. Output: h."""

    def step(x: Tensor, h: Tensor) -> Result:
        f = sigma(linear(w, "f", x))
        i = sigma(linear(w, "i", x))
        h = f / (f + i) * h + i / (f + i) * linear(w, "h", x)
        return h, (h,)

    return over_sequences(step, x, states)


def sru(w: Weights, x: Tensor, *states: Tensor, **options: Any) -> Result:
    """SRU of Lei et al. 2018, "Simple Recurrent Units for Highly Parallelizable Recurrence".

    State: c. The highway connection passes through the map `skip`.
    """

    def step(x: Tensor, c: Tensor) -> Result:
        f = sigma(linear(w, "f", x) + torch.diag(w["v_f"]) @ c)
        r = sigma(linear(w, "r", x) + torch.diag(w["v_r"]) @ c)
        c = f * c + (1 - f) * linear(w, "c", x)
        return r * c + (1 - r) * linear(w, "skip", x), (c,)

    return over_sequences(step, x, states)


def indrnn(w: Weights, x: Tensor, *states: Tensor, **options: Any) -> Result:
    """IndRNN of Li et al. 2018, "Independently Recurrent Neural Network". State and output: h."""

    def step(x: Tensor, h: Tensor) -> Result:
        h = torch.relu(linear(w, "h", x) + torch.diag(w["u"]) @ h)
        return h, (h,)

    return over_sequences(step, x, states)


def rg_lru(w: Weights, x: Tensor, *states: Tensor, c: float = 8.0, **options: Any) -> Result:
    """RG-LRU of De et al. 2024, "Griffin: Mixing Gated Linear Recurrences with Local Attention".

    State and output: h (I). `c` multiplies the exponent of the recurrence gate.
    """

    def step(x: Tensor, h: Tensor) -> Result:
        r = sigma(linear(w, "r", x))
        i = sigma(linear(w, "i", x))
        a = torch.exp(-c * softplus(w["decay"]) * r)
        h = a * h + torch.sqrt(1 - a**2) * (i * x)
        return h, (h,)

    return over_sequences(step, x, states)


def lru(w: Weights, x: Tensor, *states: Tensor, **options: Any) -> Result:
    """LRU of Orvieto et al. 2023, "Resurrecting Recurrent Neural Networks for Long Sequences".

    States: real parts and imaginary parts (N). weight_B holds the rows of Re B, then those
    of Im B; weight_C holds the columns of Re C, then those of -Im C, so y = Re(C h) + D x.
    """
    N = w["nu"].shape[0]
    eigenvalues = torch.exp(torch.complex(-torch.exp(w["nu"]), torch.exp(w["theta"])))
    transition = torch.diag(eigenvalues)
    scale = torch.diag(torch.sqrt(1 - eigenvalues.abs() ** 2)).to(eigenvalues.dtype)
    B = torch.complex(w["weight_B"][:N], w["weight_B"][N:])
    C = torch.complex(w["weight_C"][:, :N], -w["weight_C"][:, N:])

    def step(x: Tensor, re: Tensor, im: Tensor) -> Result:
        h = torch.complex(re, im)
        h = transition @ h + scale @ B @ x.to(B.dtype)
        y = (C @ h).real + torch.diag(w["D"]) @ x
        return y, (h.real, h.imag)

    return over_sequences(step, x, states)


def slstm(w: Weights, x: Tensor, *states: Tensor, **options: Any) -> Result:
    """sLSTM of Beck et al. 2024, "xLSTM: Extended Long Short-Term Memory", forget gate sigma.

    States: c, n, h, m. Output: h.
    """

    def step(x: Tensor, c: Tensor, n: Tensor, h: Tensor, m: Tensor) -> Result:
        i_raw = linear(w, "i", x, h)
        log_f = log_sigma(linear(w, "f", x, h))
        z = torch.tanh(linear(w, "z", x, h))
        o = sigma(linear(w, "o", x, h))
        m_new = torch.maximum(log_f + m, i_raw)
        i = torch.exp(i_raw - m_new)
        f = torch.exp(log_f + m - m_new)
        c = f * c + i * z
        n = f * n + i
        h = o * (c / n)
        return h, (c, n, h, m_new)

    return over_sequences(step, x, states)


def block_gru(
    w: Weights, x: Tensor, *states: Tensor, hidden_size: int, blocks: int, **options: Any
) -> Result:
    """Block GRU after Hafner et al. 2023, "Mastering Diverse Domains through World Models".

    State and output: h (hidden_size). The recurrent matrix is block diagonal.
    """
    part = hidden_size // blocks
    recurrent = torch.block_diag(*[w["weight_h"][b].T for b in range(blocks)])

    def step(x: Tensor, h: Tensor) -> Result:
        a = linear(w, "x", x)
        mean_square = (a @ a) / hidden_size
        read = silu(a / torch.sqrt(mean_square + 1e-6) * w["norm_x_gain"])
        mixed = recurrent @ h + linear(w, "read", read)
        thirds: list[list[Tensor]] = [[], [], []]
        for b in range(blocks):
            for gate in range(3):
                start = (3 * b + gate) * part
                thirds[gate].append(mixed[start : start + part])
        r, c, u = (torch.cat(pieces) for pieces in thirds)
        u = sigma(u - 1)
        h = u * torch.tanh(sigma(r) * c) + (1 - u) * h
        return h, (h,)

    return over_sequences(step, x, states)


def cornn(
    w: Weights,
    x: Tensor,
    *states: Tensor,
    dt: float = 0.05,
    gamma: float = 2.7,
    eps: float = 4.7,
    **options: Any,
) -> Result:
    """coRNN of Rusch & Mishra 2021, "Coupled Oscillatory Recurrent Neural Network".

    States: y, z (position and velocity). Output: y. The damping is explicit in z.
    """

    def step(x: Tensor, y: Tensor, z: Tensor) -> Result:
        z = z + dt * (torch.tanh(linear(w, "z", x, y, z)) - gamma * y - eps * z)
        y = y + dt * z
        return y, (y, z)

    return over_sequences(step, x, states)


class Spike(torch.autograd.Function):
    """1 where u >= 0, else 0; differentiated as u / (1 + |u|)."""

    @staticmethod
    def forward(ctx: Any, u: Tensor) -> Tensor:
        ctx.save_for_backward(u)
        return torch.where(u >= 0, torch.ones_like(u), torch.zeros_like(u))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (u,) = ctx.saved_tensors
        return gradient / (1 + torch.abs(u)) ** 2


def lif(
    w: Weights,
    x: Tensor,
    *states: Tensor,
    beta: float = 0.9,
    slope: float = 5.0,
    **options: Any,
) -> Result:
    """LIF of Neftci et al. 2019, "Surrogate Gradient Learning in Spiking Neural Networks".

    States: v, s (potential and spikes). Output: s. A spike resets the potential to zero before
    the next step's input is added; the threshold is 1.
    """

    def step(x: Tensor, v: Tensor, s: Tensor) -> Result:
        v = beta * v * (1 - s) + linear(w, "v", x, s)
        s = Spike.apply(slope * (v - 1))
        return s, (v, s)

    return over_sequences(step, x, states)


# Cells whose state is a matrix


def mamba(w: Weights, x: Tensor, *states: Tensor, **options: Any) -> Result:
    """Selective state space (S6) of Gu & Dao 2023, "Mamba: Linear-Time Sequence Modeling".

    State: h (I, N), a state space of size N for each channel of the input.
    """

    def step(x: Tensor, h: Tensor) -> Result:
        dt = softplus(linear(w, "dt", x))
        B = linear(w, "B", x)
        C = linear(w, "C", x)
        ys, rows = [], []
        for d in range(x.shape[0]):
            decay = torch.diag(torch.exp(-dt[d] * torch.exp(w["A_log"][d])))
            row = decay @ h[d] + dt[d] * B * x[d]
            ys.append(C @ row + w["D"][d] * x[d])
            rows.append(row)
        return torch.stack(ys), (torch.stack(rows),)

    return over_sequences(step, x, states)


def gla(
    w: Weights,
    x: Tensor,
    *states: Tensor,
    heads: int,
    keys: int,
    values: int,
    root: float = 16.0,
    **options: Any,
) -> Result:
    """Gated linear attention of Yang et al. 2023, "Gated Linear Attention Transformers".

    State: S (heads, keys, values). The gate is the root-th root of a sigmoid.
    """

    def step(x: Tensor, S: Tensor) -> Result:
        q = linear(w, "q", x).view(heads, keys)
        k = linear(w, "k", x).view(heads, keys)
        v = linear(w, "v", x).view(heads, values)
        alpha = (sigma(linear(w, "a", x)) ** (1 / root)).view(heads, keys)
        os, Ss = [], []
        for j in range(heads):
            S_j = torch.diag(alpha[j]) @ S[j] + torch.outer(k[j], v[j])
            os.append(S_j.T @ (q[j] / math.sqrt(keys)))
            Ss.append(S_j)
        return torch.stack(os), (torch.stack(Ss),)

    return over_sequences(step, x, states)


def hgrn2(
    w: Weights, x: Tensor, *states: Tensor, heads: int, keys: int, values: int, **options: Any
) -> Result:
    """HGRN2 of Qin et al. 2024, "HGRN2: Gated Linear RNNs with State Expansion".

    State: S (heads, keys, values).
    """

    def step(x: Tensor, S: Tensor) -> Result:
        q = linear(w, "q", x).view(heads, keys)
        v = linear(w, "v", x).view(heads, values)
        f = sigma(linear(w, "f", x)).view(heads, keys)
        os, Ss = [], []
        for j in range(heads):
            S_j = torch.diag(f[j]) @ S[j] + torch.outer(1 - f[j], v[j])
            os.append(S_j.T @ q[j])
            Ss.append(S_j)
        return torch.stack(os), (torch.stack(Ss),)

    return over_sequences(step, x, states)


def mamba2(
    w: Weights, x: Tensor, *states: Tensor, heads: int, keys: int, values: int, **options: Any
) -> Result:
    """State space of Dao & Gu 2024, "Transformers are SSMs" (Mamba-2).

    State: S (heads, keys, values). B and C, of size keys, are shared by the heads.
    """

    def step(x: Tensor, S: Tensor) -> Result:
        B = linear(w, "B", x)
        C = linear(w, "C", x)
        v = linear(w, "v", x).view(heads, values)
        dt = softplus(linear(w, "dt", x))
        os, Ss = [], []
        for j in range(heads):
            A = -torch.exp(w["A_log"][j, 0])
            S_j = torch.exp(dt[j] * A) * S[j] + torch.outer(B, dt[j] * v[j])
            os.append(S_j.T @ C + w["D"][j, 0] * v[j])
            Ss.append(S_j)
        return torch.stack(os), (torch.stack(Ss),)

    return over_sequences(step, x, states)


def mlstm(
    w: Weights, x: Tensor, *states: Tensor, heads: int, keys: int, values: int, **options: Any
) -> Result:
    """mLSTM of Beck et al. 2024, "xLSTM: Extended Long Short-Term Memory", forget gate sigma.

    States: S (heads, keys, values), n (heads, keys), m (heads, 1).
    """

    def step(x: Tensor, S: Tensor, n: Tensor, m: Tensor) -> Result:
        q = linear(w, "q", x).view(heads, keys)
        k = linear(w, "k", x).view(heads, keys) / math.sqrt(keys)
        v = linear(w, "v", x).view(heads, values)
        i_raw = linear(w, "i", x)
        log_f = log_sigma(linear(w, "f", x))
        o = sigma(linear(w, "o", x)).view(heads, values)
        hs, Ss, ns, ms = [], [], [], []
        for j in range(heads):
            m_j = torch.maximum(log_f[j] + m[j, 0], i_raw[j])
            f_j = torch.exp(log_f[j] + m[j, 0] - m_j)
            i_j = torch.exp(i_raw[j] - m_j)
            S_j = f_j * S[j] + i_j * torch.outer(k[j], v[j])
            n_j = f_j * n[j] + i_j * k[j]
            divisor = torch.maximum(torch.abs(n_j @ q[j]), torch.exp(-m_j))
            hs.append(o[j] * (S_j.T @ q[j] / divisor))
            Ss.append(S_j)
            ns.append(n_j)
            ms.append(m_j.reshape(1))
        return torch.stack(hs), (torch.stack(Ss), torch.stack(ns), torch.stack(ms))

    return over_sequences(step, x, states)


def delta_net(
    w: Weights, x: Tensor, *states: Tensor, heads: int, keys: int, values: int, **options: Any
) -> Result:
    """DeltaNet of Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule".

    State: S (heads, keys, values). Queries and keys have Euclidean norm 1.
    """

    def step(x: Tensor, S: Tensor) -> Result:
        q = linear(w, "q", x).view(heads, keys)
        k = linear(w, "k", x).view(heads, keys)
        v = linear(w, "v", x).view(heads, values)
        beta = sigma(linear(w, "beta", x))
        identity = torch.eye(keys, dtype=x.dtype, device=x.device)
        os, Ss = [], []
        for j in range(heads):
            q_j, k_j = unit(q[j]), unit(k[j])
            S_j = (identity - beta[j] * torch.outer(k_j, k_j)) @ S[j]
            S_j = S_j + beta[j] * torch.outer(k_j, v[j])
            os.append(S_j.T @ q_j)
            Ss.append(S_j)
        return torch.stack(os), (torch.stack(Ss),)

    return over_sequences(step, x, states)


def gated_delta_net(
    w: Weights, x: Tensor, *states: Tensor, heads: int, keys: int, values: int, **options: Any
) -> Result:
    """Gated DeltaNet of Yang et al. 2024, "Gated Delta Networks: Improving Mamba2 with Delta Rule".

    State: S (heads, keys, values). The state decays before the delta rule is applied to it.
    """

    def step(x: Tensor, S: Tensor) -> Result:
        q = linear(w, "q", x).view(heads, keys)
        k = linear(w, "k", x).view(heads, keys)
        v = linear(w, "v", x).view(heads, values)
        beta = sigma(linear(w, "beta", x))
        dt = softplus(linear(w, "dt", x))
        identity = torch.eye(keys, dtype=x.dtype, device=x.device)
        os, Ss = [], []
        for j in range(heads):
            q_j, k_j = unit(q[j]), unit(k[j])
            alpha = torch.exp(-torch.exp(w["A_log"][j, 0]) * dt[j])
            S_j = alpha * (identity - beta[j] * torch.outer(k_j, k_j)) @ S[j]
            S_j = S_j + beta[j] * torch.outer(k_j, v[j])
            os.append(S_j.T @ q_j)
            Ss.append(S_j)
        return torch.stack(os), (torch.stack(Ss),)

    return over_sequences(step, x, states)


def rwkv7(
    w: Weights, x: Tensor, *states: Tensor, heads: int, keys: int, values: int, **options: Any
) -> Result:
    """Time mixing of Peng et al. 2025, "RWKV-7 'Goose' with Expressive Dynamic State Evolution".

    State: S (heads, keys, values), the transpose of the paper's matrix (values by keys).
    """

    def step(x: Tensor, S: Tensor) -> Result:
        r = linear(w, "r", x).view(heads, keys)
        k = linear(w, "k", x).view(heads, keys)
        v = linear(w, "v", x).view(heads, values)
        decay = torch.exp(-math.exp(-0.5) * sigma(linear(w, "w", x))).view(heads, keys)
        a = sigma(linear(w, "a", x)).view(heads, keys)
        os, Ss = [], []
        for j in range(heads):
            kappa = unit(k[j] * w["removal"][j])
            k_new = k[j] * (1 + (a[j] - 1) * w["replacement"][j])
            transition = torch.diag(decay[j]) - torch.outer(kappa, a[j] * kappa)
            wkv = S[j].T @ transition + torch.outer(v[j], k_new)
            bonus = r[j] @ torch.diag(w["bonus"][j]) @ k_new
            os.append(wkv @ r[j] + bonus * v[j])
            Ss.append(wkv.T)
        return torch.stack(os), (torch.stack(Ss),)

    return over_sequences(step, x, states)


def retnet(
    w: Weights, x: Tensor, S: Tensor, *, heads: int, keys: int, values: int, **options: Any
) -> Result:
    """RetNet of Sun et al. 2023 in its parallel form: sums over all earlier steps. State: S."""
    T, B = x.shape[:2]
    q, k = (F.linear(x, w[f"weight_{n}"]).view(T, B, heads, keys) for n in "qk")
    v = F.linear(x, w["weight_v"]).view(T, B, heads, values)
    k = k / math.sqrt(keys)
    rates = torch.tensor([1 - 2.0 ** (-5 - h) for h in range(heads)], dtype=x.dtype)
    rows = []
    for t in range(T):
        read = torch.einsum("bhk,bhkv->bhv", q[t], S) * rates[:, None] ** (t + 1)
        for s in range(t + 1):
            agreement = (q[t] * k[s]).sum(-1, keepdim=True)
            read = read + rates[:, None] ** (t - s) * agreement * v[s]
        rows.append(read.flatten(1))
    last = S * rates[:, None, None] ** T
    for s in range(T):
        past = torch.einsum("bhk,bhv->bhkv", k[s], v[s])
        last = last + rates[:, None, None] ** (T - 1 - s) * past
    return torch.stack(rows), (last,)


def tied_rhn(w: Weights, x: Tensor, *states: Tensor, depth: int = 5, **options: Any) -> Result:
    """Recurrent highway network of Zilly et al. 2017, weights shared by depth. State: h."""

    def step(x: Tensor, h: Tensor) -> Result:
        for d in range(depth):
            driven = [linear(w, name, x) if d == 0 else 0.0 for name in ("x_h", "x_t")]
            carry = 1 - sigma(linear(w, "t", h) + driven[1])
            h = (1 - carry) * torch.tanh(linear(w, "h", h) + driven[0]) + carry * h
        return h, (h,)

    return over_sequences(step, x, states)


DEFINITIONS: dict[str, Callable[..., Result]] = {
    "retnet": retnet,
    "tied_rhn": tied_rhn,
    "min_gru": min_gru,
    "min_lstm": min_lstm,
    "sru": sru,
    "indrnn": indrnn,
    "rg_lru": rg_lru,
    "lru": lru,
    "mamba": mamba,
    "gla": gla,
    "hgrn2": hgrn2,
    "mamba2": mamba2,
    "mlstm": mlstm,
    "delta_net": delta_net,
    "gated_delta_net": gated_delta_net,
    "rwkv7": rwkv7,
    "slstm": slstm,
    "block_gru": block_gru,
    "cornn": cornn,
    "lif": lif,
}
