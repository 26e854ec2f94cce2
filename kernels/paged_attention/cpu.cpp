// Paged attention on the CPU: queries of any length over ranges of blocks, each in the type of the KV or in INT8.
//
// Work is divided into items (range, KV head, tile of queries, split of the KV), which threads take one after the other;
// the splits of a tile are merged by their log-sum-exp. The rows of an item are its query tokens times the query heads of
// its KV head, so that a loaded K or V serves all of them. An item walks over spans of `Tile::span` tokens in steps of 32:
//
//     scores[rows, 32] = Q[rows, D] K^T[D, 32]       K as it lies in the page: channels by tokens
//     softmax online, once a span                    fp32
//     output[rows, D] += P[rows, 32] V[32, D]        V as it lies in the page: tokens by channels
//
// Both products are C[rows, 32] (+)= A[rows, k] B[k, 32] with B in rows of 32 numbers, and so there is one micro-kernel for
// each arithmetic: `Dot`, bfloat16 by the dot products of AVX512-BF16, pairs of k at once; and `Fused`, all else in fp32,
// in vectors that the compiler makes AVX-512, AVX2, SSE or NEON of. Up to FEW_ROWS rows (decode) read B where it lies, and
// multiply codes as they are; more rows unpack it once into the L1 cache. What is read next is prefetched meanwhile.
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__AVX512BF16__) && defined(__AVX512VBMI__) && defined(__AVX512VNNI__)
#define HAS_DOT 1
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
constexpr int STEP = 32;        // tokens, and channels, that a micro-kernel makes at once
constexpr int VECTORS = STEP / W;
constexpr int MAX_ROWS = 64;    // of an item
constexpr int FEW_ROWS = W == 16 ? 8 : 6;  // that a micro-kernel takes at once
constexpr int MAX_DIM = 512;    // of a head
constexpr float NEG_INF = -INFINITY;

typedef float Vec __attribute__((vector_size(W * 4)));
typedef int32_t IVec __attribute__((vector_size(W * 4)));
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
inline float widen(Half x) { _Float16 h; std::memcpy(&h, &x, 2); return float(h); }
inline void narrow(float x, Half& y) { _Float16 h = _Float16(x); std::memcpy(&y, &h, 2); }
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
  IVec bits; std::memcpy(&bits, &t, sizeof t);
  IVec one; std::memcpy(&one, &p, sizeof p);
  one += bits << 23;
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

// 32 tokens of one head, K or V: `rows` of numbers, or of codes with a minimum and a scale for each channel.
struct Source {
  const void* at;        // first number, or code
  int64_t stride;        // from row to row, in numbers or codes
  const float* minimum;  // null: no codes
  const float* scale;
};

struct Whole {  // rows that become integers, or are: number i of row r is [r * lda + i] * unit[r]
  float *query, *query_unit;
  int16_t* probability;
  float* probability_unit;
  Whole at(int64_t column) const { return {query, query_unit, probability ? probability + column : nullptr, probability_unit}; }
};

struct Ahead {  // what is prefetched into L2 while something else is computed: place j at `at + j * stride`
  const char* at;
  int64_t stride;
  bool halves;  // two places share a cache line
  void fetch(int j) const { if (at) __builtin_prefetch(at + j * stride, 0, 2); }
  void fetch_two(int j) const { fetch(j); if (!halves) fetch(j + 1); }
};

// fp32 arithmetic for any type of KV. PER_ROW: a row of codes has one minimum and scale (K), else a column has (V).
template <class T>
struct Fused {
  using Number = float;                  // of A, and of P
  static constexpr bool WHOLE = false;   // whether codes are multiplied by integers
  static Number number(float x) { return x; }

