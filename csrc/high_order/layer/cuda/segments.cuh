// How the strips of an image, down which the blocks of a backward kernel walk, are cut into
// segments.
#pragma once

#include <algorithm>
#include <cmath>

#include "high_order/layer/cuda/layer.cuh"

namespace hoconv::high_order::layer {

constexpr int kFewestRows = 8;  // of a segment, but the last and one of a lower image

struct Segments {
  int rows, down;  // of a segment; segments down a strip
};

// So long that the rows above and below, which cost as much as `around` rows, cost little; so many
// that no block waits long. `slots`: blocks that run at once.
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
