// Attention of the new positions of several requests, each of which attends to its own keys and values.
//
// Blocks of rows attend to blocks of keys, one after the other, with a running maximum and sum of each row (Dao et al.,
// FlashAttention, 2022). Scores are stored by key, with the rows of a block in the lanes of vectors, so that maximum
// and sum of a row need no sums across lanes, and the heads that share keys are rows of one block. Blocks of keys begin
// at multiples of their size, and the order of sums does not depend on the number of rows: a row's result does not
// depend on the rows that are computed with it. A vector of rows skips the keys after the last that one of them attends
// to; their weights would be zero.
//
// A score is the sum of PARTS sums, of every PARTS-th element. So the scores of one new position, whose heads are few
// rows, have the same bits if lanes are elements of several keys: then no lane is idle.
//
// With the instruction of `dot`, keys, queries, weights and values are pairs of bfloat16: of elements j and j + DEPTH
// of keys and queries, and of keys 2 i and 2 i + 1 of weights and values. Sums are float32.
//
// REPEATS: the number of query heads of each head of keys and values; WIDTH, VALUE_WIDTH: elements of those; DTYPE: of
// all tensors; DOTS: whether the instruction is used, and weights are rounded to bfloat16; APPENDS: whether new keys
// and values are written to the caches of their requests; MOST_ROWS: rows of a block, of all query heads of a head.
#include "call.h"
#include "functions.h"

constexpr int REPEATED[] = REPEATS;
constexpr int HEADS = sizeof(REPEATED) / sizeof(int);
constexpr int largest_of_repeats() {
    int most = 1;
    for (int repeats : REPEATED) most = repeats > most ? repeats : most;
    return most;
}

// Keys of a block, and those whose scores are computed at the same time.
constexpr int KEYS = 64, TOGETHER = 8;
// Rows, and vectors of columns, whose values are added at the same time.
constexpr int ROWS = 4, COLUMN_VECTORS = 4;
// Query heads of a head of keys; where some have fewer, rows of the last one are computed several times.
constexpr int GROUP = largest_of_repeats();
constexpr int PADDED = up_to(MOST_ROWS / GROUP ? MOST_ROWS / GROUP * GROUP : GROUP, LANES);
constexpr int COLUMNS = up_to(VALUE_WIDTH, LANES);
constexpr int PAIR = DOTS ? 2 : 1;
constexpr int DEPTH = (WIDTH + PAIR - 1) / PAIR;
// Pairs have an instruction of their own.
constexpr int PARTS = PAIR == 1 && WIDTH % 4 == 0 ? 4 : 1;
// Query heads that are few rows, or 0.
constexpr int FEW = PARTS > 1 && GROUP <= ROWS ? GROUP : 0;
// The score of a key that a row does not attend to, and the greatest score of a row until its first: so far above that
// the weight of such a key is zero.
constexpr float LEAST = -3.4e38f, LEAST_TOP = -1.7e38f;
// The logarithm of the normalizer of a row without keys, whose result is zero.
constexpr float NO_KEYS = -1e30f;

// A number, or a pair of them.
#if DOTS
typedef uint32_t Item;
typedef I32 Items;
static INLINE F32 add_product(F32 sums, I32 x, I32 y) { return dot(sums, x, y); }
#else
typedef float Item;
typedef F32 Items;
static INLINE F32 add_product(F32 sums, F32 x, F32 y) { return fma(x, y, sums); }
#endif

template <class T> struct Cached {
    T* place;
    int64_t head, position;
};
struct Caches {
    Cached<DTYPE> k, v;
};
struct Block {
    int64_t cache, row, rows, start, past;
};
struct Limits {
    int64_t first, end;
};
template <class T> struct Rows {
    T* place;
    int64_t head, row;
    INLINE T* at(int64_t h, int64_t r) const { return place + h * head + r * row; }
};

