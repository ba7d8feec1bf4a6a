// Causal attention of rows over the caches of their sequences, in chunks of keys that begin at fixed positions.
//
// What a query gets depends on itself and on the keys before it alone: scores are the products of products.h, a chunk's
// softmax runs over the query's own keys, values are added key by key, and chunks are merged in order (Dao et al. 2023,
// FlashDecoding). Rows of a sequence go together only so that keys are read once for them.

#include "products.h"

#include <cmath>
#include <vector>

namespace {

constexpr int64_t TOGETHER = 8; // rows of a sequence that share a pass over its keys
constexpr int VALUES = 32 / LANES; // vectors of a value in registers at once

struct Block {
  int64_t first, rows;
};

// Σ p_j v_j over n keys for R queries; `width` a multiple of VALUES vectors.
template <int R> void weighted(const float *p, int64_t stride, const float *v, int64_t n, int64_t width, float *to) {
  for (int64_t d = 0; d < width; d += VALUES * LANES) {
    Floats sums[R][VALUES];
    UNROLLED for (int r = 0; r < R; ++r) UNROLLED for (int i = 0; i < VALUES; ++i) sums[r][i] = Floats{};
    for (int64_t j = 0; j < n; ++j) {
      UNROLLED for (int i = 0; i < VALUES; ++i) {
        const Floats value = load<Floats>(v + j * width + d + i * LANES);
        UNROLLED for (int r = 0; r < R; ++r) fused(sums[r][i], Floats{} + p[r * stride + j], value);
      }
    }
    UNROLLED for (int r = 0; r < R; ++r) UNROLLED for (int i = 0; i < VALUES; ++i)
      memcpy(to + r * width + d + i * LANES, &sums[r][i], sizeof(Floats));
  }
}

// Scores of one query to weights exp(s - max) over its first n numbers, zeros from there to `end`; max and sum out.
inline void softmax(float *scores, int64_t n, int64_t end, float &top, float &sum) {
  top = scores[0];
  for (int64_t j = 1; j < n; ++j)
    top = scores[j] > top ? scores[j] : top;
  Floats sums = {};
  for (int64_t j = 0; j < n; j += LANES) {
    Floats weights = exponential(load<Floats>(scores + j) - top);
    if (j + LANES > n)
      for (int i = (int)(n - j); i < LANES; ++i)
        weights[i] = 0.f;
    sums += weights;
    memcpy(scores + j, &weights, sizeof weights);
  }
  sum = total(sums);
  const int64_t filled = (n + LANES - 1) / LANES * LANES;
  if (filled < end)
    memset(scores + filled, 0, (end - filled) * sizeof(float));
}

struct Shape {
  int64_t heads, kv_heads, width, chunk;
  float scale;
};

// One block of rows and one key-value head.
void attend(const float *qkv, const Block &block, int64_t head, const Shape &shape, const float *keys,
            const float *values, const int64_t *positions, float *out, std::vector<float> &room) {
  const int64_t group = shape.heads / shape.kv_heads, width = shape.width, chunk = shape.chunk;
  const int64_t row = (shape.heads + 2 * shape.kv_heads) * width, queries = block.rows * group;
  room.resize(queries * (3 * width + chunk + 2) + LANES);
  float *query = room.data(), *scores = query + queries * width, *mixed = scores + queries * chunk;
  float *fresh = mixed + queries * width, *tops = fresh + queries * width, *sums = tops + queries;
  for (int64_t q = 0; q < queries; ++q) {
    const float *from = qkv + (block.first + q / group) * row + (head * group + q % group) * width;
    for (int64_t i = 0; i < width; ++i)
      query[q * width + i] = from[i] * shape.scale;
  }
  const int64_t last = positions[block.first + block.rows - 1];
  for (int64_t begin = 0; begin <= last; begin += chunk) {
    const int64_t n = last + 1 - begin < chunk ? last + 1 - begin : chunk;
    const int64_t place = (begin / chunk * shape.kv_heads + head) * chunk * width;
    const float *k = keys + place, *v = values + place;
    const Output to{scores, chunk, nullptr, nullptr};
    int64_t c = 0;
    for (; c + COLUMNS <= n; c += COLUMNS)
      columns<COLUMNS>(query, queries, width, k + c * width, width, AHEAD_BYTES, to, c);
    for (; c < n; ++c)
      columns<1>(query, queries, width, k + c * width, width, AHEAD_BYTES, to, c);
    float top, sum;
    float new_tops[TOGETHER * 64], new_sums[TOGETHER * 64];
    for (int64_t q = 0; q < queries; ++q) {
      const int64_t visible = positions[block.first + q / group] + 1 - begin;
      if (visible <= 0) {
        memset(scores + q * chunk, 0, n * sizeof(float));
        new_sums[q] = 0.f;
        continue;
      }
      softmax(scores + q * chunk, visible < chunk ? visible : chunk, n, top, sum);
      new_tops[q] = top;
      new_sums[q] = sum;
    }
    int64_t q = 0;
    for (; q + 2 <= queries; q += 2)
      weighted<2>(scores + q * chunk, chunk, v, n, width, fresh + q * width);
    if (q < queries)
      weighted<1>(scores + q * chunk, chunk, v, n, width, fresh + q * width);
    for (q = 0; q < queries; ++q) {
      if (new_sums[q] == 0.f)
        continue;
      float *kept = mixed + q * width;
      const float *added = fresh + q * width;
      if (begin == 0) {
        memcpy(kept, added, width * sizeof(float));
        tops[q] = new_tops[q];
        sums[q] = new_sums[q];
        continue;
      }
      const float most = tops[q] > new_tops[q] ? tops[q] : new_tops[q];
      Floats exponents = {};
      exponents[0] = tops[q] - most;
      exponents[1] = new_tops[q] - most;
      const Floats shares = exponential(exponents);
      const float old_share = shares[0], new_share = shares[1];
      for (int64_t i = 0; i < width; ++i)
        kept[i] = kept[i] * old_share + added[i] * new_share;
      sums[q] = sums[q] * old_share + new_sums[q] * new_share;
      tops[q] = most;
    }
  }
  for (int64_t q = 0; q < queries; ++q) {
    float *to = out + (block.first + q / group) * shape.heads * width + (q % group * shape.kv_heads + head) * width;
    for (int64_t i = 0; i < width; ++i)
      to[i] = mixed[q * width + i] / sums[q];
  }
}

} // namespace

// qkv as k3dspark_store left it; positions of a sequence's rows ascend. out [rows, heads · width], heads in the order
// (group, kv_head). Returns 0, or 1 when a group of query heads is larger than there is room for.
extern "C" int k3dspark_attend(const float *qkv, int64_t rows, int64_t heads, int64_t kv_heads, int64_t width,
                               const int64_t *positions, const float *const *keys, const float *const *values,
                               int64_t chunk, float scale, float *out, int64_t threads) {
  const Shape shape{heads, kv_heads, width, chunk, scale};
  if (heads / kv_heads > 64)
    return 1;
  std::vector<Block> blocks;
  for (int64_t r = 0; r < rows; ++r)
    if (!blocks.empty() && keys[r] == keys[r - 1] && blocks.back().rows < TOGETHER)
      ++blocks.back().rows;
    else
      blocks.push_back({r, 1});
  const int64_t units = (int64_t)blocks.size() * kv_heads;
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> room;
#pragma omp for schedule(dynamic)
    for (int64_t unit = 0; unit < units; ++unit) {
      const Block &block = blocks[unit / kv_heads];
      attend(qkv, block, unit % kv_heads, shape, keys[block.first], values[block.first], positions, out, room);
    }
  }
  return 0;
}
