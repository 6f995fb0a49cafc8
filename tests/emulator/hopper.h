// What GPUs of sm_90a have beyond others: barriers in shared memory, boxes of tensors by the copy engine, products of
// warpgroups, and clusters. Included by ptx.h.
#pragma once

struct {} _;  // a result that nobody wants

namespace emulated {

// Of 8 bytes in shared memory. A phase ends when all have arrived, and all bytes that are expected.
struct Barrier {
    u32 phase : 8, pending : 12, arrivals : 12;
    int bytes;

    void change(u32 arriving, int more) {
        if (arrivals == 0xfff) return complain("somebody arrives at a barrier that is none yet");
        if (arriving > pending) return complain("somebody arrives where all are there");
        pending -= arriving, bytes += more;
        if (!pending && !bytes) phase++, pending = arrivals;
    }
};

void Fiber::copies_arrive(u8* barrier) { reinterpret_cast<Barrier*>(barrier)->change(1, 0); }

// As Driver.cuTensorMapEncodeTiled packs it: 16-bit elements, bytes of all axes' strides but the first.
struct Map {
    u64 start, strides[4];
    u32 swizzled, dims[5], box[5];

    u32 bytes() const { return 2 * box[0] * box[1] * box[2] * box[3] * box[4]; }

    // use(element's bytes or null if it is none, its place in the box) of all elements of the box at `at`.
    template <class Use>
    void each(const int* at, Use use) const {
        u32 i[5];
        u32 place = 0;
        for (i[4] = 0; i[4] < box[4]; i[4]++)
            for (i[3] = 0; i[3] < box[3]; i[3]++)
                for (i[2] = 0; i[2] < box[2]; i[2]++)
                    for (i[1] = 0; i[1] < box[1]; i[1]++) {
                        u64 from = start;
                        bool inside = true;
                        for (u32 axis = 1; axis < 5; axis++) {
                            const int index = at[axis] + int(i[axis]);
                            inside &= index >= 0 && index < int(dims[axis]);
                            from += index * strides[axis - 1];
                        }
                        for (i[0] = 0; i[0] < box[0]; i[0]++, place += 2) {
                            const int index = at[0] + int(i[0]);
                            const bool valid = inside && index >= 0 && index < int(dims[0]);
                            use(valid ? reinterpret_cast<u8*>(from + 2 * s64(index)) : nullptr, place);
                        }
                    }
    }
};

// Rows of 128 bytes, eight of which have their eighths in each other's places.
inline u32 swizzled(u32 address) { return address ^ (address >> 7 & 7) << 4; }

// A box on its way, to all blocks of `ranks`, or from the block to memory. Those that come do so one by one, and only
// when no thread can go on otherwise, the last that was asked for first; those that go are read when they are waited for.
struct Box {
    const Map* map;
    int at[5];
    u32 shared, barrier, ranks, thread, group;
};

// Operand b[16 x n] of a warpgroup's product, swizzled: n rows of 16 numbers, which lie 128 bytes apart; or, turned, 16 rows of n,
// of which every 64 lie `apart`.
struct OperandB {
    u32 start, n, apart;
    bool turned;

    // Four numbers: of row r from k on; turned, of row k from r on.
    u64 four(u32 r, u32 k) const {
        const u32 place = turned ? k * 128 + r / 64 * apart + r % 64 * 2 : r * 128 + k * 2;
        u64 halves;
        memcpy(&halves, dynamic + swizzled(start + place), 8);
        return halves;
    }

