// The most likely token of each row.
#include <algorithm>
#include <cmath>

#include "pool.h"
#include "sample_lanes.h"
#include "warmroot.h"

namespace wr {
namespace {

constexpr int64_t kTile = 1024;    // searched again for the place of its maximum
constexpr int64_t kPiece = 16384;  // of a row, for one thread

struct Best {
    float logit;
    int64_t token;  // -1: the piece holds NaN
};

float tile_maximum(const float *logits, int64_t count, Peak &peak) {
    constexpr int64_t kLanes = Vec::kLanes;
    // Two peaks of alternate vectors, and the tile's own maxima apart from the piece's sums of spoilt lanes.
    Peak left{set1(-INFINITY), peak.spoilt}, right = no_peak();
    int64_t i = 0;
    for (; i + 2 * kLanes <= count; i += 2 * kLanes) {
        look(left, load(logits + i));
        look(right, load(logits + i + kLanes));
    }
    float largest = std::max(reduce_max(left.largest), reduce_max(right.largest));
    peak.spoilt = left.spoilt + right.spoilt;
    for (; i < count; ++i) {
        if (logits[i] > largest) largest = logits[i];
        if (std::isnan(logits[i])) peak.spoilt = set1(NAN);
    }
    return largest;
}

Best best_of(const float *logits, int64_t begin, int64_t end) {
    Peak peak = no_peak();
    float largest = -INFINITY;
    int64_t tile = begin;
    for (int64_t i = begin; i < end; i += kTile) {
        const float here = tile_maximum(logits + i, std::min(kTile, end - i), peak);
        if (here > largest) largest = here, tile = i;
    }
    // +inf spoils a piece as NaN does, but is a maximum.
    if (is_spoilt(peak)) {
        if (std::any_of(logits + begin, logits + end, [](float x) { return std::isnan(x); })) return {0.0f, -1};
    }
    return {largest, std::find(logits + tile, logits + std::min(tile + kTile, end), largest) - logits};
}

}  // namespace
}  // namespace wr

extern "C" void wr_argmax(const float *logits, int64_t stride, int64_t rows, int64_t vocab, int64_t *token_ids) {
    const int64_t pieces = (vocab + wr::kPiece - 1) / wr::kPiece;
    auto *best = static_cast<wr::Best *>(wr::scratch(wr::Scratch::kSample, sizeof(wr::Best) * rows * pieces));
    wr::parallel_for(rows * pieces, wr::grain_for(rows * pieces, 1), [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) {
            const int64_t begin = i % pieces * wr::kPiece;
            best[i] = wr::best_of(logits + i / pieces * stride, begin, std::min(begin + wr::kPiece, vocab));
        }
    });
    for (int64_t r = 0; r < rows; ++r) {
        wr::Best winner = best[r * pieces];
        bool spoilt = false;
        for (int64_t i = r * pieces; i < (r + 1) * pieces; ++i) {
            if (best[i].logit > winner.logit) winner = best[i];
            spoilt |= best[i].token < 0;
        }
        token_ids[r] = spoilt ? 0 : winner.token;
    }
}
