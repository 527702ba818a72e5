"""A language for recurrent cells, and layers of them: ``from hoconv import recurrent as rnn``.

A cell is a Python function over one time step, decorated with :func:`cell`; :class:`RNN` runs it
over sequences. docs/recurrent.md shows the language on a page.
"""

from hoconv.recurrent.cell import Cell as Cell
from hoconv.recurrent.cell import cell as cell
from hoconv.recurrent.cells import coupled_lstm as coupled_lstm
from hoconv.recurrent.cells import elman as elman
from hoconv.recurrent.cells import gru as gru
from hoconv.recurrent.cells import layernorm_lstm as layernorm_lstm
from hoconv.recurrent.cells import lstm as lstm
from hoconv.recurrent.cells import minimal_gated as minimal_gated
from hoconv.recurrent.cells import peephole_lstm as peephole_lstm
from hoconv.recurrent.cells import projected_lstm as projected_lstm
from hoconv.recurrent.errors import CellError as CellError
from hoconv.recurrent.language import abs as abs
from hoconv.recurrent.language import cat as cat
from hoconv.recurrent.language import chunk as chunk
from hoconv.recurrent.language import clamp as clamp
from hoconv.recurrent.language import dropout as dropout
from hoconv.recurrent.language import exp as exp
from hoconv.recurrent.language import gelu as gelu
from hoconv.recurrent.language import layer_norm as layer_norm
from hoconv.recurrent.language import linear as linear
from hoconv.recurrent.language import log as log
from hoconv.recurrent.language import max as max
from hoconv.recurrent.language import maximum as maximum
from hoconv.recurrent.language import mean as mean
from hoconv.recurrent.language import minimum as minimum
from hoconv.recurrent.language import parameter as parameter
from hoconv.recurrent.language import relu as relu
from hoconv.recurrent.language import sigmoid as sigmoid
from hoconv.recurrent.language import silu as silu
from hoconv.recurrent.language import softmax as softmax
from hoconv.recurrent.language import softplus as softplus
from hoconv.recurrent.language import sqrt as sqrt
from hoconv.recurrent.language import sum as sum
from hoconv.recurrent.language import tanh as tanh
from hoconv.recurrent.language import where as where
from hoconv.recurrent.language import zoneout as zoneout
from hoconv.recurrent.layers import RNN as RNN
from hoconv.recurrent.schedule import SCHEDULES as SCHEDULES
from hoconv.recurrent.torch_layers import GRU as GRU
from hoconv.recurrent.torch_layers import LSTM as LSTM
