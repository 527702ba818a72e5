// All that generated time loops in C++ include.
#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include "recurrent/math.h"
#include "recurrent/product.h"
#include "recurrent/threads.h"

namespace hoconv::recurrent {

using torch::headeronly::BFloat16;
using torch::headeronly::Half;

}  // namespace hoconv::recurrent
