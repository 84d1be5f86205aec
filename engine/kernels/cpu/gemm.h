// Products of a few or many rows of activations with packed weights.
//
// A weight is cut into tiles of 16 output rows; within a tile the input runs in groups, each group's bytes together, so
// that a product is one sequential read:
//   int4   32 inputs: 256 bytes of codes, then 16 scales and 16 offsets in half precision;  w = code * scale + offset
//   int8   32 inputs: 512 bytes of codes, then the same
//   bf16    2 inputs: 16 pairs
// Bytes of codes lie as [input / 4][output][4]; for int4 the low half of a byte belongs to an even quad of inputs, the
// high half to the odd quad after it.
//
// Integer products take activations as whole numbers of 8 bits with one scale per row and group. A few large ones would
// leave the others of their group few bits, so the WIDE quads of every group that hold the largest have 12 bits: their
// upper part is multiplied once more, with codes times 16. So logits move as little as by bf16 (by 8 bits alone four
// times as much), for ten products of quads a group, where 8 bits take eight and 16 bits sixteen.
#pragma once
#include <algorithm>
#include <vector>

#include "simd.h"

enum Format : int32_t { INT4 = 0, INT8 = 1, BF16 = 2 };
constexpr int TILE = 16, GROUP = 32, MOST_ROWS = 4, WIDE = 2;
constexpr int WORTH_OPENING = 16;  // rows from which it is quicker to open 4-bit codes once than in every product
constexpr float MOST = 127, MOST_WIDE = 127 * 16 + 7;  // sums over a group stay below 2^24, exact as floats
constexpr int CACHED_BYTES = 256 << 10;  // of activations that tiles are multiplied with before the next ones

struct Weight {
    const uint8_t* data;
    const float* bias;  // or null
    int32_t format, outputs, inputs, unused;
};

static inline int64_t group_bytes(int format) { return format == INT4 ? 320 : format == INT8 ? 576 : 1024; }
static inline int64_t tile_bytes(const Weight& w) { return group_bytes(w.format) * (w.inputs / GROUP); }

// A group of a row: numbers, of wide quads what is left of 16 times `high`. All of it times `scale` is the activations.
struct Numbers {
    int8_t low[GROUP];
    int8_t high[WIDE][4];
    int32_t quad[WIDE];  // which quads are wide
    float scale, sum;    // the sum of the activations as they were rounded
};

// Activations in the forms that products read: whole numbers, and bf16.
struct Activations {
    Numbers* numbers;  // (rows, inputs / GROUP)
    uint16_t* halves;  // (rows, inputs)
};

// Lanes in the order that a step of a butterfly wants.
constexpr i32x16 SWAP1 = {1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14};
constexpr i32x16 SWAP2 = {2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13};
constexpr i32x16 SWAP4 = {4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11};

static inline i32x16 greater(i32x16 v, i32x16 order) {
    const i32x16 other = __builtin_shuffle(v, order);
    return v > other ? v : other;
}

// The greatest of each four lanes, and of each half's lanes, in all of them.
static inline i32x16 highest_of_fours(i32x16 v) { return greater(greater(v, SWAP1), SWAP2); }
static inline i32x16 highest_of_halves(i32x16 v) { return greater(highest_of_fours(v), SWAP4); }

// Two groups as whole numbers. In what follows the lower half of a vector speaks of the first, the upper of the second.
static inline void round_groups(const float* const (&x)[2], Numbers* const (&out)[2]) {
    const i32x16 firsts = {0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28};
    const i32x16 lower = {0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23};
    const i32x16 places = {0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7};
    const i32x16 quads = {0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3};
    // As whole numbers, magnitudes compare alike and NaN is above all: it must not be lost in rounding. The place of a
    // quad takes the lowest bits, so that the greatest also says where it is.
    i32x16 of_quads[2];
#pragma GCC unroll 2
    for (int g = 0; g < 2; g++) {
        i32x16 widest[2];
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            widest[half] = highest_of_fours(load<i32x16>(x[g] + 16 * half) & 0x7fffffff);
        }
        of_quads[g] = __builtin_shuffle(widest[0], widest[1], firsts);
    }
    i32x16 keys = (__builtin_shuffle(of_quads[0], of_quads[1], lower) & ~7) | places;
    i32x16 most = highest_of_halves(keys), wide = {};
    const i32x16 greatest = most;
