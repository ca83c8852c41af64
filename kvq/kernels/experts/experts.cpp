// Mixtures of experts: every row's weighted sum of the results of the experts that it chose.
//
// Rows are sorted by expert, so that an expert's weight is read once for all of its rows, and products of all
// experts share one team of threads. An expert's result for a row doesn't depend on its other rows, and a row's
// results are added up in the order in which it chose the experts.

#include "../linear/gates.h"
#include "../linear/groups.h"

namespace {

constexpr int64_t TOGETHER = 576;  // rows: every expert has some of them
constexpr int64_t SCRATCH = 48 << 20;  // bytes of rows between products at a time

struct Call {
    const KvqExperts& e;
    const int64_t* chosen;
    const float* weights;
    int top, code, threads;
    int64_t hidden, inner, row, inner_row;  // numbers and bytes

    int64_t bytes() const { return top * (2 * row + inner_row + (int64_t)sizeof(int64_t)); }  // of a row's scratch memory
};

// Scratch memory for some rows and, in the order of experts, for the pairs of a row and an expert that it chose.
struct Pairs {
    KvqGroup* groups;   // of experts that were chosen
    int32_t* expert;    // [groups]
    int64_t* place;     // [rows, top]: index of a pair in the three buffers that follow
    uint8_t* x;         // [pairs, hidden]
    uint8_t* between;   // [pairs, 2 inner]
    uint8_t* out;       // [pairs, hidden]
    int64_t* begin;     // [experts + 1]
    int64_t* taken;     // [experts]
};

inline Pairs take_pairs(const Call& call, int64_t rows, Memory& memory) {
    int64_t pairs = rows * call.top, experts = call.e.experts;
    return {memory.take<KvqGroup>(experts),  memory.take<int32_t>(experts),
            memory.take<int64_t>(pairs),     memory.take<uint8_t>(pairs * call.row),
            memory.take<uint8_t>(pairs * call.inner_row), memory.take<uint8_t>(pairs * call.row),
            memory.take<int64_t>(experts + 1), memory.take<int64_t>(experts)};
}

// Sort the pairs of `rows` rows from `first` on by expert; return the number of experts.
inline int sort_pairs(const Call& call, const Pairs& p, int64_t first, int64_t rows) {
    const int64_t* chosen = call.chosen + first * call.top;
    memset(p.begin, 0, (size_t)(call.e.experts + 1) * sizeof(int64_t));
    for (int64_t i = 0; i < rows * call.top; i++) p.begin[chosen[i] + 1]++;
    int groups = 0;
    for (int32_t i = 0; i < call.e.experts; i++) {
        if (p.begin[i + 1]) p.groups[groups] = {nullptr, p.begin[i + 1]}, p.expert[groups++] = i;
        p.begin[i + 1] += p.begin[i];
        p.taken[i] = p.begin[i];
    }
    for (int64_t i = 0; i < rows * call.top; i++) p.place[i] = p.taken[chosen[i]]++;
    return groups;
}

inline int multiply(const Call& call, const Pairs& p, int groups, const KvqLinear* linears, const uint8_t* x,
                    int64_t x_row, uint8_t* out, int64_t out_row) {
    for (int i = 0; i < groups; i++) p.groups[i].linear = linears + p.expert[i];
    return KVQ_CALL(linear_groups)(p.groups, groups, x, x_row, out, out_row, call.code, call.threads);
}

inline vf cut(vf x, float limit) { return x > limit ? all(limit) : x; }  // NaN stays NaN

// Apply a piece of an expert's gates to the gated values; results replace the gates.
inline void gate_piece(const Call& call, uint8_t* row, const float* bias, int64_t first, int n) {
    const KvqExperts& e = call.e;
    float gates[PIECE], rest[PIECE], add[PIECE];
    uint8_t* at = row + first * bytes_of(call.code);
    read_padded(gates, at, n, call.code);
    read_padded(rest, at + call.inner * bytes_of(call.code), n, call.code);
    for (int half = 0; bias && half < 2; half++) {
        float* to = half ? rest : gates;
        read_padded(add, (const uint8_t*)(bias + first + half * call.inner), n, KVQ_FP32);
        for (int i = 0; i < n; i += W) store(to + i, load(to + i) + load(add + i));
    }
    for (int i = 0; i < n; i += W) {
        vf gate = cut(load(gates + i), e.limit), up = cut(load(rest + i), e.limit);
        up = up < -e.limit ? all(-e.limit) : up;
        store(gates + i, activated(gate, e.activation, e.slope) * (up + e.shift));
    }
    write_floats(at, gates, n, call.code);
}

inline void gate(const Call& call, const Pairs& p, int groups, int64_t pairs) {
    int64_t pieces = (call.inner + PIECE - 1) / PIECE;
    int threads = pairs * call.inner < WORTH_THREADS ? 1 : call.threads;
    run_even(threads, pairs * pieces, [&](int64_t i) {
        int64_t pair = i / pieces, first = i % pieces * PIECE, left = call.inner - first;
        int group = groups - 1;
        while (p.begin[p.expert[group]] > pair) group--;
        const float* bias = call.e.gate_up_bias;
        if (bias) bias += 2 * call.inner * p.expert[group];
        gate_piece(call, p.between + pair * call.inner_row, bias, first, (int)(left < PIECE ? left : PIECE));
    });
}

// Sum the results of a row's experts, each times its weight, from the first that it chose to the last.
// D170: each row's experts in its own order
inline void add_up(const Call& call, const Pairs& p, int64_t row, int64_t first_row, uint8_t* out) {
    float sum[PIECE], given[PIECE], add[PIECE];
    for (int64_t first = 0; first < call.hidden; first += PIECE) {
        int64_t left = call.hidden - first;
        int n = (int)(left < PIECE ? left : PIECE);
        memset(sum, 0, sizeof sum);
        for (int t = 0; t < call.top; t++) {
            int64_t pair = row * call.top + t, own = (first_row + row) * call.top + t;
            const float* bias = call.e.down_bias;
            read_padded(given, p.out + p.place[pair] * call.row + first * bytes_of(call.code), n, call.code);
            if (bias) {
                read_padded(add, (const uint8_t*)(bias + call.hidden * call.chosen[own] + first), n, KVQ_FP32);
                for (int i = 0; i < n; i += W) store(given + i, load(given + i) + load(add + i));
            }
            for (int i = 0; i < n; i += W) store(sum + i, load(sum + i) + load(given + i) * call.weights[own]);
        }
        write_floats(out + first * bytes_of(call.code), sum, n, call.code);
    }
}

}  // namespace