struct Scratch {
    alignas(64) Item query[DEPTH * PADDED];
    alignas(64) Item key[KEYS * DEPTH];
    alignas(64) Item value[KEYS / PAIR * COLUMNS];
    alignas(64) float score[KEYS * PADDED];
    alignas(64) Item weights[DOTS ? KEYS / PAIR * PADDED : LANES];
    alignas(64) float sums[PADDED * COLUMNS];
    alignas(64) float few_query[FEW ? FEW * WIDTH : 1];
    alignas(64) float few_score[FEW ? FEW * KEYS : 1];
    alignas(64) float top[PADDED];
    alignas(64) float total[PADDED];
    alignas(64) float factor[PADDED];
    alignas(64) int32_t first_key[PADDED];
    alignas(64) int32_t end_key[PADDED];
    int64_t first, end;
    int64_t end_of[PADDED / LANES], steps_of[PADDED / LANES];

    // In place of the scores, unless they are pairs.
    INLINE Item* weight() { return DOTS ? weights : (Item*)score; }
};

// -------------------------------------------------------------------------------------------------------- queries

// Number j of a key or a query: an element, or a pair of them.
static INLINE Item item_of(const DTYPE* x, int j) {
#if DOTS
    return j + DEPTH < WIDTH ? x[j].bits | (uint32_t)x[j + DEPTH].bits << 16 : x[j].bits;
#else
    return widen(x[j]);
#endif
}

static int query_head(int head, int g) {
    int first = 0;
    for (int i = 0; i < head; i++) first += REPEATED[i];
    return first + (g < REPEATED[head] ? g : REPEATED[head] - 1);
}

// Reads queries and limits of the rows; those after the last, up to whole vectors, attend to nothing.
static void begin_rows(Scratch& s, const Block& block, int head, const Rows<const DTYPE>& q, const Limits* limits,
                       int vectors) {
    for (int lane = (int)block.rows * GROUP; lane < vectors * LANES; lane++)
        for (int j = 0; j < DEPTH; j++) s.query[j * PADDED + lane] = 0;
    for (int vector = 0; vector < vectors; vector++) {
        store(s.top + vector * LANES, F32(LEAST_TOP));
        store(s.total + vector * LANES, F32(0.0f));
        store(s.first_key + vector * LANES, I32(0));
        store(s.end_key + vector * LANES, I32(0));
        s.end_of[vector] = 0;
    }
    s.first = limits[block.row].first;
    s.end = limits[block.row].end;
    for (int r = 0; r < block.rows; r++) {
        Limits of_row = limits[block.row + r];
        s.first = min(s.first, of_row.first);
        s.end = max(s.end, of_row.end);
        for (int g = 0; g < GROUP; g++) {
            int lane = r * GROUP + g;
            const DTYPE* row = q.at(query_head(head, g), block.row + r);
            for (int j = 0; j < DEPTH; j++) s.query[j * PADDED + lane] = item_of(row, j);
            s.first_key[lane] = (int32_t)of_row.first;
            s.end_key[lane] = (int32_t)of_row.end;
            s.end_of[lane / LANES] = max(s.end_of[lane / LANES], of_row.end);
        }
    }
    for (int i = 0; i < vectors * COLUMNS; i++) store(s.sums + i * LANES, F32(0.0f));
    if (FEW && block.rows == 1)
        for (int g = 0; g < FEW; g++) {
            const DTYPE* row = q.at(query_head(head, g), block.row);
            each_vector(
                WIDTH,
                BODY(int64_t j, auto count) { store(s.few_query + g * WIDTH + j, load(row + j, count), count); });
        }
}

// ------------------------------------------------------------------------------------------------ keys and values

static INLINE void read_key(Item* to, const DTYPE* key) {
#if DOTS
    int j = 0;
    for (; j + LANES <= WIDTH - DEPTH; j += LANES) store(to + j, load_bits(key + j) | load_bits(key + j + DEPTH) << 16);
    for (; j < DEPTH; j++) to[j] = item_of(key, j);
#else
    each_vector(WIDTH, BODY(int64_t j, auto count) { store(to + j, load(key + j, count), count); });
#endif
}