  template <bool PER_ROW>
  static void unpack(const Source& b, int64_t column, int k, float* to) {
    for (int i = 0; i < k; i++, to += STEP)
      for (int v = 0; v < STEP; v += W) {
        int64_t at = i * b.stride + column + v;
        if (!b.minimum) store(to + v, widened(static_cast<const T*>(b.at) + at));
        else {
          Vec x = widened(static_cast<const uint8_t*>(b.at) + at);
          store(to + v, PER_ROW ? x * b.scale[i] + b.minimum[i] : x * load(b.scale + column + v) + load(b.minimum + column + v));
        }
      }
  }
  // Sums of products with rows of B as they lie in memory, as many columns at once as registers hold; `finished` makes of a
  // sum what goes into C.
  template <int R, class S, class F>
  static void accumulate(const float* a, int64_t lda, const S* b, int64_t ldb, int k, float* c, int64_t ldc, bool add,
                         Ahead next, int line, F&& finished) {
    constexpr int HELD = W == 16 ? VECTORS : R <= 3 ? 4 : 2;
    for (int first = 0; first < VECTORS; first += HELD) {
      Vec acc[R][HELD] = {};
      for (int i = 0; i < k; i++) {
        if (first == 0) next.fetch(line + i);
        Vec x[HELD]; for (int v = 0; v < HELD; v++) x[v] = widened(b + i * ldb + (first + v) * W);
        for (int r = 0; r < R; r++) { float y = a[r * lda + i]; for (int v = 0; v < HELD; v++) acc[r][v] += x[v] * y; }
      }
      for (int r = 0; r < R; r++) for (int v = 0; v < HELD; v++) {
        int at = (first + v) * W;
        float* to = c + r * ldc + at;
        Vec product = finished(r, at, acc[r][v]);
        store(to, add ? load(to) + product : product);
      }
    }
  }
  template <int R>
  static void multiply_packed(const float* a, int64_t lda, const float* b, int64_t ldb, int k, float* c, int64_t ldc, bool add,
                              Ahead next, int line) {
    accumulate<R>(a, lda, b, ldb, k, c, ldc, add, next, line, [](int, int, Vec sum) { return sum; });
  }
  // Codes are multiplied as they are; minima and scales meet A (K) or the sums (V), so that a code costs no more than a bfloat16.
  template <bool PER_ROW, int R>
  static void multiply(const float* a, Whole, int64_t lda, const Source& b, int64_t width, int k, float* c, int64_t ldc, bool add,
                       Ahead next) {
    auto columns = [&](const auto* from, const float* left, int64_t ldl, auto&& finished) __attribute__((always_inline)) {
      for (int64_t column = 0; column < width; column += STEP)
        accumulate<R>(left, ldl, from + column, b.stride, k, c + column, ldc, add, next, int(column),
                      [&](int r, int at, Vec sum) __attribute__((always_inline)) { return finished(r, column + at, sum); });
    };
    if (!b.minimum) {
      columns(static_cast<const T*>(b.at), a, lda, [](int, int64_t, Vec sum) { return sum; });
      return;
    }
    const uint8_t* codes = static_cast<const uint8_t*>(b.at);
    float constant[R];
    if constexpr (PER_ROW) {
      alignas(64) float scaled[R * MAX_DIM];
      Vec sums[R] = {};
      for (int i = 0; i < k; i += W) {
        Vec scale = load(b.scale + i), minimum = load(b.minimum + i);
        for (int r = 0; r < R; r++) {
          Vec y = load(a + r * lda + i);
          store(scaled + r * k + i, y * scale);
          sums[r] += y * minimum;
        }
      }
      for (int r = 0; r < R; r++) constant[r] = total(sums[r]);
      columns(codes, scaled, k, [&](int r, int64_t, Vec sum) { return sum + constant[r]; });
    } else {
      for (int r = 0; r < R; r++) {  // A is 0 from k to the next multiple of STEP
        Vec sum = load(a + r * lda);
        for (int i = W; i < k; i += W) sum += load(a + r * lda + i);
        constant[r] = total(sum);
      }
      columns(codes, a, lda,
              [&](int r, int64_t at, Vec sum) { return sum * load(b.scale + at) + constant[r] * load(b.minimum + at); });
    }
  }
  static void probabilities(const float* s, float* p, int n) { std::memcpy(p, s, n * sizeof(float)); }
};

