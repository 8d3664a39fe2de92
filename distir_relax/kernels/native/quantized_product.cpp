// Products with weights of BITS bits, 8 or 4, of inputs that are rounded to 8 bits: sums are int32, and exact.
//
// A weight is stored in panels of PANEL columns. A word of 32 bits has four numbers of a column, of consecutive rows,
// which `four_products` multiplies. They are unsigned, as the instruction takes them: those of 8 bits have 128 added,
// and 128 times the sum of a row's inputs is subtracted from the products.
//
//     8 bits                w[n / PANEL, inner / 4, PANEL], and a float32 scale for each column
//     8 bits, GROUPED       w[n / PANEL, inner / GROUP] records: 8 x PANEL words, PANEL scales
//     4 bits, GROUPED       w[n / PANEL, inner / GROUP] records: 4 x PANEL words, PANEL scales, PANEL minimums
//
// Scales and minimums of groups are float16. So a panel is read in one stream. Word b of 4 bits has the rows 4 b to
// 4 b + 3 of the group in the lower halves of its bytes, and those 16 rows later in the upper halves. A row's results
// have the same bits whatever the number of rows and threads. DTYPE: of x and y; the bias is float32.
#include "call.h"
#include "vector.h"

// Most rows whose sums of a panel are in registers.
constexpr int ROWS = MOST_OF_BLOCK;
// Bytes by which a panel is read ahead.
constexpr int AHEAD = BITS == 4 ? 12288 : 5120;
// With fewer rows, starting the threads takes longer than rounding.
constexpr int SERIAL_ROWS = 4;
constexpr int VECTORS = PANEL / LANES;
constexpr int LINE = 64;
// 1e-30 as the bits of float32: numbers are taken for zero if all of a group are smaller.
constexpr int32_t LEAST_BITS = 0x0DA24260;

// The words of a group and the numbers after them, or of a row of the panel.
struct Record {
#if GROUPED
    uint32_t words[GROUP * BITS / 32][PANEL];
    float16 scales[PANEL];
#if BITS == 4
    float16 minimums[PANEL];
#endif
#else
    uint32_t words[1][PANEL];
#endif
};
constexpr int INPUTS_OF_RECORD = GROUPED ? GROUP : 4;

// The number that offsets a group's products: the sum of the inputs times -128, or times their scale.
#if BITS == 4
typedef float Offset;
#else
typedef int32_t Offset;
#endif

struct Product {
    const Record* w;
    const float *scales, *bias;
    int64_t n, inner;
    const DTYPE* x;
    DTYPE* y;
    int8_t* rounded;
    float* row_scales;
    Offset* row_offsets;
    int64_t threads;
    int64_t group() const { return GROUPED ? GROUP : inner; }
    int64_t groups() const { return inner / group(); }
    int64_t records() const { return inner / INPUTS_OF_RECORD; }
};

// Rounds a row to 8 bits, in groups: the scale of one is the largest absolute value over 127, or NaN if it has one.
static void round_row(const Product& of, int64_t r) {
    int64_t group = of.group();
    for (int64_t c = 0; c < of.groups(); c++) {
        const DTYPE* x = of.x + r * of.inner + c * group;
        I32 most = LEAST_BITS, total = 0;
        // The bits of floats without their signs have the order of the absolute values, and those of NaN are larger.
        for (int64_t i = 0; i < group; i += LANES) most = max(most, bits_of(load(x + i)) & 0x7FFFFFFF);
        int32_t bits = largest(most);
        float limit;
        __builtin_memcpy(&limit, &bits, sizeof limit);
        float inverse = 127.0f / limit, scale = limit / 127.0f;
        for (int64_t i = 0; i < group; i += LANES) {
            I32 numbers = to_int(nearest(load(x + i) * inverse));
            total = total + numbers;
            store_bytes(of.rounded + r * of.inner + c * group + i, numbers);
        }
        of.row_scales[r * of.groups() + c] = scale;
        of.row_offsets[r * of.groups() + c] = BITS == 4 ? (Offset)(sum(total) * scale) : (Offset)(sum(total) * -128);
    }
}

static INLINE int32_t word_of(const Product& of, int64_t row, int64_t word) {
    int32_t found;
    __builtin_memcpy(&found, of.rounded + row * of.inner + word * 4, sizeof found);
    return found;
}

// The words with the rows from 4 b on of a group, as bytes.
static INLINE I32 weights_of(const Record& record, int b, int v) {
    if (BITS == 8) return load(record.words[b] + v * LANES);
    constexpr int HALVES = GROUP / 8;
    I32 packed = load(record.words[b % HALVES] + v * LANES);
    return (b >= HALVES ? packed >> 4 : packed) & 0x0F0F0F0F;
}