// `x` and `out` [rows, hidden] of `code`, strides in bytes; `chosen` and `weights` [rows, top].
KVQ_KERNEL(experts)(const KvqExperts* experts, const uint8_t* x, int64_t x_row, const int64_t* chosen,
                    const float* weights, int top, uint8_t* out, int64_t out_row, int code, int64_t rows,
                    int threads) {
    for (int64_t i = 0; i < rows * top; i++)
        if (chosen[i] < 0 || chosen[i] >= experts->experts) return KVQ_BAD_EXPERT;
    int64_t hidden = experts->down->out_features, inner = experts->down->in_features, size = bytes_of(code);
    Call call = {*experts, chosen, weights, top, code, threads, hidden, inner, hidden * size, 2 * inner * size};
    int64_t most = SCRATCH / (call.bytes() + 1);
    most = most < 1 ? 1 : most < TOGETHER ? most : TOGETHER;
    if (rows < most) most = rows;
    Memory memory = {};
    take_pairs(call, most, memory);
    Kept* kept = take_memory(memory.used);
    if (!kept) return KVQ_NO_MEMORY;
    memory = {(uint8_t*)kept + 64, 0};
    Pairs p = take_pairs(call, most, memory);
    int status = KVQ_OK;
    for (int64_t first = 0; first < rows && !status; first += most) {
        int64_t n = rows - first < most ? rows - first : most;
        int groups = sort_pairs(call, p, first, n);
        for (int64_t i = 0; i < n * top; i++)
            memcpy(p.x + p.place[i] * call.row, x + (first + i / top) * x_row, (size_t)call.row);
        status = multiply(call, p, groups, experts->gate_up, p.x, call.row, p.between, call.inner_row);
        if (status) break;
        gate(call, p, groups, n * top);
        status = multiply(call, p, groups, experts->down, p.between, call.inner_row, p.out, call.row);
        if (status) break;
        int own = n * top * hidden < WORTH_THREADS ? 1 : threads;
        run_even(own, n, [&](int64_t i) { add_up(call, p, i, first, out + (first + i) * out_row); });
    }
    give_back(kept);
    return status;
}