#pragma GCC unroll 2
    for (int i = 0; i < WIDE; i++) {
        for (int g = 0; g < 2; g++) out[g]->quad[i] = most[8 * g] & 7;
        wide |= keys == most;
        keys = keys == most ? 0 : keys;
        most = highest_of_halves(keys);
    }
    const i32x16 of_wide = (i32x16)((f32x16)greatest * (1 / MOST_WIDE)), of_others = (i32x16)((f32x16)most * (1 / MOST));
    const f32x16 step = (f32x16)(of_wide > of_others ? of_wide : of_others);
    const f32x16 inverses = step < 1e-30f ? f32x16{} : 1 / step, magic = splat(12582912.0f);
    i32x16 sums[2] = {};
#pragma GCC unroll 2
    for (int g = 0; g < 2; g++) {
        int8_t high[GROUP];
        const f32x16 inverse = splat(inverses[8 * g]);
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            const i32x16 number = (i32x16)fma16(load<f32x16>(x[g] + 16 * half), inverse, magic) - 0x4b400000;
            const i32x16 upper = (number + 8) >> 4, is_wide = __builtin_shuffle(wide, quads + (8 * g + 4 * half));
            sums[g] += number;
            store(high + 16 * half, __builtin_convertvector(upper, s8x16));
            store(out[g]->low + 16 * half, __builtin_convertvector(is_wide ? number - (upper << 4) : number, s8x16));
        }
        for (int i = 0; i < WIDE; i++) memcpy(out[g]->high[i], high + 4 * out[g]->quad[i], 4);
        out[g]->scale = step[8 * g];
        out[g]->sum = (float)total(sums[g]) * step[8 * g];
    }
}

// One row of `inputs` floats into whichever forms are wanted.
static inline void prepare(const float* x, int inputs, int row, const Activations& a, bool integers, bool halves) {
    for (int i = 0; halves && i < inputs; i += 16) {
        store(a.halves + (int64_t)row * inputs + i, to_bf16(load<f32x16>(x + i)));
    }
    Numbers* numbers = a.numbers + (int64_t)row * (inputs / GROUP);
    for (int i = 0; integers && i < inputs; i += 2 * GROUP, numbers += 2) {
        Numbers none;
        const bool last = i + GROUP == inputs;
        round_groups({x + i, last ? x + i : x + i + GROUP}, {numbers, last ? &none : numbers + 1});
    }
}

static inline int32_t four(const int8_t* p) {
    int32_t bytes;
    memcpy(&bytes, p, 4);
    return bytes;
}

// How codes lie before a product: two to a byte, or 4-bit codes opened to a byte each, or 8-bit codes.
enum class Codes { PAIRED, OPENED, WHOLE };

// Codes of neighbouring tiles, and the scales and offsets that end each group.
struct Tiles {
    const uint8_t *codes, *ends;
    int64_t group, tile;         // bytes from one group's or tile's codes to the next
    int64_t end_group, end_tile; // and between their ends
    const uint8_t* next;         // as many stored bytes that are wanted soon, or null
};

static inline Tiles as_stored(const Weight& w, int tile) {
    const uint8_t* data = w.data + tile * tile_bytes(w);
    const int64_t group = group_bytes(w.format), size = tile_bytes(w);
    return {data, data + group - 64, group, size, group, size, nullptr};
}

// Codes of quads 2 * pair and 2 * pair + 1 of a group.
template <Codes CODES> static inline void two_quads(const uint8_t* group, int pair, u8x64& even, u8x64& odd) {
    if (CODES == Codes::PAIRED) {
        u8x64 both = load<u8x64>(group + 64 * pair);
        even = both & 15;
        odd = (u8x64)((u32x16)both >> 4) & 15;
        return;
    }
    even = load<u8x64>(group + 128 * pair);
    odd = load<u8x64>(group + 128 * pair + 64);
}

// `sums`, and 16 times the products of a quad's codes with upper parts.
template <Codes CODES> static inline i32x16 add_wide(i32x16 sums, const uint8_t* group, int quad, int32_t high) {
    if (CODES == Codes::PAIRED) {
        const u32x16 both = load<u32x16>(group + 64 * (quad / 2)) << (4 - quad % 2 * 4);
        return dot4(sums, (u8x64)(both & 0xf0f0f0f0), high);
    }
    const u32x16 codes = load<u32x16>(group + 64 * quad);
    if (CODES == Codes::OPENED) return dot4(sums, (u8x64)(codes << 4), high);
    return sums + (dot4(i32x16{}, (u8x64)codes, high) << 4);
}

