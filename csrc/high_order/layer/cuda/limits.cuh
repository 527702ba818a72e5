// What the fused CUDA kernels of the high-order layer compute, and where the backward kernels are
// the faster way; the forward kernels always are. The kernels take their sizes from here, and
// Python learns from here which of them to call.
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

// Up to how many channels and groups the backward kernel for every GPU was faster than generating
// the weights in memory, with k = 3, 5, 7 down and s = 1, 3, 5, 7 across. Measured on an H200 at 56
// x 56 and 160 x 160 pixels. More channels take more passes, each of which generates the weights
// again.
struct BackwardLimits {
  int channels[3][4], groups;
};
constexpr BackwardLimits kOneProduct{{{4, 8, 8, 4}, {4, 8, 8, 4}, {4, 4, 4, 3}}, 2};
constexpr BackwardLimits kThreeProducts{{{4, 8, 4, 4}, {8, 3, 2, 2}, {2, 2, 1, 1}}, 1};

// Narrower images leave many lanes of that kernel idle. Where it is much faster, it still is then.
constexpr int kLeastWidth = 24;

// Whether Hopper has kernels of its own for a layer: a forward kernel, and a backward kernel, whose
// sums must fit the registers.
constexpr bool has_hopper_forward(int64_t k, int64_t s, int64_t C, int64_t G, int64_t dilation) {
  return (C == 1 || C == 3) && G == 1 && s == k && dilation == 1;
}
constexpr bool has_hopper_backward(int64_t k, int64_t s, int64_t C, int64_t G, int64_t dilation) {
  return has_hopper_forward(k, s, C, G, dilation) && (k < 7 || C == 1);
}

// The least width of images for which a fused backward kernel is the faster way: 0 if it always is,
// -1 if it never is.
//
// three_products: of TF32 for each of float32, as without TF32.
constexpr int64_t least_width_backward(int64_t k, int64_t s, int64_t C, int64_t G, int64_t dilation,
                                       bool three_products, bool hopper) {
  if (hopper && has_hopper_backward(k, s, C, G, dilation)) return 0;
  const BackwardLimits& most = three_products ? kThreeProducts : kOneProduct;
  if (C > most.channels[k / 2 - 1][s / 2] || G > most.groups) return -1;
  return three_products || s == 1 ? kLeastWidth : 0;
}

// Why a layer is not fused, in words: every limit that it passes. Empty where it is.
// `shared_memory` are the bytes that a block may have.
inline std::string why_unfused(int64_t k, int64_t s, int64_t C, int64_t dilation,
                               std::string_view dtype, int64_t shared_memory) {
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
  return reasons;
}

}  // namespace hoconv::high_order::layer
