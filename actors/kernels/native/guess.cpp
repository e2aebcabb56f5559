// One pass of a recurrent head: its weights are read in microseconds, so its ten operations are one call.
#include <algorithm>
#include <cmath>

#include "pool.h"
#include "rms_norm.h"
#include "sample_lanes.h"
#include "warmroot.h"

namespace wr {
namespace {

constexpr int64_t kLanes = Vec::kLanes;
constexpr int kMost = 32;  // guesses of a row

int64_t rounded(int64_t floats) { return (floats + 15) / 16 * 16; }

void norm(const float *x, float eps, float *out, int64_t size) {
    const Vec scale = set1(inverse_rms(x, size, eps));
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) store(out + i, load(x + i) * scale);
    if (i < size) store(out + i, load(x + i, static_cast<int>(size - i)) * scale, static_cast<int>(size - i));
}

void activate(float *x, int64_t size) {
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) store(x + i, silu(load(x + i)));
    if (i < size) store(x + i, silu(load(x + i, static_cast<int>(size - i))), static_cast<int>(size - i));
}

// The largest so far, in order; the first of equal ones stays first.
struct Largest {
    float logits[kMost];
    int64_t places[kMost];
    int count;

    explicit Largest(int count) : count(count) {
        std::fill(logits, logits + count, -INFINITY);
        std::fill(places, places + count, 0);
    }
    void add(float logit, int64_t place) {
        if (!(logit > logits[count - 1])) return;
        int at = count - 1;
        for (; at > 0 && logit > logits[at - 1]; --at) logits[at] = logits[at - 1], places[at] = places[at - 1];
        logits[at] = logit, places[at] = place;
    }
};

Largest largest_of(const float *logits, int64_t size, int count) {
    Largest found(count);
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) {
        // Few vectors have one that is large enough, so few are looked into.
        uint32_t bits = at_least(load(logits + i), set1(found.logits[count - 1]));
        for (; bits != 0; bits &= bits - 1) found.add(logits[i + __builtin_ctz(bits)], i + __builtin_ctz(bits));
    }
    for (; i < size; ++i) found.add(logits[i], i);
    return found;
}

float log_sum_exp(const float *logits, int64_t size, float largest) {
    const Vec shift = set1(largest);
    Vec sums[2] = {set1(0.0f), set1(0.0f)};
    int64_t i = 0;
    for (; i + 2 * kLanes <= size; i += 2 * kLanes) {
        sums[0] = sums[0] + exp(load(logits + i) - shift);
        sums[1] = sums[1] + exp(load(logits + i + kLanes) - shift);
    }
    float rest = 0.0f;
    for (; i < size; ++i) rest += std::exp(logits[i] - largest);
    return largest + std::log(reduce_add(sums[0] + sums[1]) + rest);
}

void guess_row(const float *logits, int64_t size, int count, int64_t *places, float *logprobs) {
    const Largest found = largest_of(logits, size, count);
    const float total = log_sum_exp(logits, size, found.logits[0]);
    for (int i = 0; i < count; ++i) places[i] = found.places[i], logprobs[i] = found.logits[i] - total;
}

}  // namespace
}  // namespace wr

extern "C" void wr_guess(const wr_guessing_head *head, float *state, const float *came, int64_t rows, int32_t count,
                         int64_t *places, float *logprobs) {
    const int64_t hidden = head->down->out_features, inner = head->up->out_features, size = head->output->out_features;
    auto *read = static_cast<float *>(wr::scratch(
        wr::Scratch::kGuess,
        (wr::rounded(rows * 2 * hidden) + wr::rounded(rows * inner) + rows * size) * sizeof(float)));
    float *wide = read + wr::rounded(rows * 2 * hidden);
    float *logits = wide + wr::rounded(rows * inner);
    for (int64_t r = 0; r < rows; ++r) {
        wr::norm(state + r * hidden, head->eps, read + r * 2 * hidden, hidden);
        wr::norm(came + r * hidden, head->eps, read + (2 * r + 1) * hidden, hidden);
    }
    wr_linear(head->up, 1, read, 2 * hidden, wide, inner, rows, 0);
    wr::activate(wide, rows * inner);
    wr_linear(head->down, 1, wide, inner, state, hidden, rows, 1);
    wr_linear(head->output, 1, state, hidden, logits, size, rows, 0);
    wr::parallel_for(rows, 1, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
            wr::guess_row(logits + r * size, size, count, places + r * count, logprobs + r * count);
        }
    });
}
