"""Functions that every operator uses: they define its ops, register gradients and autocast, and
check arguments."""

from hoconv.registration.arguments import FixedAttributes as FixedAttributes
from hoconv.registration.arguments import check_dense as check_dense
from hoconv.registration.arguments import check_dtypes as check_dtypes
from hoconv.registration.arguments import computes_as_made as computes_as_made
from hoconv.registration.arguments import get_parameter as get_parameter
from hoconv.registration.batches import call_one_by_one as call_one_by_one
from hoconv.registration.batches import register_vmap as register_vmap
from hoconv.registration.casts import autocast as autocast
from hoconv.registration.casts import autocasts as autocasts
from hoconv.registration.casts import register_autocast as register_autocast
from hoconv.registration.casts import without_autocast as without_autocast
from hoconv.registration.definition import compiled as compiled
from hoconv.registration.definition import define as define
from hoconv.registration.definition import kernels as kernels
from hoconv.registration.eager import Op as Op
from hoconv.registration.eager import is_plain as is_plain
from hoconv.registration.eager import records_gradients as records_gradients
from hoconv.registration.flops import register_flop_formula as register_flop_formula
from hoconv.registration.gradient import gradient_layout as gradient_layout
from hoconv.registration.gradient import gradients as gradients
from hoconv.registration.gradient import has_tangent as has_tangent
from hoconv.registration.gradient import register_gradient as register_gradient
from hoconv.registration.gradient import register_layer as register_layer
