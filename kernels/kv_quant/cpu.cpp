// The format on a CPU, bit for bit `reference.py`: blocks to records and back, for KV of any type that it knows.
//
// A tile is one head's K or V of a block, some 8 KiB. It is read twice, for the ranges of its channels and for the
// codes; the second time it is in the first-level cache. Meanwhile the lines of the next tile are fetched, to be read
// and to be written: on a server KV is far from the processor's caches and blocks are anywhere, and then the time is
// that of memory.
//
// Vectors are GCC's, of as many values as fit a register. Nothing may be fused: -ffp-contract=off.

#include <algorithm>
#include <cfloat>
#include <cstdint>
#include <cstring>
#include <vector>
#ifdef __AVX512BW__
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512BW__)
constexpr int64_t LANES = 32;  // values of 16 bits in a register
#elif defined(__AVX2__)
constexpr int64_t LANES = 16;
#else
constexpr int64_t LANES = 8;
#endif
constexpr int64_t LINE_BYTES = 64;
constexpr float LEVELS = 255.0f, LEAST_SCALE = FLT_MIN, ROUNDER = 1.5f * (1 << 23);

template <class T, int64_t lanes>
struct vector_of {
    typedef T type __attribute__((vector_size(lanes * sizeof(T))));
};
template <class T, int64_t lanes = LANES>
using Vector = typename vector_of<T, lanes>::type;
using Half = Vector<float, LANES / 2>;
using Ints = Vector<int32_t, LANES / 2>;
using Words = Vector<uint32_t, LANES / 2>;
using Shorts = Vector<uint16_t, LANES / 2>;
using Bytes = Vector<uint8_t>;

// A vector's numbers, in the order that is cheapest to reach: of bfloat16 those at even places, then those at odd ones,
// so that nothing moves across a vector; else the first half, then the second.
struct Floats {
    Half a, b;
};

template <class To, class From>
To bits_of(const From& from) {
    static_assert(sizeof(To) == sizeof(From));
    To found;
    memcpy(&found, &from, sizeof(found));
    return found;
}

Floats spread(float number) { return {number - Half{}, number - Half{}}; }

// Types of KV by their bits: `Bits` and `Key` are unsigned and signed integers as wide.

// One instruction each, for which GCC finds several.
Words widened(Shorts v) {
#ifdef __AVX512BW__
    return (Words)_mm512_cvtepu16_epi32((__m256i)v);
#else
    return __builtin_convertvector(v, Words);
#endif
}
Shorts narrowed(Words v) {
#ifdef __AVX512BW__
    return (Shorts)_mm512_cvtepi32_epi16((__m512i)v);
#else
    return __builtin_convertvector(v, Shorts);
#endif
}

struct BFloat16 {
    using Bits = uint16_t;
    using Key = int16_t;
    static constexpr float MOST = 0x1.FEp127f;

    static int64_t place(int64_t i) { return i / LANES * LANES + i % 2 * (LANES / 2) + i % LANES / 2; }
    static Floats widen(Vector<Bits> values) {  // a pair is a word: one of them is in its upper half, as in fp32
        const Words pairs = bits_of<Words>(values);
        return {(Half)(pairs << 16), (Half)(pairs & 0xFFFF0000)};
    }
    static Words rounded(Half numbers) {
        const Words words = (Words)numbers;
        return words + (0x7FFF + ((words >> 16) & 1));
    }
    static Vector<Bits> narrow(Floats numbers) {
        return bits_of<Vector<Bits>>((rounded(numbers.a) >> 16) | (rounded(numbers.b) & 0xFFFF0000));
    }
    static Bytes pack(Words a, Words b) {
        return bits_of<Bytes>(narrowed((a & 0xFF) | (b << 8)));
    }
    static Floats unpack(Bytes codes) {
        const Ints pairs = (Ints)widened(bits_of<Shorts>(codes));
        return {__builtin_convertvector(pairs & 0xFF, Half), __builtin_convertvector(pairs >> 8, Half)};
    }
};