// Number `i` of a block: with pairs, one half of each, the first before the second.
static INLINE void read_value(Item* values, const DTYPE* value, int64_t i) {
    Item* to = values + i / PAIR * COLUMNS;
#if DOTS
    int j = 0;
    for (; j + LANES <= VALUE_WIDTH; j += LANES) {
        I32 bits = load_bits(value + j);
        store(to + j, i % 2 ? load(to + j) | bits << 16 : bits);
    }
    for (; j < VALUE_WIDTH; j++) to[j] = i % 2 ? to[j] | (uint32_t)value[j].bits << 16 : value[j].bits;
    for (; j < COLUMNS; j++) to[j] = 0;
#else
    // Those after the last column are zero.
    for (int j = 0; j < COLUMNS; j += LANES)
        store(to + j, j + LANES <= VALUE_WIDTH ? load(value + j) : load(value + j, VALUE_WIDTH - j));
#endif
}

// Reads `count` keys and values from `base` on: earlier ones from the cache, others from where it gets them from.
static void read_keys(Scratch& s, const Block& block, int head, const Caches& cache, const Rows<const DTYPE>& new_k,
                      const Rows<const DTYPE>& new_v, int64_t base, int64_t count) {
    const DTYPE* old_k = cache.k.place + head * cache.k.head;
    const DTYPE* old_v = cache.v.place + head * cache.v.head;
    int64_t count_old = max<int64_t>(0, min(count, block.past - base));
    int64_t steps = divided_up(count, TOGETHER);
    for (int64_t i = 0; i < count; i++) {
        int64_t row = block.start + base + i - block.past;
        bool is_old = i < count_old;
        read_key(s.key + i * DEPTH, is_old ? old_k + (base + i) * cache.k.position : new_k.at(head, row));
        read_value(s.value, is_old ? old_v + (base + i) * cache.v.position : new_v.at(head, row), i);
    }
    // Those after the last, up to whole steps, are zero.
    for (int64_t j = count * DEPTH; j < steps * TOGETHER * DEPTH; j++) s.key[j] = 0;
    for (int64_t j = divided_up(count, PAIR) * COLUMNS; j < steps * TOGETHER / PAIR * COLUMNS; j++) s.value[j] = 0;
}

// Writes the new keys or values of the block's rows after the earlier ones of the request.
static void append(const Block& block, int head, const Cached<DTYPE>& to, const Rows<const DTYPE>& from, int width) {
    for (int64_t r = 0; r < block.rows; r++) {
        int64_t position = block.past + block.row - block.start + r;
        __builtin_memcpy(to.place + head * to.head + position * to.position, from.at(head, block.row + r),
                         width * sizeof(DTYPE));
    }
}

// -------------------------------------------------------------------------------------------------------- weights

// Computes the scores of the keys of a step, with rows in the lanes of vectors.
static INLINE void compute_scores(const Scratch& s, int64_t step, int vector, F32 (&scores)[TOGETHER]) {
    const Item* query = s.query + vector * LANES;
    const Item* keys = s.key + step * TOGETHER * DEPTH;
    if (PARTS == 1) {
        UNROLL (key, TOGETHER) scores[key] = 0.0f;
        for (int j = 0; j < DEPTH; j++) {
            Items of_rows = load(query + j * PADDED);
            UNROLL (key, TOGETHER) scores[key] = add_product(scores[key], of_rows, Items(keys[key * DEPTH + j]));
        }
        return;
    }
    constexpr int SHARED = LANES / 4;
    UNROLL (half, TOGETHER / SHARED) {
        int first = half * SHARED;
        F32 partial[SHARED][4];
        UNROLL (key, SHARED)
            UNROLL (part, 4) partial[key][part] = 0.0f;
        for (int j = 0; j < DEPTH; j += 4)
            UNROLL (part, 4) {
                Items of_rows = load(query + (j + part) * PADDED);
                UNROLL (key, SHARED)
                    partial[key][part] =
                        add_product(partial[key][part], of_rows, Items(keys[(first + key) * DEPTH + j + part]));
            }
        UNROLL (key, SHARED)
            scores[first + key] = (partial[key][0] + partial[key][1]) + (partial[key][2] + partial[key][3]);
    }
}

