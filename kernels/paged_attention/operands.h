// What the products C[rows, 32] (+)= A[rows, k] B[k, 32] are told, in any arithmetic: where A and B lie, and what to prefetch.
#pragma once
#include "numbers.h"

namespace {

constexpr int STEP = 32;        // tokens, and channels, that a micro-kernel makes at once
constexpr int VECTORS = STEP / W;
constexpr int MAX_ROWS = 64;    // of an item
constexpr int FEW_ROWS = W == 16 ? 8 : 6;  // that a micro-kernel takes at once
constexpr int MAX_DIM = 512;    // of a head

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

}  // namespace
