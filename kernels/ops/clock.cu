// What the multiprocessors' clock is: under load it falls to what the GPU's power limit allows, and with it what the
// tensor cores can do.
#include "../core/types.cuh"

DEVICE u64 nanoseconds() {
    u64 now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

// Cycles in about 30 us, and how many nanoseconds they took by the GPU's timer.
extern "C" __global__ void clock_rate(u64* cycles, u64* time) {
    u64 begin = nanoseconds(), now;
    while ((now = nanoseconds()) == begin) {}  // the timer counts in steps
    begin = now;
    const u64 start = clock64();
    while ((now = nanoseconds()) < begin + 30000) {}
    *cycles = clock64() - start, *time = now - begin;
}
