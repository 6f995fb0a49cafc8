// What warpgroups of sm_90a have of their own: asynchronous products with operand A in registers, and barriers of some
// threads.
#pragma once
#include "ptx_90.cuh"

#if __CUDA_ARCH__ == 900
constexpr int WARPGROUP = 128;

// d[64 x N] += a[64 x 16] b[16 x N], asynchronous; a in registers (a warp's 16 rows), b described by `b`: N rows of 16 numbers
// each, or, for `add_turned`, 16 rows of N. `set` begins a sum.
template <int N>
struct Wgmma;

// Numbers of operands as the instruction has them, and the sums that they are, from the one at i on.
#define NAMES_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define NAMES_16 NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES_24 NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define NAMES_32 NAMES_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define NAMES_48 NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define NAMES_64 NAMES_48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define NAMES_72 NAMES_64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define NAMES_128 NAMES_72 \
    ", %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87" \
    ", %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103" \
    ", %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119" \
    ", %120, %121, %122, %123, %124, %125, %126, %127"
#define SUMS_8(i) \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define SUMS_16(i) SUMS_8(i), SUMS_8(i + 8)
#define SUMS_24(i) SUMS_16(i), SUMS_8(i + 16)
#define SUMS_32(i) SUMS_16(i), SUMS_16(i + 16)
#define SUMS_48(i) SUMS_32(i), SUMS_16(i + 32)
#define SUMS_64(i) SUMS_32(i), SUMS_32(i + 32)
#define SUMS_72(i) SUMS_64(i), SUMS_8(i + 64)
#define SUMS_128(i) SUMS_64(i), SUMS_64(i + 64)

// COUNT sums; A and B name the operands behind them. The constants: whether d is added, signs of a and b, whether b is turned.
#define WGMMA_STEP(NAME, CONSTANTS, N, COUNT, A, B)                                                     \
    static DEVICE void NAME(float (&d)[COUNT], const u32* a, u64 b) {                                   \
        asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.f16.f16 {" NAMES_##COUNT "}, {" A  \
                     "}, " B ", " CONSTANTS ";"                                                         \
                     : SUMS_##COUNT(0)                                                                  \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                             \
    }
#define WGMMA(N, COUNT, A, B)                                       \
    template <>                                                     \
    struct Wgmma<N> {                                               \
        WGMMA_STEP(set, "0, 1, 1, 0", N, COUNT, A, B)               \
        WGMMA_STEP(add, "1, 1, 1, 0", N, COUNT, A, B)               \
        WGMMA_STEP(add_turned, "1, 1, 1, 1", N, COUNT, A, B)        \
    };

WGMMA(16, 8, "%8, %9, %10, %11", "%12")
WGMMA(32, 16, "%16, %17, %18, %19", "%20")
WGMMA(48, 24, "%24, %25, %26, %27", "%28")
WGMMA(64, 32, "%32, %33, %34, %35", "%36")
WGMMA(96, 48, "%48, %49, %50, %51", "%52")
WGMMA(128, 64, "%64, %65, %66, %67", "%68")
WGMMA(144, 72, "%72, %73, %74, %75", "%76")
WGMMA(256, 128, "%128, %129, %130, %131", "%132")

// The sums of the first batch rows.
template <int COUNT, int SUMS>
DEVICE float (&first_of(float (&sums)[SUMS]))[COUNT] {
    return reinterpret_cast<float(&)[COUNT]>(sums);
}

DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int PENDING>
DEVICE void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(PENDING) : "memory");
}

// The compiler knows nothing of registers that an asynchronous instruction uses later. An empty instruction that
// might change them keeps what comes before it before, and what comes after it after.
template <class T, int A, int B>
DEVICE void pin(T (&registers)[A][B]) {
#pragma unroll
    for (int i = 0; i < A; i++)
#pragma unroll
        for (int j = 0; j < B; j++) {
            if constexpr (sizeof(T) == 4 && T(0.5f) != T(0))
                asm volatile("" : "+f"(registers[i][j]) :: "memory");
            else
                asm volatile("" : "+r"(registers[i][j]) :: "memory");
        }
}

// Only the threads of one or more warpgroups meet: a row group's at barrier 1 + group, all computing ones at EVERYONE; those
// of all row groups at the next, and of two at the ones after it.
constexpr int EVERYONE = 8;

template <int THREADS>
DEVICE void warpgroups_sync(int barrier) {
    asm volatile("bar.sync %0, %1;" :: "r"(barrier), "n"(THREADS) : "memory");
}

// Threads arrive at a barrier, and do not wait for the others.
template <int THREADS>
DEVICE void warpgroups_arrive(int barrier) {
    asm volatile("bar.arrive %0, %1;" :: "r"(barrier), "n"(THREADS) : "memory");
}

// From shared memory, anew each time.
DEVICE int4 load_shared(u32 from) {
    int4 v;
    asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from) : "memory");
    return v;
}

DEVICE int2 load_shared_pair(u32 from) {
    int2 v;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(from) : "memory");
    return v;
}

DEVICE void store_shared(u32 to, int4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" :: "r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
#endif
