// Vectors of fp32, and the one way a sum over their lanes is formed.

#pragma once

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
constexpr int STEP = 2 * LANES; // numbers of k in one turn of the inner loop

typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef int32_t Integers __attribute__((vector_size(LANES * 4)));
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

// e^x to about 1e-7 of itself, for x from -87 to 88; x beyond is taken for the nearer end. Cody and Waite's reduction to
// |r| <= ln 2 / 2 and a polynomial of degree 7.
inline Floats exponential(Floats x) {
  const Floats low = Floats{} - 87.f, high = Floats{} + 88.f, shift = Floats{} + 12582912.f; // 1.5 · 2^23
  x = x > high ? high : x;
  x = x < low ? low : x;
  const Floats shifted = x * 1.44269504f + shift, n = shifted - shift;
  const Floats r = x - n * 0.693359375f + n * 2.12194440e-4f;
  Floats p = r * 1.98756915e-4f + 1.39819995e-3f;
  p = p * r + 8.33345191e-3f;
  p = p * r + 4.16657959e-2f;
  p = p * r + 1.66666654e-1f;
  p = p * r + 0.5f;
  p = p * r * r + r + 1.f;
  return (Floats)((Integers)p + (((Integers)shifted - (Integers)shift) << 23));
}

} // namespace
