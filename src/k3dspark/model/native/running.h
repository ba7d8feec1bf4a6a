// Attention of a few queries over keys that come in stretches: softmax and weighted values, merged stretch by stretch
// (Dao et al. 2023, FlashDecoding).
//
// What a query gets depends on itself and on the keys before it alone: scores are the products of products.h, a
// stretch's softmax runs over the query's own keys, values are added key by key, stretches are merged in order. Queries
// go together only so that keys are read once for them.

#pragma once

#include "products.h"

#include <vector>

namespace {

constexpr int VALUES = 32 / LANES; // vectors of a value in registers at once

// Σ p_j v_j over n keys for R queries; `width` a multiple of VALUES vectors.
template <int R> void weighted(const float *p, int64_t p_stride, const float *v, int64_t v_stride, int64_t n, int64_t width, float *to) {
  for (int64_t d = 0; d < width; d += VALUES * LANES) {
    Floats sums[R][VALUES];
    UNROLLED for (int r = 0; r < R; ++r) UNROLLED for (int i = 0; i < VALUES; ++i) sums[r][i] = Floats{};
    for (int64_t j = 0; j < n; ++j) {
      UNROLLED for (int i = 0; i < VALUES; ++i) {
        const Floats value = load<Floats>(v + j * v_stride + d + i * LANES);
        UNROLLED for (int r = 0; r < R; ++r) fused(sums[r][i], Floats{} + p[r * p_stride + j], value);
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

class Running {
public:
  // `longest` keys at most in a stretch. Values are multiples of 32 wide.
  Running(std::vector<float> &room, int64_t queries, int64_t key_width, int64_t value_width, int64_t longest)
      : queries(queries), key_width(key_width), value_width(value_width), row((key_width + STEP - 1) / STEP * STEP),
        stride((longest + LANES - 1) / LANES * LANES) {
    room.assign(queries * (row + stride + 2 * value_width + 4), 0.f);
    query = room.data();
    scores = query + queries * row;
    mixed = scores + queries * stride;
    fresh = mixed + queries * value_width;
    tops = fresh + queries * value_width;
    sums = tops + queries;
    new_tops = sums + queries;
    new_sums = new_tops + queries;
  }

  float *query_row(int64_t q) { return query + q * row; } // to be filled, scaled, before the first stretch
  int64_t query_stride() const { return row; }

  // n keys [n, key_width] and values, `v_stride` apart; visible(q) of them, from the first on, count for query q.
  template <class V> void see(const float *keys, const float *values, int64_t v_stride, int64_t n, V visible) {
    const Output to{scores, stride, nullptr, nullptr};
    int64_t c = 0;
    for (; c + COLUMNS <= n; c += COLUMNS)
      columns<COLUMNS>(query, queries, row, keys + c * key_width, key_width, AHEAD_BYTES, to, c);
    for (; c < n; ++c)
      columns<1>(query, queries, row, keys + c * key_width, key_width, AHEAD_BYTES, to, c);
    for (int64_t q = 0; q < queries; ++q) {
      const int64_t own = visible(q) < n ? visible(q) : n;
      new_sums[q] = 0.f;
      if (own > 0)
        softmax(scores + q * stride, own, n, new_tops[q], new_sums[q]);
      else
        memset(scores + q * stride, 0, n * sizeof(float));
    }
    int64_t q = 0;
    for (; q + 2 <= queries; q += 2)
      weighted<2>(scores + q * stride, stride, values, v_stride, n, value_width, fresh + q * value_width);
    if (q < queries)
      weighted<1>(scores + q * stride, stride, values, v_stride, n, value_width, fresh + q * value_width);
    for (q = 0; q < queries; ++q)
      if (new_sums[q] != 0.f)
        merge(q);
  }

  // The attended value of query q.
  const float *finish(int64_t q) {
    float *value = mixed + q * value_width;
    for (int64_t i = 0; i < value_width; ++i)
      value[i] /= sums[q];
    return value;
  }

private:
  void merge(int64_t q) {
    float *kept = mixed + q * value_width;
    const float *added = fresh + q * value_width;
    if (sums[q] == 0.f) {
      memcpy(kept, added, value_width * sizeof(float));
      tops[q] = new_tops[q];
      sums[q] = new_sums[q];
      return;
    }
    const float most = tops[q] > new_tops[q] ? tops[q] : new_tops[q];
    Floats exponents = {};
    exponents[0] = tops[q] - most;
    exponents[1] = new_tops[q] - most;
    const Floats shares = exponential(exponents);
    const float old_share = shares[0], new_share = shares[1];
    for (int64_t i = 0; i < value_width; ++i)
      kept[i] = kept[i] * old_share + added[i] * new_share;
    sums[q] = sums[q] * old_share + new_sums[q] * new_share;
    tops[q] = most;
  }

  int64_t queries, key_width, value_width, row, stride;
  float *query, *scores, *mixed, *fresh, *tops, *sums, *new_tops, *new_sums;
};

} // namespace
