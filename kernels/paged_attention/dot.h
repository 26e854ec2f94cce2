// Products C[rows, 32] (+)= A[rows, k] B[k, 32] of bfloat16 by the dot products of AVX512-BF16: A in pairs of k, B as vectors
// of 16 pairs. Few rows multiply codes by integers of 16 bits (VNNI).
#pragma once
#include "operands.h"
#if defined(__AVX512BF16__) && defined(__AVX512VBMI__) && defined(__AVX512VNNI__)
#define HAS_DOT 1

namespace {

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

}  // namespace
#endif
