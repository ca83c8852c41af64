// Low-rank updates of a product's rows, each by its own adapter: see reference.py. Every number is summed in one
// order, whatever the other rows are.

#include "../linear/around.h"
#include "../linear/lanes.h"

namespace {

constexpr int TILE = W == 16 ? 4 : 2;  // rows of one adapter that share what is read of its factors
constexpr int RANKS = 4;               // rows of A multiplied at a time
constexpr int PANELS = 4;              // of B, at a time
constexpr int64_t FEW_RANKS = 16, FEW_PANELS = 16;  // of a task
constexpr int64_t WORTH_SHARING = 1 << 17;          // products

// A tile's share of the work on one weight's factors: rows [begin, end) of A, or panels of B.
struct Part {
    const KvqFactors* factors;
    int64_t row, begin, end;
    int rows;
    float* h;             // [rows, h_row]
    const uint8_t* next;  // what the part after it reads: fetched while the last of its own is multiplied
};

struct Tiles {
    float *x, *h;  // [rows, k], [rows, h_row]
    int64_t k, h_row;
    Part *shrunk, *expanded;
    int64_t num_shrunk, num_expanded, products;
};

// Sixteen numbers from number `i` on.
inline Floats numbers_at(const uint8_t* p, int64_t i, int code) { return load_floats(p + i * bytes_of(code), code); }

template <int ROWS>
void shrink(const Part& part, const Tiles& t) {
    const KvqFactors& f = *part.factors;
    const float* x = t.x + part.row * t.k;
    for (int64_t first = part.begin; first < part.end; first += RANKS) {
        bool is_last = first + RANKS >= part.end;
        const uint8_t* soon = is_last ? part.next : f.a + (first + RANKS) * t.k * bytes_of(f.code);
        vf sums[RANKS][ROWS] = {};
        for (int64_t i = 0; i < t.k; i += OUTPUTS)
            for (int a = 0; a < RANKS; a++) {
                __builtin_prefetch(soon + (a * t.k + i) * bytes_of(f.code));
                Floats own = numbers_at(f.a, (first + a) * t.k + i, f.code);
                for (int r = 0; r < ROWS; r++)
                    for (int p = 0; p < PARTS; p++)
                        sums[a][r] = multiply_add(own.part[p], load(x + r * t.k + i + p * W), sums[a][r]);
            }
        for (int a = 0; a < RANKS; a++)
            for (int r = 0; r < ROWS; r++) part.h[r * t.h_row + first + a] = sum(sums[a][r]) * f.scale;
    }
}

// out += x, `n` elements; x is fp32, in whole registers.
inline void add_floats(uint8_t* out, const float* x, int n, int code) {
    float room[PANELS * OUTPUTS];
    const float* own = floats_at(room, out, n, code);
    float* sums = results_at(room, out, n, code);
    for (int i = 0; i < n; i += W) store(sums + i, load(own + i) + load(x + i));
    settle(out, sums, n, code);
}

template <int ROWS, int COUNT>
void expand_panels(const Part& part, const Tiles& t, int64_t panel, uint8_t* out, int64_t out_row, int code) {
    const KvqFactors& f = *part.factors;
    Floats sums[ROWS][COUNT] = {};
    int64_t bytes = f.rank * OUTPUTS * bytes_of(f.code);
    const uint8_t *b = f.b + panel * bytes, *soon = panel + COUNT < part.end ? b + COUNT * bytes : part.next;
    for (int i = 0; i < f.rank; i++) {
        vf h[ROWS];
        for (int r = 0; r < ROWS; r++) h[r] = all(part.h[r * t.h_row + i]);
        for (int j = 0; j < COUNT; j++) {
            int64_t at = j * bytes + i * OUTPUTS * bytes_of(f.code);
            __builtin_prefetch(soon + at);
            Floats own = load_floats(b + at, f.code);
            for (int r = 0; r < ROWS; r++)
                for (int p = 0; p < PARTS; p++) sums[r][j].part[p] = multiply_add(own.part[p], h[r], sums[r][j].part[p]);
        }
    }
    int64_t first = panel * OUTPUTS, left = f.out_features - first;
    int n = (int)(left < COUNT * OUTPUTS ? left : COUNT * OUTPUTS);
    for (int r = 0; r < ROWS; r++)
        add_floats(out + (part.row + r) * out_row + (f.first + first) * bytes_of(code), (const float*)sums[r], n, code);
}

template <int ROWS>
void expand(const Part& part, const Tiles& t, uint8_t* out, int64_t out_row, int code) {
    int64_t panel = part.begin;
    for (; panel + PANELS <= part.end; panel += PANELS) expand_panels<ROWS, PANELS>(part, t, panel, out, out_row, code);
    for (; panel < part.end; panel++) expand_panels<ROWS, 1>(part, t, panel, out, out_row, code);
}

template <int ROWS>
struct Rows {
    static constexpr int count = ROWS;
};

// Call run with the number of rows as a constant.
template <int ROWS = TILE, class Run>
inline void with_rows(int rows, const Run& run) {
    if constexpr (ROWS > 1)
        if (rows < ROWS) return with_rows<ROWS - 1>(rows, run);
    run(Rows<ROWS>{});
}

// Split `count` into parts of at most `most` and add those to `parts`, if there is memory for them; return their number.
inline int64_t split(Part* parts, Part whole, int64_t count, int64_t most) {
    int64_t found = 0;
    for (int64_t begin = 0; begin < count; begin += most, found++) {
        if (!parts) continue;
        parts[found] = whole;
        parts[found].begin = begin;
        parts[found].end = begin + most < count ? begin + most : count;
    }
    return found;
}

// Divide the rows that have factors into tiles, and these into parts; without memory, only count.
inline void divide(Tiles& t, const KvqChosen* chosen, int64_t rows) {
    t.num_shrunk = t.num_expanded = t.products = 0;
    for (int64_t row = 0, n; row < rows; row += n) {
        const KvqFactors* own = chosen[row].factors;
        for (n = 1; own && n < TILE && row + n < rows && chosen[row + n].factors == own;) n++;
        int64_t ranks = 0;
        for (const KvqFactors* f = own; f; ranks += f->rank, f = f->next) {
            Part part = {f, row, 0, 0, (int)n, t.h ? t.h + row * t.h_row + ranks : nullptr, nullptr};
            int64_t panels = (f->out_features + OUTPUTS - 1) / OUTPUTS;
            t.num_shrunk += split(t.shrunk ? t.shrunk + t.num_shrunk : nullptr, part, f->rank, FEW_RANKS);
            t.num_expanded += split(t.expanded ? t.expanded + t.num_expanded : nullptr, part, panels, FEW_PANELS);
            t.products += n * f->rank * (f->in_features + f->out_features);
        }
        if (ranks > t.h_row) t.h_row = ranks;
    }
}

// Address of what a part reads first.
inline const uint8_t* begin_of(const Part& part, int64_t k, bool expands) {
    const KvqFactors& f = *part.factors;
    return (expands ? f.b + part.begin * f.rank * OUTPUTS * bytes_of(f.code) : f.a + part.begin * k * bytes_of(f.code));
}

inline void chain_up(const Tiles& t) {
    for (int64_t i = 0; i < t.num_shrunk; i++)
        t.shrunk[i].next = i + 1 < t.num_shrunk ? begin_of(t.shrunk[i + 1], t.k, false) : begin_of(t.expanded[0], t.k, true);
    for (int64_t i = 0; i < t.num_expanded; i++)
        t.expanded[i].next = begin_of(t.expanded[i + 1 < t.num_expanded ? i + 1 : i], t.k, true);
}

int update(const KvqChosen* chosen, const KvqAround& around, const uint8_t* x, int64_t x_row, uint8_t* out,
           int64_t out_row, int code, int64_t rows, int threads) {
    Tiles t = {};
    divide(t, chosen, rows);
    if (!t.num_shrunk) return KVQ_OK;
    int64_t inputs = 0;
    for (int64_t row = 0; row < rows; row++)
        if (chosen[row].factors) inputs = chosen[row].factors->in_features;
    t.k = padded((int)inputs);
    Memory sizes = {};
    auto take = [&](Memory& memory) {
        t.x = memory.take<float>(rows * t.k);
        t.h = memory.take<float>(rows * t.h_row);
        t.shrunk = memory.take<Part>(t.num_shrunk);
        t.expanded = memory.take<Part>(t.num_expanded);
        return memory.take<uint8_t>(makes_rows(around) && code != KVQ_FP32 ? rows * inputs * bytes_of(code) : 0);
    };
    take(sizes);
    Kept* kept = take_memory(sizes.used);
    if (!kept) return KVQ_NO_MEMORY;
    Memory memory = {(uint8_t*)kept + 64, 0};
    uint8_t* made = take(memory);
    divide(t, chosen, rows);
    chain_up(t);
    if (t.products < WORTH_SHARING) threads = 1;
    run_even(threads, rows, [&](int64_t row) {
        if (!chosen[row].factors) return;
        int64_t stride = x_row;
        float* to = t.x + row * t.k;
        uint8_t* room = code == KVQ_FP32 ? (uint8_t*)to : made + row * inputs * bytes_of(code);
        const uint8_t* from = inputs_of(around, room, x + row * x_row, stride, inputs, code, 1);
        if (from != (uint8_t*)to) read_floats(to, from, (int)inputs, code);
        memset(to + inputs, 0, (size_t)(t.k - inputs) * sizeof(float));
    });
    run_tasks(threads, t.num_shrunk, 1, [&](int, int64_t i) {
        with_rows(t.shrunk[i].rows, [&](auto n) { shrink<n.count>(t.shrunk[i], t); });
    });
    run_tasks(threads, t.num_expanded, 1, [&](int, int64_t i) {
        with_rows(t.expanded[i].rows, [&](auto n) { expand<n.count>(t.expanded[i], t, out, out_row, code); });
    });
    give_back(kept);
    return KVQ_OK;
}

}  // namespace

// Add to each row of `out` the update by its factors of its inputs: `x`, normalized or gated as `around` says. Both are
// of `code`; strides are bytes. All factors are for the same inputs.
KVQ_KERNEL(adapters)(const KvqChosen* chosen, const KvqAround* around, const uint8_t* x, int64_t x_row, uint8_t* out,
                     int64_t out_row, int code, int64_t rows, int threads) {
    return in_turn(rows, [&](int64_t first, int64_t n) {
        return update(chosen + first, *around, x + first * x_row, x_row, out + first * out_row, out_row, code, n, threads);
    });
}
