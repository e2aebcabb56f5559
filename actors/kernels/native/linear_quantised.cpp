// Linears over 8-bit and 4-bit panels. The input is quantised to 8 bits per row and group of 32, so that a group's part
// of a sum is one of small integers: y = sum over groups of x_scale * (scale * sum(code * x) + minimum * sum(x)), or of
// x_scale * scale * (sum(code * x) - zero * sum(x)), where the difference too is exact.
#include <cmath>
#include <cstring>

#include "linear.h"

namespace wr {
namespace {

#if defined(__AVX512VNNI__)

// A group's codes stay in registers (8 per panel) while the rows of a tile pass by. Two panels share what is read of
// the input and leave room for the sums of 4 rows; 5 to 12 rows are better off with one panel and a single pass.
constexpr int kFewRows = 12, kTileRows = 4, kTilePanels = 2;

template <bool kNibbles>
inline void load_codes(const uint8_t *codes, __m512i *quads) {
    if constexpr (kNibbles) {
        const __m512i low = _mm512_set1_epi8(15);
#pragma GCC unroll 4
        for (int q = 0; q < kQuads / 2; ++q) {
            const __m512i both = _mm512_loadu_si512(codes + 64 * q);
            quads[q] = _mm512_and_si512(both, low);
            quads[q + kQuads / 2] = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
        }
    } else {
#pragma GCC unroll 8
        for (int q = 0; q < kQuads; ++q) quads[q] = _mm512_loadu_si512(codes + 64 * q);
    }
}

template <int kRows, int kPanels, bool kNibbles, int kOffsets>
void multiply_tile(const Block &block, const InputGroup *x, int panel, Pass pass) {
    const wr_weights &weights = *block.weights;
    const int64_t groups = num_groups(weights.in_features);
    const int64_t bytes = group_bytes(weights.format), halves = group_halves(kOffsets);
    const uint8_t *codes[kPanels];
    const half_t *scales[kPanels];
    for (int p = 0; p < kPanels; ++p) {
        codes[p] = block.panel_at(block.panel + panel + p);
        scales[p] = panel_scales(codes[p], weights.format, weights.in_features);
    }
    // In halves: from a panel's scales to those of the panel that comes after the tile's.
    const int64_t next_panel = kPanels * panel_bytes(weights.format, kOffsets, weights.in_features) / 2;
    x += pass.row * groups;
    const Ahead<kPanels> ahead(block, block.panel + panel, pass, groups, bytes);
    __m512 sums[kRows][kPanels];
    for (auto &sum : sums) std::fill_n(sum, kPanels, _mm512_setzero_ps());
    for_steps(ahead, groups, [&](int64_t g, const Ahead<kPanels> &ahead) {
        ahead.ask_lines(g);
        __m512i quads[kPanels][kQuads];
        __m512 scale[kPanels], offset[kPanels];
#pragma GCC unroll 2
        for (int p = 0; p < kPanels; ++p) {
            load_codes<kNibbles>(codes[p] + g * bytes, quads[p]);
            scale[p] = load_half(scales[p] + g * halves).v;
            __builtin_prefetch(scales[p] + next_panel + g * halves);
            if constexpr (kOffsets != WR_NO_OFFSETS) offset[p] = load_half(scales[p] + g * halves + kPanel).v;
        }
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
            const InputGroup &input = x[r * groups + g];
            __m512i dots[kPanels];
            const __m512i first =
                kOffsets != WR_NO_OFFSETS
                    ? _mm512_setzero_si512()
                    : _mm512_slli_epi32(_mm512_set1_epi32(input.negative_sum), kNibbles ? 3 : 7);
            std::fill_n(dots, kPanels, first);
#pragma GCC unroll 8
            for (int q = 0; q < kQuads; ++q) {
                int32_t quad;
                std::memcpy(&quad, input.codes + 4 * q, 4);
                const __m512i xs = _mm512_set1_epi32(quad);
#pragma GCC unroll 2
                for (int p = 0; p < kPanels; ++p) dots[p] = _mm512_dpbusd_epi32(dots[p], quads[p][q], xs);
            }
            const __m512 x_scale = _mm512_set1_ps(input.scale);
#pragma GCC unroll 2
            for (int p = 0; p < kPanels; ++p) {
                __m512 whole = _mm512_cvtepi32_ps(dots[p]);
                if constexpr (kOffsets == WR_ZEROS) {
                    whole = _mm512_fmadd_ps(offset[p], _mm512_set1_ps(input.negative_total), whole);
                }
                sums[r][p] = _mm512_fmadd_ps(whole, _mm512_mul_ps(scale[p], x_scale), sums[r][p]);
                if constexpr (kOffsets == WR_MINIMA) {
                    sums[r][p] = _mm512_fmadd_ps(offset[p], _mm512_set1_ps(input.scaled_sum), sums[r][p]);
                }
            }
        }
    });
    for (int r = 0; r < kRows; ++r) {
        for (int p = 0; p < kPanels; ++p) {
            const Vec sum{sums[r][p]};
            block.write(pass.row + r, panel + p, &sum);
        }
    }
}

#elif defined(__AVX2__)

constexpr int kFewRows = 4, kTileRows = 4, kTilePanels = 1;

// The halves of two quads q and q + 4 (4 bits) or of quad q (8 bits), made signed.
template <bool kNibbles>
inline __m256i dot(__m256i sum, __m256i codes, __m256i xs) {
    if constexpr (kNibbles) {
        // 8 quads of products of at most 2 * 15 * 127 fit in 16 bits.
        return _mm256_add_epi16(sum, _mm256_maddubs_epi16(codes, xs));
    } else {
        // Products of unsigned bytes would saturate: the sign moves to the input.
        const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(xs, codes));
        return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
}

inline __m256i broadcast_quad(const InputGroup &group, int quad) {
    int32_t bits;
    std::memcpy(&bits, group.codes + 4 * quad, 4);
    return _mm256_set1_epi32(bits);
}

// Sums of code * x over a group, for 16 outputs of each row.
template <int kRows, bool kNibbles>
inline void dot_group(const uint8_t *codes, const InputGroup *x, int64_t groups, __m256i (*dots)[2]) {
    constexpr int kLoads = kNibbles ? kQuads / 2 : kQuads;
    for (int r = 0; r < kRows; ++r) dots[r][0] = dots[r][1] = _mm256_setzero_si256();
#pragma GCC unroll 8
    for (int q = 0; q < kLoads; ++q) {
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
            const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(codes + 64 * q + 32 * half));
            if constexpr (kNibbles) {
                const __m256i low = _mm256_and_si256(both, _mm256_set1_epi8(15));
                const __m256i high = _mm256_and_si256(_mm256_srli_epi16(both, 4), _mm256_set1_epi8(15));
#pragma GCC unroll 4
                for (int r = 0; r < kRows; ++r) {
                    dots[r][half] = dot<true>(dots[r][half], low, broadcast_quad(x[r * groups], q));
                    dots[r][half] = dot<true>(dots[r][half], high, broadcast_quad(x[r * groups], q + kQuads / 2));
                }
            } else {
                const __m256i codes_signed = _mm256_xor_si256(both, _mm256_set1_epi8(-128));
#pragma GCC unroll 4
                for (int r = 0; r < kRows; ++r) {
                    dots[r][half] = dot<false>(dots[r][half], codes_signed, broadcast_quad(x[r * groups], q));
                }
            }
        }
    }
}

