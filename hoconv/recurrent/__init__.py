"""A language for recurrent cells, and layers of them: ``from hoconv import recurrent as rnn``.

A cell is a Python function over one time step, decorated with :func:`cell`; :class:`RNN` runs it
over sequences. docs/use/recurrent.md shows the language on a page.
"""

from hoconv.recurrent.cells import coupled_lstm as coupled_lstm
from hoconv.recurrent.cells import elman as elman
from hoconv.recurrent.cells import gru as gru
from hoconv.recurrent.cells import layernorm_lstm as layernorm_lstm
from hoconv.recurrent.cells import lstm as lstm
from hoconv.recurrent.cells import minimal_gated as minimal_gated
from hoconv.recurrent.cells import peephole_lstm as peephole_lstm
from hoconv.recurrent.cells import projected_lstm as projected_lstm
from hoconv.recurrent.frontend.axes import cat as cat
from hoconv.recurrent.frontend.axes import chunk as chunk
from hoconv.recurrent.frontend.axes import cumsum as cumsum
from hoconv.recurrent.frontend.axes import einsum as einsum
from hoconv.recurrent.frontend.axes import logsumexp as logsumexp
from hoconv.recurrent.frontend.axes import max as max
from hoconv.recurrent.frontend.axes import mean as mean
from hoconv.recurrent.frontend.axes import normalize as normalize
from hoconv.recurrent.frontend.axes import pad as pad
from hoconv.recurrent.frontend.axes import reshape as reshape
from hoconv.recurrent.frontend.axes import roll as roll
from hoconv.recurrent.frontend.axes import softmax as softmax
from hoconv.recurrent.frontend.axes import sum as sum
from hoconv.recurrent.frontend.cell import Cell as Cell
from hoconv.recurrent.frontend.cell import cell as cell
from hoconv.recurrent.frontend.errors import CellError as CellError
from hoconv.recurrent.frontend.functions import __dir__ as _functions
from hoconv.recurrent.frontend.functions import __getattr__ as __getattr__
from hoconv.recurrent.frontend.language import Linear as Linear
from hoconv.recurrent.frontend.language import clamp as clamp
from hoconv.recurrent.frontend.language import dropout as dropout
from hoconv.recurrent.frontend.language import gelu as gelu
from hoconv.recurrent.frontend.language import group_norm as group_norm
from hoconv.recurrent.frontend.language import layer_norm as layer_norm
from hoconv.recurrent.frontend.language import linear as linear
from hoconv.recurrent.frontend.language import logaddexp as logaddexp
from hoconv.recurrent.frontend.language import logsigmoid as logsigmoid
from hoconv.recurrent.frontend.language import parameter as parameter
from hoconv.recurrent.frontend.language import rms_norm as rms_norm
from hoconv.recurrent.frontend.language import silu as silu
from hoconv.recurrent.frontend.language import zoneout as zoneout
from hoconv.recurrent.ladder import SCHEDULES as SCHEDULES
from hoconv.recurrent.layers import RNN as RNN
from hoconv.recurrent.torch_layers import GRU as GRU
from hoconv.recurrent.torch_layers import LSTM as LSTM


def __dir__() -> list[str]:
    return [*globals(), *_functions()]
