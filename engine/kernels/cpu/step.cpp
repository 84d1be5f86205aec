// One step of a decoder of the Llama family, for a flat batch of tokens of many sequences, on packed weights.
//
//   embed, then per layer  norm → q, k, v → rotate, write KV → attention → output → norm → gate, up → down, then logits
//
// Every arrow is a phase: its work is shared out over the team's threads, then they meet. The residual stream and all
// that lies between products is float32. Plain C entry points, called through ctypes; what they check is checked there.
#include <algorithm>
#include <chrono>
#include <memory>
#include <vector>

#include "attention.h"
#include "gemm.h"
#include "simd.h"
#include "team.h"

struct Layer {
    Weight q, k, v, output, gate, up, down;
    const float *input_norm, *post_norm, *q_norm, *k_norm;  // the last two may be null
    int64_t window;                                         // 0: none
};

struct Model {
    const Layer* layers;
    Weight embedding, head;
    const float* norm;
    int32_t num_layers, hidden, heads, kv_heads, head_dim, inner;
    float eps, scale;
};

struct Step {
    const int64_t* tokens;  // (num_tokens)
    const float *cos, *sin;  // (num_tokens, head_dim): x * cos + roll(x, head_dim / 2) * sin
    const Span* spans;
    const int32_t* tables;
    const int32_t* rows;  // which tokens' logits are wanted, in ascending order
    float* logits;        // (num_rows, vocab)
    double* seconds;      // time spent in: products, attention, everything else
    Pool pool;
    int32_t num_tokens, num_spans, num_rows, unused;
};

namespace {

enum Kind { PRODUCTS, ATTENTION, REST };
constexpr int TOKENS_AHEAD = 4;

struct Product {
    const Weight* weight;
    float* out;
    int64_t stride;
    Into into;
};

struct Runner {
    Model model;
    std::vector<Layer> layers;
    Team team;
    Attention attention, last_attention;
    std::vector<Span> tails;
    std::vector<float> x, qkv, mixed, inner;
    std::vector<Numbers> numbers;
    std::vector<uint16_t> halves;
    Activations prepared;

    Runner(const Model& given, int threads)
        : model(given), layers(given.layers, given.layers + given.num_layers), team(threads) {}

    int qkv_width() const { return (model.heads + 2 * model.kv_heads) * model.head_dim; }
    int heads_width() const { return model.heads * model.head_dim; }

    void reserve(int64_t tokens) {
        const int64_t widest = std::max({model.hidden, model.inner, heads_width()});
        if ((int64_t)x.size() >= tokens * model.hidden) return;
        x.resize(tokens * model.hidden);
        qkv.resize(tokens * qkv_width());
        mixed.resize(tokens * heads_width());
        inner.resize(tokens * 2 * model.inner);
        numbers.resize(tokens * widest / GROUP);
        halves.resize(tokens * widest);
        prepared = {numbers.data(), halves.data()};
    }

    void plan(const Step& step) {
        tails.clear();
        for (int s = 0, row = 0; s < step.num_spans; s++) {
            const Span& span = step.spans[s];
            const int end = span.first + span.queries;
            int first = row < step.num_rows ? step.rows[row] : end;
            // A single query is cut by keys, with a rounding of its own: what was none in its step must not become one.
            if (first == end - 1 && span.queries > 1) first--;
            if (first < end) tails.push_back({first, end - first, span.start + first - span.first, span.table});
            while (row < step.num_rows && step.rows[row] < end) row++;
        }
        plan(attention, step, step.spans, step.num_spans);
        plan(last_attention, step, tails.data(), tails.size());
    }

    void plan(Attention& a, const Step& step, const Span* spans, int count) const {
        a.pool = &step.pool;
        a.spans = spans;
        a.tables = step.tables;
        a.heads = model.heads;
        a.qkv_stride = qkv_width();
        a.scale = model.scale;
        a.plan(step.num_tokens, count, team.size());
    }
};

// Walks through the phases; every thread of the team runs the same one.
struct Walk {
    Runner& r;
    const Step& step;
    const Model& m;
    bool timing;
    std::chrono::steady_clock::time_point since;
    double spent[3] = {};

    Walk(Runner& runner, const Step& step, bool timing)
        : r(runner), step(step), m(runner.model), timing(timing), since(std::chrono::steady_clock::now()) {}

    void lap(Kind kind) {
        if (!timing) return;
        const auto now = std::chrono::steady_clock::now();
        spent[kind] += std::chrono::duration<double>(now - since).count();
        since = now;
    }

    template <class Body> void each(Kind kind, int count, const Body& body) {
        r.team.share(count, body);
        lap(kind);
    }

