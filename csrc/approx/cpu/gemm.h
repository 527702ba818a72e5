// Matrix products with approximate multiplications, of operands given by offsets. Every convolution
// and its gradients are such products, over an image that is padded but not unfolded.
//
// A tile of the output is up to kRows rows by kPanels * kLanes columns. For kDepth k at a time a
// thread lists the nonzero numbers of the tile's rows of the left operand. Then it packs kLanes
// columns of the right operand at a time into a panel that fits the L1 cache, and multiplies the
// lists with the panel's rows in ascending k. Lanes (lanes.h) know how a multiplier packs both and
// where its fast form holds; all other products go through the multiplier's definition, one at a
// time, with the same bits.
//
// M, N rows and columns of the output, K what is summed over.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "approx/cpu/lanes.h"
#include "approx/cpu/mantissa_lanes.h"
#include "approx/problem.h"
#include "hoconv/blocks.h"

namespace hoconv::approx {

// The offsets of the elements of three nested dimensions of sizes n and strides s.
inline Ints nested(int64_t n0, int64_t s0, int64_t n1, int64_t s1, int64_t n2, int64_t s2,
                   int64_t start = 0) {
  Ints offsets;
  offsets.reserve(n0 * n1 * n2);
  for (int64_t i = 0; i < n0; ++i)
    for (int64_t j = 0; j < n1; ++j)
      for (int64_t k = 0; k < n2; ++k) offsets.push_back(start + i * s0 + j * s1 + k * s2);
  return offsets;
}
inline Ints steps(int64_t count, int64_t stride) { return nested(1, 0, 1, 0, count, stride); }

// Element (i, k) of matrix n is data[batch[n] + row[i] + column[k]].
template <typename T>
struct Offsets {
  T* data;
  Ints batch, row, column;
  bool gaps = false;  // a negative zero marks a missing element, whose products are left out

  Offsets transposed() const { return {data, batch, column, row, gaps}; }
  bool left_out(float value) const { return gaps && float_bits(value) == INT32_MIN; }
};

template <typename Lanes>
class Gemm {
 public:
  // left (batch, M, K), right (batch, N, K), out (batch, M, N).
  Gemm(Lanes lanes, Offsets<const float> left, Offsets<const float> right, Offsets<float> out)
      : lanes(lanes),
        left(std::move(left)),
        right(std::move(right)),
        out(std::move(out)),
        M(this->left.row.size()),
        N(this->right.row.size()),
        K(this->left.column.size()) {
    for (int64_t k = 0; k < K; k += kDepth) {
      const int64_t* column = this->left.column.data() + k;
      bool whole = k + kDepth <= K;
      for (int64_t d = 1; d < kDepth && whole; ++d) whole = column[d] == column[0] + d;
      consecutive.push_back(whole);
    }
  }

