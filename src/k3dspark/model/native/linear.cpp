// y = x Wᵀ (· scale) (+ bias) for a few rows of fp32 x and weights [n, k] stored as fp32, bfloat16 or int8.
//
// Every number of y is one sum over k in one order: two vectors at a time, each lane by fused multiply-add, lanes added
// at the end. The order does not depend on how many rows there are, on where the row stands, or on the threads, so the
// same row gives the same bits in any company. Weights are read where they lie, once for every 64 rows.

#include "products.h"

namespace {

constexpr int64_t SERIAL = 1 << 14;

// One row of x as `first` and `second` meet it, zeros up to `width`.
template <class W> void place(const float *x, int64_t k, float *to, int64_t width) {
  memcpy(to, x, k * sizeof(float));
  memset(to + k, 0, (width - k) * sizeof(float));
}

template <> void place<Bf16>(const float *x, int64_t k, float *to, int64_t width) {
  for (int64_t i = 0; i < width; i += STEP)
    for (int j = 0; j < LANES; ++j) {
      to[i + j] = i + 2 * j < k ? x[i + 2 * j] : 0.f;
      to[i + LANES + j] = i + 2 * j + 1 < k ? x[i + 2 * j + 1] : 0.f;
    }
}

template <class W>
int linear(const float *x, int64_t rows, int64_t k, const W *w, int64_t n, Output out, int threads) {
  const int64_t strips = (n + STRIP - 1) / STRIP, width = (k + STEP - 1) / STEP * STEP;
  const int64_t group = COLUMNS * k * (int64_t)sizeof(W), ahead = (AHEAD_BYTES / (group + 1) + 1) * group;
  float *placed = new (std::align_val_t{64}, std::nothrow) float[(rows < TALL ? rows : TALL) * width + 1];
  if (!placed)
    return 1;
  for (int64_t top = 0; top < rows; top += TALL, x += TALL * k, out.y += TALL * out.stride) {
    const int64_t here = rows - top < TALL ? rows - top : TALL;
    const bool few = here * width < SERIAL; // placed before the other threads have woken
    for (int64_t r = 0; few && r < here; ++r)
      place<W>(x + r * k, k, placed + r * width, width);
#pragma omp parallel num_threads(threads)
    {
      if (!few) {
#pragma omp for schedule(static)
        for (int64_t r = 0; r < here; ++r)
          place<W>(x + r * k, k, placed + r * width, width);
      }
#pragma omp for schedule(static)
      for (int64_t strip = 0; strip < strips; ++strip) {
        int64_t c = strip * STRIP;
        const int64_t end = c + STRIP < n ? c + STRIP : n;
        if (here == 1) // few sums: more columns at once, or each waits for its predecessor
          for (; c + 2 * COLUMNS <= end; c += 2 * COLUMNS)
            tile<1, 2 * COLUMNS>(placed, width, w + c * k, k, ahead, out, c);
        for (; c + COLUMNS <= end; c += COLUMNS)
          columns<COLUMNS>(placed, here, width, w + c * k, k, ahead, out, c);
        for (; c < end; ++c)
          columns<1>(placed, here, width, w + c * k, k, ahead, out, c);
      }
    }
  }
  operator delete[](placed, std::align_val_t{64});
  return 0;
}

} // namespace

// kind: bytes of a weight (4: fp32, 2: bfloat16, 1: int8). scale and bias may be null; onto: added to y. Returns 0, or 1
// without memory.
extern "C" int k3dspark_linear(const float *x, int64_t rows, int64_t k, const void *w, int64_t kind, int64_t n,
                               const float *scale, const float *bias, float *y, int64_t stride, int64_t onto,
                               int64_t threads) {
  const Output out{y, stride, scale, bias, onto != 0};
  switch (kind) {
  case 4: return linear(x, rows, k, (const float *)w, n, out, (int)threads);
  case 2: return linear(x, rows, k, (const Bf16 *)w, n, out, (int)threads);
  case 1: return linear(x, rows, k, (const int8_t *)w, n, out, (int)threads);
  }
  return 2;
}
