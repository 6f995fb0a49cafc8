// One instruction per wrapper, each for a reason that the compiler's intrinsics do not cover.
#pragma once
#include "types.cuh"

#ifndef __CUDA_ARCH__
#define __CUDA_ARCH__ 0
#endif

// (a & mask) | bits in one LOP3: selects packed codes and gives them float16's exponent.
DEVICE u32 and_or(u32 a, u32 mask, u32 bits) {
    u32 r;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(r) : "r"(a), "r"(mask), "r"(bits));
    return r;
}

DEVICE u32 and_xor(u32 a, u32 mask, u32 bits) {
    u32 r;
    asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(r) : "r"(a), "r"(mask), "r"(bits));
    return r;
}

// a where `mask` has bits, else b: the compiler would take two LOP3 where some of the bits are not used.
DEVICE u32 chosen(u32 a, u32 b, u32 mask) {
    u32 r;
    asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(r) : "r"(mask), "r"(a), "r"(b));
    return r;
}

// What does not change, asked for here and not where it is used.
DEVICE u32 load_now(const void* p) {
    u32 bits;
    asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(bits) : "l"(p));
    return bits;
}

// Asked for again where registers are scarce, lest it be kept all the time.
DEVICE int thread_again() {
    int thread;
    asm volatile("mov.b32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}

DEVICE int block_again() {
    int block;
    asm volatile("mov.b32 %0, %%ctaid.x;" : "=r"(block));
    return block;
}

// Brings 32 bytes to the L1 cache, for loads to come.
DEVICE void touch(const void* p) {
    u32 bits;
    asm volatile("ld.global.ca.u32 %0, [%1];" : "=r"(bits) : "l"(p));
}

// a & mask, once: the compiler would split it among the uses of single halves or bytes.
DEVICE u32 masked(u32 a, u32 mask) { return and_or(a, mask, 0); }

// ~a & mask, likewise.
DEVICE u32 masked_not(u32 a, u32 mask) {
    u32 r;
    asm("lop3.b32 %0, %1, %2, %3, 0x0c;" : "=r"(r) : "r"(a), "r"(mask), "r"(0));
    return r;
}

// The sums of a's halves and of b's. Either is one addition, which the pipe of permutes has nothing to do with.
DEVICE u32 pack_sums(u32 a, u32 b) {
    u32 r;
    asm("{.reg .f16 p, q, s, t;\nmov.b32 {p, q}, %1;\nmov.b32 {s, t}, %2;\n"
        "add.f16 p, p, q;\nadd.f16 s, s, t;\nmov.b32 %0, {p, s};}" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

// Pairs of float16, each result rounded once.
DEVICE u32 sub_half2(u32 a, u32 b) {
    u32 r;
    asm("sub.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

DEVICE u32 mul_half2(u32 a, u32 b) {
    u32 r;
    asm("mul.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

DEVICE u32 fma_half2(u32 a, u32 b, u32 c) {
    u32 r;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
}

// Pairs of bfloat16. Before sm_90 a product is a fused multiplication and addition of -0, which keeps -0; before sm_80
// there is none, and each half is the upper one of a float32 number.
DEVICE u32 mul_bfloat2(u32 a, u32 b) {
    u32 r;
#if __CUDA_ARCH__ >= 900
    asm("mul.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
#elif __CUDA_ARCH__ >= 800
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(0x80008000));
#else
    asm("{.reg .f32 x, y;\n"
        "mul.rn.f32 x, %1, %2;\nmul.rn.f32 y, %3, %4;\nprmt.b32 %0, x, y, 0x7632;}"
        : "=r"(r) : "f"(__int_as_float(a << 16)), "f"(__int_as_float(b << 16)),
                    "f"(__int_as_float(a & 0xffff0000)), "f"(__int_as_float(b & 0xffff0000)));
#endif
    return r;
}

DEVICE u32 multiply_subtract_half2(u32 a, u32 b, u32 c) {
    u32 r;
    asm("{.reg .b32 negated;\nneg.f16x2 negated, %3;\nfma.rn.f16x2 %0, %1, %2, negated;}"
        : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
}

// Two copies of the low or the high half, which an instruction of halves then takes as they are.
DEVICE u32 twice(u32 pair, int high) {
    u32 r;
    if (high)
        asm("{.reg .f16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {high, high};}" : "=r"(r) : "r"(pair));
    else
        asm("{.reg .f16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {low, low};}" : "=r"(r) : "r"(pair));
    return r;
}

// Four of the eight bytes of b and a, numbers 7 .. 0, by four bits of the selector each; the highest of them repeats
// the byte's sign. (The intrinsic promises three bits.)
constexpr int SIGNS_OF_HALVES = 0xfbd9;  // of each half of a and of b, in turn, repeated in a byte
DEVICE u32 permute(u32 a, u32 b, u32 selector) {
    u32 r;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(selector));
    return r;
}

// The dynamic shared memory, at an address that the compiler knows.
DEVICE u8* dynamic_shared() {
    extern __shared__ __align__(1024) u8 dynamic[];
    return dynamic;
}

DEVICE u32 shared_address(const void* pointer) { return u32(__cvta_generic_to_shared(pointer)); }

DEVICE int load_shared_int(u32 address) {
    int value;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address));
    return value;
}

DEVICE void store_shared_int(u32 address, int value) {
    asm volatile("st.shared.u32 [%0], %1;" :: "r"(address), "r"(value) : "memory");
}

DEVICE void store_shared_short(u32 address, u16 value) {
    asm volatile("st.shared.u16 [%0], %1;" :: "r"(address), "h"(value) : "memory");
}

// Four 8 x 8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8. Lane 4 g + i
// receives elements (g, 2 i) and (g, 2 i + 1) of each: operand B's layout where rows are batch rows.
DEVICE void load_matrices(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
}

// An 8 x 8 matrix of 16-bit elements, of which lane 4 g + i has (g, 2 i) and (g, 2 i + 1): it gets (2 i, g) and
// (2 i + 1, g).
DEVICE u32 transposed(u32 pair) {
    u32 r;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(pair));
    return r;
}

// 16 bytes from global to shared memory; zeros where `valid` is false. Before sm_80 an ordinary load and store.
DEVICE void copy_async(u32 shared, const void* global, bool valid = true) {
#if __CUDA_ARCH__ >= 800
    int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(shared), "l"(global), "r"(bytes) : "memory");
#else
    uint4 v = valid ? *static_cast<const uint4*>(global) : make_uint4(0, 0, 0, 0);
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};"
                 :: "r"(shared), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
#endif
}

DEVICE void copy_async(void* shared, const void* global, bool valid) {
    copy_async(shared_address(shared), global, valid);
}

// 16 bytes of a long run from global to shared memory: the L2 cache fetches 256 bytes at once.
DEVICE void copy_async_ahead(void* shared, const void* global) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;"
                 :: "r"(shared_address(shared)), "l"(global) : "memory");
#else
    copy_async(shared, global, true);
#endif
}

// 16 bytes from global to shared memory that this multiprocessor soon copies again: they stay in the L1 cache.
DEVICE void copy_async_again(u32 shared, const void* global, bool valid = true) {
#if __CUDA_ARCH__ >= 800
    int bytes = valid ? 16 : 0;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" :: "r"(shared), "l"(global), "r"(bytes) : "memory");
#else
    copy_async(shared, global, valid);
#endif
}

DEVICE void copy_commit() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Wait until at most `PENDING` of this thread's committed groups are under way.
template <int PENDING>
DEVICE void copy_wait() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" :: "n"(PENDING) : "memory");
#endif
}

