// One variant of the kernels without Python, for CPUs that are only emulated: `make arm`.
//
// Writes random rows in every format, reads them back, attends to them and compares with fp64 over what
// was read; the same for Linear layers over random codes. Prints a line per format with a hash of codes and
// scales, or of outputs, which must be the same on every CPU.

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "../../../kvq/kernels/native/abi.h"

namespace {

constexpr int HEADS = 2, GROUP = 3, BLOCK = 5, CONTEXT = 133, NEW = 7, THREADS = 2;

uint32_t state = 1;

float draw() {  // between -2 and 2, an outlier now and then
    state = state * 1664525u + 1013904223u;
    float x = (float)(state >> 8) / (float)(1 << 22) - 2.0f;
    return (state & 255) == 0 ? 16 * x : x;
}

uint64_t hashed(const std::vector<uint8_t>& bytes, uint64_t hash) {  // FNV-1a
    for (uint8_t byte : bytes) hash = (hash ^ byte) * 1099511628211ull;
    return hash;
}

struct Format {
    const char* name;
    int code, group, rotated, is_static, bits = 4;  // bits: of grouped codes
    int narrow = 0;
};

struct Part {
    std::vector<uint8_t> codes, scales;
    std::vector<float> fixed;
    KvqRows rows;

    Part(const Format& f, int dim, int blocks) : fixed(HEADS, 0.05f) {
        int bytes = f.code == KVQ_FP32 ? 4 * dim : f.code <= KVQ_FP16 ? 2 * dim : f.group ? dim * f.bits / 8 : dim;
        int numbers = f.is_static || f.code <= KVQ_FP16 ? 0 : f.group ? 2 * dim / f.group : 1;
        codes.assign((size_t)blocks * HEADS * BLOCK * bytes, 0xff);
        int size = f.narrow ? numbers : numbers * 2;  // of a row's scales in bytes
        scales.assign((size_t)blocks * HEADS * BLOCK * size, 0xff);
        rows = {codes.data(), (int64_t)HEADS * BLOCK * bytes, (int64_t)BLOCK * bytes, bytes,
                numbers ? scales.data() : nullptr, (int64_t)HEADS * BLOCK * size, (int64_t)BLOCK * size,
                size, f.is_static ? fixed.data() : nullptr, f.code, f.bits, dim, f.group, f.rotated,
                f.code == KVQ_GROUPED ? 0.125f : 0.0f, f.narrow, 0, nullptr};
    }
};

// Largest difference to fp64 over K and V [HEADS, CONTEXT, dim], relative to the largest output.
double error_of(const std::vector<float>& q, const std::vector<float>& k, const std::vector<float>& v,
                const std::vector<float>& out, int dim, int window) {
    double worst = 0, largest = 0;
    for (int t = 0; t < NEW; t++)
        for (int h = 0; h < HEADS * GROUP; h++) {
            int own = CONTEXT - NEW + t, first = window && own - window + 1 > 0 ? own - window + 1 : 0;
            const float* row = &q[((size_t)t * HEADS * GROUP + h) * dim];
            std::vector<double> sum(dim, 0.0), weights;
            double top = -1e300, total = 0;
            for (int i = first; i <= own; i++) {
                double score = 0;
                for (int d = 0; d < dim; d++) score += (double)row[d] * k[((size_t)(h / GROUP) * CONTEXT + i) * dim + d];
                weights.push_back(score / std::sqrt((double)dim));
                top = weights.back() > top ? weights.back() : top;
            }
            for (int i = first; i <= own; i++) {
                double weight = std::exp(weights[i - first] - top);
                total += weight;
                for (int d = 0; d < dim; d++) sum[d] += weight * v[((size_t)(h / GROUP) * CONTEXT + i) * dim + d];
            }
            for (int d = 0; d < dim; d++) {
                double want = sum[d] / total, got = out[((size_t)t * HEADS * GROUP + h) * dim + d];
                worst = std::fmax(worst, std::fabs(got - want));
                largest = std::fmax(largest, std::fabs(want));
                if (std::isnan(got)) return 1;
            }
        }
    return worst / largest;
}

bool check(const Format& f, int dim) {
    int blocks = (CONTEXT + BLOCK - 1) / BLOCK + 2;
    Part k(f, dim, blocks), v(f, dim, blocks);
    KvqLayer layer = {k.rows, v.rows, blocks, HEADS, BLOCK};
    std::vector<int32_t> table;
    for (int i = 0; i < blocks - 2; i++) table.push_back((i * 11 + 3) % (blocks - 1));
    std::vector<int64_t> slots;
    for (int i = 0; i < CONTEXT; i++) slots.push_back((int64_t)table[i / BLOCK] * BLOCK + i % BLOCK);
    std::vector<float> x((size_t)CONTEXT * HEADS * dim), y(x.size());
    for (float& value : x) value = draw();
    for (float& value : y) value = draw();
    KvqDense from = {(uint8_t*)x.data(), (int64_t)HEADS * dim * 4, (int64_t)dim * 4, KVQ_FP32}, other = from;
    other.data = (uint8_t*)y.data();
    std::vector<uint8_t> bad(CONTEXT);
    if (KVQ_CALL(write_kv)(&layer, &from, &other, slots.data(), CONTEXT, bad.data(), THREADS)) return false;
    uint64_t hash = hashed(v.scales, hashed(v.codes, hashed(k.scales, hashed(k.codes, 14695981039346656037ull))));

    std::vector<float> keys((size_t)HEADS * CONTEXT * dim), values(keys.size());
    KvqPositions all = {table.data(), (int64_t)table.size(), (int32_t)table.size(), 1, 0, CONTEXT, BLOCK};
    KvqGathered to = {(uint8_t*)keys.data(), 0, (int64_t)CONTEXT * dim * 4, (int64_t)dim * 4, KVQ_FP32}, too = to;
    too.data = (uint8_t*)values.data();
    if (KVQ_CALL(gather_dense)(&layer, &all, &to, &too, 1, THREADS)) return false;

    std::vector<float> q((size_t)NEW * HEADS * GROUP * dim), out(q.size()), lse(NEW * HEADS * GROUP);
    for (float& value : q) value = draw();
    int64_t row = (int64_t)dim * 4;
    KvqDense queries = {(uint8_t*)q.data(), HEADS * GROUP * row, row, KVQ_FP32}, results = queries;
    results.data = (uint8_t*)out.data();
    int32_t fresh = NEW, context = CONTEXT;
    KvqBatch batch = {&fresh, &context, table.data(), (int64_t)table.size(), (int32_t)table.size(), 1};
    double worst = 0;
    for (int window : {0, 9, 70}) {
        KvqAttention options = {1 / std::sqrt((float)dim), 0, window, 0, HEADS * GROUP, nullptr, THREADS, 1};
        if (KVQ_CALL(attend)(&layer, &queries, &results, lse.data(), &batch, &options)) return false;
        worst = std::fmax(worst, error_of(q, keys, values, out, dim, window));
    }
    std::printf("%-14s dim %3d  %016llx  %s\n", f.name, dim, (unsigned long long)hash, worst < 2e-5 ? "ok" : "WRONG");
    return worst < 2e-5;
}

// Blocks of fp32 become codes of 3 bits, their means taken out.
bool check_seal() {
    constexpr int DIM = 64, BLOCKS = 4;
    Part from({"fp32", KVQ_FP32, 0, 0, 0}, DIM, BLOCKS), into({"int3", KVQ_GROUPED, 32, 1, 0, 3, 1}, DIM, BLOCKS);
    Format format = {"means", KVQ_INT4, 64, 0, 0, 4, 1};
    Part means(format, DIM, BLOCKS);  // as if blocks had more rows than the one that is used
    into.rows.means = &means.rows;
    for (size_t i = 0; i < from.codes.size() / 4; i++) ((float*)from.codes.data())[i] = 3 + draw();
    KvqLayer recent = {from.rows, from.rows, BLOCKS, HEADS, BLOCK}, sealed = {into.rows, into.rows, BLOCKS, HEADS, BLOCK};
    int64_t moves[] = {3, 1, 0, 0, 2, 0}, wrong[] = {0, 1, 0, BLOCKS, 2, 0};
    if (KVQ_CALL(seal)(&recent, &sealed, nullptr, wrong, 2, THREADS) != KVQ_BAD_BLOCK) return false;
    if (KVQ_CALL(seal)(&recent, &sealed, nullptr, moves, 2, THREADS)) return false;
    std::vector<float> keys((size_t)HEADS * BLOCK * DIM), values(keys.size());
    int32_t table = 1;
    KvqPositions all = {&table, 1, 1, 1, 0, BLOCK, BLOCK};
    KvqGathered to = {(uint8_t*)keys.data(), 0, (int64_t)BLOCK * DIM * 4, (int64_t)DIM * 4, KVQ_FP32}, too = to;
    too.data = (uint8_t*)values.data();
    if (KVQ_CALL(gather_dense)(&sealed, &all, &to, &too, 1, THREADS)) return false;
    const float* x = (const float*)from.codes.data() + (size_t)3 * HEADS * BLOCK * DIM;
    double error = 0;
    for (size_t i = 0; i < keys.size(); i++) error += std::fabs(keys[i] - x[i]) / (double)keys.size();
    uint64_t hash = hashed(means.codes, hashed(into.scales, hashed(into.codes, 14695981039346656037ull)));
    std::printf("%-14s dim %3d  %016llx  %s\n", "int3_mean", DIM, (unsigned long long)hash, error < 0.5 ? "ok" : "WRONG");
    return error < 0.5;
}

bool check_copies() {
    std::vector<uint8_t> bytes = {0, 1, 2, 3, 4, 5, 6, 7};
    KvqRun run = {bytes.data(), 2, 2, 4};
    int64_t pairs[] = {0, 1, 1, 3}, wrong[] = {0, 4};
    bool refused = KVQ_CALL(copy_blocks)(&run, 1, wrong, 1, THREADS) == KVQ_BAD_BLOCK;
    return refused && !KVQ_CALL(copy_blocks)(&run, 1, pairs, 2, THREADS) &&
           bytes == std::vector<uint8_t>({0, 1, 0, 1, 4, 5, 0, 1});
}

bool check_merge() {
    float outs[] = {1, 3}, lses[] = {0, 0}, out = 0, lse = 0;
    return !KVQ_CALL(merge_partials)(outs, lses, nullptr, (uint8_t*)&out, &lse, KVQ_FP32, 2, 1, 1, 1, THREADS) && std::fabs(out - 2) < 1e-6f &&
           std::fabs(lse - std::log(2.0f)) < 1e-6f;
}

double fp8_value(uint8_t code) {
    int exponent = code >> 3 & 15, mantissa = code & 7;
    double x = exponent ? std::ldexp(8 + mantissa, exponent - 10) : std::ldexp(mantissa, -9);
    return code & 128 ? -x : x;
}

// The weight of an output and an input in panels of random bytes, see lanes.h for their order.
double weight_of(const KvqLinear& l, int out, int in) {
    const uint8_t* panel = l.codes + (size_t)(out / 16) * l.k * 16 / (l.code == KVQ_INT4 ? 2 : 1);
    int o = out % 16, quad = in / 4, i = in % 4;
    if (l.code == KVQ_FP8) return fp8_value(panel[64 * quad + 2 * (16 * (i & 1) + o) + (i >> 1)]);
    if (l.code == KVQ_INT8) return panel[64 * quad + 4 * o + i] - 128;
    uint8_t both = panel[64 * (quad / 2) + 4 * o + i];
    return (quad % 2 ? both >> 4 : both & 15) - 8;
}

bool check_linear(const char* name, int code, int inputs, int groups) {
    constexpr int IN = 72, OUT = 21, ROWS = 5, PANELS = 2;
    std::vector<uint8_t> codes((size_t)PANELS * IN * 16);
    for (uint8_t& byte : codes) byte = (uint8_t)(draw() * 31) & (code == KVQ_FP8 ? 0xf7 : 0xff);  // no NaN
    std::vector<float> scales((size_t)PANELS * groups * 16), x(ROWS * IN), out(ROWS * OUT);
    for (float& scale : scales) scale = 1 + draw() / 64;
    for (float& value : x) value = draw();
    KvqLinear l = {codes.data(), (uint8_t*)scales.data(), nullptr, nullptr, IN, OUT, IN, groups, code, KVQ_FP32, inputs};
    if (KVQ_CALL(linear)(&l, (uint8_t*)x.data(), IN * 4, (uint8_t*)out.data(), OUT * 4, KVQ_FP32, ROWS, THREADS)) return false;
    double worst = 0, largest = 0;
    for (int r = 0; r < ROWS; r++)
        for (int o = 0; o < OUT; o++) {
            double sum = 0;
            for (int i = 0; i < IN; i++)
                sum += x[r * IN + i] * weight_of(l, o, i) * scales[((size_t)o / 16 * groups + i / (IN / groups)) * 16 + o % 16];
            worst = std::fmax(worst, std::fabs(sum - out[r * OUT + o]));
            largest = std::fmax(largest, std::fabs(sum));
        }
    std::vector<uint8_t> bytes((uint8_t*)out.data(), (uint8_t*)(out.data() + out.size()));
    bool good = worst / largest < (inputs == KVQ_INPUTS_FULL ? 2e-4 : 4e-2);  // or inputs lose bits of their own
    std::printf("linear %-12s %016llx  %s\n", name, (unsigned long long)hashed(bytes, 14695981039346656037ull),
                good ? "ok" : "WRONG");
    return good;
}

bool check_elementwise() {
    float x[] = {2, -1, 3, 5}, weight[] = {1, 2}, gates[2], normed[4];
    KVQ_CALL(gated)((uint8_t*)x, 16, (uint8_t*)gates, 8, 2, KVQ_FP32, KVQ_SILU, 1, 1);
    KVQ_CALL(rms_norm)((uint8_t*)x, (uint8_t*)weight, (uint8_t*)normed, 2, KVQ_FP32, KVQ_FP32, 0, 2, 1);
    return std::fabs(gates[0] - 6 / (1 + std::exp(-2.0))) < 1e-6 && std::fabs(gates[1] + 5 / (1 + std::exp(1.0))) < 1e-6 &&
           std::fabs(normed[1] + 2 / std::sqrt(2.5)) < 1e-6 && std::fabs(normed[2] - 3 / std::sqrt(17.0)) < 1e-6;
}

}  // namespace