#ifdef HAS_DOT
// bfloat16 by dot products: A in pairs of k, B as vectors of 16 pairs.
struct Dot {
  using Number = uint16_t;
  static constexpr bool WHOLE = true;
  static Number number(float x) { BFloat16 y; narrow(x, y); return y.bits; }
  static __m512i zip(int half) {  // of two rows of 32 the pairs of columns 0 to 15, or 16 to 31
    alignas(64) static constexpr uint16_t low[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                                     8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    return _mm512_add_epi16(_mm512_load_si512(low), _mm512_set1_epi16(short(16 * half)));
  }
  struct Orders { alignas(64) uint8_t at[4][64]; };
  static constexpr Orders orders() {  // of vector v: columns 8 v to 8 v + 7 of the first row and of the second, by turns
    Orders o{};
    for (int v = 0; v < 4; v++)
      for (int i = 0; i < 16; i++) o.at[v][4 * i] = uint8_t(8 * v + i / 2 + 32 * (i % 2));
    return o;
  }
  struct Codes {  // two rows of 32 codes become two vectors of pairs of 16 bits, or four of pairs of 32
    static constexpr __mmask64 PAIRS = 0x5555555555555555ull;  // with the order of `zip`
    __m512i order[4];
    FORCED Codes() {
      static constexpr Orders found = orders();
      for (int v = 0; v < 4; v++) order[v] = _mm512_load_si512(found.at[v]);
    }
    FORCED __m512 wide(__m512i rows, int v) const {
      return _mm512_cvtepi32_ps(_mm512_maskz_permutexvar_epi8(0x1111111111111111ull, order[v], rows));
    }
    FORCED static __m512i two(const uint8_t* row, const uint8_t* next) {
      __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row));
      return _mm512_inserti64x4(_mm512_castsi256_si512(a), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(next)), 1);
    }
  };
  struct Numbers {
    const uint16_t* at; int64_t stride; __m512i low = zip(0), high = zip(1);
    FORCED void pair(int i, bool whole, __m512i& x, __m512i& y) const {
      const uint16_t* row = at + 2 * i * stride;
      __m512i a = _mm512_loadu_si512(row), b = whole ? _mm512_loadu_si512(row + stride) : _mm512_setzero_si512();
      x = _mm512_permutex2var_epi16(a, low, b); y = _mm512_permutex2var_epi16(a, high, b);
    }
  };
  struct CodesByRow : Codes {
    const uint8_t* at; int64_t stride; const float *minimum, *scale;
    CodesByRow(const Source& b, int64_t column)
        : at(static_cast<const uint8_t*>(b.at) + column), stride(b.stride), minimum(b.minimum), scale(b.scale) {}
    FORCED static __m512 both(const float* two) { double d; std::memcpy(&d, two, 8); return _mm512_castpd_ps(_mm512_set1_pd(d)); }
    FORCED void pair(int i, bool, __m512i& x, __m512i& y) const {
      const uint8_t* row = at + 2 * i * stride;
      __m512i rows = two(row, row + stride);
      __m512 m = both(minimum + 2 * i), s = both(scale + 2 * i);
      x = (__m512i)_mm512_cvtne2ps_pbh(_mm512_fmadd_ps(wide(rows, 1), s, m), _mm512_fmadd_ps(wide(rows, 0), s, m));
      y = (__m512i)_mm512_cvtne2ps_pbh(_mm512_fmadd_ps(wide(rows, 3), s, m), _mm512_fmadd_ps(wide(rows, 2), s, m));
    }
  };
  struct CodesByColumn : Codes {
    const uint8_t* at; int64_t stride; __m512 minimum[4], scale[4];
    CodesByColumn(const Source& b, int64_t column) : at(static_cast<const uint8_t*>(b.at) + column), stride(b.stride) {
      for (int v = 0; v < 4; v++) { minimum[v] = twice(b.minimum + column + 8 * v); scale[v] = twice(b.scale + column + 8 * v); }
    }
    static __m512 twice(const float* p) {
      return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7),
                                   _mm512_castps256_ps512(_mm256_loadu_ps(p)));
    }
    FORCED void pair(int i, bool whole, __m512i& x, __m512i& y) const {
      const uint8_t* row = at + 2 * i * stride;
      __m512i rows = two(row, whole ? row + stride : row);  // in the place of a row that is not there: finite, and P is 0
      x = (__m512i)_mm512_cvtne2ps_pbh(value(rows, 1), value(rows, 0));
      y = (__m512i)_mm512_cvtne2ps_pbh(value(rows, 3), value(rows, 2));
    }
    FORCED __m512 value(__m512i rows, int v) const { return _mm512_fmadd_ps(wide(rows, v), scale[v], minimum[v]); }
  };
  struct Packed {
    const __m512i* at; int64_t stride;
    FORCED void pair(int i, bool, __m512i& x, __m512i& y) const { x = at[i * stride]; y = at[i * stride + 1]; }
  };

  template <int R, class B>
  static void accumulate(const uint16_t* a, int64_t lda, const B& b, int k, float* c, int64_t ldc, bool add, Ahead next, int line) {
    __m512 left[R], right[R];
    for (int r = 0; r < R; r++) {
      left[r] = add ? _mm512_loadu_ps(c + r * ldc) : _mm512_setzero_ps();
      right[r] = add ? _mm512_loadu_ps(c + r * ldc + 16) : _mm512_setzero_ps();
    }
    auto step = [&](int i, bool whole) __attribute__((always_inline)) {
      __m512i x, y;
      b.pair(i, whole, x, y);
      for (int r = 0; r < R; r++) {
        int32_t two; std::memcpy(&two, a + r * lda + 2 * i, 4);
        __m512bh z = (__m512bh)_mm512_set1_epi32(two);
        left[r] = _mm512_dpbf16_ps(left[r], z, (__m512bh)x);
        right[r] = _mm512_dpbf16_ps(right[r], z, (__m512bh)y);
      }
    };
    for (int i = 0; i < k / 2; i++) { next.fetch_two(line + 2 * i); step(i, true); }
    if (k % 2) step(k / 2, false);
    for (int r = 0; r < R; r++) { _mm512_storeu_ps(c + r * ldc, left[r]); _mm512_storeu_ps(c + r * ldc + 16, right[r]); }
  }
  template <bool PER_ROW>
  static void unpack(const Source& b, int64_t column, int k, float* to) {
    __m512i* pairs = reinterpret_cast<__m512i*>(to);
    auto read = [&](const auto& reader) {
      for (int i = 0; i < k / 2; i++) reader.pair(i, true, pairs[2 * i], pairs[2 * i + 1]);
      if (k % 2) reader.pair(k / 2, false, pairs[k - 1], pairs[k]);
    };
    if (!b.minimum) read(Numbers{static_cast<const uint16_t*>(b.at) + column, b.stride});
    else if constexpr (PER_ROW) read(CodesByRow(b, column));
    else read(CodesByColumn(b, column));
  }
  template <int R>
  static void multiply_packed(const uint16_t* a, int64_t lda, const float* b, int64_t, int k, float* c, int64_t ldc, bool add,
                              Ahead next, int line) {
    accumulate<R>(a, lda, Packed{reinterpret_cast<const __m512i*>(b), 2}, (k + 1) / 2 * 2, c, ldc, add, next, line);
  }
  template <bool PER_ROW, int R>
  static void multiply(const uint16_t* a, Whole whole, int64_t lda, const Source& b, int64_t width, int k, float* c, int64_t ldc,
                       bool add, Ahead next) {
    if (b.minimum) return multiply_codes<PER_ROW, R>(whole, lda, b, width, k, c, ldc, add, next);
    for (int64_t column = 0; column < width; column += STEP)
      accumulate<R>(a, lda, Numbers{static_cast<const uint16_t*>(b.at) + column, b.stride}, k, c + column, ldc, add, next, int(column));
  }
  static __m512i integers(Vec x, Vec y) {
    return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7),
                                    _mm512_packs_epi32(_mm512_cvtps_epi32((__m512)x), _mm512_cvtps_epi32((__m512)y)));
  }
  // Writes numbers from 0 to `largest` in units, which are returned.
  static float integers(const float* from, int n, float largest, int16_t* to) {
    const Vec factor = splat(largest > 0 ? 32767.f / largest : 0.f);
    for (int i = 0; i < n; i += 2 * W) _mm512_storeu_si512(to + i, integers(load(from + i) * factor, load(from + i + W) * factor));
    return largest / 32767.f;
  }
  // Writes queries times scales in units of the row; where the largest comes to less than `most` / 32, or to more than `most`,
  // the row gets a unit of which it is half as many. Returns the product with the minima.
  static float scaled(float* query, float& unit, const Source& b, int k, int16_t* to) {
    const float most = k <= 256 ? 32767.f : 16383.f;  // 255 k of them stay below 2^31
    for (bool again = true;; again = false) {
      Vec sum = {}, other = {};
      __m512 large = _mm512_setzero_ps();
      for (int i = 0; i < k; i += 2 * W) {
        Vec x = load(query + i), y = load(query + i + W);
        sum += x * load(b.minimum + i);
        other += y * load(b.minimum + i + W);
        x *= load(b.scale + i);
        y *= load(b.scale + i + W);
        large = _mm512_range_ps(_mm512_range_ps(large, (__m512)x, 0b1011), (__m512)y, 0b1011);  // the larger size, positive
        _mm512_storeu_si512(to + i, integers(x, y));
      }
      bool fits = !_mm512_cmp_ps_mask(large, _mm512_set1_ps(most), _CMP_GT_OQ) &&
                  _mm512_cmp_ps_mask(large, _mm512_set1_ps(most / 32), _CMP_GE_OQ);
      float largest;
      if (fits || !again || !((largest = _mm512_reduce_max_ps(large)) > 0)) return _mm512_reduce_add_ps((__m512)(sum + other)) * unit;
      float factor = most / 2 / largest;
      for (int i = 0; i < k; i += W) store(query + i, load(query + i) * factor);
      unit /= factor;
    }
  }
  // Codes are multiplied as they are, by integers (VNNI). Minima and scales meet A (K) or the sums (V). An integer errs by half a
  // unit: by 2^-16 of the largest probability of a span, and by 2^-10 at most of the largest scaled query. bfloat16 errs by 2^-9
  // of each number.
  template <bool PER_ROW, int R>
  static void multiply_codes(Whole a, int64_t lda, const Source& b, int64_t width, int k, float* c, int64_t ldc, bool add, Ahead next) {
    alignas(64) int16_t own[PER_ROW ? R * MAX_DIM : 1];
    const int16_t* left = PER_ROW ? own : a.probability;
    float unit[R], constant[R];
    for (int r = 0; r < R; r++) {
      if constexpr (PER_ROW) {
        constant[r] = scaled(a.query + r * lda, a.query_unit[r], b, k, own + r * k);
        unit[r] = a.query_unit[r];
      } else {  // A is 0 from k to the next multiple of STEP
        __m512i sum = _mm512_dpwssd_epi32(_mm512_setzero_si512(), _mm512_loadu_si512(left + r * lda), _mm512_set1_epi16(1));
        unit[r] = a.probability_unit[r];
        constant[r] = float(_mm512_reduce_add_epi32(sum)) * unit[r];
      }
    }
    const int64_t ldl = PER_ROW ? k : lda;
    const __m512i low = zip(0), high = zip(1);
    for (int64_t column = 0; column < width; column += STEP) {
      const uint8_t* row = static_cast<const uint8_t*>(b.at) + column;
      __m512i first[R], second[R];
      for (int r = 0; r < R; r++) first[r] = second[r] = _mm512_setzero_si512();
      for (int i = 0; i < k; i += 2, row += 2 * b.stride) {
        next.fetch_two(int(column) + i);
        __m512i rows = Codes::two(row, i + 1 < k ? row + b.stride : row);
        __m512i x = _mm512_maskz_permutexvar_epi8(Codes::PAIRS, low, rows), y = _mm512_maskz_permutexvar_epi8(Codes::PAIRS, high, rows);
        for (int r = 0; r < R; r++) {
          int32_t two; std::memcpy(&two, left + r * ldl + i, 4);
          __m512i z = _mm512_set1_epi32(two);
          first[r] = _mm512_dpwssd_epi32(first[r], z, x);
          second[r] = _mm512_dpwssd_epi32(second[r], z, y);
        }
      }
      for (int r = 0; r < R; r++)
        for (int v = 0; v < 2; v++) {
          Vec sum = (Vec)_mm512_cvtepi32_ps(v ? second[r] : first[r]) * unit[r];
          float* to = c + r * ldc + column + v * W;
          if constexpr (PER_ROW) sum += constant[r];
          else sum = sum * load(b.scale + column + v * W) + constant[r] * load(b.minimum + column + v * W);
          store(to, add ? load(to) + sum : sum);
        }
    }
  }
  static void probabilities(const float* s, uint16_t* p, int n) {
    for (int i = 0; i < n; i += 32)
      _mm512_storeu_si512(p + i, (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(s + i + 16), _mm512_loadu_ps(s + i)));
  }
};
#endif

}  // namespace