// Fetches memory that is read soon to the L2 cache.
DEVICE void prefetch(const void* global) { asm volatile("prefetch.global.L2 [%0];" :: "l"(global)); }

DEVICE float about_inverse(float x) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

// d[16 x 8] = a[16 x 16] b[16 x 8] + c, float16 in, float32 out. sm_75 has the same in two steps of eight columns.
DEVICE void mma_half(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, const float (&c)[4]) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
#else
    asm("{.reg .f32 t<4>;\n"
                 "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {t0,t1,t2,t3}, {%4,%5}, {%8}, {%10,%11,%12,%13};\n"
                 "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%6,%7}, {%9}, {t0,t1,t2,t3};}"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
#endif
}

#if __CUDA_ARCH__ >= 800
// d[16 x 8] += a[16 x 32] b[32 x 8] in integers: signed bytes b, and bytes a that are signed or not.
template <bool SIGNED>
DEVICE void mma_bytes(int (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    if constexpr (SIGNED)
        asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#endif

DEVICE u32 warp_min(u32 value) {
#if __CUDA_ARCH__ >= 800
    return __reduce_min_sync(~0u, value);
#else
#pragma unroll
    for (int step = 16; step; step /= 2) value = min(value, __shfl_xor_sync(~0u, value, step));
    return value;
#endif
}

DEVICE u32 warp_max(u32 value) {
#if __CUDA_ARCH__ >= 800
    return __reduce_max_sync(~0u, value);
#else
#pragma unroll
    for (int step = 16; step; step /= 2) value = max(value, __shfl_xor_sync(~0u, value, step));
    return value;
#endif
}

// What is the same in all lanes, so that the compiler knows it: of what was divided, or lay in shared memory, it does not, and then
// keeps loops out of the uniform registers.
DEVICE int uniform(int value) { return __shfl_sync(~0u, value, 0); }

DEVICE int warp_sum(int value) {
#if __CUDA_ARCH__ >= 800
    return __reduce_add_sync(~0u, value);
#else
#pragma unroll
    for (int step = 16; step; step /= 2) value += __shfl_xor_sync(~0u, value, step);
    return value;
#endif
}

// Launches that overlap their predecessor in the stream (sm_90; `overlaps` in cuquant/plan/launch.py). When all blocks of a
// kernel have called the first, or are done, the next kernel's blocks start as soon as there is room for them. The second
// waits until the kernel before is done, and what it has stored may be read. The rules:
//
//   - Before a thread has waited it stores nothing in global memory, and reads only what no kernel before may still write:
//     weights and what belongs to them, for which the host has waited when they were made (cuquant/cuda/fragments.py). (Attention
//     reads lengths, too, and goes by them until it has read them again: attention/split.cuh, ops/attention.cu.)
//   - Every grid has a thread that waits, even if there is nothing to do. So a kernel is never done before the one before
//     it, and who has waited for one has waited for all. (A launch that does not overlap need not: it starts late enough.)
//   - Most kernels let their successor start at once. Grouped products (`begin` in problem.cuh) and attention do when they
//     have waited. What starts behind one of these, or behind others that have started so, finds all kernels before that
//     one done, and need not wait for what they have left: a mixture's ids and works, lengths of a cache. It reads that from
//     the L2 cache (`__ldcg`), since an L1 cache may have what was there before. `merge`, behind attention, may store before
//     it waits, too (attention/merge.cuh).
//   - One thread's call counts for its block: where it is to come after a wait, the waiting thread makes it, or meets those who
//     do at a barrier before.
constexpr bool OVERLAPS = __CUDA_ARCH__ >= 900;

DEVICE void let_successor_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

DEVICE void wait_for_predecessor() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// What this thread has written, or seen written, can be read by who hears of what it does next.
DEVICE void fence_writes() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

DEVICE void add_relaxed(u32* counter, u32 value) {
    asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" :: "l"(counter), "r"(value) : "memory");
}

// A counter in global memory to which a thread adds when others may read what it has written, and threads that it met at a
// barrier before.
DEVICE void add_to(u32* counter, u32 value) {
    fence_writes();
    add_relaxed(counter, value);
}

// Adds to a counter as `add_to` does, by a thread of each of so many blocks, of which the last one knows that it is, but
// may not read what others have written.
DEVICE bool is_last(u32* counter, u32 blocks) {
    if (blocks == 1) return true;
    u32 others;
    asm volatile("fence.acq_rel.gpu;\n"
                 "atom.relaxed.gpu.global.add.u32 %0, [%1], 1;" : "=r"(others) : "l"(counter) : "memory");
    return others == blocks - 1;
}

// After `is_last`, by the thread that knows: what others have written may be read, by threads too that meet it at a
// barrier.
DEVICE void read_all() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// Whether the counter comes to be `value`: what the kernel before has not added when it is done never comes.
DEVICE bool wait_for_counter(const u32* counter, u32 value) {
    u32 found;
    const auto look = [&] {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(found) : "l"(counter) : "memory");
        return found == value;
    };
    // A second or so, as what waits so for a kernel hears of it later.
    for (int times = 0; times < 1 << 20; times++) {
        if (look()) return true;
        asm volatile("nanosleep.u32 64;" ::: "memory");  // others have the multiprocessor to themselves
    }
    wait_for_predecessor();
    return look();
}
