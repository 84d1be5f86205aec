// Attention of one step over the paged pool, block layout (kv_head, layer, 2, token, head_dim): keys, then values.
//
// Work is cut into pieces of one sequence, one KV head, a few query positions and a range of keys. The query heads that
// share a KV head are further rows of the piece, so a block is read once for all of them. Keys are taken sixteen at a
// time, transposed, so that one register holds sixteen keys' products and the running softmax needs no loose ends. Long
// single queries are cut by keys as well; their parts are put together by `merge`.
#pragma once
#include <algorithm>
#include <vector>

#include "simd.h"

enum PoolType : int32_t { F32 = 0, BF16_POOL = 1, F16 = 2 };
constexpr int KEYS = 16, MOST_QUERIES = 32, MOST_HEAD_DIM = 256, PART_KEYS = 512, QUERIES_AT_ONCE = 8;
constexpr int AHEAD = 2 * KEYS;  // how far before their use keys are asked for

struct Pool {
    uint8_t* data;
    int32_t type, kv_heads, layers, block_size, head_dim, unused;

    int64_t item_bytes() const { return type == F32 ? 4 : 2; }
    uint8_t* at(int64_t block, int head, int layer, int value, int64_t offset) const {
        const int64_t run = ((block * kv_heads + head) * layers + layer) * 2 + value;
        return data + (run * block_size + offset) * head_dim * item_bytes();
    }
};

// Tokens first … first + queries - 1 of the batch stand at positions start … of the sequence with this block table.
struct Span {
    int32_t first, queries, start, table;
};

template <int TYPE> static inline f32x16 pool_load(const uint8_t* row, int i) {
    if (TYPE == BF16_POOL) return from_bf16(row + 2 * i);
    return TYPE == F16 ? from_half(row + 2 * i) : load<f32x16>(row + 4 * i);
}
static inline void pool_store(const Pool& pool, uint8_t* row, int i, f32x16 v) {
    if (pool.type == F32) store(row + 4 * i, v);
    else store(row + 2 * i, pool.type == F16 ? to_half(v) : to_bf16(v));
}

// A piece's running softmax: `mixed` is relative to `most`, not yet divided by `total`.
struct Part {
    float most[MOST_QUERIES], total[MOST_QUERIES];
    alignas(64) float mixed[MOST_QUERIES * MOST_HEAD_DIM];
};

struct Piece {
    int32_t span, kv_head, query, queries, part, parts;
    int64_t slot;  // where the parts of a cut piece go
};

struct Attention {
    const Pool* pool;
    const Span* spans;
    const int32_t* tables;
    int heads;
    int64_t qkv_stride;  // floats per token of q, k, v
    float scale;
    std::vector<Piece> pieces;
    std::vector<int64_t> slots;  // per token: first slot of its parts, or -1
    std::vector<int32_t> parts;  // per token
    std::vector<float> parted;   // (slot, group, head_dim + 2)

    int group() const { return heads / pool->kv_heads; }
    int64_t slot_floats() const { return (int64_t)group() * (pool->head_dim + 2); }

    void plan(int tokens, int count) {
        pieces.clear();
        slots.assign(tokens, -1);
        parts.assign(tokens, 1);
        int64_t slot = 0;
        const int together = group() < MOST_QUERIES ? MOST_QUERIES / group() : 1;
        for (int s = 0; s < count; s++) {
            const Span& span = spans[s];
            const int cut = span.queries > 1 ? 1 : (span.start + PART_KEYS) / PART_KEYS;
            if (cut > 1) slots[span.first] = slot, parts[span.first] = cut;
            // The last queries see the most keys: begin with them.
            for (int query = (span.queries - 1) / together * together; query >= 0; query -= together) {
                const int queries = span.queries - query < together ? span.queries - query : together;
                for (int head = 0; head < pool->kv_heads; head++) {
                    for (int part = 0; part < cut; part++) {
                        pieces.push_back({s, head, query, queries, part, cut, slot + part});
                    }
                    if (cut > 1) slot += cut;
                }
            }
        }
        parted.resize(slot * slot_floats());
    }

