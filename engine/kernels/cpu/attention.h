// Attention of one step over the paged pool, block layout (kv_head, layer, 2, token, head_dim): keys, then values.
//
// Work is cut into pieces of one sequence, one KV head, a few query positions and a range of keys. The query heads that
// share a KV head are further rows of the piece, so a block is read once for all of them. Keys are taken 32 at a time,
// transposed, so that one register holds sixteen keys' products and the running softmax needs no loose ends. A bf16
// pool is multiplied as it lies: queries and weights are rounded to bf16 too, and the sums are float32. Long single
// queries are cut by keys as well; their parts are put together by `merge`.
#pragma once
#include <algorithm>
#include <type_traits>
#include <vector>

#include "simd.h"

enum PoolType : int32_t { F32 = 0, BF16_POOL = 1, F16 = 2 };
constexpr int RUN = 16, KEYS = 2 * RUN;  // a run of keys lies in one block
constexpr int AHEAD = 2 * KEYS;  // how far before their use keys are asked for
constexpr int MOST_QUERIES = 64, MOST_HEAD_DIM = 256, PART_KEYS = 512, QUERIES_AT_ONCE = 8;
constexpr int ITEMS_PER_THREAD = 16;  // enough that the last ones to finish differ little

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

// What a lane of a key or a value holds and how it is multiplied: one float, or two neighbours in bf16.
struct Floats {
    typedef float Lane;
    static constexpr int PER_LANE = 1, BYTES = 4;  // of a lane
    static f32x16 add(f32x16 sums, const float* lanes, float one) {
        return fma16(load<f32x16>(lanes), splat(one), sums);
    }
    static void put(float* to, f32x16 v) { store(to, v); }
};
struct Pairs {
    typedef uint32_t Lane;
    static constexpr int PER_LANE = 2, BYTES = 4;
    static f32x16 add(f32x16 sums, const uint32_t* lanes, uint32_t one) {
        return dot2(sums, load<u32x16>(lanes), one);
    }
    static void put(uint32_t* to, f32x16 v) { store(to, to_bf16(v)); }
};
template <int TYPE> using Form = std::conditional_t<TYPE == BF16_POOL, Pairs, Floats>;

// A piece's running softmax: `mixed` is relative to `most`, not yet divided by the sum of `total`.
struct Part {
    float most[MOST_QUERIES];
    f32x16 total[MOST_QUERIES];
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
    int threads, together;
    std::vector<Piece> pieces;
    std::vector<int64_t> slots;  // per token: first slot of its parts, or -1
    std::vector<int32_t> parts;  // per token
    std::vector<float> parted;   // (slot, group, head_dim + 2)

    int group() const { return heads / pool->kv_heads; }
    int64_t slot_floats() const { return (int64_t)group() * (pool->head_dim + 2); }

    // Pieces one after another for the same thread are an item: it knows what it reads next, and asks for it in time.
    int items() const { return ((int)pieces.size() + together - 1) / together; }

    void plan(int tokens, int count, int team) {
        threads = team;
        pieces.clear();
        slots.assign(tokens, -1);
        parts.assign(tokens, 1);
        int64_t slot = 0;
        const int most = group() < MOST_QUERIES ? MOST_QUERIES / group() : 1;
        for (int s = 0; s < count; s++) {
            const Span& span = spans[s];
            const int cut = span.queries > 1 ? 1 : (span.start + PART_KEYS) / PART_KEYS;
            if (cut > 1) slots[span.first] = slot, parts[span.first] = cut;
            // The last queries see the most keys: begin with them.
            for (int query = (span.queries - 1) / most * most; query >= 0; query -= most) {
                const int queries = std::min(span.queries - query, most);
                for (int head = 0; head < pool->kv_heads; head++) {
                    for (int part = 0; part < cut; part++) {
                        pieces.push_back({s, head, query, queries, part, cut, slot + part});
                    }
                    if (cut > 1) slot += cut;
                }
            }
        }
        parted.resize(slot * slot_floats());
        together = std::clamp((int)pieces.size() / (threads * ITEMS_PER_THREAD), 1, 8);
    }

