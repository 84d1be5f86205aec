// Products of a few or many rows of activations with packed weights.
//
// A weight is cut into tiles of 16 output rows; within a tile the input runs in groups, each group's bytes together, so
// that a product is one sequential read:
//   int4   32 inputs: 256 bytes of codes, then 16 scales and 16 offsets in half precision;  w = code * scale + offset
//   int8   32 inputs: 512 bytes of codes, then the same
//   bf16    2 inputs: 16 pairs
// Bytes of codes lie as [input / 4][output][4]; for int4 the low half of a byte belongs to an even quad of inputs, the
// high half to the odd quad after it. Integer products take activations as 15-bit numbers with one scale per group, in two
// bytes: with 8 bits logits move by several percent, with 15 less than by bf16. One row costs the same, weights being what
// it waits for.
#pragma once
#include "simd.h"

enum Format : int32_t { INT4 = 0, INT8 = 1, BF16 = 2 };
constexpr int TILE = 16, GROUP = 32, MOST_ROWS = 8;
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

template <int FORMAT, int ROWS>
static inline void integer_tile(const uint8_t* w, int inputs, const Activations& a, int row, f32x16* sums) {
    const int groups = inputs / GROUP;
    const int64_t stride = group_bytes(FORMAT);
    for (int g = 0; g < groups; g++, w += stride) {
        u8x64 codes[8];
        if (FORMAT == INT4) {
            for (int i = 0; i < 4; i++) {
                u8x64 both = load<u8x64>(w + 64 * i);
                codes[2 * i] = both & 15;
                codes[2 * i + 1] = (u8x64)((u32x16)both >> 4) & 15;
            }
        } else {
            for (int i = 0; i < 8; i++) codes[i] = load<u8x64>(w + 64 * i);
        }
        f32x16 scale = from_half(w + stride - 64), offset = from_half(w + stride - 32);
        for (int r = 0; r < ROWS; r++) {
            const int64_t at = (int64_t)(row + r) * groups + g;
            const int8_t* x = a.codes + at * 2 * GROUP;
            i32x16 high = {}, low = {};
            for (int i = 0; i < 8; i++) {
                int32_t fours[2];
                memcpy(fours, x + 4 * i, 4);
                memcpy(fours + 1, x + GROUP + 4 * i, 4);
                high = dot4(high, codes[i], fours[0]);
                low = dot4(low, codes[i], fours[1]);
            }
            i32x16 dots = (high << 7) + low;
            sums[r] = fma16(offset, splat(a.sums[at]), sums[r]);
            sums[r] = fma16(__builtin_convertvector(dots, f32x16), scale * a.scales[at], sums[r]);
        }
    }
}

template <int ROWS>
static inline void bf16_tile(const uint8_t* w, int inputs, const Activations& a, int row, f32x16* sums) {
    f32x16 odd[ROWS] = {};  // two chains, so that one row alone does not wait for itself
    for (int k = 0; k < inputs; k += 4, w += 128) {
        u32x16 first = load<u32x16>(w), second = load<u32x16>(w + 64);
        for (int r = 0; r < ROWS; r++) {
            uint32_t pairs[2];
            memcpy(pairs, a.halves + (int64_t)(row + r) * inputs + k, 8);
            sums[r] = dot2(sums[r], first, pairs[0]);
            odd[r] = dot2(odd[r], second, pairs[1]);
        }
    }
    for (int r = 0; r < ROWS; r++) sums[r] += odd[r];
}

// How a tile's sums leave: replace what is there, or add to it.
enum class Into { SET, ADD };

template <int ROWS>
static void tile_rows(const Weight& w, int tile, const Activations& a, int row, float* out, int64_t stride, Into into) {
    const uint8_t* data = w.data + tile * tile_bytes(w);
    f32x16 sums[ROWS] = {};
    if (w.format == INT4) integer_tile<INT4, ROWS>(data, w.inputs, a, row, sums);
    if (w.format == INT8) integer_tile<INT8, ROWS>(data, w.inputs, a, row, sums);
    if (w.format == BF16) bf16_tile<ROWS>(data, w.inputs, a, row, sums);
    const int first = tile * TILE, width = w.outputs - first < TILE ? w.outputs - first : TILE;
    for (int r = 0; r < ROWS; r++) {
        float* to = out + (row + r) * stride + first;
        if (width == TILE) {
            if (w.bias) sums[r] += load<f32x16>(w.bias + first);
            if (into == Into::ADD) sums[r] += load<f32x16>(to);
            store(to, sums[r]);
            continue;
        }
        for (int i = 0; i < width; i++) {
            float value = sums[r][i] + (w.bias ? w.bias[first + i] : 0.0f);
            to[i] = into == Into::ADD ? to[i] + value : value;
        }
    }
}

// out[row][tile's outputs] for `rows` rows of prepared activations.
static void tile_product(const Weight& w, int tile, const Activations& a, int rows, float* out, int64_t stride, Into into) {
    typedef void (*Rows)(const Weight&, int, const Activations&, int, float*, int64_t, Into);
    static const Rows table[MOST_ROWS + 1] = {nullptr,      tile_rows<1>, tile_rows<2>, tile_rows<3>, tile_rows<4>,
                                              tile_rows<5>, tile_rows<6>, tile_rows<7>, tile_rows<8>};
    for (int row = 0; row < rows; row += MOST_ROWS) {
        table[rows - row < MOST_ROWS ? rows - row : MOST_ROWS](w, tile, a, row, out, stride, into);
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
