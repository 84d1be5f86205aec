// Products of a few or many rows of activations with packed weights.
//
// A weight is cut into tiles of 16 output rows; within a tile the input runs in groups, each group's bytes together, so
// that a product is one sequential read:
//   int4   32 inputs: 256 bytes of codes, then 16 scales and 16 offsets in half precision;  w = code * scale + offset
//   int8   32 inputs: 512 bytes of codes, then the same
//   bf16    2 inputs: 16 pairs
// Bytes of codes lie as [input / 4][output][4]; for int4 the low half of a byte belongs to an even quad of inputs, the
// high half to the odd quad after it. Integer products take activations as 15-bit numbers with one scale per group, in
// two bytes: with 8 bits logits move by several percent, with 15 less than by bf16. One row costs the same, weights being
// what it waits for.
#pragma once
#include "simd.h"

enum Format : int32_t { INT4 = 0, INT8 = 1, BF16 = 2 };
constexpr int TILE = 16, GROUP = 32, MOST_ROWS = 4;
constexpr float WIDEST = 127 * 128;

struct Weight {
    const uint8_t* data;
    const float* bias;  // or null
    int32_t format, outputs, inputs, unused;
};

static inline int64_t group_bytes(int format) { return format == INT4 ? 320 : format == INT8 ? 576 : 1024; }
static inline int64_t tile_bytes(const Weight& w) { return group_bytes(w.format) * (w.inputs / GROUP); }

// Activations in the forms that products read: whole numbers with scale and scale * sum per group, and bf16.
struct Activations {
    int8_t* codes;     // (rows, inputs / GROUP, 2, GROUP): number = 128 * first + second
    float* scales;     // (rows, inputs / GROUP)
    float* sums;       // (rows, inputs / GROUP)
    uint16_t* halves;  // (rows, inputs)
};

// One row of `inputs` floats into whichever forms are wanted.
static inline void prepare(const float* x, int inputs, int row, const Activations& a, bool integers, bool halves) {
    const int groups = inputs / GROUP;
    if (halves) {
        for (int i = 0; i < inputs; i += 16) store(a.halves + (int64_t)row * inputs + i, to_bf16(load<f32x16>(x + i)));
    }
    if (!integers) return;
    const float magic = 12582912.0f;
    for (int g = 0; g < groups; g++) {
        f32x16 first = load<f32x16>(x + g * GROUP), second = load<f32x16>(x + g * GROUP + 16);
        // As whole numbers, magnitudes compare alike and NaN is above all: it must not be lost in rounding.
        i32x16 one = (i32x16)first & 0x7fffffff, two = (i32x16)second & 0x7fffffff;
        int32_t most_bits = highest(one > two ? one : two);
        float most;
        memcpy(&most, &most_bits, 4);
        float scale = most / WIDEST, inverse = most_bits ? WIDEST / most : 0.0f;
        i32x16 one_code = (i32x16)fma16(first, splat(inverse), splat(magic)) - 0x4b400000;
        i32x16 two_code = (i32x16)fma16(second, splat(inverse), splat(magic)) - 0x4b400000;
        i32x16 one_high = (one_code + 64) >> 7, two_high = (two_code + 64) >> 7;
        int8_t* codes = a.codes + ((int64_t)row * groups + g) * 2 * GROUP;
        store(codes, __builtin_convertvector(one_high, s8x16));
        store(codes + 16, __builtin_convertvector(two_high, s8x16));
        store(codes + 32, __builtin_convertvector(one_code - (one_high << 7), s8x16));
        store(codes + 48, __builtin_convertvector(two_code - (two_high << 7), s8x16));
        a.scales[(int64_t)row * groups + g] = scale;
        a.sums[(int64_t)row * groups + g] = scale * (float)total(one_code + two_code);
    }
}

