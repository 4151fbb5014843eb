/* Per-thread scratch buffers: a worker keeps its own between calls, so no call pays for fresh pages. */
#include "vec.h"

#include <omp.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#define SLOTS 4

static __thread struct {
    void *data;
    size_t bytes;
} held[SLOTS];

void *dspark_scratch(int slot, size_t bytes) {
    if (held[slot].bytes < bytes) {
        size_t rounded = (bytes + bytes / 4 + 4095) & ~(size_t)4095;
        free(held[slot].data);
        held[slot].data = aligned_alloc(64, rounded);
        held[slot].bytes = held[slot].data ? rounded : 0;
    }
    return held[slot].data;
}

/* Asks for huge pages behind a block that is not yet touched: streaming weights then misses the TLB 512 times less. */
EXPORT void dspark_huge_pages(void *data, int64_t bytes) {
#if defined(MADV_HUGEPAGE)
    uintptr_t page = 1 << 21, from = ((uintptr_t)data + page - 1) / page * page;
    uintptr_t to = ((uintptr_t)data + (uintptr_t)bytes) / page * page;
    if (from < to) madvise((void *)from, to - from, MADV_HUGEPAGE);
#else
    (void)data;
    (void)bytes;
#endif
}

/* How many threads a region asked for `threads` really gets, and the vector width compiled in (floats). */
EXPORT int dspark_team_size(int threads) {
    int got = 0;
#pragma omp parallel num_threads(threads)
    {
#pragma omp single
        got = omp_get_num_threads();
    }
    return got;
}

EXPORT int dspark_vector_width(void) { return VW; }
EXPORT int dspark_panel_width(void) { return NR; }
EXPORT int dspark_has_fma(void) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
    return 1;
#else
    return 0;
#endif
}
