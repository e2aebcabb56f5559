// One float vector type per instruction set; each library is compiled for one of them (see setup.py).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace wr {

// float16 and bfloat16 are kept as their bits.
using half_t = uint16_t;

inline float half_to_float(half_t bits) {
#if defined(__F16C__)
    return _cvtsh_ss(bits);
#else
    // Exponent and mantissa move into place; the product restores the bias and makes subnormals right.
    const uint32_t shifted = static_cast<uint32_t>(bits & 0x7fff) << 13;
    float value;
    std::memcpy(&value, &shifted, 4);
    value *= 0x1p112f;
    if ((bits & 0x7c00) == 0x7c00) value = (bits & 0x3ff) ? NAN : INFINITY;
    return (bits & 0x8000) ? -value : value;
#endif
}

inline half_t float_to_half(float value) {
#if defined(__F16C__)
    return _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT);
#else
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    const half_t sign = (bits >> 16) & 0x8000;
    float magnitude = std::fabs(value);
    if (std::isnan(magnitude)) return sign | 0x7e00;
    if (magnitude >= 65520.0f) return sign | 0x7c00;
    if (magnitude < 0x1p-14f) return sign | static_cast<half_t>(std::nearbyint(magnitude * 0x1p24f));
    std::memcpy(&bits, &magnitude, 4);
    bits += 0xfff + ((bits >> 13) & 1);  // to nearest, ties to even
    return sign | static_cast<half_t>((bits >> 13) - (112u << 10));
#endif
}

inline float bfloat_to_float(half_t bits) {
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
}

inline half_t float_to_bfloat(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if (std::isnan(value)) return static_cast<half_t>((bits >> 16) | 0x40);
    return static_cast<half_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

#if defined(__AVX512F__)

struct Vec {
    static constexpr int kLanes = 16;
    __m512 v;
};
inline __mmask16 first_lanes(int count) { return static_cast<__mmask16>((1u << count) - 1); }
inline Vec set1(float x) { return {_mm512_set1_ps(x)}; }
inline Vec load(const float *p) { return {_mm512_loadu_ps(p)}; }
inline Vec load(const float *p, int count) { return {_mm512_maskz_loadu_ps(first_lanes(count), p)}; }
inline void store(float *p, Vec x) { _mm512_storeu_ps(p, x.v); }
inline void store(float *p, Vec x, int count) { _mm512_mask_storeu_ps(p, first_lanes(count), x.v); }
inline Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Vec abs(Vec a) { return {_mm512_abs_ps(a.v)}; }
inline Vec round(Vec a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// x * 2^n for whole n.
inline Vec scale_by_power(Vec x, Vec n) { return {_mm512_scalef_ps(x.v, n.v)}; }
inline float reduce_add(Vec a) { return _mm512_reduce_add_ps(a.v); }
inline float reduce_max(Vec a) { return _mm512_reduce_max_ps(a.v); }
inline Vec load_half(const half_t *p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)))};
}
inline void store_half(half_t *p, Vec x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), _mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT));
}
inline Vec load_bfloat(const half_t *p) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}

#elif defined(__AVX2__)

struct Vec {
    static constexpr int kLanes = 8;
    __m256 v;
};
inline __m256i first_lanes(int count) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline Vec set1(float x) { return {_mm256_set1_ps(x)}; }
inline Vec load(const float *p) { return {_mm256_loadu_ps(p)}; }
inline Vec load(const float *p, int count) { return {_mm256_maskload_ps(p, first_lanes(count))}; }
inline void store(float *p, Vec x) { _mm256_storeu_ps(p, x.v); }
inline void store(float *p, Vec x, int count) { _mm256_maskstore_ps(p, first_lanes(count), x.v); }
inline Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm256_div_ps(a.v, b.v)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.v, b.v)}; }
inline Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.v, b.v)}; }
inline Vec abs(Vec a) { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0f), a.v)}; }
inline Vec round(Vec a) { return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline Vec scale_by_power(Vec x, Vec n) {
    const __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n.v), _mm256_set1_epi32(127)), 23);
    return {_mm256_mul_ps(x.v, _mm256_castsi256_ps(exponent))};
}
inline float reduce_add(Vec a) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}
inline float reduce_max(Vec a) {
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}
inline Vec load_half(const half_t *p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)))};
}
inline void store_half(half_t *p, Vec x) {
    _mm_storeu_si128(reinterpret_cast<__m128i *>(p), _mm256_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT));
}
inline Vec load_bfloat(const half_t *p) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16))};
}

#else

