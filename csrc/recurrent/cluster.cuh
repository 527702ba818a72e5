// What generated kernels call that keep a layer's weights on the chip: the blocks of a cluster
// share some rows of the batch for all time steps, multiply by the slice of the weights that each
// holds in registers and shared memory, and push what others need into their shared memory. Two
// clusters may form a team, in which blocks of equal rank, partners, post to each other.
// For GPUs of compute capability 9.0 and later; compiled by NVRTC.
#pragma once

#include "recurrent/cluster/exchange.cuh"
#include "recurrent/cluster/plain_product.cuh"
#include "recurrent/cluster/product.cuh"
#include "recurrent/cluster/reduction.cuh"