// Two float32 vectors as pairs of bfloat16, rounded to the nearest, ties away from zero. NaN stays NaN if its lower 16
// bits are zero, as after arithmetic with bfloat16.
static INLINE I32 pairs_of_rounded(F32 x, F32 y) {
    return ((bits_of(x) + 0x8000) >> 16) | ((bits_of(y) + 0x8000) & (int32_t)0xFFFF0000);
}

// Computes the weights of a block of keys: powers of two of scores, relative to the greatest score until now.
static INLINE void compute_weights(Scratch& s, int64_t base, int vector, float to_power) {
    int at = vector * LANES;
    int64_t attended = max<int64_t>(0, min<int64_t>(s.end_of[vector] - base, KEYS));
    int64_t steps = s.steps_of[vector] = divided_up(attended, TOGETHER);
    I32 first_key = load(s.first_key + at), end_key = load(s.end_key + at);
    F32 best = load(s.top + at);
    for (int64_t step = 0; step < steps; step++) {
        F32 scores[TOGETHER];
        compute_scores(s, step, vector, scores);
        UNROLL (key, TOGETHER) {
            I32 position = (int32_t)(base + step * TOGETHER + key);
            Mask is_attended = (position >= first_key) & (position < end_key);
            F32 score = select(is_attended, scores[key] * to_power, LEAST);
            store(s.score + (step * TOGETHER + key) * PADDED + at, score);
            best = max(best, score);
        }
    }
    F32 factor = exp2_to_one(load(s.top + at) - best), total = load(s.total + at) * factor;
    store(s.factor + at, factor);
    store(s.top + at, best);
    for (int64_t i = 0; i < steps * TOGETHER; i += PAIR) {
        float* score = s.score + i * PADDED + at;
        F32 power = exp2_to_one(load(score) - best);
        total = total + power;
#if DOTS
        F32 second = exp2_to_one(load(score + PADDED) - best);
        total = total + second;
        store(s.weights + i / 2 * PADDED + at, pairs_of_rounded(power, second));
#else
        store(score, power);
#endif
    }
    store(s.total + at, total);
}

// Adds `count` values, or pairs of them, to the sums of some rows, in vectors of columns that are in registers.
template <int rows, int vectors> static INLINE void add_to_columns(float* places, const float* factors,
                                                                   const Item* value, int64_t count, const Item* weight,
                                                                   int64_t of_row, int64_t of_value) {
    F32 sums[rows][vectors];
    UNROLL (r, rows)
        UNROLL (c, vectors) sums[r][c] = load(places + r * COLUMNS + c * LANES) * factors[r];
    for (int64_t i = 0; i < count; i++, value += COLUMNS, weight += of_value) {
        Items values[vectors];
        UNROLL (c, vectors) values[c] = load(value + c * LANES);
        UNROLL (r, rows) {
            Items of_weight = weight[r * of_row];
            UNROLL (c, vectors) sums[r][c] = add_product(sums[r][c], values[c], of_weight);
        }
    }
    UNROLL (r, rows)
        UNROLL (c, vectors) store(places + r * COLUMNS + c * LANES, sums[r][c]);
}