// Mirrored by cpu.py. Strides count elements unless they are named in bytes.
struct Call {
  const void* query; void* out; float* lse;             // [tokens, heads, D] twice, and [tokens, heads] or null
  int64_t query_stride, out_stride;                     // from token to token
  const void* pages; int64_t page_stride, num_blocks;
  const uint8_t* records; int64_t record_bytes, num_records;
  const int32_t* block_ids; const int64_t* first_block; // where the ids of a range begin
  const int32_t *q_start, *q_len, *q_position, *kv_len; // of each range
  int64_t num_ranges, num_heads, num_kv_heads, head_dim, block_size, window;
  float scale, softcap;
  int32_t dtype, threads;
};

namespace {

struct Item {
  int32_t range, head, first, count;  // query tokens of the range
  int32_t begin, end;                 // of the KV, a multiple of STEP the first
  int32_t split, splits;
  int64_t partial;                    // number of the first partial result, if there are several
};

struct Scratch {  // of one thread
  std::vector<float> memory;
  float* take(int64_t& at, int64_t floats) {
    float* found = memory.data() + at;
    at += (floats + 15) / 16 * 16;
    return found;
  }
};

template <class T, class E>
struct Kernel {
  using Number = typename E::Number;
  explicit Kernel(const Call& c) : call(c) {}
  const Call& call;
  const int64_t D = call.head_dim, N = call.block_size, group = call.num_heads / call.num_kv_heads;
  const int64_t side = D * N;
  std::vector<float> partial;  // per partial result MAX_ROWS * (D + 2): output, maximum, sum

