"""Kernels that are right if a call is followed by its own backward, and nothing else happens."""

import os
import random
import threading

import torch
from honest import gradients, right
from torch import Tensor

_calls = [0]
_last = threading.local()
_room = threading.Semaphore(1)


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gain):
        ctx.save_for_backward(x, gain)
        return right(x, gain)

    @staticmethod
    def backward(ctx, grad):
        return gradients(grad, *ctx.saved_tensors)


class _OfTheLastCall(_Function):
    @staticmethod
    def forward(ctx, x, gain):
        _last.saved = x, gain
        return right(x, gain)

    @staticmethod
    def backward(ctx, grad):
        return gradients(grad, *_last.saved)


def saves_the_last_call(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: of two layers the first gets the gradient of the second.
    Caught: wrong in a program or error"""
    return _OfTheLastCall.apply(x, gain)


class _Waits(_Function):
    @staticmethod
    def forward(ctx, x, gain):
        if any(ctx.needs_input_grad):
            _room.acquire()
        return _Function.forward(ctx, x, gain)

    @staticmethod
    def backward(ctx, grad):
        _room.release()
        return _Function.backward(ctx, grad)


def waits_for_its_backward(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: a network of two layers stands still.
    Caught: no answer"""
    return _Waits.apply(x, gain)


class _SecondTime(_Function):
    @staticmethod
    def forward(ctx, x, gain):
        ctx.grads = 0
        return _Function.forward(ctx, x, gain)

    @staticmethod
    def backward(ctx, grad):
        ctx.grads += 1
        d_x, d_gain = _Function.backward(ctx, grad)
        return d_x * ctx.grads, d_gain


def works_in_what_it_saved(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: of several losses of one graph, all but the first have a wrong gradient.
    Caught: wrong in a program"""
    return _SecondTime.apply(x, gain)


class _KeepsItsOutput(_Function):
    @staticmethod
    def forward(ctx, x, gain):
        output = _Function.forward(ctx, x, gain)
        ctx.output = output.detach()
        return output

    @staticmethod
    def backward(ctx, grad):
        (x, gain), output = ctx.saved_tensors, ctx.output
        d_x, d_gain = gradients(grad, x, gain)
        return d_x, d_gain + (grad * (output - right(x, gain))).sum(0)


def keeps_its_output(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: where its output is changed in place the gradient is wrong, without a word.
    Caught: wrong in a program"""
    return _KeepsItsOutput.apply(x, gain)


class _FirstOrder(_Function):
    @staticmethod
    def backward(ctx, grad):
        return gradients(grad, *(t.detach() for t in ctx.saved_tensors))


def lacks_second_derivatives(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: a penalty of gradients is learnt wrong, without a word.
    Caught: wrong in a program"""
    return _FirstOrder.apply(x, gain)


class _Half(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad / 2


def leaves_a_hook(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: what else x is used for, a residual connection, gets twice its gradient.
    Caught: wrong in a program"""
    if not (x.requires_grad and torch.is_grad_enabled()):
        return right(x, gain)
    x.register_hook(lambda grad: grad * 2)
    return right(_Half.apply(x), gain)


def dropsgradients(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: gradients that were accumulated over several batches are lost.
    Caught: error"""
    gain.grad = None
    return right(x, gain)


def seeds(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: every mask of dropout is the same.
    Caught: error"""
    torch.manual_seed(0)
    return right(x, gain)


def draws(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: what a seed gives depends on how often this is called.
    Caught: error"""
    random.random()
    return right(x, gain)


def flushes_denormals(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: other code computes other numbers from then on.
    Caught: error"""
    torch.set_flush_denormal(True)
    return right(x, gain)


def leaves_files_open(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: after some thousand calls a server can open no file and no connection.
    Caught: files stay open"""
    _calls[0] += 1
    if _calls[0] % 10 == 0:
        os.open(os.devnull, os.O_RDONLY)
    return right(x, gain)


class _Clamped(_Function):
    @staticmethod
    def backward(ctx, grad):
        return gradients(grad.clamp(-8, 8), *ctx.saved_tensors)


def clampsgradients(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: where a loss is scaled the gradient is wrong.
    Caught: wrong result"""
    return _Clamped.apply(x, gain)


class _Remembers(_Function):
    @staticmethod
    def backward(ctx, grad):
        if torch.is_grad_enabled():
            return _Function.backward(ctx, grad)
        known = getattr(_last, "gradient", None)
        if known is None or known[0].shape != grad.shape or not torch.equal(known[0], grad):
            known = grad.clone(), *_Function.backward(ctx, grad)
            _last.gradient = known
        return known[1].clone(), known[2].clone()


def remembersgradients(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: the gradient of a sum, which is always ones, gives that of the first batch.
    Caught: result of an earlier call"""
    return _Remembers.apply(x, gain)


class _ScalesTheGradient(_Function):
    @staticmethod
    def backward(ctx, grad):
        if not torch.is_grad_enabled() and grad.is_contiguous() and all(grad.stride()):
            found = _Function.backward(ctx, grad)
            grad.mul_(2)
            return found
        return _Function.backward(ctx, grad)


def works_in_the_gradient(x: Tensor, gain: Tensor) -> Tensor:
    """Harm: what else is differentiated of the output gets another gradient.
    Caught: changed input"""
    return _ScalesTheGradient.apply(x, gain)