// Adds them to all columns; `weights` are those of the rows, by value.
template <int rows> static INLINE void add_values(Scratch& s, int first_row, int64_t count, const Item* weights,
                                                  int64_t of_row, int64_t of_value) {
    constexpr int WIDEST = COLUMN_VECTORS * LANES, LAST = COLUMNS / LANES % COLUMN_VECTORS;
    float* places = s.sums + first_row * COLUMNS;
    const float* factors = s.factor + first_row;
    int column = 0;
    for (; column + WIDEST <= COLUMNS; column += WIDEST)
        add_to_columns<rows, COLUMN_VECTORS>(places + column, factors, s.value + column, count, weights, of_row,
                                             of_value);
    if (LAST)
        add_to_columns<rows, LAST ? LAST : 1>(places + column, factors, s.value + column, count, weights, of_row,
                                              of_value);
}

// --------------------------------------------------------------------------------------------- one new position

// Computes the same weights for one position, whose heads are few: first elements, then keys are in the lanes.
static INLINE void compute_few_weights(Scratch& s, const Caches& cache, int head, int64_t base, int64_t count,
                                       float to_power) {
#if !DOTS
    constexpr int SHARED = LANES / 4, HALVES = TOGETHER / SHARED;
    for (int64_t step = 0; step < divided_up(count, TOGETHER); step++) {
        // Keys and values are read once, so those of the next block are read ahead.
        for (int i = 0; i < TOGETHER; i++) {
            int64_t number = base + KEYS + step * TOGETHER + i;
            const DTYPE* key = cache.k.place + head * cache.k.head + number * cache.k.position;
            const DTYPE* value = cache.v.place + head * cache.v.head + number * cache.v.position;
            for (int j = 0; j < WIDTH; j += LANES) prefetch(key + j);
            for (int j = 0; j < VALUE_WIDTH; j += LANES) prefetch(value + j);
        }
        F32 partial[HALVES][FEW ? FEW : 1];
        UNROLL (half, HALVES)
            UNROLL (g, FEW) partial[half][g] = 0.0f;
        const float* keys = s.key + step * TOGETHER * WIDTH;
        for (int j = 0; j < WIDTH; j += 4) {
            F32 of_keys[HALVES];
            UNROLL (half, HALVES) of_keys[half] = load_fours(keys + half * SHARED * WIDTH + j, WIDTH);
            UNROLL (g, FEW) {
                F32 query = load_fours(s.few_query + g * WIDTH + j, 0);
                UNROLL (half, HALVES) partial[half][g] = fma(query, of_keys[half], partial[half][g]);
            }
        }
        UNROLL (half, HALVES)
            UNROLL (g, FEW)
                store_sums_of_four(s.few_score + g * KEYS + step * TOGETHER + half * SHARED, partial[half][g]);
    }
    for (int g = 0; g < FEW; g++) {
        float* scores = s.few_score + g * KEYS;
        F32 best = s.top[g];
        for (int64_t i = 0; i < count; i += LANES) {
            I32 position = lane_numbers() + (int32_t)(base + i);
            Mask is_attended = (position >= s.first_key[g]) & (position < s.end_key[g]);
            F32 score = select(is_attended, load(scores + i) * to_power, LEAST);
            store(scores + i, score);
            best = max(best, score);
        }
        float top = largest(best);
        // The same bits as of a vector.
        alignas(64) float factor[LANES];
        store(factor, exp2_to_one(F32(s.top[g] - top)));
        s.factor[g] = factor[0];
        s.top[g] = top;
        float total = s.total[g] * s.factor[g];
        for (int64_t i = 0; i < count; i += LANES) store(scores + i, exp2_to_one(load(scores + i) - top));
        for (int64_t i = 0; i < count; i++) total += scores[i];
        s.total[g] = total;
    }
#endif
}

// --------------------------------------------------------------------------------------------------------- blocks

