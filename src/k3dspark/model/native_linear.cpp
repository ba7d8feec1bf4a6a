// y = x Wᵀ (· scale) (+ bias) for a few rows of fp32 x and weights [n, k] stored as fp32, bfloat16 or int8.
//
// Every number of y is one sum over k in one order: two vectors at a time, each lane by fused multiply-add, lanes added
// at the end. The order does not depend on how many rows there are, on where the row stands, or on the threads, so the
// same row gives the same bits in any company. Weights are read where they lie, once for every 64 rows.

#include <cstdint>
#include <cstring>
#include <new>
#if defined(__AVX2__)
#include <immintrin.h> // compilers turn the conversion of bytes into a dozen instructions
#endif

namespace {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif
constexpr int STEP = 2 * LANES;      // numbers of k in one turn of the inner loop
constexpr int ROWS = 4, COLUMNS = 3; // of y in registers at once: 12 sums, 3 weights and 1 input fill 16 registers
constexpr int64_t STRIP = 16 * COLUMNS; // columns that a thread takes at a time
constexpr int64_t TALL = 64;            // rows that pass while a strip of weights is in the cache
constexpr int64_t AHEAD_BYTES = 8192;   // how far before their use weights are asked for, at least

typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));
typedef int8_t Bytes __attribute__((vector_size(LANES)));

struct Bf16 {
  uint16_t bits;
};

#define UNROLLED _Pragma("GCC unroll 8")

template <class V> inline V load(const void *from) {
  V v;
  memcpy(&v, from, sizeof v);
  return v;
}

// The compiler would keep sums on the stack, or weights in memory, to save a register elsewhere: assembly holds both.
inline void fused(Floats &sum, Floats a, Floats b) {
#if defined(__FMA__)
  asm volatile("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
#else
  sum += a * b;
#endif
}

inline void hold(Floats &v) {
#if defined(__FMA__)
  asm volatile("" : "+v"(v));
#else
  (void)v;
#endif
}

// The two halves of STEP weights as fp32. Of bfloat16 they are those at even and at odd places, which a shift yields.
inline Floats first(const float *w) { return load<Floats>(w); }
inline Floats second(const float *w) { return load<Floats>(w + LANES); }
#if defined(__AVX512F__)
inline Floats first(const int8_t *w) { return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load<__m128i>(w))); }
#elif defined(__AVX2__)
inline Floats first(const int8_t *w) { return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)w))); }
#else
inline Floats first(const int8_t *w) { return __builtin_convertvector(load<Bytes>(w), Floats); }
#endif
inline Floats second(const int8_t *w) { return first(w + LANES); }
inline Floats first(const Bf16 *w) { return (Floats)(load<Words>(w) << 16); }
inline Floats second(const Bf16 *w) {
  Words high = load<Words>(w) >> 16;
#if defined(__FMA__)
  asm("" : "+v"(high)); // or it becomes a mask, which wants a register
#endif
  return (Floats)(high << 16);
}

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

typedef float Four __attribute__((vector_size(16)));

inline float total(Floats v) {
#if defined(__AVX512F__)
  typedef float Eight __attribute__((vector_size(32)));
  const Eight half = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) +
                     __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
#else
  const Floats half = v;
#endif
  const Four four = __builtin_shufflevector(half, half, 0, 1, 2, 3) + __builtin_shufflevector(half, half, 4, 5, 6, 7);
  const Four two = four + __builtin_shufflevector(four, four, 2, 3, 0, 1);
  return two[0] + two[1];
}

struct Output {
  float *y;
  int64_t stride; // from row to row
  const float *scale, *bias;
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
      out.y[r * out.stride + column + c] = sum;
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

template <class W>
int linear(const float *x, int64_t rows, int64_t k, const W *w, int64_t n, Output out, int threads) {
  const int64_t strips = (n + STRIP - 1) / STRIP, width = (k + STEP - 1) / STEP * STEP;
  const int64_t group = COLUMNS * k * (int64_t)sizeof(W), ahead = (AHEAD_BYTES / (group + 1) + 1) * group;
  float *placed = new (std::align_val_t{64}, std::nothrow) float[(rows < TALL ? rows : TALL) * width + 1];
  if (!placed)
    return 1;
  for (int64_t top = 0; top < rows; top += TALL, x += TALL * k, out.y += TALL * out.stride) {
    const int64_t here = rows - top < TALL ? rows - top : TALL;
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
      for (int64_t r = 0; r < here; ++r)
        place<W>(x + r * k, k, placed + r * width, width);
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

// kind: bytes of a weight (4: fp32, 2: bfloat16, 1: int8). scale and bias may be null. Returns 0, or 1 without memory.
extern "C" int k3dspark_linear(const float *x, int64_t rows, int64_t k, const void *w, int64_t kind, int64_t n,
                               const float *scale, const float *bias, float *y, int64_t stride, int64_t threads) {
  const Output out{y, stride, scale, bias};
  switch (kind) {
  case 4: return linear(x, rows, k, (const float *)w, n, out, (int)threads);
  case 2: return linear(x, rows, k, (const Bf16 *)w, n, out, (int)threads);
  case 1: return linear(x, rows, k, (const int8_t *)w, n, out, (int)threads);
  }
  return 2;
}