  void run() const {
    const int64_t row_tiles = (M + kRows - 1) / kRows, panels = (N + kLanes - 1) / kLanes;
    const int64_t lines = static_cast<int64_t>(out.batch.size()) * row_tiles;
    if (lines * panels == 0) return;
    // Each tile lists its rows, so that wide tiles list fewer numbers in all. They are as wide as
    // they can be while there are enough of them for all threads.
    const int64_t wanted = kTilesAThread * torch::stable::get_num_threads();
    const int64_t wide = std::clamp<int64_t>(lines * panels / wanted, 1, kPanels);
    const int64_t column_tiles = (panels + wide - 1) / wide;
    const int64_t columns = (panels + column_tiles - 1) / column_tiles * kLanes;
    const auto tile_at = [&](int64_t index) {
      const int64_t line = index / column_tiles, column = index % column_tiles * columns;
      const int64_t row = line % row_tiles * kRows;
      return Tile{line / row_tiles, row, column, std::min(kRows, M - row),
                  std::min(columns, N - column)};
    };
    const int64_t tiles = lines * column_tiles, size = kRows * columns;
    const int64_t chunks = std::max<int64_t>((K + kChunk - 1) / kChunk, 1);
    // Where there are few tiles, threads also share out their chunks, a wave of chunks at a time.
    const int64_t wave = std::clamp<int64_t>(wanted / tiles, 1, chunks);
    std::vector<float> sums(wave > 1 ? tiles * wave * size : 0);
    for (int64_t first = 0; first < chunks; first += wave) {
      const int64_t width = std::min(wave, chunks - first);
      torch::stable::parallel_for(0, tiles * width, 1, [&](int64_t begin, int64_t end) {
        Worker worker(*this, size);
        for (int64_t task = begin; task < end; ++task) {
          const Tile tile = tile_at(task / width);
          if (wave > 1) {
            worker.sum(tile, first + task % width, sums.data() + task * size);
          } else {
            worker.sum(tile, first, worker.tile.get());
            add(tile, first == 0, worker.tile.get());
          }
        }
      });
      if (wave == 1) continue;
      torch::stable::parallel_for(0, tiles, 1, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t)
          for (int64_t i = 0; i < width; ++i)
            add(tile_at(t), first + i == 0, sums.data() + (t * width + i) * size);
      });
    }
  }

 private:
  static constexpr int64_t kRows = 128, kPanels = 4;  // 256 KiB of sums
  static constexpr int64_t kTilesAThread = 4;         // so that no thread waits long for the last

  struct Tile {
    int64_t matrix, row, column, rows, columns;
  };

  // The offset of the sums of a row and kLanes columns of a tile.
  static int64_t sums_at(int64_t row, int64_t column) {
    return (column / kLanes * kRows + row) * kLanes;
  }

  // Adds the sums of a chunk to the output, or writes the first.
  void add(const Tile& tile, bool first, const float* sums) const {
    float* target = out.data + out.batch[tile.matrix];
    for (int64_t m = 0; m < tile.rows; ++m) {
      float* line = target + out.row[tile.row + m];
      for (int64_t n = 0; n < tile.columns; n += kLanes) {
        const int64_t* column = out.column.data() + tile.column + n;
        const float* own = sums + sums_at(m, n);
        for (int64_t i = 0; i < std::min(kLanes, tile.columns - n); ++i)
          line[column[i]] = first ? own[i] : line[column[i]] + own[i];
      }
    }
  }

  // The buffers of a thread.
  struct Worker {
    // Some rows of the left operand.
    struct Rows {
      int64_t count;
      alignas(64) float numbers[kRowsAtOnce][kDepth];  // not packed
      typename Lanes::List lists[kRowsAtOnce];
      Range range;
      bool whole;  // kRowsAtOnce rows without zeros
    };

    const Gemm& g;
    std::unique_ptr<float[]> tile;  // not initialised: of a small product, few rows are used
    std::vector<Rows> groups;
    typename Lanes::Panel panel;
    alignas(64) float values[kDepth][kLanes] = {};  // of the panel, not packed

    Worker(const Gemm& g, int64_t size)
        : g(g),
          tile(new float[size]),
          groups((std::min(kRows, g.M) + kRowsAtOnce - 1) / kRowsAtOnce) {}

    // Computes the sums of a chunk, laid out by sums_at.
    void sum(const Tile& t, int64_t chunk, float* sums) {
      for (int64_t n = 0; n < t.columns; n += kLanes)
        std::fill(sums + sums_at(0, n), sums + sums_at(t.rows, n), 0.0f);
      const int64_t last = std::min(g.K, (chunk + 1) * kChunk);
      for (int64_t k = chunk * kChunk; k < last; k += kDepth) {
        const int64_t depth = std::min(kDepth, last - k);
        for (int64_t m = 0; m < t.rows; m += kRowsAtOnce)
          load_rows(t, m, k, depth, groups[m / kRowsAtOnce]);
        for (int64_t n = 0; n < t.columns; n += kLanes) {
          const int64_t columns = std::min(kLanes, t.columns - n);
          load_panel(t, n, columns, k, depth);
          for (int64_t m = 0; m < t.rows; m += kRowsAtOnce)
            add_rows(groups[m / kRowsAtOnce], depth, columns, sums + sums_at(m, n));
        }
      }
    }

    void load_rows(const Tile& t, int64_t first, int64_t k, int64_t depth, Rows& rows) const {
      rows.count = std::min(kRowsAtOnce, t.rows - first);
      rows.whole = rows.count == kRowsAtOnce;
      for (int64_t m = 0; m < rows.count; ++m) {
        load_row(t, first + m, k, depth, rows.numbers[m]);
        rows.lists[m].list(rows.numbers[m], Lanes::kNonzero);
        g.lanes.pack(rows.lists[m]);
        rows.whole &= rows.lists[m].count == depth;
      }
      rows.range = range_of(rows.numbers[0], rows.count * kDepth);
    }

    void load_panel(const Tile& t, int64_t first, int64_t columns, int64_t k, int64_t depth) {
      const float* data = g.right.data + g.right.batch[t.matrix];
      const int64_t* row = g.right.row.data() + t.column + first;
      bool consecutive = true;
      for (int64_t n = 1; n < columns; ++n) consecutive &= row[n] == row[n - 1] + 1;
      const int64_t* column = g.right.column.data() + k;
      for (int64_t d = 0; d < depth && consecutive; ++d)
        std::copy_n(data + column[d] + row[0], columns, values[d]);
      for (int64_t n = 0; n < columns && !consecutive; ++n)
        for (int64_t d = 0; d < depth; ++d) values[d][n] = data[row[n] + column[d]];
      // The padding repeats the last column: a panel without zeros is faster.
      for (int64_t d = 0; d < depth; ++d)
        std::fill(values[d] + columns, values[d] + round_up(columns, kVector),
                  values[d][columns - 1]);
      g.lanes.pack(panel, values, depth, round_up(columns, kVector));
    }

    // sums[m, n] += rows[m, d] * panel[d, n] for d in ascending order
    void add_rows(const Rows& rows, int64_t depth, int64_t columns, float* sums) const {
      const auto* lists = rows.lists;
      const bool special = panel.all.special();
      if (!special && Lanes::fast(rows.range, panel.all)) {
        if (rows.whole)
          return multiply_add<kRowsAtOnce>(g.lanes, sums, panel, lists, 0, depth, columns);
        for (int64_t m = 0; m < rows.count; ++m)
          multiply_add<1>(g.lanes, sums + m * kLanes, panel, lists + m, 0, lists[m].count, columns);
        return;
      }
      for (int64_t m = 0; m < rows.count; ++m) {
        if (special || range_of(rows.numbers[m], kDepth).special())
          for (int64_t d = 0; d < depth; ++d)
            add_products(rows.numbers[m][d], d, columns, sums + m * kLanes);
        else
          add_one_by_one(lists[m], columns, sums + m * kLanes);
      }
    }

    // Loads a row, with zeros after its last number.
    void load_row(const Tile& t, int64_t m, int64_t k, int64_t depth, float* target) const {
      const float* row = g.left.data + g.left.batch[t.matrix] + g.left.row[t.row + m];
      const int64_t* column = g.left.column.data() + k;
      if (g.consecutive[k / kDepth]) {
        std::memcpy(target, row + column[0], kDepth * sizeof(float));
        // The hardware does not prefetch rows this far apart.
        __builtin_prefetch(row + column[0] + kDepth);
      } else if (depth == kDepth) {
        for (int64_t d = 0; d < kDepth; ++d) target[d] = row[column[d]];
      } else {
        for (int64_t d = 0; d < depth; ++d) target[d] = row[column[d]];
        std::fill(target + depth, target + kDepth, 0.0f);
      }
    }

    // Adds the products of each number in the fastest form that holds for it.
    void add_one_by_one(const typename Lanes::List& list, int64_t columns, float* sums) const {
      for (int64_t i = 0; i < list.count; ++i) {
        const int64_t d = list.depth[i];
        const Range one = Range::of(list.value[i]);
        if (Lanes::fast(one, panel.rows[d]))
          multiply_add<1>(g.lanes, sums, panel, &list, i, i + 1, columns);
        else if (!Lanes::underflows(one, panel.rows[d]))
          add_products(list.value[i], d, columns, sums);
      }
    }

    // Adds the products of a number by the definition.
    void add_products(float value, int64_t d, int64_t columns, float* sums) const {
      if (g.left.left_out(value)) return;
      for (int64_t n = 0; n < columns; ++n)
        if (!g.right.left_out(values[d][n])) sums[n] += g.lanes.multiply(value, values[d][n]);
    }
  };

  const Lanes lanes;
  const Offsets<const float> left, right;
  const Offsets<float> out;
  const int64_t M, N, K;
  std::vector<char> consecutive;  // kDepth numbers of a row of the left operand are neighbours
};

