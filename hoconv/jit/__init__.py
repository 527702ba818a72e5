"""Compiles C++ and CUDA into a cache on first use, or ahead of time with ``hoconv build``.

:class:`Library` is the code of an operator for one device: of hoconv's own, whose sources are in
``csrc/``, and of other packages (docs/extend/compiled_code.md).
"""

from hoconv.jit.cache import BuildError as BuildError
from hoconv.jit.compilers import MissingCompilerError as MissingCompilerError
from hoconv.jit.compilers import compiler as compiler
from hoconv.jit.compilers import no_gpu as no_gpu
from hoconv.jit.compilers import obstacle as obstacle
from hoconv.jit.compilers import visible_gpus as visible_gpus
from hoconv.jit.headers import CSRC as CSRC
from hoconv.jit.library import Library as Library
