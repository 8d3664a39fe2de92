// Vectors of 16 elements, in as many registers as they take: the only file that knows instruction sets.
//
// x86-64 with AVX-512 (F, BW, VL) has one register for a vector, with AVX2, FMA and F16C two, and aarch64 with NEON
// four. Compilers take it from their options: GCC 12 and Clang 15, or newer.
#pragma once

#include <stdint.h>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#include <immintrin.h>
#define REGISTER 64
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>
#define REGISTER 32
#elif defined(__ARM_NEON) && defined(__aarch64__)
#include <arm_neon.h>
#define REGISTER 16
#else
#error "kernels need AVX2, FMA and F16C, or NEON"
#endif

#define INLINE inline __attribute__((always_inline))
// Of a function whose variables are to have all registers.
#define NOINLINE __attribute__((noinline))
// A function that is a part of the loop which it is given to.
#define BODY(...) [&](__VA_ARGS__) __attribute__((always_inline))
// A loop of constant length, whose variables are then registers.
#define UNROLL(i, count) _Pragma("GCC unroll 32") for (int i = 0; i < (count); i++)

constexpr int LANES = 16;

// ------------------------------------------------------------------------------------------------- one register

typedef float Floats __attribute__((vector_size(REGISTER)));
typedef int32_t Ints __attribute__((vector_size(REGISTER)));

// A comparison has the same type; a conditional expression chooses by element.
INLINE Floats choose(Ints condition, Floats a, Floats b) { return condition ? a : b; }
INLINE Ints choose(Ints condition, Ints a, Ints b) { return condition ? a : b; }
INLINE Ints as_ints(Floats x) { return (Ints)x; }
INLINE Floats as_floats(Ints x) { return (Floats)x; }
INLINE Ints to_ints(Floats x) { return __builtin_convertvector(x, Ints); }
INLINE Floats to_floats(Ints x) { return __builtin_convertvector(x, Floats); }
INLINE Ints shift_right_unsigned(Ints x, int count) {
    typedef uint32_t Unsigned __attribute__((vector_size(REGISTER)));
    return (Ints)((Unsigned)x >> count);
}

template <class V> INLINE V load_register(const void* place) {
    V x;
    __builtin_memcpy(&x, place, sizeof x);
    return x;
}

INLINE void store_register(void* place, Floats x) { __builtin_memcpy(place, &x, sizeof x); }
INLINE void store_register(void* place, Ints x) { __builtin_memcpy(place, &x, sizeof x); }

#if REGISTER == 64

INLINE Floats splat(float x) { return _mm512_set1_ps(x); }
INLINE Ints splat(int32_t x) { return (Ints)_mm512_set1_epi32(x); }
INLINE Floats fused(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
INLINE Floats root(Floats x) { return _mm512_sqrt_ps(x); }
INLINE Floats larger(Floats a, Floats b) { return _mm512_max_ps(a, b); }
INLINE Floats smaller(Floats a, Floats b) { return _mm512_min_ps(a, b); }
INLINE Ints larger(Ints a, Ints b) { return (Ints)_mm512_max_epi32((__m512i)a, (__m512i)b); }
INLINE Ints load_16_bits(const void* place) {
    return (Ints)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)place));
}
INLINE void store_16_bits(void* place, Ints x) {
    _mm256_storeu_si256((__m256i*)place, _mm512_cvtepi32_epi16((__m512i)x));
}
INLINE void store_8_bits(void* place, Ints x) { _mm_storeu_si128((__m128i*)place, _mm512_cvtepi32_epi8((__m512i)x)); }
INLINE Floats load_half_floats(const void* place) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)place)); }
// Sums of the products of neighbours, of 16 bits each.
INLINE Ints multiply_pairs(Ints a, Ints b) { return (Ints)_mm512_madd_epi16((__m512i)a, (__m512i)b); }
INLINE Ints upper_of_pairs(Ints x) { return (Ints)_mm512_srai_epi16((__m512i)x, 8); }
INLINE Ints lower_of_pairs(Ints x) { return upper_of_pairs((Ints)_mm512_slli_epi16((__m512i)x, 8)); }

