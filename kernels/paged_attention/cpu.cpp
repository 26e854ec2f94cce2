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
// each arithmetic: `Dot` (dot.h) for bfloat16 where the CPU has dot products of it, and `Fused` (fused.h), all else in fp32. Up to
// FEW_ROWS rows (decode) read B where it lies, and multiply codes as they are; more rows unpack it once into the L1 cache. What is
// read next is prefetched meanwhile.
#include <type_traits>
#include <vector>

#include "dot.h"
#include "fused.h"

// Mirrored by cpu.py. Strides count elements unless they are named in bytes.
struct Call {
  const void* query; void* out; float* lse;             // [tokens, heads, D] twice, and [tokens, heads] or null
  int64_t query_stride, out_stride;                     // from token to token
  const void* pages; int64_t page_stride, num_blocks;
  const uint8_t* records; int64_t record_bytes, num_records;
  const int32_t* block_ids; const int64_t* first_block; // where the ids of a range begin
  const int32_t *q_start, *q_len, *q_position, *kv_len; // of each range
  int64_t num_tokens, num_block_ids, num_ranges;        // how many there are of each
  int64_t num_heads, num_kv_heads, head_dim, block_size, window;
  float scale, softcap;
  int32_t dtype, threads;
};

namespace {

constexpr float NEG_INF = -INFINITY;

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
      int64_t position = int64_t(call.q_position[item.range]) + item.first + r / group;
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
        int64_t position = int64_t(call.q_position[r]) + first;
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

bool queries_exist(const Call& c, int64_t r) {
  return c.q_len[r] <= 0 || (c.q_start[r] >= 0 && int64_t(c.q_start[r]) + c.q_len[r] <= c.num_tokens);
}

bool blocks_exist(const Call& c, int64_t r) {
  int64_t first = c.first_block[r], count = (c.kv_len[r] + c.block_size - 1) / c.block_size;
  if (count <= 0) return true;
  if (first < 0 || first > c.num_block_ids - count) return false;
  for (int64_t b = first; b < first + count; b++)
    if (c.block_ids[b] < 0 || c.block_ids[b] >= c.num_blocks + c.num_records) return false;
  return true;
}

// Returns the first range of which something does not exist: queries, ids of blocks, or blocks; or -1.
int64_t unknown_range(const Call& c) {
  for (int64_t r = 0; r < c.num_ranges; r++) if (!queries_exist(c, r) || !blocks_exist(c, r)) return r;
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
#elif defined(__ARM_NEON)
  return "NEON";
#else
  return "scalar";
#endif
}

// Returns the first range of which something does not exist, before anything is written; or -1.
int64_t attend(const Call* call) {
  int64_t bad = unknown_range(*call);
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
