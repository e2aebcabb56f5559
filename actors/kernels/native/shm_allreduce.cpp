// All-reduce over shared memory: each rank puts its numbers into a slot of its own and counts a turn, waits for the
// turns of the others, and adds up all slots itself. One wait per operation: a rank has two slots, used in turn, and
// whoever is at turn n + 2 knows that all have begun turn n + 1, and so have done with the slots of turn n.
#include "shm_allreduce.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

#include <algorithm>
#include <atomic>
#include <cstring>

#include "pool.h"
#include "simd.h"

namespace {

constexpr int64_t kNapNs = 20'000'000;  // between two looks whether the peer still lives
constexpr int64_t kPiece = 1 << 14;     // elements (or bytes / 4) that are worth a thread

// What one rank says to the others. Two cache lines, because they are fetched in pairs.
struct alignas(128) Post {
    std::atomic<uint32_t> turn;      // operations begun
    std::atomic<uint32_t> sleepers;  // processes asleep on `turn`
    std::atomic<uint32_t> joined;
    std::atomic<uint32_t> closed;
    int64_t bytes[2];  // of the last two operations, to notice ranks out of step
};
static_assert(std::atomic<uint32_t>::is_always_lock_free);

int64_t now_ns() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1'000'000'000ll + time.tv_nsec;
}

void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