    // Neighbouring rows by the handful: fewer turns, and memory is written in runs.
    template <class Body> void each_row(int rows, const Body& body) {
        const int handful = std::max(1, rows / (r.team.size() * 16));
        each(REST, (rows + handful - 1) / handful, [&](int item) {
            const int end = std::min(rows, (item + 1) * handful);
            for (int row = item * handful; row < end; row++) body(row);
        });
    }

    void all() {
        each_row(step.num_tokens, [&](int t) { unpack_row(m.embedding, step.tokens[t], &r.x[(int64_t)t * m.hidden]); });
        for (int i = 0; i < m.num_layers; i++) {
            queries_keys_values(i);
            if (i < m.num_layers - 1) attend_and_mix(i, r.attention, step.num_tokens, [](int t) { return t; });
        }
        if (step.num_rows) last_of_wanted(m.num_layers - 1);
    }

    void queries_keys_values(int index) {
        const Layer& l = r.layers[index];
        const int64_t width = r.qkv_width();
        float *x = r.x.data(), *qkv = r.qkv.data(), *k = qkv + r.heads_width(), *v = k + m.kv_heads * m.head_dim;
        const Product heads[] = {{&l.q, qkv, width, Into::SET}, {&l.k, k, width, Into::SET}, {&l.v, v, width, Into::SET}};
        each_row(step.num_tokens, [&](int t) { norm(x + (int64_t)t * m.hidden, l.input_norm, t, heads); });
        products(heads, step.num_tokens);
        each_row(step.num_tokens, [&](int t) { rotate_and_write(l, index, t, qkv + t * width); });
    }

    // Nobody reads what the last layer makes of a token but its keys, its values and the logits, if they are wanted.
    void last_of_wanted(int index) {
        if (step.num_rows < step.num_tokens) {
            each(REST, 1, [&](int) {  // ascending, so that no row is lost
                for (int i = 0; i < step.num_rows; i++) {
                    const float* from = &r.x[(int64_t)step.rows[i] * m.hidden];
                    std::copy(from, from + m.hidden, &r.x[(int64_t)i * m.hidden]);
                }
            });
        }
        attend_and_mix(index, r.last_attention, step.num_rows, [&](int i) { return step.rows[i]; });
        const Product head[] = {{&m.head, step.logits, m.head.outputs, Into::SET}};
        each_row(step.num_rows, [&](int i) { norm(&r.x[(int64_t)i * m.hidden], m.norm, i, head); });
        products(head, step.num_rows);
    }

    // The rest of a layer for `rows` rows of the stream; row i is that of token `token(i)`.
    template <class Token> void attend_and_mix(int index, Attention& attention, int rows, const Token& token) {
        const Layer& l = r.layers[index];
        const int hidden = m.hidden;
        float *x = r.x.data(), *qkv = r.qkv.data(), *mixed = r.mixed.data(), *inner = r.inner.data();
        const Product output[] = {{&l.output, x, hidden, Into::ADD}};
        const Product wide[] = {{&l.gate, inner, 2 * m.inner, Into::SET}, {&l.up, inner + m.inner, 2 * m.inner, Into::SET}};
        const Product down[] = {{&l.down, x, hidden, Into::ADD}};

        each(ATTENTION, attention.items(), [&](int i) { attention.attend(i, index, (int)l.window, qkv, mixed); });
        each_row(rows, [&](int i) {
            float* row = mixed + (int64_t)token(i) * r.heads_width();
            attention.merge(token(i), row);
            ready(row, r.heads_width(), i, output);
        });
        products(output, rows);
        each_row(rows, [&](int i) { norm(x + (int64_t)i * hidden, l.post_norm, i, wide); });
        products(wide, rows);
        each_row(rows, [&](int i) {
            float* row = inner + (int64_t)i * 2 * m.inner;
            gate(row, m.inner);
            ready(row, m.inner, i, down);
        });
        products(down, rows);
    }

    template <int N> void ready(const float* row, int inputs, int at, const Product (&for_products)[N]) {
        bool integers = false, halves = false;
        for (const Product& p : for_products) (p.weight->format == BF16 ? halves : integers) = true;
        prepare(row, inputs, at, r.prepared, integers, halves);
    }

    template <int N> void norm(const float* row, const float* weight, int at, const Product (&for_products)[N]) {
        static thread_local std::vector<float> normed;
        normed.resize(m.hidden);
        rms_norm(row, weight, m.hidden, normed.data());
        ready(normed.data(), m.hidden, at, for_products);
    }

    void rms_norm(const float* row, const float* weight, int size, float* out) const {
        f32x16 squares = {};
        for (int i = 0; i < size; i += 16) squares = fma16(load<f32x16>(row + i), load<f32x16>(row + i), squares);
        const float factor = 1.0f / std::sqrt(total(squares) / size + m.eps);
        for (int i = 0; i < size; i += 16) store(out + i, load<f32x16>(row + i) * factor * load<f32x16>(weight + i));
    }