// Reads ahead while a record of panel `p` is used.
//
// A panel's first block of rows waits for the memory, and reads AHEAD bytes ahead in the same panel, then in the
// thread's next one. Later blocks find the panel in a cache. They read all of the next one, so that the memory and the
// processor work at the same time.
template <int count> static INLINE void read_ahead(const Product& of, int64_t p, int64_t c, int64_t block) {
    int64_t step = c, panel = p, records = of.records();
    if (count == ROWS && block > 0)
        panel += of.threads;
    else
        step += AHEAD / (int64_t)sizeof(Record);
    if (step >= records) {
        step -= records;
        panel += of.threads;
    }
    const char* place = (const char*)(of.w + panel * records + step);
    UNROLL (k, (int)(sizeof(Record) + LINE - 1) / LINE) prefetch(place + k * LINE);
}

template <int count>
static INLINE void store_rows(const Product& of, int64_t p, int64_t row, F32 (&y)[count][VECTORS]) {
    UNROLL (r, count)
        UNROLL (v, VECTORS) {
            int64_t column = p * PANEL + v * LANES;
            DTYPE* place = of.y + (row + r) * of.n + column;
            if (column + LANES <= of.n)
                store(place, y[r][v]);
            else if (column < of.n)
                store(place, y[r][v], (int)(of.n - column));
        }
}

// Computes `count` rows from `row` on, of panel `p`; `block` is the number of the block of the most rows.
template <int count> static NOINLINE void compute_rows(const Product& of, int64_t p, int64_t row, int64_t block) {
    F32 y[count][VECTORS];
    I32 sums[count][VECTORS];
    const Record* panel = of.w + p * of.records();
    UNROLL (r, count)
        UNROLL (v, VECTORS) {
            y[r][v] = load(of.bias + p * PANEL + v * LANES);
            if (!GROUPED) sums[r][v] = (int32_t)of.row_offsets[row + r];
        }
    for (int64_t c = 0; c < of.records(); c++) {
        const Record& record = panel[c];
        read_ahead<count>(of, p, c, block);
        if (GROUPED)
            UNROLL (r, count)
                UNROLL (v, VECTORS) sums[r][v] = BITS == 4 ? 0 : (int32_t)of.row_offsets[(row + r) * of.groups() + c];
        UNROLL (b, INPUTS_OF_RECORD / 4)
            UNROLL (v, VECTORS) {
                I32 weights = weights_of(record, b, v);
                UNROLL (r, count)
                    sums[r][v] =
                        four_products(sums[r][v], weights, word_of(of, row + r, c * (INPUTS_OF_RECORD / 4) + b));
            }
#if GROUPED
        UNROLL (v, VECTORS) {
            F32 scale = load(record.scales + v * LANES);
            UNROLL (r, count) {
                int64_t number = (row + r) * of.groups() + c;
                y[r][v] = fma(to_float(sums[r][v]) * of.row_scales[number], scale, y[r][v]);
#if BITS == 4
                y[r][v] = fma(F32(of.row_offsets[number]), load(record.minimums + v * LANES), y[r][v]);
#endif
            }
        }
#endif
    }
    if (!GROUPED)
        UNROLL (r, count)
            UNROLL (v, VECTORS) {
                F32 scale = load(of.scales + p * PANEL + v * LANES) * of.row_scales[row + r];
                y[r][v] = fma(to_float(sums[r][v]), scale, y[r][v]);
            }
    store_rows<count>(of, p, row, y);
}

// x (rows, inner), w, scales (n), bias (n) -> y (rows, n); `n` is rounded up to panels. `scratch` has `inner` bytes for
// each row, and 8 for each of its groups.
static void quantized_product(const Record* w, const float* scales, const float* bias, int64_t n, int64_t inner,
                              const DTYPE* x, DTYPE* y, char* scratch, int64_t rows, int64_t threads) {
    Product of = {w, scales, bias, n, inner, x, y, (int8_t*)scratch, nullptr, nullptr, threads};
    of.row_scales = (float*)(scratch + rows * inner);
    of.row_offsets = (Offset*)(of.row_scales + rows * of.groups());
    parallel(rows < SERIAL_ROWS ? 1 : threads, [=](int64_t t) {
        for (int64_t r = t; r < rows; r += rows < SERIAL_ROWS ? 1 : threads) round_row(of, r);
    });
    parallel(threads, [=](int64_t t) {
        // Threads take turns, so that together they read one stream.
        for (int64_t p = t; p * PANEL < n; p += threads)
            each_block(
                0, rows, BODY(int64_t row, auto size, int64_t block) {
                    compute_rows<decltype(size)::value>(of, p, row, block);
                });
    });
}
EXPORT(quantized_product)