#elif REGISTER == 32

INLINE Floats splat(float x) { return _mm256_set1_ps(x); }
INLINE Ints splat(int32_t x) { return (Ints)_mm256_set1_epi32(x); }
INLINE Floats fused(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
INLINE Floats root(Floats x) { return _mm256_sqrt_ps(x); }
INLINE Floats larger(Floats a, Floats b) { return _mm256_max_ps(a, b); }
INLINE Floats smaller(Floats a, Floats b) { return _mm256_min_ps(a, b); }
INLINE Ints larger(Ints a, Ints b) { return (Ints)_mm256_max_epi32((__m256i)a, (__m256i)b); }
INLINE Ints load_16_bits(const void* place) {
    return (Ints)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)place));
}
INLINE __m128i halves(Ints x, bool is_signed) {
    __m128i low = _mm256_castsi256_si128((__m256i)x), high = _mm256_extracti128_si256((__m256i)x, 1);
    return is_signed ? _mm_packs_epi32(low, high) : _mm_packus_epi32(low, high);
}
INLINE void store_16_bits(void* place, Ints x) { _mm_storeu_si128((__m128i*)place, halves(x, false)); }
INLINE void store_8_bits(void* place, Ints x) {
    _mm_storel_epi64((__m128i*)place, _mm_packs_epi16(halves(x, true), _mm_setzero_si128()));
}
INLINE Floats load_half_floats(const void* place) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)place)); }
INLINE Ints multiply_pairs(Ints a, Ints b) { return (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b); }
INLINE Ints upper_of_pairs(Ints x) { return (Ints)_mm256_srai_epi16((__m256i)x, 8); }
INLINE Ints lower_of_pairs(Ints x) { return upper_of_pairs((Ints)_mm256_slli_epi16((__m256i)x, 8)); }

#else

INLINE Floats splat(float x) { return vdupq_n_f32(x); }
INLINE Ints splat(int32_t x) { return vdupq_n_s32(x); }
INLINE Floats fused(Floats a, Floats b, Floats c) { return vfmaq_f32(c, a, b); }
INLINE Floats root(Floats x) { return vsqrtq_f32(x); }
INLINE Floats larger(Floats a, Floats b) { return choose(a > b, a, b); }
INLINE Floats smaller(Floats a, Floats b) { return choose(a < b, a, b); }
INLINE Ints larger(Ints a, Ints b) { return vmaxq_s32(a, b); }
INLINE Ints load_16_bits(const void* place) { return (Ints)vmovl_u16(vld1_u16((const uint16_t*)place)); }
INLINE void store_16_bits(void* place, Ints x) { vst1_u16((uint16_t*)place, vmovn_u32((uint32x4_t)x)); }
INLINE void store_8_bits(void* place, Ints x) {
    int8x8_t bytes = vmovn_s16(vcombine_s16(vmovn_s32(x), vdup_n_s16(0)));
    __builtin_memcpy(place, &bytes, 4);
}
INLINE Floats load_half_floats(const void* place) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t*)place)));
}
INLINE Ints multiply_pairs(Ints a, Ints b) {
    int16x8_t x = (int16x8_t)a, y = (int16x8_t)b;
    return vpaddq_s32(vmull_s16(vget_low_s16(x), vget_low_s16(y)), vmull_s16(vget_high_s16(x), vget_high_s16(y)));
}
INLINE Ints upper_of_pairs(Ints x) { return (Ints)vshrq_n_s16((int16x8_t)x, 8); }
INLINE Ints lower_of_pairs(Ints x) { return upper_of_pairs((Ints)vshlq_n_s16((int16x8_t)x, 8)); }

#endif

// ---------------------------------------------------------------------------------------------------- 16 elements

