// Vectors of sixteen, in the compiler's own vector types: one AVX-512 register each, or two of AVX2. Only what those
// types cannot say (dot products of bytes and of bf16, half precision) is written per instruction set.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint8_t u8x64 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef int8_t s8x16 __attribute__((vector_size(16)));

template <class V, class T> static inline V load(const T* p) {
    V v;
    memcpy(&v, p, sizeof v);
    return v;
}
template <class V, class T> static inline void store(T* p, V v) { memcpy(p, &v, sizeof v); }
static inline f32x16 splat(float x) { return x - f32x16{}; }
static inline f32x16 choose(i32x16 mask, f32x16 yes, f32x16 no) { return mask ? yes : no; }

// a * b + c, rounded once. Contraction is off and every one is written out, so that a row's result does not depend on
// how many rows the compiler had in hand: a token's logits are the same in any batch.
static inline f32x16 fma16(f32x16 a, f32x16 b, f32x16 c) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    f32x16 out;
    for (int i = 0; i < 2; i++) {
        __m256 x = load<__m256>((float*)&a + 8 * i), y = load<__m256>((float*)&b + 8 * i);
        store((float*)&out + 8 * i, _mm256_fmadd_ps(x, y, load<__m256>((float*)&c + 8 * i)));
    }
    return out;
#endif
}

#if defined(__AVX512F__)
static inline float highest(f32x16 v) { return _mm512_reduce_max_ps((__m512)v); }
static inline int32_t highest(i32x16 v) { return _mm512_reduce_max_epi32((__m512i)v); }
static inline float total(f32x16 v) { return _mm512_reduce_add_ps((__m512)v); }
static inline int32_t total(i32x16 v) { return _mm512_reduce_add_epi32((__m512i)v); }
static inline f32x16 from_half(const void* p) { return (f32x16)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
static inline u16x16 to_half(f32x16 v) { return (u16x16)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT); }
#else
template <class V> static inline auto highest(V v) {
    auto most = v[0];
    for (int i = 1; i < 16; i++) most = v[i] > most ? v[i] : most;
    return most;
}
template <class V> static inline auto sum_of(V v) {
    auto sum = v[0];
    for (int i = 1; i < 16; i++) sum += v[i];
    return sum;
}
static inline float total(f32x16 v) { return sum_of(v); }
static inline int32_t total(i32x16 v) { return sum_of(v); }
static inline f32x16 from_half(const void* p) {
    float out[16];
    for (int i = 0; i < 16; i += 8) {
        _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)((const uint16_t*)p + i))));
    }
    return load<f32x16>(out);
}
static inline u16x16 to_half(f32x16 v) {
    uint16_t out[16];
    float in[16];
    store(in, v);
    for (int i = 0; i < 16; i += 8) {
        _mm_storeu_si128((__m128i*)(out + i), _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT));
    }
    return load<u16x16>(out);
}
#endif

static inline u32x16 wide16(const void* p) { return __builtin_convertvector(load<u16x16>((const uint16_t*)p), u32x16); }
static inline f32x16 from_bf16(const void* p) {
    return (f32x16)(wide16(p) << 16);
}
// To the nearest, ties to even.
static inline u16x16 to_bf16(f32x16 v) {
#if defined(__AVX512BF16__)
    return (u16x16)_mm512_cvtneps_pbh((__m512)v);
#else
    u32x16 bits = (u32x16)v;
    return __builtin_convertvector((bits + 0x7fff + ((bits >> 16) & 1)) >> 16, u16x16);
#endif
}

// sums[i] += four unsigned codes of lane i times four signed activations, the same for every lane.
static inline i32x16 dot4(i32x16 sums, u8x64 codes, int32_t activations) {
#if defined(__AVX512VNNI__)
    return (i32x16)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)codes, _mm512_set1_epi32(activations));
