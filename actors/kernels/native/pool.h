// One pool of threads for all kernels of a process.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace wr {

using Body = void (*)(void *context, int64_t begin, int64_t end);

int num_threads();

// Index of the calling thread within the running parallel_for: 0 is the caller, num_threads() - 1 the last.
int thread_index();

void run_parallel(int64_t count, int64_t grain, Body body, void *context);

// Call body(begin, end) for pieces of [0, count) of at most `grain`, on any thread, in any order. Returns when all are
// done. Pieces are taken one by one, so a thread that the machine has put aside delays nothing but the piece it holds.
// A call from inside a body, or while another caller uses the pool, runs on the calling thread alone.
template <typename F>
void parallel_for(int64_t count, int64_t grain, F &&body) {
    using Callable = std::remove_reference_t<F>;
    run_parallel(
        count, grain, [](void *context, int64_t begin, int64_t end) { (*static_cast<Callable *>(context))(begin, end); },
        const_cast<void *>(static_cast<const void *>(&body)));
}

// A grain that gives each thread about `pieces` pieces, and at least `least` items to a piece.
int64_t grain_for(int64_t count, int64_t least, int pieces = 4);

// Memory of the calling thread, aligned to 64 bytes, kept between calls; valid until the next call with the same slot
// on the same thread. Each user has a slot of its own.
enum class Scratch { kLinear, kLinearPiece, kAttention, kAttentionPiece, kAppend, kSample, kStep, kGuess, kCount };
void *scratch(Scratch slot, size_t bytes);

}  // namespace wr
