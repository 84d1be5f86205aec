// Products of a few or many rows of activations with packed weights.
//
// A weight is cut into tiles of 16 output rows; within a tile the input runs in groups, each group's bytes together, so
// that a product is one sequential read:
//   int4   32 inputs: 256 bytes of codes, then 16 scales and 16 offsets in half precision;  w = code * scale + offset
//   int8   32 inputs: 512 bytes of codes, then the same
//   bf16    2 inputs: 16 pairs
// Bytes of codes lie as [input / 4][output][4]; for int4 the low half of a byte belongs to an even quad of inputs, the
// high half to the odd quad after it. Integer products take activations as 16-bit numbers with one scale per row, in
// two bytes: with 8 bits logits move by several percent, with 16 less than by bf16. One row costs the same, weights
// being what it waits for.
#pragma once
#include <algorithm>

#include "simd.h"

enum Format : int32_t { INT4 = 0, INT8 = 1, BF16 = 2 };
constexpr int TILE = 16, GROUP = 32, MOST_ROWS = 4;
constexpr float WIDEST = 127 * 256;     // sums over a group of 4-bit codes stay below 2^24, exact as floats
constexpr int CACHED_BYTES = 256 << 10;  // of activations that tiles are multiplied with before the next ones

struct Weight {
    const uint8_t* data;
    const float* bias;  // or null
    int32_t format, outputs, inputs, unused;
};

static inline int64_t group_bytes(int format) { return format == INT4 ? 320 : format == INT8 ? 576 : 1024; }
static inline int64_t tile_bytes(const Weight& w) { return group_bytes(w.format) * (w.inputs / GROUP); }

// Activations in the forms that products read: whole numbers with a scale, and bf16.
struct Activations {
    int8_t* codes;     // (rows, inputs / GROUP, 2, GROUP): number = 256 * first + second
    float* scales;     // (rows)
    float* sums;       // (rows, inputs / GROUP), of numbers
    uint16_t* halves;  // (rows, inputs)
};

// One row of `inputs` floats into whichever forms are wanted.
static inline void prepare(const float* x, int inputs, int row, const Activations& a, bool integers, bool halves) {
    for (int i = 0; halves && i < inputs; i += 16) {
        store(a.halves + (int64_t)row * inputs + i, to_bf16(load<f32x16>(x + i)));
    }
    if (!integers) return;
    // As whole numbers, magnitudes compare alike and NaN is above all: it must not be lost in rounding.
    i32x16 widest = {};
    for (int i = 0; i < inputs; i += 16) {
        i32x16 bits = load<i32x16>(x + i) & 0x7fffffff;
        widest = bits > widest ? bits : widest;
    }
    const int32_t most_bits = highest(widest);
    float most;
    memcpy(&most, &most_bits, 4);
    a.scales[row] = most / WIDEST;
    const f32x16 inverse = splat(most < 1e-30f ? 0.0f : WIDEST / most), magic = splat(12582912.0f);
    int8_t* codes = a.codes + (int64_t)row * inputs * 2;
    float* sums = a.sums + (int64_t)row * (inputs / GROUP);
    for (int i = 0; i < inputs; i += GROUP, codes += 2 * GROUP) {
        i32x16 one = (i32x16)fma16(load<f32x16>(x + i), inverse, magic) - 0x4b400000;
        i32x16 two = (i32x16)fma16(load<f32x16>(x + i + 16), inverse, magic) - 0x4b400000;
        i32x16 one_high = (one + 128) >> 8, two_high = (two + 128) >> 8;
        store(codes, __builtin_convertvector(one_high, s8x16));
        store(codes + 16, __builtin_convertvector(two_high, s8x16));
        store(codes + 32, __builtin_convertvector(one - (one_high << 8), s8x16));
        store(codes + 48, __builtin_convertvector(two - (two_high << 8), s8x16));
        *sums++ = (float)total(one + two);
    }
}

static inline int32_t four(const int8_t* p) {
    int32_t bytes;
    memcpy(&bytes, p, 4);
    return bytes;
}

