// Absorbed multi-head latent attention of one draft block over the context rows of its sequence and its own rows.
//
// A row is [normalised latent | rotated key], rank + rope wide; values are its first `rank` numbers (spec A.5).

#include "running.h"

#include <cmath>

namespace {

constexpr int64_t STRETCH = 256; // context rows that a pass takes at once

inline void rotated(const float *from, const float *cosines, const float *sines, int64_t width, float *to) {
  for (int64_t i = 0; i < width; i += 2) {
    const float even = from[i], odd = from[i + 1], c = cosines[i / 2], s = sines[i / 2];
    to[i] = even * c - odd * s;
    to[i + 1] = odd * c + even * s;
  }
}

// x [rows, k] · wᵀ for w [n, k]; rows of x are `width` apart and zero from k to there.
inline void product(const float *x, int64_t rows, int64_t width, const float *w, int64_t k, int64_t n, float *y, int64_t stride) {
  const Output to{y, stride, nullptr, nullptr};
  int64_t c = 0;
  for (; c + COLUMNS <= n; c += COLUMNS)
    columns<COLUMNS>(x, rows, width, w + c * k, k, AHEAD_BYTES, to, c);
  for (; c < n; ++c)
    columns<1>(x, rows, width, w + c * k, k, AHEAD_BYTES, to, c);
}

inline int64_t padded(int64_t k) { return (k + STEP - 1) / STEP * STEP; }

} // namespace

// q [rows, heads · (nope + rope)]; kv [rows, rank + rope], rows `kv_stride` apart, before norm and rotation; cosines and
// sines [rows, rope / 2]; up_key [heads, rank, nope]; up_value [heads, value, rank]; chunks of context rows with their
// counts. causal: a row sees the block up to itself. out [rows, heads · value].
extern "C" void k3dspark_latent(const float *q, const float *kv, int64_t kv_stride, const float *gain, float floor,
                                const float *cosines, const float *sines, int64_t rows, int64_t heads, int64_t nope,
                                int64_t rope, int64_t value, int64_t rank, const float *up_key, const float *up_value,
                                float scale, int64_t causal, const float *const *chunks, const int64_t *counts,
                                int64_t chunk_count, float *out, int64_t threads) {
  const int64_t width = rank + rope, half = rope / 2;
  std::vector<float> block(rows * width);
  for (int64_t r = 0; r < rows; ++r) {
    const float *from = kv + r * kv_stride;
    float *to = block.data() + r * width, squares = 0.f;
    for (int64_t i = 0; i < rank; ++i)
      squares += from[i] * from[i];
    const float unit = 1.f / std::sqrt(squares + floor);
    for (int64_t i = 0; i < rank; ++i)
      to[i] = from[i] * unit * gain[i];
    rotated(from + rank, cosines + r * half, sines + r * half, rope, to + rank);
  }
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> room, query(rows * padded(nope)), mixed(rows * padded(rank));
#pragma omp for schedule(dynamic)
    for (int64_t h = 0; h < heads; ++h) {
      Running running(room, rows, width, rank, STRETCH);
      for (int64_t r = 0; r < rows; ++r)
        memcpy(query.data() + r * padded(nope), q + (r * heads + h) * (nope + rope), nope * sizeof(float));
      product(query.data(), rows, padded(nope), up_key + h * rank * nope, nope, rank, running.query_row(0), running.query_stride());
      for (int64_t r = 0; r < rows; ++r) {
        float *to = running.query_row(r);
        rotated(q + (r * heads + h) * (nope + rope) + nope, cosines + r * half, sines + r * half, rope, to + rank);
        for (int64_t i = 0; i < width; ++i)
          to[i] *= scale;
      }
      for (int64_t chunk = 0; chunk < chunk_count; ++chunk)
        for (int64_t begin = 0; begin < counts[chunk]; begin += STRETCH) {
          const float *at = chunks[chunk] + begin * width;
          const int64_t n = counts[chunk] - begin < STRETCH ? counts[chunk] - begin : STRETCH;
          running.see(at, at, width, n, [&](int64_t) { return n; });
        }
      running.see(block.data(), block.data(), width, rows, [&](int64_t r) { return causal ? r + 1 : rows; });
      for (int64_t r = 0; r < rows; ++r)
        memcpy(mixed.data() + r * padded(rank), running.finish(r), rank * sizeof(float));
      product(mixed.data(), rows, padded(rank), up_value + h * value * rank, rank, value, out + h * value, heads * value);
    }
  }
}
