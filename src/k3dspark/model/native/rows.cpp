// What happens to rows between two products: normalising, rotating and storing, gating. Row by row, number by number.

#include "vector.h"

#include <cmath>

namespace {

constexpr int64_t GRAIN = 1 << 15; // numbers from which a second thread is worth waking

// x of one row at one place, zeros beyond `width`.
inline Floats part(const float *x, int64_t i, int64_t width) {
  if (i + LANES <= width)
    return load<Floats>(x + i);
  float rest[LANES] = {};
  memcpy(rest, x + i, (width - i) * sizeof(float));
  return load<Floats>(rest);
}

// (e, o) · (c + is) for every pair of a head.
inline void rotated(const float *from, const float *rotation, int64_t width, float *to) {
  for (int64_t i = 0; i < width; i += 2) {
    const float even = from[i], odd = from[i + 1], c = rotation[i], s = rotation[i + 1];
    to[i] = even * c - odd * s;
    to[i + 1] = odd * c + even * s;
  }
}

} // namespace

// y = x · gain / sqrt(Σx² + floor) for `count` stretches of `width` in every row; y may be x. gain may be null.
extern "C" void k3dspark_norm(const float *x, int64_t rows, int64_t stride, int64_t count, int64_t width,
                              const float *gain, float floor, float *y, int64_t y_stride, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * count * width > GRAIN)
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < count; ++c) {
      const float *from = x + r * stride + c * width;
      float *to = y + r * y_stride + c * width;
      Floats squares = {};
      for (int64_t i = 0; i < width; i += LANES) {
        const Floats v = part(from, i, width);
        fused(squares, v, v);
      }
      const float unit = 1.f / std::sqrt(total(squares) + floor);
      for (int64_t i = 0; i < width; ++i)
        to[i] = gain ? from[i] * unit * gain[i] : from[i] * unit;
    }
}

// silu(gate) · up for rows [gate | up] of 2 · width → [width].
extern "C" void k3dspark_gate(const float *both, int64_t rows, int64_t width, float *y, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * width > GRAIN)
  for (int64_t r = 0; r < rows; ++r) {
    const float *gate = both + r * 2 * width, *up = gate + width;
    float *to = y + r * width;
    for (int64_t i = 0; i < width; i += LANES) {
      const Floats g = part(gate, i, width), gated = g / (1.f + exponential(-g)) * part(up, i, width);
      memcpy(to + i, &gated, (i + LANES <= width ? LANES : width - i) * sizeof(float));
    }
  }
}

// Rows hold queries [heads], keys [kv_heads] and values [kv_heads] of `width` side by side. Queries are rotated where
// they are; keys, rotated, and values go to the slots of their positions in the caches [chunks, kv_heads, chunk, width]
// of their sequences, one address a row.
extern "C" void k3dspark_store(float *qkv, int64_t rows, int64_t heads, int64_t kv_heads, int64_t width,
                               const float *rotations, const int64_t *positions, float *const *keys,
                               float *const *values, int64_t chunk, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * (heads + 2 * kv_heads) * width > GRAIN)
  for (int64_t r = 0; r < rows; ++r) {
    float *row = qkv + r * (heads + 2 * kv_heads) * width;
    const int64_t position = positions[r];
    const float *rotation = rotations + position * width;
    for (int64_t h = 0; h < heads; ++h)
      rotated(row + h * width, rotation, width, row + h * width);
    for (int64_t h = 0; h < kv_heads; ++h) {
      const int64_t slot = ((position / chunk * kv_heads + h) * chunk + position % chunk) * width;
      rotated(row + (heads + h) * width, rotation, width, keys[r] + slot);
      memcpy(values[r] + slot, row + (heads + kv_heads + h) * width, width * sizeof(float));
    }
  }
}
