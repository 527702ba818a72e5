// The decays of a chunk's steps, where they are those of a head, and their products.
#pragma once

#include "recurrent/chunks/rows.cuh"

namespace hoconv::recurrent {

// The decay of a step; 1 where nothing decays, and after the last step.
template <typename Call>
__device__ __forceinline__ float read_decay(const Call& call, int64_t t, int64_t b, int64_t head) {
  return call.d.data && t < call.T ? float(*call.d.at(t, b, head, 0)) : 1;
}

// The product of the decays of steps `from` to `to - 1`.
__device__ __forceinline__ float multiply_range(const float* decays, int from, int to) {
  float products[4] = {1, 1, 1, 1};  // few wait for each other
#pragma unroll 4
  for (int s = 0; s < CHUNK; s += 4)
#pragma unroll
    for (int z = 0; z < 4; ++z) products[z] *= from <= s + z && s + z < to ? decays[s + z] : 1;
  return products[0] * products[1] * (products[2] * products[3]);
}

// Computes D_ji for i >= j; a thread has a j, and some i.
template <int THREADS>
__device__ __forceinline__ void multiply_steps(float* products, const float* decays) {
  constexpr int COUNT = CHUNK * CHUNK / THREADS;
  const int j = threadIdx.x % CHUNK, begin = threadIdx.x / CHUNK * COUNT;
  float product = 1;
#pragma unroll 8
  for (int i = 0; i < begin; ++i) product *= i > j ? decays[i] : 1;
#pragma unroll 8
  for (int i = begin; i < begin + COUNT; ++i) {
    if (i > j) product *= decays[i];
    if (i >= j) products[i * SQUARE + j] = product;
  }
}
// Replaces the gradient of each D_ji by what it adds to that of d_i and those before; a thread has
// a j.
__device__ __forceinline__ void differentiate_steps(float* gradients, const float* products,
                                                    const float* decays) {
  const int j = threadIdx.x;
  if (j >= CHUNK) return;
  float carry = 0;
#pragma unroll 8
  for (int i = CHUNK - 1; i >= 0; --i) {
    float& gradient = gradients[i * SQUARE + j];
    carry += i > j ? gradient : 0;
    gradient = i > j ? carry * products[(i - 1) * SQUARE + j] : 0;
    if (i > j) carry *= decays[i];
  }
}

}  // namespace hoconv::recurrent