    void attend(int item, int layer, int window, const float* qkv, float* mixed) {
        const int first = item * together, end = std::min(first + together, (int)pieces.size());
        for (int i = first; i < end; i++) {
            // Threads take items in turn, so the one after an item is likely not the next.
            const int next = i + 1 < end ? i + 1 : (item + threads) * together;
            const Piece& coming = pieces[next < (int)pieces.size() ? next : i];
            if (pool->type == BF16_POOL) attend_in<BF16_POOL>(pieces[i], coming, layer, window, qkv, mixed);
            else if (pool->type == F16) attend_in<F16>(pieces[i], coming, layer, window, qkv, mixed);
            else attend_in<F32>(pieces[i], coming, layer, window, qkv, mixed);
        }
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
    template <int TYPE>
    void attend_in(const Piece& piece, const Piece& next, int layer, int window, const float* qkv, float* mixed) {
        if (pool->head_dim == 64) return walk<64, TYPE>(piece, next, layer, window, qkv, mixed);
        if (pool->head_dim == 128) return walk<128, TYPE>(piece, next, layer, window, qkv, mixed);
        return walk<0, TYPE>(piece, next, layer, window, qkv, mixed);
    }

    // 32 keys against the query rows from `row` on; the piece's first query stands at position `first`.
    template <class F> struct Tile {
        const typename F::Lane *q, *keys, *values;
        const uint8_t* coming[2];  // runs in the pool that are next but one
        Part* part;
        int row, first, key, window;
    };

    // Goes over a piece's keys, asking for those of `next` before its end. DIM is the head size, or 0 for one that is
    // known only at run time.
    template <int DIM, int TYPE>
    void walk(const Piece& piece, const Piece& next, int layer, int window, const float* qkv, float* mixed) {
        typedef Form<TYPE> F;
        const int dim = DIM ? DIM : pool->head_dim, lanes = dim / F::PER_LANE;
        const Span& span = spans[piece.span];
        const int rows = piece.queries * group(), first = span.start + piece.query;
        constexpr int MOST = DIM ? DIM : MOST_HEAD_DIM;
        alignas(64) typename F::Lane q[MOST_QUERIES * MOST], keys[KEYS * MOST], values[KEYS * MOST];
        Part part;
        for (int r = 0; r < rows; r++) {
            const int64_t token = span.first + piece.query + r / group();
            const float* from = qkv + token * qkv_stride + (int64_t)(piece.kv_head * group() + r % group()) * dim;
            for (int i = 0; i < dim; i += 16) F::put(q + r * lanes + i / F::PER_LANE, load<f32x16>(from + i) * scale);
            part.most[r] = -INFINITY;
            part.total[r] = f32x16{};
        }
        memset(part.mixed, 0, sizeof(float) * rows * dim);
        const int high = last_key(piece) + 1, end = (high + KEYS - 1) / KEYS * KEYS;
        for (int key = first_key(piece, window); key < high; key += KEYS) {
            Tile<F> tile = {q, keys, values, {}, &part, 0, first, key, window};
            for (int run = 0; run < 2; run++) {
                const int at = key + run * RUN;
                const int ahead = at + AHEAD < end ? at : first_key(next, window) + at - end;
                tile.coming[run] = run_of(at + AHEAD < end ? piece : next, ahead + AHEAD, layer);
                const Run now = {run_of(piece, at, layer), tile.coming[run], std::clamp(high - at, 0, RUN), run};
                fetch<DIM, TYPE>(now, keys, values);
            }
            for (int left = rows; left > 0;) {
                const int some = several<DIM>(tile, left);
                tile.row += some, left -= some;
            }
        }
        finish(piece, part, rows, dim, mixed);
    }

    int first_key(const Piece& piece, int window) const {
        const int oldest = window > 0 ? std::max(0, spans[piece.span].start + piece.query - window + 1) : 0;
        return std::max(oldest, piece.part * PART_KEYS) / KEYS * KEYS;
    }
    int last_key(const Piece& piece) const {
        const int last = spans[piece.span].start + piece.query + piece.queries - 1;
        return piece.parts > 1 ? std::min(last, (piece.part + 1) * PART_KEYS - 1) : last;
    }

    // Where the keys of the run that holds `key`, or the piece's last one, begin. Values are `to_values()` further on.
    const uint8_t* run_of(const Piece& piece, int key, int layer) const {
        const int run = std::min(key, last_key(piece)) / RUN * RUN, table = spans[piece.span].table;
        return pool->at(tables[table + run / pool->block_size], piece.kv_head, layer, 0, run % pool->block_size);
    }
    int64_t to_values() const { return pool->item_bytes() * pool->block_size * pool->head_dim; }

    float* slot(int64_t index, int member) { return parted.data() + index * slot_floats() + member * (pool->head_dim + 2); }
    const float* slot(int64_t index, int member) const { return const_cast<Attention*>(this)->slot(index, member); }

    // The sixteen keys at `k`, of which the first `known` are; `coming` are asked for meanwhile.
    struct Run {
        const uint8_t *k, *coming;
        int known, index;
    };

    // Keys transposed (dim, 32) and values (32, dim) of the known tokens of a run, the rest zero: a stale slot may hold
    // anything. In pairs: (dim / 2, 32) and (16, dim).
    template <int DIM, int TYPE, class Lane> void fetch(const Run& run, Lane* keys, Lane* values) const {
        if (run.known == RUN) columns<DIM, TYPE, true>(run, keys, values);
        else columns<DIM, TYPE, false>(run, keys, values);
    }

    template <int DIM, int TYPE, bool WHOLE> void columns(const Run& run, float* keys, float* values) const {
        const int dim = DIM ? DIM : pool->head_dim, known = WHOLE ? RUN : run.known;
        const int64_t row = dim * pool->item_bytes();
        const uint8_t* v = run.k + to_values();
        for (int i = 0; i < dim; i += 16) {
            f32x16 square[RUN];
#pragma GCC unroll 16
            for (int t = 0; t < RUN; t++) square[t] = t < known ? pool_load<TYPE>(run.k + t * row, i) : f32x16{};
            transpose16(square);
#pragma GCC unroll 16
            for (int j = 0; j < 16; j++) {
                ask(run.coming, RUN * dim * (TYPE == F32 ? 4 : 2), i + j, dim);
                store(keys + (i + j) * KEYS + run.index * RUN, square[j]);
            }
            for (int t = 0; t < RUN; t++) {
                store(values + (run.index * RUN + t) * dim + i, t < known ? pool_load<TYPE>(v + t * row, i) : f32x16{});
            }
        }
    }

    template <int DIM, int TYPE, bool WHOLE> void columns(const Run& run, uint32_t* keys, uint32_t* values) const {
        const int dim = DIM ? DIM : pool->head_dim, known = WHOLE ? RUN : run.known;
        const int64_t row = dim * 2;
        const uint8_t* v = run.k + to_values();
        for (int i = 0; i < dim; i += 32) {
            f32x16 pairs[RUN];
            const int here = DIM % 32 == 0 && DIM ? 32 : std::min(32, dim - i);
#pragma GCC unroll 16
            for (int t = 0; t < RUN; t++) {
                pairs[t] = f32x16{};
                if (t < known) memcpy(&pairs[t], run.k + t * row + 2 * i, 2 * here);
            }
            transpose16(pairs);
#pragma GCC unroll 16
            for (int j = 0; j < 16; j++) {
                if (j >= here / 2) break;
                ask(run.coming, RUN * dim * 2, i / 2 + j, dim / 2);
                store(keys + (i / 2 + j) * KEYS + run.index * RUN, pairs[j]);
            }
        }
        for (int t = 0; t < RUN; t += 2) {
            for (int i = 0; i < dim; i += 16) {
                u32x16 even = t < known ? wide16(v + t * row + 2 * i) : u32x16{};
                u32x16 odd = t + 1 < known ? wide16(v + (t + 1) * row + 2 * i) : u32x16{};
                store(values + (run.index * RUN + t) / 2 * dim + i, even | odd << 16);
            }
        }
    }

    // Scores as many of the `left` rows as registers can hold, and says how many.
    template <int DIM, class F> int several(const Tile<F>& tile, int left) const {
        if (left >= QUERIES_AT_ONCE) return score<DIM, QUERIES_AT_ONCE>(tile);
        if (left >= 4) return score<DIM, 4>(tile);
        if (left == 3) return score<DIM, 3>(tile);
        return left == 2 ? score<DIM, 2>(tile) : score<DIM, 1>(tile);
    }

    // One step of the running softmax.
    template <int DIM, int ROWS, class F> int score(const Tile<F>& tile) const {
        const int lanes = (DIM ? DIM : pool->head_dim) / F::PER_LANE;
        const int64_t values = to_values();
        f32x16 first[ROWS] = {}, second[ROWS] = {};
        const typename F::Lane* q = tile.q + tile.row * lanes;
        for (int i = 0; i < lanes; i++) {
            if (tile.row == 0) ask(tile.coming[0] + values, RUN * F::BYTES * lanes, i, lanes);
            for (int r = 0; r < ROWS; r++) {
                first[r] = F::add(first[r], tile.keys + i * KEYS, q[r * lanes + i]);
                second[r] = F::add(second[r], tile.keys + i * KEYS + RUN, q[r * lanes + i]);
            }
        }
        alignas(64) typename F::Lane weights[ROWS][KEYS / F::PER_LANE];
        float shrink[ROWS];
        for (int r = 0; r < ROWS; r++) {
            shrink[r] = soften(tile, tile.row + r, first[r], second[r]);
            F::put(weights[r], first[r]);
            F::put(weights[r] + RUN / F::PER_LANE, second[r]);
        }
        mix<DIM, std::min(ROWS, 4)>(tile, tile.row, weights, shrink);
        if constexpr (ROWS > 4) mix<DIM, ROWS - 4>(tile, tile.row + 4, weights + 4, shrink + 4);
        return ROWS;
    }

    // Blocks lie far apart, so the processor cannot guess the next one. A run's `bytes` are asked for in `parts`, all
    // along: many at once would wait for one another, and the work for them.
    static void ask(const uint8_t* run, int bytes, int part, int parts) {
        for (int line = part * (bytes / parts); line < (part + 1) * (bytes / parts); line += 64) {
            __builtin_prefetch(run + line);
        }
    }

    // Adds the weighted values to what the rows from `row` on have.
    template <int DIM, int ROWS, class F>
    void mix(const Tile<F>& tile, int row, const typename F::Lane (*weights)[KEYS / F::PER_LANE],
             const float* shrink) const {
        const int dim = DIM ? DIM : pool->head_dim;
        const int64_t values = to_values();
        const int bytes = RUN * dim * F::BYTES / F::PER_LANE;
        float* mixed = tile.part->mixed + row * dim;
        constexpr int WIDE = DIM ? 4 : 1;  // enough sums at once that none waits for itself
        for (int i = 0; i < dim; i += 16 * WIDE) {
            f32x16 sums[ROWS][WIDE];
            for (int r = 0; r < ROWS; r++) {
                for (int w = 0; w < WIDE; w++) sums[r][w] = load<f32x16>(mixed + r * dim + i + 16 * w) * shrink[r];
            }
            for (int t = 0; t < KEYS / F::PER_LANE; t++) {
                if (row == 0 && i == 0) ask(tile.coming[1] + values, bytes, t, KEYS / F::PER_LANE);
                for (int r = 0; r < ROWS; r++) {
                    for (int w = 0; w < WIDE; w++) {
                        sums[r][w] = F::add(sums[r][w], tile.values + t * dim + i + 16 * w, weights[r][t]);
                    }
                }
            }
            for (int r = 0; r < ROWS; r++) {
                for (int w = 0; w < WIDE; w++) store(mixed + r * dim + i + 16 * w, sums[r][w]);
            }
        }
    }

    // Makes weights of 32 scores; returns what earlier sums are worth under the new maximum.
    template <class F> float soften(const Tile<F>& tile, int row, f32x16& first, f32x16& second) const {
        const int position = tile.first + row / group(), oldest = tile.window > 0 ? position - tile.window + 1 : 0;
        if (tile.key < oldest || tile.key + KEYS > position + 1) {
            first = seen(first, tile.key, oldest, position);
            second = seen(second, tile.key + RUN, oldest, position);
        }
        float& most = tile.part->most[row];
        const float before = most, here = highest(first > second ? first : second);
        if (here > before) most = here;
        const float shrink = most == before ? 1.0f : exp16(splat(before - most))[0];
        first = weight(first, most);
        second = weight(second, most);
        tile.part->total[row] = fma16(tile.part->total[row], splat(shrink), first + second);
        return shrink;
    }

    static f32x16 seen(f32x16 scores, int key, int oldest, int position) {
        const i32x16 index = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        const i32x16 keys = index + key;
        return choose((keys <= position) & (keys >= oldest), scores, splat(-INFINITY));
    }

    // With nothing seen yet every weight is zero, but what is not a number must stay so.
    static f32x16 weight(f32x16 scores, float most) {
        if (most == -INFINITY) return choose(scores == -INFINITY, f32x16{}, scores);
        return exp16(scores - most);
    }

    void finish(const Piece& piece, const Part& part, int rows, int dim, float* mixed) {
        for (int r = 0; r < rows; r++) {
            const float* from = part.mixed + r * dim;
            const float sum = total(part.total[r]);
            if (piece.parts > 1) {
                float* to = slot(piece.slot, r);
                memcpy(to, from, sizeof(float) * dim);
                to[dim] = part.most[r];
                to[dim + 1] = sum;
                continue;
            }
            const int64_t token = spans[piece.span].first + piece.query + r / group();
            float* to = mixed + (token * heads + piece.kv_head * group() + r % group()) * dim;
            for (int i = 0; i < dim; i += 16) store(to + i, load<f32x16>(from + i) / sum);
        }
    }
};
