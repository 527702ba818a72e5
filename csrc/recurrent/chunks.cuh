// Matrix states that decay and take outer products, in chunks of steps, by tensor cores. For each
// head
//
//   S_t = diag(d_t) S_{t-1} + k_t v_tᵀ,   o_t = S_tᵀ q_t.
//
// Let D_ji be the product of the decays d_{j+1} ... d_i, and S_0 the state before a chunk. Then
//
//   o_i = S_0ᵀ (D_0i q_i) + Σ_{j≤i} ((D_ji k_j)ᵀ q_i) v_j.
//
// The products of all pairs (j, i) are a matrix product where D_ji is a factor of j times one of i.
// D_0i / D_0j overflows, or is 0 / 0. But with a step m between them D_ji = D_jm D_mi. So the pairs
// are taken in levels: level n, a power of two, divides the chunk into blocks of 2n steps, and has
// the pairs whose j is in the first half of a block and whose i is in the second half; m is the
// last step of the first half. Every pair j < i is in one level, that of the highest bit in which j
// and i differ. At each level a step has one role: its key or its query is scaled, by up to n
// decays. So the decays may have any value and sign.
//
// The gradient differentiates these products of decays one factor after the other.
//
// SHARED decays are those of a head, the same for all its keys. Then D_ji is a number, by which the
// product q_iᵀ k_j is multiplied: no levels, and kernels of their own (shared_*.cuh).
//
// Steps may predict v: solve.cuh.
#pragma once

#include "recurrent/chunks/columns.cuh"
#include "recurrent/chunks/keys.cuh"
#include "recurrent/chunks/products.cuh"
#include "recurrent/chunks/rows.cuh"
#include "recurrent/chunks/shared_columns.cuh"
#include "recurrent/chunks/shared_keys.cuh"
#include "recurrent/chunks/shared_states.cuh"
#include "recurrent/chunks/shared_steps.cuh"
#include "recurrent/chunks/solve.cuh"
#include "recurrent/chunks/states.cuh"
#include "recurrent/chunks/steps.cuh"