// TILES neighbouring tiles at once, so that each activation read serves all of them. The order of loops keeps just the
// sums in registers, which they fill.
template <Codes CODES, int TILES, int ROWS>
static inline void integer_tiles(Tiles t, int inputs, const Activations& a, int row, f32x16 (*sums)[ROWS]) {
    const int groups = inputs / GROUP;
    const Numbers* x = a.numbers + (int64_t)row * groups;
    for (int g = 0; g < groups; g++, t.codes += t.group, t.ends += t.end_group, x++) {
        for (int64_t at = 0; t.next && at < TILES * t.end_group; at += 64) __builtin_prefetch(t.next + at);
        if (t.next) t.next += TILES * t.end_group;
        i32x16 dots[TILES][ROWS] = {};
#pragma GCC unroll 4
        for (int pair = 0; pair < 4; pair++) {
            u8x64 codes[2][TILES];
#pragma GCC unroll 2
            for (int n = 0; n < TILES; n++) two_quads<CODES>(t.codes + n * t.tile, pair, codes[0][n], codes[1][n]);
#pragma GCC unroll 2
            for (int odd = 0; odd < 2; odd++) {
#pragma GCC unroll 4
                for (int r = 0; r < ROWS; r++) {
                    const int32_t quad = four(x[r * groups].low + 8 * pair + 4 * odd);
#pragma GCC unroll 2
                    for (int n = 0; n < TILES; n++) dots[n][r] = dot4(dots[n][r], codes[odd][n], quad);
                }
            }
        }
        f32x16 scale[TILES], offset[TILES];
        for (int n = 0; n < TILES; n++) {
            scale[n] = from_half(t.ends + n * t.end_tile);
            offset[n] = from_half(t.ends + n * t.end_tile + 32);
        }
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++) {
            const Numbers& some = x[r * groups];
#pragma GCC unroll 2
            for (int n = 0; n < TILES; n++) {
#pragma GCC unroll 2
                for (int i = 0; i < WIDE; i++) {
                    dots[n][r] = add_wide<CODES>(dots[n][r], t.codes + n * t.tile, some.quad[i], four(some.high[i]));
                }
                const f32x16 product = __builtin_convertvector(dots[n][r], f32x16) * splat(some.scale);
                sums[n][r] = fma16(offset[n], splat(some.sum), sums[n][r]);
                sums[n][r] = fma16(product, scale[n], sums[n][r]);
            }
        }
    }
}

// Two tiles of 4-bit codes, a byte each, into this thread's own memory, for as long as it opens no others.
static Tiles opened(const Weight& w, int tile) {
    static thread_local std::vector<uint8_t> bytes;
    const Tiles stored = as_stored(w, tile);
    const int groups = w.inputs / GROUP;
    bytes.resize(2 * TILE * w.inputs);
    uint8_t* to = bytes.data();
    for (int g = 0; g < groups; g++) {
        for (int n = 0; n < 2; n++, to += TILE * GROUP) {
            for (int pair = 0; pair < 4; pair++) {
                u8x64 even, odd;
                two_quads<Codes::PAIRED>(stored.codes + g * stored.group + n * stored.tile, pair, even, odd);
                store(to + 128 * pair, even);
                store(to + 128 * pair + 64, odd);
            }
        }
    }
    return {bytes.data(), stored.ends, 2 * TILE * GROUP, TILE * GROUP, stored.end_group, stored.end_tile, nullptr};
}

template <int TILES, int ROWS>
static inline void bf16_tiles(const uint8_t* w, int inputs, const Activations& a, int row, f32x16 (*sums)[ROWS]) {
    const int64_t tile = group_bytes(BF16) * (inputs / GROUP);
    const int8_t* x = (const int8_t*)(a.halves + (int64_t)row * inputs);
    f32x16 odd[TILES][ROWS] = {};  // two chains, so that one row alone does not wait for itself
    for (int k = 0; k < inputs; k += 4, w += 128, x += 8) {
        for (int r = 0; r < ROWS; r++) {
            for (int n = 0; n < TILES; n++) {
                const int8_t* pair = x + (int64_t)r * inputs * 2;
                sums[n][r] = dot2(sums[n][r], load<u32x16>(w + n * tile), four(pair));
                odd[n][r] = dot2(odd[n][r], load<u32x16>(w + n * tile + 64), four(pair + 4));
            }
        }
    }
    for (int n = 0; n < TILES; n++) {
        for (int r = 0; r < ROWS; r++) sums[n][r] += odd[n][r];
    }
}

// How a tile's sums leave: replace what is there, or add to it.
enum class Into { SET, ADD };