    // Shares out tiles by the handful and rows by the cacheful, so that the last ones to finish differ little.
    template <int N> void products(const Product (&list)[N], int rows) {
        int tiles = 0;
        for (const Product& p : list) tiles += tiles_of(p);
        const int handful = std::max(1, tiles / (r.team.size() * 16)) * 2;  // even: tiles are multiplied in pairs
        const int cached = cached_rows(*list[0].weight), blocks = (rows + cached - 1) / cached;
        each(PRODUCTS, (tiles + handful - 1) / handful * blocks, [&](int item) {
            const int first = item % blocks * cached, last = std::min(rows, first + cached);
            int tile = item / blocks * handful, left = std::min(handful, tiles - tile);
            for (const Product* p = list; left > 0; p++) {
                const int here = std::min(left, tiles_of(*p) - tile);
                if (here > 0) {
                    const int then = tile + handful * r.team.size();  // where this thread goes on if they take turns
                    const bool known = blocks == 1 && then + 2 <= tiles_of(*p);
                    const uint8_t* later = known ? p->weight->data + then * tile_bytes(*p->weight) : nullptr;
                    tile_products(*p->weight, tile, here, r.prepared, first, last, p->out, p->stride, p->into, later);
                    left -= here;
                }
                tile = std::max(0, tile - tiles_of(*p));
            }
        });
    }

    static int tiles_of(const Product& p) { return (p.weight->outputs + TILE - 1) / TILE; }

    void rotate_and_write(const Layer& l, int index, int token, float* row) {
        const int dim = m.head_dim;
        ask_for_kept(token + TOKENS_AHEAD, index);
        for (int head = 0; head < m.heads + m.kv_heads; head++) {
            const float* weight = head < m.heads ? l.q_norm : l.k_norm;
            if (weight) rms_norm(row + head * dim, weight, dim, row + head * dim);
            rotate(row + head * dim, step.cos + (int64_t)token * dim, step.sin + (int64_t)token * dim);
        }
        for (int head = 0; head < m.kv_heads; head++) {
            for (int value = 0; value < 2; value++) {
                const float* from = row + (m.heads + value * m.kv_heads + head) * dim;
                uint8_t* to = kept(token, head, index, value);
                for (int i = 0; i < dim; i += 16) pool_store(step.pool, to, i, load<f32x16>(from + i));
            }
        }
    }

    // Where a token's key (0) or value (1) lies in the pool.
    uint8_t* kept(int token, int head, int layer, int value) const {
        const Span& span = span_of(token);
        const int position = span.start + token - span.first, size = step.pool.block_size;
        return step.pool.at(step.tables[span.table + position / size], head, layer, value, position % size);
    }

    // No cache holds a fresh block. Asked for some tokens ahead, its lines are there when they are written.
    void ask_for_kept(int token, int layer) const {
        const int64_t bytes = m.head_dim * step.pool.item_bytes();
        for (int head = 0; token < step.num_tokens && head < m.kv_heads; head++) {
            for (int64_t line = 0; line < bytes; line += 64) {
                __builtin_prefetch(kept(token, head, layer, 0) + line, 1);
                __builtin_prefetch(kept(token, head, layer, 1) + line, 1);
            }
        }
    }

    void rotate(float* x, const float* cos, const float* sin) const {
        const int half = m.head_dim / 2;
        for (int i = 0; i < half; i++) {
            const float a = x[i], b = x[i + half];
            x[i] = a * cos[i] + b * sin[i];
            x[i + half] = b * cos[i + half] + a * sin[i + half];
        }
    }

    const Span& span_of(int token) const {
        const Span* after = std::upper_bound(step.spans, step.spans + step.num_spans, token,
                                             [](int t, const Span& span) { return t < span.first; });
        return after[-1];
    }

    // silu(gate) * up, over the gate.
    static void gate(float* row, int size) {
        for (int i = 0; i < size; i += 16) {
            f32x16 g = load<f32x16>(row + i);
            f32x16 e = exp16((f32x16)((u32x16)g | 0x80000000u));  // e^-|g|
            f32x16 sigmoid = choose(g < 0.0f, e, splat(1.0f)) / (e + 1.0f);
            store(row + i, g * sigmoid * load<f32x16>(row + size + i));
        }
    }
};

}  // namespace

extern "C" {

void* cpu_step_open(const Model* model, int32_t threads) { return new Runner(*model, threads); }

void cpu_step_close(void* runner) { delete static_cast<Runner*>(runner); }

void cpu_step_run(void* handle, const Step* step) {
    Runner& runner = *static_cast<Runner*>(handle);
    runner.reserve(std::max(step->num_tokens, step->num_rows));
    runner.plan(*step);
    std::atomic<bool> first{true};
    runner.team.run([&] {
        Walk walk(runner, *step, first.exchange(false));
        walk.all();
        if (walk.timing) std::copy(walk.spent, walk.spent + 3, step->seconds);
    });
}
}
