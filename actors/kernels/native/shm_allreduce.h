// Sums and gathers between the processes of one machine, over memory that they share.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum wr_shm_type { WR_SHM_FLOAT32 = 0, WR_SHM_BFLOAT16 = 1, WR_SHM_FLOAT16 = 2 };

// Why an operation failed. The group is of no use afterwards.
enum wr_shm_fault {
    WR_SHM_OK = 0,
    WR_SHM_LATE = 1,     // the peer did not come before the deadline
    WR_SHM_GONE = 2,     // the peer has died or closed the group
    WR_SHM_UNEQUAL = 3,  // the peer came with another number of bytes
};

typedef struct wr_shm_group wr_shm_group;

// Size of the shared file of `size` ranks. A slot holds what one rank contributes at a time.
int64_t wr_shm_bytes(int32_t size, int64_t slot_bytes);

// Joins as `rank`. `fd` is a file of wr_shm_bytes zeros that all ranks have open for reading and writing; it is owned
// from here on, and must be the only descriptor of that file in this process. A rank waits actively for `spin_ns`, then
// asleep. NULL if the file cannot be mapped.
wr_shm_group *wr_shm_open(int32_t fd, int32_t rank, int32_t size, int64_t slot_bytes, int64_t spin_ns,
                          int64_t deadline_ns);

// x[count] becomes the sum over the ranks, added up in float32 in the order of the ranks: the same bits everywhere.
// A count of 0 is a barrier. Returns a wr_shm_fault and in *peer the rank at fault.
int32_t wr_shm_all_reduce(wr_shm_group *group, void *x, int64_t count, int32_t type, int32_t *peer);

// out[size][bytes] gets the `bytes` at x of every rank, in the order of the ranks; NULL: only give, take nothing.
int32_t wr_shm_all_gather(wr_shm_group *group, const void *x, int64_t bytes, void *out, int32_t *peer);

// Nanoseconds that this rank has spent in the operations of the group, waiting for others included.
int64_t wr_shm_spent_ns(const wr_shm_group *group);

// Leaves: peers that wait for this rank learn it at once.
void wr_shm_close(wr_shm_group *group);

#ifdef __cplusplus
}
#endif
