// Numbers of the KV, and vectors of them: fp32 of as many lanes as a register holds, made of bfloat16, fp16 or codes.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#define FORCED inline __attribute__((always_inline))

namespace {

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float Vec __attribute__((vector_size(W * 4)));
typedef uint32_t UVec __attribute__((vector_size(W * 4)));
typedef float LooseVec __attribute__((vector_size(W * 4), aligned(4), may_alias));

inline Vec load(const float* p) { return *reinterpret_cast<const LooseVec*>(p); }
inline void store(float* p, Vec v) { *reinterpret_cast<LooseVec*>(p) = v; }
inline Vec splat(float x) { return x - Vec{}; }

struct BFloat16 { uint16_t bits; };
struct Half { uint16_t bits; };

inline float widen(float x) { return x; }
inline float widen(BFloat16 x) { uint32_t u = uint32_t(x.bits) << 16; float f; std::memcpy(&f, &u, 4); return f; }
inline void narrow(float x, float& y) { y = x; }
inline void narrow(float x, BFloat16& y) {
  uint32_t u; std::memcpy(&u, &x, 4);
  y.bits = (u & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
#if defined(__F16C__)
inline float widen(Half x) { return _cvtsh_ss(x.bits); }
inline void narrow(float x, Half& y) { y.bits = _cvtss_sh(x, 0); }
#else
#if defined(__aarch64__)
typedef __fp16 Float16;  // g++ has no _Float16 in C++ there before version 13
#else
typedef _Float16 Float16;
#endif
inline float widen(Half x) { Float16 h; std::memcpy(&h, &x, 2); return float(h); }
inline void narrow(float x, Half& y) { Float16 h = Float16(x); std::memcpy(&y, &h, 2); }
#endif

// W numbers, or codes, as fp32.
inline Vec widened(const float* p) { return load(p); }
#if defined(__AVX512F__)
inline Vec widened(const BFloat16* p) {
  __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return (Vec)_mm512_slli_epi32(wide, 16);
}
inline Vec widened(const Half* p) { return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline Vec widened(const uint8_t* p) {
  return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
#elif defined(__AVX2__)
inline __m128i bytes16(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
inline Vec widened(const BFloat16* p) { return (Vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(bytes16(p)), 16); }
inline Vec widened(const uint8_t* p) {
  return (Vec)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
#if defined(__F16C__)
inline Vec widened(const Half* p) { return (Vec)_mm256_cvtph_ps(bytes16(p)); }
#else
inline Vec widened(const Half* p) { Vec x; for (int i = 0; i < W; i++) x[i] = widen(p[i]); return x; }
#endif
#else
inline float widen(uint8_t x) { return x; }
template <class T>
inline Vec widened(const T* p) { Vec x; for (int i = 0; i < W; i++) x[i] = widen(p[i]); return x; }
#endif
inline Vec exponential(Vec x) {  // of numbers up to 0; 0 below -87; relative error 2e-7
  Vec t = x * 1.44269504f + 12582912.f;  // 1.5 * 2^23: the integer lies in the lowest bits
  Vec n = t - 12582912.f;
  Vec r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Vec p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f; p = p * r + 8.3334519073e-3f; p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f; p = p * r + 5.0000001201e-1f; p = p * r * r + r + 1.f;
  UVec bits; std::memcpy(&bits, &t, sizeof t);
  UVec one; std::memcpy(&one, &p, sizeof p);
  one += bits << 23;  // below -87 it wraps, and the lane is not taken
  std::memcpy(&p, &one, sizeof p);
  return x > -87.f ? p : Vec{};  // also NaN, of rows that see nothing
}
inline float largest(Vec v) { float m = v[0]; for (int i = 1; i < W; i++) m = std::max(m, v[i]); return m; }
inline float total(Vec v) {
  alignas(64) float x[W];
  store(x, v);
  for (int n = W / 2; n; n /= 2) for (int i = 0; i < n; i++) x[i] += x[i + n];
  return x[0];
}

}  // namespace
