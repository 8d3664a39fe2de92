// Gradients of attention: of queries, keys and values, from that of the attended values.
//
// Each head is computed by one thread, in blocks of rows, from copies in float32 whose rows are whole vectors. Scores
// and weights are stored by key, with the rows of a block in the lanes of vectors, as in attend_requests.cpp: sums over
// the keys of a row need no sums across lanes. All five products are sums of outer products, whose results are in
// registers:
//
//     scores      (key, row)     = k (key, j) x q (j, row)          weights = softmax of scores over keys
//     grads       (key, row)     = v (key, j) x g (j, row)          slopes = weights * (grads - sum of weights * grads)
//     of values   (key, column) += weights (key, row) x g (row, column)
//     of keys     (key, column) += slopes (key, row) x q (row, column)
//     of queries  (row, column)  = slopes (row, key) x k (key, column)
//
// Weights are computed again from queries and keys, which takes a sixth of the time: nothing is saved by the forward.
// Of a part of the keys, normalizers and sums of weights * grads are given.
//
// WIDTH, VALUE_WIDTH: elements of keys and of values; DTYPE: of all tensors; MASKED: whether there is a mask. KEYS:
// keys of a tile that is in registers; MOST_VECTORS: vectors of rows of a block. Sums are float32.
#include "call.h"
#include "functions.h"

constexpr int WIDE = up_to(WIDTH, LANES), VALUE_WIDE = up_to(VALUE_WIDTH, LANES);
// Vectors of a tile.
constexpr int VECTORS = 2;
// The score of a key that a row does not attend to, and a limit above it.
constexpr float LEAST = -3.4e38f, LEAST_SEEN = -1.7e38f;

template <class T> struct Heads {
    T* place;
    int64_t batch, head, row;
    INLINE T* at(int64_t b, int64_t h, int64_t r) const { return place + b * batch + h * head + r * row; }
};

struct Memory {
    float *key, *value, *key_sum, *value_sum, *weight, *slope, *query, *grad, *query_lanes, *grad_lanes, *query_sum;
    int64_t lanes;

    Memory(float* scratch, int64_t keys, int64_t lanes) : lanes(lanes) {
        auto take = [&](int64_t size) {
            float* place = scratch;
            scratch += size;
            return place;
        };
        key = take(keys * WIDE), value = take(keys * VALUE_WIDE);
        key_sum = take(keys * WIDE), value_sum = take(keys * VALUE_WIDE);
        weight = take(keys * lanes), slope = take(keys * lanes);
        query = take(lanes * WIDE), grad = take(lanes * VALUE_WIDE);
        query_lanes = take(lanes * WIDE), grad_lanes = take(lanes * VALUE_WIDE), query_sum = take(lanes * WIDE);
    }
};

// Copies `count` rows in float32, with zeros up to whole vectors, and up to `padded` rows.
template <int width>
static void copy_rows(float* to, const DTYPE* from, int64_t stride, int64_t count, int64_t padded) {
    constexpr int wide = up_to(width, LANES);
    for (int64_t r = 0; r < count; r++)
        for (int j = 0; j < wide; j += LANES)
            store(to + r * wide + j,
                  j + LANES <= width ? load(from + r * stride + j) : load(from + r * stride + j, width - j));
    for (int64_t i = count * wide; i < padded * wide; i += LANES) store(to + i, F32(0.0f));
}

template <int width> static void write_rows(DTYPE* to, int64_t stride, const float* from, int64_t count) {
    constexpr int wide = up_to(width, LANES);
    for (int64_t r = 0; r < count; r++)
        each_vector(
            width, BODY(int64_t j, auto lanes) { store(to + r * stride + j, load(from + r * wide + j), lanes); });
}

static void transpose(float* to, const float* from, int64_t rows, int wide, int64_t lanes) {
    for (int j = 0; j < wide; j++)
        for (int64_t row = 0; row < rows; row++) to[j * lanes + row] = from[row * wide + j];
}

// A tile of a sum of outer products: of element (i, step) of `a`, and of vectors of `b` at `step`. It is added to the
// result, or written.
template <int count, bool added> static INLINE void add_tile(float* result, int64_t of_result, const float* a,
                                                             int64_t of_row, int64_t of_step, const float* b,
                                                             int64_t of_b, int64_t steps) {
    F32 tile[KEYS][count];
    UNROLL (i, KEYS)
        UNROLL (c, count) tile[i][c] = added ? load(result + i * of_result + c * LANES) : F32(0.0f);
    for (int64_t step = 0; step < steps; step++, a += of_step, b += of_b) {
        F32 vectors[count];
        UNROLL (c, count) vectors[c] = load(b + c * LANES);
        UNROLL (i, KEYS)
            UNROLL (c, count) tile[i][c] = fma(F32(a[i * of_row]), vectors[c], tile[i][c]);
    }
    UNROLL (i, KEYS)
        UNROLL (c, count) store(result + i * of_result + c * LANES, tile[i][c]);
}