constexpr int REGISTERS = 64 / REGISTER;
constexpr int LANES_OF_REGISTER = LANES / REGISTERS;

struct I32;

// Each function applies that of a register to all of them.
template <class V> struct Registers {
    V of[REGISTERS];
};

template <class V, class Function> INLINE Registers<V> each_register(Function function) {
    Registers<V> result;
    UNROLL (i, REGISTERS) result.of[i] = function(i);
    return result;
}

struct Mask {
    Registers<Ints> r;
    friend INLINE Mask operator&(Mask a, Mask b) {
        return {each_register<Ints>(BODY(int i) { return a.r.of[i] & b.r.of[i]; })};
    }
};

// A function of the registers of up to three vectors; `i` is the number of a register.
#define EACH(type, value) each_register<type>(BODY(int i) { return value; })

struct F32 {
    Registers<Floats> r;
    F32() = default;
    INLINE F32(Registers<Floats> r) : r(r) {}
    INLINE F32(float x) : r(EACH(Floats, splat(x))) {}
    friend INLINE F32 operator+(F32 a, F32 b) { return EACH(Floats, a.r.of[i] + b.r.of[i]); }
    friend INLINE F32 operator-(F32 a, F32 b) { return EACH(Floats, a.r.of[i] - b.r.of[i]); }
    friend INLINE F32 operator*(F32 a, F32 b) { return EACH(Floats, a.r.of[i] * b.r.of[i]); }
    friend INLINE F32 operator/(F32 a, F32 b) { return EACH(Floats, a.r.of[i] / b.r.of[i]); }
    friend INLINE F32 operator-(F32 a) { return EACH(Floats, -a.r.of[i]); }
    friend INLINE Mask operator<(F32 a, F32 b) { return {EACH(Ints, a.r.of[i] < b.r.of[i])}; }
    friend INLINE Mask operator>(F32 a, F32 b) { return b < a; }
    friend INLINE Mask operator<=(F32 a, F32 b) { return {EACH(Ints, a.r.of[i] <= b.r.of[i])}; }
    friend INLINE Mask operator>=(F32 a, F32 b) { return b <= a; }
    friend INLINE Mask operator==(F32 a, F32 b) { return {EACH(Ints, a.r.of[i] == b.r.of[i])}; }
};

struct I32 {
    Registers<Ints> r;
    I32() = default;
    INLINE I32(Registers<Ints> r) : r(r) {}
    INLINE I32(int32_t x) : r(EACH(Ints, splat(x))) {}
    friend INLINE I32 operator+(I32 a, I32 b) { return EACH(Ints, a.r.of[i] + b.r.of[i]); }
    friend INLINE I32 operator-(I32 a, I32 b) { return EACH(Ints, a.r.of[i] - b.r.of[i]); }
    friend INLINE I32 operator&(I32 a, I32 b) { return EACH(Ints, a.r.of[i] & b.r.of[i]); }
    friend INLINE I32 operator|(I32 a, I32 b) { return EACH(Ints, a.r.of[i] | b.r.of[i]); }
    friend INLINE I32 operator<<(I32 a, int count) { return EACH(Ints, a.r.of[i] << count); }
    // Zeros move into the upper bits.
    friend INLINE I32 operator>>(I32 a, int count) { return EACH(Ints, shift_right_unsigned(a.r.of[i], count)); }
    friend INLINE Mask operator<(I32 a, I32 b) { return {EACH(Ints, a.r.of[i] < b.r.of[i])}; }
    friend INLINE Mask operator>(I32 a, I32 b) { return b < a; }
    friend INLINE Mask operator<=(I32 a, I32 b) { return {EACH(Ints, a.r.of[i] <= b.r.of[i])}; }
    friend INLINE Mask operator>=(I32 a, I32 b) { return b <= a; }
};