// The others' order is that of the values.
struct InOrder {
    static int64_t place(int64_t i) { return i; }
    static Bytes pack(Words a, Words b) {
        const Shorts halves[2] = {narrowed(a), narrowed(b)};
        return __builtin_convertvector(bits_of<Vector<uint16_t>>(halves), Bytes);
    }
    static Floats unpack(Bytes codes) {
        Shorts halves[2];
        const auto wider = __builtin_convertvector(codes, Vector<uint16_t>);
        memcpy(&halves, &wider, sizeof(halves));
        return {__builtin_convertvector((Ints)widened(halves[0]), Half),
                __builtin_convertvector((Ints)widened(halves[1]), Half)};
    }
};

#ifdef __aarch64__
using float16 = __fp16;  // _Float16 is C only before GCC 13
#else
using float16 = _Float16;
#endif

struct Float16 : InOrder {
    using Bits = uint16_t;
    using Key = int16_t;
    static constexpr float MOST = 65504.0f;

    static Floats widen(Vector<Bits> values) {
        Floats found;
#ifdef __AVX512BW__
        __m256i halves[2];
        memcpy(&halves, &values, sizeof(halves));
        found = {(Half)_mm512_cvtph_ps(halves[0]), (Half)_mm512_cvtph_ps(halves[1])};
#else
        for (int64_t i = 0; i < LANES; i++) {
            float16 half;
            memcpy(&half, (const char*)&values + 2 * i, 2);
            (i < LANES / 2 ? found.a : found.b)[i % (LANES / 2)] = half;
        }
#endif
        return found;
    }
    static Vector<Bits> narrow(Floats numbers) {
        Vector<Bits> found;
#ifdef __AVX512BW__
        const auto to_nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
        const __m256i halves[2] = {_mm512_cvtps_ph((__m512)numbers.a, to_nearest),
                                   _mm512_cvtps_ph((__m512)numbers.b, to_nearest)};
        memcpy(&found, &halves, sizeof(found));
#else
        for (int64_t i = 0; i < LANES; i++) {
            const float16 half = (float16)(i < LANES / 2 ? numbers.a : numbers.b)[i % (LANES / 2)];
            memcpy((char*)&found + 2 * i, &half, 2);
        }
#endif
        return found;
    }
};

struct Float32 : InOrder {
    using Bits = uint32_t;
    using Key = int32_t;
    static constexpr float MOST = FLT_MAX;

    static Floats widen(Vector<Bits> values) { return bits_of<Floats>(values); }
    static Vector<Bits> narrow(Floats numbers) { return bits_of<Vector<Bits>>(numbers); }
};

// Where there are fewer values left than a vector has, the first one fills the rest, which changes no extreme.
template <class T>
Vector<T> load(const T* from, int64_t count = LANES) {
    Vector<T> found;
    if (count >= LANES) {
        memcpy(&found, from, sizeof(found));
    } else {
        for (int64_t i = 0; i < LANES; i++) found[i] = from[i < count ? i : 0];
    }
    return found;
}

template <class T>
void store(T* to, Vector<T> vector, int64_t count = LANES) {
    if (count >= LANES)
        memcpy(to, &vector, sizeof(vector));
    else
        memcpy(to, &vector, count * sizeof(T));
}

// Integers that order numbers by their bits, which are sign and magnitude; what is not finite comes first or last. They
// are their own inverse.
template <class Key>
Vector<Key> key_of(Vector<Key> bits) {
    constexpr int top = 8 * sizeof(Key) - 1;
    return bits ^ ((bits >> top) & (Key)~((Key)1 << top));
}

template <class V>
V least(V a, V b) { return a < b ? a : b; }
template <class V>
V most(V a, V b) { return a > b ? a : b; }

// Of two vectors one after the other, of every `width` lanes the first half, or the second.
template <int64_t width, bool second, class Key>
Vector<Key> halves(Vector<Key> a, Vector<Key> b) {
    Vector<Key> order;
    for (int64_t i = 0; i < LANES; i++) order[i] = i / (width / 2) * width + second * width / 2 + i % (width / 2);
    return __builtin_shuffle(a, b, order);
}