// From the sums over codes as they were multiplied to those over code - zero, or over code if there are offsets.
template <bool kNibbles, int kOffsets>
inline __m256i settle(__m256i dots, int32_t negative_sum) {
    if constexpr (kNibbles) dots = _mm256_madd_epi16(dots, _mm256_set1_epi16(1));
    if constexpr (kNibbles && kOffsets == WR_NO_OFFSETS) dots = _mm256_add_epi32(dots, _mm256_set1_epi32(8 * negative_sum));
    if constexpr (!kNibbles && kOffsets != WR_NO_OFFSETS) dots = _mm256_sub_epi32(dots, _mm256_set1_epi32(128 * negative_sum));
    return dots;
}

template <int kRows, int kPanels, bool kNibbles, int kOffsets>
void multiply_tile(const Block &block, const InputGroup *x, int panel, Pass pass) {
    const wr_weights &weights = *block.weights;
    const int64_t groups = num_groups(weights.in_features);
    const uint8_t *codes = block.panel_at(block.panel + panel);
    const half_t *scales = panel_scales(codes, weights.format, weights.in_features);
    const int64_t next_panel = panel_bytes(weights.format, kOffsets, weights.in_features) / 2;
    x += pass.row * groups;
    const Ahead<1> ahead(block, block.panel + panel, pass, groups, group_bytes(weights.format));
    Vec sums[kRows][kPanelVecs];
    for (auto &sum : sums) std::fill_n(sum, kPanelVecs, set1(0.0f));
    for_steps(ahead, groups, [&](int64_t g, const Ahead<1> &ahead) {
        __m256i dots[kRows][2];
        ahead.ask_lines(g);
        dot_group<kRows, kNibbles>(codes + g * group_bytes(weights.format), x + g, groups, dots);
        const half_t *group_scales = scales + g * group_halves(kOffsets);
        __builtin_prefetch(group_scales + next_panel);
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
            const Vec scale = load_half(group_scales + half * Vec::kLanes);
            Vec offset{};
            if constexpr (kOffsets != WR_NO_OFFSETS) offset = load_half(group_scales + kPanel + half * Vec::kLanes);
#pragma GCC unroll 4
            for (int r = 0; r < kRows; ++r) {
                const InputGroup &input = x[r * groups + g];
                Vec whole{_mm256_cvtepi32_ps(settle<kNibbles, kOffsets>(dots[r][half], input.negative_sum))};
                if constexpr (kOffsets == WR_ZEROS) whole = fma(offset, set1(input.negative_total), whole);
                sums[r][half] = fma(whole, scale * set1(input.scale), sums[r][half]);
                if constexpr (kOffsets == WR_MINIMA) sums[r][half] = fma(offset, set1(input.scaled_sum), sums[r][half]);
            }
        }
    });
    for (int r = 0; r < kRows; ++r) block.write(pass.row + r, panel, sums[r]);
}

