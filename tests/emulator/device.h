// One block of a GPU at a time, or a cluster of them, on one thread of the CPU: their threads are fibers that run until
// they wait for others.
// Included before a translated kernel source; the types are those of kernels/core/types.cuh.
#pragma once
#define _GLIBCXX_INCLUDE_NEXT_C_HEADERS  // C's own: C++'s takes a tenth longer to compile
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <utility>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef signed char s8;
typedef long long s64;

#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))

namespace emulated {

constexpr u32 WARP = 32, MOST_THREADS = 4096, MOST_BLOCKS = 16;  // of a cluster
constexpr u32 STACK = 256 << 10, SHARED = 256 << 10;

struct Dim {
    u32 x, y, z;
};

// An asynchronous copy on its way: it arrives when it is waited for, and not before. One of no bytes stands for the
// arrival, at a barrier, of those before it.
struct Copy {
    u8 *to, bytes, value[16];
    u32 group;
};

struct Fiber {
    void* stack;
    bool done;
    const u32* awaited;  // runs again when this is no longer `seen`
    u32 seen;
    Copy* copies;
    u32 copying, room, first, group;
    u32 wrote_from, wrote_to;  // shared memory that the copy engine is to read

    // The first of those on their way.
    void land() {
        const Copy& copy = copies[first++];
        if (copy.bytes)
            memcpy(copy.to, copy.value, copy.bytes);
        else
            copies_arrive(copy.to);
        if (first == copying) first = copying = 0;
    }

    static void copies_arrive(u8* barrier);
};

constexpr u32 WORDS = 5;
typedef u64 (*Words)[WORDS];  // of every lane

struct Warp {
    u32 arrived, generation;
    u64 words[2][WARP][WORDS];
};

// Some threads that wait for each other.
struct Meeting {
    u32 arrived, generation, threads;
};

struct Block {
    Dim index;
    u32 alive;
    Meeting all, some[16];  // __syncthreads; barriers by number
    bool any;               // what threads vote for
    bool unfenced;          // barriers in shared memory of which the copy engine does not know
    u8* kept;               // its shared memory while another block of its cluster runs
};

static Fiber fibers[MOST_THREADS];
static Warp warps[MOST_THREADS / WARP];
static Block blocks[MOST_BLOCKS];
static void* scheduler;
static u32 current, shared_bytes;
static u32 block, first_thread, block_count;  // the running block, its first fiber, the blocks of a cluster
static u32 turn;                              // of all that can run
static char* all_stacks;
static char failure[256];
static Dim grid_dim, block_dim;

// What arrives late (hopper.h, for GPUs of sm_90a): whether anything has; all of it is forgotten; nothing is left.
static bool something_arrives();
static void forget_arrivals();
static bool all_has_arrived();

// Saves the registers that a call keeps and goes on with another stack (System V, x86-64).
extern "C" void emulated_switch(void** from, void* to);
asm(".text\n.local emulated_switch\n.type emulated_switch, @function\nemulated_switch:\n"
    " push %rbp\n push %rbx\n push %r12\n push %r13\n push %r14\n push %r15\n"
    " mov %rsp, (%rdi)\n mov %rsi, %rsp\n"
    " pop %r15\n pop %r14\n pop %r13\n pop %r12\n pop %rbx\n pop %rbp\n ret\n");

[[noreturn]] inline void leave() {
    for (;;) emulated_switch(&fibers[current].stack, scheduler);
}

// The message is what the launch returns, which ends: at once where a thread fails.
template <class... Values>
void complain(const char* format, Values... values) {
    if (!failure[0]) snprintf(failure, sizeof failure, format, values...);
}

template <class... Values>
[[noreturn]] void fail(const char* format, Values... values) {
    complain(format, values...);
    leave();
}

// Where a word of several bytes is read or written that is not at a multiple of them (driver.py has g++ ask).
extern "C" [[noreturn]] __attribute__((visibility("hidden"))) void __ubsan_handle_type_mismatch_v1_abort(
    const void* what, u64 address) {
    struct { const char* file; u32 line, column; const void* type; u8 bits; } place;
    memcpy(&place, what, sizeof place);
    fail("line %u: %u bytes at %llx", place.line, 1u << place.bits, address);
}

inline bool ready(const Fiber& fiber) { return !fiber.done && (!fiber.awaited || *fiber.awaited != fiber.seen); }

// The running warp: its first thread, how many lanes have had their turn in this round, and whether the last was first.
static struct {
    u32 first, had;
    bool backward;
} lanes;

// The stack of the next lane that can run, which is the current one then; null at the end of a round, where the
// scheduler sets the next.
inline void* next_lane() {
    while (lanes.had < WARP && !failure[0]) {
        const u32 lane = lanes.had++;
        Fiber& fiber = fibers[current = lanes.first + (lanes.backward ? WARP - 1 - lane : lane)];
        if (ready(fiber)) return fiber.awaited = nullptr, fiber.stack;
    }
    return nullptr;
}

// A lane that waits goes on with the next one; the last of a round, and one that ends or fails, with the scheduler.
inline void wait_until_changed(const u32& counter, u32 seen) {
    Fiber& fiber = fibers[current];
    fiber.awaited = &counter, fiber.seen = seen;
    void* const next = next_lane();
    emulated_switch(&fiber.stack, next ? next : scheduler);
}

// All others go on first.
inline void pause() { wait_until_changed(turn, turn); }

// So many threads meet.
inline void meet(Meeting& meeting, u32 threads, bool waits = true) {
    const u32 seen = meeting.generation;
    if (meeting.arrived && meeting.threads < threads)
        fail("thread %u meets %u threads, others %u", current, threads, meeting.threads);
    meeting.threads = threads;
    if (++meeting.arrived == threads)
        meeting.arrived = 0, meeting.generation++;
    else if (waits)
        wait_until_changed(meeting.generation, seen);
}

// All lanes of a warp give words, of which the last to come makes others, which all see.
template <class Make, class... Given>
Words together(u32 mask, Make make, Given... given) {
    if (mask != ~0u) fail("thread %u: a warp's instruction for the lanes %x alone", current, mask);
    Warp& warp = warps[current / WARP];
    const u32 seen = warp.generation;
    const Words words = warp.words[seen & 1];
    u64* own = words[current % WARP];
    ((*own++ = given), ...);
    if (++warp.arrived == WARP)
        make(words), warp.arrived = 0, warp.generation++;
    else
        wait_until_changed(warp.generation, seen);
    return words;
}

__noinline__ static Words exchange(u32 mask, u64 word) {
    return together(mask, [](Words) {}, word);
}

template <class To, class From>
inline To bits_of(From from) {
    To to{};
    memcpy(&to, &from, sizeof(from) < sizeof(to) ? sizeof(from) : sizeof(to));
    return to;
}

template <class T>
inline T from_lane(u32 mask, T value, u32 lane) {
    return bits_of<T>(exchange(mask, bits_of<u64>(value))[lane % WARP][0]);
}

}  // namespace emulated