    // DIM is the head size, or 0 for one that is known only at run time.
    template <int DIM> void attend(const Piece& piece, int layer, int window, const float* qkv, float* mixed) {
        const int dim = DIM ? DIM : pool->head_dim;
        const Span& span = spans[piece.span];
        const int rows = piece.queries * group(), first = span.start + piece.query;
        alignas(64) float q[MOST_QUERIES * MOST_HEAD_DIM], keys[KEYS * MOST_HEAD_DIM], values[KEYS * MOST_HEAD_DIM];
        Part part;
        for (int r = 0; r < rows; r++) {
            const int64_t token = span.first + piece.query + r / group();
            const float* from = qkv + token * qkv_stride + (int64_t)(piece.kv_head * group() + r % group()) * dim;
            for (int i = 0; i < dim; i += 16) store(q + r * dim + i, load<f32x16>(from + i) * scale);
            part.most[r] = -INFINITY;
            part.total[r] = 0;
        }
        memset(part.mixed, 0, sizeof(float) * rows * dim);
        int low = window > 0 ? std::max(0, first - window + 1) : 0, high = first + piece.queries;
        if (piece.parts > 1) {
            low = std::max(low, piece.part * PART_KEYS);
            high = std::min(high, (piece.part + 1) * PART_KEYS);
        }
        for (int key = low / KEYS * KEYS; key < high; key += KEYS) {
            const int64_t block = tables[span.table + key / pool->block_size];
            fetch<DIM>(block, key % pool->block_size, piece.kv_head, layer, std::min(KEYS, high - key), keys, values);
            for (int r = 0; r < rows; r += QUERIES_AT_ONCE) {
                const int next = std::min(key + AHEAD, high - 1) / KEYS * KEYS;
                const int64_t next_block = tables[span.table + next / pool->block_size];
                const uint8_t* coming = pool->at(next_block, piece.kv_head, layer, 0, next % pool->block_size);
                const Tile tile = {q, keys, values, coming, &part, r, first, key, window};
                several<DIM>(tile, std::min(QUERIES_AT_ONCE, rows - r));
            }
        }
        finish(piece, part, rows, dim, mixed);
    }

    // Put the parts of a token's cut pieces together into `mixed`, its row of all heads.
    void merge(int token, float* mixed) const {
        const int dim = pool->head_dim, cut = parts[token];
        for (int head = 0; head < heads && cut > 1; head++) {
            const int64_t first = slots[token] + (int64_t)(head / group()) * cut;
            float most = -INFINITY, sum = 0;
            for (int p = 0; p < cut; p++) most = std::max(most, slot(first + p, head % group())[dim]);
            float* to = mixed + head * dim;
            memset(to, 0, sizeof(float) * dim);
            for (int p = 0; p < cut; p++) {
                const float* from = slot(first + p, head % group());
                const float weight = from[dim] == -INFINITY ? 0.0f : std::exp(from[dim] - most);
                sum += from[dim + 1] * weight;
                for (int i = 0; i < dim; i++) to[i] += from[i] * weight;
            }
            for (int i = 0; i < dim; i++) to[i] /= sum;
        }
    }

  private:
    // Sixteen keys against the query rows from `row` on; the piece's first query stands at position `first`.
    struct Tile {
        const float *q, *keys, *values;
        const uint8_t* coming;  // keys in the pool that are next but one
        Part* part;
        int row, first, key, window;
    };

    float* slot(int64_t index, int member) { return parted.data() + index * slot_floats() + member * (pool->head_dim + 2); }
    const float* slot(int64_t index, int member) const { return const_cast<Attention*>(this)->slot(index, member); }

    // Keys transposed (dim, 16) and values (16, dim) of `known` tokens, the rest zero: a stale slot may hold anything.
    template <int DIM>
    void fetch(int64_t block, int offset, int head, int layer, int known, float* keys, float* values) const {
        const uint8_t *k = pool->at(block, head, layer, 0, offset), *v = pool->at(block, head, layer, 1, offset);
        if (pool->type == F32) return fetch_as<DIM, F32>(k, v, known, keys, values);
        if (pool->type == F16) return fetch_as<DIM, F16>(k, v, known, keys, values);
        return fetch_as<DIM, BF16_POOL>(k, v, known, keys, values);
    }

    template <int DIM, int TYPE>
    void fetch_as(const uint8_t* k, const uint8_t* v, int known, float* keys, float* values) const {
        if (known == KEYS) columns<DIM, TYPE, true>(k, v, pool->head_dim, known, keys, values);
        else columns<DIM, TYPE, false>(k, v, pool->head_dim, known, keys, values);
    }

    template <int DIM, int TYPE, bool WHOLE>
    static void columns(const uint8_t* k, const uint8_t* v, int head_dim, int some, float* keys, float* values) {
        const int dim = DIM ? DIM : head_dim, known = WHOLE ? KEYS : some;
        const int64_t row = dim * (TYPE == F32 ? 4 : 2);
        int i = 0;
        // Two neighbours in bf16 are one number of 32 bits: half the work of turning rows into columns.
        for (; TYPE == BF16_POOL && i + 32 <= dim; i += 32) {
            f32x16 pairs[16];
#pragma GCC unroll 16
            for (int t = 0; t < KEYS; t++) pairs[t] = t < known ? load<f32x16>(k + t * row + 2 * i) : f32x16{};
            transpose16(pairs);
#pragma GCC unroll 16
            for (int j = 0; j < 16; j++) {
                store(keys + (i + 2 * j) * KEYS, (u32x16)pairs[j] << 16);
                store(keys + (i + 2 * j + 1) * KEYS, (u32x16)pairs[j] & 0xffff0000u);
            }
        }
        for (; i < dim; i += 16) {
            f32x16 square[16];
#pragma GCC unroll 16
            for (int t = 0; t < KEYS; t++) square[t] = t < known ? pool_load<TYPE>(k + t * row, i) : f32x16{};
            transpose16(square);
#pragma GCC unroll 16
            for (int j = 0; j < 16; j++) store(keys + (i + j) * KEYS, square[j]);
        }
        for (int t = 0; t < KEYS; t++) {
            for (int i = 0; i < dim; i += 16) {
                store(values + t * dim + i, t < known ? pool_load<TYPE>(v + t * row, i) : f32x16{});
            }
        }
    }