#else

constexpr int kFewRows = 4, kTileRows = 4, kTilePanels = 1;

template <bool kNibbles>
inline void load_codes(const uint8_t *codes, uint8_t *quads) {
    for (int i = 0; i < kGroup * kPanel; ++i) {
        constexpr int kHalf = kGroup * kPanel / 2;
        quads[i] = !kNibbles ? codes[i] : i < kHalf ? codes[i] & 15 : codes[i - kHalf] >> 4;
    }
}

template <int kRows, int kPanels, bool kNibbles, int kOffsets>
void multiply_tile(const Block &block, const InputGroup *x, int panel, Pass pass) {
    const wr_weights &weights = *block.weights;
    const int64_t groups = num_groups(weights.in_features);
    const uint8_t *codes = block.panel_at(block.panel + panel);
    const half_t *scales = panel_scales(codes, weights.format, weights.in_features);
    x += pass.row * groups;
    float sums[kRows][kPanel] = {};
    for (int64_t g = 0; g < groups; ++g) {
        uint8_t quads[kGroup * kPanel];
        load_codes<kNibbles>(codes + g * group_bytes(weights.format), quads);
        const half_t *group_scales = scales + g * group_halves(kOffsets);
        for (int r = 0; r < kRows; ++r) {
            const InputGroup &input = x[r * groups + g];
            int32_t dots[kPanel];
            std::fill_n(dots, kPanel, kOffsets != WR_NO_OFFSETS ? 0 : input.negative_sum * (kNibbles ? 8 : 128));
            for (int q = 0; q < kQuads; ++q) {
                for (int n = 0; n < kPanel; ++n) {
                    const uint8_t *at = quads + 64 * q + 4 * n;
                    const int8_t *xs = input.codes + 4 * q;
                    dots[n] += at[0] * xs[0] + at[1] * xs[1] + at[2] * xs[2] + at[3] * xs[3];
                }
            }
            for (int n = 0; n < kPanel; ++n) {
                float whole = static_cast<float>(dots[n]);
                if (kOffsets == WR_ZEROS) whole += half_to_float(group_scales[kPanel + n]) * input.negative_total;
                sums[r][n] += whole * (half_to_float(group_scales[n]) * input.scale);
                if (kOffsets == WR_MINIMA) sums[r][n] += half_to_float(group_scales[kPanel + n]) * input.scaled_sum;
            }
        }
    }
    for (int r = 0; r < kRows; ++r) {
        Vec vecs[kPanelVecs];
        for (int v = 0; v < kPanelVecs; ++v) vecs[v] = load(sums[r] + v * Vec::kLanes);
        block.write(pass.row + r, panel, vecs);
    }
}

