// PTX as in ptx.cuh, of what GPUs have from sm_90 on: clusters of blocks, barriers that count bytes, the copy engine; and
// flags between blocks that run at the same time.
#pragma once
#include "ptx.cuh"

#if __CUDA_ARCH__ >= 900
// Blocks of a cluster meet. What they have written is not ordered by it, as a release would have all warps wait for the L2
// cache. (What they have read is theirs: it has been used.)
DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
DEVICE void cluster_sync() { cluster_arrive(), cluster_wait(); }

// Blocks of a cluster meet when their arrivals at each other's barriers are done.
DEVICE void cluster_leave() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    cluster_wait();
}

// The address in block `rank` of what is at `address` in this block.
DEVICE u32 cluster_address(u32 address, u32 rank) {
    u32 r;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(address), "r"(rank));
    return r;
}

// Stores to a block's memory, where a barrier counts the bytes: who has waited for all of them may read them.
DEVICE void store_cluster(u32 address, float v, u32 barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];"
                 :: "r"(address), "f"(v), "r"(barrier) : "memory");
}

DEVICE void store_cluster(u32 address, float2 v, u32 barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];"
                 :: "r"(address), "f"(v.x), "f"(v.y), "r"(barrier) : "memory");
}

// True for one lane, where all of a warp ask: it takes no register until then, as the lane's number would.
DEVICE bool elected() {
    u32 chosen;
    asm volatile("{.reg .pred p;\n.reg .b32 lane;\n"
                 "elect.sync lane|p, 0xffffffff;\n"
                 "selp.u32 %0, 1, 0, p;}" : "=r"(chosen));
    return chosen;
}

// A barrier in shared memory that counts arrivals and bytes that come; `parity` is that of the awaited phase.
DEVICE void barrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(barrier), "r"(arrivals) : "memory");
}

DEVICE void barrier_arrive(u32 barrier, bool arrives) {
    asm volatile("{.reg .pred p;\nsetp.ne.b32 p, %1, 0;\n@p mbarrier.arrive.shared::cta.b64 _, [%0];}"
                 :: "r"(barrier), "r"(int(arrives)) : "memory");
}

// At a barrier of any block of the cluster.
DEVICE void barrier_arrive_cluster(u32 barrier, bool arrives) {
    asm volatile("{.reg .pred p;\nsetp.ne.b32 p, %1, 0;\n"
                 "@p mbarrier.arrive.shared::cluster.b64 _, [%0];}"
                 :: "r"(barrier), "r"(int(arrives)) : "memory");
}

// What a thread has initialized others of the cluster may use, and the copy engine.
DEVICE void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// An arrival, and so many bytes more to come.
DEVICE void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(bytes) : "memory");
}

DEVICE void barrier_wait(u32 barrier, u32 parity) {
    asm volatile("{.reg .pred done;\n"
                 "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;}" :: "r"(barrier), "r"(parity) : "memory");
}

DEVICE bool barrier_passed(u32 barrier, u32 parity) {
    u32 done;
    asm volatile("{.reg .pred p;\n"
                 "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                 "selp.u32 %0, 1, 0, p;}" : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
    return done;
}

// `barrier_wait` where what came was sent by other blocks of the cluster.
DEVICE void barrier_wait_cluster(u32 barrier, u32 parity) {
    asm volatile("{.reg .pred done;\n"
                 "again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;}" :: "r"(barrier), "r"(parity) : "memory");
}

// An arrival when all of this thread's asynchronous copies so far are done.
DEVICE void copy_arrive(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" :: "r"(barrier) : "memory");
}

// The reverse of load_matrices, transposed: elements (2 i, g) and (2 i + 1, g) of each matrix come from lane 4 g + i.
DEVICE void store_matrices_transposed(u32 address, const u32 (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                 :: "r"(address), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}

// What describes a tensor takes as long to come as a box of it: asked for before it is needed.
DEVICE void prefetch_map(const void* map) { asm volatile("prefetch.tensormap [%0];" :: "l"(map) : "memory"); }

// The box at (k, m, i, j, l) of the tensor that `map` describes; to all of a cluster's BLOCKS, at the same place.
template <int BLOCKS>
DEVICE void copy_box(u32 to, const void* map, u32 barrier, int k, int m, int i, int j, int l) {
    if constexpr (BLOCKS == 1)
        asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
                     " [%0], [%1, {%3, %4, %5, %6, %7}], [%2];"
                     :: "r"(to), "l"(map), "r"(barrier), "r"(k), "r"(m), "r"(i), "r"(j), "r"(l) : "memory");
    else
        asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
                     " [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;"
                     :: "r"(to), "l"(map), "r"(barrier), "r"(k), "r"(m), "r"(i), "r"(j), "r"(l),
                        "h"(u16((1 << BLOCKS) - 1)) : "memory");
}

// A box from shared memory to (k, m, i, j, l) of the tensor that `map` describes, by the one thread that also waits
// until the copy engine has read it. What threads have written there must be fenced before they meet.
DEVICE void store_box(const void* map, u32 from, int k, int m, int i, int j, int l) {
    asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];"
                 :: "l"(map), "r"(from), "r"(k), "r"(m), "r"(i), "r"(j), "r"(l) : "memory");
}

DEVICE void store_box_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Until at most `PENDING` of this thread's committed groups are unread.
template <int PENDING>
DEVICE void store_box_wait() {
    asm volatile("cp.async.bulk.wait_group.read %0;" :: "n"(PENDING) : "memory");
}

DEVICE void store_box_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Flags in global memory, by one thread: COUNT at each of so many `places`, `apart` from each other, are 1 when what the
// threads that it met before have written may be read.
template <int COUNT>
DEVICE void set_flags(u32* flags, int places, int apart) {
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
    for (; places > 0; places--, flags += apart)
#pragma unroll
        for (int i = 0; i < COUNT; i++) asm volatile("st.relaxed.gpu.global.u32 [%0], 1;" :: "l"(flags + i) : "memory");
}

DEVICE void wait_for_flag(const u32* flag) {
    asm volatile("{.reg .pred set;\n.reg .u32 v;\n"
                 "again: ld.acquire.gpu.global.u32 v, [%0];\n"
                 "setp.ne.u32 set, v, 0;\n"
                 "vote.sync.all.pred set, set, 0xffffffff;\n"
                 "@!set bra.uni again;}" :: "l"(flag) : "memory");
}
#endif
