// Products with a weight that oneDNN has packed, as fast as the weight can be read if there are few rows.
//
// oneDNN's own kernels read a weight at half of that for one row (float32, a weight of (3072, 576), EPYC with AVX-512,
// one core: 15 GB/s of 30). Its layout for processors with AVX-512 is panels of 64 columns: w[n / 64, k, 64], and for
// bfloat16 w[n / 64, k / 2, 64, 2]. A kernel keeps the sums of a panel in registers and reads the panel in one stream.
// Few rows read ahead in the panel; with more the next panel is read ahead, so that the memory and the processor work
// at the same time. A row's sums have the same order whatever the number of rows and threads.
//
// DTYPE: of all tensors; sums are float32. BIASED: whether there is a bias. DOTS: whether bfloat16 is multiplied by the
// instruction of `dot`.
#include "call.h"
#include "vector.h"

// Rows of a panel, of 256 bytes, by which few rows of an input read ahead.
constexpr int AHEAD = 20;
// Most rows whose sums of a panel are in registers.
constexpr int ROWS = MOST_OF_BLOCK;
// The least rows of a thread for which threads share a panel: each reads all of it.
constexpr int SHARED_ROWS = 8;
constexpr int VECTORS = PANEL / LANES;
constexpr int PAIR = 4 / sizeof(DTYPE);

typedef uint32_t Words[PANEL];

struct Product {
    const DTYPE* x;
    const Words* w;
    const DTYPE* bias;
    DTYPE* y;
    int64_t n, steps, inner, panel_steps, threads;
};

static INLINE F32 add_products(F32 sums, const uint32_t* weights, const DTYPE* x) {
    I32 words = load(weights);
#if DOTS
    int32_t pair;
    __builtin_memcpy(&pair, x, sizeof pair);
    return dot(sums, words, pair);
#else
    if (PAIR == 1) return fma(of_bits(words), widen(x[0]), sums);
    // Two weights in 32 bits, the first in the lower half.
    sums = fma(of_bits(words << 16), widen(x[0]), sums);
    return fma(of_bits(words & (int32_t)0xFFFF0000), widen(x[PAIR - 1]), sums);
#endif
}

static INLINE F32 with_bias(F32 sums, const Product& of, int64_t column, auto count) {
    return BIASED ? sums + load(of.bias + column, count) : sums;
}

// Computes `count` rows from `row` on, of panel `p`; `block` is the number of the block of the most rows.
template <int count> static NOINLINE void compute_rows(const Product& of, int64_t p, int64_t row, int64_t block) {
    F32 sums[count][VECTORS];
    UNROLL (r, count)
        UNROLL (v, VECTORS) sums[r][v] = 0.0f;
    const Words* panel = of.w + p * of.panel_steps;
    const Words* next = panel + of.threads * of.panel_steps;
    const DTYPE* x = of.x + row * of.inner;
    for (int64_t b = 0; b < of.steps; b++) {
        if (count == ROWS) {
            // The first four blocks each read a quarter of the thread's next panel ahead, and the memory does not wait.
            prefetch(next[b] + block % VECTORS * LANES);
        } else {
            // A few rows wait for the memory: they read ahead in the same panel, then in the thread's next one.
            const Words* ahead = b + AHEAD < of.steps ? panel + b + AHEAD : next + b + AHEAD - of.steps;
            UNROLL (v, VECTORS) prefetch(*ahead + v * LANES);
        }
        UNROLL (v, VECTORS)
            UNROLL (r, count) sums[r][v] = add_products(sums[r][v], panel[b] + v * LANES, x + r * of.inner + b * PAIR);
    }
    UNROLL (r, count)
        UNROLL (v, VECTORS) {
            int64_t column = p * PANEL + v * LANES;
            DTYPE* y = of.y + (row + r) * of.n + column;
            if (column + LANES <= of.n)
                store(y, with_bias(sums[r][v], of, column, Whole{}));
            else if (column < of.n)
                store(y, with_bias(sums[r][v], of, column, (int)(of.n - column)), (int)(of.n - column));
        }
}

static void compute_panel(const Product& of, int64_t p, int64_t begin, int64_t count) {
    each_block(
        begin, count,
        BODY(int64_t row, auto size, int64_t block) { compute_rows<decltype(size)::value>(of, p, row, block); });
}

// x (rows, inner), w (n / PANEL, panel, PANEL), bias (n) -> y (rows, n)
static void panel_product(const DTYPE* x, const Words* w, const DTYPE* bias, DTYPE* y, int64_t rows, int64_t n,
                          int64_t inner, int64_t panel, int64_t threads) {
    Product of = {x, w, bias, y, n, inner / PAIR, inner, panel / PAIR, threads};
    // Threads take turns, so that together they read one stream. Of the panels that are left, too few for all threads,
    // each has a share of the rows, unless there are few rows.
    int64_t panels = divided_up(n, PANEL), whole = panels / threads, left = panels % threads;
    int64_t parts = rows >= SHARED_ROWS * threads ? threads : 1;
    int64_t share = divided_up(rows, ROWS * parts) * ROWS;
    parallel(threads, [=](int64_t t) {
        for (int64_t turn = 0; turn < whole; turn++) compute_panel(of, turn * threads + t, 0, rows);
        for (int64_t unit = t; unit < left * parts; unit += threads) {
            int64_t begin = min(unit % parts * share, rows);
            compute_panel(of, whole * threads + unit / parts, begin, min(share, rows - begin));
        }
    });
}
EXPORT(panel_product)