#else
    // Products of two pairs fit 16 bits only for small codes, so widen first.
    int32_t out[16];
    uint8_t bytes[64];
    store(bytes, codes);
    const __m256i a = _mm256_cvtepi8_epi16(_mm_set1_epi32(activations));
    for (int i = 0; i < 4; i++) {
        __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)(bytes + 16 * i)));
        __m256i pairs = _mm256_madd_epi16(wide, a);
        __m128i low = _mm256_castsi256_si128(pairs), high = _mm256_extracti128_si256(pairs, 1);
        _mm_storeu_si128((__m128i*)(out + 4 * i), _mm_hadd_epi32(low, high));
    }
    return sums + load<i32x16>(out);
#endif
}

// sums[i] += two bf16 weights of lane i times two bf16 activations, the same for every lane.
static inline f32x16 dot2(f32x16 sums, u32x16 weights, uint32_t activations) {
#if defined(__AVX512BF16__)
    return (f32x16)_mm512_dpbf16_ps((__m512)sums, (__m512bh)weights, (__m512bh)_mm512_set1_epi32(activations));
#else
    float low, high;
    uint32_t low_bits = activations << 16, high_bits = activations & 0xffff0000u;
    memcpy(&low, &low_bits, 4);
    memcpy(&high, &high_bits, 4);
    return fma16((f32x16)(weights & 0xffff0000u), splat(high), fma16((f32x16)(weights << 16), splat(low), sums));
#endif
}

// e^x for x <= 0, relative error below 3e-7; 0 below x = -87.
static inline f32x16 exp16(f32x16 x) {
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
    f32x16 low = splat(-87.0f);
    f32x16 y = choose(x < low, low, x);  // NaN stays NaN
    f32x16 shifted = fma16(y, splat(1.44269504f), splat(magic));
    f32x16 n = shifted - magic;
    f32x16 r = fma16(n, splat(2.12194440e-4f), fma16(n, splat(-0.693359375f), y));
    f32x16 p = splat(1.9875691500e-4f);
    for (float next : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f}) {
        p = fma16(p, r, splat(next));
    }
    p = fma16(p * r, r, r + 1.0f);
    i32x16 power = ((i32x16)shifted - 0x4b400000 + 127) << 23;
    return choose(x < low, f32x16{}, p * (f32x16)power);
}

// Sixteen rows of sixteen, in place: v[i][j] becomes v[j][i].
static inline void transpose16(f32x16 v[16]) {
    const i32x16 lo4 = {0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29};
    const i32x16 hi4 = {2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31};
    const i32x16 lo8 = {0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29};
    const i32x16 hi8 = {2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31};
    const i32x16 even = {0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27};  // quarters 0 and 2 of each
    const i32x16 odd = {4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31};  // quarters 1 and 3
    f32x16 t[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i += 2) {
        t[i] = __builtin_shuffle(v[i], v[i + 1], lo4);
        t[i + 1] = __builtin_shuffle(v[i], v[i + 1], hi4);
    }
    // Lane 4k + c of u[4g + c'] holds column 4k + c' of row 4g + c.
    f32x16 u[16];
#pragma GCC unroll 4
    for (int g = 0; g < 16; g += 4) {
        u[g] = __builtin_shuffle(t[g], t[g + 2], lo8);
        u[g + 1] = __builtin_shuffle(t[g], t[g + 2], hi8);
        u[g + 2] = __builtin_shuffle(t[g + 1], t[g + 3], lo8);
        u[g + 3] = __builtin_shuffle(t[g + 1], t[g + 3], hi8);
    }
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
        f32x16 a = __builtin_shuffle(u[c], u[4 + c], even), b = __builtin_shuffle(u[c], u[4 + c], odd);
        f32x16 d = __builtin_shuffle(u[8 + c], u[12 + c], even), e = __builtin_shuffle(u[8 + c], u[12 + c], odd);
        v[c] = __builtin_shuffle(a, d, even);
        v[4 + c] = __builtin_shuffle(b, e, even);
        v[8 + c] = __builtin_shuffle(a, d, odd);
        v[12 + c] = __builtin_shuffle(b, e, odd);
    }
}