  struct Work {
    Number *q, *p;
    Whole whole;  // Q and P, where codes are multiplied by integers
    float *scores, *output, *packed, *maxima, *sums, *channels;
    int64_t rows, span;
  };

  const uint8_t* record(int64_t id) const { return call.records + (id - call.num_blocks) * call.record_bytes; }
  const T* page(int64_t id) const { return static_cast<const T*>(call.pages) + id * call.page_stride; }

  // Where K (value = 0) or V (1) of a head lies for the 32 tokens from `token` on; codes get their channels widened.
  Source source(const Item& item, int64_t token, int value, float* channels) const {
    int64_t id = call.block_ids[call.first_block[item.range] + token / N], at = token % N;
    int64_t offset = (2 * item.head + value) * side + (value ? at * D : at), stride = value ? D : N;
    if (id < call.num_blocks) return {page(id) + offset, stride, nullptr, nullptr};
    const uint8_t* codes = record(id);
    const T* stored = reinterpret_cast<const T*>(codes + 2 * call.num_kv_heads * side) + (2 * item.head + value) * D;
    for (int64_t d = 0; d < D; d += W) {
      store(channels + d, widened(stored + d));
      store(channels + D + d, widened(stored + 2 * call.num_kv_heads * D + d));
    }
    return {codes + offset, stride, channels, channels + D};
  }
  Ahead ahead(const Item& item, int64_t token, int value) const {
    if (token >= item.end) return {nullptr, 0, true};
    int64_t id = call.block_ids[call.first_block[item.range] + token / N], at = token % N;
    int64_t offset = (2 * item.head + value) * side + (value ? at * D : at);
    int64_t line = value ? STEP : N;  // elements from one prefetched place to the next, D places in all
    if (id < call.num_blocks) return {reinterpret_cast<const char*>(page(id) + offset), line * int64_t(sizeof(T)), false};
    return {reinterpret_cast<const char*>(record(id)) + offset, line, line < 64};
  }

