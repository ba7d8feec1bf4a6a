// Sums over k of a few rows of x with a few rows of weights, held in registers.

#pragma once

#include "vector.h"

namespace {

constexpr int ROWS = 4, COLUMNS = 3; // of y in registers at once: 12 sums, 3 weights and 1 input fill 16 registers
constexpr int64_t STRIP = 16 * COLUMNS; // columns that a thread takes at a time
constexpr int64_t TALL = 64;            // rows that pass while a strip of weights is in the cache
constexpr int64_t AHEAD_BYTES = 8192;   // how far before their use weights are asked for, at least

struct Output {
  float *y;
  int64_t stride; // from row to row
  const float *scale, *bias; // by column, or null
  bool onto = false;         // add to what y holds
};

// `count` steps of k added to the sums of R rows by C columns.
template <int R, int C, class W>
inline void add(Floats (&sums)[R][C], const float *x, int64_t width, const W *w, int64_t k, int64_t ahead, int64_t count) {
  for (; count; --count, x += STEP, w += STEP) {
    {
      Floats weights[C];
      UNROLLED for (int c = 0; c < C; ++c) {
        __builtin_prefetch((const char *)(w + c * k) + ahead);
        weights[c] = first(w + c * k);
      }
      UNROLLED for (int r = 0; r < R; ++r) {
        Floats input = load<Floats>(x + r * width);
        hold(input);
        UNROLLED for (int c = 0; c < C; ++c) fused(sums[r][c], input, weights[c]);
      }
    }
    asm volatile("" ::: "memory"); // both halves at once would not fit into the registers
    {
      Floats weights[C];
      UNROLLED for (int c = 0; c < C; ++c) weights[c] = second(w + c * k);
      UNROLLED for (int r = 0; r < R; ++r) {
        Floats input = load<Floats>(x + r * width + LANES);
        hold(input);
        UNROLLED for (int c = 0; c < C; ++c) fused(sums[r][c], input, weights[c]);
      }
    }
    asm volatile("" ::: "memory");
  }
}

// R rows by C columns of y.
template <int R, int C, class W>
inline void tile(const float *x, int64_t width, const W *w, int64_t k, int64_t ahead, const Output &out, int64_t column) {
  Floats sums[R][C];
  UNROLLED for (int r = 0; r < R; ++r) UNROLLED for (int c = 0; c < C; ++c) sums[r][c] = Floats{};
  const int64_t whole = k / STEP * STEP;
  add(sums, x, width, w, k, ahead, whole / STEP);
  if (whole < k)
    UNROLLED for (int c = 0; c < C; ++c) {
      W rest[STEP];
      memset(rest, 0, sizeof rest);
      memcpy(rest, w + c * k + whole, (k - whole) * sizeof(W));
      UNROLLED for (int r = 0; r < R; ++r) {
        fused(sums[r][c], load<Floats>(x + r * width + whole), first(rest));
        fused(sums[r][c], load<Floats>(x + r * width + whole + LANES), second(rest));
      }
    }
  UNROLLED for (int r = 0; r < R; ++r) // unrolled, or the sums would live in memory, where they can be indexed
    UNROLLED for (int c = 0; c < C; ++c) {
      float sum = total(sums[r][c]);
      if (out.scale)
        sum *= out.scale[column + c];
      if (out.bias)
        sum += out.bias[column + c];
      float &y = out.y[r * out.stride + column + c];
      y = out.onto ? y + sum : sum;
    }
}

// All rows by C columns.
template <int C, class W>
void columns(const float *x, int64_t rows, int64_t width, const W *w, int64_t k, int64_t ahead, Output out, int64_t column) {
  for (; rows >= ROWS; rows -= ROWS, x += ROWS * width, out.y += ROWS * out.stride)
    tile<ROWS, C>(x, width, w, k, ahead, out, column);
  switch (rows) {
  case 3: return tile<3, C>(x, width, w, k, ahead, out, column);
  case 2: return tile<2, C>(x, width, w, k, ahead, out, column);
  case 1: return tile<1, C>(x, width, w, k, ahead, out, column);
  }
}

} // namespace