// The sums of a tile's outputs from `first` on go to `to`; the last tile of a matrix may be wider than the matrix.
static inline void leave(const Weight& w, int first, f32x16 sums, float* to, Into into) {
    const int width = w.outputs - first < TILE ? w.outputs - first : TILE;
    if (width == TILE) {
        if (w.bias) sums += load<f32x16>(w.bias + first);
        store(to, into == Into::ADD ? load<f32x16>(to) + sums : sums);
        return;
    }
    for (int i = 0; i < width; i++) {
        const float value = w.bias ? sums[i] + w.bias[first + i] : sums[i];
        to[i] = into == Into::ADD ? to[i] + value : value;
    }
}

template <int TILES, int ROWS>
static void tiles_rows(const Weight& w, int tile, const Tiles& t, bool open, const Activations& a, int row, float* out,
                       int64_t stride, Into into) {
    for (int r = 0; r < ROWS; r++) {
        for (int n = 0; n < TILES; n++) __builtin_prefetch(out + (row + r) * stride + (tile + n) * TILE, 1);
    }
    f32x16 sums[TILES][ROWS] = {};
    if (open) integer_tiles<Codes::OPENED, TILES, ROWS>(t, w.inputs, a, row, sums);
    else if (w.format == INT4) integer_tiles<Codes::PAIRED, TILES, ROWS>(t, w.inputs, a, row, sums);
    else if (w.format == INT8) integer_tiles<Codes::WHOLE, TILES, ROWS>(t, w.inputs, a, row, sums);
    else bf16_tiles<TILES, ROWS>(t.codes, w.inputs, a, row, sums);
    for (int n = 0; n < TILES; n++) {
        const int first = (tile + n) * TILE;
        for (int r = 0; r < ROWS; r++) leave(w, first, sums[n][r], out + (row + r) * stride + first, into);
    }
}

// How many rows of activations a cache holds while tiles are multiplied with them.
static inline int cached_rows(const Weight& w) {
    return std::max(1, CACHED_BYTES / (2 * w.inputs) / MOST_ROWS) * MOST_ROWS;
}

// out[row][outputs of `tiles` tiles] for rows `first` … `last` - 1 of prepared activations, as many at once as registers
// hold. A single row, which waits for memory, goes tile by tile; for many rows 4-bit codes are opened once. Only the
// first rows would wait for a tile's bytes, so the last ones ask for those of the next tiles, in the end for `later`.
static void tile_products(const Weight& w, int tile, int tiles, const Activations& a, int first, int last, float* out,
                          int64_t stride, Into into, const uint8_t* later) {
    typedef void (*Rows)(const Weight&, int, const Tiles&, bool, const Activations&, int, float*, int64_t, Into);
    static const Rows one[] = {tiles_rows<1, 1>, tiles_rows<1, 2>, tiles_rows<1, 3>, tiles_rows<1, 4>};
    static const Rows two[] = {tiles_rows<2, 1>, tiles_rows<2, 2>, tiles_rows<2, 3>, tiles_rows<2, 4>};
    for (int end = tile + tiles; tile < end;) {
        const bool pair = last - first > 1 && tile + 2 <= end;
        const bool open = pair && w.format == INT4 && last - first >= WORTH_OPENING;
        Tiles t = open ? opened(w, tile) : as_stored(w, tile);
        const int after = tile + (pair ? 2 : 1);
        for (int row = first; row < last; row += MOST_ROWS) {
            const int some = std::min(last - row, MOST_ROWS);
            if (pair && row + some == last) t.next = after + 2 <= end ? w.data + after * tile_bytes(w) : later;
            (pair ? two : one)[some - 1](w, tile, t, open, a, row, out, stride, into);
        }
        tile = after;
    }
}

// Weight row `output` as floats: the embedding of a token.
static void unpack_row(const Weight& w, int64_t output, float* out) {
    const uint8_t* data = w.data + output / TILE * tile_bytes(w);
    const int lane = (int)(output % TILE);
    for (int k = 0; w.format == BF16 && k < w.inputs; k++) {
        uint16_t bits;
        memcpy(&bits, data + (k / 2 * TILE + lane) * 4 + k % 2 * 2, 2);
        uint32_t wide = (uint32_t)bits << 16;
        memcpy(out + k, &wide, 4);
    }
    for (int g = 0; w.format != BF16 && g < w.inputs / GROUP; g++, data += group_bytes(w.format), out += GROUP) {
        const uint8_t* end = data + group_bytes(w.format);
        const float scale = from_half(end - 64)[lane], offset = from_half(end - 32)[lane];
        for (int k = 0; k < GROUP; k++) {
            const int quad = k / 4, at = lane * 4 + k % 4;
            const int code = w.format == INT8 ? data[quad * 64 + at] : data[quad / 2 * 64 + at] >> (quad % 2 * 4) & 15;
            out[k] = code * scale + offset;
        }
    }
}