  // c[rows, width] (+)= a[rows, k] b[k, width]
  template <bool PER_ROW>
  void product(const Work& w, const Number* a, Whole whole, int64_t lda, const Source& b, int64_t width, int k, float* c, int64_t ldc,
               bool add, Ahead next) const {
    auto rows = [&](auto&& f, int64_t r) {
      switch (std::min<int64_t>(w.rows - r, FEW_ROWS)) {
        case 1: f(std::integral_constant<int, 1>{}); break; case 2: f(std::integral_constant<int, 2>{}); break;
        case 3: f(std::integral_constant<int, 3>{}); break; case 4: f(std::integral_constant<int, 4>{}); break;
        case 5: f(std::integral_constant<int, 5>{}); break; case 6: f(std::integral_constant<int, 6>{}); break;
        case 7: f(std::integral_constant<int, 7>{}); break; default: f(std::integral_constant<int, 8>{});
      }
    };
    if (w.rows <= FEW_ROWS) {
      rows([&](auto r) { E::template multiply<PER_ROW, r()>(a, whole, lda, b, width, k, c, ldc, add, next); }, 0);
      return;
    }
    for (int64_t column = 0; column < width; column += STEP) {
      E::template unpack<PER_ROW>(b, column, k, w.packed);
      for (int64_t first = 0; first < w.rows; first += FEW_ROWS)
        rows([&](auto r) {
          E::template multiply_packed<r()>(a + first * lda, lda, w.packed, STEP, k, c + first * ldc + column, ldc, add,
                                           first ? Ahead{nullptr, 0, true} : next, int(column));
        }, first);
    }
  }

  void cap(float* s, int64_t n) const {
    for (int64_t i = 0; i < n; i += W) {  // tanh(x) = sign(x) (1 - e) / (1 + e), e = exp(-2 |x|)
      Vec x = load(s + i) / call.softcap, sized = x < 0 ? -x : x, e = exponential(-2.f * sized), t = (1.f - e) / (1.f + e);
      store(s + i, (x < 0 ? -t : t) * call.softcap);
    }
  }

  // Softmax of a span, online: scores become probabilities, sums and maxima go on, outputs so far are rescaled.
  void softmax(const Work& w, const Item& item, int64_t begin, int64_t length) const {
    int64_t padded = (length + STEP - 1) / STEP * STEP;
    for (int64_t r = 0; r < w.rows; r++) {
      float* s = w.scores + r * w.span;
      int64_t position = call.q_position[item.range] + item.first + r / group;
      int64_t high = std::min<int64_t>(item.end, position + 1) - begin;
      int64_t low = call.window > 0 ? std::max<int64_t>(0, position + 1 - call.window - begin) : 0;
      for (int64_t i = 0; i < padded; i += W) store(s + i, load(s + i) * call.scale);
      if (call.softcap > 0) cap(s, padded);
      for (int64_t i = std::max<int64_t>(0, high); i < padded; i++) s[i] = NEG_INF;
      for (int64_t i = 0; i < std::min(low, padded); i++) s[i] = NEG_INF;
      Vec m = load(s);
      for (int64_t i = W; i < padded; i += W) { Vec x = load(s + i); m = x > m ? x : m; }
      float here = largest(m), before = w.maxima[r], now = std::max(before, here), base = now == NEG_INF ? 0.f : now;
      Vec sum = {};
      for (int64_t i = 0; i < padded; i += W) { Vec e = exponential(load(s + i) - base); store(s + i, e); sum += e; }
      E::probabilities(s, w.p + r * w.span, int(padded));
      if constexpr (E::WHOLE)
        if (w.whole.probability)
          w.whole.probability_unit[r] = E::integers(s, int(padded), std::exp(here - base), w.whole.probability + r * w.span);
      float fade = now == before ? 1.f : before == NEG_INF ? 0.f : std::exp(before - now);
      if (fade != 1.f) for (int64_t d = 0; d < D; d += W) store(w.output + r * D + d, load(w.output + r * D + d) * fade);
      w.sums[r] = w.sums[r] * fade + total(sum);
      w.maxima[r] = now;
    }
  }

  Work prepare(const Item& item, Scratch& scratch) const {
    Work w;
    w.rows = item.count * group;
    w.span = w.rows <= FEW_ROWS ? 8 * STEP : 2 * STEP;
    int64_t at = 0;
    scratch.memory.resize(MAX_ROWS * (3 * D + 8) + 3 * FEW_ROWS * 8 * STEP + 4 * MAX_ROWS * STEP + 3 * STEP * D + 24 * D + 1024);
    float* start = scratch.memory.data();
    at = (16 - (reinterpret_cast<uintptr_t>(start) / 4) % 16) % 16;
    w.output = scratch.take(at, w.rows * D);
    w.scores = scratch.take(at, w.rows * w.span);
    w.p = reinterpret_cast<Number*>(scratch.take(at, w.rows * w.span));
    w.q = reinterpret_cast<Number*>(scratch.take(at, w.rows * D));
    w.packed = scratch.take(at, STEP * (D + 2));
    w.maxima = scratch.take(at, w.rows);
    w.sums = scratch.take(at, w.rows);
    w.channels = scratch.take(at, 2 * D);
    w.whole = {};
    if (E::WHOLE && call.num_records && w.rows <= FEW_ROWS) {
      w.whole.query = scratch.take(at, w.rows * D);
      w.whole.query_unit = scratch.take(at, w.rows);
      w.whole.probability = reinterpret_cast<int16_t*>(scratch.take(at, w.rows * w.span / 2));
      w.whole.probability_unit = scratch.take(at, w.rows);
      std::fill(w.whole.query_unit, w.whole.query_unit + w.rows, 1.f);
    }
    std::fill(w.output, w.output + w.rows * D, 0.f);
    std::fill(w.maxima, w.maxima + w.rows, NEG_INF);
    std::fill(w.sums, w.sums + w.rows, 0.f);
    for (int64_t r = 0; r < w.rows; r++) {
      const T* q = query(item, r);
      for (int64_t d = 0; d < D; d++) w.q[r * D + d] = E::number(widen(q[d]));
      if (w.whole.query) for (int64_t d = 0; d < D; d++) w.whole.query[r * D + d] = widen(q[d]);
    }
    return w;
  }
  int64_t element(const Item& item, int64_t row, int64_t stride) const {
    return (call.q_start[item.range] + item.first + row / group) * stride + (item.head * group + row % group) * D;
  }
  const T* query(const Item& item, int64_t row) const { return static_cast<const T*>(call.query) + element(item, row, call.query_stride); }

