// What the fused CUDA kernels of the high-order layer compute, and where they are the faster way.
// The kernels take their sizes from here, and Python the reason why a layer is not fused.
//
// C channels, k kernel size, s kernel size of the generator.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>

namespace hoconv::high_order::layer {

constexpr int kMostReach = 8;  // pixels from the centre to the farthest tap, or of the generator
constexpr int64_t kFarTaps = 1 << 30;  // a dilation that is far too large
constexpr int kMostChannels = 16;
// Most shared memory of the backward kernel for a row of a channel in the window of its last warp.
constexpr int kRowBytes = 2048;

constexpr bool serves_kernel_size(int64_t k) { return k == 3 || k == 5 || k == 7; }
constexpr bool serves_generator_size(int64_t s) { return s == 1 || s == 3 || s == 5 || s == 7; }

// How many channels of sums a warp's registers hold: those of one pass of the backward kernel over
// the image.
constexpr int channels_a_pass(int64_t k, int64_t s) {
  if (s == 1) return kMostChannels;
  if (k == 7) return s == 3 ? 3 : 1;
  return s == 3 ? 8 : s == 5 ? 3 : 1;
}

// Up to how many passes a training step was faster fused, measured on an H200 at 112 x 112 pixels.
// float32 without TF32 takes three products of TF32 for one.
constexpr int most_passes(int64_t k, bool three_products) {
  if (k == 3) return 6;
  if (k == 5) return three_products ? 3 : 6;
  return three_products ? 1 : 4;
}

// Why a layer is not fused, in words: every limit that it passes. Empty where it is.
// `shared_memory` are the bytes that a block may have.
inline std::string why_unfused(int64_t k, int64_t s, int64_t C, int64_t dilation,
                               std::string_view dtype, bool allow_tf32, int64_t shared_memory) {
  std::string reasons;
  const auto refuse = [&reasons](const std::string& reason) {
    reasons += (reasons.empty() ? "" : "; ") + reason;
  };
  const auto text = [](int64_t n) { return std::to_string(n); };
  const int64_t distance = std::min(dilation, kFarTaps);  // of taps, without overflow below
  const int64_t reach = std::max(distance * (k - 1) / 2, s / 2);
  if (dtype == "float64") refuse("float64 is not fused");
  if (!serves_kernel_size(k)) refuse("kernel size " + text(k) + " (3, 5 and 7 are fused)");
  if (!serves_generator_size(s))
    refuse("generator kernel size " + text(s) + " (1, 3, 5 and 7 are fused)");
  if (C > kMostChannels)
    refuse(text(C) + " channels (up to " + text(kMostChannels) + " are fused)");
  if (reach > kMostReach)
    refuse("a reach of " + text(reach) + " pixels (up to " + text(kMostReach) + " is fused)");
  if (!reasons.empty()) return reasons;

  const int64_t needed = C * (2 * reach + 1) * kRowBytes;
  if (needed > shared_memory)
    refuse(text(needed) + " bytes of shared memory for " + text(C) + " channels with a reach of " +
           text(reach) + " pixels (this GPU has " + text(shared_memory) + " a block)");
  const int64_t at_once = channels_a_pass(k, s), passes = (C + at_once - 1) / at_once;
  const int most = most_passes(k, dtype == "float32" && !allow_tf32);
  if (passes > most)
    refuse(text(passes) + " passes for the gradient of " + text(C) + " channels (up to " +
           text(most) + " are faster fused)");
  return reasons;
}

}  // namespace hoconv::high_order::layer