// The share of nonzero numbers, estimated on a coarse grid.
inline double density(const Offsets<const float>& t) {
  constexpr int64_t kSamples = 64;
  const int64_t rows = t.row.size(), columns = t.column.size();
  if (t.batch.empty() || rows == 0 || columns == 0) return 1;
  const int64_t row_step = rows / kSamples + 1, column_step = columns / kSamples + 1;
  int64_t found = 0, nonzero = 0;
  for (int64_t i = 0; i < rows; i += row_step)
    for (int64_t k = i % column_step; k < columns; k += column_step, ++found)
      nonzero += t.data[t.batch[0] + t.row[i] + t.column[k]] != 0;
  return found == 0 ? 1 : static_cast<double>(nonzero) / found;
}

// The estimated time of M rows on the left, of which only nonzero numbers count, and N lanes on the
// right. The unit is the time of a register of kVector products, which packing a number of the
// right operand takes too. Listing a number of the left operand takes kListCost. Where rows have
// zeros, one row is multiplied at a time instead of kRowsAtOnce, and a register takes kOneRowCost.
constexpr double kListCost = 1.5, kOneRowCost = 1.5;
inline double cost(int64_t M, int64_t N, double density) {
  const double row = density == 1 ? 1 : kOneRowCost * density;
  return M * (kListCost + row * (round_up(N, kVector) / kVector)) + N;
}

// out[m, n] = sum over k of left[m, k] * right[n, k]
inline void gemm(const Chosen& multiplier, const Tensor& like, Offsets<const float> left,
                 Offsets<const float> right, Offsets<float> out) {
  const int64_t M = left.row.size(), N = right.row.size();
  const bool swap = cost(N, M, density(right)) < cost(M, N, density(left));
  if (swap) {
    std::swap(left, right);
    out = out.transposed();
  }
  const auto run = [&](auto lanes) {
    Gemm(lanes, std::move(left), std::move(right), std::move(out)).run();
  };
  if (!multiplier.entries)
    return with_multiplier(multiplier.name, [&](auto definition) { run(lanes_of(definition)); });
  MantissaTable table = multiplier.table(like);
  if (swap) std::swap(table.rows, table.columns);
  run(MantissaLanes{table});
}

}  // namespace hoconv::approx