    u64 sum() const {
        u64 sum = 0;
        for (u32 r = 0; r < n; r += turned ? 4 : 1)
            for (u32 k = 0; k < 16; k += turned ? 1 : 4) sum = (sum ^ four(r, k)) * 0x9e3779b97f4a7c15;
        return sum;
    }
};

// Of a warpgroup's product that nothing has waited for, which may still be read.
struct Reading {
    OperandB b;
    u32 group;
    u64 sum;
};

// Numbers on their way to a block's memory, whose barrier counts them. They come when no thread can go on otherwise, the
// last first.
struct Sent {
    u32 rank, address, barrier, bytes;
    float v[2];
};

constexpr u32 MOST_BOXES = 4096, MOST_READINGS = 256, MOST_SENT = 1 << 17;
static Sent sent[MOST_SENT];
static u32 sent_count;
static Box coming[MOST_BOXES], going[MOST_BOXES];
static Reading readings[MOST_THREADS / WARP][MOST_READINGS];
static u32 coming_count, going_count, going_groups[MOST_THREADS];
static u32 reading_counts[MOST_THREADS / WARP], reading_groups[MOST_THREADS / WARP];
static bool fenced[MOST_THREADS / WARP];
static Meeting cluster;
static u32 cluster_arrivals[MOST_THREADS];  // of threads that have yet to wait, one more than the generation

void forget_arrivals() {
    coming_count = going_count = sent_count = 0, cluster = {};
    memset(reading_counts, 0, sizeof reading_counts), memset(reading_groups, 0, sizeof reading_groups), memset(fenced, 0, sizeof fenced);
    memset(cluster_arrivals, 0, sizeof cluster_arrivals);
}

bool all_has_arrived() {
    for (u32 warp = 0; warp < MOST_THREADS / WARP; warp++)
        if (reading_groups[warp] != reading_groups[warp / 4 * 4]) return complain("warps of a warpgroup multiply without others"), true;
    for (u32 count : reading_counts)
        if (count) return false;
    return !coming_count && !going_count && !sent_count;
}

inline u32 address_in_box(const Map& map, u32 shared, u32 place) {
    return map.swizzled ? swizzled(shared + place) : shared + place;
}

static bool a_box_comes() {
    if (!coming_count) return false;
    const Box& box = coming[--coming_count];
    for (u32 rank = 0; rank < block_count; rank++) {
        if (!(box.ranks >> rank & 1)) continue;
        if (!blocks[rank].alive) return complain("a box comes to a block that is gone"), true;
        box.map->each(box.at, [&](const u8* from, u32 place) {
            u8* const to = shared_of(rank, address_in_box(*box.map, box.shared, place));
            to[0] = from ? from[0] : 0, to[1] = from ? from[1] : 0;
        });
        reinterpret_cast<Barrier*>(shared_of(rank, box.barrier))->change(0, -int(box.map->bytes()));
    }
    return true;
}

static bool sums_come() {
    const bool any = sent_count;
    while (sent_count) {
        const Sent& one = sent[--sent_count];
        if (!blocks[one.rank].alive) return complain("a number comes to a block that is gone"), true;
        memcpy(shared_of(one.rank, one.address), one.v, one.bytes);
        Barrier& barrier = *reinterpret_cast<Barrier*>(shared_of(one.rank, one.barrier));
        if (barrier.bytes < int(one.bytes)) return complain("more comes than a barrier expects"), true;
        barrier.change(0, -int(one.bytes));
    }
    return any;
}

// Those of every thread up to its first arrival at a barrier.
static bool copies_come() {
    bool any = false;
    const u32 running = block;
    for (u32 i = 0; i < block_count; i++) {
        enter(i);
        for (u32 t = first_thread; t < first_thread + block_dim.x; t++) {
            Fiber& fiber = fibers[t];
            u32 arrival = fiber.first;
            while (arrival < fiber.copying && fiber.copies[arrival].bytes) arrival++;
            if (arrival == fiber.copying) continue;
            for (u32 left = arrival + 1 - fiber.first; left; left--) fiber.land();
            any = true;
        }
    }
    enter(running);
    return any;
}

bool something_arrives() {
    return (turn % 2 ? a_box_comes() || copies_come() : copies_come() || a_box_comes()) || sums_come();
}

}  // namespace emulated