    template <int DIM> void several(const Tile& tile, int rows) const {
        static_assert(QUERIES_AT_ONCE == 8);
        switch (rows) {
            case 1: return score<DIM, 1>(tile);
            case 2: return score<DIM, 2>(tile);
            case 3: return score<DIM, 3>(tile);
            case 4: return score<DIM, 4>(tile);
            case 5: return score<DIM, 5>(tile);
            case 6: return score<DIM, 6>(tile);
            case 7: return score<DIM, 7>(tile);
            default: return score<DIM, 8>(tile);
        }
    }

    // One step of the running softmax.
    template <int DIM, int ROWS> void score(const Tile& tile) const {
        const int dim = DIM ? DIM : pool->head_dim;
        f32x16 even[ROWS] = {}, odd[ROWS] = {};
        const float* q = tile.q + tile.row * dim;
        const int64_t bytes = pool->item_bytes() * KEYS * 2, to_values = pool->item_bytes() * pool->block_size * dim;
        for (int i = 0; i < dim; i += 2) {
            // Blocks lie far apart, so the processor cannot guess the next one. It is asked for line by line between
            // products: all at once they would wait for one another, and the products for them.
            for (int64_t line = i / 2 * bytes; tile.row == 0 && line < (i / 2 + 1) * bytes; line += 64) {
                __builtin_prefetch(tile.coming + line);
                __builtin_prefetch(tile.coming + to_values + line);
            }
            f32x16 first = load<f32x16>(tile.keys + i * KEYS), second = load<f32x16>(tile.keys + (i + 1) * KEYS);
            for (int r = 0; r < ROWS; r++) {
                even[r] = fma16(first, splat(q[r * dim + i]), even[r]);
                odd[r] = fma16(second, splat(q[r * dim + i + 1]), odd[r]);
            }
        }
        float weights[ROWS][KEYS], shrink[ROWS];
        for (int r = 0; r < ROWS; r++) {
            f32x16 p = soften(tile, tile.row + r, even[r] + odd[r], shrink[r]);
            store(weights[r], p);
        }
        float* mixed = tile.part->mixed + tile.row * dim;
        constexpr int WIDE = DIM && ROWS <= 4 ? 4 : 1;  // enough sums at once that none waits for itself
        for (int i = 0; i < dim; i += 16 * WIDE) {
            f32x16 sums[ROWS][WIDE];
            for (int r = 0; r < ROWS; r++) {
                for (int w = 0; w < WIDE; w++) sums[r][w] = load<f32x16>(mixed + r * dim + i + 16 * w) * shrink[r];
            }
            for (int t = 0; t < KEYS; t++) {
                for (int w = 0; w < WIDE; w++) {
                    f32x16 value = load<f32x16>(tile.values + t * dim + i + 16 * w);
                    for (int r = 0; r < ROWS; r++) sums[r][w] = fma16(value, splat(weights[r][t]), sums[r][w]);
                }
            }
            for (int r = 0; r < ROWS; r++) {
                for (int w = 0; w < WIDE; w++) store(mixed + r * dim + i + 16 * w, sums[r][w]);
            }
        }
    }

    // Weights of sixteen scores; `shrink` is what earlier sums are worth under the new maximum.
    f32x16 soften(const Tile& tile, int row, f32x16 scores, float& shrink) const {
        const i32x16 index = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        const int position = tile.first + row / group(), oldest = tile.window > 0 ? position - tile.window + 1 : 0;
        if (tile.key < oldest || tile.key + KEYS > position + 1) {
            const i32x16 keys = index + tile.key;
            scores = choose((keys <= position) & (keys >= oldest), scores, splat(-INFINITY));
        }
        float& most = tile.part->most[row];
        const float before = most, here = highest(scores);
        if (here > before) most = here;
        shrink = most == before ? 1.0f : exp16(splat(before - most))[0];
        // With nothing seen yet every weight is zero, but what is not a number must stay so.
        f32x16 p = most == -INFINITY ? choose(scores == -INFINITY, f32x16{}, scores) : exp16(scores - most);
        tile.part->total[row] = tile.part->total[row] * shrink + total(p);
        return p;
    }

    void finish(const Piece& piece, const Part& part, int rows, int dim, float* mixed) {
        for (int r = 0; r < rows; r++) {
            const float* from = part.mixed + r * dim;
            if (piece.parts > 1) {
                float* to = slot(piece.slot, r);
                memcpy(to, from, sizeof(float) * dim);
                to[dim] = part.most[r];
                to[dim + 1] = part.total[r];
                continue;
            }
            const int64_t token = spans[piece.span].first + piece.query + r / group();
            float* to = mixed + (token * heads + piece.kv_head * group() + r % group()) * dim;
            for (int i = 0; i < dim; i += 16) store(to + i, load<f32x16>(from + i) / part.total[r]);
        }
    }
};