// The extreme of each of as many vectors as one has lanes: halves of two become one, until one value of each is left.
template <int64_t width, class Key, class Pick>
Vector<Key> extremes(Vector<Key>* vectors, Pick pick) {
    for (int64_t i = 0; i < width / 2; i++) {
        const Vector<Key> a = vectors[2 * i], b = vectors[2 * i + 1];
        vectors[i] = pick(halves<width, false, Key>(a, b), halves<width, true, Key>(a, b));
    }
    if constexpr (width > 2) return extremes<width / 2, Key>(vectors, pick);
    return vectors[0];
}

struct Side {
    int64_t offset, token_stride, channel_stride;
};

}  // namespace

extern "C" {

// As in Python, see `cpu._Layout`. Offsets and strides within a page are in values, everything else is in bytes.
struct Layout {
    int64_t heads, channels, tokens, head_stride, page_stride, minima_offset, scales_offset, record_bytes;
    Side sides[2];
};
}

namespace {

template <class Type>
class Codec {
    using Bits = typename Type::Bits;
    using Key = typename Type::Key;

    // What belongs to a tile, of the blocks and records at hand. A row's values are next to each other.
    struct Tile {
        Bits* values;
        uint8_t* codes;
        Bits *minima, *scales;
        int64_t rows, columns, stride;
        bool by_token;  // a row is a token's channels, else a channel's tokens
    };

    const Layout& layout;
    char* pages;
    uint8_t* records;
    const int64_t *blocks, *slots;
    const int64_t per_block, num_tiles, vectors;
    std::vector<Key> lows, highs;  // of each channel
    std::vector<Floats> minimum, factor;

    Tile tile(int64_t number) const {
        const int64_t block = number / per_block, part = number % per_block;
        const Side& side = layout.sides[part % 2];
        const int64_t inside = part / 2 * layout.head_stride + side.offset;
        uint8_t* record = records + slots[block] * layout.record_bytes;
        Tile t;
        t.values = (Bits*)(pages + blocks[block] * layout.page_stride) + inside;
        t.codes = record + inside;
        t.minima = (Bits*)(record + layout.minima_offset) + part * layout.channels;
        t.scales = (Bits*)(record + layout.scales_offset) + part * layout.channels;
        t.by_token = side.channel_stride == 1;
        t.rows = t.by_token ? layout.tokens : layout.channels;
        t.columns = t.by_token ? layout.channels : layout.tokens;
        t.stride = t.by_token ? side.token_stride : side.channel_stride;
        return t;
    }

    static Vector<Key> keys(const Bits* values, int64_t count) { return key_of<Key>((Vector<Key>)load(values, count)); }

    void find_ranges(const Tile& t) {
        if (t.by_token) {
            for (int64_t c = 0; c < t.columns; c += LANES) {
                Vector<Key> low = keys(t.values + c, t.columns - c), high = low;
                for (int64_t row = 1; row < t.rows; row++) {
                    const Vector<Key> found = keys(t.values + row * t.stride + c, t.columns - c);
                    low = least(low, found), high = most(high, found);
                }
                store(&lows[c], low), store(&highs[c], high);
            }
            return;
        }
        Vector<Key> low[LANES], high[LANES];
        for (int64_t first = 0; first < t.rows; first += LANES) {
            const int64_t count = std::min(LANES, t.rows - first);
            for (int64_t i = 0; i < count; i++) {
                const Bits* values = t.values + (first + i) * t.stride;
                low[i] = high[i] = keys(values, t.columns);
                for (int64_t c = LANES; c < t.columns; c += LANES) {
                    const Vector<Key> found = keys(values + c, t.columns - c);
                    low[i] = least(low[i], found), high[i] = most(high[i], found);
                }
            }
            for (int64_t i = count; i < LANES; i++) low[i] = low[0], high[i] = high[0];
            store(&lows[first], extremes<LANES, Key>(low, [](auto a, auto b) { return least(a, b); }));
            store(&highs[first], extremes<LANES, Key>(high, [](auto a, auto b) { return most(a, b); }));
        }
    }

    static Half step_of(Half low, Half high) { return most((high - low) / LEVELS, LEAST_SCALE - Half{}); }