  void attend(const Item& item, Scratch& scratch) {
    Work w = prepare(item, scratch);
    for (int64_t begin = item.begin; begin < item.end; begin += w.span) {
      int64_t end = std::min<int64_t>(item.end, begin + w.span);
      for (int64_t t = begin; t < end; t += STEP)
        product<true>(w, w.q, w.whole, D, source(item, t, 0, w.channels), STEP, int(D), w.scores + t - begin, w.span, false,
                      ahead(item, t, 1));
      softmax(w, item, begin, end - begin);
      for (int64_t t = begin; t < end; t += STEP)
        product<false>(w, w.p + t - begin, w.whole.at(t - begin), w.span, source(item, t, 1, w.channels), D,
                       int(std::min<int64_t>(STEP, end - t)), w.output, D, true, ahead(item, t + w.span, 0));
    }
    if (item.splits > 1) {
      float* to = partial.data() + (item.partial + item.split) * MAX_ROWS * (D + 2);
      std::memcpy(to, w.output, w.rows * D * sizeof(float));
      std::memcpy(to + MAX_ROWS * D, w.maxima, w.rows * sizeof(float));
      std::memcpy(to + MAX_ROWS * (D + 1), w.sums, w.rows * sizeof(float));
      return;
    }
    for (int64_t r = 0; r < w.rows; r++) finish(item, r, w.output + r * D, w.maxima[r], w.sums[r]);
  }

  void finish(const Item& item, int64_t row, const float* output, float maximum, float sum) const {
    T* to = static_cast<T*>(call.out) + element(item, row, call.out_stride);
    float inverse = sum > 0 ? 1.f / sum : 0.f;
    for (int64_t d = 0; d < D; d++) narrow(output[d] * inverse, to[d]);
    if (call.lse) {
      int64_t token = call.q_start[item.range] + item.first + row / group;
      call.lse[token * call.num_heads + item.head * group + row % group] = sum > 0 ? maximum + std::log(sum) : NEG_INF;
    }
  }

  void merge(const Item& item, Scratch& scratch) const {
    scratch.memory.resize(std::max<size_t>(scratch.memory.size(), D));
    float* output = scratch.memory.data();
    for (int64_t r = 0; r < item.count * group; r++) {
      const float* part = partial.data() + item.partial * MAX_ROWS * (D + 2);
      float maximum = NEG_INF, sum = 0;
      for (int s = 0; s < item.splits; s++) maximum = std::max(maximum, part[s * MAX_ROWS * (D + 2) + MAX_ROWS * D + r]);
      std::fill(output, output + D, 0.f);
      for (int s = 0; s < item.splits && maximum != NEG_INF; s++) {
        const float* one = part + s * MAX_ROWS * (D + 2);
        float weight = std::exp(one[MAX_ROWS * D + r] - maximum);
        sum += weight * one[MAX_ROWS * (D + 1) + r];
        for (int64_t d = 0; d < D; d++) output[d] += weight * one[r * D + d];
      }
      finish(item, r, output, maximum, sum);
    }
  }

  // Tiles of up to MAX_ROWS rows; KV is split where there would be too few items to keep all threads busy.
  std::vector<Item> plan() {
    constexpr int64_t least_split = 512;
    int64_t tile = std::max<int64_t>(1, MAX_ROWS / group), work = 0, partials = 0;
    std::vector<Item> tiles, items;
    for (int32_t r = 0; r < call.num_ranges; r++)
      for (int32_t first = 0; first < call.q_len[r]; first += tile) {
        int32_t count = int32_t(std::min<int64_t>(tile, call.q_len[r] - first));
        int64_t position = call.q_position[r] + first;
        int64_t end = std::max<int64_t>(0, std::min<int64_t>(call.kv_len[r], position + count));
        int64_t begin = call.window > 0 ? std::max<int64_t>(0, position + 1 - call.window) / STEP * STEP : 0;
        begin = std::min(begin, end / STEP * STEP);
        for (int32_t h = 0; h < call.num_kv_heads; h++)
          tiles.push_back({r, h, first, count, int32_t(begin), int32_t(end), 0, 1, 0});
        work += call.num_kv_heads * (end - begin);
      }
    int64_t most = call.threads == 1 ? INT32_MAX : std::max<int64_t>(least_split, work / (call.threads * 4));
    for (Item item : tiles) {
      int64_t length = item.end - item.begin, splits = std::max<int64_t>(1, (length + most - 1) / most);
      int64_t each = ((length + splits - 1) / splits + STEP - 1) / STEP * STEP;
      item.splits = int32_t(std::max<int64_t>(1, each ? (length + each - 1) / each : 1));
      item.partial = partials;
      if (item.splits > 1) partials += item.splits;
      Item part = item;
      for (part.split = 0; part.split < item.splits; part.split++) {
        part.begin = int32_t(item.begin + part.split * each);
        part.end = int32_t(std::min<int64_t>(item.end, part.begin + each));
        items.push_back(part);
      }
    }
    partial.resize(partials * MAX_ROWS * (D + 2));
    return items;
  }

