#include "pool.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "warmroot.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace wr {
namespace {

// A worker looks for work this many times before it sleeps: about 20 us, longer than what lies between two kernels of a
// step and much shorter than what lies between two steps.
constexpr int kSpins = 2000;

thread_local int t_index = 0;
thread_local bool t_inside = false;

void relax() {
#if defined(__x86_64__)
    _mm_pause();
#else
    std::this_thread::yield();
#endif
}

// The running call. Its state is one word: generation in the upper half, pieces not taken yet in the lower. A worker that
// comes late finds either no pieces or those of a newer call, never the fields of a call that has ended.
class Pool {
  public:
    explicit Pool(int num_threads) {
        for (int index = 1; index < num_threads; ++index) workers_.emplace_back([this, index] { work(index); });
    }

    ~Pool() {
        stopping_.store(true);
        state_.fetch_add(kGeneration);
        state_.notify_all();
        for (std::thread &worker : workers_) worker.join();
    }

    int num_threads() const { return static_cast<int>(workers_.size()) + 1; }

    bool try_run(int64_t count, int64_t grain, Body body, void *context) {
        std::unique_lock<std::mutex> lock(busy_, std::try_to_lock);
        if (!lock.owns_lock()) return false;
        body_ = body;
        context_ = context;
        count_ = count;
        grain_ = grain;
        pieces_ = static_cast<uint32_t>((count + grain - 1) / grain);
        done_.store(0, std::memory_order_relaxed);
        const uint64_t generation = (state_.load(std::memory_order_relaxed) & ~kPieces) + kGeneration;
        state_.store(generation | pieces_, std::memory_order_release);
        state_.notify_all();
        while (take_piece()) {
        }
        for (int spins = 0; done_.load(std::memory_order_acquire) != pieces_; ++spins) {
            if (spins < kSpins) {
                relax();
            } else {
                std::this_thread::yield();
            }
        }
        return true;
    }

  private:
    static constexpr uint64_t kGeneration = uint64_t{1} << 32;
    static constexpr uint64_t kPieces = kGeneration - 1;

    bool take_piece() {
        uint64_t state = state_.load(std::memory_order_acquire);
        do {
            if ((state & kPieces) == 0) return false;
        } while (!state_.compare_exchange_weak(state, state - 1, std::memory_order_acq_rel));
        const int64_t begin = static_cast<int64_t>(pieces_ - (state & kPieces)) * grain_;
        body_(context_, begin, std::min(begin + grain_, count_));
        done_.fetch_add(1, std::memory_order_release);
        return true;
    }

    void work(int index) {
        t_index = index;
        t_inside = true;
        while (!stopping_.load(std::memory_order_relaxed)) {
            if (take_piece()) continue;
            uint64_t seen = state_.load(std::memory_order_acquire);
            for (int spins = 0; spins < kSpins && (seen & kPieces) == 0; ++spins) {
                relax();
                seen = state_.load(std::memory_order_acquire);
            }
            if ((seen & kPieces) == 0 && !stopping_.load()) state_.wait(seen);
        }
    }

    std::vector<std::thread> workers_;
    std::mutex busy_;
    std::atomic<bool> stopping_{false};
    alignas(64) std::atomic<uint64_t> state_{0};
    alignas(64) std::atomic<uint32_t> done_{0};
    Body body_ = nullptr;
    void *context_ = nullptr;
    int64_t count_ = 0;
    int64_t grain_ = 1;
    uint32_t pieces_ = 0;
};

// The one global of the library: threads are a property of the process.
std::mutex g_mutex;
std::atomic<Pool *> g_pool{nullptr};

Pool &pool() {
    Pool *current = g_pool.load(std::memory_order_acquire);
    if (current != nullptr) return *current;
    std::lock_guard<std::mutex> lock(g_mutex);
    if (g_pool.load() == nullptr) g_pool.store(new Pool(std::max(1u, std::thread::hardware_concurrency())));
    return *g_pool.load();
}

struct Memory {
    void *data = nullptr;
    size_t size = 0;
    ~Memory() { std::free(data); }
};

thread_local Memory t_memory[static_cast<int>(Scratch::kCount)];

}  // namespace

int num_threads() { return pool().num_threads(); }

int thread_index() { return t_index; }

int64_t grain_for(int64_t count, int64_t least, int pieces) {
    const int64_t parts = static_cast<int64_t>(num_threads()) * pieces;
    return std::max(least, (count + parts - 1) / parts);
}

void run_parallel(int64_t count, int64_t grain, Body body, void *context) {
    if (count <= 0) return;
    // Also while it runs alone: the pool may have become free by the time that a body calls.
    const bool nested = std::exchange(t_inside, true);
    const bool ran = !nested && count > grain && num_threads() > 1 && pool().try_run(count, grain, body, context);
    for (int64_t begin = 0; !ran && begin < count; begin += grain) body(context, begin, std::min(begin + grain, count));
    t_inside = nested;
}

void *scratch(Scratch slot, size_t bytes) {
    Memory &memory = t_memory[static_cast<int>(slot)];
    if (memory.size < bytes) {
        std::free(memory.data);
        memory.size = (bytes + bytes / 2 + 63) / 64 * 64;
        memory.data = std::aligned_alloc(64, memory.size);
    }
    return memory.data;
}

}  // namespace wr

extern "C" int32_t wr_num_threads(void) { return wr::num_threads(); }

// Not while a kernel runs: the old threads end here.
extern "C" void wr_set_num_threads(int32_t num_threads) {
    std::lock_guard<std::mutex> lock(wr::g_mutex);
    wr::Pool *old = wr::g_pool.load();
    if (old != nullptr && old->num_threads() == num_threads) return;
    wr::g_pool.store(new wr::Pool(std::max(1, static_cast<int>(num_threads))));
    delete old;
}