INLINE F32 select(Mask condition, F32 a, F32 b) {
    return EACH(Floats, choose(condition.r.of[i], a.r.of[i], b.r.of[i]));
}
INLINE I32 select(Mask condition, I32 a, I32 b) { return EACH(Ints, choose(condition.r.of[i], a.r.of[i], b.r.of[i])); }
// a * b + c, rounded once.
INLINE F32 fma(F32 a, F32 b, F32 c) { return EACH(Floats, fused(a.r.of[i], b.r.of[i], c.r.of[i])); }
INLINE F32 sqrt(F32 x) { return EACH(Floats, root(x.r.of[i])); }
// If one is NaN, the second.
INLINE F32 max(F32 a, F32 b) { return EACH(Floats, larger(a.r.of[i], b.r.of[i])); }
INLINE F32 min(F32 a, F32 b) { return EACH(Floats, smaller(a.r.of[i], b.r.of[i])); }
INLINE I32 max(I32 a, I32 b) { return EACH(Ints, larger(a.r.of[i], b.r.of[i])); }
INLINE I32 bits_of(F32 x) { return EACH(Ints, as_ints(x.r.of[i])); }
INLINE F32 of_bits(I32 x) { return EACH(Floats, as_floats(x.r.of[i])); }
// Toward zero.
INLINE I32 to_int(F32 x) { return EACH(Ints, to_ints(x.r.of[i])); }
INLINE F32 to_float(I32 x) { return EACH(Floats, to_floats(x.r.of[i])); }
// To the nearest integer, ties to even, of numbers below 2^22.
INLINE F32 nearest(F32 x) { return x + 12582912.0f - 12582912.0f; }
INLINE I32 lane_numbers() {
    alignas(64) static const int32_t numbers[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return EACH(Ints, load_register<Ints>(numbers + i * LANES_OF_REGISTER));
}

// Sums of bytes with products: of four unsigned ones of each word and four signed ones.
INLINE I32 four_products(I32 sums, I32 unsigned_bytes, int32_t signed_bytes) {
#ifdef __AVX512VNNI__
    return EACH(Ints, (Ints)_mm512_dpbusd_epi32((__m512i)sums.r.of[i], (__m512i)unsigned_bytes.r.of[i],
                                                _mm512_set1_epi32(signed_bytes)));
#else
    I32 even = unsigned_bytes & 0x00FF00FF, odd = (unsigned_bytes >> 8) & 0x00FF00FF, word = signed_bytes;
    sums = sums + EACH(Ints, multiply_pairs(even.r.of[i], lower_of_pairs(word.r.of[i])));
    return sums + EACH(Ints, multiply_pairs(odd.r.of[i], upper_of_pairs(word.r.of[i])));
#endif
}

#ifdef __AVX512BF16__
// sums + x[1] * y[1] + x[0] * y[0] of pairs of bfloat16. Each sum is rounded to float32; numbers below the least normal
// one count as zero.
INLINE F32 dot(F32 sums, I32 x, I32 y) {
    return EACH(Floats, _mm512_dpbf16_ps(sums.r.of[i], (__m512bh)x.r.of[i], (__m512bh)y.r.of[i]));
}
#endif

// Four elements of each of four rows, `stride` elements apart.
INLINE F32 load_fours(const float* place, int64_t stride) {
#if REGISTER == 16
    return EACH(Floats, load_register<Floats>(place + i * stride));
#else
    __m256 low = _mm256_set_m128(_mm_loadu_ps(place + stride), _mm_loadu_ps(place));
    __m256 high = _mm256_set_m128(_mm_loadu_ps(place + 3 * stride), _mm_loadu_ps(place + 2 * stride));
#if REGISTER == 32
    return Registers<Floats>{low, high};
#else
    __m512d both = _mm512_insertf64x4(_mm512_castps_pd(_mm512_castps256_ps512(low)), _mm256_castps_pd(high), 1);
    return Registers<Floats>{_mm512_castpd_ps(both)};
#endif
#endif
}

// Of the sums of four neighbours in a row, (a + b) + (c + d), four.
INLINE void store_sums_of_four(float* place, F32 x) {
#if REGISTER == 16
    Floats first = vpaddq_f32(x.r.of[0], x.r.of[1]), second = vpaddq_f32(x.r.of[2], x.r.of[3]);
    store_register(place, (Floats)vpaddq_f32(first, second));
#else
#if REGISTER == 64
    __m256 low = _mm512_castps512_ps256(x.r.of[0]);
    __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x.r.of[0]), 1));