// The compiler's own vectors: NEON on ARM, whatever else there is elsewhere.
struct Vec {
    static constexpr int kLanes = 4;
    typedef float Native __attribute__((vector_size(16)));
    Native v;
};
inline Vec set1(float x) { return {Vec::Native{x, x, x, x}}; }
inline Vec load(const float *p) {
    Vec x;
    std::memcpy(&x.v, p, sizeof x.v);
    return x;
}
inline Vec load(const float *p, int count) {
    Vec x = set1(0.0f);
    for (int lane = 0; lane < count; ++lane) x.v[lane] = p[lane];
    return x;
}
inline void store(float *p, Vec x) { std::memcpy(p, &x.v, sizeof x.v); }
inline void store(float *p, Vec x, int count) {
    for (int lane = 0; lane < count; ++lane) p[lane] = x.v[lane];
}
inline Vec operator+(Vec a, Vec b) { return {a.v + b.v}; }
inline Vec operator-(Vec a, Vec b) { return {a.v - b.v}; }
inline Vec operator*(Vec a, Vec b) { return {a.v * b.v}; }
inline Vec operator/(Vec a, Vec b) { return {a.v / b.v}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {a.v * b.v + c.v}; }
inline Vec max(Vec a, Vec b) { return {a.v > b.v ? a.v : b.v}; }
inline Vec min(Vec a, Vec b) { return {a.v < b.v ? a.v : b.v}; }
inline Vec abs(Vec a) { return max(a, {-a.v}); }
// For |a| < 2^22: beside 1.5 * 2^23 there is no room for a fraction.
inline Vec round(Vec a) { return {(a.v + 0x1.8p23f) - 0x1.8p23f}; }
inline Vec scale_by_power(Vec x, Vec n) {
    typedef int32_t Bits __attribute__((vector_size(16)));
    const Bits exponent = (__builtin_convertvector(n.v, Bits) + 127) << 23;
    return {x.v * reinterpret_cast<Vec::Native>(exponent)};
}
inline float reduce_add(Vec a) { return (a.v[0] + a.v[1]) + (a.v[2] + a.v[3]); }
inline float reduce_max(Vec a) { return std::fmax(std::fmax(a.v[0], a.v[1]), std::fmax(a.v[2], a.v[3])); }
inline Vec load_half(const half_t *p) {
    // half_to_float without its branches: as vectors, ten times as fast.
    typedef uint32_t Bits __attribute__((vector_size(16)));
    const Bits bits{p[0], p[1], p[2], p[3]};
    const Vec magnitude{reinterpret_cast<Vec::Native>((bits & 0x7fff) << 13) * 0x1p112f};
    const Bits special = reinterpret_cast<Bits>((bits & 0x7c00) == 0x7c00) & 0x7f800000;
    return {reinterpret_cast<Vec::Native>(reinterpret_cast<Bits>(magnitude.v) | special | (bits & 0x8000) << 16)};
}
inline void store_half(half_t *p, Vec x) {
    for (int lane = 0; lane < Vec::kLanes; ++lane) p[lane] = float_to_half(x.v[lane]);
}
inline Vec load_bfloat(const half_t *p) {
    Vec x;
    for (int lane = 0; lane < Vec::kLanes; ++lane) x.v[lane] = bfloat_to_float(p[lane]);
    return x;
}

#endif

inline void store_bfloat(half_t *p, Vec x) {
    float lanes[Vec::kLanes];
    store(lanes, x);
    for (int lane = 0; lane < Vec::kLanes; ++lane) p[lane] = float_to_bfloat(lanes[lane]);
}

// e^x to about 2 units in the last place (Cephes' expf). Below -87.3, -inf included, it gives 1e-38 and not 0.
inline Vec exp(Vec x) {
    x = max(min(x, set1(88.3762626647949f)), set1(-87.33654f));
    const Vec n = round(x * set1(1.44269504088896341f));
    const Vec r = fma(n, set1(2.12194440e-4f), fma(n, set1(-0.693359375f), x));
    Vec y = set1(1.9875691500e-4f);
    y = fma(y, r, set1(1.3981999507e-3f));
    y = fma(y, r, set1(8.3334519073e-3f));
    y = fma(y, r, set1(4.1665795894e-2f));
    y = fma(y, r, set1(1.6666665459e-1f));
    y = fma(y, r, set1(5.0000001201e-1f));
    return scale_by_power(fma(y, r * r, r + set1(1.0f)), n);
}

// x * sigmoid(x)
inline Vec silu(Vec x) { return x / (set1(1.0f) + exp(set1(0.0f) - x)); }

inline Vec tanh(Vec x) {
    const Vec twice = exp(x + x);
    return set1(1.0f) - set1(2.0f) / (twice + set1(1.0f));
}

}  // namespace wr
