"""Functions that every operator uses: they define its ops, register gradients and autocast, and
check arguments."""

from hoconv.dispatch.registration.arguments import FixedAttributes as FixedAttributes
from hoconv.dispatch.registration.arguments import check_dense as check_dense
from hoconv.dispatch.registration.arguments import check_dtypes as check_dtypes
from hoconv.dispatch.registration.arguments import computes_as_made as computes_as_made
from hoconv.dispatch.registration.arguments import get_parameter as get_parameter
from hoconv.dispatch.registration.batches import call_one_by_one as call_one_by_one
from hoconv.dispatch.registration.batches import register_vmap as register_vmap
from hoconv.dispatch.registration.casts import autocast as autocast
from hoconv.dispatch.registration.casts import autocasts as autocasts
from hoconv.dispatch.registration.casts import register_autocast as register_autocast
from hoconv.dispatch.registration.casts import without_autocast as without_autocast
from hoconv.dispatch.registration.definition import compiled as compiled
from hoconv.dispatch.registration.definition import define as define
from hoconv.dispatch.registration.definition import find_code as find_code
from hoconv.dispatch.registration.definition import find_ops as find_ops
from hoconv.dispatch.registration.definition import kernels as kernels
from hoconv.dispatch.registration.eager import Op as Op
from hoconv.dispatch.registration.eager import is_plain as is_plain
from hoconv.dispatch.registration.eager import records_gradients as records_gradients
from hoconv.dispatch.registration.gradient import gradient_layout as gradient_layout
from hoconv.dispatch.registration.gradient import gradients as gradients
from hoconv.dispatch.registration.gradient import has_tangent as has_tangent
from hoconv.dispatch.registration.gradient import register_gradient as register_gradient
from hoconv.dispatch.registration.gradient import register_layer as register_layer