#else
    __m256 low = x.r.of[0], high = x.r.of[1];
#endif
    __m256 twos = _mm256_hadd_ps(low, high);
    __m128 fours = _mm_hadd_ps(_mm256_castps256_ps128(twos), _mm256_extractf128_ps(twos, 1));
    _mm_storeu_ps(place, _mm_shuffle_ps(fours, fours, 0xD8));
#endif
}

// --------------------------------------------------------------------------------------------------------- memory

typedef float float32;
struct bfloat16 {
    uint16_t bits;
};
struct float16 {
    uint16_t bits;
};

// The number of elements of a whole vector, known to the compiler.
struct Whole {
    constexpr operator int() const { return LANES; }
};

INLINE F32 load(const float* place, Whole = {}) {
    return EACH(Floats, load_register<Floats>(place + i * LANES_OF_REGISTER));
}
INLINE I32 load(const int32_t* place, Whole = {}) {
    return EACH(Ints, load_register<Ints>(place + i * LANES_OF_REGISTER));
}
INLINE I32 load(const uint32_t* place, Whole = {}) { return load((const int32_t*)place); }
INLINE I32 load_bits(const bfloat16* place) { return EACH(Ints, load_16_bits(place + i * LANES_OF_REGISTER)); }
INLINE F32 load(const bfloat16* place, Whole = {}) { return of_bits(load_bits(place) << 16); }
INLINE F32 load(const float16* place, Whole = {}) {
    return EACH(Floats, load_half_floats(place + i * LANES_OF_REGISTER));
}