// TILES neighbouring tiles at once, so that each activation read serves all of them.
template <int FORMAT, int TILES, int ROWS>
static inline void integer_tiles(const uint8_t* w, int inputs, const Activations& a, int row, f32x16 (*sums)[ROWS]) {
    const int groups = inputs / GROUP;
    const int64_t stride = group_bytes(FORMAT), tile = stride * groups;
    for (int g = 0; g < groups; g++, w += stride) {
        u8x64 codes[TILES][8];
        f32x16 scale[TILES], offset[TILES];
        for (int n = 0; n < TILES; n++) {
            const uint8_t* from = w + n * tile;
            for (int i = 0; FORMAT == INT4 && i < 4; i++) {
                u8x64 both = load<u8x64>(from + 64 * i);
                codes[n][2 * i] = both & 15;
                codes[n][2 * i + 1] = (u8x64)((u32x16)both >> 4) & 15;
            }
            for (int i = 0; FORMAT == INT8 && i < 8; i++) codes[n][i] = load<u8x64>(from + 64 * i);
            scale[n] = from_half(from + stride - 64);
            offset[n] = from_half(from + stride - 32);
        }
        for (int r = 0; r < ROWS; r++) {
            const int64_t at = (int64_t)(row + r) * groups + g;
            const int8_t* x = a.codes + at * 2 * GROUP;
            i32x16 high[TILES] = {}, low[TILES] = {};
            for (int i = 0; i < 8; i++) {
                int32_t fours[2];
                memcpy(fours, x + 4 * i, 4);
                memcpy(fours + 1, x + GROUP + 4 * i, 4);
                for (int n = 0; n < TILES; n++) {
                    high[n] = dot4(high[n], codes[n][i], fours[0]);
                    low[n] = dot4(low[n], codes[n][i], fours[1]);
                }
            }
            for (int n = 0; n < TILES; n++) {
                f32x16 dots = __builtin_convertvector((high[n] << 7) + low[n], f32x16);
                sums[n][r] = fma16(offset[n], splat(a.sums[at]), sums[n][r]);
                sums[n][r] = fma16(dots, scale[n] * a.scales[at], sums[n][r]);
            }
        }
    }
}

template <int TILES, int ROWS>
static inline void bf16_tiles(const uint8_t* w, int inputs, const Activations& a, int row, f32x16 (*sums)[ROWS]) {
    const int64_t tile = group_bytes(BF16) * (inputs / GROUP);
    f32x16 odd[TILES][ROWS] = {};  // two chains, so that one row alone does not wait for itself
    for (int k = 0; k < inputs; k += 4, w += 128) {
        for (int r = 0; r < ROWS; r++) {
            uint32_t pairs[2];
            memcpy(pairs, a.halves + (int64_t)(row + r) * inputs + k, 8);
            for (int n = 0; n < TILES; n++) {
                sums[n][r] = dot2(sums[n][r], load<u32x16>(w + n * tile), pairs[0]);
                odd[n][r] = dot2(odd[n][r], load<u32x16>(w + n * tile + 64), pairs[1]);
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

// out[row][outputs of `tiles` tiles] for `rows` rows of prepared activations: many rows by blocks of registers' worth,
// few ones, which wait for memory, tile by tile.
static void tile_products(const Weight& w, int tile, int tiles, const Activations& a, int rows, float* out,
                          int64_t stride, Into into) {
    typedef void (*Rows)(const Weight&, int, const Activations&, int, float*, int64_t, Into);
    static const Rows one[] = {tiles_rows<1, 1>, tiles_rows<1, 2>, tiles_rows<1, 3>, tiles_rows<1, 4>};
    static const Rows two[] = {tiles_rows<2, 1>, tiles_rows<2, 2>, tiles_rows<2, 3>, tiles_rows<2, 4>};
    for (int end = tile + tiles; tile < end;) {
        const bool pair = rows > 1 && tile + 2 <= end;
        for (int row = 0; row < rows; row += MOST_ROWS) {
            const int some = rows - row < MOST_ROWS ? rows - row : MOST_ROWS;
            (pair ? two : one)[some - 1](w, tile, a, row, out, stride, into);
        }
        tile += pair ? 2 : 1;
    }
}

// Weight row `output` as floats: the embedding of a token.
static void unpack_row(const Weight& w, int64_t output, float* out) {
    const uint8_t* data = w.data + output / TILE * tile_bytes(w);
    const int lane = (int)(output % TILE);
    for (int k = 0; k < w.inputs; k++) {
        if (w.format == BF16) {
            uint16_t bits;
            memcpy(&bits, data + (k / 2 * TILE + lane) * 4 + k % 2 * 2, 2);
            uint32_t wide = (uint32_t)bits << 16;
            memcpy(out + k, &wide, 4);
            continue;
        }
        const uint8_t* group = data + k / GROUP * group_bytes(w.format);
        const uint8_t* end = group + group_bytes(w.format);
        const int quad = k % GROUP / 4, at = lane * 4 + k % 4;
        const int code = w.format == INT8 ? group[quad * 64 + at] : group[quad / 2 * 64 + at] >> (quad % 2 * 4) & 15;
        out[k] = code * from_half(end - 64)[lane] + from_half(end - 32)[lane];
    }
}
