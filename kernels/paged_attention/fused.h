// Products C[rows, 32] (+)= A[rows, k] B[k, 32] in fp32, for any type of KV, in vectors that the compiler makes AVX-512, AVX2,
// SSE or NEON of.
#pragma once
#include "operands.h"

namespace {

// PER_ROW: a row of codes has one minimum and scale (K), else a column has (V).
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

}  // namespace