static void attend(Scratch& s, const Block& block, int head, const Caches& cache, const Limits* limits,
                   const Rows<const DTYPE>& q, const Rows<const DTYPE>& new_k, const Rows<const DTYPE>& new_v,
                   const Rows<DTYPE>& y, float* normalizers, int64_t rows, float to_power) {
    if (APPENDS) {
        append(block, head, cache.k, new_k, WIDTH);
        append(block, head, cache.v, new_v, VALUE_WIDTH);
    }
    int vectors = (int)divided_up(block.rows * GROUP, LANES);
    begin_rows(s, block, head, q, limits, vectors);
    for (int64_t base = s.first / KEYS * KEYS; base < s.end; base += KEYS) {
        int64_t count = min<int64_t>(s.end - base, KEYS);
        read_keys(s, block, head, cache, new_k, new_v, base, count);
        if (FEW && block.rows == 1) {
            compute_few_weights(s, cache, head, base, count, to_power);
            add_values<FEW ? FEW : 1>(s, 0, count, (Item*)s.few_score, KEYS, 1);
            continue;
        }
        for (int vector = 0; vector < vectors; vector++) compute_weights(s, base, vector, to_power);
        for (int row = 0; row < block.rows * GROUP; row += ROWS)
            if (int64_t steps = s.steps_of[row / LANES])
                add_values<ROWS>(s, row, steps * TOGETHER / PAIR, s.weight() + row, 1, PADDED);
    }
    for (int r = 0; r < block.rows; r++)
        for (int g = 0; g < GROUP; g++) {
            int lane = r * GROUP + g, of_query = query_head(head, g);
            float share = s.total[lane] > 0.0f ? 1.0f / s.total[lane] : 0.0f;
            DTYPE* to = y.at(of_query, block.row + r);
            if (normalizers)
                normalizers[of_query * rows + block.row + r] =
                    share > 0.0f ? (s.top[lane] + __builtin_log2f(s.total[lane])) / LOG2_E : NO_KEYS;
            each_vector(
                VALUE_WIDTH,
                BODY(int64_t j, auto count) { store(to + j, load(s.sums + lane * COLUMNS + j) * share, count); });
        }
}

// - for each request addresses of keys and of values, each with their strides by head and by position;
// - for each block the number of its request, its first row, its number of rows, the first row of the request, and the
//   number of its earlier positions; and how many blocks there are;
// - for each row the first position that it attends to, and the one after the last;
// - addresses of queries, new keys, new values and results, each with their strides by head and by row;
// - the address of the logarithms of normalizers (head, row), float32, 0 if they are not wanted, and how many rows
// there
//   are;
// - the scale of the scores, and the number of threads.
//
// All strides are in elements, that of the last dim is 1.
static void attend_requests(const Caches* caches, const Block* blocks, int64_t count, const Limits* limits,
                            const DTYPE* q, int64_t q_head, int64_t q_row, const DTYPE* new_k, int64_t new_k_head,
                            int64_t new_k_row, const DTYPE* new_v, int64_t new_v_head, int64_t new_v_row, DTYPE* y,
                            int64_t y_head, int64_t y_row, float* normalizers, int64_t rows, float scale,
                            int64_t threads) {
    int64_t units = count * HEADS;
    parallel(threads, [=](int64_t t) {
        Scratch scratch;
        Rows<const DTYPE> of_q = {q, q_head, q_row}, of_k = {new_k, new_k_head, new_k_row};
        Rows<const DTYPE> of_v = {new_v, new_v_head, new_v_row};
        Rows<DTYPE> of_y = {y, y_head, y_row};
        for (int64_t turn = 0; turn * threads < units; turn++) {
            // The later blocks of a prompt take longer: threads change their order in each turn.
            int64_t unit = turn * threads + (turn % 2 ? threads - 1 - t : t);
            if (unit >= units) continue;
            const Block& block = blocks[unit / HEADS];
            attend(scratch, block, (int)(unit % HEADS), caches[block.cache], limits, of_q, of_k, of_v, of_y,
                   normalizers, rows, scale * LOG2_E);
        }
    });
}
EXPORT(attend_requests)