// Codes of quads 2 * pair and 2 * pair + 1 of a group.
template <int FORMAT> static inline void two_quads(const uint8_t* group, int pair, u8x64& even, u8x64& odd) {
    if (FORMAT == INT4) {
        u8x64 both = load<u8x64>(group + 64 * pair);
        even = both & 15;
        odd = (u8x64)((u32x16)both >> 4) & 15;
        return;
    }
    even = load<u8x64>(group + 128 * pair);
    odd = load<u8x64>(group + 128 * pair + 64);
}

// TILES neighbouring tiles at once, so that each activation read serves all of them. The order of loops keeps just the
// sums in registers, which they fill.
template <int FORMAT, int TILES, int ROWS>
static inline void integer_tiles(const uint8_t* w, int inputs, const Activations& a, int row, f32x16 (*sums)[ROWS]) {
    const int groups = inputs / GROUP;
    const int64_t stride = group_bytes(FORMAT), tile = stride * groups, row_bytes = 2 * inputs;
    const int8_t* x = a.codes + row * row_bytes;
    const float* x_sums = a.sums + (int64_t)row * groups;
    for (int g = 0; g < groups; g++, w += stride, x += 2 * GROUP, x_sums++) {
        i32x16 high[TILES][ROWS] = {}, low[TILES][ROWS] = {};
#pragma GCC unroll 4
        for (int pair = 0; pair < 4; pair++) {
            u8x64 codes[2][TILES];
#pragma GCC unroll 2
            for (int n = 0; n < TILES; n++) two_quads<FORMAT>(w + n * tile, pair, codes[0][n], codes[1][n]);
#pragma GCC unroll 2
            for (int odd = 0; odd < 2; odd++) {
#pragma GCC unroll 4
                for (int r = 0; r < ROWS; r++) {
                    const int8_t* quad = x + r * row_bytes + 8 * pair + 4 * odd;
#pragma GCC unroll 2
                    for (int n = 0; n < TILES; n++) {
                        high[n][r] = dot4(high[n][r], codes[odd][n], four(quad));
                        low[n][r] = dot4(low[n][r], codes[odd][n], four(quad + GROUP));
                    }
                }
            }
        }
#pragma GCC unroll 2
        for (int n = 0; n < TILES; n++) {
            const uint8_t* end = w + n * tile + stride;
            f32x16 scale = from_half(end - 64), offset = from_half(end - 32);
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; r++) {
                f32x16 dots = __builtin_convertvector((high[n][r] << 8) + low[n][r], f32x16);
                sums[n][r] = fma16(offset, splat(x_sums[r * groups]), sums[n][r]);
                sums[n][r] = fma16(dots, scale, sums[n][r]);
            }
        }
    }
    for (int n = 0; n < TILES; n++) {
        for (int r = 0; r < ROWS; r++) sums[n][r] *= a.scales[row + r];
    }
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
static void tiles_rows(const Weight& w, int tile, const Activations& a, int row, float* out, int64_t stride,
                       Into into) {
    const uint8_t* data = w.data + tile * tile_bytes(w);
    f32x16 sums[TILES][ROWS] = {};
    if (w.format == INT4) integer_tiles<INT4, TILES, ROWS>(data, w.inputs, a, row, sums);
    if (w.format == INT8) integer_tiles<INT8, TILES, ROWS>(data, w.inputs, a, row, sums);
    if (w.format == BF16) bf16_tiles<TILES, ROWS>(data, w.inputs, a, row, sums);
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
// hold. A single row, which waits for memory, goes tile by tile.
static void tile_products(const Weight& w, int tile, int tiles, const Activations& a, int first, int last, float* out,
                          int64_t stride, Into into) {
    typedef void (*Rows)(const Weight&, int, const Activations&, int, float*, int64_t, Into);
    static const Rows one[] = {tiles_rows<1, 1>, tiles_rows<1, 2>, tiles_rows<1, 3>, tiles_rows<1, 4>};
    static const Rows two[] = {tiles_rows<2, 1>, tiles_rows<2, 2>, tiles_rows<2, 3>, tiles_rows<2, 4>};
    for (int end = tile + tiles; tile < end;) {
        const bool pair = last - first > 1 && tile + 2 <= end;
        for (int row = first; row < last; row += MOST_ROWS) {
            const int some = std::min(last - row, MOST_ROWS);
            (pair ? two : one)[some - 1](w, tile, a, row, out, stride, into);
        }
        tile += pair ? 2 : 1;
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
