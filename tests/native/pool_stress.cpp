// Many short parallel_for calls from two threads at once: every item is visited once, and seen to be when the call
// returns. Built plainly by ../unit/test_native_pool.py, with sanitizers by sanitize.sh.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "../../actors/kernels/native/pool.h"
#include "../../actors/kernels/native/warmroot.h"

namespace {

std::atomic<int> failures{0};

void expect(bool fact, const char *what) {
    if (fact) return;
    ++failures;
    std::fprintf(stderr, "failed: %s\n", what);
}

// Items are plain integers: a visit that the caller does not see, or two at once, is a race that TSAN reports.
void check_call(std::mt19937 &random) {
    const auto count = static_cast<int64_t>(random() % 300);
    const auto grain = static_cast<int64_t>(1 + random() % 40);
    std::vector<int> visits(static_cast<size_t>(count), 0);
    std::atomic<bool> pieces_fit{true}, index_fits{true}, memory_is_own{true};
    wr::parallel_for(count, grain, [&](int64_t begin, int64_t end) {
        if (begin < 0 || end <= begin || end > count || end - begin > grain) pieces_fit = false;
        if (wr::thread_index() < 0 || wr::thread_index() >= wr::num_threads()) index_fits = false;
        const size_t bytes = static_cast<size_t>(64 * (end - begin));
        auto *memory = static_cast<unsigned char *>(wr::scratch(wr::Scratch::kStep, bytes));
        const auto mark = static_cast<unsigned char>(begin);
        std::memset(memory, mark, bytes);
        for (int64_t i = begin; i < end; ++i) ++visits[static_cast<size_t>(i)];
        for (size_t i = 0; i < bytes; i += 64) memory_is_own = memory_is_own && memory[i] == mark;
    });
    expect(pieces_fit, "pieces lie within the range and its grain");
    expect(index_fits, "a thread's index is below the number of threads");
    expect(memory_is_own, "scratch is a thread's own");
    for (const int times : visits) expect(times == 1, "each item is visited once");
}

void check_nested_call() {
    constexpr int64_t kRows = 20, kColumns = 30;
    std::vector<int64_t> sums(kRows, 0);
    wr::parallel_for(kRows, 1, [&](int64_t begin, int64_t end) {
        const std::thread::id self = std::this_thread::get_id();
        for (int64_t row = begin; row < end; ++row) {
            // A nested call runs on this thread alone, so its sum needs no lock.
            wr::parallel_for(kColumns, 4, [&](int64_t first, int64_t last) {
                expect(std::this_thread::get_id() == self, "a nested call stays on its thread");
                for (int64_t column = first; column < last; ++column) sums[static_cast<size_t>(row)] += row * column;
            });
        }
    });
    for (int64_t row = 0; row < kRows; ++row) {
        expect(sums[static_cast<size_t>(row)] == row * kColumns * (kColumns - 1) / 2, "nested calls add up");
    }
}

void call_often(int calls, unsigned seed) {
    std::mt19937 random(seed);
    for (int i = 0; i < calls; ++i) {
        check_call(random);
        if (i % 50 == 0) check_nested_call();
        // Long enough for the workers to go to sleep, now and then.
        if (i % 200 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
}

}  // namespace

int main(int count, char **arguments) {
    const int calls = count > 1 ? std::atoi(arguments[1]) : 2000;
    for (const int num_threads : {2, 1, 4, 3, 2}) {
        wr_set_num_threads(num_threads);
        expect(wr_num_threads() == num_threads, "the number of threads is what was asked for");
        std::thread left(call_often, calls, 1u), right(call_often, calls, 2u);
        left.join();
        right.join();
        // The caller may come back on a thread that has never called before, and leave its memory behind.
        call_often(calls / 4, 3u);
    }
    std::printf("%s\n", failures == 0 ? "passed" : "FAILED");
    return failures == 0 ? 0 : 1;
}