int main() {
    const Format formats[] = {{"fp32", KVQ_FP32, 0, 0, 0},   {"bf16", KVQ_BF16, 0, 0, 0},
                              {"fp16", KVQ_FP16, 0, 0, 0},   {"fp8", KVQ_FP8, 0, 0, 0},
                              {"fp8_per_head", KVQ_FP8, 0, 0, 1}, {"int8", KVQ_INT8, 0, 0, 0},
                              {"int8_rot", KVQ_INT8, 0, 1, 0}, {"int8_per_head", KVQ_INT8, 0, 0, 1}};
    bool good = true;
    for (int dim : {48, 64, 80, 128}) {
        for (const Format& f : formats) good &= check(f, dim);
        for (int group : {dim / 4, dim / 2, dim}) good &= check({"int4", KVQ_INT4, group, 1, 0}, dim);
        for (int group : {dim / 8, dim / 2, dim}) good &= check({"int2", KVQ_GROUPED, group, 1, 0, 2}, dim);
        for (int bits : {3, 5, 6, 7, 8}) good &= check({"wide", KVQ_GROUPED, dim / 2, 1, 0, bits}, dim);
        for (int bits : {2, 3, 5, 6}) good &= check({"narrow", KVQ_GROUPED, dim / 4, 1, 0, bits, 1}, dim);
        good &= check({"int4_narrow", KVQ_INT4, dim / 4, 1, 0, 4, 1}, dim);
    }
    good &= check_seal();
    good &= check_copies() && check_merge() && check_elementwise();
    good &= check_linear("int8", KVQ_INT8, KVQ_INPUTS_FULL, 1) && check_linear("int8_g24", KVQ_INT8, KVQ_INPUTS_FULL, 3);
    good &= check_linear("int8_a8", KVQ_INT8, KVQ_INPUTS_INT8, 1) && check_linear("int4_g8", KVQ_INT4, KVQ_INPUTS_FULL, 9);
    good &= check_linear("fp8", KVQ_FP8, KVQ_INPUTS_FULL, 1) && check_linear("fp8_a8", KVQ_FP8, KVQ_INPUTS_FP8, 1);
    std::printf("%s\n", good ? "all ok" : "FAILED");
    return good ? 0 : 1;
}