// The upper 16 bits of float32, rounded to the nearest, ties to even, in place.
INLINE I32 rounded_bits(I32 bits) { return bits + 0x7FFF + ((bits >> 16) & 1); }
INLINE I32 narrow(F32 x) {
    I32 bits = bits_of(x);
    // Rounding could carry the bits of NaN into those of another number.
    return select((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded_bits(bits) >> 16);
}

INLINE void store(float* place, F32 x, Whole = {}) {
    UNROLL (i, REGISTERS) store_register(place + i * LANES_OF_REGISTER, x.r.of[i]);
}
INLINE void store(int32_t* place, I32 x, Whole = {}) {
    UNROLL (i, REGISTERS) store_register(place + i * LANES_OF_REGISTER, x.r.of[i]);
}
INLINE void store(uint32_t* place, I32 x, Whole = {}) { store((int32_t*)place, x); }
INLINE void store(bfloat16* place, F32 x, Whole = {}) {
    I32 bits = narrow(x);
    UNROLL (i, REGISTERS) store_16_bits(place + i * LANES_OF_REGISTER, bits.r.of[i]);
}
INLINE void store_bytes(int8_t* place, I32 x) {
    UNROLL (i, REGISTERS) store_8_bits(place + i * LANES_OF_REGISTER, x.r.of[i]);
}

// Some elements; the others are zero.
template <class T> INLINE F32 load(const T* place, int count) {
    alignas(64) T whole[LANES] = {};
    for (int i = 0; i < count; i++) whole[i] = place[i];
    return load(whole);
}
template <class T> INLINE void store(T* place, F32 x, int count) {
    alignas(64) T whole[LANES];
    store(whole, x);
    for (int i = 0; i < count; i++) place[i] = whole[i];
}
INLINE Mask first_lanes(int count) { return lane_numbers() < count; }

INLINE float widen(float x) { return x; }
INLINE float widen(bfloat16 x) {
    uint32_t bits = (uint32_t)x.bits << 16;
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
}

// A value rounded to an element type. NaN stays NaN if its lower 16 bits are zero, as after arithmetic with the type.
template <class T> INLINE F32 rounded_to(F32 x);
template <> INLINE F32 rounded_to<float>(F32 x) { return x; }
template <> INLINE F32 rounded_to<bfloat16>(F32 x) { return of_bits(rounded_bits(bits_of(x)) & (int32_t)0xFFFF0000); }

// Reads a line of data ahead into the second cache, which never fails.
INLINE void prefetch(const void* place) { __builtin_prefetch(place, 0, 2); }

// Calls `body(j, count)` for each vector of a row: whole ones, then what is left.
template <class Body> INLINE void each_vector(int64_t width, const Body& body) {
    int64_t j = 0;
#pragma GCC unroll 2
    for (; j + LANES <= width; j += LANES) body(j, Whole{});
    if (j < width) body(j, (int)(width - j));
}

// Calls `body(row, size, block)` for each block of the most rows, then for the 2 and the 1 that are left. The size is a
// `Constant`; `block` is the number of the block.
constexpr int MOST_OF_BLOCK = 4;
template <int number> struct Constant {
    static constexpr int value = number;
};
template <class Body> INLINE void each_block(int64_t begin, int64_t count, const Body& body) {
    int64_t row = begin, block = 0;
    for (; row + MOST_OF_BLOCK <= begin + count; row += MOST_OF_BLOCK) body(row, Constant<MOST_OF_BLOCK>{}, block++);
    if (count % MOST_OF_BLOCK >= 2) {
        body(row, Constant<2>{}, block);
        row += 2;
    }
    if (count % 2) body(row, Constant<1>{}, block);
}

// Reductions: of registers, of halves of a register, and of the last four elements.
typedef float FourFloats __attribute__((vector_size(16)));
typedef int32_t FourInts __attribute__((vector_size(16)));
template <class Operation> INLINE FourFloats folded(F32 x, const Operation& operation) {
#if REGISTER == 64
    __m512d all = _mm512_castps_pd(x.r.of[0]);
    __m256 half = operation(_mm512_castps512_ps256(x.r.of[0]), _mm256_castpd_ps(_mm512_extractf64x4_pd(all, 1)));
    return operation(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
#elif REGISTER == 32
    __m256 half = operation(x.r.of[0], x.r.of[1]);
    return operation(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
#else
    return operation(operation(x.r.of[0], x.r.of[1]), operation(x.r.of[2], x.r.of[3]));
#endif
}
template <class V> struct IntsLike {
    typedef int32_t Type __attribute__((vector_size(sizeof(V))));
};
// An operation on the bits of float vectors, as integers.
template <class Operation> INLINE FourInts folded(I32 x, const Operation& operation) {
    return (FourInts)folded(
        of_bits(x), BODY(auto a, auto b) {
            typedef typename IntsLike<decltype(a)>::Type Ints;
            return (decltype(a))operation((Ints)a, (Ints)b);
        });
}
#define FOLD(x, operation) folded(x, BODY(auto a, auto b) { return operation; })

INLINE float sum(F32 x) {
    FourFloats four = FOLD(x, a + b);
    return (four[0] + four[1]) + (four[2] + four[3]);
}
INLINE int32_t sum(I32 x) {
    FourInts four = FOLD(x, a + b);
    return (four[0] + four[1]) + (four[2] + four[3]);
}
template <class T> INLINE T larger_of(T a, T b) { return a > b ? a : b; }
INLINE float largest(F32 x) {
    FourFloats four = FOLD(x, (a > b ? a : b));
    return larger_of(larger_of(four[0], four[1]), larger_of(four[2], four[3]));
}
INLINE int32_t largest(I32 x) {
    FourInts four = FOLD(x, (a > b ? a : b));
    return larger_of(larger_of(four[0], four[1]), larger_of(four[2], four[3]));
}
