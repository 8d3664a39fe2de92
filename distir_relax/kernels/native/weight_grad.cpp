// Gradients of weights in float32: the sum of the outer products of rows of two matrices, a (m, n) and b (m, k).
//
// Blocks of rows are copied to panels, of COLUMNS columns of b and ROWS of a, so that a tile of the result, which is in
// registers, reads memory in order (Goto and van de Geijn, Anatomy of High-Performance Matrix Multiplication, 2008).
// BLOCK: most rows of a block; PANELS, TILES: the panels and tiles whose rows are copied at a time.
#include "call.h"
#include "vector.h"

constexpr int VECTORS = 2;
static_assert(COLUMNS == VECTORS * LANES);

typedef F32 Tile[ROWS][VECTORS];

// Copies `width` columns of some rows, with zeros after the last column.
template <int width> static void copy(float* to, const float* from, int64_t rows, int64_t stride, int64_t left) {
    for (int64_t i = 0; i < rows; i++, to += width, from += stride) {
        if (left >= width)
            __builtin_memcpy(to, from, width * sizeof(float));
        else
            for (int64_t j = 0; j < width; j++) to[j] = j < left ? from[j] : 0.0f;
    }
}

static INLINE void add_products(Tile& tile, const float* strip, const float* panel, int64_t count) {
    for (int64_t step = 0; step < count; step++, strip += ROWS, panel += COLUMNS) {
        F32 b[VECTORS];
        UNROLL (c, VECTORS) b[c] = load(panel + c * LANES);
        UNROLL (i, ROWS)
            UNROLL (c, VECTORS) tile[i][c] = fma(F32(strip[i]), b[c], tile[i][c]);
    }
}

static void whole_tile(float* result, int64_t k, const float* strip, const float* panel, int64_t count, bool is_first) {
    Tile tile;
    UNROLL (i, ROWS)
        UNROLL (c, VECTORS) tile[i][c] = is_first ? F32(0.0f) : load(result + i * k + c * LANES);
    add_products(tile, strip, panel, count);
    UNROLL (i, ROWS)
        UNROLL (c, VECTORS) store(result + i * k + c * LANES, tile[i][c]);
}

static void part_of_tile(float* result, int64_t k, const float* strip, const float* panel, int64_t count, bool is_first,
                         int64_t rows, int64_t columns) {
    Tile tile;
    UNROLL (i, ROWS)
        UNROLL (c, VECTORS) tile[i][c] = 0.0f;
    add_products(tile, strip, panel, count);
    alignas(64) float edge[ROWS][COLUMNS];
    UNROLL (i, ROWS)
        UNROLL (c, VECTORS) store(edge[i] + c * LANES, tile[i][c]);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < columns; j++) result[i * k + j] = edge[i][j] + (is_first ? 0.0f : result[i * k + j]);
}

// `scratch` has BLOCK (PANELS COLUMNS + TILES ROWS) elements for each thread.
static void weight_grad(const float* a, const float* b, float* result, float* scratch, int64_t m, int64_t n, int64_t k,
                        int64_t threads) {
    int64_t all_panels = divided_up(k, COLUMNS), tiles = divided_up(n, ROWS), blocks = divided_up(m, BLOCK);
    parallel(threads, [=](int64_t t) {
        int64_t begin = all_panels * t / threads, end = all_panels * (t + 1) / threads;
        float* panel = scratch + t * BLOCK * (PANELS * COLUMNS + TILES * ROWS);
        float* strip = panel + BLOCK * PANELS * COLUMNS;
        for (int64_t block = 0; block < blocks; block++) {
            int64_t row = m * block / blocks, count = m * (block + 1) / blocks - row;
            for (int64_t first = begin; first < end; first += PANELS) {
                int64_t panels = min<int64_t>(PANELS, end - first);
                for (int64_t p = 0; p < panels; p++) {
                    int64_t column = (first + p) * COLUMNS;
                    copy<COLUMNS>(panel + p * BLOCK * COLUMNS, b + row * k + column, count, k, k - column);
                }
                for (int64_t chunk = 0; chunk < tiles; chunk += TILES) {
                    int64_t strips = min<int64_t>(TILES, tiles - chunk);
                    for (int64_t q = 0; q < strips; q++) {
                        int64_t column = (chunk + q) * ROWS;
                        copy<ROWS>(strip + q * BLOCK * ROWS, a + row * n + column, count, n, n - column);
                    }
                    for (int64_t p = 0; p < panels; p++)
                        for (int64_t q = 0; q < strips; q++) {
                            int64_t i = (chunk + q) * ROWS, j = (first + p) * COLUMNS;
                            const float *of_a = strip + q * BLOCK * ROWS, *of_b = panel + p * BLOCK * COLUMNS;
                            if (i + ROWS <= n && j + COLUMNS <= k)
                                whole_tile(result + i * k + j, k, of_a, of_b, count, block == 0);
                            else
                                part_of_tile(result + i * k + j, k, of_a, of_b, count, block == 0,
                                             min<int64_t>(ROWS, n - i), min<int64_t>(COLUMNS, k - j));
                        }
                }
            }
        }
    });
}
EXPORT(weight_grad)