    // Write a tile's minima and scales; false if they can't say it.
    bool choose_scales(const Tile& t) {
        Ints bad{};
        for (int64_t c = 0; c < layout.channels; c += LANES) {
            const Floats low = numbers_of(lows, c), high = numbers_of(highs, c);
            const Floats step = {step_of(low.a, high.a), step_of(low.b, high.b)};
            const Vector<Bits> rounded = Type::narrow(step);
            const Floats near = Type::widen(rounded), above = Type::widen(rounded + 1);
            Floats scale;
            auto choose = [&](Half low, Half high, Half step, Half near, Half above) {
                const Half scale = high == low ? Half{} : near < step ? above : near;
                bad |= ~(high - low <= FLT_MAX) | ~(low + LEVELS * scale <= Type::MOST);
                return scale;
            };
            scale.a = choose(low.a, high.a, step.a, near.a, above.a);
            scale.b = choose(low.b, high.b, step.b, near.b, above.b);
            store(t.minima + c, Type::narrow(low), layout.channels - c);
            store(t.scales + c, Type::narrow(scale), layout.channels - c);
            minimum[c / LANES] = low, factor[c / LANES] = {inverse_of(scale.a), inverse_of(scale.b)};
        }
        for (int64_t i = 0; i < LANES / 2; i++)
            if (bad[i]) return false;
        return true;
    }

    static Floats numbers_of(const std::vector<Key>& keys, int64_t c) {
        const Floats found = Type::widen((Vector<Bits>)key_of<Key>(load(&keys[c])));
        return {found.a + 0.0f, found.b + 0.0f};  // never -0.0
    }
    static Half inverse_of(Half scale) { return scale > 0 ? 1.0f / scale : Half{}; }

    static Words code_of(Half value, Half low, Half inverse) { return (Words)((value - low) * inverse + ROUNDER); }

    static Bytes encode(Vector<Bits> values, const Floats& low, const Floats& inverse) {
        const Floats wide = Type::widen(values);
        return Type::pack(code_of(wide.a, low.a, inverse.a), code_of(wide.b, low.b, inverse.b));
    }

    static Vector<Bits> decode(Bytes codes, const Floats& low, const Floats& scale) {
        const Floats wide = Type::unpack(codes);
        return Type::narrow({low.a + wide.a * scale.a, low.b + wide.b * scale.b});
    }

    // Fetches the lines of the next tile while codes are written: as many values of it as of this one. When values are
    // written this is slower than what the processor foresees by itself.
    struct Fetcher {
        const Tile& next;
        int64_t row = 0, column = 0;

        void fetch(int64_t count) {
            constexpr int64_t LINE = LINE_BYTES / sizeof(Bits);
            for (; count > 0; count -= LINE) {
                const int64_t at = row * next.stride + column;
                __builtin_prefetch(next.values + at, 0, 2);
                __builtin_prefetch(next.codes + at, 1, 3);
                column += LINE;
                if (column >= next.columns) column = 0, row++;
            }
        }
    };

    // WIDTH: columns of the tile; 0: any number of them, not of whole vectors.
    template <bool TO_CODES, bool BY_TOKEN, int64_t WIDTH>
    void convert_rows(const Tile& t, const Tile& next) {
        const int64_t columns = WIDTH ? WIDTH : t.columns;
        Fetcher fetcher{next};
        const float *low_of = (const float*)minimum.data(), *factor_of = (const float*)factor.data();
        for (int64_t row = 0; row < t.rows; row++) {
            if (TO_CODES) fetcher.fetch(columns);
            Bits* values = t.values + row * t.stride;
            uint8_t* codes = t.codes + row * t.stride;
            const int64_t place = BY_TOKEN ? 0 : Type::place(row);
            const Floats row_low = spread(low_of[place]), row_factor = spread(factor_of[place]);
            for (int64_t c = 0; c < columns; c += LANES) {
                const Floats& low = BY_TOKEN ? minimum[c / LANES] : row_low;
                const Floats& by = BY_TOKEN ? factor[c / LANES] : row_factor;
                const int64_t count = WIDTH ? LANES : columns - c;
                if (TO_CODES)
                    store(codes + c, encode(load(values + c, count), low, by), count);
                else
                    store(values + c, decode(load(codes + c, count), low, by), count);
            }
        }
    }

