// Comparisons of whole vectors, for argmax and sampling.
#pragma once

#include "simd.h"

namespace wr {

// x where key >= least, 0 elsewhere.
inline Vec keep(Vec x, Vec key, Vec least) {
#if defined(__AVX512F__)
    return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(key.v, least.v, _CMP_GE_OQ), x.v)};
#elif defined(__AVX2__)
    return {_mm256_and_ps(_mm256_cmp_ps(key.v, least.v, _CMP_GE_OQ), x.v)};
#else
    return {key.v >= least.v ? x.v : Vec::Native{0, 0, 0, 0}};
#endif
}

// One bit per lane: key >= least.
inline uint32_t at_least(Vec key, Vec least) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask(key.v, least.v, _CMP_GE_OQ);
#elif defined(__AVX2__)
    return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(key.v, least.v, _CMP_GE_OQ)));
#else
    uint32_t bits = 0;
    for (int lane = 0; lane < Vec::kLanes; ++lane) bits |= static_cast<uint32_t>(key.v[lane] >= least.v[lane]) << lane;
    return bits;
#endif
}

// Write the lanes of x whose bit is set side by side; the number written. May write a whole vector.
inline int compress(float *out, Vec x, uint32_t bits) {
#if defined(__AVX512F__)
    // Not the instruction's memory form, which some processors run in microcode.
    _mm512_storeu_ps(out, _mm512_maskz_compress_ps(static_cast<__mmask16>(bits), x.v));
    return __builtin_popcount(bits);
#else
    float lanes[Vec::kLanes];
    store(lanes, x);
    int count = 0;
    for (; bits != 0; bits &= bits - 1) out[count++] = lanes[__builtin_ctz(bits)];
    return count;
#endif
}

// The largest of `count` values and whether all are comparable: false if one is NaN or +inf.
struct Peak {
    Vec largest;
    Vec spoilt;
};
inline Peak no_peak() { return {set1(-INFINITY), set1(0.0f)}; }
inline void look(Peak &peak, Vec x) {
    // Maxima give the second operand where one is NaN: the first drops a NaN, the second passes it on. -inf, a masked
    // token, is fine, and becomes finite before the product with 0 that is NaN for all that is not.
    peak.largest = max(x, peak.largest);
    peak.spoilt = fma(max(set1(-3.402823466e38f), x), set1(0.0f), peak.spoilt);
}
inline bool is_spoilt(const Peak &peak) { return std::isnan(reduce_add(peak.spoilt)); }

}  // namespace wr