#endif

template <int kMost, int kPanels, bool kNibbles, int kOffsets>
void multiply_panels(const Block &block, const Input &input, int panel) {
    const InputGroup *x = input.quantised + block.row * num_groups(block.weights->in_features);
    for_tiles<kMost>(block.rows, [&](auto height, Pass pass) {
        multiply_tile<height(), kPanels, kNibbles, kOffsets>(block, x, panel, pass);
    });
}

template <bool kNibbles, int kOffsets>
void multiply_form(const Block &block, const Input &input) {
    int panel = 0;
    if (block.rows <= kTileRows || block.rows > kFewRows) {
        for (; panel + kTilePanels <= block.panels; panel += kTilePanels) {
            multiply_panels<kTileRows, kTilePanels, kNibbles, kOffsets>(block, input, panel);
        }
    }
    for (; panel < block.panels; ++panel) multiply_panels<kFewRows, 1, kNibbles, kOffsets>(block, input, panel);
}

const float *gather(const float *x, const int32_t *order, float *to) {
    for (int k = 0; k < kGroup; ++k) to[k] = order[k] < 0 ? 0.0f : x[order[k]];
    return to;
}

}  // namespace

void quantise_rows(const float *x, int64_t stride, int64_t begin, int64_t end, const wr_weights &weights,
                   InputGroup *groups) {
    constexpr int kVecs = kGroup / Vec::kLanes;
    // Groups without a larger value than this count as zero: the inverse of their scale would overflow.
    constexpr float kLeast = 1e-36f;
    const int64_t num = num_groups(weights.in_features);
    float gathered[kGroup];
    for (int64_t row = begin; row < end; ++row) {
        for (int64_t g = 0; g < num; ++g) {
            const float *from = x + row * stride + g * kGroup;
            if (weights.order) from = gather(x + row * stride, weights.order + g * kGroup, gathered);
            InputGroup &group = groups[row * num + g];
            Vec largest = abs(load(from));
            for (int v = 1; v < kVecs; ++v) largest = max(largest, abs(load(from + v * Vec::kLanes)));
            const float most = reduce_max(largest);
            const Vec inverse = set1(most > kLeast ? 127.0f / most : 0.0f);
            float codes[kGroup];
            Vec total = set1(0.0f);
            for (int v = 0; v < kVecs; ++v) {
                const Vec rounded = round(load(from + v * Vec::kLanes) * inverse);
                total = total + rounded;
                store(codes + v * Vec::kLanes, rounded);
            }
            float sum = reduce_add(total);
            group.scale = most > kLeast ? most / 127.0f : 0.0f;
            if (std::isnan(sum)) {  // of NaN or infinity: so is the result
                group.scale = sum;
                std::fill_n(codes, kGroup, sum = 0.0f);
            }
            for (int i = 0; i < kGroup; ++i) group.codes[i] = static_cast<int8_t>(static_cast<int32_t>(codes[i]));
            group.scaled_sum = group.scale * sum;
            group.negative_sum = -static_cast<int32_t>(sum);
            group.negative_total = -sum;
        }
    }
}

void multiply_quantised(const Block &block, const Input &input) {
    const bool nibbles = block.weights->format == WR_Q4;
    switch (block.weights->offsets) {
        case WR_MINIMA:
            return nibbles ? multiply_form<true, WR_MINIMA>(block, input) : multiply_form<false, WR_MINIMA>(block, input);
        case WR_ZEROS:
            return nibbles ? multiply_form<true, WR_ZEROS>(block, input) : multiply_form<false, WR_ZEROS>(block, input);
        default:
            return nibbles ? multiply_form<true, WR_NO_OFFSETS>(block, input)
                           : multiply_form<false, WR_NO_OFFSETS>(block, input);
    }
}

}  // namespace wr
