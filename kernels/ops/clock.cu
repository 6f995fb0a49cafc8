// The multiprocessors' clocks: under load they fall within microseconds, by 15 to 25% on an H200, and rise again as fast.
// So what runs next does not see it, but cycles are counted all the time.
#include "../core/types.cuh"

// How many cycles a multiprocessor has counted, and what the GPU's timer says then. Of each where a block runs.
extern "C" __global__ void count_cycles(u64* cycles, u64* nanoseconds, u32 multiprocessors) {
    u32 own;
    u64 now;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(own));
    if (own >= multiprocessors) return;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    cycles[own] = clock64(), nanoseconds[own] = now;
}