    template <bool TO_CODES, int64_t WIDTH>
    void convert_wide(const Tile& t, const Tile& next) {
        t.by_token ? convert_rows<TO_CODES, true, WIDTH>(t, next) : convert_rows<TO_CODES, false, WIDTH>(t, next);
    }

    template <bool TO_CODES>
    void convert(const Tile& t, int64_t number) {
        const Tile next = tile(std::min(number + 1, num_tiles - 1));
        if constexpr (sizeof(Bits) == 2) {  // a loop of known length is faster
            if (t.columns == 32) return convert_wide<TO_CODES, 32>(t, next);
            if (t.columns == 64) return convert_wide<TO_CODES, 64>(t, next);
            if (t.columns == 128) return convert_wide<TO_CODES, 128>(t, next);
        }
        convert_wide<TO_CODES, 0>(t, next);
    }

  public:
    Codec(const Layout& layout, void* pages, uint8_t* records, const int64_t* blocks, const int64_t* slots,
          int64_t count)
        : layout(layout), pages((char*)pages), records(records), blocks(blocks), slots(slots),
          per_block(2 * layout.heads), num_tiles(count * per_block), vectors((layout.channels + LANES - 1) / LANES),
          lows(vectors * LANES), highs(vectors * LANES), minimum(vectors), factor(vectors) {}

    void quantise(uint8_t* holds) {
        for (int64_t number = 0; number < num_tiles; number++) {
            const Tile t = tile(number);
            find_ranges(t);
            if (!choose_scales(t)) holds[number / per_block] = 0;
            convert<true>(t, number);
        }
    }

    void dequantise() {
        for (int64_t number = 0; number < num_tiles; number++) {
            const Tile t = tile(number);
            for (int64_t c = 0; c < layout.channels; c += LANES) {
                minimum[c / LANES] = Type::widen(load(t.minima + c, layout.channels - c));
                factor[c / LANES] = Type::widen(load(t.scales + c, layout.channels - c));
            }
            convert<false>(t, number);
        }
    }
};

// Pages whose values lie in no order that strides describe: value i of an ordered page is at `order[i]` of the real one.
template <class Bits, bool TAKE>
void reorder(char* pages, int64_t page_stride, const int64_t* blocks, int64_t count, const int32_t* order,
             int64_t elements, Bits* ordered) {
    for (int64_t block = 0; block < count; block++, ordered += elements) {
        Bits* page = (Bits*)(pages + blocks[block] * page_stride);
        for (int64_t i = 0; i < elements; i++) TAKE ? ordered[i] = page[order[i]] : page[order[i]] = ordered[i];
    }
}

}  // namespace

#define REORDER(NAME, BITS, TAKE)                                                                           \
    void NAME(char* pages, int64_t page_stride, const int64_t* blocks, int64_t count, const int32_t* order, \
              int64_t elements, BITS* ordered) {                                                            \
        reorder<BITS, TAKE>(pages, page_stride, blocks, count, order, elements, ordered);                   \
    }

#define CODEC(NAME, TYPE)                                                                                   \
    void quantise_##NAME(const Layout* layout, void* pages, uint8_t* records, const int64_t* blocks,        \
                         const int64_t* slots, int64_t count, uint8_t* holds) {                             \
        Codec<TYPE>(*layout, pages, records, blocks, slots, count).quantise(holds);                         \
    }                                                                                                       \
    void dequantise_##NAME(const Layout* layout, void* pages, uint8_t* records, const int64_t* blocks,      \
                           const int64_t* slots, int64_t count) {                                           \
        Codec<TYPE>(*layout, pages, records, blocks, slots, count).dequantise();                            \
    }

extern "C" {
REORDER(take_2, uint16_t, true)
REORDER(take_4, uint32_t, true)
REORDER(put_2, uint16_t, false)
REORDER(put_4, uint32_t, false)
CODEC(bfloat16, BFloat16)
CODEC(float16, Float16)
CODEC(float32, Float32)
}
