// Statistics of a row, which norms and their gradients compute alike.
#pragma once

#include "vector.h"

// The mean, 0 unless a norm subtracts it, and one over the deviation from it.
struct Statistics {
    float mean, scale;
};

// Zeros in the lanes after `count`.
INLINE F32 first_of(F32 x, int count) { return select(first_lanes(count), x, 0.0f); }
INLINE F32 first_of(F32 x, Whole) { return x; }

// Calls `body(j, count, sums)` for each vector of a row, which adds to `sums`. Two sets of them take turns, so that an
// addition need not wait for the one before.
template <int count, class Body> INLINE void add_up(int64_t width, F32 (&sums)[count], const Body& body) {
    F32 others[count];
    UNROLL (i, count) sums[i] = others[i] = 0.0f;
    int64_t j = 0;
    for (; j + 2 * LANES <= width; j += 2 * LANES) {
        body(j, Whole{}, sums);
        body(j + LANES, Whole{}, others);
    }
    each_vector(width - j, BODY(int64_t i, auto lanes) { body(j + i, lanes, sums); });
    UNROLL (i, count) sums[i] = sums[i] + others[i];
}

// The mean of a row, 0 unless it is `is_centred`.
template <class T> INLINE float mean_of(const T* row, int64_t width, bool is_centred) {
    if (!is_centred) return 0.0f;
    F32 totals[1];
    add_up(width, totals, BODY(int64_t j, auto count, F32* sums) { sums[0] = sums[0] + load(row + j, count); });
    return sum(totals[0]) / width;
}

// One over the deviation, from the sum of squares.
INLINE float scale_of(F32 squares, int64_t width, float epsilon) {
    return 1.0f / __builtin_sqrtf(sum(squares) / width + epsilon);
}

template <class T> INLINE Statistics statistics(const T* row, int64_t width, float epsilon, bool is_centred) {
    float mean = mean_of(row, width, is_centred);
    F32 squares[1];
    add_up(
        width, squares, BODY(int64_t j, auto count, F32* sums) {
            F32 value = first_of(load(row + j, count) - mean, count);
            sums[0] = fma(value, value, sums[0]);
        });
    return {mean, scale_of(squares[0], width, epsilon)};
}
