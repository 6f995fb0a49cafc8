// Scales in the fragment layout as products take them, of formats that are LIFTED (the picture is in core/tile.cuh): a
// block of threads for each row tile; and factors of the rows, of which ops/repack.cu has found the peaks.
#include "../core/ptx.cuh"
#include "../formats/lift.cuh"
#include CUQUANT_FORMAT

static_assert(LIFTED<Format>, "the format has no row plane");
static_assert(Format::BLOCK_BYTES == CUQUANT_BLOCK_BYTES, "host and device disagree about the format");

constexpr int THREADS = 256, ROWS = 16;
// Words of scales that a tile has: two scales of a row, or a scale and a minimum. A thread's are all of one row.
constexpr int WORDS = Format::SCALE_BYTES / 4;
static_assert(THREADS % WORDS == 0, "tiles end where threads do");

// `lost` becomes 1 where a scale or a minimum would not come back with all its bits.
extern "C" __global__ void __launch_bounds__(THREADS)
lift(u8* scale, u32* factors, const u32* peaks, int tiles_k, u32* lost) {
    const int column = threadIdx.x % WORDS, row8 = column / (Format::HAS_MIN ? 2 : 1) % 2;
    u32* const words = reinterpret_cast<u32*>(scale + s64(blockIdx.x) * tiles_k * Format::SCALE_BYTES);
    peaks += s64(blockIdx.x) * ROWS;
    const int L = lift_of(peaks[column / (WORDS / 8) + row8 * 8]);
    bool lossy = false;
    for (int w = threadIdx.x; w < tiles_k * WORDS; w += THREADS) {
        const u32 own = words[w], made = lifted<Format>(own, L, row8, 1);
        lossy |= lifted<Format>(made, L, row8, -1) != own;
        words[w] = made;
    }
    if (lossy) *lost = 1;
    const int g = threadIdx.x;
    if (g < 8)
        factors[s64(blockIdx.x) * 8 + g] = factor_of(lift_of(peaks[g])) | factor_of(lift_of(peaks[g + 8])) << 16;
}