// A row of tiles of `vectors` vectors.
template <bool added> static INLINE void add_tiles(float* result, int64_t of_result, const float* a, int64_t of_row,
                                                   int64_t of_step, const float* b, int64_t of_b, int64_t steps,
                                                   int64_t vectors) {
    int64_t c = 0;
    for (; c + VECTORS <= vectors; c += VECTORS)
        add_tile<VECTORS, added>(result + c * LANES, of_result, a, of_row, of_step, b + c * LANES, of_b, steps);
    if (c < vectors) add_tile<1, added>(result + c * LANES, of_result, a, of_row, of_step, b + c * LANES, of_b, steps);
}

// The first key that a row attends to, and the one after the last.
struct Bounds {
    int64_t first, end;
};

// Those of some rows together, as whole tiles.
static Bounds bounds_of(const Bounds* rows, int64_t count, int64_t tokens) {
    Bounds found = {tokens, 0};
    for (int64_t i = 0; i < count; i++) found = {min(found.first, rows[i].first), max(found.end, rows[i].end)};
    return {found.first / KEYS * KEYS, divided_up(found.end, KEYS) * KEYS};
}

// Makes weights and slopes of a vector of rows, with `bounds` of `count` rows, from scores and grads of `keys`. Rows
// and keys after the last are not attended to.
static void softmax(float* weights, float* slopes, int64_t lanes, Bounds keys, const Bounds* bounds, int64_t count,
                    const float* mask, int64_t mask_lanes, int64_t tokens, float to_power, float scale,
                    const float* normalizers, const float* means) {
    alignas(64) int32_t first_keys[LANES] = {}, end_keys[LANES] = {};
    for (int64_t i = 0; i < count; i++) first_keys[i] = (int32_t)bounds[i].first, end_keys[i] = (int32_t)bounds[i].end;
    I32 first = load(first_keys), end = load(end_keys);
    F32 best = LEAST, total = 0.0f;
    if (normalizers) {
        F32 largest = load(normalizers, (int)count) * LOG2_E, along = load(means, (int)count);
        for (int64_t key = keys.first; key < keys.end; key++) {
            I32 number = (int32_t)key;
            Mask is_attended = (number >= first) & (number < end);
            F32 power = load(weights + key * lanes) * to_power - largest;
            F32 weight = select(is_attended, exp2_to_one(min(power, F32(0.0f))), 0.0f);
            store(weights + key * lanes, weight);
            store(slopes + key * lanes, weight * (load(slopes + key * lanes) - along) * scale);
        }
        return;
    }
    for (int64_t key = keys.first; key < keys.end; key++) {
        I32 number = (int32_t)key;
        Mask is_attended = (number >= first) & (number < end);
        if (MASKED) is_attended = is_attended & (load(mask + min(key, tokens - 1) * mask_lanes) >= 0.0f);
        F32 score = select(is_attended, load(weights + key * lanes) * to_power, LEAST);
        store(weights + key * lanes, score);
        best = max(best, score);
    }
    for (int64_t key = keys.first; key < keys.end; key++) {
        F32 score = load(weights + key * lanes);
        F32 power = select(score > LEAST_SEEN, exp2_to_one(score - best), 0.0f);
        store(weights + key * lanes, power);
        total = total + power;
    }
    F32 share = select(total == 0.0f, 0.0f, 1.0f / total), along = 0.0f;
    for (int64_t key = keys.first; key < keys.end; key++) {
        F32 weight = load(weights + key * lanes) * share;
        store(weights + key * lanes, weight);
        along = fma(weight, load(slopes + key * lanes), along);
    }
    for (int64_t key = keys.first; key < keys.end; key++) {
        F32 slope = load(weights + key * lanes) * (load(slopes + key * lanes) - along) * scale;
        store(slopes + key * lanes, slope);
    }
}

