// Quantised pages: what lies where in the page of a head, and how it is read. See ../../../docs/kv_formats.md.
//
// Keys have a scale and a minimum per channel (a dimension of all tokens of the page), values a scale and a zero point
// per token and group. Four-bit codes lie two a byte: of dimension d in the low half, of d + ceil(head_dim / 2) in the
// high half, so that a vector of bytes is two vectors of codes.
#pragma once

#include <cstdint>
#include <cstring>

#include "simd.h"
#include "warmroot.h"

namespace wr {

// Elements of a token's values that share a scale.
constexpr int32_t kValueGroup = 128;

// Parts of a four-bit code that a zero point counts; of an eight-bit one it counts whole codes.
constexpr float kZeroParts = 16.0f;

// [codes][scale of each channel: uint8][minimum of each channel: uint8][float lowest][bfloat16 unit of scales, of minima]
struct KeyPage {
    int32_t bits, head_dim, block_size;

    int32_t rows() const { return bits == 8 ? head_dim : (head_dim + 1) / 2; }
    int64_t scales() const { return static_cast<int64_t>(rows()) * block_size; }
    int64_t minima() const { return scales() + head_dim; }
    int64_t units() const { return minima() + head_dim; }
    int64_t bytes() const { return units() + 8; }
};

// [codes, token by token][bfloat16 scale of each token and group][zero point of each: uint8]
struct ValuePage {
    int32_t bits, head_dim, block_size;

    int32_t token_bytes() const { return bits == 8 ? head_dim : (head_dim + 1) / 2; }
    int32_t group_size() const { return bits == 8 ? head_dim : kValueGroup; }
    int32_t groups() const { return (head_dim + group_size() - 1) / group_size(); }
    int64_t scales() const { return static_cast<int64_t>(token_bytes()) * block_size; }
    int64_t zeros() const { return scales() + 2 * static_cast<int64_t>(groups()) * block_size; }
    int64_t bytes() const { return zeros() + static_cast<int64_t>(groups()) * block_size; }
    float zero_parts() const { return bits == 8 ? 1.0f : kZeroParts; }
};

inline int32_t key_bits(const wr_kv_cache &cache) { return cache.format == WR_KV_INT4 ? 4 : 8; }
inline int32_t value_bits(const wr_kv_cache &cache) { return cache.format == WR_KV_INT8 ? 8 : 4; }

// kv_append_quantised.cpp: as wr_kv_append.
void append_quantised(const float *keys, const float *values, int64_t stride, int64_t rows, const wr_kv_cache &cache,
                      const int64_t *slots);

struct KeyUnits {
    float lowest, scale, minimum;

    explicit KeyUnits(const uint8_t *at) {
        half_t units[2];
        std::memcpy(&lowest, at, 4);
        std::memcpy(units, at + 4, 4);
        scale = bfloat_to_float(units[0]);
        minimum = bfloat_to_float(units[1]);
    }
};

// The bits of a byte that hold a code.
enum class Code { kByte, kLow, kHigh };

template <Code kCode>
inline float code_value(uint8_t byte) {
    if constexpr (kCode == Code::kLow) return static_cast<float>(byte & 15);
    if constexpr (kCode == Code::kHigh) return static_cast<float>(byte >> 4);
    return static_cast<float>(byte);
}

template <Code kCode>
inline Vec load_codes(const uint8_t *p) {
#if defined(__AVX512F__)
    __m512i codes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
    if constexpr (kCode == Code::kLow) codes = _mm512_and_si512(codes, _mm512_set1_epi32(15));
    if constexpr (kCode == Code::kHigh) codes = _mm512_srli_epi32(codes, 4);
    return {_mm512_cvtepi32_ps(codes)};
#elif defined(__AVX2__)
    __m256i codes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p)));
    if constexpr (kCode == Code::kLow) codes = _mm256_and_si256(codes, _mm256_set1_epi32(15));
    if constexpr (kCode == Code::kHigh) codes = _mm256_srli_epi32(codes, 4);
    return {_mm256_cvtepi32_ps(codes)};
#else
    Vec codes;
    for (int lane = 0; lane < Vec::kLanes; ++lane) codes.v[lane] = code_value<kCode>(p[lane]);
    return codes;
#endif
}

// to[i] = codes[i] * scale + base
template <Code kCode>
inline void decode(const uint8_t *codes, int32_t count, float scale, float base, float *to) {
    const Vec scales = set1(scale), bases = set1(base);
    int32_t i = 0;
    for (; i + Vec::kLanes <= count; i += Vec::kLanes) store(to + i, fma(load_codes<kCode>(codes + i), scales, bases));
    for (; i < count; ++i) to[i] = std::fma(code_value<kCode>(codes[i]), scale, base);
}

}  // namespace wr