void sleep_while(std::atomic<uint32_t> &word, uint32_t value) {
    const timespec nap = {0, kNapNs};
#if defined(__linux__)
    syscall(SYS_futex, &word, FUTEX_WAIT, value, &nap, nullptr, 0);
#else
    const timespec short_nap = {0, 50'000};
    if (word.load() == value) nanosleep(&short_nap, nullptr);
    (void)nap;
#endif
}

void wake_all([[maybe_unused]] std::atomic<uint32_t> &word) {
#if defined(__linux__)
    syscall(SYS_futex, &word, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
#endif
}

// A lock on one byte of the file that stands for a living rank: the kernel drops it when the process dies.
struct flock lock_of(int rank) {
    struct flock lock = {};
    lock.l_type = F_WRLCK;
    lock.l_whence = SEEK_SET;
    lock.l_start = rank;
    lock.l_len = 1;
    return lock;
}

struct Float32 {
    using Element = float;
    static float get(float x) { return x; }
    static float put(float x) { return x; }
};
struct BFloat16 {
    using Element = wr::half_t;
    static float get(wr::half_t x) { return wr::bfloat_to_float(x); }
    static wr::half_t put(float x) { return wr::float_to_bfloat(x); }
};
struct Float16 {
    using Element = wr::half_t;
    static float get(wr::half_t x) { return wr::half_to_float(x); }
    static wr::half_t put(float x) { return wr::float_to_half(x); }
};

}  // namespace

struct wr_shm_group {
    int fd;
    int rank;
    int size;
    int64_t slot_bytes;
    int64_t spin_ns;
    int64_t deadline_ns;
    char *base;
    uint32_t turn = 0;
    int32_t fault = WR_SHM_OK;
    int32_t faulty_peer = -1;
    int64_t spent_ns = 0;

    Post &post(int peer) const { return reinterpret_cast<Post *>(base)[peer]; }
    char *slot(int peer) const { return base + size * sizeof(Post) + (2 * peer + (turn & 1)) * slot_bytes; }

    // The next operation of `bytes`, of which this rank's part is in its slot; returns when every peer's is in theirs.
    int32_t meet(int64_t bytes, int32_t *peer) {
        Post &mine = post(rank);
        mine.bytes[turn & 1] = bytes;
        // In one order with `sleepers`: either the peer sees the turn before it sleeps, or it is seen asleep here.
        mine.turn.store(turn + 1, std::memory_order_seq_cst);
        if (mine.sleepers.load(std::memory_order_seq_cst) != 0) wake_all(mine.turn);
        for (int other = 0; other < size && fault == WR_SHM_OK; ++other) {
            if (other == rank) continue;
            fault = wait_for(other);
            if (fault == WR_SHM_OK && post(other).bytes[turn & 1] != bytes) fault = WR_SHM_UNEQUAL;
            if (fault != WR_SHM_OK) faulty_peer = other;
        }
        *peer = faulty_peer;
        return fault;
    }

    // Turns wrap around after 2^32 operations, so they are compared by their difference.
    bool has_begun(int peer) const {
        return static_cast<int32_t>(post(peer).turn.load(std::memory_order_acquire) - (turn + 1)) >= 0;
    }

    bool is_gone(int peer) const {
        if (post(peer).closed.load(std::memory_order_acquire) != 0) return true;
        if (post(peer).joined.load(std::memory_order_acquire) == 0) return false;
        struct flock lock = lock_of(peer);
        return fcntl(fd, F_GETLK, &lock) == 0 && lock.l_type == F_UNLCK;
    }

    int32_t wait_for(int peer) const {
        if (has_begun(peer)) return WR_SHM_OK;
        const int64_t start = now_ns();
        // Two ranks are often put on one core; then the other can only come when this one gives way.
        while (now_ns() - start < spin_ns) {
            for (int i = 0; i < 32; ++i) {
                if (has_begun(peer)) return WR_SHM_OK;
                relax();
            }
            sched_yield();
        }
        Post &theirs = post(peer);
        while (true) {
            // Gone first, turn afterwards: a peer may well have left after it had given its part.
            const bool gone = is_gone(peer);
            if (has_begun(peer)) return WR_SHM_OK;
            if (gone) return WR_SHM_GONE;
            if (now_ns() - start > deadline_ns) return WR_SHM_LATE;
            theirs.sleepers.fetch_add(1, std::memory_order_seq_cst);
            const uint32_t seen = theirs.turn.load(std::memory_order_seq_cst);
            if (static_cast<int32_t>(seen - (turn + 1)) < 0) sleep_while(theirs.turn, seen);
            theirs.sleepers.fetch_sub(1, std::memory_order_seq_cst);
        }
    }

    void give(const char *x, int64_t bytes) const {
        char *mine = slot(rank);
        wr::parallel_for(bytes, 4 * kPiece, [=](int64_t begin, int64_t end) {
            std::memcpy(mine + begin, x + begin, static_cast<size_t>(end - begin));
        });
    }

    // The slots hold the same bits as x does, so this rank's own part is read from there like the others'.
    template <typename Type>
    void add_up(typename Type::Element *x, int64_t count) const {
        using Element = typename Type::Element;
        wr::parallel_for(count, kPiece, [=, this](int64_t begin, int64_t end) {
            constexpr int64_t kBlock = 256;
            float sum[kBlock];
            for (int64_t at = begin; at < end; at += kBlock) {
                const int64_t length = std::min(kBlock, end - at);
                const Element *first = reinterpret_cast<const Element *>(slot(0)) + at;
                for (int64_t i = 0; i < length; ++i) sum[i] = Type::get(first[i]);
                for (int other = 1; other < size; ++other) {
                    const Element *next = reinterpret_cast<const Element *>(slot(other)) + at;
                    for (int64_t i = 0; i < length; ++i) sum[i] += Type::get(next[i]);
                }
                for (int64_t i = 0; i < length; ++i) x[at + i] = Type::put(sum[i]);
            }
        });
    }

    template <typename Operation>
    int32_t timed(Operation operation) {
        const int64_t start = now_ns();
        const int32_t outcome = operation();
        spent_ns += now_ns() - start;
        return outcome;
    }

    template <typename Type>
    int32_t all_reduce(typename Type::Element *x, int64_t count, int32_t *peer) {
        const int64_t room = slot_bytes / static_cast<int64_t>(sizeof(*x));
        int64_t done = 0;
        do {
            const int64_t length = std::min(room, count - done);
            give(reinterpret_cast<const char *>(x + done), length * sizeof(*x));
            if (meet(length * sizeof(*x), peer) != WR_SHM_OK) return fault;
            add_up<Type>(x + done, length);
            ++turn;
            done += length;
        } while (done < count);
        return WR_SHM_OK;
    }

    int32_t all_gather(const char *x, int64_t bytes, char *out, int32_t *peer) {
        int64_t done = 0;
        do {
            const int64_t length = std::min(slot_bytes, bytes - done);
            give(x + done, length);
            if (meet(length, peer) != WR_SHM_OK) return fault;
            for (int other = 0; other < size && out != nullptr; ++other)
                std::memcpy(out + other * bytes + done, slot(other), static_cast<size_t>(length));
            ++turn;
            done += length;
        } while (done < bytes);
        return WR_SHM_OK;
    }
};

extern "C" int64_t wr_shm_bytes(int32_t size, int64_t slot_bytes) {
    return size * (static_cast<int64_t>(sizeof(Post)) + 2 * slot_bytes);
}

extern "C" wr_shm_group *wr_shm_open(int32_t fd, int32_t rank, int32_t size, int64_t slot_bytes, int64_t spin_ns,
                                     int64_t deadline_ns) {
    struct flock lock = lock_of(rank);
    const size_t bytes = static_cast<size_t>(wr_shm_bytes(size, slot_bytes));
    void *base = fcntl(fd, F_SETLK, &lock) == 0 ? mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0)
                                                : MAP_FAILED;
    if (base == MAP_FAILED) {
        close(fd);
        return nullptr;
    }
    auto *group = new wr_shm_group{fd, rank, size, slot_bytes, spin_ns, deadline_ns, static_cast<char *>(base)};
    group->post(rank).joined.store(1, std::memory_order_release);
    return group;
}

extern "C" int32_t wr_shm_all_reduce(wr_shm_group *group, void *x, int64_t count, int32_t type, int32_t *peer) {
    return group->timed([=] {
        switch (type) {
            case WR_SHM_BFLOAT16: return group->all_reduce<BFloat16>(static_cast<wr::half_t *>(x), count, peer);
            case WR_SHM_FLOAT16: return group->all_reduce<Float16>(static_cast<wr::half_t *>(x), count, peer);
            default: return group->all_reduce<Float32>(static_cast<float *>(x), count, peer);
        }
    });
}

extern "C" int32_t wr_shm_all_gather(wr_shm_group *group, const void *x, int64_t bytes, void *out, int32_t *peer) {
    return group->timed(
        [=] { return group->all_gather(static_cast<const char *>(x), bytes, static_cast<char *>(out), peer); });
}

extern "C" int64_t wr_shm_spent_ns(const wr_shm_group *group) { return group->spent_ns; }

extern "C" void wr_shm_close(wr_shm_group *group) {
    Post &mine = group->post(group->rank);
    mine.closed.store(1, std::memory_order_release);
    wake_all(mine.turn);
    munmap(group->base, static_cast<size_t>(wr_shm_bytes(group->size, group->slot_bytes)));
    close(group->fd);
    delete group;
}