// - addresses of queries (b, h, s, WIDTH), keys (b, h, t, WIDTH), values (b, h, t, VALUE_WIDTH), the gradient of the
//   result (b, h, s, VALUE_WIDTH), and of the gradients of queries, keys and values, each with its strides by batch,
//   head and row in elements; that of the last dim is 1;
//
// - the address of the mask (b, h, t, lanes), float32, negative for a key that a row does not attend to, with its
//   strides by batch and head; lanes are the rows up to a whole vector;
//
// - the addresses of the bounds of each row, and of the memory of each thread;
//
// - the addresses of the logarithms of normalizers and of means (b, h, s), float32, of all keys if these are a part,
//   without a mask; else 0;
//
// - the numbers b * h, h, s and t, the scale of the scores, and the number of threads.
static void attention_grad(const DTYPE* q, int64_t q_batch, int64_t q_head, int64_t q_row, const DTYPE* k,
                           int64_t k_batch, int64_t k_head, int64_t k_row, const DTYPE* v, int64_t v_batch,
                           int64_t v_head, int64_t v_row, const DTYPE* g, int64_t g_batch, int64_t g_head,
                           int64_t g_row, DTYPE* of_q, int64_t of_q_batch, int64_t of_q_head, int64_t of_q_row,
                           DTYPE* of_k, int64_t of_k_batch, int64_t of_k_head, int64_t of_k_row, DTYPE* of_v,
                           int64_t of_v_batch, int64_t of_v_head, int64_t of_v_row, const float* mask,
                           int64_t mask_batch, int64_t mask_head, const Bounds* bounds, float* scratch,
                           const float* normalizers, const float* means, int64_t units, int64_t heads, int64_t rows,
                           int64_t tokens, float scale, int64_t threads) {
    int64_t all_vectors = divided_up(rows, LANES), blocks = divided_up(all_vectors, MOST_VECTORS);
    int64_t most = divided_up(all_vectors, blocks), lanes = most * LANES, keys = divided_up(tokens, KEYS) * KEYS;
    int64_t size = (2 * keys + 3 * lanes) * (WIDE + VALUE_WIDE) + 2 * keys * lanes;
    float to_power = scale * LOG2_E;
    parallel(threads, [=](int64_t t) {
        Memory m(scratch + t * size, keys, lanes);
        Heads<const DTYPE> queries = {q, q_batch, q_head, q_row}, all_keys = {k, k_batch, k_head, k_row};
        Heads<const DTYPE> values = {v, v_batch, v_head, v_row}, grads = {g, g_batch, g_head, g_row};
        Heads<DTYPE> to_q = {of_q, of_q_batch, of_q_head, of_q_row}, to_k = {of_k, of_k_batch, of_k_head, of_k_row};
        Heads<DTYPE> to_v = {of_v, of_v_batch, of_v_head, of_v_row};
        for (int64_t unit = units * t / threads; unit < units * (t + 1) / threads; unit++) {
            int64_t b = unit / heads, h = unit % heads;
            copy_rows<WIDTH>(m.key, all_keys.at(b, h, 0), k_row, tokens, keys);
            copy_rows<VALUE_WIDTH>(m.value, values.at(b, h, 0), v_row, tokens, keys);
            for (int64_t i = 0; i < keys * (WIDE + VALUE_WIDE); i += LANES) store(m.key_sum + i, F32(0.0f));
            for (int64_t block = 0; block < blocks; block++) {
                int64_t row = block * lanes, vectors = min(most, all_vectors - block * most);
                int64_t count = min(lanes, rows - row);
                Bounds attended = bounds_of(bounds + row, count, tokens);
                copy_rows<WIDTH>(m.query, queries.at(b, h, row), q_row, count, vectors * LANES);
                copy_rows<VALUE_WIDTH>(m.grad, grads.at(b, h, row), g_row, count, vectors * LANES);
                transpose(m.query_lanes, m.query, vectors * LANES, WIDE, lanes);
                transpose(m.grad_lanes, m.grad, vectors * LANES, VALUE_WIDE, lanes);
                for (int64_t key = attended.first; key < attended.end; key += KEYS) {
                    add_tiles<false>(m.weight + key * lanes, lanes, m.key + key * WIDE, WIDE, 1, m.query_lanes, lanes,
                                     WIDE, vectors);
                    add_tiles<false>(m.slope + key * lanes, lanes, m.value + key * VALUE_WIDE, VALUE_WIDE, 1,
                                     m.grad_lanes, lanes, VALUE_WIDE, vectors);
                }
                const float* of_head = MASKED ? mask + b * mask_batch + h * mask_head + row : nullptr;
                for (int64_t vector = 0; vector < vectors; vector++) {
                    int64_t lane = vector * LANES, first_row = unit * rows + row + lane;
                    softmax(m.weight + lane, m.slope + lane, lanes, attended, bounds + row + lane,
                            min<int64_t>(LANES, count - lane), of_head + lane, all_vectors * LANES, tokens, to_power,
                            scale, normalizers ? normalizers + first_row : nullptr,
                            means ? means + first_row : nullptr);
                }
                for (int64_t key = attended.first; key < attended.end; key += KEYS) {
                    add_tiles<true>(m.value_sum + key * VALUE_WIDE, VALUE_WIDE, m.weight + key * lanes, lanes, 1,
                                    m.grad, VALUE_WIDE, count, VALUE_WIDE / LANES);
                    add_tiles<true>(m.key_sum + key * WIDE, WIDE, m.slope + key * lanes, lanes, 1, m.query, WIDE, count,
                                    WIDE / LANES);
                }
                for (int64_t first = 0; first < vectors * LANES; first += KEYS)
                    add_tiles<false>(m.query_sum + first * WIDE, WIDE, m.slope + attended.first * lanes + first, 1,
                                     lanes, m.key + attended.first * WIDE, WIDE, attended.end - attended.first,
                                     WIDE / LANES);
                write_rows<WIDTH>(to_q.at(b, h, row), of_q_row, m.query_sum, count);
            }
            write_rows<WIDTH>(to_k.at(b, h, 0), of_k_row, m.key_sum, tokens);
            write_rows<VALUE_WIDTH>(to_v.at(b, h, 0), of_v_row, m.value_sum, tokens);
        }
    });
}
EXPORT(attention_grad)
