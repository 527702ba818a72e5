// How the strips of an image are cut into segments. A block of a backward kernel walks down one
// segment.
#pragma once

#include <algorithm>
#include <cmath>

#include "high_order/layer/cuda/layer.cuh"

namespace hoconv::high_order::layer {

constexpr int kFewestRows = 8;  // of a segment, unless the image is lower

struct Segments {
  int rows, down;  // rows of a segment; segments of a strip
};

// Chooses the number of segments with the least time: rounds of blocks times the rows of a segment.
// A segment costs `around` rows more than it has, for the rows above and below it. `slots` is the
// number of blocks that run at the same time.
inline Segments cut_strips(int H, int64_t strips, int around, int64_t slots) {
  Segments best{};
  double least = INFINITY;
  for (int down = 1; down <= std::max(1, H / kFewestRows); ++down) {
    const int rows = (H + down - 1) / down, segments = (H + rows - 1) / rows;
    const int64_t rounds = (strips * segments + slots - 1) / slots;
    const double cost = double(rounds) * (rows + around);
    if (cost < least) least = cost, best = {rows, segments};
  }
  return best;
}

}  // namespace hoconv::high_order::layer