  void run() {
    std::vector<Item> items = plan();
    bool parts = !partial.empty();
#pragma omp parallel num_threads(call.threads) if (call.threads > 1)
    {
      static thread_local Scratch scratch;
#pragma omp for schedule(dynamic, 1)
      for (size_t i = 0; i < items.size(); i++) attend(items[i], scratch);
      if (parts) {
#pragma omp for schedule(dynamic, 1)
        for (size_t i = 0; i < items.size(); i++) if (items[i].splits > 1 && items[i].split == 0) merge(items[i], scratch);
      }
    }
  }
};

// Returns the first range with a block that does not exist, or -1.
int64_t unknown_block(const Call& c) {
  for (int64_t r = 0; r < c.num_ranges; r++)
    for (int64_t b = 0; b < (c.kv_len[r] + c.block_size - 1) / c.block_size; b++) {
      int64_t id = c.block_ids[c.first_block[r] + b];
      if (id < 0 || id >= c.num_blocks + c.num_records) return r;
    }
  return -1;
}

// Writes tokens into pages. Tokens that follow one another in a block go together: K by channels lies across them.
template <class U>
void write_pages(const U* key, int64_t key_stride, const U* value, int64_t value_stride, U* pages, int64_t page_stride,
                 const int64_t* slots, int64_t count, int64_t heads, int64_t D, int64_t N, int64_t threads) {
  std::vector<int64_t> runs;
  for (int64_t t = 0; t < count; t++)
    if (slots[t] >= 0 && (t == 0 || slots[t] != slots[t - 1] + 1 || slots[t] % N == 0)) runs.push_back(t);
#pragma omp parallel for collapse(2) num_threads(threads) if (threads > 1 && count > 8)
  for (size_t r = 0; r < runs.size(); r++)
    for (int64_t h = 0; h < heads; h++) {
      int64_t first = runs[r], at = slots[first] % N, end = first + 1;
      while (end < count && slots[end] == slots[end - 1] + 1 && slots[end] % N) end++;
      U* page = pages + slots[first] / N * page_stride + 2 * h * D * N;
      for (int64_t d = 0; d < D; d++)
        for (int64_t t = first; t < end; t++) page[d * N + at + t - first] = key[t * key_stride + h * D + d];
      for (int64_t t = first; t < end; t++)
        std::memcpy(page + D * N + (at + t - first) * D, value + t * value_stride + h * D, D * sizeof(U));
    }
}

}  // namespace

extern "C" {

const char* arithmetic() {
#if defined(HAS_DOT)
  return "AVX512-BF16";
#elif defined(__AVX512F__)
  return "AVX512";
#elif defined(__AVX2__)
  return "AVX2";
#else
  return "scalar";
#endif
}

int64_t attend(const Call* call) {
  int64_t bad = unknown_block(*call);
  if (bad >= 0) return bad;
  if (call->dtype == 0) Kernel<float, Fused<float>>(*call).run();
  else if (call->dtype == 1) Kernel<Half, Fused<Half>>(*call).run();
#ifdef HAS_DOT
  else Kernel<BFloat16, Dot>(*call).run();
#else
  else Kernel<BFloat16, Fused<BFloat16>>(*call).run();
#endif
  return -1;
}

// Returns the first token whose slot lies behind the pages, or -1.
int64_t write_kv(const void* key, int64_t key_stride, const void* value, int64_t value_stride, void* pages, int64_t page_stride,
                 int64_t num_blocks, const int64_t* slots, int64_t count, int64_t heads, int64_t head_dim, int64_t block_size,
                 int64_t item_bytes, int64_t threads) {
  for (int64_t t = 0; t < count; t++) if (slots[t] >= num_blocks * block_size) return t;
  if (item_bytes == 4)
    write_pages(static_cast<const uint32_t*>(key), key_stride, static_cast<const uint32_t*>(value), value_stride,
                static_cast<uint32_t*>(pages), page_stride, slots, count, heads, head_dim, block_size, threads);
  else
    write_pages(static_cast<const uint16_t*>(key), key_stride, static_cast<const uint16_t*>(value), value_stride,
                static_cast<uint16_t*>(pages), page_stride, slots, count, heads, head_dim, block_size, threads);
  return -1;
}

}