namespace {
alignas(1024) u8 dynamic[emulated::SHARED];  // dynamic_shared() of kernels/core/ptx.cuh declares it
}

namespace emulated {

// Arrays of fixed size (translate.py), for as long as the library lives.
alignas(1024) static u8 fixed_memory[48 << 10];
static u32 fixed_bytes;

template <class T>
T& fixed(u32 edge = alignof(T)) {
    u8* const start = fixed_memory + (fixed_bytes + edge - 1) / edge * edge;
    fixed_bytes = start + sizeof(T) - fixed_memory;
    if (fixed_bytes > sizeof fixed_memory) fail("too much shared memory");
    memset(start, 0xff, sizeof(T));
    return *reinterpret_cast<T*>(start);
}

}  // namespace emulated

struct alignas(8) int2 { int x, y; };
struct alignas(8) uint2 { u32 x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(16) uint4 { u32 x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

#define threadIdx (emulated::Dim{emulated::current - emulated::first_thread, 0, 0})
#define blockIdx emulated::blocks[emulated::block].index
#define gridDim emulated::grid_dim
#define blockDim emulated::block_dim

template <class T>
inline T min(T a, T b) { return b < a ? b : a; }
template <class T>
inline T max(T a, T b) { return a < b ? b : a; }
inline float abs(float v) { return fabsf(v); }
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline u32 min(u32 a, int b) { return min(a, u32(b)); }
inline u32 min(int a, u32 b) { return min(u32(a), b); }
inline u32 max(u32 a, int b) { return max(a, u32(b)); }
inline u32 max(int a, u32 b) { return max(u32(a), b); }

inline float __int_as_float(int v) { return __builtin_bit_cast(float, v); }
inline int __float_as_int(float v) { return __builtin_bit_cast(int, v); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __expf(float x) { return expf(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline int __popc(u32 v) { return __builtin_popcount(v); }
inline u32 __brev(u32 v) {
    u32 reversed = 0;
    for (int bit = 0; bit < 32; bit++) reversed |= (v >> bit & 1) << (31 - bit);
    return reversed;
}
inline int __ffs(u32 v) { return __builtin_ffs(v); }
inline u32 __funnelshift_l(u32 low, u32 high, u32 by) { return u32((u64(high) << 32 | low) << (by & 31) >> 32); }
inline u32 __funnelshift_r(u32 low, u32 high, u32 by) { return u32((u64(high) << 32 | low) >> (by & 31)); }
inline u32 __funnelshift_rc(u32 low, u32 high, u32 by) {
    return u32((u64(high) << 32 | low) >> (by < 32 ? by : 32));
}
constexpr int __float2int_rz(float x) {
    return x != x ? 0 : x >= 0x1p31f ? 0x7fffffff : x < -0x1p31f ? -0x7fffffff - 1 : int(x);
}
template <class T>
constexpr int to_int(T v) { return int(v); }
constexpr int to_int(float v) { return __float2int_rz(v); }
inline int __float2int_rn(float x) { return __float2int_rz(rintf(x)); }

inline u32 __vmaxu2(u32 a, u32 b) { return max(a & 0xffff, b & 0xffff) | max(a >> 16, b >> 16) << 16; }
inline u32 __vminu2(u32 a, u32 b) { return min(a & 0xffff, b & 0xffff) | min(a >> 16, b >> 16) << 16; }

inline u32 __byte_perm(u32 a, u32 b, u32 selector) {
    u32 r = 0;
    for (int i = 0; i < 4; i++) r |= u32((u64(b) << 32 | a) >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
    return r;
}

inline int __dp4a(int a, int b, int c) {
    for (int i = 0; i < 4; i++) c += s8(a >> 8 * i) * s8(b >> 8 * i);
    return c;
}

inline u32 __dp4a(u32 a, u32 b, u32 c) {
    for (int i = 0; i < 4; i++) c += u8(a >> 8 * i) * u8(b >> 8 * i);
    return c;
}

template <class T>
inline T __ldcg(const T* p) { return *p; }
template <class T>
inline void __stcg(T* p, T v) { *p = v; }
inline void __threadfence() {}

template <class T, class V>
inline T atomicAdd(T* p, V v) { T old = *p; *p = T(old + v); return old; }
template <class T, class V>
inline T atomicMin(T* p, V v) { T old = *p; *p = min(old, T(v)); return old; }
template <class T, class V>
inline T atomicMax(T* p, V v) { T old = *p; *p = max(old, T(v)); return old; }

__noinline__ static void __syncthreads() {
    emulated::Block& block = emulated::blocks[emulated::block];
    emulated::meet(block.all, block.alive);
}

__noinline__ static bool __syncthreads_or(bool v) {
    emulated::Block& block = emulated::blocks[emulated::block];
    block.any |= v;
    __syncthreads();
    const bool any = block.any;
    __syncthreads();
    block.any = false;
    __syncthreads();
    return any;
}

inline void __syncwarp() { emulated::exchange(~0u, 0); }

template <class T>
inline T __shfl_sync(u32 mask, T v, int lane) { return emulated::from_lane(mask, v, lane); }
template <class T>
inline T __shfl_xor_sync(u32 mask, T v, int by) { return emulated::from_lane(mask, v, emulated::current ^ by); }
template <class T>
inline T __shfl_up_sync(u32 mask, T v, int by) {
    const int lane = emulated::current % emulated::WARP;
    return emulated::from_lane(mask, v, lane < by ? lane : lane - by);
}

__noinline__ static u32 __ballot_sync(u32 mask, bool p) {
    return u32(emulated::together(mask, [](emulated::Words words) {
        for (u32 lane = 1; lane < emulated::WARP; lane++) words[0][0] |= words[lane][0] << lane;
    }, p)[0][0]);
}

inline bool __any_sync(u32 mask, bool p) { return __ballot_sync(mask, p) != 0; }

__noinline__ static u32 __reduce_min_sync(u32 mask, u32 v) {
    return u32(emulated::together(mask, [](emulated::Words words) {
        for (u32 lane = 1; lane < emulated::WARP; lane++) words[0][0] = min(words[0][0], words[lane][0]);
    }, v)[0][0]);
}

inline int __reduce_min_sync(u32 mask, int v) { return int(__reduce_min_sync(mask, u32(v) ^ 1u << 31) ^ 1u << 31); }

__noinline__ static u32 __reduce_max_sync(u32 mask, u32 v) {
    return u32(emulated::together(mask, [](emulated::Words words) {
        for (u32 lane = 1; lane < emulated::WARP; lane++) words[0][0] = max(words[0][0], words[lane][0]);
    }, v)[0][0]);
}

__noinline__ static int __reduce_add_sync(u32 mask, int v) {
    return int(emulated::together(mask, [](emulated::Words words) {
        for (u32 lane = 1; lane < emulated::WARP; lane++) words[0][0] += words[lane][0];
    }, u32(v))[0][0]);
}

// The dynamic memory is at the shared address 0, and fixed arrays are behind all of it.
inline u64 __cvta_generic_to_shared(const void* pointer) {
    const u8* p = static_cast<const u8*>(pointer);
    const u64 place = p - emulated::fixed_memory;
    return place < emulated::fixed_bytes ? emulated::SHARED + place : p - dynamic;
}
inline void* __cvta_shared_to_generic(u64 address) {
    return address < emulated::SHARED ? dynamic + address : emulated::fixed_memory + (address - emulated::SHARED);
}

namespace emulated {

static void (*kernel)();

static void thread() {
    kernel();
    Fiber& fiber = fibers[current];
    if (fiber.first != fiber.copying && fiber.copies[fiber.copying - 1].bytes)
        fail("thread %u ends before its asynchronous copies are waited for", current);
    Block& own = blocks[block];
    fiber.done = true, own.alive--;
    if (own.all.arrived && own.all.arrived == own.alive) own.all.arrived = 0, own.all.generation++;
    leave();
}

// Whether any thread of a warp could run. Each runs until it waits; the order of the lanes turns from time to time.
static bool run_warp(u32 first, bool backward) {
    bool ran = false;
    for (bool any = true; any && !failure[0];) {
        any = false, lanes = {first, 0, backward};
        while (void* const stack = next_lane()) {
            emulated_switch(&scheduler, stack);
            any = ran = true;
        }
    }
    return ran;
}

inline u32 filled_bytes() { return min(shared_bytes + 4096, SHARED); }

// A block of a cluster goes on, with its shared memory in place of another's.
static void enter(u32 next) {
    if (next != block) {
        u8 *const own = blocks[block].kept, *const other = blocks[next].kept;
        memcpy(own, dynamic, filled_bytes()), memcpy(own + SHARED, fixed_memory, sizeof fixed_memory);
        memcpy(dynamic, other, filled_bytes()), memcpy(fixed_memory, other + SHARED, sizeof fixed_memory);
    }
    block = next, first_thread = next * block_dim.x;
}

// What is at a shared address of a block, running or not.
inline u8* shared_of(u32 rank, u32 address) {
    if (rank != block) return blocks[rank].kept + address;
    return address < SHARED ? dynamic + address : fixed_memory + (address - SHARED);
}

// Warps of the running block, in both orders: a barrier that is missing shows in one of them.
static bool run_warps(bool backward) {
    const u32 count = block_dim.x / WARP;
    bool ran = false;
    for (u32 i = 0; i < count; i++) ran |= run_warp(first_thread + (backward ? count - 1 - i : i) * WARP, backward);
    return ran;
}

// Shared memory begins as NaN, and what follows the launch's part of it stays so.
static void start_block(Dim index) {
    Block& own = blocks[block];
    u8* const kept = own.kept;
    own = {index, block_dim.x};
    own.kept = kept;
    memset(dynamic, 0xff, filled_bytes()), memset(fixed_memory, 0xff, sizeof fixed_memory);
    for (u32 i = first_thread; i < first_thread + block_dim.x; i++) {
        Fiber& fiber = fibers[i];
        memset(all_stacks + u64(i) * STACK, 0x5a, 8);  // where no stack should reach
        void** top = reinterpret_cast<void**>(all_stacks + u64(i + 1) * STACK - 64);
        *--top = nullptr, *--top = reinterpret_cast<void*>(thread);
        fiber.stack = top - 6, fiber.done = false, fiber.awaited = nullptr;
        fiber.copying = fiber.first = fiber.group = 0;
        fiber.wrote_from = ~0u, fiber.wrote_to = 0;
        warps[i / WARP].arrived = 0;
    }
}

static void end_block() {
    for (u32 i = shared_bytes; i < filled_bytes(); i++)
        if (dynamic[i] != 0xff) complain("written beyond %u shared bytes", shared_bytes);
    for (u32 i = first_thread; i < first_thread + block_dim.x; i++) {
        if (fibers[i].first != fibers[i].copying) complain("a block ends before copies of thread %u arrive", i);
        for (u32 byte = 0; byte < 8; byte++)
            if (all_stacks[u64(i) * STACK + byte] != 0x5a) complain("thread %u needs a larger stack", i);
    }
}

// What is asked for arrives late, and warps run by turns; or it arrives at once, and the first warp that can run does, of
// the first block or from the last one on. Whether anything ran, or arrived.
enum Order { LATE, FIRST, LAST };

static bool run_some(Order order, bool& backward) {
    bool ran = false;
    turn++;
    if (order == LATE) {
        for (u32 i = 0; i < block_count && !failure[0]; i++) {
            enter(i);
            while (run_warps(backward)) ran = true, backward = !backward;
        }
        return ran || something_arrives();
    }
    while (something_arrives()) ran = true;
    const u32 warps = block_dim.x / WARP, all = warps * block_count;
    for (u32 i = 0; i < all && !failure[0]; i++) {
        const u32 warp = order == LAST ? all - 1 - i : i;
        enter(warp / warps);
        if (run_warp(warp * WARP, backward)) return true;
    }
    return ran;
}

// The blocks of a cluster, of which the first is given.
static void run_blocks(Dim index, bool backward) {
    static u32 clusters;
    const auto order = Order(clusters++ % 3);
    forget_arrivals();
    for (u32 i = 0; i < block_count; i++, index.x++) enter(i), start_block(index);
    while (!failure[0]) {
        u32 alive = 0;
        for (u32 i = 0; i < block_count; i++) alive += blocks[i].alive;
        if (!alive) break;
        if (!run_some(order, backward)) complain("%u threads wait for what never comes", alive);
        backward = !backward;
    }
    for (u32 i = 0; i < block_count && !failure[0]; i++) enter(i), end_block();
    if (!failure[0] && !all_has_arrived()) complain("blocks end before copies arrive");
    enter(0);
}

// Whether operations of floats take subnormal numbers, given or made, for zeros, as CuPy has them compiled (-ftz=true);
// PTX that is written out takes them as they are.
static u32 modes[2];  // of the processor: without, and so

inline void flush(bool on) { __builtin_ia32_ldmxcsr(modes[on]); }

struct Unflushed {
    Unflushed() { flush(false); }
    ~Unflushed() { flush(true); }
};

static const char* run(void (*body)(), const u32* grid, u32 threads, u32 shared, u32 cluster, char* stacks) {
    kernel = body, shared_bytes = shared, block_count = cluster, all_stacks = stacks, failure[0] = 0;
    grid_dim = {grid[0], grid[1], grid[2]}, block_dim = {threads, 1, 1};
    if (threads % WARP || threads > 1024 || threads * cluster > MOST_THREADS || cluster > MOST_BLOCKS ||
        grid[0] % cluster || shared > SHARED)
        return "no such block";
    for (u32 i = 0; i < cluster && cluster > 1; i++)
        if (!blocks[i].kept) blocks[i].kept = static_cast<u8*>(malloc(SHARED + sizeof fixed_memory));
    bool backward = false;
    modes[0] = __builtin_ia32_stmxcsr(), modes[1] = modes[0] | 0x8040;
    flush(true);
    for (u32 z = 0; z < grid[2]; z++)
        for (u32 y = 0; y < grid[1]; y++)
            for (u32 x = 0; x < grid[0] && !failure[0]; x += cluster, backward = !backward)
                run_blocks({x, y, z}, backward);
    flush(false);
    return failure[0] ? failure : nullptr;
}

// A launch's parameters, aligned as their types are.
template <size_t I, class T>
struct Parameter {
    alignas(64) static inline u8 copy[sizeof(T)];
    static const T& value() { return *reinterpret_cast<const T*>(copy); }
};

template <auto ENTRY, class... P, size_t... I, class... Rest>
const char* launch(std::index_sequence<I...>, void (*)(P...), void** parameters, Rest... rest) {
    (memcpy(Parameter<I, P>::copy, parameters[I], sizeof(P)), ...);
    return run([] { ENTRY(Parameter<I, P>::value()...); }, rest...);
}

template <class... P>
std::index_sequence_for<P...> indices(void (*)(P...)) { return {}; }

template <class... P>
const u32* sizes(void (*)(P...)) {
    static const u32 all[] = {sizeof(P)..., 0};
    return all;
}

}  // namespace emulated

// What the driver calls: null, or what went wrong; and the sizes of the parameters, with a zero behind.
#define EMULATED_KERNEL(name)                                                                                \
    extern "C" const char* emulated_##name(void** parameters, const u32* grid, u32 threads, u32 shared,      \
                                           u32 cluster, char* stacks) {                                      \
        return emulated::launch<name>(emulated::indices(name), name, parameters, grid, threads, shared,      \
                                      cluster, stacks);                                                      \
    }                                                                                                        \
    extern "C" const u32* emulated_sizes_##name() { return emulated::sizes(name); }
