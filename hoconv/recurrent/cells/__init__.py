"""Ready cells, each as its paper writes it: ``rnn.RNN(cells.gla, 64, 64, heads=4, keys=16)``.

A state of rows is `hidden_size` or `input_size` wide unless an option says otherwise; H heads have
keys of K and values of V features. What surrounds a cell in its paper, such as convolutions, norms
and gates of outputs, is for the network.
"""

from hoconv.recurrent.cells.diagonal import indrnn as indrnn
from hoconv.recurrent.cells.diagonal import lru as lru
from hoconv.recurrent.cells.diagonal import mamba as mamba
from hoconv.recurrent.cells.diagonal import min_gru as min_gru
from hoconv.recurrent.cells.diagonal import min_lstm as min_lstm
from hoconv.recurrent.cells.diagonal import rg_lru as rg_lru
from hoconv.recurrent.cells.diagonal import sru as sru
from hoconv.recurrent.cells.gated import coupled_lstm as coupled_lstm
from hoconv.recurrent.cells.gated import elman as elman
from hoconv.recurrent.cells.gated import gru as gru
from hoconv.recurrent.cells.gated import gru_d as gru_d
from hoconv.recurrent.cells.gated import layernorm_lstm as layernorm_lstm
from hoconv.recurrent.cells.gated import lstm as lstm
from hoconv.recurrent.cells.gated import minimal_gated as minimal_gated
from hoconv.recurrent.cells.gated import peephole_lstm as peephole_lstm
from hoconv.recurrent.cells.gated import projected_lstm as projected_lstm
from hoconv.recurrent.cells.matrices import delta_net as delta_net
from hoconv.recurrent.cells.matrices import gated_delta_net as gated_delta_net
from hoconv.recurrent.cells.matrices import gla as gla
from hoconv.recurrent.cells.matrices import hgrn2 as hgrn2
from hoconv.recurrent.cells.matrices import mamba2 as mamba2
from hoconv.recurrent.cells.matrices import mlstm as mlstm
from hoconv.recurrent.cells.matrices import retnet as retnet
from hoconv.recurrent.cells.matrices import rwkv7 as rwkv7
from hoconv.recurrent.cells.others import attention as attention
from hoconv.recurrent.cells.others import block_gru as block_gru
from hoconv.recurrent.cells.others import cornn as cornn
from hoconv.recurrent.cells.others import lif as lif
from hoconv.recurrent.cells.others import slstm as slstm
from hoconv.recurrent.cells.others import tied_rhn as tied_rhn