namespace ptx {

using emulated::Barrier;

constexpr u32 RANK = 24;  // an address in block r of a cluster has r + 1 from this bit on

inline u8* clustered(u32 address, u32 bytes) {
    const u32 rank = (address >> RANK) - 1, own = address & ((1 << RANK) - 1);
    if (rank >= emulated::block_count) emulated::fail("%x is not an address of a cluster", address);
    shared(own, bytes);  // it is one of any block
    if (!emulated::blocks[rank].alive) emulated::fail("thread %u needs a block that is gone", emulated::current);
    return emulated::shared_of(rank, own);
}

inline void mapa_shared__cluster_u32(u32& r, u32 address, u32 rank) { r = address | (rank + 1) << RANK; }
inline void send(u32 address, float x, float y, u32 bytes, u32 barrier) {
    using namespace emulated;
    memset(clustered(address, bytes), 0xff, bytes), clustered(barrier, 8);
    const u32 rank = (address >> RANK) - 1, own = (1 << RANK) - 1;
    if (sent_count == MOST_SENT || address % bytes || barrier >> RANK != address >> RANK) fail("no such number to send");
    if (blocks[rank].unfenced) fail("numbers for a barrier that is not fenced");
    sent[sent_count++] = {rank, address & own, barrier & own, bytes, {x, y}};
}
inline void st_async_shared__cluster_mbarrier__complete_tx__bytes_f32(u32 address, float v, u32 barrier) {
    send(address, v, 0, 4, barrier);
}
inline void st_async_shared__cluster_mbarrier__complete_tx__bytes_v2_f32(u32 address, float x, float y, u32 barrier) {
    send(address, x, y, 8, barrier);
}
inline void barrier_cluster_arrive_relaxed_aligned() {
    using namespace emulated;
    if (cluster_arrivals[current]) fail("thread %u arrives again before it has waited", current);
    cluster_arrivals[current] = cluster.generation + 1;
    if (++cluster.arrived == block_count * block_dim.x) cluster.arrived = 0, cluster.generation++;
}
inline void barrier_cluster_arrive_release_aligned() { barrier_cluster_arrive_relaxed_aligned(); }
__noinline__ static void barrier_cluster_wait_acquire_aligned() {
    using namespace emulated;
    if (!cluster_arrivals[current]) fail("thread %u waits and has not arrived", current);
    const u32 seen = cluster_arrivals[current] - 1;
    cluster_arrivals[current] = 0;
    if (cluster.generation == seen) wait_until_changed(cluster.generation, seen);
}

inline void bar_sync(u32 number, u32 threads) {
    if (number > 15 || threads % emulated::WARP) emulated::fail("no barrier: %u of %u threads", number, threads);
    emulated::meet(emulated::blocks[emulated::block].some[number], threads);
}
inline void bar_arrive(u32 number, u32 threads) { emulated::meet(emulated::blocks[emulated::block].some[number], threads, false); }
inline void setmaxnreg_dec_sync_aligned_u32(u32) {}
inline void setmaxnreg_inc_sync_aligned_u32(u32) {}
inline void griddepcontrol_launch_dependents() {}
inline void griddepcontrol_wait() {}
inline void fence_mbarrier_init_release_cluster() { emulated::blocks[emulated::block].unfenced = false; }
inline void fence_proxy_async_shared__cta() {
    emulated::Fiber& fiber = emulated::fibers[emulated::current];
    fiber.wrote_from = ~0u, fiber.wrote_to = 0;
}
inline void setp_ne_b32(bool& r, u32 a, u32 b) { r = a != b; }
inline void setp_ne_u32(bool& r, u32 a, u32 b) { r = a != b; }
inline void elect_sync(u32& chosen, bool& r, u32 mask) {
    chosen = __ffs(__ballot_sync(mask, true)) - 1;
    r = threadIdx.x % emulated::WARP == chosen;
}
inline void vote_sync_all_pred(bool& r, bool p, u32 mask) { r = __ballot_sync(mask, p) == ~0u; }
inline void st_relaxed_gpu_global_u32(u64 address, u32 v) { *reinterpret_cast<u32*>(address) = v; }

inline void mul_bf16x2(u32& r, u32 a, u32 b) {
    const auto rounded = [](float a, float b) { return widened_bfloat(narrowed_bfloat(a * b)); };
    r = 0;
    for (int i = 0; i < 32; i += 16) {
        const float product = unflushed(rounded, false, widened_bfloat(a >> i), widened_bfloat(b >> i));
        r |= u32(__float_as_int(product)) >> 16 << i;
    }
}

inline void stmatrix_sync_aligned_m8n8_x4_trans_shared_b16(u32 address, u32 x, u32 y, u32 z, u32 w) {
    const u32 lane = emulated::current % emulated::WARP;
    const auto* addresses = emulated::exchange(~0u, address);
    const u32 given[] = {x, y, z, w};
    emulated::Fiber& fiber = emulated::fibers[emulated::current];
    for (u32 i = 0; i < 4; i++)
        for (u32 e = 0; e < 2; e++) {  // the element in row 2 (lane % 4) + e and column lane / 4
            const auto row = u32(addresses[8 * i + lane % 4 * 2 + e][0]);
            memcpy(shared(row, 16) + lane / 4 * 2, reinterpret_cast<const u8*>(&given[i]) + 2 * e, 2);
            fiber.wrote_from = min(fiber.wrote_from, row), fiber.wrote_to = max(fiber.wrote_to, row + 16);
        }
    emulated::exchange(~0u, 0);
}

// Barriers in shared memory

inline Barrier& barrier(u32 address) { return *reinterpret_cast<Barrier*>(shared(address, 8)); }
inline void mbarrier_init_shared__cta_b64(u32 address, u32 arrivals) {
    barrier(address) = {0, arrivals, arrivals, 0};
    emulated::blocks[emulated::block].unfenced = true;
}
template <class Ignored>
inline void mbarrier_arrive_shared__cta_b64(Ignored, u32 address) {
    barrier(address).change(1, 0);
    emulated::pause();  // others may overtake
}
template <class Ignored>
inline void mbarrier_arrive_shared__cluster_b64(Ignored, u32 address) {
    reinterpret_cast<Barrier*>(clustered(address, 8))->change(1, 0);
    emulated::pause();
}
template <class Ignored>
inline void mbarrier_arrive_expect_tx_shared__cta_b64(Ignored, u32 address, u32 bytes) {
    Barrier& b = barrier(address);
    b.change(0, bytes), b.change(1, 0);
}
inline void mbarrier_try_wait_parity_shared__cta_b64(bool& done, u32 address, u32 parity) {
    const Barrier& b = barrier(address);
    const auto& word = reinterpret_cast<const u32&>(b);
    if (b.arrivals == 0xfff) emulated::fail("thread %u waits at a barrier that is none yet", emulated::current);
    while ((b.phase & 1) == parity) emulated::wait_until_changed(word, word);
    done = true;
}
inline void mbarrier_test_wait_parity_shared__cta_b64(bool& done, u32 address, u32 parity) {
    done = (barrier(address).phase & 1) != parity;
}
inline void mbarrier_try_wait_parity_acquire_cluster_shared__cta_b64(bool& done, u32 address, u32 parity) {
    mbarrier_try_wait_parity_shared__cta_b64(done, address, parity);
}
inline void cp_async_mbarrier_arrive_noinc_shared__cta_b64(u32 address) {
    one_more_copy() = {shared(address, 8), 0, {}, emulated::fibers[emulated::current].group};
}

// Boxes

inline void prefetch_tensormap(u64) {}

inline void come(u32 to, u64 map, const int (&at)[5], u32 barrier, u32 ranks) {
    using namespace emulated;
    if (coming_count == MOST_BOXES) fail("too many boxes");
    Box& box = coming[coming_count++];
    box = {reinterpret_cast<const Map*>(map), {at[0], at[1], at[2], at[3], at[4]}, to, barrier, ranks};
    const u32 bytes = box.map->bytes();
    if (map % 64 || ranks >> block_count || (box.map->swizzled && box.map->box[0] != 64)) fail("no such box");
    shared(to, bytes, 128), shared(barrier, 8);
    for (u32 rank = 0; rank < block_count; rank++) {
        if (!(ranks >> rank & 1)) continue;
        if (!blocks[rank].alive) fail("a box to a block that is gone");
        if (blocks[rank].unfenced) fail("a box for barriers that are not fenced");
        memset(shared_of(rank, to), 0xff, bytes);
    }
}

inline void cp_async_bulk_tensor_5d_shared__cluster_global_mbarrier__complete_tx__bytes(
    u32 to, u64 map, int k, int m, int i, int j, int l, u32 barrier) {
    come(to, map, {k, m, i, j, l}, barrier, 1 << emulated::block);
}
inline void cp_async_bulk_tensor_5d_shared__cluster_global_mbarrier__complete_tx__bytes_multicast__cluster(
    u32 to, u64 map, int k, int m, int i, int j, int l, u32 barrier, u32 ranks) {
    come(to, map, {k, m, i, j, l}, barrier, ranks);
}

inline void cp_async_bulk_tensor_5d_global_shared__cta_bulk_group(u64 map, int k, int m, int i, int j, int l, u32 from) {
    using namespace emulated;
    if (going_count == MOST_BOXES) fail("too many boxes");
    going[going_count++] = {reinterpret_cast<const Map*>(map), {k, m, i, j, l}, from, 0, 0, current, going_groups[current]};
    const u32 bytes = going[going_count - 1].map->bytes();
    shared(from, bytes, 128);
    for (u32 t = first_thread; t < first_thread + block_dim.x; t++)
        if (fibers[t].wrote_from < from + bytes && from < fibers[t].wrote_to)
            fail("a box from %x, where thread %u has written without a fence", from, t);
}
inline void cp_async_bulk_commit_group() { emulated::going_groups[emulated::current]++; }
inline void cp_async_bulk_wait_group_read(u32 pending) {
    using namespace emulated;
    u32 left = 0;
    for (u32 i = 0; i < going_count; i++) {
        const Box& box = going[i];
        if (box.thread != current || box.group + pending >= going_groups[current]) {
            going[left++] = box;
            continue;
        }
        box.map->each(box.at, [&](u8* to, u32 place) {
            if (to) memcpy(to, shared(address_in_box(*box.map, box.shared, place), 2), 2);
        });
    }
    going_count = left;
}

// Products of warpgroups

inline void wgmma_fence_sync_aligned() {
    emulated::exchange(~0u, 0);
    emulated::fenced[emulated::current / emulated::WARP] = true;
}
inline void wgmma_commit_group_sync_aligned() {
    emulated::exchange(~0u, 0);
    const u32 warp = emulated::current / emulated::WARP;
    if (emulated::current % emulated::WARP == 0) emulated::reading_groups[warp]++, emulated::fenced[warp] = false;
}

inline void wgmma_wait_group_sync_aligned(u32 pending) {
    using namespace emulated;
    exchange(~0u, 0);
    const u32 warp = current / WARP;
    if (current % WARP) return;
    u32 left = 0;
    for (u32 i = 0; i < reading_counts[warp]; i++) {
        const Reading& reading = readings[warp][i];
        if (reading.group + pending >= reading_groups[warp])
            readings[warp][left++] = reading;
        else if (reading.b.sum() != reading.sum)
            fail("what warp %u multiplied changed before it had waited", warp);
    }
    reading_counts[warp] = left;
}

// A warp's 16 rows of a times b[16 x n], which its descriptor says is in rows of 128 bytes, swizzled. Given are the
// lanes' registers of a, the descriptor and where their sums are. By the last lane for all; that sums are there before
// they are waited for is not seen.
__attribute__((optimize("O2"))) static void multiply_warpgroup(emulated::Words words, u32 n, bool adds, bool turned) {
    using namespace emulated;
    const Unflushed guard;
    const u64 described = words[0][2];
    const u32 apart = u32(described >> 16 & 0x3fff) << 4;
    if (described >> 46 != 1 << 16 || (described >> 32 & 0x3fff) != 64) fail("not such a descriptor: %llx", described);
    const OperandB operand = {u32(described & 0x3fff) << 4, n, apart, turned};
    const u32 start = operand.start, warp = current / WARP;
    if (start % 1024 >= (turned ? 1 : 128)) fail("a product's rows begin at %x", start);
    shared(start / 1024 * 1024, turned ? (n - 1) / 64 * apart + 16 * 128 : n * 128, 1024);
    if (!fenced[warp]) fail("a product of warp %u without a fence", warp);
    if (reading_counts[warp] == MOST_READINGS) fail("too many products");
    readings[warp][reading_counts[warp]++] = {operand, reading_groups[warp], operand.sum()};
    float a[16][16];
    for (u32 lane = 0; lane < WARP; lane++)
        for (u32 half = 0; half < 2; half++) {  // columns from 8 half on, of row lane / 4 and 8 further
            const Four values = widened_four(words[lane][half]);
            float* const to = &a[lane / 4][8 * half + 2 * (lane % 4)];
            to[0] = values[0], to[1] = values[1], to[128] = values[2], to[129] = values[3];
        }
    for (u32 column = 0; column < n; column += 8) {
        Eight b[16];
        for (u32 row = 0; row < 8; row += turned ? 4 : 1)
            for (u32 k = 0; k < 16; k += turned ? 1 : 4) {
                const Four values = widened_four(operand.four(column + row, k));
                for (u32 i = 0; i < 4; i++) b[turned ? k : k + i][turned ? row + i : row] = values[i];
            }
        for (u32 row = 0; row < 8; row++) {
            Eight sums = {}, below = {};
            for (u32 k = 0; k < 16; k++) sums += a[row][k] * b[k], below += a[row + 8][k] * b[k];
            for (u32 i = 0; i < 4; i++) {
                float** const to = reinterpret_cast<float**>(words[4 * row + i][3]) + column / 2;
                for (u32 j = 0; j < 4 && !adds; j++) *to[j] = 0;
                *to[0] += sums[2 * i], *to[1] += sums[2 * i + 1];
                *to[2] += below[2 * i], *to[3] += below[2 * i + 1];
            }
        }
    }
}

// The operands: n / 2 sums, four registers of a, the descriptor, and four constants: whether sums are added to, two signs,
// whether b is turned.
template <u32 N, class... Operands>
void multiply_asynchronously(Operands&... operands) {
    void* all[] = {const_cast<void*>(static_cast<const void*>(&operands))...};
    static_assert(sizeof...(Operands) == N / 2 + 9);
    const u32* const a[] = {static_cast<u32*>(all[N / 2]), static_cast<u32*>(all[N / 2 + 1]),
                            static_cast<u32*>(all[N / 2 + 2]), static_cast<u32*>(all[N / 2 + 3])};
    const auto pair = [](u32 low, u32 high) { return u64(high) << 32 | low; };
    const bool adds = *static_cast<int*>(all[N / 2 + 5]), turned = *static_cast<int*>(all[N / 2 + 8]);
    const u64 b = *static_cast<u64*>(all[N / 2 + 4]), to = reinterpret_cast<u64>(all);
    const u64 low = pair(*a[0], *a[1]), high = pair(*a[2], *a[3]);
    if (turned)
        emulated::together(~0u, [](emulated::Words words) { multiply_warpgroup(words, N, true, true); }, low, high, b, to);
    else if (adds)
        emulated::together(~0u, [](emulated::Words words) { multiply_warpgroup(words, N, true, false); }, low, high, b, to);
    else
        emulated::together(~0u, [](emulated::Words words) { multiply_warpgroup(words, N, false, false); }, low, high, b, to);
}

#define EMULATED_WGMMA(N)                                                                          \
    template <class... Operands>                                                                   \
    inline void wgmma_mma_async_sync_aligned_m64n##N##k16_f32_f16_f16(const Operands&... operands) { \
        multiply_asynchronously<N>(operands...);                                                   \
    }
EMULATED_WGMMA(16)
EMULATED_WGMMA(32)
EMULATED_WGMMA(48)
EMULATED_WGMMA(64)
EMULATED_WGMMA(96)
EMULATED_WGMMA(128)
EMULATED_WGMMA(144)
EMULATED_WGMMA(256)

}  // namespace ptx
